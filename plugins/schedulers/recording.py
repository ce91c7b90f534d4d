"""schedule.jsonl as `bench.record_schedule=true` writes it, read."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
WIDTH = 4  # numbers per operation: place, start, count, reserve; an eviction has start -1
Operation = tuple[int, int, int, int]


class RecordingError(ValueError):
    """The file is none, or not a whole one."""


@dataclass
class RecordedRun:
    """One run. Lists have an entry per request of the load, `steps` one per step."""

    number: int  # seed of the load
    count: int  # steps
    tokens: int  # of the largest step
    residents: int  # most requests with a seat
    requests: Sequence[tuple[int, int]]  # prompt and output tokens
    due: Sequence[float | None]  # seconds after the start; None: at once, or when another one has ended
    sent: Sequence[float]
    overlap: int
    made_with: dict[str, Any]
    steps: list[array[int]] = field(default_factory=list)
    settled: list[bool] = field(default_factory=list)  # nothing was in flight

    def operations(self, at: int) -> Iterator[Operation]:
        """Of step `at`, in order."""
        numbers = iter(self.steps[at])
        return zip(numbers, numbers, numbers, numbers, strict=True)


def read_recording(file: str, heads_only: bool = False) -> dict[int, RecordedRun]:
    """Number of a run -> what was recorded of it. RecordingError names the file and the line."""
    path, runs = Path(file).expanduser(), {}
    if not path.is_file():
        raise RecordingError(f"{file}: no such file")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                _take(json.loads(line), runs, heads_only)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                why = f"{type(error).__name__}: {error}"
                raise RecordingError(f"{file}, line {number} is no line of a schedule ({why})") from None
    if not runs:
        raise RecordingError(f"{file} holds no run")
    for run in runs.values():
        if not heads_only and len(run.steps) != run.count:
            raise RecordingError(f"{file} was cut short: {len(run.steps)} of the {run.count} steps of run {run.number}")
    return runs


def _take(line: Any, runs: dict[int, RecordedRun], heads_only: bool) -> None:
    if "ops" not in line:
        if line["format"] != FORMAT:
            raise ValueError(f"its format is {line['format']}, this version reads {FORMAT}: record again")
        names = ("tokens", "residents", "requests", "due", "sent", "overlap", "made_with")
        runs[line["run"]] = RecordedRun(line["run"], line["steps"], **{name: line[name] for name in names})
    elif not heads_only:
        numbers = array("i")
        for op in line["ops"]:
            numbers.extend(op if len(op) == WIDTH else (*op, -1, 0, 0))
        if len(numbers) % WIDTH:
            raise ValueError("an operation has 1 or 4 numbers")
        runs[line["run"]].steps.append(numbers)
        runs[line["run"]].settled.append(not line["in_flight"])
