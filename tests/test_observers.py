"""Observers: whatever they do, the run gives what it gives without them, and the culprit is named in the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.cli import main
from core.interfaces import StepRecord
from core.observers import Observers
from core.params import SamplingParams
from core.report.facts import troubles
from core.sweep.records import CellRecord
from tests.fake import make_engine
from tests.plugins_fixtures import Site

RAISES = """
calls = []
@hookimpl
def inferlab_step(record):
    calls.append(record.index)
    raise {error}
"""
QUIET = """
steps, ends = [], []
@hookimpl
def inferlab_step():
    steps.append(1)
@hookimpl
def inferlab_request_finished(record):
    ends.append(record.finish_reason)
    record.metrics.finish = record.metrics.first_token = -1.0
    record.labels["client"] = "changed"
"""


def run(site: Site | None, overlap: int = 0) -> tuple[list[list[int]], list[Any], Observers]:
    """Tokens and metrics of some requests, with what the site has."""
    observers = Observers(site.discover().manager if site else None)
    engine = make_engine(blocks=40, overlap=overlap)
    engine.observers = observers
    requests = [engine.submit([i + 1] * 5, SamplingParams(max_tokens=4), {"client": "a"}) for i in range(3)]
    while engine.busy:
        engine.step()
    assert engine.kv.audit()[2] == 0
    return [r.tokens for r in requests], [(r.labels, r.metrics.finish) for r in requests], observers


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("error", ['ValueError("oops")', "SystemExit(3)", "KeyError(1)"])
def test_a_raising_observer_harms_nobody(site: Site, error: str, overlap: int) -> None:
    """Called once, named, switched off; the other observer is called for every step; the tokens are the same."""
    site.add("loud", RAISES.format(error=error))
    site.add("quiet", QUIET)
    tokens, _, observers = run(site, overlap)
    assert tokens == run(None, overlap)[0]
    assert observers.failed["loud"]["inferlab_step"].startswith(error.partition("(")[0])
    modules = {p.name: p.module for p in site.discover().plugins}
    assert [name for name, _ in observers.step] == ["quiet"] and modules.keys() >= {"loud", "quiet"}


def test_an_observer_changes_nothing(site: Site) -> None:
    """It gets copies: what it writes into the times is nowhere seen, and labels cannot be written at all."""
    site.add("quiet", QUIET)
    _, seen, observers = run(site)
    assert all(labels == {"client": "a"} and finish >= 0 for labels, finish in seen)
    assert (
        observers.failed["quiet"]["inferlab_request_finished"].startswith("TypeError")
        and not observers.finished
        and observers.step
    )


def test_nobody_listens(site: Site) -> None:
    """No record is built then: the lists are empty, which is all that a step asks."""
    assert not Observers().step and not Observers(site.discover().manager).step
    assert not Observers(site.discover().manager).finished


def test_a_record_says_what_is_so() -> None:
    """Its numbers come from counters: the same as from counting requests and auditing blocks, evictions and aborts included."""
    engine = make_engine(blocks=12, overlap=1)
    seen = []

    def look(record: StepRecord) -> None:
        running = sum(request.seat is not None for request in engine.live.values())
        assert (record.running, record.waiting) == (running, len(engine.live) - running)
        assert record.free_blocks == sum(engine.kv.audit()[:2])
        seen.append(record)

    engine.observers = Observers()
    engine.observers.step = [("looks", look)]
    requests = [engine.submit([i + 1] * 9, SamplingParams(max_tokens=12)) for i in range(6)]
    while engine.busy:
        engine.step()
        if len(seen) == 4:
            engine.abort(requests[0].id)
    assert not engine.observers.failed and sum(record.evictions for record in seen) > 0
    assert len({record.running for record in seen}) > 1 and seen[-1].free_blocks == 12


def test_a_wrapper_around_an_observer_is_refused(site: Site) -> None:
    """Called as a function it would do nothing, without a word."""
    site.add("acme", "@hookimpl(wrapper=True)\ndef inferlab_step(record):\n    yield\n")
    assert "inferlab_step cannot be a wrapper: only inferlab_build is one" in site.discover().failed["acme"]


BOTH = (
    RAISES.format(error='ValueError("oops")')
    + """
@hookimpl
def inferlab_request_finished():
    raise KeyError("end")
@hookimpl
def inferlab_metrics():
    raise SystemExit(2)
"""
)
SMALL = ("load.num_requests=3", "load.input_min=6", "load.input_max=20", "load.output_min=2", "load.output_max=6")
TASKS = {
    "generate": ["prompts=[abc]", "sampling.max_tokens=3"],
    "bench": ["task=bench", "max_model_len=96", "cpu_threads=1", "bench.repeats=1", *SMALL],
}


@pytest.mark.parametrize("task", TASKS)
def test_the_result_names_the_culprit(
    site: Site,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logging_as_before: None,
    task: str,
) -> None:
    """One line on stderr for each hook, all counted in result.json, none in place of another; the answers are there."""
    site.add("loud", BOTH)
    monkeypatch.chdir(tmp_path)
    assert main(["model=tiny-llama", "device=cpu", "hydra.run.dir=out", *TASKS[task]]) == 0
    result = json.loads((tmp_path / "out/result.json").read_text())
    raised = {"inferlab_step": "ValueError: oops", "inferlab_request_finished": "KeyError: 'end'"}
    raised["inferlab_metrics"] = "SystemExit: 2"
    assert result["failed_observers"] == {"loud": {"failures": 3, "raised": raised}} and result["metrics"] == {}
    assert result["outputs"][0]["token_ids"] if task == "generate" else result["bench"]["metrics"]
    text = capsys.readouterr().err
    lines = [f"observer loud raised {what} in {hook} and is switched off" for hook, what in raised.items()]
    lines[-1] = "plugin loud: inferlab_metrics raised SystemExit: 2"
    assert [text.count(line) for line in lines] == [1, 1, 1]
    cell = CellRecord("", 0, {}, [], "ok")
    seen = {(t["kind"], t["name"], t["why"]) for t in troubles([(cell, result, text)])}
    assert seen == {("observer", "loud", f"{what} in {hook}") for hook, what in raised.items()}
