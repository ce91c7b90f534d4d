"""Sweeps: a cell that raises, exits, is killed or hangs is recorded with its reason; the others run, the report is written.

The troubles come from the settings of a scheduler of a test plugin, so they happen in the cells, before torch is loaded. A cell
without trouble leaves a result and ends there too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from core.cli import main
from core.errors import ConfigError
from core.sweep import cell as one_cell
from core.sweep import gpus, process
from core.sweep.equal import check_equal, compare, lines
from core.sweep.names import digest
from core.sweep.plan import with_repeats
from core.sweep.records import CellRecord, SweepRecord, read_sweep
from tests.plugins_fixtures import Site

pytestmark = pytest.mark.usefixtures("logging_as_before")
ROOT = Path(__file__).parent.parent
TROUBLE = """
import json, os, signal, subprocess, sys, time
CHECKED = sys.argv[0].endswith("check.py")
def leave_result():
    folder = next(a for a in sys.argv if a.startswith("hydra.run.dir=")).partition("=")[2].strip("'")
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump({"argv": sys.argv, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}, file)
    os._exit(0)
@dataclass
class Settings:
    how: str = "fine"
    where: str = ""
    decode_after: int = 0  # of fcfs, which it is otherwise
    def __post_init__(self):
        if CHECKED:
            if self.how == "uncheckable":
                os._exit(5)
            return
        print("pid", os.getpid(), flush=True)
        if self.how == "raise":
            raise ValueError(f"no luck in process {os.getpid()}")
        if self.how == "bug":
            raise KeyError("bug")
        if self.how == "exit":
            os._exit(3)
        if self.how == "vanish":
            os._exit(0)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            child = subprocess.Popen(["sleep", "100"])
            with open(self.where, "w") as file:
                file.write(str(child.pid))
            time.sleep(100)
        if self.how != "real":
            leave_result()
def probe(settings):
    return Probe(problem="it does not like how=misfit" if settings.how == "misfit" else "")
@hookimpl
def inferlab_components():
    yield Component("scheduler", "NAME", "plugins.schedulers.fcfs:Fcfs", Settings, probe="MODULE:probe")
"""
REST = ["model=tiny-llama", "sampling.max_tokens=2"]
BASE = ["-m", "scheduler=trouble", *REST]


@pytest.fixture
def sweep(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the sweep; children see the plugin."""
    install(site, "trouble", "1.0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site.path), str(ROOT)]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INFERLAB_DEBUG", raising=False)
    return tmp_path / "sweep"


def install(site: Site, name: str, version: str) -> None:
    for old in site.path.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    site.add(name, TROUBLE.replace("NAME", name), version=version)
    site.discover()


def cells(sweep: Path, factor: str = "scheduler.how") -> dict[str, CellRecord]:
    """Value of the factor -> cell of sweep.json."""
    return {cell.factors[factor]: cell for cell in read_sweep(sweep).cells}


def statuses(sweep: Path) -> dict[str, str]:
    return {how: cell.status for how, cell in cells(sweep).items()}


def gone(pid: int) -> bool:
    """The process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _pid(sweep: Path, cell: CellRecord) -> int:
    log = (sweep / cell.folder / "log.txt").read_text()
    return int(next(line.split()[1] for line in log.splitlines() if line.startswith("pid ")))


def test_twelve_cells_of_which_four_do_not_work(sweep: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """H2, H4: eight results, four reasons, exit code 1; started again, only the failed ones run."""
    where, fine = sweep.parent / "child", [f"fine{i}" for i in range(8)]
    how = ["raise", *fine[:4], "exit", "misfit", "hang", *fine[4:]]
    arguments = [*BASE, f"scheduler.how={','.join(how)}", f"scheduler.where={where}", f"hydra.sweep.dir={sweep}"]
    assert main([*arguments, "sweep.timeout_s=4"]) == 1
    found = cells(sweep)
    assert list(found) == how and read_sweep(sweep).planned == 12
    assert statuses(sweep) == {
        **dict.fromkeys(fine, "ok"),
        "raise": "failed",
        "exit": "crashed",
        "misfit": "incompatible",
        "hang": "timeout",
    }
    assert found["raise"].reason == f"no luck in process {_pid(sweep, found['raise'])}"
    assert "exit code 3" in found["exit"].reason
    assert found["misfit"].reason.startswith("n/a: scheduler=trouble: it does not like how=misfit")
    assert found["hang"].reason == "not finished after sweep.timeout_s=4 seconds"
    assert gone(int(where.read_text())) and gone(_pid(sweep, found["hang"]))
    assert not (sweep / found["misfit"].folder / "log.txt").exists()
    assert found["fine0"].plugins["scheduler"]["version"] == "1.0" and found["fine0"].environment["python"]
    out, err = capfd.readouterr()
    assert out == "" and "Traceback" not in err
    assert "8 of 12 jobs ok (1 failed, 1 crashed, 1 timeout, 1 incompatible)" in err
    assert err.index("incompatible: scheduler=trouble") < err.index("[job 0]")  # known before the first cell runs
    assert main([*arguments, "sweep.timeout_s=3"]) == 1
    second = cells(sweep)
    assert {how for how, cell in second.items() if not cell.resumed} == {"raise", "exit", "misfit", "hang"}
    assert {how: cell.seconds for how, cell in second.items() if cell.resumed} == {how: found[how].seconds for how in fine}


def test_a_new_version_of_one_plugin_runs_its_cells_again(site: Site, sweep: Path) -> None:
    """And nobody else's: the name of a cell holds the versions of the plugins that it uses."""
    install(site, "other", "1.0")
    arguments = ["-m", "scheduler=trouble,other", *REST, f"hydra.sweep.dir={sweep}"]
    assert main(arguments) == 0
    first = cells(sweep, "scheduler")
    install(site, "other", "1.1")
    assert main(arguments) == 0
    second = cells(sweep, "scheduler")
    assert second["trouble"].resumed and second["trouble"].hash == first["trouble"].hash
    assert not second["other"].resumed and second["other"].hash != first["other"].hash
    assert second["other"].plugins["scheduler"]["version"] == "1.1"


@pytest.mark.nightly
def test_further_endings(sweep: Path) -> None:
    """H1, H2: each cell has a process of its own. A cell that ends the process of the check is simply run."""
    arguments = [*BASE, "scheduler.how=bug,uncheckable,vanish,kill", f"hydra.sweep.dir={sweep}"]
    assert main(arguments) == 1
    found = cells(sweep)
    assert statuses(sweep) == {"bug": "failed", "uncheckable": "ok", "vanish": "crashed", "kill": "crashed"}
    assert found["bug"].reason.startswith("KeyError: 'bug'")
    assert "exit code 0, and left no result.json" in found["vanish"].reason
    assert "signal SIGKILL" in found["kill"].reason
    assert len({_pid(sweep, cell) for cell in found.values()} | {os.getpid()}) == 5


@pytest.mark.nightly
def test_a_failure_is_told_from_a_crash_with_debug_too(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback comes before the message, not in its place."""
    monkeypatch.setenv("INFERLAB_DEBUG", "1")
    assert main([*BASE, "scheduler.how=bug", f"hydra.sweep.dir={sweep}"]) == 1
    cell = read_sweep(sweep).cells[0]
    assert (cell.status, cell.reason[:15]) == ("failed", "KeyError: 'bug'")
    assert "Traceback" in (sweep / cell.folder / "log.txt").read_text()


def test_repeats_are_interleaved_and_share_a_name(sweep: Path) -> None:
    """A B A B, each in jobs/<hash>/<repeat>/."""
    assert main([*BASE, "scheduler.how=a,b", "sweep.repeats=2", f"hydra.sweep.dir={sweep}"]) == 0
    found = read_sweep(sweep)
    assert [(c.factors, c.repeat) for c in found.cells] == [({"scheduler.how": h}, r) for r in (0, 1) for h in "ab"]
    assert found.repeats == 2 and found.factors == {"scheduler.how": ["a", "b"]}
    assert [c.folder for c in found.cells] == [f"jobs/{c.hash}/{c.repeat}" for c in found.cells]
    assert len({c.hash for c in found.cells}) == 2
    started = [json.loads((sweep / c.folder / "cell.json").read_text())["started"] for c in found.cells]
    assert started == sorted(started)


def _one_is_ok(sweep: Path) -> bool:
    return any('"status": "ok"' in path.read_text() for path in sweep.glob("jobs/*/*/cell.json"))


@pytest.mark.parametrize(
    ("number", "code", "more"),
    [
        (signal.SIGINT, 130, ()),
        pytest.param(signal.SIGTERM, 143, (), marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, 130, ("sweep.parallel=2",), marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, 130, ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), marks=pytest.mark.nightly),
    ],
    ids=["ctrl-c", "term", "parallel", "joblib"],
)
def test_interrupting_a_sweep(sweep: Path, number: signal.Signals, code: int, more: tuple[str, ...]) -> None:
    """The running cell is ended, recorded as interrupted, the report written; what comes after is not started."""
    if "hydra/launcher=joblib" in more:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    where = sweep.parent / "child"
    how = "scheduler.how=fine,hang,exit" if not more else "scheduler.how=fine,hang"
    command = [sys.executable, "-m", "core.run", *BASE, how, f"scheduler.where={where}", *more]
    parent = subprocess.Popen([*command, f"hydra.sweep.dir={sweep}"], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (where.exists() and where.read_text() and _one_is_ok(sweep)):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(number)
    assert parent.wait(60) == code
    found = cells(sweep)
    assert read_sweep(sweep).interrupted
    assert statuses(sweep) == {"fine": "ok", "hang": "crashed"} and found["hang"].reason == "interrupted"
    assert gone(int(where.read_text()))


@pytest.mark.nightly
@pytest.mark.parametrize("more", [("sweep.parallel=3",), ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")], ids=str)
def test_several_at_a_time(sweep: Path, more: tuple[str, ...]) -> None:
    """In threads of this process, or by another launcher: the same records, and the same names when started again."""
    if "hydra/launcher=joblib" in more:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    command = [sys.executable, "-m", "core.run", *BASE, "scheduler.how=raise,a,misfit,b", *more, f"hydra.sweep.dir={sweep}"]
    for resumed in (False, True):
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == 1
        assert statuses(sweep) == {"raise": "failed", "a": "ok", "misfit": "incompatible", "b": "ok"}
        assert list(cells(sweep)) == ["raise", "a", "misfit", "b"]
        assert cells(sweep)["a"].resumed == resumed


def test_one_gpu_for_each_cell(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sweep sees several, as many cells run at a time, and no two of them on the same GPU."""
    monkeypatch.setenv(gpus.VISIBLE, "3,GPU-x")
    gpus.visible.cache_clear()
    try:
        assert main([*BASE, "scheduler.how=a,b,c", f"hydra.sweep.dir={sweep}"]) == 0
        found = read_sweep(sweep).cells
        assert {name for c in found for name in c.gpus} <= {"3", "GPU-x"}
        for c in found:
            assert json.loads((sweep / c.folder / "result.json").read_text())["gpus"] == c.gpus[0]
        with gpus.reserved(1, gpus.visible()) as one, gpus.reserved(1, gpus.visible()) as two:
            assert sorted(one + two) == ["3", "GPU-x"]
        with gpus.reserved(5, gpus.visible()) as all_of_them:
            assert all_of_them == ["3", "GPU-x"]
    finally:
        gpus.visible.cache_clear()


def test_wrong_settings_of_the_sweep(sweep: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Refused before the first cell."""
    for setting, text in (("timeout_s=-1", "must be > 0 seconds, got -1"), ("repeats=0", "whole number >= 1, got 0")):
        assert main([*BASE, "scheduler.how=a,b", f"sweep.{setting}", f"hydra.sweep.dir={sweep}"]) == 1
        err = capfd.readouterr().err
        assert text in err and err.count("error: ") == 1
    assert not (sweep / "jobs").exists()


def test_the_same_configuration_has_the_same_name() -> None:
    """However it was spelt; settings that leave the result as it is do not count."""
    one = OmegaConf.create({"a": {"x": 1, "y": 2}, "sweep": {"timeout_s": 1}, "log_level": "info"})
    two = OmegaConf.create({"log_level": "debug", "a": {"y": 2, "x": 1}, "sweep": {"timeout_s": 2}})
    assert digest(one) == digest(two)
    two.a.x = 3
    assert digest(one) != digest(two)


def test_the_repeats_vary_slowest() -> None:
    """Hydra varies the last of the swept settings fastest."""
    assert with_repeats(["-m", "a=1,2", "sweep.repeats=3"]) == ["-m", "sweep.repeat=0,1,2", "a=1,2", "sweep.repeats=3"]
    assert with_repeats(["--config-dir", "x=y", "-m", "sweep.repeats=2"])[3:] == ["sweep.repeat=0,1", "sweep.repeats=2"]
    assert with_repeats(["-m", "a=1", "sweep.repeats=1"]) == ["-m", "a=1", "sweep.repeats=1"]
    with pytest.raises(ConfigError, match=r"sweep\.repeats=2,3: .* one number"):
        with_repeats(["-m", "a=1", "sweep.repeats=2,3"])


def test_children_know_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hydra's own overrides and folders of presets travel; those of the sweep itself do not. -P except in the checkout."""
    sources = [{"path": "x", "provider": "main"}, {"path": "mine", "provider": "command-line"}]
    theirs = ["hydra.verbose=true", "hydra.mode=MULTIRUN", "hydra.sweep.dir=x"]
    hydra = OmegaConf.create({"overrides": {"hydra": theirs}, "runtime": {"config_sources": sources}})
    monkeypatch.chdir(tmp_path)
    command = one_cell.command(["a='b c'"], hydra, Path("/x y"))
    assert command[1:] == [
        *["-P", "-m", "core.run", "--config-dir", "mine", "a='b c'", "hydra.verbose=true"],
        *["hydra.run.dir='/x y'", "hydra.mode=RUN"],
    ]
    monkeypatch.chdir(ROOT)
    assert process.python("core.run")[1:] == ["-m", "core.run"]


def test_where_two_runs_part() -> None:
    """The first run, request and position at which they differ; a request that ended earlier differs there."""
    assert compare([[[1, 2], [3]]], [[[1, 2], [3]]]) is None
    found = compare([[[1, 2], [3, 4]], [[5]]], [[[1, 2], [3, 9]], [[6]]])
    assert found and (found.run, found.request, found.position, found.tokens) == (0, 1, 1, (4, 9))
    found = compare([[[1, 2]]], [[[1]]])
    assert found and (found.position, found.tokens) == (1, (2, None))


def _ran(folder: Path, name: str, tokens: list[int] | None, **settings: Any) -> CellRecord:
    settings = {"task": "generate", "model": {"path": "m"}, "seed": 0, "dtype": "auto", **settings}
    result = {"settings": settings, "plugins": {}, "environment": {"device": "cpu"}, "seed": settings["seed"]}
    place = folder / "jobs" / name / "0"
    place.mkdir(parents=True)
    (place / "result.json").write_text(json.dumps(result))
    if tokens is not None:
        (place / "tokens.json").write_text(json.dumps({"runs": [[tokens]]}))
    return CellRecord(name, 0, {"scheduler": name}, [], "ok", folder=f"jobs/{name}/0")


def test_cells_that_should_be_equal_are_compared(tmp_path: Path) -> None:
    """Only those: another seed may draw other tokens, and a cell that samples leaves none."""
    told = [
        _ran(tmp_path, "a", [1, 2, 3]),
        _ran(tmp_path, "b", [1, 2, 3]),
        _ran(tmp_path, "c", [1, 7, 3]),
        _ran(tmp_path, "d", [9], seed=1),
        _ran(tmp_path, "e", None),
    ]
    found = check_equal(tmp_path, told)
    assert found["compared"] == 3 and [g["equal"] for g in found["groups"]] == [False]
    where = {"run": 0, "request": 0, "position": 1, "tokens": [2, 7]}
    assert found["differences"] == [{"folder": "jobs/c/0", "reference": "jobs/a/0", "factors": {"scheduler": "c"}, **where}]
    text = "scheduler=c (jobs/c/0) drew token 7 where jobs/a/0 drew token 2: run 0, request 0, position 1"
    assert lines(found) == [f"NOT EQUAL: {text}"]
    assert lines(check_equal(tmp_path, told[:2])) == ["equal output: 2 runs that should have drawn the same tokens did"]
    assert check_equal(tmp_path, told[3:]) == {} and lines({}) == []


@pytest.mark.nightly
def test_a_bench_with_greedy_sampling_is_compared(tmp_path: Path) -> None:
    """From end to end: both schedulers and allocators draw the same tokens, under task=bench too."""
    small = ["load.num_requests=3", "load.input_min=6", "load.input_max=20", "load.output_min=2", "load.output_max=6"]
    cut = ["max_model_len=96", "bench.repeats=2", "bench.warmup=0", "sampling.temperature=0", *small]
    arguments = ["-m", "task=bench", "model=tiny-llama", "scheduler=fcfs,mixed", "kv_allocator=block_hash,paged", *cut]
    assert main([*arguments, f"hydra.sweep.dir={tmp_path}"]) == 0
    found = read_sweep(tmp_path)
    assert isinstance(found, SweepRecord) and found.equal_output["compared"] == 4
    assert found.equal_output["groups"][0]["equal"] and found.equal_output["groups"][0]["load"] == "offline"
    bench = json.loads((tmp_path / found.cells[0].folder / "bench.json").read_text())
    assert bench["metrics"] and found.cells[0].environment["packages"]["torch"]
