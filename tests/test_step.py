"""The step builder's rules, one by one: what a grant may and may not do."""

from __future__ import annotations

import pytest

from core.interfaces import HostContext, KVSettings, Limits, Request, SamplingParams
from core.step import Seats, StepBuilder, shared_blocks
from core.testing.fake import VirtualClock, check_books
from plugins.kv_allocators.block_hash import BlockHash
from tests.fake import make_engine


def seats(blocks: int = 8, slots: int = 3) -> Seats:
    return Seats(BlockHash(KVSettings(4), HostContext(Limits(slots, 64, 64), 4, blocks, VirtualClock())), slots, 4)


def request(number: int, length: int, first: int | None = None) -> Request:
    first = number * 100 if first is None else first
    return Request(number, list(range(first, first + length)), SamplingParams(), 60)


def test_refused_requests_hold_nothing() -> None:
    """B03: passing the allocator and failing the budget (or the other way round) must leave no block behind."""
    table = seats(blocks=4)
    first, second, third = request(1, 10), request(2, 10), request(3, 4)
    step = StepBuilder(table, 12)
    assert step.grant(first) == 10
    assert step.grant(second, whole=True) == 0 and step.short == "whole"
    assert step.grant(second) == 2 and step.short == "" and step.tokens_left == 0
    assert step.grant(third) == 0 and step.short == "tokens"
    assert third.seat is None and table.kv.audit() == (0, 0, 4)
    later = StepBuilder(table, 64)
    assert later.grant(third) == 0 and later.short == "blocks"
    assert third.seat is None and len(table.free_slots) == 1 and later.empty


def test_reserve_is_all_or_nothing() -> None:
    table = seats(blocks=4)
    long = request(1, 10)
    assert StepBuilder(table, 4).grant(long, reserve=17) == 0
    step = StepBuilder(table, 4)
    assert step.grant(long, reserve=13) == 4
    assert long.seat is not None and len(long.seat.blocks) == 4 and long.seat.computed == 4


def test_slots_run_out() -> None:
    table = seats(slots=1)
    step = StepBuilder(table, 64)
    assert step.grant(request(1, 3)) == 3
    assert step.grant(request(2, 3)) == 0 and step.short == "slots"


def test_second_grant_raises() -> None:
    """4 of 6 requests were silently wrong where it did not."""
    step, one = StepBuilder(seats(), 64), request(1, 9)
    step.grant(one, 4)
    with pytest.raises(ValueError, match="one grant each"):
        step.grant(one)


def test_whole_with_a_smaller_limit_raises() -> None:
    with pytest.raises(ValueError, match="asks for 9 tokens, but limit is 4"):
        StepBuilder(seats(), 64).grant(request(1, 9), 4, whole=True)


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one_raises(limit: int) -> None:
    with pytest.raises(ValueError, match="limit"):
        StepBuilder(seats(), 64).grant(request(1, 9), limit)


def test_evict_rules() -> None:
    step, one, two = StepBuilder(seats(), 64), request(1, 9), request(2, 3)
    step.grant(one)
    with pytest.raises(ValueError, match="advances in this step"):
        step.evict(one)
    with pytest.raises(ValueError, match="holds no seat"):
        step.evict(two)


def test_promised_tokens_wait() -> None:
    """A request whose last token is in flight is not admitted again in that step; a host-bound one waits with its seat."""
    table, one = seats(), request(1, 5)
    step = StepBuilder(table, 64)
    step.grant(one)
    step.seal()
    assert one.promised == 1
    one.host_bound = True
    step = StepBuilder(table, 64)
    assert step.grant(one) == 0 and step.short == "later"
    one.host_bound = False
    step.evict(one)
    assert step.grant(one) == 0 and step.short == "later" and one.seat is None
    one.tokens.append(7)
    one.promised = 0
    assert step.grant(one) == 2, "five of its six tokens: one block is found again, two tokens are left"


def test_match_never_covers_the_whole_prompt() -> None:
    """Of a wholly cached prompt of k blocks k - 1 are hits; the last is computed into a fresh block."""
    table = seats()
    one, two = request(1, 8), request(2, 8, first=100)
    step = StepBuilder(table, 64)
    step.grant(one)
    assert step.grant(two) == 4
    assert one.seat and two.seat
    assert two.seat.blocks[0] == one.seat.blocks[0] and two.seat.blocks[1] != one.seat.blocks[1]


def test_twins_are_joined_at_commit_only() -> None:
    """The block that a step writes is never replaced while it runs; afterwards two equal blocks become one."""
    engine = make_engine("fcfs", blocks=8)
    one = engine.submit(list(range(8)), SamplingParams(max_tokens=8, temperature=0))
    two = engine.submit(list(range(8)), SamplingParams(max_tokens=8, temperature=0))
    engine.step()
    assert one.seat and two.seat
    written = {int(b) for b in engine.executor.plans[0].new_blocks[:, 2]}
    assert len(written) == 3, "both wrote their own second block"
    assert one.seat.blocks == two.seat.blocks and engine.kv.audit() == (6, 0, 2)
    engine.step()
    assert engine.executor.plans[1].new_blocks.tolist()[0] == [two.seat.slot, 1, one.seat.blocks[1]]


def test_abandoned_step_leaves_nothing() -> None:
    """A scheduler that raises half-way: seats back, and nothing that was announced is found."""
    table, one = seats(), request(1, 9)
    step = StepBuilder(table, 64)
    step.grant(one)
    step.abandon()
    assert one.seat is None and table.kv.audit() == (8, 0, 0)
    assert StepBuilder(table, 64).cached(one) == 0


def test_shared_blocks() -> None:
    """Leading blocks common to all chunks and wholly before each start."""
    table = seats(blocks=20, slots=4)
    prefix = list(range(500, 509))
    requests = [Request(i, [*prefix, 600 + i, 1, 2], SamplingParams(), 60) for i in range(3)]
    step = StepBuilder(table, 64)
    for r in requests:
        step.grant(r)
    plan, chunks = step.seal()
    assert plan.shared_blocks == 0, "the first computes from position 0: nothing lies before it"
    for r in requests:
        r.tokens.append(3)
        r.promised = 0
    step = StepBuilder(table, 64)
    for r in requests:
        step.grant(r)
    plan, chunks = step.seal()
    assert plan.shared_blocks == 2 and shared_blocks(chunks[:1], 4) == 0


def test_history_only_if_wanted() -> None:
    for wanted, history in ((False, []), (True, [100, 101, 102])):
        step = StepBuilder(seats(), 64, wants_history=wanted)
        step.grant(request(1, 3))
        plan, _ = step.seal()
        assert plan.history.tolist() == history and plan.admitted.tolist() == [[0, len(history)]]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_prefix_published_by_another_meanwhile(overlap: int) -> None:
    """B06: equal prompts under way in turns; one publishes a block that the other computes. Every table's id has a holder."""
    engine = make_engine("mixed", block_size=4, blocks=40, budget=6, overlap=overlap)
    prompts = [list(range(20)), list(range(20)), [*range(12), 59, 58, 57]]
    requests = [engine.submit(prompt, SamplingParams(temperature=0, max_tokens=6)) for prompt in prompts]
    while engine.busy:
        engine.step()
        check_books(engine)
    alone = [make_engine("mixed", block_size=4, blocks=40) for _ in prompts]
    for one, prompt, shared in zip(alone, prompts, requests, strict=True):
        same = one.submit(prompt, SamplingParams(temperature=0, max_tokens=6))
        while one.busy:
            one.step()
        assert shared.tokens == same.tokens
