"""schedule.jsonl: who got how many tokens in each step of a run, so that `scheduler=replay` does the same again.

A line per run, then a line per step. `ops` are in the order in which they were asked for: [place in the load, position of the
first token, tokens, reserve] is a grant, [place] an eviction. `in_flight`: steps whose tokens, and whose ends, were not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from core.bench.measure import Run
from core.interfaces import Request, Step

SCHEDULE, FORMAT = "schedule.jsonl", 1


class Recorder:
    """`Around` of a watch: the scheduler asks it instead of the step. `steps`: of each, what was granted and taken away."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, ...]]] = []  # with ids of requests

    def __call__(self, step: Step) -> Step:
        if not self.steps or self.steps[-1]:  # a call that came to nothing is not a step
            self.steps.append([])
        return RecordedStep(step, self.steps[-1])


class RecordedStep(Step):
    """Hands everything on, and notes what was granted."""

    def __init__(self, step: Step, ops: list[tuple[int, ...]]) -> None:
        self.step, self.ops = step, ops

    @property
    def tokens_left(self) -> int:
        return self.step.tokens_left

    @property
    def empty(self) -> bool:
        return self.step.empty

    @property
    def now(self) -> float:
        return self.step.now

    @property
    def short(self) -> str:
        return self.step.short

    def grant(self, request: Request, limit: int | None = None, *, whole: bool = False, reserve: int = 0) -> int:
        count = self.step.grant(request, limit, whole=whole, reserve=reserve)
        if count:
            assert request.seat is not None
            self.ops.append((request.id, request.seat.computed - count, count, reserve))
        return count

    def cached(self, request: Request) -> int:
        return self.step.cached(request)

    def evict(self, request: Request) -> None:
        self.step.evict(request)
        self.ops.append((request.id,))

    def wait(self, until: float) -> None:
        self.step.wait(until)


def schedule_lines(run: Run, recorder: Recorder, made_with: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of one run. made_with: what a reader is told when the recording does not fit."""
    load, place = run.load, {request.id: i for i, request in enumerate(run.requests)}
    steps = [[[place[number], *rest] for number, *rest in ops] for ops in recorder.steps if ops]
    flights = list(_flights(run))
    assert len(flights) == len(steps)
    due = load.arrivals or [None] * len(run.requests)
    yield {
        "format": FORMAT,
        "run": load.seed,
        "steps": len(steps),
        "tokens": max(sum(op[2] for op in ops if len(op) > 1) for ops in steps),  # of the largest step
        "residents": most_residents(steps, load.outputs, [prompt for prompt, _ in load.lengths]),
        "requests": [list(pair) for pair in load.lengths],  # prompt and output tokens
        "due": list(due),  # seconds after the start; null: at once, or when another one has ended
        "sent": [round(request.arrival - run.start, 6) for request in run.requests],
        "overlap": run.overlap,
        "made_with": {**made_with, "overlap": run.overlap, "block_size": run.block_size, "num_blocks": run.num_blocks},
    }
    for ops, flight in zip(steps, flights, strict=True):
        yield {"run": load.seed, "in_flight": flight, "ops": ops}


def _flights(run: Run) -> Iterator[int]:
    """Steps in flight when each step was planned that granted or took away."""
    flight = 0
    for step in run.steps:
        if step.requests or step.evicted:
            yield flight
        flight += step.launched - step.waited


def most_residents(steps: Sequence[Sequence[Sequence[int]]], outputs: Sequence[int], prompts: Sequence[int]) -> int:
    """Most requests that held a seat at a time. One keeps it until the step that draws its last token is done."""
    seated: set[int] = set()
    most = 0
    for ops in steps:
        done = []
        for place, *chunk in ops:
            if not chunk:
                seated.discard(place)
                continue
            seated.add(place)
            if chunk[0] + chunk[1] >= prompts[place] + outputs[place] - 1:
                done.append(place)
        most = max(most, len(seated))
        seated.difference_update(done)
    return most
