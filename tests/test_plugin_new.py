"""`plugins new`: what it makes works as it is, for each kind; names that cannot work are refused before anything is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from core.llm import LLM, SamplingParams
from core.plugins import discover
from core.plugins.commands import main
from core.plugins.new import USE, Names
from tests.plugins_fixtures import SCHEDULER, Site

ROOT = Path(__file__).parent.parent
NAMES = {kind: f"my-{kind.replace('_', '-')}" for kind in USE}


def install(site: Site, folder: Path) -> None:
    """As pip would, from what its pyproject.toml says."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    about, modules = project["project"], project["tool"]["setuptools"]["py-modules"]
    for module in modules:
        site.write(f"{module}.py", (folder / f"{module}.py").read_text())
    info = f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    needs = "".join(f"Requires-Dist: {text}\n" for text in about["dependencies"])
    site.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n{needs}")
    points = "".join(f"{name} = {value}\n" for name, value in about["entry-points"]["inferlab.plugins"].items())
    site.write(f"{info}/entry_points.txt", f"[inferlab.plugins]\n{points}")


@pytest.fixture
def five(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    """kind -> folder of a new package that is installed."""
    for kind, name in NAMES.items():
        assert main(["new", name, "--kind", kind, "--dir", str(tmp_path / "made"), "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        folder = tmp_path / "made" / name
        assert data["path"] == str(folder) and all((folder / path).is_file() for path in data["files"])
        install(site, folder)
    discover.cache_clear()  # type: ignore[attr-defined]
    return {kind: tmp_path / "made" / name for kind, name in NAMES.items()}


def test_what_is_made(five: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Four files, the name everywhere, no word of the template left; `check` finds nothing, not even a warning."""
    for kind, folder in five.items():
        names = Names(NAMES[kind])
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert files == {"pyproject.toml", "README.md", f"{names.module}.py", f"tests/test_{names.module}.py"}
        for path in files:
            text = (folder / path).read_text()
            assert names.name in text
            for word in ("my-plugin", "my_plugin", "MyPlugin", "templates", "SUMMARY", "KIND", "RELEASE", "CONTRACT"):
                assert word not in text, f"{path} says {word}"
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["name"] == names.name and names.name in project["entry-points"]["inferlab.plugins"]
        assert discover().find(kind, names.name).plugin == names.name
        assert main(["check", names.name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["warnings"] == 0


def test_all_five_work_together(five: dict[str, Path]) -> None:
    """In one engine they give the tokens of the built-in parts."""

    def tokens(**parts: Any) -> list[list[int]]:
        with LLM("tiny-llama", num_kv_blocks=64, **parts) as llm:
            prompts = ["Hello", "The quick brown fox", "Hello, world"]
            return [o["token_ids"] for o in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))]

    assert tokens(**NAMES) == tokens()


def run_tests(five: dict[str, Path], site: Site, *arguments: str) -> list[tuple[str, str | None]]:
    """All must pass. (test class or module, why it was skipped) of each. More threads than one would wait for each other."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site.path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    where = next(iter(five.values())).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "core.testing.plugin", *arguments]
    done = subprocess.run([*command, "--junitxml=results.xml"], cwd=where, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    cases = ElementTree.parse(where / "results.xml").iter("testcase")
    skips = [(case.attrib["classname"], case.find("skipped")) for case in cases]
    return [(name, None if skip is None else skip.attrib["message"]) for name, skip in skips]


def test_their_tests_pass(five: dict[str, Path], site: Site) -> None:
    """All five in one process, each state machine a few times; the whole is nightly. None is skipped for want of a package."""
    done = run_tests(five, site, "--inferlab-examples", "5", *(str(folder / "tests") for folder in five.values()))
    for name in NAMES.values():
        module = f"test_{Names(name).module}"
        ran = [test for test, skipped in done if module in test and skipped is None]
        assert len(ran) >= 10, f"of {module} only {len(ran)} tests ran"
    for _, why in done:
        assert why is None or re.match(r"claims no |declares |accepts each of |transformers has none of its", why), why


@pytest.mark.nightly
def test_the_kit_passes_without_code(five: dict[str, Path], site: Site) -> None:
    """`pytest -p core.testing.plugin --pyargs core.testing --inferlab-plugin NAME`"""
    run_tests(five, site, "--pyargs", "core.testing", *(f"--inferlab-plugin={name}" for name in NAMES.values()))


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("srf", "schedular", "there is no template for it; did you mean scheduler?"),
        ("srf", "executor", "there is no template for it"),
        ("MySrf", "scheduler", "is no name for a plugin: lower-case letters and digits"),
        ("MySrf", "scheduler", "did you mean my-srf?"),
        ("2srf", "scheduler", "did you mean srf?"),
        ("my--srf", "scheduler", "did you mean my-srf?"),
        ("../srf", "scheduler", "did you mean srf?"),
        ("", "scheduler", "is no name for a plugin"),
        ("auto", "scheduler", "a word with a meaning of its own"),
        ("class", "scheduler", "a word with a meaning of its own"),
        ("core", "scheduler", "there is a Python module core already"),
        ("json", "scheduler", "there is a Python module json already"),
        ("fcfs", "scheduler", "scheduler=fcfs is offered by inferlab"),
        ("schedulers", "sampler", "has a plugin named schedulers already"),
        ("acme", "sampler", "has a plugin named acme already"),
    ],
)
def test_names_that_cannot_work(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str, text: str
) -> None:
    """Refused with the reason, and the nearest that would do."""
    site.add("acme", SCHEDULER.format(name="theirs"))
    discover.cache_clear()  # type: ignore[attr-defined]
    assert main(["new", name, "--kind", kind, "--dir", str(tmp_path / "made")]) == 1
    out, err = capsys.readouterr()
    assert text in err and not out and not (tmp_path / "made").exists()


def test_an_existing_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever lies there is the author's."""
    (tmp_path / "srf").mkdir()
    assert main(["new", "srf", "--kind", "scheduler", "--dir", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err and not list((tmp_path / "srf").iterdir())


def test_the_commands_that_come_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed as they are to be typed; without --dir the folder is made here."""
    assert main(["new", "srf", "--kind", "scheduler", "--dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"created {tmp_path / 'srf'}" and "    inferlab scheduler=srf" in lines
    assert any(line.endswith("--pyargs core.testing --inferlab-plugin srf") for line in lines)


def test_pip_is_given_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`pip install srf` would fetch a stranger's package of that name."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "srf", "--kind", "scheduler"]) == 0
    assert "    pip install ./srf" in capsys.readouterr().out.splitlines()


def test_a_folder_that_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also from its parent, where it could be imported; and a parent that is no folder. Nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "srf").mkdir()
    (tmp_path / "file").touch()
    assert main(["new", "srf", "--kind", "scheduler"]) == 1
    assert capsys.readouterr().err == "error: srf exists already: choose another name, another --dir, or remove it\n"
    assert main(["new", "trf", "--kind", "scheduler", "--dir", "file"]) == 1
    assert capsys.readouterr().err == "error: file/trf cannot be written (Not a directory): choose another --dir\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "srf"] and not list((tmp_path / "srf").iterdir())
