"""Batches over a paged cache, and the dense definition that a backend's answers are compared with.

T tokens of a step, n tokens of a chunk, L positions of its request, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.interfaces import AttentionBackend, Batch, KVSpec, Prologue
from core.prologue import apply_prologue

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """What a backend is asked to handle."""

    block_size: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str

    def spec(self) -> KVSpec:
        return KVSpec(LAYERS, self.heads, self.kv_heads, self.head_size, getattr(torch, self.dtype))


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + count) of the request `name`, whose blocks are `blocks`."""

    name: str
    start: int
    count: int
    blocks: Sequence[int]


PADDING = Chunk("padding", 0, 1, (0,))


def make_batch(chunks: Sequence[Chunk], block_size: int, device: Any, stale: Sequence[int] = (), bound: int = 0) -> Batch:
    """stale: block ids for entries of the table beyond a row's length, as former requests leave them. bound: added to the
    upper bounds max_q and max_kv."""
    width = max(len(chunk.blocks) for chunk in chunks) + len(stale)
    table = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        table[row] = np.resize(np.asarray(stale or (0,), np.int32), width)
        table[row, : len(chunk.blocks)] = chunk.blocks
        table[row] *= chunk is not PADDING
    counts = np.array([chunk.count for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    rows = np.repeat(np.arange(len(chunks)), counts)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    slots = table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    cu_q = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    host = (np.zeros(len(rows), np.int64), positions, cu_q, (starts + counts).astype(np.int32), table, slots, cu_q[1:] - 1)
    tokens, places, bounds, lens, blocks, kv_slots, last = (torch.from_numpy(x.copy()).to(device) for x in host)
    return Batch(
        tokens=tokens,
        positions=places,
        cu_q=bounds,
        kv_lens=lens,
        block_table=blocks,
        kv_slots=kv_slots,
        last=last.long(),
        max_q=int(counts.max()) + bound,
        max_kv=int((starts + counts).max()) + bound,
        num_decodes=int(np.cumprod(counts == 1).sum()),
        shared_blocks=_shared(chunks, block_size),
    )


def _shared(chunks: Sequence[Chunk], block_size: int) -> int:
    real = [chunk for chunk in chunks if chunk is not PADDING]
    if len(real) < 2:
        return 0
    most = min(chunk.start // block_size for chunk in real)
    same = (len({tuple(chunk.blocks[:n]) for chunk in real}) == 1 for n in range(1, most + 1))
    return next((n for n, equal in enumerate(same) if not equal), most)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [n, H, D], k and v [L, K, D], visible [n, L] bool -> [n, H, D]; float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, v)


def causal(queries: Tensor, keys: Tensor) -> Tensor:
    """queries [n, 1] and keys [1, L] are positions -> [n, L], True where a query sees a key."""
    return keys <= queries


@dataclass
class Trial:
    """One backend with its cache, and beside it the contiguous float64 history of every request."""

    backend: AttentionBackend
    shape: Shape
    blocks: int
    device: Any
    definition: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor] = softmax_attention
    mask: Callable[[Tensor, Tensor], Tensor] = causal
    seed: int = 0
    history: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict)  # (layer, name) -> k, v [L, K, D]
    tables: dict[str, list[int]] = field(default_factory=dict)  # name -> blocks
    lengths: dict[str, int] = field(default_factory=dict)  # name -> positions given out by `chunk`

    def __post_init__(self) -> None:
        self.spec = self.shape.spec()
        self.free = random.Random(self.seed).sample(range(1, self.blocks), self.blocks - 1)
        self.generator = torch.Generator().manual_seed(self.seed)
        angles = torch.rand(8192, self.shape.head_size // 2, generator=self.generator) * 6
        norms = torch.rand(2, self.shape.head_size, generator=self.generator).to(self.spec.dtype) + 0.5
        table = torch.cat((angles.cos(), angles.sin()), 1)
        self.prologue = Prologue(norms[0].to(self.device), norms[1].to(self.device), 1e-6, table.to(self.device))

    def chunk(self, name: str, count: int) -> Chunk:
        """The next `count` tokens of a request, in blocks of its own where it needs more."""
        start, blocks = self.lengths.get(name, 0), self.tables.setdefault(name, [])
        self.lengths[name] = start + count
        while len(blocks) * self.shape.block_size < start + count:
            blocks.append(self.free.pop())
        return Chunk(name, start, count, tuple(blocks))

    def share(self, name: str, other: str, blocks: int) -> None:
        """A new request finds the leading blocks of another one in the cache."""
        positions = blocks * self.shape.block_size
        self.tables[name], self.lengths[name] = self.tables[other][:blocks], positions
        for layer in range(LAYERS):
            if (layer, other) in self.history:
                k, v = self.history[layer, other]
                self.history[layer, name] = k[:positions], v[:positions]

    def poison(self) -> None:
        """NaN in every place of every block: whatever is read without having been written shows."""
        size = self.shape.block_size
        batch = make_batch([Chunk("", 0, size, (block,)) for block in range(self.blocks)], size, self.device)
        q, k, v = (x * float("nan") for x in self.packed(len(batch.tokens)))
        state = self.backend.plan(batch)
        for layer in range(LAYERS):
            self.backend.forward(layer, q, k, v, batch, state, self.prologue)

    def packed(self, tokens: int) -> list[Tensor]:
        """q, k, v as strided views of one buffer, as a merged projection leaves them."""
        heads, kv, size = self.shape.heads, self.shape.kv_heads, self.shape.head_size
        buffer = torch.randn(tokens, (heads + 2 * kv) * size, generator=self.generator).to(self.spec.dtype).to(self.device)
        return [x.unflatten(1, (-1, size)) for x in buffer.split([heads * size, kv * size, kv * size], dim=1)]

    def step(self, chunks: Sequence[Chunk], state: Any = None, parents: Mapping[str, str] | None = None, **more: Any) -> Any:
        """One step of all layers, each compared with the definition -> what `plan` answered.

        parents: requests whose prefix another one stores in this very step; more: see `make_batch`.
        """
        batch = make_batch(chunks, self.shape.block_size, self.device, **more)
        state = self.backend.plan(batch, state)
        for layer in range(LAYERS):
            got, want = self._layer(layer, chunks, batch, state, self.packed(len(batch.tokens)), parents or {})
            self.compare(layer, chunks, got, want)
        return state

    def answer(self, layer: int, chunks: Sequence[Chunk], qkv: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(the backend's answer to given q, k, v, the definition's in float64)"""
        batch = make_batch(chunks, self.shape.block_size, self.device)
        return self._layer(layer, chunks, batch, self.backend.plan(batch), qkv, {})

    def _layer(
        self, layer: int, chunks: Sequence[Chunk], batch: Batch, state: Any, qkv: Sequence[Tensor], parents: Mapping[str, str]
    ) -> tuple[Tensor, Tensor]:
        q, k, v = qkv
        ready = q, k
        if self.backend.fuses_prologue:
            ready = apply_prologue(q, k, batch.positions, self.prologue)
        got = self.backend.forward(layer, q, k, v, batch, state, self.prologue)
        assert got.shape == q.shape, f"forward gave {tuple(got.shape)} for q of {tuple(q.shape)}"
        assert got.dtype == q.dtype, f"forward gave {got.dtype} for {q.dtype}"
        return got, self.define(layer, chunks, ready[0], ready[1], v, parents)

    def define(
        self, layer: int, chunks: Sequence[Chunk], q: Tensor, k: Tensor, v: Tensor, parents: Mapping[str, str]
    ) -> Tensor:
        """All stores precede all reads; [T, H, D] float64."""
        parts = [x.double().cpu().split([chunk.count for chunk in chunks]) for x in (q, k, v)]
        stores = list(zip(chunks, parts[1], parts[2], strict=True))
        for chunk, keys, values in sorted(stores, key=lambda store: store[0].name in parents):
            past = self.history.get((layer, parents.get(chunk.name, chunk.name)), (keys[:0], values[:0]))
            old_keys, old_values = (old[: chunk.start] for old in past)
            self.history[layer, chunk.name] = torch.cat((old_keys, keys)), torch.cat((old_values, values))
        return torch.cat([self._one(layer, chunk, part) for chunk, part in zip(chunks, parts[0], strict=True)])

    def _one(self, layer: int, chunk: Chunk, q: Tensor) -> Tensor:
        k, v = self.history[layer, chunk.name]
        assert len(k) == chunk.start + chunk.count, "the test itself is wrong: a gap in the history"
        queries = torch.arange(chunk.start, chunk.start + chunk.count)[:, None]
        return self.definition(q, k, v, self.mask(queries, torch.arange(len(k))[None]), self.spec.scale)

    def compare(self, layer: int, chunks: Sequence[Chunk], got: Tensor, want: Tensor) -> None:
        """Padding may hold anything finite or not; of the others nothing may be off by more than the dtype's rounding."""
        tokens = [(chunk, chunk.start + i) for chunk in chunks for i in range(chunk.count)]
        real = torch.tensor([chunk is not PADDING for chunk, _ in tokens])
        error = (got.double().cpu() - want).abs().amax(dim=(1, 2)).nan_to_num(nan=float("inf"))[real]
        worst = int(error.argmax())
        chunk, position = [token for token, kept in zip(tokens, real.tolist(), strict=True) if kept][worst]
        assert error[worst] <= TOLERANCE[self.spec.dtype] * max(1.0, float(want[real].abs().max())), (
            f"{self.shape}: layer {layer}, {chunk}: position {position} is off by {float(error[worst]):.2g}"
        )
