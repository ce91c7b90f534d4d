"""Shortest remaining first: of all requests the one with the least left to compute goes first, so the mean wait is short.

`patience` keeps long requests from waiting for ever: whoever has waited so long goes first, whatever is left to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from core.interfaces import Component, HostContext, Request, Scheduler, Step, hookimpl, setting


@dataclass
class Settings:
    """Given as scheduler.NAME=VALUE."""

    patience: float = setting(30.0, "after waiting so long a request goes first; 0: never", "seconds")

    def __post_init__(self) -> None:
        if self.patience < 0:
            raise ValueError(f"scheduler.patience must be >= 0 seconds (0: off), got {self.patience}")


class MyPluginScheduler(Scheduler):
    """Residents (requests that hold a seat) advance in every step; those that wait get what they leave of the budget."""

    def __init__(self, settings: Settings, context: HostContext) -> None:
        super().__init__(settings, context)
        self.requests: dict[Request, None] = {}  # in order of arrival; a dict, so that removing is cheap

    def add(self, request: Request) -> None:
        self.requests[request] = None

    def remove(self, request: Request) -> None:
        del self.requests[request]

    def schedule(self, step: Step) -> None:
        order = sorted(self.requests, key=lambda request: self.rank(request, step.now))
        self.advance(step, deque(r for r in order if r.seat is not None))
        for request in (r for r in order if r.seat is None):
            # Blocks for the whole prompt at once: a request that is admitted can compute all of it.
            if not step.grant(request, reserve=request.length) and step.short != "later":
                break

    def rank(self, request: Request, now: float) -> tuple[bool, float]:
        """Lowest first: overdue requests by arrival, then the others by tokens that are still to be computed or drawn."""
        overdue = 0 < self.settings.patience <= now - request.arrival
        return not overdue, request.arrival if overdue else request.remaining + request.limit - request.length

    def advance(self, step: Step, residents: deque[Request]) -> None:
        """Grant in order; where blocks run out, the resident with the most left to do gives its seat away."""
        while residents:
            request = residents.popleft()
            while not step.grant(request) and step.short == "blocks":
                victim = residents.pop() if residents else request
                step.evict(victim)
                if victim is request:
                    break


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="scheduler",
        name="my-plugin",
        target="my_plugin:MyPluginScheduler",
        settings=Settings,
        summary="shortest remaining first; nobody waits longer than `patience`",
        api=(1, 0),
    )
