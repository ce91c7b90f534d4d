"""`plugins check`: findings of metadata, declarations and places, each brought about once; others: test_plugin_commands."""

from __future__ import annotations

import importlib.machinery
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from core.plugins import diagnose, discover
from core.plugins.commands import main
from tests.plugins_fixtures import SCHEDULER, Site

GOOD = SCHEDULER.format(name="good")
TARGET = {"MODULE_target.py": "class Target(Scheduler):\n    add = remove = schedule = None\n"}
WRAPPED = "@hookimpl(wrapper=True)\ndef inferlab_step(record):\n    yield\n"
SETTINGS = """
@dataclass(frozen=True)
class Frozen:
    x: int = 1
@dataclass
class Odd:
    x: complex = 1j
"""


def declared(arguments: str) -> str:
    """An entry module with one component."""
    return f"{SETTINGS}\n@hookimpl\ndef inferlab_components():\n    yield {arguments}\n"


def option(more: str, kind: str = "scheduler", name: str = "good", target: str = "MODULE_target:Target") -> str:
    return declared(f'Component("{kind}", "{name}", "{target}", summary="one line", {more})')


@dataclass(frozen=True)
class Case:
    """What is wrong, and what is said of it."""

    level: str
    text: str  # a part of the finding
    source: str
    requires: str = "inferlab"
    version: str = "1.0"
    files: Mapping[str, str] = field(default_factory=lambda: TARGET)

    def install(self, site: Site) -> None:
        site.add("acme", self.source, files=self.files)
        text = f"Metadata-Version: 2.1\nName: acme\nVersion: {self.version}\nRequires-Dist: {self.requires}\n"
        site.write("acme-1.0.dist-info/METADATA", text)


REFUSED = "@dataclass\nclass S:\n    x: int = setting(0, 'a number')\n"
REFUSED += "    def __post_init__(self): raise ValueError('x must be >= 1, got 0')\n"
CASES = [
    # metadata
    Case("warning", "acme: its version 'one.two' is none that pip can compare", option(""), version="one.two"),
    Case("error", "acme: its metadata require 'no requirement', which is no requirement", option(""), "no requirement"),
    Case("error", "acme depends on inferlab>=99, but ", option(""), "inferlab>=99"),
    Case("warning", "acme does not depend on inferlab: dependencies = [", option(""), "pluggy"),
    # what the module declares
    Case("warning", "declares no component, no preset and no hook: does inferlab_components end early?", "x = 1"),
    Case("error", "inferlab_components must give Component objects, got 'fcfs'", declared("'fcfs'")),
    Case("error", "schedular=good: no such kind; did you mean scheduler? Kinds: ", option("", kind="schedular")),
    Case("error", "scheduler=auto: a name is letters, digits, _ . - and not auto", option("", name="auto")),
    Case("error", "scheduler=good: target must be \"module:Class\", got 'm.Target'", option("", target="m.Target")),
    Case("error", "scheduler=good: a version of the plugin API is (MAJOR, MINOR), got '1.0'", option('api="1.0"')),
    Case(
        "error",
        "nothing is known as 'blok_size', so this capability would never be checked; did you mean block_size?",
        option('capabilities={"blok_size": OneOf(1)}'),
    ),
    # settings
    Case("error", "settings must be a plain dataclass that is not frozen, got", option("settings=Frozen")),
    Case("error", "scheduler=good: Odd has a field of a type that settings cannot have", option("settings=Odd")),
    Case("error", "settings of a KV allocator extend core.interfaces.KVSettings", option("", kind="kv_allocator")),
    Case("error", "scheduler=good: the defaults of S are refused: x must be >= 1, got 0", REFUSED + option("settings=S")),
    Case(
        "warning",
        "scheduler=good: x of S undocumented: NAME: TYPE = setting(DEFAULT, DOC, UNIT)",
        "@dataclass\nclass S:\n    x: int = 1\n" + option("settings=S"),
    ),
    # hooks
    Case("error", "inferlab_step cannot be a wrapper: only inferlab_build is one", WRAPPED),
    Case("error", "inferlab_build must be a wrapper: @hookimpl(wrapper=True)", "@hookimpl\ndef inferlab_build(kind): pass"),
    Case(
        "error",
        "inferlab_step has no argument recrd; did you mean record? It takes",
        "@hookimpl\ndef inferlab_step(recrd): pass",
    ),
    # the target
    Case("error", "must extend core.interfaces.Scheduler", option(""), files={"MODULE_target.py": "class Target: pass"}),
    Case(
        "warning",
        "scheduler=good names what it requires but not how to install it: Component(install=...)",
        option('requires=["nowhere"]'),
    ),
    Case("warning", "scheduler=good has no summary, the line that --help shows", GOOD),
]


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    discover.cache_clear()  # type: ignore[attr-defined]
    code = main(["check", *arguments, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert code == int(data["errors"] > 0)
    return data


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text[:40])
def test_a_finding(site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """It is the level that it should be, and one of the texts; a plugin without the defect has no finding (the test below)."""
    monkeypatch.setattr(diagnose, "second_owners", list)  # reads all distributions: tested below
    case.install(site)
    data = checked(capsys, "acme")
    found = data["plugins"][0]["findings"]
    assert [f["level"] for f in found if case.text in f["text"]] == [case.level], found


def test_a_plugin_without_a_defect_has_no_finding(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    Case("", "", option("")).install(site)
    assert checked(capsys, "acme")["plugins"][0]["findings"] == []


def test_a_package_taken_from_another_place(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH with a folder `plugins` of somebody else's: one error, which names both places."""
    site.write("plugins/__init__.py", "")
    real = diagnose.importlib.util.find_spec
    other = importlib.machinery.PathFinder.find_spec("plugins", [str(site.path)])
    monkeypatch.setattr(diagnose.importlib.util, "find_spec", lambda name: other if name == "plugins" else real(name))
    monkeypatch.setattr(diagnose, "_plugin", lambda *_: ())  # would import every option
    registry = site.discover()
    (finding,) = diagnose.diagnose(registry, registry.plugins, everything=True)
    assert finding.level == "error" and finding.plugin == registry.plugins[0].name
    assert finding.text.startswith(f"the package plugins is taken from {site.path}, not from ")
    assert finding.text.endswith("look at PYTHONPATH")
