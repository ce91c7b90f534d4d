"""One run of a load on an engine, and where the host's time went.

The engine is not touched: its executor is replaced for the run by one that takes the time when the engine calls it. What
lies before a launch is scheduling, what lies behind a wait is commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core import device
from core.bench.metrics import Received, latencies
from core.engine import Engine
from core.interfaces import Drawn, Executor, Request, Sampled, SamplingParams, StepPlan
from core.loads import Load

PARTS = ("schedule", "launch", "wait", "commit")


@dataclass(slots=True)
class StepTimes:
    """Host seconds of one call of `Engine.step`."""

    decode: bool = False  # it launched chunks of one token only
    launched: bool = False
    waited: bool = False
    schedule: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    commit: float = 0.0


class Watched(Executor):
    """Hands everything on to `inner`, and notes when."""

    def __init__(self, inner: Executor, clock: Callable[[], float], where: torch.device) -> None:
        self.inner, self.clock, self.where, self.num_blocks = inner, clock, where, inner.num_blocks
        self.steps: list[StepTimes] = []
        self.spans: list[tuple[Any, Any]] = []  # moments of the device around each launch

    def begin(self) -> None:
        """A step begins."""
        self.steps.append(StepTimes())
        self._at = self.clock()

    def end(self) -> float:
        """It has ended; the time."""
        self._charge("commit" if self.steps[-1].waited else "schedule")
        return self._at

    def launch(self, plan: StepPlan) -> Drawn:
        step, before = self.steps[-1], device.moment(self.where)
        self._charge("schedule")
        drawn = self.inner.launch(plan)
        if before is not None:
            self.spans.append((before, device.moment(self.where)))
        self._charge("launch")
        step.launched, step.decode = True, len(plan.tokens) == len(plan.slots)
        return WatchedDrawn(drawn, self)

    def wait_for(self, drawn: Drawn) -> Sampled:
        """The wait of one step's tokens."""
        step = self.steps[-1]
        self._charge("commit" if step.waited else "schedule")
        sampled = drawn.wait()
        self._charge("wait")
        step.waited = True
        return sampled

    def close(self) -> None:
        self.inner.close()

    def _charge(self, part: str) -> None:
        now, step = self.clock(), self.steps[-1]
        setattr(step, part, getattr(step, part) + now - self._at)
        self._at = now


@dataclass(slots=True)
class WatchedDrawn:
    drawn: Drawn
    watched: Watched

    def wait(self) -> Sampled:
        return self.watched.wait_for(self.drawn)


def run_load(
    engine: Engine,
    load: Load,
    params: Sequence[SamplingParams],
    where: torch.device,
    on_step: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Send everything at once, step until all is answered; the record of this run. `on_step` gets the steps done so far."""
    inner, before = engine.executor, engine.stats.as_dict()
    watched = engine.executor = Watched(inner, engine.clock, where)
    try:
        started = engine.clock()
        requests = [engine.submit(tokens, p) for tokens, p in zip(load.prompts, params, strict=True)]
        received = {r.id: Received(r.arrival) for r in requests}
        while engine.busy:
            watched.begin()
            outputs = engine.step()
            now = watched.end()
            for output in outputs:
                if output.tokens:
                    received[output.request.id].events.append((now, len(output.tokens)))
            on_step(len(watched.steps))
        device.synchronize(where)
        seconds = engine.clock() - started
    finally:
        engine.executor = inner
    _check(requests, load.outputs)
    counts = {name: value - before[name] for name, value in engine.stats.as_dict().items()}
    return {
        "seed": load.seed,
        "requests": len(requests),
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "seconds": seconds,
        "output_tokens_per_s": load.output_tokens / seconds,
        "total_tokens_per_s": (load.input_tokens + load.output_tokens) / seconds,
        **latencies(list(received.values())),
        **_counted(counts),
        **host_times(watched.steps),
        **_device_times(watched, seconds),
    }


def _check(requests: Sequence[Request], outputs: Sequence[int]) -> None:
    """A run that did other work than it was asked for is no measurement."""
    for request, wanted in zip(requests, outputs, strict=True):
        got = len(request.tokens) - request.num_prompt
        if request.finish_reason != "length" or got != wanted:
            why = request.message or request.finish_reason
            raise RuntimeError(f"request {request.id} of the load ended after {got} of {wanted} tokens: {why}")


def _counted(counts: dict[str, int]) -> dict[str, Any]:
    """The engine's counters, as differences over the run."""
    own = {name: counts[name] for name in ("steps", "decode_tokens", "cached_tokens", "evictions", "surplus")}
    return {**own, "prefill_tokens": counts["tokens"] - counts["decode_tokens"]}


def host_times(steps: Sequence[StepTimes]) -> dict[str, Any]:
    """Sums in seconds; microseconds per step, of all steps and of those that launched decodes only."""
    launched = [step for step in steps if step.launched]
    decodes = [step for step in launched if step.decode]
    return {
        "host_s": {part: sum(getattr(step, part) for step in steps) for part in PARTS},
        "host_per_step_us": _per_step(launched),
        "host_per_decode_step_us": _per_step(decodes),
        "decode_steps": len(decodes),
    }


def _per_step(steps: Sequence[StepTimes]) -> dict[str, float | None]:
    count = len(steps)
    return {part: sum(getattr(s, part) for s in steps) / count * 1e6 if count else None for part in PARTS}


def _device_times(watched: Watched, seconds: float) -> dict[str, float | None]:
    """Busy: from before each launch until its work is done. A device that waits within a launch counts as busy: the exposed
    gap holds scheduling and commit, and the launch itself only as far as the traced run of `profile=true` shows it."""
    if not watched.spans:
        return {"gpu_busy_s": None, "exposed_host_gap_s": None, "exposed_host_gap_per_step_us": None}
    busy = sum(device.between(start, end) for start, end in watched.spans)
    gap = seconds - busy
    return {
        "gpu_busy_s": busy,
        "exposed_host_gap_s": gap,
        "exposed_host_gap_per_step_us": gap / len(watched.spans) * 1e6,
    }
