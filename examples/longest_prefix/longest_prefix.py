"""Longest cached prefix first, so that requests which share a prefix run together while it is in the cache.

Waiting requests are kept in groups of equal first block: only members of one group can share cached blocks. Of all that
wait the one that finds most positions in the cache is admitted first; then its group is looked up again, since what it
computes is found by the others in this very step. Ties go to the older request.

Fairness: whoever is older than the admitted request was overtaken once more. A request that was overtaken `patience` times
goes before everybody who came later, and nobody is admitted while it cannot be; so no request is overtaken more often than
that. Running requests never wait for a prompt: decodes come first in every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.interfaces import Component, HostContext, Request, Scheduler, Step, hookimpl, setting


@dataclass
class Settings:
    """Longest cached prefix first."""

    patience: int = setting(64, "how often later ones may overtake a waiting one; 0: strictly in order of arrival", "requests")
    lookahead: int = setting(256, "the oldest waiting ones that are compared in a step; 0: all of them", "requests")

    def __post_init__(self) -> None:
        for name in ("patience", "lookahead"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"scheduler.{name} must be a whole number >= 0, got {value}")


@dataclass
class Entry:
    """What is known of a request from `add` to `remove`."""

    number: int  # order of arrival
    group: tuple[int, ...]  # tokens of its first block
    overtaken: int = 0


class LongestPrefix(Scheduler):
    """`waiting` in order of arrival, `running` in order of admission."""

    def __init__(self, settings: Settings, context: HostContext) -> None:
        super().__init__(settings, context)
        self.entries: dict[Request, Entry] = {}
        self.waiting: list[Request] = []
        self.running: dict[Request, None] = {}
        self._numbers = itertools.count()

    def add(self, request: Request) -> None:
        group = tuple(request.tokens[: self.context.block_size])
        self.entries[request] = Entry(next(self._numbers), group)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        del self.entries[request]
        if request in self.running:
            del self.running[request]
        else:
            self.waiting.remove(request)

    def schedule(self, step: Step) -> None:
        decodes = [request for request in self.running if not request.prefilling]
        prompts = [request for request in self.running if request.prefilling]
        self._decode(step, decodes)
        for request in prompts:
            if request in self.running and not step.grant(request) and step.short == "tokens":
                return
        self._admit(step)

    def _decode(self, step: Step, decodes: list[Request]) -> None:
        """One token for each; where blocks run out the last to be admitted gives way, never one that advances now."""
        granted: set[Request] = set()
        for request in decodes:
            while request in self.running and not step.grant(request):
                if step.short != "blocks":
                    break
                self._give_way(step, next(r for r in reversed(self.running) if r not in granted))
            granted.add(request)

    def _give_way(self, step: Step, request: Request) -> None:
        """Back among the waiting, at its place by arrival; what it computed is likely to be found in the cache again."""
        step.evict(request)
        del self.running[request]
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: self.entries[r].number)

    def _admit(self, step: Step) -> None:
        matches = {request: step.cached(request) for request in self.waiting[: self.settings.lookahead or None]}
        while matches:
            request = self._next(matches)
            # Blocks for the whole prompt, so that two half-computed prompts cannot wait for each other's.
            if step.grant(request, reserve=request.length):
                self._admitted(request)
                group = self.entries[request].group
                matches |= {r: step.cached(r) for r in matches if r is not request and self.entries[r].group == group}
            elif step.short != "later" or self._overdue(request):
                return
            del matches[request]  # admitted; or its last token is in flight, and others need not wait for that

    def _next(self, matches: Mapping[Request, int]) -> Request:
        """The oldest of those who were overtaken often enough, else the longest match. `matches` is in order of arrival."""
        overdue = next(filter(self._overdue, matches), None)
        return overdue or max(matches, key=matches.__getitem__)  # of equals the first, which is the oldest

    def _overdue(self, request: Request) -> bool:
        return self.entries[request].overtaken >= self.settings.patience

    def _admitted(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running[request] = None
        number = self.entries[request].number
        for other in itertools.takewhile(lambda r: self.entries[r].number < number, self.waiting):
            self.entries[other].overtaken += 1


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="scheduler",
        name="longest_prefix",
        target="longest_prefix:LongestPrefix",
        settings=Settings,
        summary="the waiting request with the longest cached prefix first, overtaking bounded by scheduler.patience",
        provides={"max_wait_steps": 0, "max_overtaken": "patience"},
    )
