"""attention=flash on a GPU, for every package of FlashAttention that can run there (`pytest -m gpu tests/gpu`).

The definition is computed in float64 from a dense copy of what was stored. The last test prints a short table.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.device import available_cuda
from core.interfaces import Batch, KVSpec, Prologue
from core.llm import LLM, SamplingParams
from core.prologue import apply_prologue
from plugins.attention.entry import FLASH_PACKAGES, FlashSettings
from plugins.attention.flash import Flash
from plugins.attention.flash_choice import PROVIDERS, choose
from plugins.models.common.rope import rope_table
from tests.real import runner_of
from tests.test_attention import NONE, make_batch
from tests.test_flash import steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available_cuda(), reason="no CUDA device")]
CUDA = torch.device("cuda", 0)
BY_NAME = {p.name: p for p in PROVIDERS}
SIZES = [16, 64, 256]
SHAPES = [(16, 8, 128), (9, 3, 64), (8, 1, 128), (32, 8, 128), (4, 2, 32)]  # H, K, D
CASES = [(shape, torch.bfloat16, False) for shape in SHAPES]
CASES += [(SHAPES[0], torch.float16, False), (SHAPES[0], torch.bfloat16, True), (SHAPES[1], torch.bfloat16, True)]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the norm of a row's error to the norm of the row


def able() -> list[str]:
    found = []
    for name in FLASH_PACKAGES if available_cuda() else ():
        try:
            found.append(choose(name, torch.cuda.get_device_capability(0)).provider.name)
        except ValueError:
            continue
    return found


ABLE = able()


@pytest.fixture(params=ABLE or [pytest.param("none", marks=pytest.mark.skip("no FlashAttention package can run here"))])
def provider(request: pytest.FixtureRequest) -> str:
    return request.param


def build(provider: str, spec: KVSpec, blocks: int, block_size: int, fused: bool = False) -> Flash:
    """Its cache is full of NaN."""
    wants = BY_NAME[provider].capabilities()
    if not (wants["block_size"].ok(block_size) and wants["head_size"].ok(spec.head_size)):
        pytest.skip(f"{provider} does not take blocks of {block_size} or heads of {spec.head_size}")
    context: Any = SimpleNamespace(device=CUDA, dtype=spec.dtype, block_size=block_size, spec=spec, fused=fused)
    made = Flash(FlashSettings(provider), context)
    made.allocate(spec, blocks, block_size)
    made.cache.fill_(float("nan"))
    return made


def to_gpu(batch: Batch, **changes: Any) -> Batch:
    tensors = {
        f.name: value.to(CUDA) for f in dataclasses.fields(batch) if isinstance(value := getattr(batch, f.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **tensors, **changes)


def inputs(tokens: int, spec: KVSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as strided views of one buffer."""
    heads, kv = spec.num_heads, spec.num_kv_heads
    buffer = torch.randn(tokens, heads + 2 * kv, spec.head_size, device=CUDA).to(spec.dtype)
    q, k, v = buffer.split([heads, kv, kv], 1)
    return q, k, v


def capture(work: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """(replay, what it writes)"""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = work()
    return graph.replay, outs


class Dense:
    """Keys and values in float64 by place; attention by definition, chunk after chunk."""

    def __init__(self, spec: KVSpec, blocks: int, block_size: int) -> None:
        self.spec, self.block_size = spec, block_size
        shape = (2, spec.num_layers, blocks * block_size, spec.num_kv_heads, spec.head_size)
        self.cache = torch.zeros(shape, dtype=torch.float64, device=CUDA)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        keys, values = self.cache[0, layer], self.cache[1, layer]
        keys[batch.kv_slots], values[batch.kv_slots] = k.double(), v.double()
        out, group, bounds = (
            torch.empty(q.shape, dtype=torch.float64, device=CUDA),
            self.spec.num_heads // k.shape[1],
            batch.cu_q,
        )
        for i, length in enumerate(batch.kv_lens.tolist()):
            rows, at = slice(int(bounds[i]), int(bounds[i + 1])), torch.arange(length, device=CUDA)
            places = batch.block_table[i, at // self.block_size].long() * self.block_size + at % self.block_size
            k_seen, v_seen = (x[places].repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("nhd,lhd->hnl", q[rows].double(), k_seen) * self.spec.scale
            scores.masked_fill_(at > batch.positions[rows, None], float("-inf"))
            out[rows] = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v_seen)
        return out


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Every row of every head; NaN fails."""
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-2)
    assert bool((error < TOLERANCE[dtype]).all()), f"largest error {error.max():.2e}, allowed {TOLERANCE[dtype]:.0e}"


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize(("shape", "dtype", "fused"), CASES)
def test_random_steps_equal_float64(provider: str, shape, dtype: torch.dtype, fused: bool, block_size: int) -> None:
    """B48: decodes, prompts, cached prefixes, mixed at random, in a pool full of NaN; with and without the fused kernel."""
    rng, spec = np.random.default_rng(block_size), KVSpec(2, shape[0], shape[1], shape[2], dtype)
    torch.manual_seed(block_size)
    tested, dense = build(provider, spec, 64, block_size, fused), Dense(spec, 64, block_size)
    table = rope_table({"rope_theta": 1e4}, spec.head_size, 8 * block_size, CUDA)
    weights = torch.rand(2, spec.head_size, device=CUDA, dtype=dtype) + 0.5
    prologue = Prologue(weights[0], weights[1], 1e-6, table) if fused else NONE
    for chunks, leading in steps(rng, block_size, 6):
        batch = to_gpu(make_batch(chunks, block_size, extra_columns=1), num_decodes=leading)
        state = tested.plan(batch)
        for layer in range(2):
            q, k, v = inputs(len(batch.tokens), spec)
            got = tested.forward(layer, q, k, v, batch, state, prologue)
            if fused:
                q, k = apply_prologue(q, k, batch.positions, prologue)
            close(got, dense.forward(layer, q, k, v, batch), dtype)


@pytest.mark.parametrize("block_size", SIZES)
def test_a_chunk_reads_what_another_chunk_of_the_batch_writes(provider: str, block_size: int) -> None:
    """Requests of one step share a prefix: the reader may come before the writer in the batch."""
    spec = KVSpec(1, 16, 8, 128, torch.bfloat16)
    tested, dense = build(provider, spec, 10, block_size), Dense(spec, 10, block_size)
    batch = to_gpu(make_batch([(block_size, 3, [7, 2]), (0, block_size, [7])], block_size))
    q, k, v = inputs(len(batch.tokens), spec)
    close(tested.forward(0, q, k, v, batch, tested.plan(batch), NONE), dense.forward(0, q, k, v, batch), spec.dtype)


@pytest.mark.parametrize("block_size", SIZES)
def test_replays_equal_eager(provider: str, block_size: int) -> None:
    """One graph, lengths from 1 to the longest, padded rows among them: plan(batch, state), replay. B47: padding writes block
    0 only."""
    torch.manual_seed(0)
    spec, columns, rows = KVSpec(3, 16, 8, 128, torch.bfloat16), 4096 // block_size, 6
    blocks = 1 + rows * columns
    tested, dense = build(provider, spec, blocks, block_size), Dense(spec, blocks, block_size)
    for part in range(2):
        values = torch.randn(spec.num_layers, blocks * block_size, 8, 128, device=CUDA).bfloat16()
        tested.cache[:, part] = values.view(spec.num_layers, blocks, block_size, 8, 128)
        dense.cache[part] = values.double()
    tables = torch.arange(1, blocks, dtype=torch.int32, device=CUDA)[torch.randperm(blocks - 1, device=CUDA)].view(
        rows, columns
    )
    padding = to_gpu(make_batch([(0, 1, [0] * columns)] * rows, block_size))
    batch = dataclasses.replace(padding, max_kv=columns * block_size, num_decodes=rows)
    given = [inputs(rows, spec) for _ in range(spec.num_layers)]
    state = tested.plan(batch)

    def work() -> list[torch.Tensor]:
        return [tested.forward(layer, *qkv, batch, state, NONE) for layer, qkv in enumerate(given)]

    def fill(lens: list[int]) -> None:
        lengths = torch.tensor(lens, dtype=torch.int64, device=CUDA)
        real = torch.tensor([n > 0 for n in lens], device=CUDA)
        batch.positions.copy_((lengths - 1).clamp(min=0))
        batch.kv_lens.copy_(batch.positions + 1)
        batch.block_table.copy_(torch.where(real[:, None], tables, 0))
        block = batch.block_table.gather(1, batch.positions[:, None] // block_size)[:, 0].long()
        batch.kv_slots.copy_(block * block_size + batch.positions % block_size)
        for qkv in given:
            for x in qkv:
                x.normal_()

    replay, outs = capture(work)
    for lens in ([1, 17, 300, 4096, 0, 0], [4096] * 6, [5, 0, 0, 0, 0, 0], [64, 256, 257, 2000, 3000, 1], [900] * 6):
        fill(lens)
        before = tested.cache[:, :, 1:].clone()
        assert tested.plan(batch, state) is state
        replay()
        changed = (tested.cache[:, :, 1:] != before).flatten(3).any(-1).any(0).any(0)
        assert int(changed.sum()) == sum(n > 0 for n in lens)
        fresh = tested.plan(batch)
        for layer, qkv in enumerate(given):
            want, real = dense.forward(layer, *qkv, batch), [i for i, n in enumerate(lens) if n]
            # Rows of padding all write one place and read whoever was last: only real rows are comparable.
            again = tested.forward(layer, *qkv, batch, fresh, NONE)
            torch.testing.assert_close(again[real], outs[layer][real], rtol=1.6e-2, atol=1e-3)
            close(outs[layer][real], want[real], spec.dtype)


@pytest.mark.parametrize("block_size", SIZES)
def test_nothing_waits_for_the_device(provider: str, block_size: int) -> None:
    """plan and forward of a mixed step only queue work."""
    spec = KVSpec(1, 16, 8, 128, torch.bfloat16)
    tested = build(provider, spec, 12, block_size)
    batch = to_gpu(make_batch([(3, 1, [1]), (0, 40, [2, 3, 4]), (block_size, 5, [5, 6])], block_size), num_decodes=1)
    q, k, v = inputs(len(batch.tokens), spec)
    tested.forward(0, q, k, v, batch, tested.plan(batch), NONE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tested.forward(0, q, k, v, batch, tested.plan(batch), NONE)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_the_engine_runs_with_it(provider: str, graphs: str) -> None:
    """From the option to the record, chunked prompts and decodes; the package that was named runs."""
    if not BY_NAME[provider].head_sizes.ok(32):
        pytest.skip(f"{provider} does not take heads of 32")
    options = {"dtype": "bfloat16", "max_model_len": 512, "num_kv_blocks": 24, "max_num_batched_tokens": 128, "graphs": graphs}
    overrides = [f"attention.provider={provider}", "kv_allocator.block_size=256"]
    with LLM("tiny-qwen3", device="cuda", attention="flash", overrides=overrides, **options) as llm:
        attention: Any = runner_of(llm).attention
        assert attention.kind.name == provider
        prompts = [list(range(40 + 30 * i)) for i in range(6)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert [len(o.token_ids) for o in outputs] == [40] * 6


def test_a_short_table(provider: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Decode bandwidth, 28 layers as one graph, stores included; asserts only that the plan stays where it is."""
    spec, block_size, context = KVSpec(28, 16, 8, 128, torch.bfloat16), 256, 900
    lines = [
        f"{provider} {choose(provider, torch.cuda.get_device_capability(0)).version}",
        "batch  ms/step  TB/s  plan us (host)",
    ]
    for rows in (1, 32, 128, 256):
        columns = -(-context // block_size)
        tested = build(provider, spec, 1 + rows * columns, block_size)
        tested.cache.normal_()
        chunks = [(context - 1, 1, list(range(1 + i * columns, 1 + (i + 1) * columns))) for i in range(rows)]
        batch = to_gpu(make_batch(chunks, block_size), num_decodes=rows, max_kv=4096)
        batch.block_table = torch.nn.functional.pad(batch.block_table, (0, 4096 // block_size - columns))
        q, k, v = inputs(rows, spec)
        state = tested.plan(batch)

        def work(tested=tested, batch=batch, state=state, q=q, k=k, v=v) -> list[torch.Tensor]:
            return [tested.forward(layer, q, k, v, batch, state, NONE) for layer in range(spec.num_layers)]

        replay, _ = capture(work)
        before = state.decodes.extra if state.decodes else None
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(50):
            tested.plan(batch, state)
        host = (time.perf_counter() - begin) / 50 * 1e6
        start.record()
        for _ in range(20):
            replay()
        end.record()
        torch.cuda.synchronize()
        ms = start.elapsed_time(end) / 20
        moved = rows * context * tested.block_bytes(spec, 1)
        lines.append(f"{rows:5d}  {ms:7.3f}  {moved / ms / 1e9:4.2f}  {host:5.0f}")
        assert state.decodes is not None and state.decodes.extra is before
    with capsys.disabled():
        print("\n" + "\n".join(lines))
