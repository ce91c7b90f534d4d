"""Sweeps: a cell that raises, exits, is killed or hangs is recorded with its reason; the others run, the report is written.

The troubles come from the settings of a scheduler of a test plugin, so they happen in the children, before torch is loaded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from core import multirun
from core.cli import main
from tests.plugins_fixtures import Site

pytestmark = pytest.mark.usefixtures("logging_as_before")
ROOT = Path(__file__).parent.parent
TROUBLE = """
import os, signal, subprocess, sys, time
@dataclass
class Settings:
    how: str = "fine"
    where: str = ""
    decode_after: int = 0  # of fcfs, which it is otherwise
    def __post_init__(self):
        print("pid", os.getpid(), flush=True)
        if self.how == "raise":
            raise ValueError(f"no luck in process {os.getpid()}")
        if self.how == "bug":
            raise KeyError("bug")
        if self.how == "exit":
            sys.exit(3)
        if self.how == "vanish":
            os._exit(0)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            child = subprocess.Popen(["sleep", "100"])
            with open(self.where, "w") as file:
                file.write(str(child.pid))
            time.sleep(100)
@hookimpl
def inferlab_components():
    yield Component("scheduler", "trouble", "plugins.schedulers.fcfs:Fcfs", Settings)
"""
BASE = ["-m", "scheduler=trouble", "model=tiny-llama", "sampling.max_tokens=2"]


@pytest.fixture
def sweep(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the sweep; children see the plugin."""
    site.add("trouble", TROUBLE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site.path), str(ROOT)]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INFERLAB_DEBUG", raising=False)
    return tmp_path / "sweep"


def cells(sweep: Path) -> dict[str, dict[str, Any]]:
    """scheduler.how -> cell of sweep.json."""
    found = json.loads((sweep / "sweep.json").read_text())["cells"]
    return {next(o for o in cell["overrides"] if "how=" in o).partition("how=")[2]: cell for cell in found}


def gone(pid: int) -> bool:
    """The process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_every_ending_is_recorded(sweep: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """H1, H2: one process per cell; the rest of the sweep goes on; exit code 1."""
    assert main([*BASE, "scheduler.how=raise,bug,exit,vanish,kill", f"hydra.sweep.dir={sweep}"]) == 1
    found = cells(sweep)
    assert {how: cell["status"] for how, cell in found.items()} == {
        "raise": "failed",
        "bug": "failed",
        "exit": "crashed",
        "vanish": "crashed",
        "kill": "crashed",
    }
    assert found["raise"]["reason"] == f"no luck in process {_pid(found['raise'])}"
    assert found["bug"]["reason"].startswith("KeyError: 'bug'")
    assert "exit code 3" in found["exit"]["reason"]
    assert "exit code 0, and left no result.json" in found["vanish"]["reason"]
    assert "signal SIGKILL" in found["kill"]["reason"]
    assert len({_pid(cell) for cell in found.values()} | {os.getpid()}) == 6
    out, err = capfd.readouterr()
    assert out == ""
    assert "0 of 5 jobs ok" in err and err.count("[job ") == 5 and "Traceback" not in err


def _pid(cell: dict[str, Any]) -> int:
    log = (Path(cell["folder"]) / "log.txt").read_text()
    return int(next(line.split()[1] for line in log.splitlines() if line.startswith("pid ")))


def test_a_failure_is_told_from_a_crash_with_debug_too(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback comes before the message, not in its place."""
    monkeypatch.setenv("INFERLAB_DEBUG", "1")
    assert main([*BASE, "scheduler.how=bug", f"hydra.sweep.dir={sweep}"]) == 1
    cell = cells(sweep)["bug"]
    assert (cell["status"], cell["reason"][:15]) == ("failed", "KeyError: 'bug'")
    assert "Traceback" in (Path(cell["folder"]) / "log.txt").read_text()


def test_started_again(sweep: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """H4, in short: finished cells are skipped, failed and changed ones run; the report has this sweep's cells only."""
    assert main([*BASE, "scheduler.how=fine,exit", f"hydra.sweep.dir={sweep}"]) == 1
    first = cells(sweep)
    assert {how: cell["status"] for how, cell in first.items()} == {"fine": "ok", "exit": "crashed"}
    assert (Path(first["fine"]["folder"]) / "result.json").is_file()
    assert main([*BASE, "scheduler.how=fine,raise", f"hydra.sweep.dir={sweep}", "sweep.timeout_s=99"]) == 1
    second = cells(sweep)
    assert {how: cell["status"] for how, cell in second.items()} == {"fine": "ok", "raise": "failed"}
    assert second["fine"]["seconds"] == first["fine"]["seconds"]
    assert "how=fine sweep.timeout_s=99: finished before, skipped" in capfd.readouterr().err
    assert main([*BASE, "scheduler.how=fine", f"hydra.sweep.dir={sweep}"]) == 0


def test_a_hanging_cell_is_ended_with_all_that_it_started(sweep: Path) -> None:
    """After sweep.timeout_s; the next cell runs."""
    where = sweep.parent / "child"
    arguments = ["scheduler.how=hang,exit", f"scheduler.where={where}", "sweep.timeout_s=6", f"hydra.sweep.dir={sweep}"]
    assert main([*BASE, *arguments]) == 1
    found = cells(sweep)
    assert (found["hang"]["status"], found["exit"]["status"]) == ("timeout", "crashed")
    assert found["hang"]["reason"] == "not finished after sweep.timeout_s=6 seconds"
    assert gone(int(where.read_text())) and gone(_pid(found["hang"]))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupting_a_sweep(sweep: Path, number: signal.Signals, code: int) -> None:
    """The running cell is ended, recorded as interrupted, the report written; what comes after is not started."""
    where = sweep.parent / "child"
    command = [sys.executable, "-m", "core.run", *BASE, "scheduler.how=hang,exit", f"scheduler.where={where}"]
    parent = subprocess.Popen([*command, f"hydra.sweep.dir={sweep}"], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not where.exists() or not where.read_text():
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(number)
    assert parent.wait(60) == code
    found = cells(sweep)
    assert {how: (cell["status"], cell["reason"]) for how, cell in found.items()} == {"hang": ("crashed", "interrupted")}
    assert gone(int(where.read_text()))


def test_the_same_configuration_has_the_same_name() -> None:
    """However it was spelt; settings that leave the result as it is do not count."""
    one = OmegaConf.create({"a": {"x": 1, "y": 2}, "sweep": {"timeout_s": 1}, "log_level": "info"})
    two = OmegaConf.create({"log_level": "debug", "a": {"y": 2, "x": 1}, "sweep": {"timeout_s": 2}})
    assert multirun.digest(one) == multirun.digest(two)
    two.a.x = 3
    assert multirun.digest(one) != multirun.digest(two)


def test_children_know_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hydra's own overrides and folders of presets travel; those of the sweep itself do not. -P except in the checkout."""
    hydra = OmegaConf.create({"overrides": {"hydra": ["hydra.verbose=true", "hydra.mode=MULTIRUN", "hydra.sweep.dir=x"]}})
    monkeypatch.setattr(multirun.sweep, "flags", ["--config-dir", "mine"])
    monkeypatch.chdir(tmp_path)
    command = multirun._command(["a='b c'"], hydra, Path("/x y"))
    assert command[1:] == [
        *["-P", "-m", "core.run", "--config-dir", "mine", "a='b c'", "hydra.verbose=true"],
        *["hydra.run.dir='/x y'", "hydra.mode=RUN"],
    ]
    monkeypatch.chdir(ROOT)
    assert multirun._command([], hydra, Path("/x"))[1:3] == ["-m", "core.run"]
