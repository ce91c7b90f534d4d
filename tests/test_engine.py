"""Situations that engines of this family got wrong, on the fake model. Case ids are those of the case list."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.hooks import StepRecord
from core.interfaces import Request, SamplingParams, Scheduler, Step
from core.observers import Observers
from core.testing.fake import VOCAB, check_books, define, drive, expected, workload
from tests.fake import SCHEDULERS, make_engine

BOTH = pytest.mark.parametrize("scheduler", list(SCHEDULERS))
OVERLAP = pytest.mark.parametrize("overlap", [0, 1])


def greedy(max_tokens: int, **kw: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kw)


def finish(engine, bound: int = 500) -> None:
    for _ in range(bound):
        if not engine.busy:
            return
        engine.step()
        check_books(engine)
    raise AssertionError("steps are not bounded")


@BOTH
@OVERLAP
def test_a_pool_too_small_for_the_wish(scheduler: str, overlap: int) -> None:
    """B07: 2 blocks of 4, prompt 7, 20 wanted: ends with length at what the pool holds; others finish."""
    engine = make_engine(scheduler, blocks=2, overlap=overlap)
    long, other = engine.submit(list(range(7)), greedy(20)), engine.submit([1, 2], greedy(3))
    finish(engine)
    assert (long.finish_reason, len(long.tokens)) == ("length", 8)
    assert (other.finish_reason, len(other.tokens)) == ("length", 5)


@BOTH
def test_a_prompt_larger_than_the_pool_is_refused(scheduler: str) -> None:
    """B08: prompt of 40, pool of 8 blocks of 4: both numbers are named; the small one behind completes."""
    engine = make_engine(scheduler, blocks=8)
    with pytest.raises(ValueError, match=r"40 tokens.*holds 32"):
        engine.submit(list(range(40)), greedy(1))
    small = engine.submit([1], greedy(2))
    finish(engine)
    assert small.finish_reason == "length" and engine.stats.steps == 2


@BOTH
@OVERLAP
def test_preemption_changes_no_token(scheduler: str, overlap: int) -> None:
    """B09: room for one and a half requests: several preemptions, equal tokens, no token twice in the stream."""
    work = [(list(range(10)), greedy(30)), (list(range(20, 30)), greedy(30)), ([40], greedy(30))]
    engine = make_engine(scheduler, "paged", blocks=15, overlap=overlap)
    assert drive(engine, work).tokens == expected(work)
    assert engine.stats.evictions >= 2


def test_mixed_serves_every_running_request() -> None:
    """B15: under mixed each running request gets one token per step while prompts keep arriving."""
    engine = make_engine("mixed", "paged", blocks=200, slots=8, budget=16, max_len=64)
    running = [engine.submit([i], greedy(50)) for i in range(3)]
    engine.step()
    for i in range(30):
        engine.submit([i % VOCAB] * 20, greedy(1))
        before = [len(r.tokens) for r in running]
        engine.step()
        assert [len(r.tokens) for r in running] == [n + 1 for n in before]


def test_giving_way_behind_a_prompt_under_way() -> None:
    """With decode_after a running request may give way while the head of the queue is cut and keeps its blocks: in front of
    it neither could ever run."""
    engine = make_engine("fcfs", "paged", blocks=6, budget=4, decode_after=1)
    work = [([1, 2], greedy(8)), (list(range(20)), greedy(4))]
    assert drive(engine, work).tokens == expected(work)
    assert engine.stats.evictions > 0


@pytest.mark.parametrize(("decode_after", "starved"), [(0, True), (3, False)])
def test_fcfs_starves_unless_bounded(decode_after: int, starved: bool) -> None:
    """B15: seed-exact fcfs serves prompts only while they come; decode_after=3 gives a decode step after three of them."""
    engine = make_engine("fcfs", "paged", blocks=200, slots=8, budget=16, decode_after=decode_after)
    running = engine.submit([1], greedy(60))
    engine.step()
    engine.step()
    before = len(running.tokens)
    for i in range(40):
        engine.submit([i % VOCAB] * 16, greedy(1))
        engine.step()
    gained = len(running.tokens) - before
    assert gained == 0 if starved else gained == 10


@BOTH
@OVERLAP
@pytest.mark.parametrize("when", ["waiting", "mid-chunk", "running", "preempted", "finished", "unknown"])
def test_abort(scheduler: str, overlap: int, when: str) -> None:
    """B21: blocks back by the next step, no further output, neighbours' shared blocks intact, idempotent."""
    shared = list(range(12))
    blocks = 8 if when == "preempted" else 40
    engine = make_engine(scheduler, blocks=blocks, budget=8, overlap=overlap)
    neighbour = engine.submit([*shared, 50], greedy(12))
    victim = engine.submit([*shared, 51, 52, 53], greedy(12))
    steps = {"waiting": 0, "mid-chunk": 3, "running": 6, "preempted": 400, "finished": 400, "unknown": 2}[when]
    for _ in range(steps):
        if engine.busy and not (when == "preempted" and victim.metrics.preemptions and victim.seat is None):
            engine.step()
    assert when != "preempted" or (victim.metrics.preemptions and victim.seat is None and not victim.finish_reason)
    reason = victim.finish_reason
    number = 99 if when == "unknown" else victim.id
    for _ in range(2):
        engine.abort(number)
    if when not in ("finished", "unknown"):
        assert victim.finish_reason == "abort" and victim.seat is None
    elif when == "finished":
        assert victim.finish_reason == reason == "length"
    check_books(engine)
    while engine.busy:
        outputs = engine.step()
        assert when == "unknown" or all(o.request is not victim for o in outputs)
        check_books(engine)
    assert neighbour.tokens[13:] == define(neighbour.tokens[:13], neighbour.params, 25)
    assert engine.kv.audit()[2] == 0


@BOTH
def test_bad_prompts_leave_the_queue_alone(scheduler: str) -> None:
    """B23: an empty prompt, or an id outside the vocabulary, is refused for itself."""
    engine = make_engine(scheduler)
    good = engine.submit([1, 2], greedy(2))
    for bad, message in (([], "empty"), ([1, VOCAB], f"token id {VOCAB}"), ([-1], "token id -1")):
        with pytest.raises(ValueError, match=message):
            engine.submit(bad, greedy(1))
    assert list(engine.live) == [good.id]
    finish(engine)
    assert good.finish_reason == "length"


@BOTH
@OVERLAP
@pytest.mark.parametrize("prompt", [10, 15, 16, 17])
def test_length_limit(scheduler: str, overlap: int, prompt: int) -> None:
    """B25: block 4, limit 16, 100 wanted: over it refused, never longer than it, table never wider than limit / block."""
    engine = make_engine(scheduler, blocks=30, max_len=16, overlap=overlap)
    if prompt > 16:
        with pytest.raises(ValueError, match=r"17 tokens.*max_model_len is 16"):
            engine.submit(list(range(prompt)), greedy(100))
        return
    request = engine.submit(list(range(prompt)), greedy(100))
    finish(engine)
    assert request.finish_reason == "length" and len(request.tokens) == 16
    columns = [int(p.new_blocks[:, 1].max(initial=0)) for p in engine.executor.plans]
    assert max(columns, default=0) < 4


@OVERLAP
def test_stop_tokens(overlap: int) -> None:
    """B26: stops of the checkpoint and of the user; ignore_eos switches the former off only."""
    prompt = [1, 2, 3]
    tokens = define(prompt, greedy(10), 13)
    eos, own = tokens[2], tokens[5]
    assert tokens.index(eos) == 2 and tokens.index(own) == 5, "the example needs distinct tokens"
    engine = make_engine(eos=frozenset([eos]), overlap=overlap)
    a = engine.submit(prompt, greedy(10))
    b = engine.submit(prompt, greedy(10, ignore_eos=True, stop_token_ids=[own]))
    c = engine.submit(prompt, greedy(10, ignore_eos=True))
    finish(engine)
    assert (a.tokens[3:], a.finish_reason) == (tokens[:3], "stop")
    assert (b.tokens[3:], b.finish_reason) == (tokens[:6], "stop")
    assert (c.tokens[3:], c.finish_reason) == (tokens, "length")
    assert engine.stats.surplus == (2 if overlap else 0), "a stop is a late event under overlap: one surplus token each"


@BOTH
@OVERLAP
def test_nan_rows_end_alone(scheduler: str, overlap: int) -> None:
    """B34: a row without a finite logit ends that request with an error, poisons no cached block, harms nobody else."""
    prompt, other = list(range(9)), list(range(20, 29))
    tokens = define(prompt, greedy(9), 18)
    engine = make_engine(scheduler, overlap=overlap)
    engine.executor.poison = lambda token: token == tokens[4]
    neighbour_tokens = define(other, greedy(3), 12)
    assert tokens[4] not in neighbour_tokens, "the example needs other tokens"
    bad, good = engine.submit(prompt, greedy(9)), engine.submit(other, greedy(3))
    finish(engine)
    assert bad.finish_reason == "error" and "finite" in bad.message
    assert bad.tokens[9:] == tokens[: tokens.index(tokens[4])]
    assert good.finish_reason == "length" and good.tokens[9:] == neighbour_tokens
    assert engine.kv.match(prompt, []) == [], "blocks of the poisoned row are still found"


@OVERLAP
def test_seeds(overlap: int) -> None:
    """B32: a seeded request draws the same alone, in any batch and after preemption; unseeded ones are reproducible too."""
    params = SamplingParams(temperature=1, max_tokens=12, seed=5)
    alone = define([3, 4], params, 14)
    rng = random.Random(1)
    crowd = [([rng.randrange(VOCAB) for _ in range(9)], SamplingParams(max_tokens=15)) for _ in range(6)]
    runs = []
    for _ in range(2):
        engine = make_engine(blocks=14, budget=8, overlap=overlap)
        run = drive(engine, [*crowd, ([3, 4], params)])
        assert run.tokens[6] == alone and engine.stats.evictions > 0
        runs.append(run.tokens)
    assert runs[0] == runs[1]
    assert len({tuple(t) for t in runs[0].values()}) == 7, "unseeded requests have seeds of their own"


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_drafts_are_exact(overlap: int, wrong: float) -> None:
    """Sample-and-compare speculation draws the definition's tokens whatever the drafts are, and right ones save steps."""
    rng = random.Random(0)
    work = [([rng.randrange(VOCAB) for _ in range(7)], greedy(16)) for _ in range(4)]
    wanted = expected(work)
    engine = make_engine("mixed", overlap=overlap)
    requests = [engine.submit(*item) for item in work]
    while engine.busy:
        for r in requests:
            r.host_bound, done = True, len(r.tokens) - r.num_prompt
            if r.seat and not r.promised and not r.prefilling and not r.draft and not r.finish_reason:
                rest = wanted[r.id][done:][: min(3, r.limit - len(r.tokens) - 1)]
                r.draft = [t if rng.random() >= wrong else (t + 1) % VOCAB for t in rest]
        engine.step()
        check_books(engine)
    assert {r.id: r.tokens[7:] for r in requests} == wanted
    if wrong == 0.0:
        assert engine.stats.accepted == engine.stats.drafted > 20
    if wrong == 1.0:
        assert engine.stats.accepted == 0 < engine.stats.drafted


@OVERLAP
def test_an_end_within_accepted_drafts(overlap: int) -> None:
    """Who finds stop strings is told each token once, in order; drafts behind the end are dropped, whoever was right."""
    prompt = [1, 2, 3]
    tokens, told = define(prompt, greedy(12), 15), []

    def ends(token: int) -> bool:
        told.append(token)
        return len(told) == 6

    engine = make_engine("mixed", overlap=overlap)
    request = engine.submit(prompt, greedy(12), ends=ends)
    while engine.busy:
        request.host_bound, done = True, len(request.tokens) - 3
        if request.seat and not request.promised and not request.prefilling and not request.draft:
            request.draft = tokens[done : done + 3]
        engine.step()
        check_books(engine)
    assert request.tokens[3:] == told == tokens[:6] and request.finish_reason == "stop"
    assert engine.stats.accepted > 0


class Refuses(Scheduler):
    """Grants nothing to odd ids; keeps everything."""

    def __init__(self, settings: Any, context: Any) -> None:
        super().__init__(settings, context)
        self.queue: list[Request] = []

    def add(self, request: Request) -> None:
        self.queue.append(request)

    def remove(self, request: Request) -> None:
        self.queue.remove(request)

    def schedule(self, step: Step) -> None:
        for request in self.queue:
            if request.id % 2 == 0:
                step.grant(request)


def test_who_can_never_run_ends_with_an_error() -> None:
    """A stalled request ends with a message that shows the pool; the engine goes on."""
    engine = make_engine(Refuses)
    requests = [engine.submit([1, 2], greedy(2)) for _ in range(4)]
    finish(engine)
    assert [r.finish_reason for r in requests] == ["length", "error", "length", "error"]
    assert "can never run" in requests[1].message and "40 free" in requests[1].message.replace("reusable", "")
    after = engine.submit([1, 2, 3], greedy(1))
    finish(engine)
    assert after.finish_reason == "length"


class Waits(Refuses):
    def schedule(self, step: Step) -> None:
        for request in self.queue:
            if step.now >= 5.0:
                step.grant(request)
            else:
                step.wait(5.0)


def test_wait_is_an_empty_step_on_purpose() -> None:
    engine = make_engine(Waits)
    request = engine.submit([1, 2], greedy(2))
    assert engine.step() == [] and engine.clock() == 5.0
    finish(engine)
    assert request.finish_reason == "length"


class Raises(Refuses):
    def schedule(self, step: Step) -> None:
        step.grant(self.queue[0])
        raise RuntimeError("scheduler bug")


def test_a_raising_scheduler_leaves_clean_books() -> None:
    engine = make_engine(Raises)
    engine.submit(list(range(9)), greedy(2))
    with pytest.raises(RuntimeError, match="scheduler bug"):
        engine.step()
    check_books(engine)
    assert engine.kv.audit() == (40, 0, 0)


def test_a_failed_launch_loses_no_change_of_the_block_table() -> None:
    """Changes that wait for the next plan (here: two equal blocks became one) must survive when that plan never arrives."""
    engine = make_engine("mixed", blocks=9, slots=3, budget=32)
    first = engine.submit(list(range(8)), greedy(12))
    twin = engine.submit(list(range(8)), greedy(12))
    engine.step()
    assert engine.seats.rows, "the example needs a change that waits"
    launch, twin.host_bound, twin.promised = engine.executor.launch, True, 1  # the twin sits the failing step out
    engine.executor.launch = lambda plan: (_ for _ in ()).throw(RuntimeError("device lost"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    assert first.finish_reason == "error" and twin.finish_reason is None
    engine.executor.launch, twin.host_bound, twin.promised = launch, False, 0  # type: ignore[method-assign]
    other = engine.submit(list(range(30, 38)), greedy(9))
    finish(engine)
    for request, length in ((twin, 20), (other, 17)):
        assert request.tokens[8:] == define(request.tokens[:8], greedy(1), length)


@OVERLAP
def test_a_failing_executor_ends_the_requests_of_its_step(overlap: int) -> None:
    """Nothing stays held, nothing of the failed step is found in the cache, and later requests run."""
    engine = make_engine(overlap=overlap)
    launch = engine.executor.launch
    engine.executor.launch = lambda plan: (_ for _ in ()).throw(RuntimeError("device lost"))  # type: ignore[method-assign]
    request = engine.submit(list(range(9)), greedy(2))
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    assert request.finish_reason == "error" and "device lost" in request.message
    check_books(engine)
    assert engine.kv.audit() == (40, 0, 0)
    engine.executor.launch = launch  # type: ignore[method-assign]
    after = engine.submit(list(range(9)), greedy(2))
    finish(engine)
    assert after.tokens[9:] == define(list(range(9)), greedy(2), 11)


def test_observers_are_guarded() -> None:
    """Records arrive; a raising observer is named and switched off, the run goes on."""
    seen: list[StepRecord] = []

    def broken(record: StepRecord) -> None:
        raise KeyError("oops")

    engine = make_engine()
    engine.observers = Observers()
    engine.observers.step = [("good", lambda record: seen.append(record)), ("bad", broken)]
    engine.submit([1, 2, 3], greedy(4))
    finish(engine)
    assert [r.tokens for r in seen] == [3, 1, 1, 1] and [r.draws for r in seen] == [1] * 4
    assert [name for name, _ in engine.observers.step] == ["good"] and "oops" in engine.observers.failed["bad"]["inferlab_step"]


def test_metrics_of_a_request() -> None:
    engine = make_engine(blocks=40)
    first = engine.submit(list(range(9)), greedy(1))
    finish(engine)
    second = engine.submit(list(range(9)), greedy(1))
    finish(engine)
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, 8)
    assert engine.stats.cached_tokens == 8 and second.metrics.first_token is not None


class Life(RuleBasedStateMachine):
    """Scheduler and allocator under random submissions, steps, aborts, cache resets; every token is the definition's."""

    @initialize(
        scheduler=st.sampled_from([("fcfs", {}), ("fcfs", {"decode_after": 1}), ("mixed", {}), ("mixed", {"max_chunk": 3})]),
        allocator=st.sampled_from(["block_hash", "paged"]),
        overlap=st.integers(0, 1),
        block_size=st.sampled_from([1, 3, 4]),
        room=st.integers(0, 12),
        slots=st.integers(1, 4),
        budget=st.integers(4, 20),
    )
    def build(self, scheduler, allocator, overlap, block_size, room, slots, budget) -> None:
        blocks = -(-24 // block_size) + room
        limits = {"block_size": block_size, "blocks": blocks, "slots": slots, "budget": budget, "max_len": 24}
        self.engine = make_engine(scheduler[0], allocator, overlap=overlap, **limits, **scheduler[1])
        self.requests: list[Request] = []
        self.idle = 0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24), wanted=st.integers(1, 12), heat=st.integers(0, 1))
    def submit(self, prompt: list[int], wanted: int, heat: int) -> None:
        params = SamplingParams(temperature=heat, max_tokens=wanted, seed=len(self.requests) + 1 if heat else 0)
        self.requests.append(self.engine.submit(prompt, params))

    @precondition(lambda self: self.engine.busy)
    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            before = self.engine.stats.tokens, len(self.engine.live)
            self.engine.step()
            check_books(self.engine)
            same = before == (self.engine.stats.tokens, len(self.engine.live))
            self.idle = self.idle + 1 if same and self.engine.busy else 0
            assert self.idle < 4, "no progress"

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.requests)).id)

    @rule()
    def reset_cache(self) -> None:
        self.engine.kv.forget(None)

    @invariant()
    def books(self) -> None:
        if hasattr(self, "engine"):
            check_books(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        finish(self.engine, 3000)
        assert self.engine.kv.audit()[2] == 0
        for r in self.requests:
            got, limit = r.tokens[r.num_prompt :], r.limit
            whole = define(r.tokens[: r.num_prompt], r.params, limit)
            assert r.finish_reason in ("length", "abort")
            assert got == (whole if r.finish_reason == "length" else whole[: len(got)])


Life.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase


@pytest.mark.nightly
def test_life_long() -> None:
    """The same machine, 3,000 lives."""
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Life, settings=settings(max_examples=3000, stateful_step_count=60, deadline=None))


@BOTH
@OVERLAP
def test_workloads_with_aborts_leave_nothing(scheduler: str, overlap: int) -> None:
    """B20: any mix of finish, abort, preemption: free + reusable = pool, no holder, when idle."""
    for seed in range(8):
        rng, engine = random.Random(seed), make_engine(scheduler, blocks=17, overlap=overlap)
        requests = [engine.submit(*item) for item in workload(seed)]
        while engine.busy:
            engine.step()
            if rng.random() < 0.15:
                engine.abort(rng.choice(requests).id)
            check_books(engine)
        free, reusable, held = engine.kv.audit()
        assert (free + reusable, held) == (17, 0)
