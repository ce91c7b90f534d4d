"""Calls the observer hooks. A raising observer is counted, named once, switched off, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from core.interfaces import PROJECT, Request, RequestRecord, StepRecord
from core.step import Chunk

if TYPE_CHECKING:
    from core.engine import Engine

log = logging.getLogger(PROJECT)
Observer = tuple[str, Callable[..., Any]]


class Observers:
    """`step` and `finished` are empty lists when nobody listens: then no record is built."""

    def __init__(self, manager: pluggy.PluginManager | None = None) -> None:
        self.step = _implementations(manager, "inferlab_step")
        self.finished = _implementations(manager, "inferlab_request_finished")
        self.failed: dict[str, dict[str, str]] = {}  # plugin -> hook -> what it raised

    def report(self) -> dict[str, dict[str, Any]]:
        """For result.json: plugin -> how many of its observers raised, and what."""
        return {name: {"failures": len(raised), "raised": dict(raised)} for name, raised in self.failed.items()}

    def notify(self, observers: list[Observer], record: Any) -> None:
        hook = "inferlab_step" if observers is self.step else "inferlab_request_finished"
        for observer in list(observers):
            name, call = observer
            try:
                call(record=record)
            except (Exception, SystemExit) as error:
                what = f"{type(error).__name__}: {error}"
                self.failed.setdefault(name, {})[hook] = what
                observers.remove(observer)
                log.warning("observer %s raised %s in %s and is switched off", name, what, hook)


def _implementations(manager: pluggy.PluginManager | None, hook: str) -> list[Observer]:
    if manager is None:
        return []
    return [(impl.plugin_name, _caller(impl)) for impl in getattr(manager.hook, hook).get_hookimpls()]


def _caller(implementation: Any) -> Callable[..., Any]:
    """An implementation may leave the record out, as with every argument of a hook."""
    function = implementation.function
    return function if implementation.argnames else lambda record: function()


def step_record(engine: Engine, chunks: list[Chunk], evictions: int, now: float) -> StepRecord:
    running = engine.context.limits.max_num_seqs - len(engine.seats.free_slots)
    return StepRecord(
        index=engine.stats.steps,
        now=now,
        chunks=len(chunks),
        tokens=sum([c.count for c in chunks]),
        draws=sum([c.draws for c in chunks]),
        evictions=evictions,
        waiting=len(engine.live) - running,
        running=running,
        free_blocks=engine.kv.idle(),
    )


def request_record(request: Request) -> RequestRecord:
    assert request.finish_reason is not None
    return RequestRecord(
        id=request.id,
        finish_reason=request.finish_reason,
        num_prompt=request.num_prompt,
        num_generated=len(request.tokens) - request.num_prompt,
        metrics=replace(request.metrics),  # an observer gets nothing that it could change
        labels=MappingProxyType(dict(request.labels)),
    )
