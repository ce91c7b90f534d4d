"""docs/messages.md and docs/commands.md hold what is so now, and nothing of the machine that it was written on."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/messages.md").read_text()


def test_a_part_of_the_messages_is_current() -> None:
    """Every row of the page has what provokes it, and each fourth is provoked again, in this process."""
    from docs.generate_messages import sample

    assert sample() == [], "python -m docs.generate_messages brings the page up to date"


@pytest.mark.nightly
def test_the_messages_are_current() -> None:
    """All are provoked again: `python -m docs.generate_messages` brings the page up to date."""
    command = [sys.executable, "-m", "docs.generate_messages", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_case_is_there() -> None:
    """P1 to P4 and P6 with a message, every pair that can clash, and no folder of a machine."""
    assert {f"P{n}" for n in (1, 2, 3, 4, 6)} <= set(re.findall(r"^\| (P\d) \|", PAGE, re.M))
    section = PAGE.partition("## Choices that clash")[2].partition("\n## ")[0]
    from tests.test_capabilities import PAIRS

    assert [p for p in PAIRS if f"| {p} |" not in section] == []
    assert not re.search(r"(?<![\w.~])/(?:home|root|tmp|Users|usr|work)\b", PAGE)
    assert "Traceback" not in PAGE


def test_the_commands_are_current(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/commands.md; and it holds every command, every flag and every top-level setting."""
    from core.cli import FLAGS
    from core.config import Config, SamplingSettings
    from core.loads import LoadSettings
    from core.model_settings import ModelSettings
    from core.plugins.commands import COMMANDS
    from docs.generate_commands import main

    monkeypatch.setattr(sys, "argv", ["generate_commands", "--check"])
    assert main() == 0, capsys.readouterr().err
    page = (ROOT / "docs/commands.md").read_text()
    assert [c for c in COMMANDS if f"### inferlab plugins {c}\n" not in page] == []
    assert [f for f in FLAGS if f not in page] == []
    documented = [f.name for f in fields(Config) if f.metadata.get("doc")]
    assert len(documented) > 15 and [name for name in documented if f"| `{name}` |" not in page] == []
    assert "--metrics METRICS" in page
    for prefix, kind in (("model", ModelSettings), ("load", LoadSettings), ("sampling", SamplingSettings)):
        rows = [re.search(rf"^\| `{prefix}\.{f.name}` \|.*\| (.*) \|$", page, re.M) for f in fields(kind)]
        assert [f.name for f, row in zip(fields(kind), rows, strict=True) if not row or row[1] == "-"] == []
