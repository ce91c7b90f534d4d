"""A run as trace events for Perfetto and chrome://tracing: a process per run, a track for its steps, one per request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.bench.measure import Run
from core.bench.walk import Walk

STEPS = 0  # track of the steps; request i has track i + 1


def events(number: int, run: Run, walked: Walk) -> Iterator[dict[str, Any]]:
    """Times are microseconds since the start of the run."""

    def at(seconds: float) -> float:
        return round((seconds - run.start) * 1e6, 3)

    def span(track: int, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
        place = {"pid": number, "tid": track, "ts": at(start), "dur": round(max(0.0, at(end) - at(start)), 3)}
        return {"name": name, "cat": "request" if track else "step", "ph": "X", **place, "args": args}

    def named(kind: str, name: str, track: int = STEPS) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": number, "tid": track, "args": {"name": name}}

    yield named("process_name", f"run {number}")
    yield named("thread_name", "steps")
    index = {request.id: i for i, request in enumerate(run.requests)}
    since: dict[int, float] = {i: request.arrival for i, request in enumerate(run.requests)}  # without a seat, or with one
    for i, request in enumerate(run.requests):
        client = request.labels.get("client")
        yield named("thread_name", f"request {i}" + (f", client {client}" if client is not None else ""), i + 1)
    queue = zip(walked.waiting, walked.running, strict=True)
    for step in run.steps:
        for name in step.evicted:
            i = index[name]
            yield span(i + 1, "running", since[i], step.at)
            yield {"name": "preempted", "cat": "request", "ph": "i", "s": "t", "pid": number, "tid": i + 1, "ts": at(step.at)}
            since[i] = step.at
        for name in step.admitted:
            i = index[name]
            yield span(i + 1, "waiting", since[i], step.at)
            since[i] = step.at
        if step.launched:
            decodes = int((step.counts == 1).sum())
            title = f"{len(step.requests)} requests, {int(step.counts.sum())} tokens"
            parts = {part: getattr(step, part) * 1e6 for part in ("schedule", "prepare", "launch", "wait", "commit")}
            yield span(STEPS, title, step.at, step.end, chunks_of_one=decodes, **{f"{k}_us": v for k, v in parts.items()})
            levels = dict(zip(("waiting", "running"), next(queue), strict=True))
            yield {"name": "requests", "ph": "C", "pid": number, "tid": STEPS, "ts": at(step.at), "args": levels}
    for i, (request, seen) in enumerate(zip(run.requests, run.received, strict=True)):
        first, last = seen.events[0][0], seen.events[-1][0]
        args = {"prompt": request.num_prompt, "output": seen.tokens, "cached": request.metrics.cached_tokens}
        yield span(i + 1, "running", since[i], last, **args)
        yield {"name": "first token", "cat": "request", "ph": "i", "s": "t", "pid": number, "tid": i + 1, "ts": at(first)}
