"""The backend against the definition: every query on its own, in float64, over contiguous histories, with the same mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from window_sinks import Settings
from window_sinks.backend import WindowSinks

from core.interfaces import Batch, KVSpec, Prologue

NONE = Prologue(None, None, 1e-6, torch.empty(0))
Chunk = tuple[int, int, list[int]]  # start, count, blocks


def visible(query: int, key: int, settings: Settings) -> bool:
    """The mask in one line."""
    return key <= query and (query - key < settings.window or key < settings.sinks)


def build(settings: Settings, spec: KVSpec, blocks: int, block_size: int) -> WindowSinks:
    """Its cache is full of NaN: nothing may be read that was not written."""
    backend = WindowSinks(settings, SimpleNamespace(device=torch.device("cpu")))
    backend.allocate(spec, blocks, block_size)
    backend.keys.fill_(torch.nan)
    backend.values.fill_(torch.nan)
    return backend


def make_batch(chunks: list[Chunk], block_size: int) -> Batch:
    table = np.zeros((len(chunks), max(len(blocks) for *_, blocks in chunks)), np.int32)
    for row, (_, _, blocks) in enumerate(chunks):
        table[row, : len(blocks)] = blocks
    counts = np.array([count for _, count, _ in chunks])
    rows = np.repeat(np.arange(len(chunks)), counts)
    positions = np.concatenate([np.arange(start, start + count) for start, count, _ in chunks])
    places = table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    cu_q = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    lens = np.array([start + count for start, count, _ in chunks], np.int32)
    host = np.zeros(len(rows), np.int64), positions, cu_q, lens, table, places, cu_q[1:].astype(np.int64) - 1
    return Batch(*map(torch.from_numpy, host), int(counts.max()), int(lens.max()))  # type: ignore[arg-type]


class Definition:
    def __init__(self, spec: KVSpec, settings: Settings) -> None:
        self.spec, self.settings, self.history = spec, settings, dict[Any, Any]()

    def forward(self, layer: int, q: Any, k: Any, v: Any, chunks: list[Chunk], names: list[int]) -> torch.Tensor:
        q, k, v = (x.double().numpy() for x in (q, k, v))
        out, at = np.zeros_like(q), 0
        for (start, count, _), name in zip(chunks, names, strict=True):
            for i in range(count):
                self.history[layer, name, start + i] = k[at + i], v[at + i]
            for i, head in np.ndindex(count, q.shape[1]):
                out[at + i, head] = self._one(layer, name, start + i, q[at + i, head], head)
            at += count
        return torch.from_numpy(out)

    def _one(self, layer: int, name: int, position: int, query: Any, head: int) -> Any:
        kv = head * self.spec.num_kv_heads // self.spec.num_heads
        past = [self.history[layer, name, p] for p in range(position + 1) if visible(position, p, self.settings)]
        scores = np.array([query @ key[kv] for key, _ in past]) * self.spec.scale
        weights = np.exp(scores - scores.max())
        return (weights[:, None] * np.array([value[kv] for _, value in past])).sum(0) / weights.sum()


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 3), (5, 2), (7, 20), (100, 0)])
def test_random_steps_equal_the_definition(window: int, sinks: int, block_size: int) -> None:
    """Prompts, chunks and decodes mixed at random, grouped heads, several layers."""
    rng, settings = np.random.default_rng([window, sinks, block_size]), Settings(window, sinks)
    spec = KVSpec(2, 6, 2, 8, torch.float32)
    backend, definition = build(settings, spec, 200, block_size), Definition(spec, settings)
    free = rng.permutation(np.arange(1, 200)).tolist()
    seats: dict[int, tuple[int, list[int]]] = {name: (0, []) for name in range(4)}
    for step in range(4):
        chunks, names = [], [name for name in seats if step == 0 or rng.random() < 0.8] or [0]
        for name in names:
            start, blocks = seats[name]
            count = 1 if start and rng.random() < 0.6 else int(rng.integers(1, 14))
            while len(blocks) * block_size < start + count:
                blocks.append(free.pop())
            seats[name] = start + count, blocks
            chunks.append((start, count, list(blocks)))
        batch = make_batch(chunks, block_size)
        state = backend.plan(batch)
        for layer in range(spec.num_layers):
            q, k, v = (torch.from_numpy(rng.standard_normal((len(batch.tokens), n, 8), np.float32)) for n in (6, 2, 2))
            got = backend.forward(layer, q, k, v, batch, state, NONE)
            torch.testing.assert_close(got.double(), definition.forward(layer, q, k, v, chunks, names), rtol=0, atol=1e-5)


def test_what_a_decode_reads_does_not_grow() -> None:
    """At position 999 with window 10 and 4 sinks: 14 places."""
    backend = build(Settings(10, 4), KVSpec(1, 1, 1, 8, torch.float32), 70, 16)
    (reads,) = backend.plan(make_batch([(999, 1, list(range(1, 64)))], 16))
    assert reads.visible.shape == (1, 14) and reads.visible.all()


def test_moved_blocks_keep_their_content() -> None:
    """In order: a block may be the target of one pair and the source of the next."""
    backend = build(Settings(), KVSpec(2, 1, 1, 8, torch.float32), 5, 2)
    for tensor in (backend.keys, backend.values):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    before = backend.keys.unflatten(1, (-1, 2)).clone()
    backend.move(np.array([[1, 2], [2, 3]], np.int32))
    after = backend.keys.unflatten(1, (-1, 2))
    assert (after[:, 2] == before[:, 1]).all() and (after[:, 3] == before[:, 1]).all() and (after[:, 4] == before[:, 4]).all()


@pytest.mark.parametrize(("values", "text"), [({"window": 0}, "window must be .* >= 1, got 0"), ({"sinks": -1}, "sinks")])
def test_settings_are_checked(values: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings(**values)
