"""Attention backends: reference against an independent dense definition in float64, sdpa against the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.interfaces import Batch, KVSpec, Prologue
from plugins.attention import entry, sdpa
from plugins.attention.reference import Reference
from plugins.attention.sdpa import Sdpa

torch.set_num_threads(1)
BACKENDS = pytest.mark.parametrize("backend", [Reference, Sdpa])
NONE = Prologue(None, None, 1e-6, torch.empty(0))
NAN = float("nan")


def build(cls, spec, blocks, block_size, fill=NAN) -> Any:
    """A backend whose cache holds `fill` everywhere."""
    made = cls(None, SimpleNamespace(device=torch.device("cpu")))
    made.allocate(spec, blocks, block_size)
    for tensor in storage(made):
        tensor.fill_(fill)
    return made


def storage(backend):
    return [backend.cache] if isinstance(backend, Sdpa) else [backend.keys, backend.values]


def snapshot(backend, blocks, block_size):
    """[blocks, bytes] of every block over all layers."""
    parts = []
    for tensor in storage(backend):
        dim = 2 if isinstance(backend, Sdpa) else 1
        parts.append(tensor.unflatten(dim, (-1, block_size)).movedim(dim, 0).reshape(blocks, -1))
    return torch.cat(parts, dim=1).view(torch.int32).clone()


def make_batch(chunks, block_size, extra_columns=0):
    """`chunks`: (start, count, blocks) each."""
    width = max(len(blocks) for _, _, blocks in chunks) + extra_columns
    table = np.zeros((len(chunks), width), np.int32)
    for row, (_, _, blocks) in enumerate(chunks):
        table[row, : len(blocks)] = blocks
    counts = np.array([count for _, count, _ in chunks])
    rows = np.repeat(np.arange(len(chunks)), counts)
    positions = np.concatenate([np.arange(start, start + count) for start, count, _ in chunks])
    slots = table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    cu_q = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    lens = np.array([start + count for start, count, _ in chunks], np.int32)
    host = (np.zeros(len(rows), np.int64), positions, cu_q, lens, table, slots, cu_q[1:].astype(np.int64) - 1)
    tokens, positions, cu_q, lens, table, slots, last = map(torch.from_numpy, host)
    return Batch(tokens, positions, cu_q, lens, table, slots, last, int(counts.max()), int(lens.max()))


class Dense:
    """The definition once more, with nothing in common with the backends: contiguous float64 histories, one query at a time."""

    def __init__(self, spec):
        self.spec, self.history = spec, {}

    def forward(self, layer, q, k, v, chunks, names):
        q, k, v = (x.double().numpy() for x in (q, k, v))
        out, at = np.zeros_like(q), 0
        for (start, count, _), name in zip(chunks, names, strict=True):
            for i in range(count):
                self.history[layer, name, start + i] = (k[at + i], v[at + i])
            for i in range(count):
                for head in range(q.shape[1]):
                    out[at + i, head] = self._one(layer, name, start + i, q[at + i, head], head)
            at += count
        return torch.from_numpy(out)

    def _one(self, layer, name, position, query, head):
        kv_head = head * self.spec.num_kv_heads // self.spec.num_heads
        past = [self.history[layer, name, p] for p in range(position + 1)]
        scores = np.array([query @ key[kv_head] for key, _ in past]) / np.sqrt(len(query))
        weights = np.exp(scores - scores.max())
        return (weights[:, None] * np.array([value[kv_head] for _, value in past])).sum(0) / weights.sum()


def packed(tokens, spec, rng):
    """q, k, v as strided views of one buffer, as a merged projection leaves them."""
    heads, kv, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    buffer = torch.from_numpy(rng.standard_normal((tokens, (heads + 2 * kv) * size)).astype(np.float32))
    parts = buffer.split([heads * size, kv * size, kv * size], dim=1)
    return [x.unflatten(1, (-1, size)) for x in parts]


def run(backend, spec, batch, rng, state=None):
    """All layers -> (inputs, outputs)."""
    state = backend.plan(batch, state)
    inputs = [packed(len(batch.tokens), spec, rng) for _ in range(spec.num_layers)]
    return inputs, [backend.forward(layer, *qkv, batch, state, NONE) for layer, qkv in enumerate(inputs)]


@BACKENDS
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (9, 3), (4, 1)])
def test_random_steps_equal_the_dense_definition(backend, block_size, heads):
    """B12, B39, B48: decodes, prompts, prompts with a cached prefix, mixed at random, the pool full of NaN."""
    rng = np.random.default_rng(block_size * 100 + heads[0])
    spec = KVSpec(2, heads[0], heads[1], 8, torch.float32)
    tested, dense = build(backend, spec, 200, block_size), Dense(spec)
    free = list(rng.permutation(np.arange(1, 200)))
    seats = {name: [0, []] for name in range(5)}
    state = None
    for step in range(5):
        chunks, names = [], [name for name in seats if step == 0 or rng.random() < 0.8] or [0]
        for name in names:
            start, blocks = seats[name]
            count = 1 if start and rng.random() < 0.6 else int(rng.integers(1, 14))
            while len(blocks) * block_size < start + count:
                blocks.append(int(free.pop()))
            seats[name][0] = start + count
            chunks.append((start, count, list(blocks)))
        batch = make_batch(chunks, block_size, extra_columns=int(rng.integers(0, 3)))
        state = tested.plan(batch, state)
        for layer in range(spec.num_layers):
            q, k, v = packed(len(batch.tokens), spec, rng)
            got = tested.forward(layer, q, k, v, batch, state, NONE)
            want = dense.forward(layer, q, k, v, chunks, names)
            assert got.shape == q.shape
            torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_sdpa_equals_reference_on_longer_batches(seed):
    """Long enough for several groups per token count, in any order of lengths; differences stay below 1e-5."""
    rng = np.random.default_rng(seed)
    spec, block_size = KVSpec(1, 9, 3, 64, torch.float32), int(rng.choice([1, 5, 16, 32]))
    backends = [build(cls, spec, 6000, block_size, fill=0.0) for cls in (Reference, Sdpa)]
    lens, free = rng.integers(1, 200, 24), iter(rng.permutation(np.arange(1, 6000)).tolist())
    counts = [1 if rng.random() < 0.7 else int(rng.integers(1, n + 1)) for n in lens]
    tables = [[next(free) for _ in range(-(-int(n) // block_size))] for n in lens]
    prefill = make_batch([(0, int(n), t) for n, t in zip(lens, tables, strict=True)], block_size)
    batch = make_batch([(int(n) - c, c, t) for n, c, t in zip(lens, counts, tables, strict=True)], block_size)
    for each in (prefill, batch):
        outs = [run(b, spec, each, np.random.default_rng(seed))[1][0] for b in backends]
        torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-5)
    assert len(backends[1].plan(batch).groups) > 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sdpa_in_half_precision_is_near_reference(dtype):
    """Decodes of equal and of different lengths and prompts take other paths than in float32."""
    spec = KVSpec(1, 4, 2, 16, dtype)
    for lens in ([5, 5], [3, 9, 7]):
        chunks = [(0, n, [2 * i + 1, 2 * i + 2]) for i, n in enumerate(lens)]
        decodes = [(n, 1, t) for _, n, t in chunks]
        outs = []
        for cls in (Reference, Sdpa):
            rng, tested = np.random.default_rng(0), build(cls, spec, 10, 8)
            for each in (chunks, decodes):
                batch = make_batch(each, 8)
                q, k, v = (x.to(dtype) for x in packed(len(batch.tokens), spec, rng))
                outs.append(tested.forward(0, q, k, v, batch, tested.plan(batch), NONE))
        for got, want in zip(outs[2:], outs[:2], strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got, want, rtol=0, atol=3e-2)


@BACKENDS
def test_a_chunk_reads_what_another_chunk_of_the_batch_writes(backend):
    """Requests of one step share a prefix: the reader may come before the writer in the batch."""
    rng, spec = np.random.default_rng(3), KVSpec(1, 4, 2, 8, torch.float32)
    tested, dense = build(backend, spec, 10, 4), Dense(spec)
    reader, writer = (4, 3, [7, 2]), (0, 4, [7])
    batch = make_batch([reader, writer], 4)
    inputs, outputs = run(tested, spec, batch, rng)
    (q, k, v), got = inputs[0], outputs[0]
    dense.forward(0, q[3:], k[3:], v[3:], [writer], ["a"])
    dense.history |= {(0, "b", p): dense.history[0, "a", p] for p in range(4)}
    want = dense.forward(0, q, k, v, [reader, writer], ["b", "a"])
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@BACKENDS
def test_padded_rows_write_the_scratch_block_only(backend):
    """B47: rows of length 1 on block 0 change no other block and no other row; neither do real rows change foreign blocks."""
    spec = KVSpec(2, 4, 2, 8, torch.float32)
    real = [(5, 1, [8, 3]), (0, 6, [9, 5])]
    for padding in (0, 3):
        tested = build(backend, spec, 11, 4, fill=0.5)
        before = snapshot(tested, 11, 4)
        batch = make_batch(real + [(0, 1, [0])] * padding, 4)
        state = tested.plan(batch)
        q, k, v = packed(len(batch.tokens), spec, np.random.default_rng(1))
        padded = tested.forward(1, q, k, v, batch, state, NONE)
        alone = tested.forward(1, q[:7], k[:7], v[:7], make_batch(real, 4), tested.plan(make_batch(real, 4)), NONE)
        torch.testing.assert_close(padded[:7], alone, rtol=0, atol=1e-6)
        changed = (snapshot(tested, 11, 4) != before).any(dim=1).nonzero().flatten().tolist()
        assert changed == ([0] if padding else []) + [3, 5, 9]  # block 8 of the decode is only read


@BACKENDS
def test_moves_are_done_in_order(backend):
    """A target may be the source of a later pair; all layers move, nothing else changes."""
    spec = KVSpec(3, 2, 2, 4, torch.float32)
    tested = build(backend, spec, 6, 2)
    for tensor in storage(tested):
        tensor.normal_()
    want = snapshot(tested, 6, 2)
    pairs = np.array([[1, 2], [2, 3], [5, 1]], np.int32)
    for source, target in pairs.tolist():
        want[target] = want[source].clone()
    tested.move(pairs)
    assert torch.equal(snapshot(tested, 6, 2), want)
    tested.move(np.empty((0, 2), np.int32))
    assert torch.equal(snapshot(tested, 6, 2), want)


@BACKENDS
def test_rows_without_tokens_are_refused(backend):
    """B51"""
    spec = KVSpec(1, 2, 2, 4, torch.float32)
    tested = build(backend, spec, 6, 2)
    batch = make_batch([(0, 1, [1]), (0, 2, [2])], 2)
    batch.cu_q[1] = 0
    with pytest.raises(AssertionError, match="length 0"):
        tested.plan(batch)


@BACKENDS
def test_bytes_and_second_allocation(backend):
    """KV bytes per token of Qwen3-0.6B in bfloat16 (the golden example); sizing allocates a second time."""
    made = backend(None, SimpleNamespace(device=torch.device("cpu")))
    assert made.block_bytes(KVSpec(28, 16, 8, 128, torch.bfloat16), 1) == 114_688
    spec = KVSpec(2, 4, 2, 8, torch.float32)
    for blocks, block_size in ((4, 3), (9, 5)):
        made.allocate(spec, blocks, block_size)
        assert sum(t.nbytes for t in storage(made)) == blocks * made.block_bytes(spec, block_size)
    _, out = run(made, spec, make_batch([(0, 7, [8, 2])], 5), np.random.default_rng(0))
    assert all(torch.isfinite(x).all() for x in out)


def test_sdpa_refreshes_the_given_state():
    """The state object of a captured batch stays the same; its groups follow the new batch."""
    tested = build(Sdpa, KVSpec(1, 2, 2, 4, torch.float32), 6, 2)
    state = tested.plan(make_batch([(0, 2, [1])], 2))
    assert tested.plan(make_batch([(2, 1, [1, 2]), (0, 1, [3])], 2), state) is state
    assert sum(group.n for group in state.groups) == 2


def test_split_covers_all_chunks_and_saves_padding():
    """Every chunk in exactly one group, equal counts per group; far lengths apart, near ones together."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts, lens = rng.integers(1, 4, 30), rng.integers(4, 2000, 30)
        groups = sdpa.split(counts, lens)
        assert sorted(np.concatenate(groups).tolist()) == list(range(30))
        assert all(len(set(counts[g])) == 1 for g in groups)
    ones = np.ones(8, int)
    assert len(sdpa.split(ones, np.array([16, 17, 20, 30, 18, 16, 25, 31]))) == 1
    assert [g.tolist() for g in sdpa.split(ones, np.array([16, 3000, 20, 16, 2999, 16, 16, 16]))] == [
        [0, 2, 3, 5, 6, 7],
        [1, 4],
    ]


def test_declarations():
    """Four backends; block size 256 is what flash needs before its probe knows better; sdpa is first choice on a CPU."""
    found = {c.name: c for c in entry.inferlab_components()}
    assert list(found) == ["reference", "sdpa", "flash", "triton"]
    assert found["sdpa"].provides["auto_rank"] > found["reference"].provides["auto_rank"]
    wants = found["flash"].capabilities
    refused = {"block_size": 64, "device": "cpu", "dtype": "float32"}
    assert wants["block_size"].ok(512)
    assert [key for key, value in refused.items() if wants[key].ok(value)] == []
