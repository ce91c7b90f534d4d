"""Watches an engine at work: its scheduler and executor are replaced for a run by ones that hand everything on and note when.

The engine is not touched otherwise. While it runs, numbers are only appended to lists; everything is computed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from core import device
from core.engine import Engine, Output
from core.interfaces import Array, Drawn, Executor, Request, Sampled, Scheduler, Step, StepPlan

AUDIT_SHARE = 200  # an audit of the KV pool walks all blocks: the next one comes after so many times what it cost
NOTHING = np.zeros(0, np.int32)


@dataclass(slots=True)
class StepTimes:
    """Host seconds of one call of `Engine.step`, and what it launched."""

    at: float = 0.0  # on the engine's clock
    end: float = 0.0
    decode: bool = False  # it launched chunks of one token only
    launched: bool = False
    waited: bool = False
    schedule: float = 0.0  # the scheduler
    prepare: float = 0.0  # the rest until the launch: the plan is made
    launch: float = 0.0
    wait: float = 0.0  # for the tokens of the step that is due: with overlap the one before
    commit: float = 0.0
    requests: list[int] = field(default_factory=list)  # ids, one per chunk
    starts: Array = field(default_factory=lambda: NOTHING)
    counts: Array = field(default_factory=lambda: NOTHING)
    draws: Array = field(default_factory=lambda: NOTHING)
    shared_blocks: int = 0
    admitted: Sequence[int] = ()  # ids that got a seat
    evicted: Sequence[int] = ()  # ids that lost it
    received: tuple[list[int], list[int]] = ([], [])  # ids, and how many tokens of each became known
    kv: tuple[int, int, int] | None = None  # blocks free, reusable, held behind it, where that was looked up
    gpu: float | None = None  # seconds between the moments of the device around the launch

    @property
    def worked(self) -> bool:
        """A call in which a scheduler only waited, for an arrival say, is no work."""
        return self.launched or self.waited or bool(self.evicted)

    @property
    def wall(self) -> float:
        """Seconds of the whole call."""
        return self.end - self.at


Around = Callable[[Step], Step]  # what the scheduler is given instead of a step


class Watch:
    """`steps`: one per call of `Engine.step`, between `begin` and `end`."""

    def __init__(self, engine: Engine, where: torch.device, around: Around | None = None) -> None:
        self.engine, self.clock, self.where, self.around = engine, engine.clock, where, around
        self.steps: list[StepTimes] = []
        self.spans: list[tuple[StepTimes, Any, Any]] = []  # moments of the device around each launch
        self._audit_after = float("-inf")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The engine's parts are replaced inside."""
        engine, scheduler, executor = self.engine, self.engine.scheduler, self.engine.executor
        engine.scheduler, engine.executor = WatchedScheduler(scheduler, self), WatchedExecutor(executor, self)
        try:
            yield
        finally:
            engine.scheduler, engine.executor = scheduler, executor

    def begin(self) -> None:
        """A step begins."""
        self._at = self.clock()
        self.steps.append(StepTimes(at=self._at))

    def end(self, outputs: Sequence[Output]) -> None:
        """It has ended, with these outputs."""
        step = self.steps[-1]
        self.charge("commit" if step.waited else "schedule")
        step.end = self._at
        step.received = [output.request.id for output in outputs], [len(output.tokens) for output in outputs]
        if self._at >= self._audit_after:
            step.kv = self.engine.kv.audit()
            now = self.clock()
            self._audit_after = now + AUDIT_SHARE * (now - self._at)

    def charge(self, part: str) -> None:
        """The time since the last call belongs to `part` of the running step."""
        now, step = self.clock(), self.steps[-1]
        setattr(step, part, getattr(step, part) + now - self._at)
        self._at = now

    def settle(self) -> None:
        """After the run: ask the device for its times."""
        for step, before, after in self.spans:
            step.gpu = device.between(before, after)


class WatchedScheduler(Scheduler):
    def __init__(self, inner: Scheduler, watch: Watch) -> None:
        self.inner, self.watch = inner, watch

    def add(self, request: Request) -> None:
        self.inner.add(request)

    def remove(self, request: Request) -> None:
        self.inner.remove(request)

    def schedule(self, step: Any) -> None:
        """`step` is the engine's builder."""
        self.inner.schedule(self.watch.around(step) if self.watch.around else step)
        self.watch.charge("schedule")
        noted = self.watch.steps[-1]
        noted.requests = [request.id for request in step.chunks]
        noted.admitted = [request.id for request in step.admitted]
        noted.evicted = [request.id for request in step.evicted]


class WatchedExecutor(Executor):
    def __init__(self, inner: Executor, watch: Watch) -> None:
        self.inner, self.watch, self.num_blocks = inner, watch, inner.num_blocks

    def launch(self, plan: StepPlan) -> Drawn:
        watch, step = self.watch, self.watch.steps[-1]
        before = device.moment(watch.where)
        watch.charge("prepare")
        drawn = self.inner.launch(plan)
        if before is not None:
            watch.spans.append((step, before, device.moment(watch.where)))
        watch.charge("launch")
        step.launched, step.decode = True, len(plan.tokens) == len(plan.slots)
        step.starts, step.counts, step.draws, step.shared_blocks = plan.starts, plan.counts, plan.draws, plan.shared_blocks
        return WatchedDrawn(drawn, watch)

    def close(self) -> None:
        self.inner.close()

    def report(self) -> Any:
        return self.inner.report()


@dataclass(slots=True)
class WatchedDrawn:
    drawn: Drawn
    watch: Watch

    def wait(self) -> Sampled:
        step = self.watch.steps[-1]
        self.watch.charge("commit" if step.waited else "prepare")
        sampled = self.drawn.wait()
        self.watch.charge("wait")
        step.waited = True
        return sampled
