"""The policy, on a step that counts: no model, no cache, no tensor."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
from longest_prefix import LongestPrefix, Settings

from core.interfaces import HostContext, Limits, Request, SamplingParams, Seat

BLOCK = 4
CONTEXT = HostContext(Limits(64, 64, 256), BLOCK, 64, lambda: 0.0)


class FakeStep:
    """Grants while there is room; whole blocks of what was granted are found by every later `cached`."""

    def __init__(self, known: list[list[int]], slots: int = 64, tokens: int = 10_000) -> None:
        self.known, self.slots, self.tokens_left, self.short = known, slots, tokens, ""
        self.granted: list[Request] = []
        self.evicted: list[Request] = []
        self.blocked: set[Request] = set()  # refused for want of blocks until something is evicted
        self.late: set[Request] = set()  # their last token is in flight

    def grant(self, request: Request, limit: int | None = None, *, whole: bool = False, reserve: int = 0) -> int:
        assert request not in self.granted
        if request in self.blocked | self.late:
            self.short = "blocks" if request in self.blocked else "later"
            return 0
        if request.seat is None:
            if not self.slots:
                self.short = "slots"
                return 0
            self.slots -= 1
            request.seat = Seat(0, [], self.cached(request))
        count = request.remaining
        request.seat.computed += count
        self.known.append(request.tokens)
        self.granted.append(request)
        return count

    def cached(self, request: Request) -> int:
        return max((shared(request.tokens[:-1], other) for other in self.known), default=0)

    def evict(self, request: Request) -> None:
        assert request.seat is not None and request not in self.granted
        request.seat = None
        self.evicted.append(request)
        self.blocked.clear()


def shared(tokens: list[int], other: list[int]) -> int:
    """Positions of whole blocks that both begin with."""
    equal = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other)))
    return equal // BLOCK * BLOCK


def scheduler(**settings: int) -> LongestPrefix:
    return LongestPrefix(Settings(**settings), CONTEXT)


def requests(*prompts: list[int]) -> list[Request]:
    return [Request(i, prompt, SamplingParams(), 256) for i, prompt in enumerate(prompts)]


def run(policy: LongestPrefix, step: FakeStep) -> list[int]:
    """Ids in the order in which they were granted."""
    policy.schedule(cast(Any, step))
    return [request.id for request in step.granted]


A, B, C = list(range(10, 22)), list(range(30, 42)), list(range(50, 62))


def test_the_longest_match_goes_first() -> None:
    """B is in the cache whole, A in part, C not at all; of equals the older one goes first."""
    policy = scheduler()
    for request in requests([*C, 1], [*A, 1], [*B, 1], [*C, 2]):
        policy.add(request)
    assert run(policy, FakeStep([A[:8], B])) == [2, 1, 0, 3]


def test_a_group_stays_together() -> None:
    """Nothing is cached at first; what request 0 computes is found by 2 and 4 in the same step, so 1 and 3 come after them."""
    policy = scheduler()
    for request in requests([*A, 1], [*B, 1], [*A, 2], [*B, 2], [*A, 3]):
        policy.add(request)
    assert run(policy, FakeStep([])) == [0, 2, 4, 1, 3]


def test_nobody_is_overtaken_more_often_than_patience_says() -> None:
    """One is admitted per step while later requests with long matches keep arriving."""
    for patience in (0, 1, 3, 10):
        rng, policy, known = random.Random(patience), scheduler(patience=patience), [[*A]]
        waiting = requests([*C, 1], *([*rng.choice([A, B, C]), i] for i in range(40)))
        admitted: list[int] = []
        arrived = 0
        while len(admitted) < len(waiting):
            for request in waiting[arrived : arrived + 2]:
                policy.add(request)
            arrived += 2
            step = FakeStep(known, slots=1)
            new = run(policy, step)
            admitted += new
            for request in step.granted:
                policy.remove(request)
        for number in range(len(waiting)):
            overtakers = [other for other in admitted[: admitted.index(number)] if other > number]
            assert len(overtakers) <= patience
        assert (admitted == sorted(admitted)) == (patience == 0)


def test_an_overdue_request_is_waited_for() -> None:
    """It lacks blocks: were others admitted meanwhile, they could take every block that comes free."""
    policy = scheduler(patience=1)
    first, *others = requests([*C, 1], [*A, 1], [*A, 2])
    policy.add(first)
    policy.add(others[0])
    step = FakeStep([A], slots=1)
    assert run(policy, step) == [1]
    policy.remove(others[0])
    policy.add(others[1])
    step = FakeStep([A])
    step.blocked.add(first)
    assert run(policy, step) == []
    step = FakeStep([A])
    step.late.add(first)
    assert run(policy, step) == []


def test_others_need_not_wait_for_a_token_in_flight() -> None:
    policy = scheduler()
    for request in requests([*A, 1], [*B, 1]):
        policy.add(request)
    step = FakeStep([A])
    step.late.add(policy.waiting[0])
    assert run(policy, step) == [1]


def test_decodes_come_first_and_the_last_to_be_admitted_gives_way() -> None:
    policy = scheduler()
    old, middle, young = requests([*A, 1], [*B, 1], [*C, 1])
    for request in (old, middle, young):
        policy.add(request)
    assert run(policy, FakeStep([])) == [0, 1, 2]
    for request in (old, middle, young):
        request.promised = 1
    step = FakeStep([], slots=0)
    step.blocked.add(middle)
    assert run(policy, step) == [0, 1]
    assert step.evicted == [young] and policy.waiting == [young]


def test_lookahead_bounds_what_is_compared() -> None:
    policy = scheduler(lookahead=2)
    for request in requests([*C, 1], [*B, 1], [*A, 1]):
        policy.add(request)
    assert run(policy, FakeStep([A], slots=1)) == [0]


@pytest.mark.parametrize("name", ["patience", "lookahead"])
def test_settings_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=rf"scheduler\.{name} must be a whole number >= 0, got -1"):
        Settings(**{name: -1})


def test_it_forgets_what_has_ended() -> None:
    policy = scheduler()
    first, second = requests(A, B)
    policy.add(first)
    policy.add(second)
    policy.remove(second)
    assert run(policy, FakeStep([])) == [0]
    policy.remove(first)
    assert not policy.entries and not policy.waiting and not policy.running
