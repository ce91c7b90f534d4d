"""How the commands end when their reader goes away, or when Ctrl-C is pressed early; and words that are no settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from core.cli import _words_first, main
from core.plugins import commands

ROOT = Path(__file__).parent.parent


def test_a_reader_that_goes_away() -> None:
    """`inferlab --help | head -1`: not a word on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "core.run", "--help"]
        done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_during_the_imports(tmp_path: Path) -> None:
    """Exit code 130 and no traceback: a module that core.cli imports presses it."""
    (tmp_path / "hydra.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGINT)})\nimport time\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-m", "core.run"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_during_a_command_of_plugins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "survey", pressed)
    assert commands.main(["list"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["plugin", "list"],
            "error: 'plugin' is no command; did you mean plugins? Settings are given as NAME=VALUE; see --help",
        ),
        (["scheduler", "fcfs"], "error: 'scheduler' is no command. Settings are given as NAME=VALUE; see --help"),
        (["-m", "fcfs"], "error: 'fcfs' is no command. Settings are given as NAME=VALUE; see --help"),
    ],
)
def test_a_word_that_is_no_setting(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    """Not the grammar of Hydra."""
    assert main(words) == 1
    assert capsys.readouterr() == ("", f"{text}\n")


def test_flags_stand_anywhere() -> None:
    """Settings on both sides of a flag, and the values of flags stay with them."""
    words = ["model=tiny-llama", "-m", "scheduler=fcfs,mixed", "--config-dir", "a=b", "--info", "seed=1", "~load"]
    ordered = ["model=tiny-llama", "scheduler=fcfs,mixed", "seed=1", "~load", "-m", "--config-dir", "a=b", "--info"]
    assert _words_first(words) == ordered
    assert _words_first(["--cfg", "job", "seed=1"]) == ["seed=1", "--cfg", "job"]


def test_settings_around_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=tiny-llama", "--cfg", "job", "seed=7"]) == 0
    assert "seed: 7" in capsys.readouterr().out
