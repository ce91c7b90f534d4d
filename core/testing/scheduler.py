"""Contract suite for schedulers, on the fake model.

What a scheduler may claim, in its component's `provides` (each a whole number, or the name of the setting that holds it,
where 0 means that nothing is claimed):

- `max_wait_steps`: a running request that fits (blocks for all, budget for all running ones) is passed over in at most so
  many steps in a row, however many prompts arrive;
- `max_overtaken`: at most so many requests that came later are admitted before a waiting one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from core.interfaces import HostContext, Request, SamplingParams, Scheduler
from core.plugins import discover
from core.plugins.loading import load
from core.testing.fake import VOCAB, FakeEngine, drive, expected, make_engine, workload
from core.testing.life import Maker, check_request, finish, live
from core.testing.suite import Suite

OVERLAPS = pytest.mark.parametrize("overlap", [0, 1])


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


class SchedulerSuite(Suite):
    """No request is lost, budget and seats are respected, steps are bounded, tokens are those of an ample pool."""

    kind = "scheduler"
    allocators: ClassVar[Sequence[str]] = ("block_hash", "paged")  # options of kv_allocator to run with

    def setup_method(self, method: Callable[..., object]) -> None:
        """What serves certain requests only is tested by its author, with these."""
        if method.__name__ != "test_declaration" and (only := self.declared().provides.get("serves_only")):
            pytest.skip(f"scheduler={self.declared().name} serves only {only}")

    def engine(self, allocator: str = "block_hash", **limits: Any) -> FakeEngine:
        """A fake engine under this scheduler; `limits` are those of core.testing.fake.make_engine."""
        kv, target = discover().find("kv_allocator", allocator).component, self.target()
        overlap = limits.get("overlap", 0)
        if overlap not in self.accepted("overlap", (0, 1)):
            pytest.skip(f"declares overlap to be {self.declared().capabilities['overlap']}")

        def policy(context: HostContext) -> Scheduler:
            return target(self.new_settings(), context)

        return make_engine(policy, lambda context: load(kv)(kv.settings(context.block_size), context), **limits)

    @OVERLAPS
    def test_no_request_is_lost(self, overlap: int) -> None:
        """Everybody ends with all tokens that were asked for, be the queue long or empty in between."""
        engine = self.engine(overlap=overlap, blocks=200)
        for wave in range(3):
            requests = [engine.submit([wave, i, 7], greedy(1 + i % 5)) for i in range(12)]
            finish(engine)
            for request in requests:
                assert request.finish_reason == "length", f"request {request.id} is lost: {request.message}"
                check_request(request)

    @OVERLAPS
    @pytest.mark.parametrize("budget", [1, 3, 5])
    def test_prompts_longer_than_the_budget(self, overlap: int, budget: int) -> None:
        """A step holds at most `max_num_batched_tokens` tokens; a longer prompt is cut, not refused and not forgotten."""
        engine = self.engine(overlap=overlap, blocks=100, slots=min(budget, 4), budget=budget)
        requests = [engine.submit(list(range(i, i + 17)), greedy(3)) for i in range(4)]
        finish(engine)
        for request in requests:
            check_request(request)

    @OVERLAPS
    @pytest.mark.parametrize("slots", [1, 2])
    def test_more_requests_than_seats(self, overlap: int, slots: int) -> None:
        """At most `max_num_seqs` requests are resident; the others wait and get their turn."""
        engine = self.engine(overlap=overlap, blocks=100, slots=slots, budget=8)
        requests = [engine.submit([i] * (1 + i % 6), greedy(4)) for i in range(9)]
        finish(engine)
        for request in requests:
            check_request(request)

    @OVERLAPS
    def test_blocks_run_out(self, overlap: int) -> None:
        """Room for one and a half requests: some give way, all end, and the tokens are those of an ample pool."""
        work = [(list(range(10)), greedy(30)), (list(range(20, 30)), greedy(30)), ([40], greedy(30))]
        for allocator in self.allocators:
            run = drive(self.engine(allocator, overlap=overlap, blocks=15), work)
            self.check(run.tokens, run.messages, expected(work))

    @OVERLAPS
    def test_tokens_equal_an_ample_pool(self, overlap: int) -> None:
        """Random workloads with shared prefixes, repeats, stops and labels; tight pools and small budgets."""
        for seed in range(self.seeds):
            for allocator in self.allocators:
                for size, room, budget, slots in ((1, 0, 8, 2), (3, 3, 8, 8), (4, 1, 16, 4), (16, 30, 64, 8)):
                    limits = {"block_size": size, "blocks": -(-64 // size) + room, "budget": budget, "slots": slots}
                    work = workload(seed)
                    run = drive(self.engine(allocator, overlap=overlap, **limits), work, seed, label=True)
                    self.check(run.tokens, run.messages, expected(work))

    @staticmethod
    def check(tokens: Mapping[int, list[int]], messages: Mapping[int, str], wanted: Mapping[int, list[int]]) -> None:
        for number, want in wanted.items():
            got = tokens.get(number, [])
            assert got == want, f"request {number} drew {got}, alone it draws {want}. {messages[number]}"

    def test_any_order_of_events(self) -> None:
        """State machine: submissions, steps, aborts and cache resets in any order; the books balance after each."""
        makers: list[Maker] = []
        for allocator in self.allocators:
            makers.append(lambda allocator=allocator, **limits: self.engine(allocator, **limits))
        live(makers, (1, 3, 4), self.accepted("overlap", (0, 1)), self.examples, self.steps)

    @OVERLAPS
    def test_aborts(self, overlap: int) -> None:
        """A request that is removed while waiting, cut, running or in flight is not thought of any more."""
        for after in range(7):
            engine = self.engine(overlap=overlap, budget=8, blocks=14)
            requests = [engine.submit([*range(12), 50 + i], greedy(9)) for i in range(3)]
            for _ in range(after):
                engine.step()
            engine.abort(requests[after % 3].id)
            engine.abort(requests[after % 3].id)
            finish(engine)
            for request in requests:
                check_request(request)

    @OVERLAPS
    def test_nobody_is_evicted_for_nothing(self, overlap: int) -> None:
        """Seats and blocks for all: a refusal for another reason (`step.short`: tokens, later, whole) is none to evict."""
        engine = self.engine("paged", overlap=overlap, blocks=400, slots=16, budget=16)
        for i in range(14):
            engine.submit([i] * (5 + 3 * i), greedy(6))
            if i % 2 == 0:
                continue  # two at once: of one the budget refuses the rest
            engine.step()
            evictions = engine.scheduler.evictions
            assert evictions == 0, f"{evictions} evictions in {i // 2 + 1} steps with seats and blocks for everybody"
        finish(engine)
        assert engine.scheduler.evictions == 0, f"{engine.scheduler.evictions} evictions with seats and blocks for everybody"

    def test_engines_share_nothing(self) -> None:
        """Two engines at once in one process: each has the steps that it has alone."""

        def steps(engine: FakeEngine) -> list[tuple[list[int], list[int]]]:
            return [(plan.slots.tolist(), plan.counts.tolist()) for plan in engine.executor.plans]

        alone, *pair = (self.engine(blocks=20, budget=8, slots=3) for _ in range(3))
        for engine in (alone, *pair):
            for i in range(6):
                engine.submit([i, *range(i)], greedy(5))
        finish(alone)
        while any(engine.busy for engine in pair):
            for engine in pair:
                if engine.busy:
                    engine.step()
        for engine in pair:
            assert steps(engine) == steps(alone), (
                "equal requests gave other steps: state is shared, or not drawn from the queue"
            )

    def claim(self, name: str) -> int | None:
        """What the component claims under `name` with these settings; None if nothing."""
        value = self.declared().provides.get(name)
        if isinstance(value, str):
            settings = self.new_settings()
            assert hasattr(settings, value), f"provides[{name!r}] names the setting {value}, which does not exist"
            return getattr(settings, value) or None
        assert value is None or (isinstance(value, int) and value >= 0), (
            f"provides[{name!r}] must be a whole number or a setting"
        )
        return value

    @OVERLAPS
    def test_running_requests_wait_no_longer_than_claimed(self, overlap: int) -> None:
        """`max_wait_steps`: prompts keep arriving, and each running request advances in time."""
        bound = self.claim("max_wait_steps")
        if bound is None:
            pytest.skip("claims no max_wait_steps")
        engine = self.engine("paged", overlap=overlap, blocks=400, slots=8, budget=16, max_len=200)
        running = [engine.submit([i], greedy(150)) for i in range(3)]
        while any(request.prefilling or request.seat is None for request in running):
            engine.step()
        waited = dict.fromkeys(running, 0)
        for i in range(60):
            engine.submit([i % VOCAB] * 16, greedy(1))
            engine.step()
            for request in running:
                waited[request] = 0 if request in engine.scheduler.granted else waited[request] + 1
                assert waited[request] <= bound, (
                    f"request {request.id} was passed over in {waited[request]} steps, claimed: {bound}"
                )

    def test_waiting_requests_are_overtaken_no_more_than_claimed(self) -> None:
        """`max_overtaken`: short and long prompts keep arriving, and each is admitted in time."""
        bound = self.claim("max_overtaken")
        if bound is None:
            pytest.skip("claims no max_overtaken")
        engine = self.engine("paged", blocks=400, slots=3, budget=16)
        requests: list[Request] = []
        started: list[Request] = []
        for i in range(120):
            requests.append(engine.submit([i % VOCAB] * (40 if i % 7 == 0 else 1 + i % 3), greedy(2)))
            engine.step()
            started += [r for r in engine.scheduler.granted if r not in started]
        for request in requests:
            before = started[: started.index(request)] if request in started else started
            overtaken = sum(other.id > request.id for other in before)
            assert overtaken <= bound, f"request {request.id} was overtaken by {overtaken} later ones, claimed: {bound}"
