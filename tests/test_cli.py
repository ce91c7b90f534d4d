"""The command line: one message per error, exit codes, help; what runs is replaced, except where a process is started."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from core import app
from core.cli import main
from core.config import Composed
from tests.plugins_fixtures import SCHEDULER, Site

pytestmark = pytest.mark.usefixtures("logging_as_before")
ROOT = Path(__file__).parent.parent


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Composed]:
    """What the task was called with; the current folder is an empty one."""
    seen: list[Composed] = []

    def run_job(composed: Composed, run_dir: Path, resolved: None) -> dict[str, Any]:
        assert run_dir.is_dir()
        seen.append(composed)
        print("answer")
        logging.getLogger("inferlab").info("a line of the log")
        return {}

    monkeypatch.setattr(app, "run_job", run_job)
    monkeypatch.setattr("core.resolve.decide", lambda composed: None)  # the models of these tests have no files
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INFERLAB_DEBUG", raising=False)
    return seen


def test_a_run(jobs: list[Composed], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Answers on stdout, the log on stderr (Hydra's default is stdout); the folder is Hydra's."""
    before, argv = os.environ.get("HYDRA_FULL_ERROR"), list(sys.argv)
    assert main(["scheduler=mixed", "hydra.run.dir=here"]) == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("answer\n", "a line of the log\n")
    assert jobs[0].choices["scheduler"] == "mixed" and jobs[0].explicit == {"scheduler"}
    assert (tmp_path / "here/.hydra/overrides.yaml").read_text() == "- scheduler=mixed\n"
    assert (os.environ.get("HYDRA_FULL_ERROR"), sys.argv) == (before, argv)


def test_the_log_level(jobs: list[Composed], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["log_level=warning"]) == 0
    assert "line of the log" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["atention=flash"], "error: unknown setting atention; did you mean attention?"),
        (["scheduler=mixd"], "error: scheduler=mixd: no such option; did you mean mixed?"),
        (["+kv_allocator.size=3"], "error: unknown setting kv_allocator.size"),
        (["seed=x"], "error: seed=x: Value 'x'"),
        (["max_num_seqs=1,2"], "--multirun"),
        (["a=[1"], "error: "),
        (["--config-dir", "/nowhere"], "error: Additional config directory '/nowhere' not found"),
        (["plugins.block=[schedulers]"], "error: scheduler=fcfs: no such option"),
        (["-m", "atention=a,b"], "error: unknown setting atention; did you mean attention?"),
        (["-m", "scheduler=fcfs,mixd"], "did you mean mixed?"),
        (["--multrun"], "error: unknown flag --multrun; did you mean --multirun"),
        (["num_kv_blocks=9", "kv_memory=1GiB"], "error: num_kv_blocks and kv_memory both size the KV cache: leave one out"),
    ],
)
def test_user_errors(jobs: list[Composed], capfd: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    """One message on stderr, nothing on stdout, no traceback, exit code not 0; nothing runs."""
    assert main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == "" and jobs == []
    assert text in err and err.count("error: ") == 1 and "Traceback" not in err


def test_debug_shows_the_traceback(
    jobs: list[Composed], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERLAB_DEBUG", "1")
    assert main(["atention=x"]) == 1
    assert "Traceback" in capfd.readouterr().err
    monkeypatch.setenv("INFERLAB_DEBUG", "0")
    assert main(["atention=x", "--debug"]) == 1
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("a bad prompt"), 1, "error: a bad prompt\n"),
        (KeyError("bug"), 1, "error: KeyError: 'bug' (not one of the foreseen errors: --debug"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(3), 3, ""),
    ],
)
def test_how_a_job_ends(
    jobs: list[Composed],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    text: str,
) -> None:
    """Hydra would print the overrides and a traceback first."""

    def run_job(composed: Composed, run_dir: Path, resolved: None) -> None:
        raise error

    monkeypatch.setattr(app, "run_job", run_job)
    assert main([]) == code
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(text) and err.count("\n") == bool(text)


def test_version_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    """Hydra takes --version for itself; its --help knows no summaries."""
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"inferlab {metadata.version('inferlab')}\n"
    assert main(["--help"]) == 0
    text = capfd.readouterr().out
    for line in (
        "    fcfs*: ",
        "    mixed: ",
        "    auto*: ",
        "    flash: ",
        "    paged: ",
        "    llama: ",
        "    gumbel*: ",
        "    local: ",
    ):
        assert line in text
    for line in (
        "scheduler.decode_after=0",
        "kv_allocator.block_size=auto",
        "  max_model_len=auto ",
        "smollm2",
        "sweep.timeout_s=1800",
    ):
        assert line in text


def test_options_of_plugins_are_offered(site: Site, jobs: list[Composed], capfd: pytest.CaptureFixture[str]) -> None:
    """A third-party option is as good as a built-in one; a broken plugin is one line of warning."""
    site.add("acme", SCHEDULER.format(name="theirs"))
    site.add("bad", "import nowhere")
    assert main(["scheduler=theirs"]) == 0
    assert jobs[0].choices["scheduler"] == "theirs"
    err = capfd.readouterr().err
    assert err.count("warning: plugin bad could not be loaded: bad 1.0: ModuleNotFoundError") == 1
    assert main(["--help"]) == 0
    assert "    theirs:  [acme 1.0]" in capfd.readouterr().out
    assert main(["plugins.strict=true"]) == 1


def test_a_folder_of_presets(jobs: list[Composed], tmp_path: Path) -> None:
    """--config-dir: its models are presets, not paths."""
    (tmp_path / "mine/model").mkdir(parents=True)
    (tmp_path / "mine/model/own.yaml").write_text("weights: random\n")
    assert main(["--config-dir", "mine", "model=own"]) == 0
    assert main(["model=own"]) == 0
    assert [c.config.model.weights for c in jobs] == ["random", "auto"]
    assert [c.config.model.path for c in jobs] == [None, "own"]


def test_from_another_folder(tmp_path: Path) -> None:
    """attention=flash is refused here with all that is missing; a core.py in the working directory is not run (-P)."""
    (tmp_path / "core.py").write_text("raise SystemExit('the wrong core')\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "core.run", "attention=flash", "device=cpu", "model=tiny-llama"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert "attention=flash needs device to be cuda, got cpu" in done.stderr
    assert "attention=sdpa" in done.stderr and "Traceback" not in done.stderr


def test_settings_can_be_shown(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's own flags still work."""
    assert main(["--cfg", "job", "seed=7"]) == 0
    assert "seed: 7" in capfd.readouterr().out
    assert main(["--info", "defaults"]) == 0
    assert "scheduler/fcfs" in capfd.readouterr().out


def test_completion(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For the installed command; nested settings included."""
    monkeypatch.setenv("COMP_LINE", "inferlab kv_allocator.bl")
    monkeypatch.setenv("COMP_POINT", "24")
    assert main(["-sc", "query=bash"]) == 0
    assert "kv_allocator.block_size=" in capfd.readouterr().out


@pytest.mark.nightly
def test_a_real_run_leaves_a_result(tmp_path: Path) -> None:
    """The whole way, in a process of its own."""
    command = [sys.executable, "-m", "core.run", "model=tiny-llama", "sampling.max_tokens=3", f"hydra.run.dir={tmp_path}/run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip()
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["plugins"]["scheduler"]["version"] == metadata.version("inferlab")
