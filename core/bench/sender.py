"""Sends the requests of a load when they are due, whatever the engine is doing.

One thread serves both sides: a request that falls due while a step is running is submitted behind it, but counts as sent when
it was due. How late it was submitted is kept. Time is the engine's clock, real or virtual.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from core.engine import Engine
from core.interfaces import Request, SamplingParams
from core.loads import Load


class Sender:
    """`requests` and `late` have an entry for each request of the load, in its order."""

    def __init__(self, engine: Engine, load: Load, params: Sequence[SamplingParams]) -> None:
        self.engine, self.load, self.params = engine, load, params
        self.requests: list[Request | None] = [None] * len(load.prompts)
        self.late = [0.0] * len(load.prompts)  # seconds
        self.index: dict[int, int] = {}  # id of a request -> its place in the load
        self._due: list[tuple[float, int]] = []  # heap
        self._follower = {former: i for i, former in enumerate(load.before) if former is not None}
        self._backlog: deque[int] = deque()  # closed loop: sent when others have ended
        self.start = engine.clock()

    def begin(self) -> None:
        """What is sent at once, and what is known to come."""
        load = self.load
        firsts = [i for i in range(len(load.prompts)) if not load.before or load.before[i] is None]
        if load.at_once:
            for i in firsts:
                self._submit(i, None)
        elif load.concurrency is not None:
            self._backlog.extend(firsts[load.concurrency :])
            self._due = [(self.start, i) for i in firsts[: load.concurrency]]
        else:
            self._due = [(self.start + at, i) for i, at in enumerate(load.arrivals) if at is not None]
        heapq.heapify(self._due)

    @property
    def next_due(self) -> float | None:
        """When the next request is to be sent, as far as that is known now."""
        return self._due[0][0] if self._due else None

    def send_due(self) -> None:
        """Submit everything whose time has come."""
        while self._due and self._due[0][0] <= self.engine.clock():
            due, index = heapq.heappop(self._due)
            self._submit(index, due)
            self.late[index] = self.engine.clock() - due

    def ended(self, request: Request) -> None:
        """A later turn follows after its pause; in a closed loop the next one takes the place."""
        index, now = self.index[request.id], self.engine.clock()
        if (later := self._follower.get(index)) is not None:
            heapq.heappush(self._due, (now + self.load.thinks[later], later))
        elif self._backlog:
            heapq.heappush(self._due, (now, self._backlog.popleft()))

    def _submit(self, index: int, due: float | None) -> None:
        load, tokens = self.load, self.load.prompts[index]
        if load.before and (former := load.before[index]) is not None:
            said = self.requests[former]
            assert said is not None
            tokens = said.tokens + tokens
        labels = {"run": load.seed, "place": index, **(load.labels[index] if load.labels else {})}
        sent = self.engine.clock() if due is None else due
        if "deadline" in labels:
            labels["deadline"] += sent  # on the engine's clock from here on
        request = self.engine.submit(tokens, self.params[index], labels, sent)
        self.requests[index], self.index[request.id] = request, index
