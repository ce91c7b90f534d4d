"""attention=triton on a GPU against float64, at real sizes (`pytest -m gpu tests/gpu`). The pool is full of NaN at first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.interpreter import DEVICE  # isort: skip  (before triton)

from core.interfaces import Batch, KVSpec, Prologue
from core.llm import LLM
from core.prologue import apply_prologue
from plugins.attention.triton import Triton
from tests.gpu.test_cuda import TINY, work
from tests.test_attention import make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device")]
NONE = Prologue(None, None, 1e-6, torch.empty(0))
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # of a row's norm
NAMES = ("tokens", "positions", "cu_q", "kv_lens", "block_table", "kv_slots", "last")


class Case:
    """A backend, a batch, and the positions before it filled with random values."""

    def __init__(self, spec: KVSpec, chunks: list[tuple[int, int]], size: int, seed: int, shared: int = 0, width: int = 0):
        """`chunks`: start and count of each, those of one token first; `width`: columns of the block table at least."""
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.backend = Triton(None, SimpleNamespace(device=torch.device("cuda"), fused=False))
        needed = [-(-(start + count) // size) for start, count in chunks]
        blocks = sum(needed) + 1
        self.backend.allocate(spec, blocks, size)
        self.backend.cache.fill_(float("nan"))
        self.spec, self.size = spec, size
        order = iter((self.rng.permutation(blocks - 1) + 1).tolist())
        tables = [[next(order) for _ in range(n)] for n in needed]
        tables = [tables[0][:shared] + table[shared:] for table in tables]
        self.batch = make_batch([(*c, t) for c, t in zip(chunks, tables, strict=True)], size, max(0, width - max(needed)))
        for name in NAMES:
            setattr(self.batch, name, getattr(self.batch, name).cuda())
        counts = [count for _, count in chunks]
        self.batch.num_decodes = next((i for i, count in enumerate(counts) if count > 1), len(counts))
        self.batch.shared_blocks = shared
        for (start, _), table in zip(chunks, tables, strict=True):
            at = torch.arange(start)
            rows = torch.tensor(table)[at // size].cuda(), at.cuda() % size
            for cache in self.backend.layers[0]:
                values = torch.randn(start, spec.num_kv_heads, spec.head_size, device="cuda")
                cache.transpose(1, 2)[rows] = values.to(spec.dtype)

    def inputs(self) -> list[Tensor]:
        """Views of one buffer."""
        heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        buffer = torch.randn(len(self.batch.tokens), sum(heads), self.spec.head_size, device="cuda").to(self.spec.dtype)
        return list(buffer.split(heads, 1))

    def run(self, qkv: list[Tensor], batch: Batch | None = None, state: Any = None, prologue: Prologue = NONE) -> Tensor:
        """One layer; a state that is given is used as it is."""
        batch = batch or self.batch
        q, k, v = qkv
        return self.backend.forward(0, q, k, v, batch, state or self.backend.plan(batch), prologue)

    def error(self, q: Tensor, got: Tensor) -> float:
        """Largest relative error of a token's head, against float64 over what lies in the cache now."""
        batch, worst = self.batch, 0.0
        bounds, lens = batch.cu_q.tolist(), batch.kv_lens.tolist()
        for i, length in enumerate(lens):
            tokens, at = slice(bounds[i], bounds[i + 1]), torch.arange(length, device="cuda")
            rows = batch.block_table[i].long()[at // self.size], at % self.size
            k, v = (x.transpose(1, 2)[rows].double() for x in self.backend.layers[0])
            group = self.spec.num_heads // self.spec.num_kv_heads
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("nhd,lhd->hnl", q[tokens].double(), k) * self.spec.scale
            scores = scores.masked_fill(at > batch.positions[tokens, None], float("-inf"))
            want = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v)
            worst = max(worst, ((got[tokens].double() - want).norm(dim=-1) / want.norm(dim=-1)).max().nan_to_num(9.0).item())
        return worst


DECODES = [  # rows, shortest, longest, block size, H, K, D, dtype
    (1, 1, 1, 16, 16, 8, 128, torch.bfloat16),
    (1, 4000, 4000, 64, 16, 8, 128, torch.bfloat16),
    (1, 30_000, 30_000, 256, 16, 8, 128, torch.float16),
    (5, 1, 900, 1, 9, 3, 64, torch.bfloat16),
    (16, 500, 800, 64, 16, 8, 128, torch.bfloat16),
    (33, 1, 2000, 16, 32, 4, 128, torch.float16),
    (131, 300, 1500, 256, 16, 8, 128, torch.bfloat16),
    (131, 1, 300, 48, 6, 2, 80, torch.bfloat16),
    (512, 1, 700, 64, 16, 8, 128, torch.bfloat16),
    (20, 1, 500, 32, 8, 1, 256, torch.bfloat16),
    (20, 1, 500, 32, 4, 2, 128, torch.float32),
]


@pytest.mark.parametrize(("rows", "low", "high", "size", "heads", "kv_heads", "dim", "dtype"), DECODES)
def test_decode(rows, low, high, size, heads, kv_heads, dim, dtype):
    """B39, B48: one row to 512, one place to 30,000, tiles within a block and across blocks, NaN where nothing was written."""
    lens = np.random.default_rng(rows).integers(low, high + 1, rows).tolist()
    case = Case(KVSpec(1, heads, kv_heads, dim, dtype), [(n - 1, 1) for n in lens], size, rows)
    qkv = case.inputs()
    assert case.error(qkv[0], case.run(qkv)) < TOLERANCE[dtype]


MIXES = [  # decodes, prompts, prefix at most, tokens at most, block size, H, K, D, dtype
    (0, 29, 0, 560, 64, 16, 8, 128, torch.bfloat16),
    (8, 3, 2000, 900, 16, 16, 8, 128, torch.bfloat16),
    (3, 5, 700, 50, 256, 9, 3, 64, torch.float16),
    (0, 6, 300, 12, 1, 32, 4, 128, torch.bfloat16),
    (2, 3, 100, 300, 32, 6, 2, 80, torch.bfloat16),
    (2, 3, 100, 300, 32, 4, 1, 256, torch.bfloat16),
    (2, 3, 100, 200, 64, 4, 2, 64, torch.float32),
]


@pytest.mark.parametrize(("decodes", "prompts", "prefix", "most", "size", "heads", "kv_heads", "dim", "dtype"), MIXES)
def test_chunks_of_many_tokens(decodes, prompts, prefix, most, size, heads, kv_heads, dim, dtype):
    """Whole prompts, chunks behind cached prefixes of any length, decodes in the same batch."""
    rng = np.random.default_rng(most)
    chunks = [(int(rng.integers(0, prefix + 1)), 1) for _ in range(decodes)]
    chunks += [(int(rng.integers(0, prefix + 1)), int(rng.integers(2, most + 1))) for _ in range(prompts)]
    case = Case(KVSpec(1, heads, kv_heads, dim, dtype), chunks, size, most)
    qkv = case.inputs()
    assert case.error(qkv[0], case.run(qkv)) < TOLERANCE[dtype]


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("rows", [2, 16, 256])
def test_a_common_prefix(rows, size):
    """Read once for all rows, and refreshed to another length in the same state."""
    spec, shared = KVSpec(1, 16, 8, 128, torch.bfloat16), 2048 // size
    lens = np.random.default_rng(rows).integers(2049, 2200, rows).tolist()
    case = Case(spec, [(n - 1, 1) for n in lens], size, rows, shared=shared)
    qkv = case.inputs()
    if rows > 2:
        assert case.backend.plan(case.batch).prefix is not None
    assert case.error(qkv[0], case.run(qkv)) < TOLERANCE[spec.dtype]
    state = case.backend.plan(case.batch)
    for shorter in (shared // 3, 0):
        case.batch.shared_blocks = shorter
        assert case.error(qkv[0], case.run(qkv, state=case.backend.plan(case.batch, state))) < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_no_race_between_parts(rows):
    """The last program to arrive combines what the others wrote: 300 launches give the same bits."""
    spec = KVSpec(1, 16, 8, 128, torch.bfloat16)
    case = Case(spec, [(700 + 13 * i % 900, 1) for i in range(rows)], 64, rows, width=64)
    case.batch.max_kv = 4096
    qkv, state = case.inputs(), case.backend.plan(case.batch)
    assert state.shape.splits > 1 and state.scratch is not None
    first = case.run(qkv, state=state)
    different = sum((case.run(qkv, state=state) != first).any() for _ in range(300))
    assert int(different) == 0 and not state.scratch.arrived.any()


@pytest.mark.parametrize("shared", [0, 8])
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_captured_replay_equals_eager(rows, shared):
    """One graph serves all lengths, padded rows (B47) and prefixes: replayed after the contents of its batch have changed."""
    spec = KVSpec(1, 16, 8, 128, torch.bfloat16)
    starts = [600 + 7 * i for i in range(rows)]
    case = Case(spec, [(n, 1) for n in starts], 64, rows, shared=shared if rows > 1 else 0, width=64)
    batch = case.batch
    batch.max_kv = 4096
    qkv, state = case.inputs(), case.backend.plan(case.batch)
    case.run(qkv, state=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(qkv, state=state)
    real = rows
    for turn in range(3):
        for x in qkv:
            x.normal_()
        if turn < 2:  # other rows in other places; the second time no row shares anything any more, says the plan
            order = torch.randperm(rows, device="cuda")
            for name in ("kv_lens", "block_table", "positions", "kv_slots"):
                getattr(batch, name).copy_(getattr(batch, name)[order])
            batch.shared_blocks = 0 if turn else case.batch.shared_blocks
        else:
            real = -(-rows // 2)
            for name, value in (("kv_lens", 1), ("block_table", 0), ("positions", 0), ("kv_slots", 0)):
                getattr(batch, name)[real:] = value
        case.backend.plan(batch, state)
        graph.replay()
        replayed = out.clone()
        eager = case.run(qkv, state=state)
        assert torch.equal(eager[:real], replayed[:real])  # rows of padding all write one place: whose value stays is open
        assert torch.isfinite(replayed).all()
        if turn < 2:
            assert case.error(qkv[0], replayed) < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"), [(1, 16, 8, 128), (256, 9, 3, 64), (5000, 32, 8, 128), (70, 6, 2, 80)]
)
def test_fused_prologue(tokens, heads, kv_heads, dim, norm):
    """Against the plain prologue, in every value of q and of the cache."""
    spec, dtype = KVSpec(1, heads, kv_heads, dim, torch.bfloat16), torch.bfloat16
    case = Case(spec, [(0, tokens)], 16, tokens)
    case.backend.cache.zero_()
    weights = [torch.rand(dim, device="cuda").to(dtype) + 0.5 if norm else None for _ in range(2)]
    prologue = Prologue(weights[0], weights[1], 1e-6, torch.randn(tokens, dim, device="cuda"))
    q, k, v = case.inputs()
    turned = apply_prologue(q, k, case.batch.positions, prologue)
    want = case.run([*turned, v])
    stored = case.backend.cache.clone()
    case.backend.cache.zero_()
    case.backend.fuses_prologue = True
    got = case.run([q, k, v], prologue=prologue)
    torch.testing.assert_close(case.backend.cache, stored, rtol=1.6e-2, atol=1e-4)
    assert torch.equal(case.backend.cache[:, 1], stored[:, 1])
    assert ((got.double() - want.double()).norm() / want.double().norm()).item() < 2e-2


def test_offsets_beyond_31_bits():
    """B49: a cache of more than 2**31 elements per layer; only its last blocks are used."""
    spec, size = KVSpec(1, 4, 2, 128, torch.bfloat16), 64
    case = Case(spec, [(699, 1), (0, 300)], size, 5)
    blocks = 2**31 // (2 * size * 128) + 40
    far = blocks - int(case.batch.block_table.max()) - 1
    small = case.backend.cache
    case.backend.allocate(spec, blocks, size)
    case.backend.cache[:, :, far : far + small.shape[2]] = small
    case.batch.block_table += far
    case.batch.kv_slots += far * size
    qkv = case.inputs()
    assert case.backend.layers[0][0].numel() > 2**31
    assert case.error(qkv[0], case.run(qkv)) < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-llama"])
def test_engine_draws_the_tokens_of_the_cpu(model, graphs):
    """float32, chunked, cached, preempting, greedy and seeded rows; with captured decode steps and without."""
    outputs = []
    for choice in ({"device": "cpu"}, {"device": "cuda", "attention": "triton", "graphs": graphs}):
        with LLM(model, **choice, **TINY) as llm:
            prompts, params = zip(*work(), strict=True)
            outputs.append([o.token_ids for o in llm.generate(list(prompts), list(params))])
    assert outputs[0] == outputs[1]
