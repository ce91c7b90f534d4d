"""docs/tutorial.md, executed block by block in a clean environment: its commands, its edits, and what it says of both."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clean_env import CleanEnvironment

PAGE = (Path(__file__).parent.parent / "docs/tutorial.md").read_text()
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^>]*) -->\n)?^```(?P<words>[^\n]+)\n(?P<text>.*?)^```$", re.S | re.M)


@dataclass(frozen=True)
class Block:
    words: str  # bash, bash exit 1, text, diff, python, toml
    mark: str  # nightly, part of FILE, edit FILE
    text: str


BLOCKS = [Block(m["words"], m["mark"] or "", m["text"]) for m in BLOCK.finditer(PAGE)]


def execute(clean: CleanEnvironment, where: Path, nightly: bool) -> None:
    """In order; a command that fails otherwise than the page says, or an output without the page's lines, is an error."""
    output, skipped = "", False
    for block in BLOCKS:
        kind, _, path = block.mark.rpartition(" ")
        if block.words.startswith("bash"):
            skipped = block.mark == "nightly" and not nightly
            if not skipped:
                done = clean.run(
                    "bash",
                    "-ec",
                    f"exec 2>&1\n{block.text}",
                    cwd=where,
                    env={"OMP_NUM_THREADS": "1", "COLUMNS": "160"},
                    timeout=1200,
                )
                output = done.stdout
                wanted = int(block.words.partition("exit ")[2] or 0)
                assert done.returncode == wanted, f"{block.text}\n{output[-4000:]}"
        elif block.words == "text":
            assert skipped or says(output, block.text), f"missing of\n{block.text}\nin\n{output[-4000:]}"
        elif kind == "part of":
            assert block.text in (where / path).read_text(), f"{path} does not hold\n{block.text}"
        else:
            assert kind == "edit" and block.words == "diff", f"what is this block for?\n{block.text}"
            edit(where / path, block.text)


def edit(path: Path, diff: str) -> None:
    """Put the lines with a plus in the place of those with a minus, which are there once."""
    old, new = ("".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] == sign) for sign in "-+")
    text = path.read_text()
    assert text.count(old) == 1, f"{path} does not hold this once:\n{old}"
    path.write_text(text.replace(old, new))


def says(output: str, wanted: str) -> bool:
    """Every wanted line, in their order; `...` stands for anything, and columns may be of any width."""
    lines = iter([" ".join(line.split()) for line in output.splitlines()])
    for line in wanted.splitlines():
        pattern = ".*?".join(r"\s*".join(map(re.escape, part.split())) for part in line.split("..."))
        if not any(re.search(pattern.replace(".*?", r"\s*.*?\s*"), found) for found in lines):
            return False
    return True


@pytest.fixture
def environment(clean: CleanEnvironment) -> Iterator[CleanEnvironment]:
    """The one of all tests; what the tutorial installs is taken out again."""
    yield clean
    done = subprocess.run([clean.python, "-m", "pip", "uninstall", "-y", "-q", "srf"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_tutorial(environment: CleanEnvironment, tmp_path: Path) -> None:
    """All but what it marks as nightly: the sweep, and three long answers."""
    execute(environment, tmp_path, nightly=False)


@pytest.mark.nightly
def test_the_tutorial_with_its_sweep(environment: CleanEnvironment, tmp_path: Path) -> None:
    """The sweep gives what the page says of it: short answers end earlier, by their place in the order, under srf."""
    execute(environment, tmp_path, nightly=True)
    place: dict[str, float] = {}
    for path in (tmp_path / "sweep").glob("jobs/*/0/requests.jsonl"):
        requests = sorted(map(json.loads, path.read_text().splitlines()), key=lambda request: request["finish_s"])
        chosen = json.loads((path.parent / "result.json").read_text())["plugins"]["scheduler"]["name"]
        place[chosen] = sum(i for i, request in enumerate(requests) if request["output_tokens"] <= 32)
    assert place["srf"] < place["fcfs"]


def test_lines_are_looked_for_in_order() -> None:
    """What the page says would otherwise be found anywhere."""
    assert says("a  1 b\nc\n", "a ... b\nc\n") and not says("c\na 1 b\n", "a ... b\nc\n") and not says("ab", "a b c")
