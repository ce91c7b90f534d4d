"""Discovery: one broken plugin takes nothing else down, and every mistake of an author is named."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from core.composition import world
from core.config import Config, compose
from core.plugins import PluginError
from core.plugins.loading import construct, load, missing
from tests.plugins_fixtures import SCHEDULER, Site

GOOD = SCHEDULER.format(name="good")


def failure(site: Site, source: str, **more) -> str:
    """Why a plugin with this entry module failed; the built-in ones must be there all the same."""
    site.add("acme", source, **more)
    registry = site.discover()
    assert registry.find("scheduler", "fcfs").origin == "built-in"
    assert not [f for f in registry.components.values() if f.plugin == "acme"]
    assert "\n" not in registry.failed["acme"]
    return registry.failed["acme"]


@pytest.mark.parametrize(
    ("source", "text"),
    [("import nowhere", "ModuleNotFoundError"), ("raise SystemExit(3)", "SystemExit"), ("def x(:", "SyntaxError")],
)
def test_a_broken_plugin_is_one_line(site: Site, source: str, text: str) -> None:
    """P1: beside good ones, everything else works; it is an error when selected, and always with strict."""
    site.add("good", GOOD)
    site.add("bad", source)
    registry = site.discover()
    assert registry.find("scheduler", "good").distribution == "good"
    assert registry.failed.keys() == {"bad"}
    assert registry.failed["bad"].startswith("bad 1.0: ") and text in registry.failed["bad"]
    with pytest.raises(PluginError, match=r"plugin bad could not be loaded: bad 1\.0"):
        registry.find("scheduler", "theirs")
    with pytest.raises(PluginError, match=r"plugins\.strict=true.*\nplugin bad: bad 1\.0"):
        site.discover(strict=True)


def test_an_unknown_option_says_what_there_is(site: Site) -> None:
    """P2: the nearest name, what is installed; never another option in its place."""
    with pytest.raises(PluginError, match=r"scheduler=mixd: no such option; did you mean mixed\?.*fcfs \(inferlab"):
        compose(["scheduler=mixd"])


def test_two_distributions_offer_one_option(site: Site) -> None:
    """P3: never silently one of them; blocking one decides."""
    site.add("acme", SCHEDULER.format(name="fcfs"), version="2.0")
    with pytest.raises(PluginError, match=r"scheduler=fcfs is offered by inferlab .* and by acme 2\.0"):
        site.discover()
    assert site.discover(block=["acme"]).find("scheduler", "fcfs").distribution == "inferlab"


def test_two_distributions_with_one_plugin_name(site: Site) -> None:
    """P3: pluggy would drop the second without a word."""
    site.add("acme", SCHEDULER.format(name="a"), plugin="shared")
    site.add("bolt", SCHEDULER.format(name="b"), plugin="shared")
    with pytest.raises(PluginError, match=r"named shared: (acme|bolt) 1\.0 and (acme|bolt) 1\.0; plugins\.block="):
        site.discover()
    registry = site.discover(block=["bolt"])
    assert [f.component.name for f in registry.options("scheduler")] == ["a", "fcfs", "mixed", "replay"]


def test_a_misspelt_hook(site: Site) -> None:
    """P4: silent in pluggy until somebody asks."""
    text = failure(site, "@hookimpl\ndef inferlab_component():\n    return []")
    assert "no hook inferlab_component; did you mean inferlab_components" in text


def test_a_forgotten_decorator(site: Site) -> None:
    """P4: the function would never be called."""
    assert "inferlab_components lacks the decorator: @hookimpl" in failure(site, "def inferlab_components():\n    return []")


def test_a_hook_with_a_wrong_argument(site: Site) -> None:
    """pluggy says it in several lines; here it is one, with the right spelling."""
    text = failure(site, "@hookimpl\ndef inferlab_step(records):\n    pass")
    assert "inferlab_step has no argument records; did you mean record? It takes record" in text


def test_a_build_hook_that_is_no_wrapper(site: Site) -> None:
    """With firstresult it would take the place of every component."""
    assert "must be a wrapper" in failure(
        site, "@hookimpl\ndef inferlab_build(kind, component, settings, context):\n    return 1"
    )


def test_another_version_of_the_interface(site: Site) -> None:
    """P6: refused with both versions."""
    text = failure(site, '@hookimpl\ndef inferlab_components():\n    yield Component("scheduler", "x", "m:X", api=(2, 0))')
    assert "scheduler=x is written for plugin API 2.0, this inferlab has 1.0" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('"schedular", "x", "m:X"', "no such kind; did you mean scheduler"),
        ('"attention", "auto", "m:X"', "not auto"),
        ('"scheduler", "x", "m.X"', 'target must be "module:Class"'),
        ('"kv_allocator", "x", "m:X"', "extend core.interfaces.KVSettings"),
        ('"scheduler", "x", "m:X", settings=Frozen', "a plain dataclass that is not frozen"),
        ('"scheduler", "x", "m:X", settings=Chosen', "Chosen has a field of a type that settings cannot have"),
        ('"scheduler", "x", "m:X", settings=dict', "a plain dataclass"),
    ],
)
def test_a_wrong_declaration(site: Site, arguments: str, text: str) -> None:
    """Each would otherwise fail far from its cause, inside Hydra or at the first override."""
    source = f"""
from typing import Literal
@dataclass(frozen=True)
class Frozen:
    x: int = 1
class Chosen:
    x: Literal["a", "b"] = "a"
Chosen.__annotations__ = {{"x": Literal["a", "b"]}}
Chosen = dataclass(Chosen)
@hookimpl
def inferlab_components():
    yield Component({arguments})
"""
    assert text in failure(site, source)


def test_heavy_imports_are_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry module that loads a heavy package makes every start slow, also for those who do not use it."""
    site.write("triton.py", "")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert "imports triton; import them in the target's module" in failure(site, "import triton\n" + GOOD)


def test_heavy_imports_are_seen_when_torch_is_loaded(site: Site) -> None:
    """The difference of sys.modules shows nothing then; a plugin that leaves torch alone is still fine."""
    pytest.importorskip("torch")
    site.add("good", GOOD)
    assert "imports torch" in failure(site, "import torch\n" + GOOD)
    assert site.discover().find("scheduler", "good").plugin == "good"


TARGET = """
class Base(Scheduler):
    def add(self, request): pass
    def remove(self, request): pass
class Target(Base):
    def shedule(self, step): pass
class Whole(Base):
    def schedule(self, step): pass
class Other: pass
"""


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("Target", r"lacks schedule\(\) \(is shedule a misspelling\?\)"),
        ("Other", r"must extend core\.interfaces\.Scheduler"),
        ("Nothing", r"has no class Nothing; it has Base, Target, Whole, Other"),
    ],
)
def test_a_wrong_target(site: Site, target: str, text: str) -> None:
    """P4: named when it is loaded, before any request."""
    source = GOOD.replace(":Target", f":{target}")
    site.add("acme", source, files={"MODULE_target.py": TARGET})
    with pytest.raises(PluginError, match=text):
        load(site.discover().find("scheduler", "good").component)


def test_a_target_that_cannot_be_imported_gives_the_install_line(site: Site) -> None:
    """Only when it is chosen: until then nothing of it is imported."""
    source = GOOD.replace(
        'Target")', 'Target", requires=["nowhere>=2", ("json>=1", "nothing")], install="pip install acme[x]")'
    )
    site.add("acme", source, files={"MODULE_target.py": "import nowhere"})
    component = site.discover().find("scheduler", "good").component
    assert missing(component) == ["nowhere>=2 (not installed)"]
    with pytest.raises(PluginError, match=r"No module named 'nowhere'; pip install acme\[x\]"):
        load(component)


def test_a_requirement_with_a_version(site: Site) -> None:
    """The found version is said beside the needed one."""
    site.add("acme", GOOD.replace('Target")', 'Target", requires=["pluggy>=99"])'))
    found = metadata.version("pluggy")
    assert missing(site.discover().find("scheduler", "good").component) == [f"pluggy>=99 (found pluggy {found})"]


def test_a_wrapper_decorates_what_is_built(site: Site) -> None:
    """`inferlab_build`: the core's implementation constructs, plugins wrap it."""
    source = GOOD.replace(":Target", ":Whole") + (
        "@hookimpl(wrapper=True)\ndef inferlab_build(kind):\n    part = yield\n    part.seen = kind\n    return part\n"
    )
    site.add("acme", source, files={"MODULE_target.py": TARGET})
    registry = site.discover()
    component = registry.find("scheduler", "good").component
    arguments = {"kind": "scheduler", "component": component, "settings": None, "context": None}
    assert registry.manager.hook.inferlab_build(**arguments).seen == "scheduler"
    assert not hasattr(construct(component, None, None), "seen")


PRESETS = '@hookimpl\ndef inferlab_presets():\n    return ["MODULE_conf"]\n'


def test_presets_of_a_plugin(site: Site) -> None:
    """Found while we compose, gone from Hydra's search path afterwards."""
    files = {"MODULE_conf/__init__.py": "", "MODULE_conf/model/acme-tiny.yaml": "weights: random\n"}
    site.add("acme", PRESETS, files=files)
    assert compose(["model=acme-tiny"]).config.model.weights == "random"
    assert compose(["model=acme-tiny", "plugins.block=[acme]"]).config.model.path == "acme-tiny"


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "package .*_conf, which does not exist"),
        ({"MODULE_conf/scheduler/x.yaml": "a: 1"}, "declared as components, not as YAML"),
    ],
)
def test_wrong_presets(site: Site, files: dict[str, str], text: str) -> None:
    """Hydra is silent about both."""
    site.add("acme", PRESETS, files=files)
    with pytest.raises(PluginError, match=text):
        site.discover(strict=True)


def test_a_preset_that_hides_another(site: Site) -> None:
    """Of two files with one name Hydra takes the first."""
    site.add("acme", PRESETS, files={"MODULE_conf/model/tiny-llama.yaml": "weights: random\n"})
    with (
        pytest.raises(PluginError, match=r"the preset model/tiny-llama is offered by inferlab and by acme_\d+_conf"),
        world(Config, site.discover()),
    ):
        pass


def test_without_an_installation(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    """A bare checkout has no entry points, so not even the built-in plugins: the command is said."""
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    with pytest.raises(PluginError, match="pip install -e"):
        site.discover()
