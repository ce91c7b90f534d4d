"""The plugin API: a committed snapshot, what each kind of change means, and plugins that were written for another version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.interfaces import API_VERSION, Component
from core.plugins.checks import api_problems
from tests.plugins_fixtures import SCHEDULER, Site
from tests.test_docs import script

ROOT = Path(__file__).parent.parent
api = script("api_snapshot")
SOURCES = api.read()


def test_the_snapshot_is_current() -> None:
    """A contract, a hook or a record has changed: docs/stability.md says what to do."""
    before, now = api.FILE.read_text().splitlines(), api.snapshot(SOURCES)
    change = api.compare(before, now)
    assert before == now, f"the plugin API has changed:\n{change}\n" + "\n".join([*change.breaking, f"then run {api.COMMAND}"])


def test_the_snapshot_holds_the_whole_contract() -> None:
    """Each class and hook has its line; so has each field and method of one of them."""
    text = api.FILE.read_text()
    assert api.version_of(SOURCES) == API_VERSION
    for source in SOURCES.values():
        for name in re.findall(r"^class (\w+)", source, re.M):
            assert re.search(rf"^[\w.]+ class {name}\(", text, re.M), name
    for line in (
        *(
            "core.interfaces Scheduler.@abstractmethod schedule(self, step: Step) -> None",
            "core.capabilities FACTS has 'dtype'",
        ),
        *("core.interfaces Component.summary: str = ''", "core.hooks inferlab_step takes record: StepRecord"),
        *("core.interfaces KVSettings.block_size: int | str = 'auto'", "core.testing __all__ has 'SamplerSuite'"),
        *("core.records StepRecord.free_blocks: int", "core.interfaces OneOf is core.capabilities.OneOf"),
    ):
        assert line in text.splitlines(), line


STEP = '    def evict(self, request: Request) -> None:\n        """'
CHANGES = {  # what is changed: file, text, its replacement, why plugins break ("" if they do not)
    "a method renamed": ("interfaces", "def publish(", "def announce(", "gone or changed: .*publish"),
    "a method that must be written": (
        "interfaces",
        "    def moves(self)",
        "    @abstractmethod\n    def pin(self) -> None: ...\n    def moves(self)",
        "must be written",
    ),
    "a method with a default": ("interfaces", "    def moves(self)", "    def pin(self) -> None: ...\n    def moves(self)", ""),
    "a signature": ("interfaces", "def remove(self, request: Request)", "def remove(self, request: Request, why: str)", "gone"),
    "a type": ("interfaces", "def evict(self, request: Request)", "def evict(self, request: R)", "gone"),
    "a field with a default at the end": (
        "capabilities",
        '    problem: str = ""',
        '    problem: str = ""\n    hint: str = ""',
        "",
    ),
    "a field with a default before others": (
        "capabilities",
        "    version: str",
        '    hint: str = ""\n    version: str',
        "moves",
    ),
    "a field without a default": (
        "records",
        "    free_blocks: int",
        "    free_blocks: int\n    held: int",
        "without a default",
    ),
    "a default": ("interfaces", 'summary: str = ""', 'summary: str = "?"', "gone or changed"),
    "fields in another order": ("interfaces", "    slots: Tensor  # [S] int64\n", "", "gone|order"),
    "an argument of a hook": ("hooks", "record: StepRecord", "record: StepRecord, engine: int", ""),
    "no argument of a hook": ("hooks", "record: StepRecord", "", "gone or changed: core.hooks inferlab_step takes record"),
    "a hook": (
        "hooks",
        "@hookspec\ndef inferlab_presets",
        "@hookspec\ndef inferlab_x(): ...\n@hookspec\ndef inferlab_presets",
        "",
    ),
    "a class": (
        "records",
        "@dataclass(frozen=True, slots=True)\nclass Metric",
        "class New:\n    x: int\n@dataclass\nclass Metric",
        "gone",
    ),
    "a new class": (
        "settings",
        "def setting",
        "class New:\n    x: int\n    @abstractmethod\n    def f(self): ...\ndef setting",
        "",
    ),
    "a key of capabilities": ("capabilities", '"load.labels"),\n)', '"load.labels", "x"),\n)', ""),
    "no key of capabilities": ("capabilities", '"head_size", ', "", "gone or changed: core.capabilities FACTS has 'head_size'"),
    "a suite of the kit": ("testing/__init__", '    "SamplerSuite",\n', "", "gone or changed: core.testing"),
    "a frozen class": (
        "interfaces",
        "@dataclass(slots=True)\nclass Batch",
        "@dataclass(frozen=True)\nclass Batch",
        "gone or changed",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_change_means(what: str) -> None:
    """Every kind of change is seen, and told apart from those that break nobody."""
    name, old, new, why = CHANGES[what]
    path = f"core/{name}.py"
    assert old in SOURCES[path], f"{path} has changed: {old!r} is not there"
    before = api.snapshot(SOURCES)
    change = api.compare(before, api.snapshot({**SOURCES, path: SOURCES[path].replace(old, new, 1)}))
    assert change and (re.search(why, "\n".join(change.breaking)) if why else not change.breaking)
    assert api.needed((1, 3), change) == ((2, 0) if why else (1, 4))


def test_order_of_fields() -> None:
    """Positional arguments would land elsewhere."""
    head, a, b = "plugin API 1.0", "m C.a: int", "m C.b: int"
    assert api.compare([head, a, b], [head, b, a]).breaking == ["the order of what was there is another"]


def test_documentation_and_bodies_are_no_change() -> None:
    path = "core/params.py"
    text = SOURCES[path].replace("How one request is continued.", "Another text.").replace("x >= -1", "x >= -2")
    assert text != SOURCES[path] and not api.compare(api.snapshot(SOURCES), api.snapshot({**SOURCES, path: text}))


def test_renewal_asks_for_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is written only with a version that fits, or while no release has it."""
    file, path = tmp_path / "api.txt", "core/interfaces.py"
    monkeypatch.setattr(api, "FILE", file)
    assert api.main([]) == 0 and api.main(["--check"]) == 0 and api.main([]) == 0
    before = file.read_text()
    changed = {**SOURCES, path: SOURCES[path].replace("def publish(", "def announce(")}
    monkeypatch.setattr(api, "read", lambda: changed)
    assert api.main(["--check"]) == 1 and api.main([]) == 1 and file.read_text() == before
    assert "this needs API_VERSION = (2, 0) in core/interfaces.py, it is (1, 0)" in capsys.readouterr().err
    changed[path] = changed[path].replace("API_VERSION = (1, 0)", "API_VERSION = (2, 0)")
    assert api.main([]) == 0 and file.read_text().startswith("plugin API 2.0")
    monkeypatch.setattr(api, "read", lambda: SOURCES)
    assert api.main([]) == 1 and api.main(["--unreleased"]) == 0 and file.read_text() == before


MAJOR, MINOR = API_VERSION
NEWER = "install a newer inferlab, or an older version of this plugin"


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ((MAJOR, MINOR), None),
        ((MAJOR, MINOR + 1), f"written for plugin API {MAJOR}.{MINOR + 1}, this inferlab has {MAJOR}.{MINOR}; {NEWER}"),
        ((MAJOR + 1, 0), f"written for plugin API {MAJOR + 1}.0, this inferlab has {MAJOR}.{MINOR}; {NEWER}"),
        ((MAJOR - 1, 7), "install a newer version of this plugin, or an older inferlab"),
        ("1.0", "a version of the plugin API is (MAJOR, MINOR), got '1.0'"),
        ((1,), "(MAJOR, MINOR), got (1,)"),
    ],
)
def test_versions(version: object, text: str | None) -> None:
    """P6: both versions, and which side to renew."""
    found = list(api_problems("scheduler=x", version))
    assert not found if text is None else len(found) == 1 and text in found[0]


def test_what_says_nothing_counts_as_the_first() -> None:
    """With another default, a plugin of version 1 would pass for one of version 2 once that exists."""
    assert Component("scheduler", "x", "m:X").api == (1, 0)


def why(site: Site, source: str) -> str:
    site.add("acme", source)
    registry = site.discover()
    assert registry.find("scheduler", "fcfs").origin == "built-in"
    return registry.failed["acme"]


def test_hooks_without_a_component(site: Site) -> None:
    """P6: an observer has no component to say it with. Nothing of such a plugin is called."""
    hook = "@hookimpl\ndef inferlab_step(record):\n    pass\n"
    assert f"it is written for plugin API 2.0, this inferlab has {MAJOR}.{MINOR}" in why(site, f"INFERLAB_API = (2, 0)\n{hook}")
    assert not site.discover().manager.hook.inferlab_step.get_hookimpls()
    assert "is (MAJOR, MINOR), got 2" in why(site, f"INFERLAB_API = 2\n{hook}")
    site.add("acme", f"INFERLAB_API = {API_VERSION}\n{hook}")
    assert not site.discover().failed and site.discover().manager.hook.inferlab_step.get_hookimpls()


def test_the_version_is_said_where_the_import_fails(site: Site) -> None:
    """P6: a plugin for version 2 imports what version 1 does not have, long before it can say its version."""
    new = "from core.interfaces import Planner\n"
    text = why(site, new + SCHEDULER.format(name="x").replace('Target")', 'Target", api=(2, 0))'))
    assert "acme 1.0: its component is written for plugin API 2.0, this inferlab has" in text
    assert "and 1 more" in text and len(site.discover().plugins[-1].problems) == 2
    text = why(site, "from core.interfaces import Schedular\n" + SCHEDULER.format(name="x"))
    assert f"did you mean Scheduler? This inferlab has plugin API {MAJOR}.{MINOR}: is the plugin written for another" in text
    text = why(site, "import core.interface\n")
    assert "No module named 'core.interface' (/" in text and f"This inferlab has plugin API {MAJOR}.{MINOR}" in text
    assert "plugin API" not in why(site, "import nowhere\n")


def test_templates_say_their_version() -> None:
    """`plugins new` writes plugins for the API of this inferlab."""
    folder = ROOT / "core/plugins/templates"
    texts = [p.read_text() for p in folder.glob("*.py") if "yield Component(" in p.read_text()]
    assert len(texts) == 5 and all(f"api={API_VERSION}," in text for text in texts)
