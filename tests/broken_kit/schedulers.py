"""Schedulers with one defect each. All but the fair ones start from the queues of the built-in ones."""

from __future__ import annotations

from typing import Any, ClassVar

from core.interfaces import Request, Scheduler, Step
from plugins.schedulers.common import Queues
from tests.broken_kit.defect import Defect


class Plain(Queues):
    """Right: running requests in order of admission, then waiting ones; the last to come gives way."""

    def schedule(self, step: Step) -> None:
        self.advance(step)
        while self.waiting and self.admit(step, self.waiting[0]):
            self.running[self.waiting.popleft()] = None

    def advance(self, step: Step) -> None:
        granted: set[Request] = set()
        for request in list(self.running):
            while request in self.running:
                if step.grant(request):
                    granted.add(request)
                    break
                if not self.is_stuck(step):
                    break
                self.give_way(step, next(r for r in reversed(self.running) if r not in granted))

    def is_stuck(self, step: Step) -> bool:
        return step.short == "blocks"

    def admit(self, step: Step, request: Request) -> int:
        return step.grant(request, reserve=request.length)


class LosesTheRefused(Plain):
    """Takes a request from the queue before it knows whether it is granted anything."""

    def schedule(self, step: Step) -> None:
        self.advance(step)
        while self.waiting:
            request = self.waiting.popleft()
            if not self.admit(step, request):
                return
            self.running[request] = None


class LosesTheEvicted(Plain):
    """Whoever gives way is not put back into the queue."""

    def give_way(self, step: Step, request: Request) -> None:
        step.evict(request)
        del self.running[request]

    def remove(self, request: Request) -> None:
        if request in self.running or request in self.waiting:
            super().remove(request)


class WholePromptsOnly(Plain):
    """Never cuts a prompt, so one that is longer than the budget is never computed."""

    def admit(self, step: Step, request: Request) -> int:
        return step.grant(request, whole=True, reserve=request.length)


class IgnoresTheBudget(Plain):
    """Helps itself to tokens of the step when there are too few for the next prompt."""

    def admit(self, step: Step, request: Request) -> int:
        if step.tokens_left < request.remaining:
            step.tokens_left = request.remaining  # type: ignore[misc]
        return super().admit(step, request)


class ReachesBehindTheStep(Plain):
    """Asks the allocator itself for room, which is there in the engine of today."""

    def admit(self, step: Step, request: Request) -> int:
        free, reusable, _ = step.kv.audit()  # type: ignore[attr-defined]
        return super().admit(step, request) if free + reusable > 2 else 0


class NeverEvicts(Plain):
    """When blocks run out, everybody waits for everybody."""

    def is_stuck(self, step: Step) -> bool:
        return False


class EvictsForEveryRefusal(Plain):
    """Takes every refusal for a lack of blocks."""

    def schedule(self, step: Step) -> None:
        granted = []
        while self.waiting and (self.admit(step, self.waiting[0]) or self.make_room(step, granted)):
            if self.waiting[0].seat:
                granted.append(self.waiting.popleft())
                self.running[granted[-1]] = None
        for request in self.running:
            if request not in granted:
                step.grant(request)

    def make_room(self, step: Step, granted: list[Request]) -> bool:
        """Whoever came last and is not in the step yet gives way."""
        victim = next((r for r in reversed(self.running) if r not in granted), None)
        if victim:
            step.evict(victim)
            del self.running[victim]
            self.waiting.append(victim)
        return victim is not None


class KeepsTheRemoved(Plain):
    """Goes on to ask for tokens for requests that have ended."""

    def remove(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)


class GrantsTwice(Plain):
    """Asks again for whoever it has advanced in this step."""

    def schedule(self, step: Step) -> None:
        super().schedule(step)
        for request in self.running:
            if request.remaining and step.tokens_left:
                step.grant(request)
        for request in self.running:
            if not request.remaining:
                step.grant(request)


class AsksForEver(Plain):
    """Repeats a refused grant in the same step, as if the answer could change."""

    def admit(self, step: Step, request: Request) -> int:
        while not (count := super().admit(step, request)) and step.short != "later":
            pass
        return count


class WritesToRequests(Plain):
    """Cuts the prefix that it takes for cached off a request's own state."""

    def admit(self, step: Step, request: Request) -> int:
        count = super().admit(step, request)
        if count and request.seat and request.remaining:
            request.seat.computed += 1
        return count


class SharesItsQueue(Scheduler):
    """One queue for all instances: a mutable class attribute."""

    queue: ClassVar[dict[Request, None]] = {}

    def add(self, request: Request) -> None:
        self.queue[request] = None

    def remove(self, request: Request) -> None:
        self.queue.pop(request, None)

    def schedule(self, step: Step) -> None:
        for request in self.queue:
            step.grant(request)


class LastComeFirstServed(Plain):
    """Claims that nobody is overtaken and serves the last to come first."""

    def add(self, request: Request) -> None:
        self.waiting.appendleft(request)


class StarvesRunning(Plain):
    """Claims that nobody is passed over, and serves prompts first."""

    def schedule(self, step: Step) -> None:
        while self.waiting and self.admit(step, self.waiting[0]):
            self.running[self.waiting.popleft()] = None
        if step.empty:
            self.advance(step)


class ClaimsNonsense(Plain):
    """Its bound is the name of a setting that it does not have."""


def broken(target: type, *caught: str, says: str, **more: Any) -> Defect:
    return Defect(target, tuple(f"test_{name}" for name in caught), says, "scheduler", **more)


DEFECTS = [
    broken(
        LosesTheRefused,
        "more_requests_than_seats",
        says=r"is the request lost\? .*the scheduler granted nothing",
    ),
    broken(LosesTheEvicted, "blocks_run_out", says=r"request 1 \(\d+ tokens\) can never run: .*the scheduler granted nothing"),
    broken(WholePromptsOnly, "prompts_longer_than_the_budget", says=r"can never run: .*\(last refusal: whole;"),
    broken(IgnoresTheBudget, "prompts_longer_than_the_budget", says=r"the scheduler wrote step\.tokens_left"),
    broken(ReachesBehindTheStep, "no_request_is_lost", says=r"the scheduler asked for step\.kv, .*Step has"),
    broken(NeverEvicts, "blocks_run_out", says=r"can never run: .*the scheduler granted nothing \(last refusal: blocks;"),
    broken(
        EvictsForEveryRefusal,
        "nobody_is_evicted_for_nothing",
        says=r"\d+ evictions in \d+ steps with seats and blocks for everybody",
    ),
    broken(
        KeepsTheRemoved, "no_request_is_lost", says=r"was removed \(or never added\), and the scheduler still works with it"
    ),
    broken(GrantsTwice, "no_request_is_lost", says=r"was granted tokens in this step already; one grant each"),
    broken(AsksForEver, "more_requests_than_seats", says=r"\d+ grants were asked for in one step with \d+ requests"),
    broken(WritesToRequests, "prompts_longer_than_the_budget", says=r"the scheduler wrote to request \d+"),
    broken(SharesItsQueue, "engines_share_nothing", says=r"was removed \(or never added\)"),
    broken(
        LastComeFirstServed,
        "waiting_requests_are_overtaken_no_more_than_claimed",
        says=r"was overtaken by \d+ later ones, claimed: 0",
        provides={"max_overtaken": 0},
    ),
    broken(
        StarvesRunning,
        "running_requests_wait_no_longer_than_claimed",
        says=r"was passed over in \d+ steps, claimed: 2",
        provides={"max_wait_steps": 2},
    ),
    broken(
        ClaimsNonsense,
        "running_requests_wait_no_longer_than_claimed",
        says=r"provides\['max_wait_steps'\] names the setting patience, which does not exist",
        provides={"max_wait_steps": "patience"},
    ),
]
