"""The golden examples of the behaviour page, and golden step lists: tokens cannot show waste, step lists can."""

from __future__ import annotations

import array
import importlib
import itertools

import numpy as np
import pytest
import torch
import xxhash

from core.batch import lay_out, update_table
from core.interfaces import HostContext, KVSettings, KVSpec, Limits, Request, SamplingParams
from core.step import Seats, StepBuilder
from core.testing.fake import FakeEngine, VirtualClock, drive, expected, workload
from plugins.kv_allocators.block_hash import BlockHash
from tests.fake import make_engine


def steps_of(engine: FakeEngine) -> list[list[tuple[int, int, int]]]:
    """(slot, start, count) of every chunk of every step."""
    rows = [zip(p.slots.tolist(), p.starts.tolist(), p.counts.tolist(), strict=True) for p in engine.executor.plans]
    return [list(row) for row in rows]


def run_all(engine: FakeEngine) -> None:
    while engine.busy:
        engine.step()


def allocator(blocks: int = 10, block_size: int = 4, **kw) -> BlockHash:
    limits = Limits(4, 64, 64)
    return BlockHash(KVSettings(block_size), HostContext(limits, block_size, blocks, VirtualClock()), **kw)


def test_chunked_prefill_6_then_4() -> None:
    """Budget 6, prompt of 10: chunks 6 + 4, no token before the second; blocks for the whole prompt at once."""
    engine = make_engine("fcfs", budget=6)
    request = engine.submit(list(range(10)), SamplingParams(max_tokens=2, temperature=0))
    assert engine.step() == []
    assert request.seat is not None and len(request.seat.blocks) == 3
    assert [o.tokens for o in engine.step()] == [tuple(request.tokens[10:])]
    run_all(engine)
    assert steps_of(engine) == [[(0, 0, 6)], [(0, 6, 4)], [(0, 10, 1)]]


def test_places_of_a_prompt_of_seven() -> None:
    """Block 4, prompt of 7: first two blocks are 1 and 2, KV places 4..10, the 8th token goes to place 11."""
    engine = make_engine("fcfs", block_size=4)
    engine.submit([1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=2, temperature=0))
    run_all(engine)
    executor = engine.executor
    table = np.zeros_like(executor.table)
    places = []
    for plan in executor.plans:
        update_table(table, plan.new_blocks)
        places.append(lay_out(plan, table, 4).kv_slots.tolist())
    assert executor.plans[0].new_blocks.tolist() == [[0, 0, 1], [0, 1, 2]]
    assert places == [[4, 5, 6, 7, 8, 9, 10], [11]]


def test_prefix_resumption() -> None:
    """[1..7] computed, first block known; then [1..10] and [21..25] in one batch."""
    engine = make_engine("fcfs", block_size=4)
    engine.submit([1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=1, temperature=0))
    run_all(engine)
    table = engine.executor.table.copy()
    engine.submit(list(range(1, 11)), SamplingParams(max_tokens=1, temperature=0))
    engine.submit(list(range(21, 26)), SamplingParams(max_tokens=1, temperature=0))
    engine.step()
    plan = engine.executor.plans[-1]
    update_table(table, plan.new_blocks)
    layout = lay_out(plan, table, 4)
    assert layout.tokens.tolist() == [5, 6, 7, 8, 9, 10, 21, 22, 23, 24, 25]
    assert layout.positions.tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert layout.cu_q.tolist() == [0, 6, 11]
    assert layout.kv_lens.tolist() == [10, 5]
    assert layout.last.tolist() == [5, 10] and layout.draw_positions.tolist() == [10, 5]


def test_sharing() -> None:
    """A = [1,2,3,4|5,6,7], B = [1,2,3,4|8,9,10]: the first block is shared, outlives both, and goes when room is needed."""
    kv = allocator(blocks=3)
    seats = Seats(kv, 4, 4)
    a, b, c = (
        Request(i, t, SamplingParams(), 20)
        for i, t in enumerate(([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8, 9, 10], [1, 2, 3, 4, 11]))
    )
    step = StepBuilder(seats, 64)
    assert step.grant(a) == 7 and step.grant(b) == 3
    assert a.seat and b.seat and a.seat.blocks == [1, 2] and b.seat.blocks == [1, 3]
    assert kv.holders[1] == 2
    seats.release(a)
    assert kv.holders[1] == 1 and kv.audit() == (1, 0, 2)
    seats.release(b)
    assert kv.audit() == (2, 1, 0)
    assert StepBuilder(seats, 64).cached(c) == 4
    taken = kv.allocate(3)
    assert taken is not None and sorted(taken) == [1, 2, 3]
    kv.free(taken)
    assert StepBuilder(seats, 64).cached(c) == 0


def test_same_block_after_another_prefix_has_another_hash() -> None:
    """xxh64 over the parent's digest (8 little-endian bytes, none for a first block) and int32 tokens."""

    def raw(*tokens: int) -> bytes:
        return array.array("i", tokens).tobytes()

    kv, digests = allocator(), []
    for first in ([1, 2, 3, 4], [5, 6, 7, 8]):
        keys: list = []
        kv.match([*first, 8, 9, 10, 7], keys)
        kv.publish([*first, 8, 9, 10, 7], kv.allocate(2) or [], 0, keys)
        parent = xxhash.xxh64_intdigest(raw(*first))
        assert keys[0].digest == parent
        assert keys[1].digest == xxhash.xxh64_intdigest(parent.to_bytes(8, "little") + raw(8, 9, 10, 7))
        digests.append(keys[1].digest)
    assert digests[0] != digests[1]


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 9, 10])
def test_chunks_are_contiguous(budget: int) -> None:
    """B12: prompt 10, block 4: chunks follow each other, key length is the end of the chunk, one draw at the end."""
    engine = make_engine("fcfs", budget=budget, slots=1)
    request = engine.submit(list(range(10)), SamplingParams(max_tokens=1, temperature=0))
    run_all(engine)
    chunks = [row[0] for row in steps_of(engine)]
    assert [start for _, start, _ in chunks] == list(itertools.accumulate([0] + [n for *_, n in chunks[:-1]]))
    assert sum(n for *_, n in chunks) == 10
    assert [p.draws.tolist() for p in engine.executor.plans] == [[0]] * (len(chunks) - 1) + [[1]]
    assert request.tokens[10:] == expected([(list(range(10)), request.params)])[0]


def test_fcfs_step_list() -> None:
    """Prompts first; only the first prompt of a step may be cut; decodes when no prompt can go."""
    engine = make_engine("fcfs", "paged", budget=10, slots=4)
    for length in (4, 8, 3):
        engine.submit(list(range(length)), SamplingParams(max_tokens=2, temperature=0))
    run_all(engine)
    assert steps_of(engine) == [
        [(0, 0, 4)],  # the second does not fit whole and may not be cut behind the first
        [(1, 0, 8)],  # nor the third behind the second
        [(2, 0, 3)],
        [(0, 4, 1), (1, 8, 1), (2, 3, 1)],
    ]


def test_fcfs_preemption_step_list() -> None:
    """The last to come gives way, goes to the head of the queue, and is computed again with what it had drawn."""
    engine = make_engine("fcfs", "paged", blocks=4, budget=16)
    first = engine.submit([1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=4, temperature=0))
    second = engine.submit([11, 12, 13, 14, 15, 16, 17], SamplingParams(max_tokens=4, temperature=0))
    run_all(engine)
    assert steps_of(engine) == [
        [(0, 0, 7), (1, 0, 7)],
        [(0, 7, 1), (1, 7, 1)],
        [(0, 8, 1)],  # the second loses its seat
        [(0, 9, 1)],
        [(0, 0, 9)],
        [(0, 9, 1)],
    ]
    assert (first.metrics.preemptions, second.metrics.preemptions, engine.stats.evictions) == (0, 1, 1)


def test_mixed_step_list() -> None:
    """Decodes first, prompt chunks with the rest of the budget."""
    engine = make_engine("mixed", "paged", budget=6, slots=4)
    engine.submit(list(range(4)), SamplingParams(max_tokens=4, temperature=0))
    engine.step()
    engine.submit(list(range(9)), SamplingParams(max_tokens=2, temperature=0))
    run_all(engine)
    assert steps_of(engine) == [[(0, 0, 4)], [(0, 4, 1), (1, 0, 5)], [(0, 5, 1), (1, 5, 4)], [(0, 6, 1), (1, 9, 1)]]


def test_equal_prompts_of_one_step_share() -> None:
    """16 prompts sharing 40 of 42 tokens, all at once: 40 + 16 x 2 + decodes, not 16 x 42 (published at grant)."""
    engine = make_engine("fcfs", blocks=300, slots=16, budget=128, overlap=1)
    for i in range(16):
        engine.submit([*range(1, 41), i, 3], SamplingParams(max_tokens=4, temperature=0))
    run_all(engine)
    assert engine.stats.tokens == 42 + 15 * 2 + 16 * 3 == 120


@pytest.mark.parametrize("scheduler", ["fcfs", "mixed"])
def test_no_eviction_in_an_ample_pool(scheduler: str) -> None:
    """A scheduler that takes every refusal for a lack of blocks evicts for nothing (3,118 times once)."""
    for seed in range(10):
        engine = make_engine(scheduler, blocks=300, slots=8, budget=64, overlap=1)
        work = workload(seed)
        assert drive(engine, work, seed).tokens == expected(work)
        assert engine.stats.evictions == 0


def test_latency_is_ttft_and_tpot() -> None:
    """Latency = TTFT + TPOT x (output tokens - 1); TPOT of a single token is undefined."""
    engine = make_engine()
    clock = engine.clock
    assert isinstance(clock, VirtualClock)
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
    for seconds in (2.0, 0.5, 0.5, 1.0):
        clock.now += seconds
        engine.step()
    m = request.metrics
    assert (m.ttft, m.tpot(4), m.latency) == (2.0, 2.0 / 3, 4.0) and m.tpot(1) is None
    assert m.ttft is not None and m.latency == m.ttft + (m.tpot(4) or 0) * 3


@pytest.mark.parametrize(("layers", "kv_heads", "wanted"), [(28, 8, 114_688), (64, 8, 262_144)])
@pytest.mark.parametrize("backend", ["reference:Reference", "sdpa:Sdpa"])
def test_kv_bytes_per_token(layers: int, kv_heads: int, wanted: int, backend: str) -> None:
    """Qwen3-0.6B in bf16: 2 x 28 x 8 x 128 x 2; Qwen3-32B: 2 x 64 x 8 x 128 x 2."""
    module, name = backend.split(":")
    kind = getattr(importlib.import_module(f"plugins.attention.{module}"), name)
    spec = KVSpec(layers, 16, kv_heads, 128, torch.bfloat16)
    for block_size in (1, 16, 256):
        assert kind.block_bytes(kind.__new__(kind), spec, block_size) == wanted * block_size
