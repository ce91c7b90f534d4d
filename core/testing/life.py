"""State machine over a whole engine: random submissions, steps, aborts and cache resets, every token the definition's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from core.interfaces import Request, SamplingParams
from core.testing.fake import FakeEngine, check_books, define, labels

Maker = Callable[..., FakeEngine]  # called with the limits of core.testing.fake.make_engine
LONGEST = 24  # tokens of a request


def machine_settings(examples: int, steps: int) -> settings:
    """The same runs every time: a suite that passes keeps passing. Other runs come with more `examples`."""
    same = settings(deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
    return settings(same, max_examples=examples, stateful_step_count=steps)


def finish(engine: FakeEngine, bound: int = 3000) -> None:
    """Step until nothing is left."""
    for _ in range(bound):
        if not engine.busy:
            return
        engine.step()
        check_books(engine)
    raise AssertionError(f"no progress: {bound} steps, and {len(engine.live)} requests are not done")


class Life(RuleBasedStateMachine):
    """`makers`: engines to try; `sizes`: block sizes; `overlaps`: allowed depths."""

    makers: Sequence[Maker] = ()
    sizes: Sequence[int] = (1, 3, 4)
    overlaps: Sequence[int] = (0, 1)

    @initialize(data=st.data(), room=st.integers(0, 12), slots=st.integers(1, 4), budget=st.integers(4, 20))
    def build(self, data: st.DataObject, room: int, slots: int, budget: int) -> None:
        make = self.makers[data.draw(st.integers(0, len(self.makers) - 1))]
        size, overlap = data.draw(st.sampled_from(self.sizes)), data.draw(st.sampled_from(self.overlaps))
        limits = {"block_size": size, "blocks": -(-LONGEST // size) + room, "slots": slots, "max_len": LONGEST}
        self.engine = make(overlap=overlap, budget=max(budget, slots), **limits)
        self.requests: list[Request] = []
        self.idle = 0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST), wanted=st.integers(1, 12), heat=st.integers(0, 1))
    def submit(self, prompt: list[int], wanted: int, heat: int) -> None:
        number = len(self.requests)
        params = SamplingParams(temperature=heat, max_tokens=wanted, seed=number + 1 if heat else 0)
        self.requests.append(self.engine.submit(prompt, params, labels=labels(number)))

    @precondition(lambda self: self.engine.busy)
    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            before = self.progress()
            self.engine.step()
            check_books(self.engine)
            self.idle = self.idle + 1 if before == self.progress() and self.engine.busy else 0
            assert self.idle < 4, "no progress: nothing was computed, waited for or ended in four steps"

    def progress(self) -> tuple[Any, ...]:
        return self.engine.stats.tokens, len(self.engine.live), self.engine.clock()

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
        finish(self.engine)
        assert self.engine.kv.audit()[2] == 0, "blocks are held when all requests have ended"
        for request in self.requests:
            check_request(request)


def check_request(request: Request) -> None:
    """It has ended, and has drawn the definition's tokens as far as it went."""
    got, prompt = request.tokens[request.num_prompt :], request.tokens[: request.num_prompt]
    assert request.finish_reason in ("length", "stop", "abort"), (
        f"request {request.id}: {request.finish_reason}: {request.message}"
    )
    whole = define(prompt, request.params, request.limit)
    want = whole[: len(got)] if request.finish_reason == "abort" else whole
    assert got == want, f"request {request.id} drew {got}, alone it draws {want}"


def live(makers: Sequence[Maker], sizes: Sequence[int], overlaps: Sequence[int], examples: int, steps: int) -> None:
    """Run the machine."""
    given = {"makers": makers, "sizes": sizes, "overlaps": overlaps}
    run_state_machine_as_test(type("Life", (Life,), given), settings=machine_settings(examples, steps))
