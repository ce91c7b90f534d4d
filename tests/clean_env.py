"""One clean environment for all tests that need one: our wheel and those of examples/, over the packages that are here already.

A virtual environment of its own, so that what pip installs is what is used, and a folder of links to everything else that the
running interpreter has installed. Left out are inferlab itself (an editable install would stand before the wheel) and every
distribution with inferlab plugins. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))
OURS = "core", "plugins", "conf", "pyproject.toml", "setup.py", "README.md", "LICENSE"
BUILD = """
import os, sys
from setuptools import build_meta
_, into, *folders = sys.argv
for folder in folders:
    os.chdir(folder)
    build_meta.build_wheel(into)
"""


class CleanEnvironment:
    """`run` finds its python, inferlab and pip first; the working directory is outside of any checkout."""

    def __init__(self, path: Path) -> None:
        self.path, self.bin, self.python = path, path / "bin", path / "bin/python"
        venv.create(path, with_pip=False, symlinks=True)
        links = path / "links"
        links.mkdir()
        for item in theirs():
            if not (links / item.name).exists():
                (links / item.name).symlink_to(item)
        (self._site() / "links.pth").write_text(f"{links}\n")
        # pip without network: it builds with the setuptools that is here.
        pip = self.bin / "pip"
        pip.write_text(
            f'#!/bin/sh\nverb=$1; shift\nexec "{self.python}" -m pip "$verb" --no-index --disable-pip-version-check -q '
            '$(case "$verb" in install|wheel) echo --no-build-isolation;; esac) "$@"\n'
        )
        pip.chmod(0o755)

    def _site(self) -> Path:
        return next((self.path / "lib").glob("python*/site-packages"))

    def run(
        self, *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment."""
        theirs = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "INFERLAB", "HYDRA", "PYTEST"))}
        path = f"{self.bin}{os.pathsep}{theirs.get('PATH', '')}"
        used = {**theirs, "PATH": path, "VIRTUAL_ENV": str(self.path), **(env or {})}
        return subprocess.run([*map(str, command)], cwd=cwd, env=used, capture_output=True, text=True, timeout=timeout)

    def install(self, *items: Path | str) -> None:
        """pip, without network."""
        done = self.run("pip", "install", *items, cwd=self.path)
        assert done.returncode == 0, done.stdout + done.stderr


def theirs() -> Iterator[Path]:
    """What the running interpreter has installed, without inferlab and its plugins."""
    hidden = {"core", "plugins", "inferlab"}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.lower() == "inferlab" or distribution.entry_points.select(group="inferlab.plugins"):
            hidden |= {str(file).split("/")[0] for file in distribution.files or () if not str(file).startswith("..")}
    for folder in map(Path, sys.path):
        if folder.name in ("site-packages", "dist-packages") and folder.is_dir():
            for item in folder.iterdir():
                ours = item.name in hidden or item.name.startswith(("inferlab-", "__editable__"))
                if not ours and item.suffix != ".pth":
                    yield item


def build_wheels(folders: Sequence[Path], into: Path) -> list[Path]:
    """Wheels of copies of the folders, in their order."""
    into.mkdir(parents=True, exist_ok=True)
    before = set(into.glob("*.whl"))
    done = subprocess.run([sys.executable, "-c", BUILD, into, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(set(into.glob("*.whl")) - before)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ours, built from a copy of the tree, without network."""
    tree = tmp_path_factory.mktemp("tree")
    for name in OURS:
        copy(ROOT / name, tree / name)
    return build_wheels([tree], tree / "dist")[0]


@pytest.fixture(scope="session")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    """With inferlab and the example packages installed from their wheels."""
    folder = tmp_path_factory.mktemp("clean")
    copies = [copy(path, folder / "examples" / path.name) for path in EXAMPLES]
    wheels = build_wheels(copies, folder / "wheels")
    assert len(wheels) == len(EXAMPLES) >= 4
    environment = CleanEnvironment(folder / "env")
    environment.install(wheel, *wheels)
    return environment


def copy(source: Path, target: Path) -> Path:
    """Without what a build or a run may have left."""
    if source.is_dir():
        junk = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist", ".*cache")
        shutil.copytree(source, target, ignore=junk)
    else:
        shutil.copy(source, target)
    return target
