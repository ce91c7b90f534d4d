"""Observers: whatever they do, the run gives what it gives without them, and the culprit is named in the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.cli import main
from core.observers import Observers
from core.params import SamplingParams
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
    assert observers.failed["loud"].startswith(error.partition("(")[0])
    modules = {p.name: p.module for p in site.discover().plugins}
    assert [name for name, _ in observers.step] == ["quiet"] and modules.keys() >= {"loud", "quiet"}


def test_an_observer_changes_nothing(site: Site) -> None:
    """It gets copies: what it writes into the times is nowhere seen, and labels cannot be written at all."""
    site.add("quiet", QUIET)
    _, seen, observers = run(site)
    assert all(labels == {"client": "a"} and finish >= 0 for labels, finish in seen)
    assert observers.failed["quiet"].startswith("TypeError") and not observers.finished and observers.step


def test_nobody_listens(site: Site) -> None:
    """No record is built then: the lists are empty, which is all that a step asks."""
    assert not Observers().step and not Observers(site.discover().manager).step
    assert not Observers(site.discover().manager).finished


def test_a_wrapper_around_an_observer_is_refused(site: Site) -> None:
    """Called as a function it would do nothing, without a word."""
    site.add("acme", "@hookimpl(wrapper=True)\ndef inferlab_step(record):\n    yield\n")
    assert "inferlab_step cannot be a wrapper: only inferlab_build is one" in site.discover().failed["acme"]


def test_the_result_names_the_culprit(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], logging_as_before: None
) -> None:
    """One line on stderr, the same in result.json; the answers are there."""
    metrics = "@hookimpl\ndef inferlab_metrics():\n    raise SystemExit(2)\n"
    site.add("loud", RAISES.format(error='ValueError("oops")') + metrics)
    monkeypatch.chdir(tmp_path)
    settings = ["model=tiny-llama", "device=cpu", "prompts=[abc]", "sampling.max_tokens=3", "hydra.run.dir=out"]
    assert main(settings) == 0
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["failed_observers"] == {"loud": "ValueError: oops"} and result["metrics"] == {}
    assert len(result["outputs"][0]["token_ids"]) > 0
    text = capsys.readouterr().err
    assert text.count("observer loud raised ValueError: oops and is switched off") == 1
