"""Which options exist: plugins are found by their entry points and loaded one at a time, so that a failure has a name.

Three tiers: metadata (no import), the light entry module (declares `Component`s), the target (imported when chosen, see
`core.plugins.loading`).
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pluggy

from core import hooks
from core.errors import did_you_mean
from core.interfaces import API_VERSION, ENTRY_POINT_GROUP, PROJECT, Component, hookimpl
from core.plugins.checks import (
    MODULE_API,
    PluginError,
    api_problems,
    component_problems,
    hook_problems,
    import_hint,
    import_light,
    written_for,
)
from core.plugins.loading import construct, find
from core.plugins.presets import package_problems
from core.plugins.wrapping import guard

__all__ = ["Found", "Plugin", "PluginError", "Registry", "discover", "survey"]

SLOW_S = 0.2  # an entry module that takes longer to import is named: every start waits for it


@dataclass(frozen=True)
class Found:
    """A component and where it comes from."""

    component: Component
    plugin: str  # name of the entry point
    distribution: str
    version: str
    origin: str  # built-in, wheel, editable

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass
class Plugin:
    """An entry point, and what became of it."""

    name: str
    distribution: str
    version: str
    origin: str  # built-in, wheel, editable
    module: str  # its entry module
    blocked: bool = False
    problems: list[str] = field(default_factory=list)  # one line each; with any, nothing of it is offered
    seconds: float = 0.0  # of importing its entry module
    components: list[Component] = field(default_factory=list)
    presets: list[str] = field(default_factory=list)  # packages

    @property
    def state(self) -> str:
        return "blocked" if self.blocked else "failed" if self.problems else "ok"

    @property
    def reason(self) -> str:
        """Why it failed: the first problem, and how many there are beside it."""
        more = f" (and {len(self.problems) - 1} more: see `{PROJECT} plugins check {self.name}`)" if self.problems[1:] else ""
        return f"{self}: {self.problems[0]}{more}" if self.problems else ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass
class Registry:
    """Everything that was found, and what failed."""

    plugins: list[Plugin] = field(default_factory=list)  # built-in ones first, then by name
    components: dict[tuple[str, str], Found] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)  # names with two providers: nothing can run until one is blocked
    blocked: tuple[str, ...] = ()
    manager: pluggy.PluginManager = field(default_factory=lambda: pluggy.PluginManager(PROJECT))

    @property
    def failed(self) -> dict[str, str]:
        """Plugin -> one line."""
        return {plugin.name: plugin.reason for plugin in self.plugins if plugin.problems}

    @property
    def presets(self) -> dict[str, str]:
        """Package with YAML presets -> plugin."""
        return {package: plugin.name for plugin in self.plugins for package in plugin.presets if not plugin.problems}

    @property
    def slow(self) -> list[str]:
        """One line per plugin whose entry module takes long to import."""
        slow = (p for p in self.plugins if p.seconds >= SLOW_S)
        return [f"plugin {p.name} took {p.seconds:.2f} s to import ({p})" for p in slow]

    def options(self, kind: str) -> list[Found]:
        """All options of a slot, in order of name."""
        return [found for (k, _), found in sorted(self.components.items()) if k == kind]

    def find(self, kind: str, name: str) -> Found:
        """The option, or a PluginError that says what there is instead."""
        if found := self.components.get((kind, name)):
            return found
        names = [f.component.name for f in self.options(kind)]
        installed = ", ".join(f"{f.component.name} ({f})" for f in self.options(kind)) or "nothing"
        failed = "".join(f"\nplugin {plugin} could not be loaded: {why}" for plugin, why in self.failed.items())
        raise PluginError(f"{kind}={name}: no such option{did_you_mean(name, names)} Installed: {installed}.{failed}")


class _Builder:
    """The core's own implementation of `inferlab_build`; others wrap it."""

    @hookimpl(trylast=True)
    def inferlab_build(self, kind: str, component: Component, settings: object, context: object) -> object:
        return construct(component, settings, context)


def discover(*, block: Sequence[str] = (), strict: bool = False) -> Registry:
    """Load every plugin but those blocked (by name of plugin or distribution). Cached per process by its arguments.

    A plugin that fails is one line in `failed`; with `strict` it is an error. Two providers of one name always are.
    """
    registry = survey(tuple(sorted(block)))
    if registry.conflicts:
        raise PluginError("\n".join(registry.conflicts))
    if strict and registry.failed:
        lines = "\n".join(f"plugin {plugin}: {why}" for plugin, why in registry.failed.items())
        raise PluginError(f"plugins.strict=true, and these could not be loaded (plugins.block=[NAME] hides one):\n{lines}")
    return registry


@lru_cache
def survey(block: tuple[str, ...] = ()) -> Registry:
    """As `discover`, but names with two providers are listed in `conflicts`; the first provider keeps the name."""
    registry = Registry(blocked=block)
    registry.manager.add_hookspecs(hooks)
    registry.manager.register(_Builder(), name=PROJECT)
    names: dict[str, Plugin] = {}
    for entry, distribution in _entry_points():
        origin = _origin(distribution)
        plugin = Plugin(entry.name, distribution.name, distribution.version, origin, entry.value)
        registry.plugins.append(plugin)
        plugin.blocked = entry.name in block or distribution.name in block
        if plugin.blocked:
            continue
        if other := names.setdefault(entry.name, plugin) is not plugin and names[entry.name]:
            text = f"two distributions have a plugin named {entry.name}: {other} and {plugin}"
            _conflict(registry, plugin, f"{text}; plugins.block=[{plugin.distribution}] hides one, or uninstall it")
            continue
        _load(registry, plugin, entry)
    return registry


discover.cache_clear = survey.cache_clear  # type: ignore[attr-defined]


def _conflict(registry: Registry, plugin: Plugin, text: str) -> None:
    registry.conflicts.append(text)
    plugin.problems.append(text)


def _entry_points() -> Iterator[tuple[metadata.EntryPoint, metadata.Distribution]]:
    found = [(e, e.dist) for e in metadata.entry_points(group=ENTRY_POINT_GROUP) if e.dist is not None]
    if not any(distribution.name == PROJECT for _, distribution in found):
        raise PluginError(
            f"{PROJECT} is not installed here, so its own plugins are not found: run `pip install -e .` in the checkout"
        )
    yield from sorted(found, key=lambda pair: (pair[1].name != PROJECT, pair[0].name))


def _load(registry: Registry, plugin: Plugin, entry: metadata.EntryPoint) -> None:
    """Import it and ask it for its components and presets; whatever it does, the others go on."""
    try:
        _ask(registry.manager, plugin, entry)
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        plugin.problems += [*_written_for(entry), f"{text}{_place(error)}{import_hint(error)}"]
    plugin.problems[:] = [" ".join(text.split()) for text in plugin.problems]
    for component in plugin.components if not plugin.problems else ():
        _add(registry, plugin, component)
    if plugin.problems and registry.manager.has_plugin(entry.name):
        registry.manager.unregister(name=entry.name)


def _written_for(entry: metadata.EntryPoint) -> list[str]:
    """The versions that its source names, where they are not ours."""
    with suppress(OSError, UnicodeDecodeError):
        spec = find(entry.module)
        return list(dict.fromkeys(written_for(Path(spec.origin).read_text("utf-8")))) if spec and spec.origin else []
    return []


def _place(error: BaseException) -> str:
    """The line of the plugin that raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = frames and Path(frames[-1].filename).parent != Path(__file__).parent
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if own else ""


def _ask(manager: pluggy.PluginManager, plugin: Plugin, entry: metadata.EntryPoint) -> None:
    started = time.perf_counter()
    try:
        module, plugin.problems = import_light(entry)
    finally:
        plugin.seconds = time.perf_counter() - started
    plugin.problems += api_problems("it", getattr(module, MODULE_API, API_VERSION))
    plugin.problems += hook_problems(manager, module)
    if plugin.problems:
        return
    manager.register(module, name=entry.name)
    guard(manager, entry.name)
    plugin.components = _answers(manager, "inferlab_components", entry.name)
    plugin.presets = _answers(manager, "inferlab_presets", entry.name)
    plugin.problems += [text for component in plugin.components for text in component_problems(component)]
    plugin.problems += package_problems(plugin.presets)


def _answers(manager: pluggy.PluginManager, hook: str, plugin: str) -> list[Any]:
    implementations = getattr(manager.hook, hook).get_hookimpls()
    return [item for impl in implementations if impl.plugin_name == plugin for item in impl.function()]


def _origin(distribution: metadata.Distribution) -> str:
    if distribution.name == PROJECT:
        return "built-in"
    direct = distribution.read_text("direct_url.json")
    return "editable" if direct and json.loads(direct).get("dir_info", {}).get("editable") else "wheel"


def _add(registry: Registry, plugin: Plugin, component: Component) -> None:
    found = Found(component, plugin.name, plugin.distribution, plugin.version, plugin.origin)
    key = component.kind, component.name
    if (other := registry.components.setdefault(key, found)) is not found:
        text = f"{key[0]}={key[1]} is offered by {other} (plugin {other.plugin}) and by {found} (plugin {found.plugin})"
        _conflict(registry, plugin, f"{text}; plugins.block=[{found.plugin}] hides one")
