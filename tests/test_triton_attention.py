"""The Triton attention kernels against the definition, in Triton's interpreter on a CPU (compiled where there is a GPU)."""

from __future__ import annotations

import itertools
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.interpreter import DEVICE  # isort: skip  (before triton)

import triton
import triton.language as tl

from core.interfaces import Batch, KVSpec, Prologue, SamplingParams
from core.llm import LLM
from core.prologue import apply_prologue
from plugins.attention import entry
from plugins.attention.kernels.decode import Scratch, Shape, decode, shape_for
from plugins.attention.kernels.prefill import Tiles, prefill
from plugins.attention.kernels.tiles import tile_offsets
from plugins.attention.triton import Triton
from tests.real import TINY, define, runner_of
from tests.test_attention import Dense, make_batch, packed

torch.set_num_threads(1)
NONE = Prologue(None, None, 1e-6, torch.empty(0))
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def build(spec: KVSpec, blocks: int, block_size: int, fused: bool = False, fill: float = float("nan")) -> Triton:
    made = Triton(None, SimpleNamespace(device=torch.device(DEVICE), fused=fused))
    made.allocate(spec, blocks, block_size)
    made.cache.fill_(fill)
    return made


def steps(chunks: list[Any], block_size: int, shared: int = 0) -> Batch:
    """Decodes first, as the runner's batches have them."""
    batch = make_batch(chunks, block_size)
    batch.num_decodes = next((i for i, (_, count, _) in enumerate(chunks) if count > 1), len(chunks))
    batch.shared_blocks = shared
    for name in ("tokens", "positions", "cu_q", "kv_lens", "block_table", "kv_slots", "last"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    return batch


def inputs(tokens: int, spec: KVSpec, rng: np.random.Generator) -> Any:
    """Rounded to the dtype, so that the definition sees what the kernel sees; views of one buffer."""
    buffer: Any = torch.cat([x.flatten(1) for x in packed(tokens, spec, rng)], 1).to(spec.dtype).to(DEVICE)
    sizes = [n * spec.head_size for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    return [x.unflatten(1, (-1, spec.head_size)) for x in buffer.split(sizes, 1)]


def forward(backend: Triton, qkv: Any, batch: Batch, prologue: Prologue = NONE, layer: int = 0) -> torch.Tensor:
    q, k, v = qkv
    return backend.forward(layer, q, k, v, batch, backend.plan(batch), prologue)


def define_dense(dense: Dense, qkv: Any, chunks: list[Any], names: Any) -> torch.Tensor:
    q, k, v = (x.cpu() for x in qkv)
    return dense.forward(0, q, k, v, chunks, names)


CASES = [  # block size, H, K, D, dtype: masked and unmasked head sizes, tiles within and across blocks
    (1, 2, 2, 16, torch.float32),
    (3, 6, 2, 48, torch.float32),
    (4, 4, 1, 64, torch.float32),
    (16, 6, 2, 80, torch.float16),
    (32, 4, 2, 128, torch.float16),
    (64, 2, 1, 64, torch.float16),
]


@pytest.mark.parametrize(("block_size", "heads", "kv_heads", "size", "dtype"), CASES)
def test_random_steps_equal_the_dense_definition(block_size, heads, kv_heads, size, dtype):
    """B12, B39, B48: decodes, prompts, prompts with a cached prefix, mixed at random, the pool full of NaN."""
    rng = np.random.default_rng(block_size)
    spec = KVSpec(1, heads, kv_heads, size, dtype)
    tested, dense = build(spec, 400, block_size), Dense(spec)
    free = list(rng.permutation(np.arange(1, 400)))
    seats = {name: [0, []] for name in range(3)}
    for step in range(3):
        grants = {n: 1 if seats[n][0] and rng.random() < 0.7 else int(rng.integers(2, 20 + 50 * (step == 0))) for n in seats}
        names, chunks = sorted(grants, key=lambda n: grants[n] > 1), []
        for name in names:
            start, blocks = seats[name]
            while len(blocks) * block_size < start + grants[name]:
                blocks.append(int(free.pop()))
            seats[name][0] += grants[name]
            chunks.append((start, grants[name], list(blocks)))
        batch = steps(chunks, block_size)
        qkv = inputs(len(batch.tokens), spec, rng)
        got = forward(tested, qkv, batch)
        want = define_dense(dense, qkv, chunks, names)
        torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=TOLERANCE[dtype])


def row_by_row(q, keys, values, table, lens, scale):
    """float64 attention of one query per row, block table resolved position by position. [B, H, D]"""
    out = torch.empty(q.shape, dtype=torch.float64)
    size = keys.shape[2]
    for row, length in enumerate(lens.tolist()):
        at = torch.arange(length)
        blocks = table[row].cpu().long()[at // size]
        k, v = (x.cpu()[blocks, :, at % size].double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("hd,lhd->hl", q[row].cpu().double(), k) * scale
        out[row] = torch.einsum("hl,lhd->hd", scores.softmax(1), v)
    return out


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("layout", ["heads first", "places first"])
def test_decode_with_any_split_and_layout(splits, layout):
    """Every share is read once, empty ones never; the counters are zero again, so that a second launch gives the same.

    The second layout is FlashAttention's [blocks, P, K, D]: only strides differ.
    """
    generator, size = torch.Generator().manual_seed(splits), 32
    lens = torch.tensor([1, 16, 90], dtype=torch.int32)
    table = torch.randperm(39, generator=generator)[: 3 * 6].view(3, 6).int() + 1
    shape = (40, 2, 16, size) if layout == "heads first" else (40, 16, 2, size)
    keys, values = (torch.randn(shape, generator=generator).to(DEVICE) for _ in range(2))
    if layout == "places first":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    q = torch.randn(3, 6, size, generator=generator).to(DEVICE)
    spec = KVSpec(1, 6, 2, size, torch.float32)
    scratch = Scratch.make(3, splits, spec, torch.device(DEVICE))
    for tile, least in ((16, 16), (32, 32)):
        out = torch.full_like(q, float("nan"))
        args = (q, keys, values, table.to(DEVICE), lens.to(DEVICE), out, spec.scale, Shape(splits, tile, least, 4, 2), scratch)
        decode(*args)
        decode(*args)
        assert not scratch.arrived.any()
        want = row_by_row(q, keys, values, table, lens, spec.scale)
        torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (32, 16), (16, 64)])
def test_prefill_with_any_tiles(queries, keys):
    """Diagonals that cross tiles in every way: chunk starts and counts that are no multiples of either tile."""
    rng, spec = np.random.default_rng(queries + keys), KVSpec(1, 2, 1, 16, torch.float32)
    backend, dense = build(spec, 30, 8), Dense(spec)
    tables = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14, 15]]
    first = [(0, 21, tables[0]), (0, 16, tables[1]), (0, 1, tables[2])]
    second = [(21, 33, tables[0]), (16, 2, tables[1]), (1, 37, tables[2])]
    for chunks in (first, second):
        batch = steps(chunks, 8)
        qkv = inputs(len(batch.tokens), spec, rng)
        forward(backend, qkv, batch)
        out = torch.full_like(qkv[0].contiguous(), float("nan"))
        (k, v), tiles = backend.layers[0], Tiles(queries, keys, 4, 2)
        prefill(qkv[0], k, v, batch.block_table, batch.kv_lens, batch.cu_q, out, spec.scale, batch.max_q, 0, tiles)
        want = define_dense(dense, qkv, chunks, "abc")
        torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 1, 48), (9, 3, 64), (2, 2, 128)])
@pytest.mark.parametrize("norm", [False, True])
def test_fused_prologue_equals_the_plain_one(heads, kv_heads, size, norm):
    """Normed and turned q; what lies in the cache; v as it came; the packed buffer unchanged; nothing else written."""
    rng = np.random.default_rng(size + norm)
    spec = KVSpec(1, heads, kv_heads, size, torch.float16)
    weights = [torch.rand(size).half().to(DEVICE) + 0.5 for _ in range(2)] if norm else [None, None]
    prologue = Prologue(weights[0], weights[1], 1e-6, torch.randn(64, size).to(DEVICE))
    batch = steps([(9, 1, [2, 7]), (0, 19, [5, 1, 6])], 8)
    qkv = inputs(20, spec, rng)
    before = [x.clone() for x in qkv]
    fused, plain = (build(spec, 9, 8, fused, fill=0.25) for fused in (True, False))
    history = torch.from_numpy(rng.standard_normal(plain.cache[0, :, 2].shape)).half().to(DEVICE)
    for backend in (fused, plain):
        backend.cache[0, :, 2] = history
    turned = apply_prologue(qkv[0], qkv[1], batch.positions, prologue)
    want = forward(plain, [*turned, qkv[2]], batch)
    got = forward(fused, qkv, batch, prologue)
    assert all(torch.equal(x, y) for x, y in zip(qkv, before, strict=True))
    torch.testing.assert_close(fused.cache, plain.cache, rtol=2e-3, atol=1e-3)
    assert torch.equal(fused.cache[:, 1], plain.cache[:, 1])
    torch.testing.assert_close(got, want, rtol=0, atol=2e-2)


def test_a_chunk_reads_what_another_chunk_of_the_batch_writes():
    """Requests of one step share a prefix: the reader, a decode, comes before the writer in the batch."""
    rng, spec = np.random.default_rng(3), KVSpec(1, 4, 2, 16, torch.float32)
    tested, dense = build(spec, 10, 4), Dense(spec)
    reader, writer = (4, 1, [7, 2]), (0, 4, [7])
    batch = steps([reader, writer], 4)
    qkv = inputs(5, spec, rng)
    got = forward(tested, qkv, batch)
    q, k, v = (x.cpu() for x in qkv)
    dense.forward(0, q[1:], k[1:], v[1:], [writer], ["a"])
    dense.history |= {(0, "b", p): dense.history[0, "a", p] for p in range(4)}
    want = dense.forward(0, q, k, v, [reader, writer], ["b", "a"])
    torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("common", [4, 0])
def test_a_common_prefix_is_read_once_and_changes_nothing(monkeypatch, common):
    """Rows that share blocks, of very different lengths, and a padded row that does not: with the prefix kernel and without.

    The state of a captured batch is refreshed to another prefix length, 0 included.
    """
    rng, spec, size = np.random.default_rng(common), KVSpec(1, 6, 2, 32, torch.float32), 16
    tested = build(spec, 60, size)
    tested.cache.copy_(torch.from_numpy(rng.standard_normal(tested.cache.shape)))
    shared, free = [3, 9, 4, 11, 20, 21], iter(range(25, 60))
    lens = [97, 98, 150, 113]
    tables = [shared + [next(free) for _ in range(-(-n // size) - 6)] for n in lens]
    chunks = [*((n - 1, 1, table) for n, table in zip(lens, tables, strict=True)), (0, 1, [0])]
    qkv = inputs(5, spec, rng)
    want = forward(tested, qkv, steps(chunks, size))
    batch = steps(chunks, size, shared=6)
    monkeypatch.setattr("plugins.attention.triton.COMMON_WORTH", 1)
    state, (q, k, v) = tested.plan(batch), qkv
    assert state.prefix is not None
    torch.testing.assert_close(tested.forward(0, q, k, v, batch, state, NONE), want, rtol=0, atol=2e-6)
    batch.shared_blocks = common
    assert tested.plan(batch, state) is state
    torch.testing.assert_close(tested.forward(0, q, k, v, batch, state, NONE), want, rtol=0, atol=2e-6)


def test_padded_rows_write_the_scratch_block_only():
    """B47: rows of length 1 on block 0 change no other block and no other row."""
    spec, real = KVSpec(2, 4, 2, 16, torch.float32), [(5, 1, [8, 3]), (0, 6, [9, 5])]
    outs = []
    for padding in (0, 3):
        tested = build(spec, 11, 4, fill=0.5)
        before = tested.cache.clone()
        chunks = [real[0], *[(0, 1, [0])] * padding, real[1]]
        qkv = [x[:7] for x in inputs(10, spec, np.random.default_rng(1))]
        if padding:
            qkv = [torch.cat((x[:1], x[1:4], x[1:7])) for x in qkv]
        out = forward(tested, qkv, steps(chunks, 4), layer=1)
        outs.append(torch.cat((out[:1], out[-6:])))
        changed = (tested.cache != before).transpose(0, 2).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == ([0] if padding else []) + [3, 5, 9]
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-6)


def test_moves_are_done_in_order_and_memory_is_given_back():
    """A target may be the source of a later pair; the second allocation has the size that sizing computed."""
    spec = KVSpec(3, 2, 2, 16, torch.float32)
    tested = build(spec, 4, 2)
    tested.allocate(spec, 6, 2)
    assert tested.cache.nbytes == 6 * tested.block_bytes(spec, 2)
    tested.cache.normal_()
    want = tested.cache.clone()
    pairs = np.array([[1, 2], [2, 3], [5, 1]], np.int32)
    for source, target in pairs.tolist():
        want[:, :, target] = want[:, :, source].clone()
    tested.move(pairs)
    assert torch.equal(tested.cache, want)
    assert tested.block_bytes(KVSpec(28, 16, 8, 128, torch.bfloat16), 1) == 114_688


@triton.jit
def _offsets(blocks, out, stride, P: tl.constexpr, WHOLE: tl.constexpr):
    lane = tl.arange(0, 16)
    ids = tl.load(blocks).to(tl.int64) if WHOLE else tl.load(blocks + lane * 0).to(tl.int64)
    tl.store(out + lane, tile_offsets(ids, 0, lane, stride, 128, P, WHOLE))


@pytest.mark.parametrize("whole", [True, False])
def test_offsets_beyond_31_bits(whole):
    """B49: block 8,000,000 of a tiny model on a large card starts at element 1.6e10; int32 would wrap."""
    out = torch.zeros(16, dtype=torch.int64, device=DEVICE)
    block = torch.tensor([8_000_000], dtype=torch.int32, device=DEVICE)
    _offsets[(1,)](block, out, 2048, P=16, WHOLE=whole)  # type: ignore[arg-type]
    assert out.tolist() == [8_000_000 * 2048 + i * 128 for i in range(16)]


def test_the_last_block_of_a_cache_beyond_31_bits():
    """B49: the kernels themselves. Only the pages that are touched exist (4.3 GB of address space, none of it reserved)."""
    spec, blocks = KVSpec(1, 2, 1, 16, torch.float16), 2**22 + 1
    elements = blocks * 2 * 16 * 16
    assert elements > 2**31
    if DEVICE == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        pool = torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.float16)
    else:
        pool = torch.empty(elements, dtype=torch.float16, device=DEVICE)
    tested = build(spec, 1, 16)
    keys, values = pool.view(blocks, 2, 1, 16, 16).unbind(1)
    tested.layers = [(keys, values)]
    dense, rng, last = Dense(spec), np.random.default_rng(0), [blocks - 1, blocks - 2]
    for chunks in ([(0, 19, last)], [(19, 1, last)]):
        batch = steps(chunks, 16)
        qkv = inputs(len(batch.tokens), spec, rng)
        want = define_dense(dense, qkv, chunks, "a")
        torch.testing.assert_close(forward(tested, qkv, batch).cpu().double(), want, rtol=0, atol=4e-3)


def test_shapes_of_decode_work():
    """Few rows are split more, many rows less, long ones more than short ones; never more splits than tiles; what is in
    flight fits into shared memory. The numbers are those measured to be best."""
    rows = (1, 8, 16, 32, 64, 256)
    assert [shape_for(n * 8, 128, 2, 4096, 132).splits for n in rows] == [8, 8, 4, 2, 1, 1]
    assert [shape_for(8, 128, 2, n, 132).splits for n in (100, 32768, 1 << 20)] == [2, 63, 63]
    for pairs, size, itemsize in itertools.product((8, 1000), (16, 64, 128, 256), (2, 4)):
        shape = shape_for(pairs, size, itemsize, 4096, 132)
        assert 2 * shape.tile * size * itemsize * shape.stages <= 200 << 10 and shape.least % shape.tile == 0


def test_declaration():
    """First choice on a GPU; never on a CPU."""
    found = {c.name: c for c in entry.inferlab_components()}
    wants = found["triton"].capabilities
    refused = {"device": "cpu", "dtype": "float64", "head_size": 7}
    assert [key for key, value in refused.items() if wants[key].ok(value)] == []
    assert all(wants["head_size"].ok(n) for n in (16, 64, 80, 96, 128, 256)) and not wants["head_size"].ok(512)
    assert found["triton"].provides["auto_rank"] > found["sdpa"].provides["auto_rank"]


@pytest.mark.parametrize(("model", "fused", "block_size"), [("tiny-qwen3", True, 16), ("tiny-llama", False, 3)])
def test_engine_draws_the_tokens_of_the_definition(monkeypatch, model, fused, block_size):
    """B32: chunked, cached and mixed steps through the engine. The backend is put in the place of sdpa's class: on a CPU the
    capability check would refuse it."""

    class Chosen(Triton):
        def __init__(self, settings: Any, context: Any) -> None:
            super().__init__(settings, context)
            self.fuses_prologue = fused

    monkeypatch.setattr("plugins.attention.sdpa.Sdpa", Chosen)
    overrides = [f"kv_allocator.block_size={block_size}"]
    with LLM(model, device="cpu", attention="sdpa", scheduler="mixed", overrides=overrides, **TINY) as llm:
        assert isinstance(runner_of(llm).attention, Triton)
        shared = list(range(20))
        work = [([*shared[: 10 * (i % 3)], 30 + i, 7], SamplingParams(temperature=0, max_tokens=3)) for i in range(3)]
        outputs = llm.generate([p for p, _ in work], [s for _, s in work])
        assert [o.token_ids for o in outputs] == [define(llm, p, s) for p, s in work]
