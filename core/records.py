"""What observers are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.hooks import RequestRecord, StepRecord
from core.interfaces import Request
from core.step import Chunk

if TYPE_CHECKING:
    from core.engine import Engine


def step_record(engine: Engine, chunks: list[Chunk], evictions: int, now: float) -> StepRecord:
    free, reusable, _ = engine.kv.audit()
    running = sum(request.seat is not None for request in engine.live.values())
    return StepRecord(
        index=engine.stats.steps,
        now=now,
        chunks=len(chunks),
        tokens=sum(c.count for c in chunks),
        draws=sum(c.draws for c in chunks),
        evictions=evictions,
        waiting=len(engine.live) - running,
        running=running,
        free_blocks=free + reusable,
    )


def request_record(request: Request) -> RequestRecord:
    assert request.finish_reason is not None
    return RequestRecord(
        id=request.id,
        finish_reason=request.finish_reason,
        num_prompt=request.num_prompt,
        num_generated=len(request.tokens) - request.num_prompt,
        metrics=request.metrics,
        labels=request.labels,
    )
