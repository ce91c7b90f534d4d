"""One run of a load on an engine: what is kept of it, and the record that is made of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core import device
from core.bench.metrics import Received, latencies
from core.bench.sender import Sender
from core.bench.watch import Around, StepTimes, Watch
from core.engine import Engine
from core.interfaces import Request, SamplingParams
from core.loads import Load

PARTS = ("schedule", "launch", "wait", "commit")


@dataclass(frozen=True)
class Run:
    """What was seen. Lists of requests are in the order of the load; times are on the engine's clock."""

    load: Load
    start: float
    seconds: float  # until the last token was there
    requests: list[Request]
    received: list[Received]
    late: list[float]  # seconds between the time at which a request was due and its submission
    steps: list[StepTimes]
    counts: dict[str, int]  # the engine's counters, as differences
    block_size: int
    num_blocks: int
    overlap: int
    padded_rows: int | None  # rows that captured graphs computed for nothing; None where the executor does not tell

    def record(self) -> dict[str, Any]:
        """What bench.json holds of a run."""
        load = self.load
        return {
            "seed": load.seed,
            "requests": len(self.requests),
            "input_tokens": load.input_tokens,
            "output_tokens": load.output_tokens,
            "seconds": self.seconds,
            "output_tokens_per_s": load.output_tokens / self.seconds,
            "total_tokens_per_s": (load.input_tokens + load.output_tokens) / self.seconds,
            **latencies(self.received),
            **_counted(self.counts),
            **host_times(self.steps),
            **device_times(self.steps),
        }


def run_load(engine: Engine, load: Load, params: Sequence[SamplingParams], where: torch.device) -> dict[str, Any]:
    """The record of one run."""
    return measure(engine, load, params, where).record()


def measure(
    engine: Engine,
    load: Load,
    params: Sequence[SamplingParams],
    where: torch.device,
    on_step: Callable[[int], None] | None = None,
    around: Around | None = None,
) -> Run:
    """Send the load, step until all is answered. on_step gets the steps done so far; around: see `Watch`."""
    before, padded = engine.stats.as_dict(), _padded(engine)
    watch = Watch(engine, where, around)
    sender = Sender(engine, load, params)
    with watch.watching():
        sender.begin()
        while True:
            sender.send_due()
            if engine.busy:
                watch.begin()
                outputs = engine.step()
                watch.end(outputs)
                for output in outputs:
                    if output.finish_reason is not None:
                        sender.ended(output.request)
                if on_step is not None:
                    on_step(len(watch.steps))
            elif sender.next_due is not None:
                engine.clock.wait(sender.next_due)
            else:
                break
        device.synchronize(where)
        seconds = engine.clock() - sender.start
    watch.settle()
    requests = checked(sender.requests, load.outputs)
    after = _padded(engine)
    return Run(
        load=load,
        start=sender.start,
        seconds=seconds,
        requests=requests,
        received=received(requests, sender.index, watch.steps),
        late=sender.late,
        steps=watch.steps,
        counts={name: value - before[name] for name, value in engine.stats.as_dict().items()},
        block_size=engine.context.block_size,
        num_blocks=engine.context.num_blocks,
        overlap=engine.overlap,
        padded_rows=None if after is None or padded is None else after - padded,
    )


def checked(requests: Sequence[Request | None], outputs: Sequence[int]) -> list[Request]:
    """A run that did other work than it was asked for is no measurement."""
    for request, wanted in zip(requests, outputs, strict=True):
        assert request is not None, "a request was never sent"
        got = len(request.tokens) - request.num_prompt
        if request.finish_reason != "length" or got != wanted:
            why = request.message or request.finish_reason
            raise RuntimeError(f"request {request.id} of the load ended after {got} of {wanted} tokens: {why}")
    return [request for request in requests if request is not None]


def received(requests: Sequence[Request], index: dict[int, int], steps: Sequence[StepTimes]) -> list[Received]:
    """The output events of each request."""
    found = [Received(request.arrival) for request in requests]
    for step in steps:
        for number, tokens in zip(*step.received, strict=True):
            if tokens:
                found[index[number]].events.append((step.end, tokens))
    return found


def _padded(engine: Engine) -> int | None:
    return engine.executor.report().get("padded_rows")


def _counted(counts: dict[str, int]) -> dict[str, Any]:
    own = {name: counts[name] for name in ("steps", "decode_tokens", "cached_tokens", "evictions", "surplus")}
    return {**own, "prefill_tokens": counts["tokens"] - counts["decode_tokens"]}


def host_times(steps: Sequence[StepTimes]) -> dict[str, Any]:
    """Sums in seconds; microseconds per step, of all steps and of those that launched decodes only. What lies before a
    launch counts as schedule here; `schedule` and `prepare` are told apart in the metrics."""
    launched = [step for step in steps if step.launched]
    decodes = [step for step in launched if step.decode]
    return {
        "host_s": {part: sum(_part(step, part) for step in steps) for part in PARTS},
        "host_per_step_us": _per_step(launched),
        "host_per_decode_step_us": _per_step(decodes),
        "decode_steps": len(decodes),
    }


def _part(step: StepTimes, name: str) -> float:
    return step.schedule + step.prepare if name == "schedule" else getattr(step, name)


def _per_step(steps: Sequence[StepTimes]) -> dict[str, float | None]:
    count = len(steps)
    return {part: sum(_part(s, part) for s in steps) / count * 1e6 if count else None for part in PARTS}


def device_times(steps: Sequence[StepTimes]) -> dict[str, float | None]:
    """Busy: from before each launch until its work is done. A device that waits within a launch counts as busy: the exposed
    gap holds scheduling and commit, and the launch itself only as far as the traced run of `profile=true` shows it."""
    spans = [step.gpu for step in steps if step.gpu is not None]
    if not spans:
        return {"gpu_busy_s": None, "exposed_host_gap_s": None, "exposed_host_gap_per_step_us": None}
    gap = exposed_gap(steps)
    return {
        "gpu_busy_s": sum(spans),
        "exposed_host_gap_s": gap,
        "exposed_host_gap_per_step_us": gap / len(spans) * 1e6,
    }


def exposed_gap(steps: Sequence[StepTimes]) -> float:
    """Seconds of the steps in which the device had nothing to do. The time between steps, when an open load has nothing to
    send, is nobody's gap."""
    return max(0.0, sum(step.wall for step in steps if step.worked) - sum(step.gpu or 0.0 for step in steps))
