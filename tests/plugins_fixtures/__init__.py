"""Third-party distributions for tests, laid out as pip would install them: modules and a .dist-info folder."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from core.plugins import Registry, discover

HEAD = "from dataclasses import dataclass\nfrom core.interfaces import *\n"
_numbers = itertools.count()


class Site:
    """A folder on sys.path that distributions are put into."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(
        self,
        name: str,
        source: str,
        *,
        plugin: str = "",
        version: str = "1.0",
        files: Mapping[str, str] | None = None,
        editable=False,
    ) -> str:
        """A distribution with one plugin whose entry module holds `source`; the name of that module."""
        module = f"{name}_{next(_numbers)}"  # never the same twice: modules stay loaded
        self.write(f"{module}.py", HEAD + dedent(source).replace("MODULE", module))
        for path, text in (files or {}).items():
            self.write(path.replace("MODULE", module), HEAD + dedent(text) if path.endswith(".py") else dedent(text))
        info = f"{name}-{version}.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.write(f"{info}/entry_points.txt", f"[inferlab.plugins]\n{plugin or name} = {module}\n")
        if editable:
            self.write(f"{info}/direct_url.json", json.dumps({"url": "file:///x", "dir_info": {"editable": True}}))
        return module

    def write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def discover(self, **arguments) -> Registry:
        discover.cache_clear()  # type: ignore[attr-defined]
        return discover(**arguments)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty site in front of sys.path; what was discovered is forgotten before and after."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    discover.cache_clear()  # type: ignore[attr-defined]
    yield Site(folder)
    discover.cache_clear()  # type: ignore[attr-defined]
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


SCHEDULER = """
@hookimpl
def inferlab_components():
    yield Component("scheduler", "{name}", "MODULE_target:Target")
"""
"""Source of an entry module with one scheduler, `{name}` to be filled in."""
