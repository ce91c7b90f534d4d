"""Does again what was done: the steps of a recorded run, one by one, so that everything else can be compared under the very
same plans.

A step is taken when all its requests are there; one that falls due later in the recording than the engine gets to it is waited
for. What makes the recording unfit (other requests, other arrivals, other prefix hits, too little room) is said at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from core.interfaces import AtLeast, HostContext, OneOf, Probe, Request, Scheduler, Step
from plugins.schedulers.recording import Operation, RecordedRun, RecordingError, read_recording

POLL_S = 0.001  # between looks whether a request has come
PATIENCE_S = 1.0  # by which one may come later than it can have been sent
SAME_S = 1e-4  # difference of two arrivals that count as equal


class ReplayError(ValueError):
    """The recording does not fit this run."""


def probe(settings: Any) -> Probe:
    """Is there a recording, and how much room does it need?"""
    if settings.file is None:
        return Probe(problem="scheduler.file=FILE is missing: a schedule.jsonl of a run with bench.record_schedule=true")
    try:
        runs = list(read_recording(settings.file, heads_only=True).values())
    except RecordingError as error:
        return Probe(problem=f"scheduler.file={error}")
    return Probe(
        capabilities={
            "max_num_batched_tokens": AtLeast(max(run.tokens for run in runs)),
            "max_num_seqs": AtLeast(max(run.residents for run in runs)),
            "overlap": OneOf(runs[0].overlap),
        }
    )


class Replay(Scheduler):
    """Requests are known by their labels `run` and `place`: which run of the load, which request of it."""

    def __init__(self, settings: Any, context: HostContext) -> None:
        super().__init__(settings, context)
        if settings.file is None:
            raise ReplayError("scheduler=replay needs scheduler.file=FILE")
        self.recording = read_recording(settings.file)
        self.run: RecordedRun | None = None
        self.live: dict[int, Request] = {}  # place -> request
        self.seen: set[int] = set()  # places of this run that have come
        self.at = 0  # the step that comes next
        self.start: float | None = None  # of this run, on the engine's clock; known once a request had a time of its own
        self.since: float | None = None  # when the present wait for a request began
        self.settling = False  # the present step waits until nothing is in flight

    def add(self, request: Request) -> None:
        number, place = request.labels.get("run"), request.labels.get("place")
        if number is None or place is None:
            raise ReplayError("scheduler=replay follows the requests of a load: it works with task=bench")
        if self.run is None or number != self.run.number or place in self.seen:
            self._begin(number)
        self._check(request, place)
        self.live[place] = request
        self.seen.add(place)

    def remove(self, request: Request) -> None:
        self.live.pop(request.labels.get("place", -1), None)

    def schedule(self, step: Step) -> None:
        run = self.run
        assert run is not None
        if self.at >= run.count:
            self._misfit(f"it ends here, and {len(self.live)} requests go on")
        operations = list(run.operations(self.at))
        if not self._ready(step, operations):
            return
        for place, start, count, reserve in operations:
            request = self.live[place]
            if start < 0:
                step.evict(request)
            else:
                self._grant(step, place, start, count, reserve)
        self.at += 1

    def _begin(self, number: int) -> None:
        self.live, self.seen, self.at, self.start, self.since, self.settling = {}, set(), 0, None, None, False
        self.run = self.recording.get(number)
        if self.run is None:
            raise ReplayError(
                f"{self.settings.file} holds the runs {', '.join(map(str, self.recording))} of its load and not run {number}: "
                "load.seed, bench.repeats and bench.warmup must be as recorded"
            )

    def _check(self, request: Request, place: int) -> None:
        """Is it the request that was recorded?"""
        run, got = self.run, (request.num_prompt, request.limit - request.num_prompt)
        assert run is not None
        if place >= len(run.requests):
            self._misfit(f"request {place} comes, and the recording has only {len(run.requests)}: other requests")
        if got != tuple(run.requests[place]):
            was = "{} and {}".format(*run.requests[place])
            self._misfit(f"request {place} has {got[0]} tokens in and {got[1]} out, {was} in the recording: other requests")
        due = run.due[place]
        if due is None:
            return
        if self.start is None:
            self.start = request.arrival - due
        if abs(request.arrival - self.start - due) > SAME_S:
            came = request.arrival - self.start
            self._misfit(f"request {place} arrives after {came:.3f} s, in the recording after {due:.3f} s: other arrivals")

    def _ready(self, step: Step, operations: Sequence[Operation]) -> bool:
        """All is there; else the step is put off, before anything of it was done."""
        run = self.run
        assert run is not None
        for place, *_ in operations:
            if place in self.live:
                continue
            if place in self.seen:
                self._misfit(f"request {place} has ended, in the recording it goes on: other outputs")
            self._await(step, place)
            return False
        if run.overlap and run.settled[self.at] and not self.settling:
            self.settling = True
            step.wait(step.now)  # an empty step ends what is in flight, and frees what it holds
            return False
        self.since, self.settling = None, False
        return True

    def _await(self, step: Step, place: int) -> None:
        """It comes at its time, or some time after the answer that it follows, which lies in a step before this one."""
        run = self.run
        assert run is not None
        self.since = step.now if self.since is None else self.since
        due, latest = run.due[place], self.since + run.sent[place]
        if due is not None and self.start is not None:
            latest = max(self.since, self.start + due)
        if step.now > latest + PATIENCE_S:
            self._misfit(f"request {place} has not come: other arrivals, or fewer requests")
        step.wait(step.now + POLL_S)

    def _grant(self, step: Step, place: int, start: int, count: int, reserve: int) -> None:
        request = self.live[place]
        if request.seat is None and (found := step.cached(request)) != start:
            self._misfit(f"request {place} finds {found} of its tokens cached, {start} in the recording: other prefix hits")
        if request.seat is not None and request.seat.computed != start:
            self._misfit(f"request {place} has {request.seat.computed} tokens computed, {start} in the recording")
        got = step.grant(request, count, reserve=reserve)
        if got != count:
            self._misfit(f"request {place} gets {got} of {count} tokens: not enough {step.short or 'tokens'}")

    def _misfit(self, what: str) -> NoReturn:
        run = self.run
        assert run is not None
        made = ", ".join(f"{name} {value}" for name, value in run.made_with.items())
        raise ReplayError(
            f"the recording {self.settings.file} does not fit: run {run.number}, step {self.at} of {run.count}: {what}. It was "
            f"made with {made}; run it with the same load and cache, or record again (bench.record_schedule=true)"
        )
