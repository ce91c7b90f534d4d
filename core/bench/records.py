"""steps.jsonl and requests.jsonl: a line per step and per request of the timed runs. Seconds since the start of the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.bench.measure import Run
from core.bench.timeline import events
from core.bench.values import Slo
from core.bench.walk import Walk


def write_records(folder: Path, runs: Sequence[Run], walks: Sequence[Walk], slo: Slo) -> None:
    """Both files, and timeline.json for Perfetto or chrome://tracing."""
    pairs = list(enumerate(zip(runs, walks, strict=True)))
    write_lines(folder / "steps.jsonl", (line for n, pair in pairs for line in step_lines(n, *pair)))
    write_lines(folder / "requests.jsonl", (line for n, pair in pairs for line in request_lines(n, *pair, slo)))
    found = [event for n, pair in pairs for event in events(n, *pair)]
    content = json.dumps({"displayTimeUnit": "ms", "traceEvents": found}, separators=(",", ":"))
    _replace(folder / "timeline.json", [content])


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """All or nothing: a reader never sees half a file."""
    _replace(path, (json.dumps(line, separators=(",", ":")) for line in lines))


def _replace(path: Path, lines: Iterable[str]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    partial.replace(path)


def step_lines(number: int, run: Run, walked: Walk) -> Iterator[dict[str, Any]]:
    """Of every step that was launched; `requests` are places in the load, `counts` their tokens."""
    index = {request.id: i for i, request in enumerate(run.requests)}
    launched = (step for step in run.steps if step.launched)
    for at, (step, waiting, running) in enumerate(zip(launched, walked.waiting, walked.running, strict=True)):
        free, reusable, held = step.kv or (None, None, None)
        yield {
            "run": number,
            "step": at,
            "start_s": step.at - run.start,
            "wall_s": step.end - step.at,
            "schedule_s": step.schedule,
            "prepare_s": step.prepare,
            "launch_s": step.launch,
            "wait_s": step.wait,
            "commit_s": step.commit,
            "gpu_s": step.gpu,
            "tokens": int(step.counts.sum()),
            "draws": int(step.draws.sum()),
            "requests": [index[name] for name in step.requests],
            "counts": step.counts.tolist(),
            "admitted": [index[name] for name in step.admitted],
            "evicted": [index[name] for name in step.evicted],
            "waiting": waiting,
            "running": running,
            "kv_free": free,
            "kv_reusable": reusable,
            "kv_held": held,
        }


def request_lines(number: int, run: Run, walked: Walk, slo: Slo) -> Iterator[dict[str, Any]]:
    """Of every request, in the order of the load."""
    for i, (request, seen) in enumerate(zip(run.requests, run.received, strict=True)):
        labels = dict(request.labels)
        if "deadline" in labels:
            labels["deadline"] -= run.start
        yield {
            "run": number,
            "request": i,
            **{name: labels.get(name) for name in ("client", "priority", "deadline", "expected_tokens")},
            "sent_s": request.arrival - run.start,
            "late_s": run.late[i],
            "admitted_s": walked.admitted[i] - run.start,
            "first_token_s": seen.events[0][0] - run.start,
            "finish_s": seen.events[-1][0] - run.start,
            "prompt_tokens": request.num_prompt,
            "output_tokens": seen.tokens,
            "cached_tokens": request.metrics.cached_tokens,
            "recomputed_tokens": int(walked.recomputed[i]),
            "preemptions": request.metrics.preemptions,
            "ttft_s": seen.ttft,
            "tpot_s": seen.tpot,
            "e2e_s": seen.e2e,
            "normalised_s": seen.normalised,
            "slo_met": slo.met(seen) if slo.given else None,
            "finish_reason": request.finish_reason,
        }
