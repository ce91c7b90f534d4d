"""The files of a run: steps.jsonl, requests.jsonl and the timeline for Perfetto, of the run of tests/hand_run.py."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.bench.measure import Run
from core.bench.records import write_records
from core.bench.values import Slo
from core.bench.walk import walk
from tests.hand_run import hand_run


@pytest.fixture
def run() -> Run:
    return hand_run()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_record_files(run: Run, tmp_path: Path) -> None:
    """Times since the start of the run, requests by their place in the load; launched steps only."""
    write_records(tmp_path, [run, run], [walk(run)] * 2, Slo(tpot_ms=1000))
    steps, requests = lines(tmp_path / "steps.jsonl"), lines(tmp_path / "requests.jsonl")
    assert [(line["run"], line["step"]) for line in steps] == [(r, s) for r in (0, 1) for s in range(4)]
    assert [(line["run"], line["request"]) for line in requests] == [(r, q) for r in (0, 1) for q in range(3)]
    expected = {"run": 0, "step": 3, "start_s": 4.5, "wall_s": 2.5, "schedule_s": 0.2, "prepare_s": 0.3, "launch_s": 0.5}
    expected |= {"wait_s": 1.0, "commit_s": 0.5, "gpu_s": 2.0, "tokens": 11, "draws": 2, "requests": [0, 2], "counts": [6, 5]}
    expected |= {"admitted": [0, 2], "evicted": [], "waiting": 2, "running": 2, "kv_free": 5, "kv_reusable": 2, "kv_held": 3}
    assert steps[3] == expected and steps[2]["evicted"] == [0] and steps[1]["kv_free"] is None
    expected = {"run": 0, "request": 0, "client": "a", "priority": None, "deadline": 6.0, "expected_tokens": None}
    expected |= {"sent_s": 0.0, "late_s": 0.0, "admitted_s": 0.0, "first_token_s": 2.0, "finish_s": 7.0, "prompt_tokens": 8}
    expected |= {"output_tokens": 3, "cached_tokens": 0, "recomputed_tokens": 5, "preemptions": 1, "ttft_s": 2.0, "tpot_s": 2.5}
    expected |= {"e2e_s": 7.0, "normalised_s": 7 / 3, "slo_met": False, "finish_reason": "length"}
    assert requests[0] == expected
    assert (requests[2]["tpot_s"], requests[2]["slo_met"], requests[2]["late_s"]) == (None, True, 0.5)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["requests.jsonl", "steps.jsonl", "timeline.json"]


FIELDS = {"X": {"cat", "ts", "dur", "args"}, "i": {"cat", "ts", "s"}, "C": {"ts", "args"}, "M": {"args"}}  # of the trace format


def test_the_timeline(run: Run, tmp_path: Path) -> None:
    """What Perfetto needs: an object with traceEvents; every kind of event with its fields; spans of a track never overlap."""
    shifted = replace(run, steps=[replace(s, at=s.at + 1e-9 / 3, end=s.end + 1e-9 / 3) for s in run.steps])
    write_records(tmp_path, [run, shifted], [walk(run), walk(shifted)], Slo())
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    spans: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event.keys() == {"name", "ph", "pid", "tid"} | FIELDS[event["ph"]] and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event.get("ts", 0) >= 0
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["dur"], event["name"]))
        assert event.get("s", "t") == "t" and (event["ph"] != "C" or all(isinstance(v, int) for v in event["args"].values()))
    for track in spans.values():
        for (start, length, _), (after, _, _) in zip(sorted(track), sorted(track)[1:], strict=False):
            assert length >= 0 and start + length <= after + 1e-6, "Perfetto drops a span that overlaps another one"
    assert spans[0, 1] == [
        (0, 0, "waiting"),
        (0, 3e6, "running"),
        (3e6, 1.5e6, "waiting"),
        (4.5e6, 2.5e6, "running"),
    ]
    assert spans[0, 0] == [
        (0, 2e6, "1 requests, 8 tokens"),
        (2e6, 1e6, "2 requests, 3 tokens"),
        (3e6, 0.5e6, "1 requests, 1 tokens"),
        (4.5e6, 2.5e6, "2 requests, 11 tokens"),
    ]
    marks = [(e["name"], e["tid"], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "i" and not e["pid"]]
    assert marks == [("preempted", 1, 3e6), ("first token", 1, 2e6), ("first token", 2, 3e6), ("first token", 3, 7e6)]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["pid"] == 1]
    assert names == ["run 1", "steps", "request 0, client a", "request 1, client b", "request 2, client a"]
