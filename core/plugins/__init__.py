"""Which options exist: plugins are found by their entry points and loaded one at a time, so that a failure has a name.

Three tiers: metadata (no import), the light entry module (declares `Component`s), the target (imported when chosen, see
`core.plugins.loading`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from typing import Any

import pluggy

from core import hooks
from core.errors import did_you_mean
from core.interfaces import ENTRY_POINT_GROUP, PROJECT, Component, hookimpl
from core.plugins.checks import PluginError, check_component, check_hooks, import_light
from core.plugins.loading import construct
from core.plugins.presets import check_packages

__all__ = ["Found", "PluginError", "Registry", "discover"]


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
class Registry:
    """Everything that was found, and what failed."""

    components: dict[tuple[str, str], Found] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # plugin -> one line
    presets: dict[str, str] = field(default_factory=dict)  # package with YAML presets -> plugin
    blocked: tuple[str, ...] = ()
    manager: pluggy.PluginManager = field(default_factory=lambda: pluggy.PluginManager(PROJECT))

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
    registry = _discover(tuple(sorted(block)))
    if strict and registry.failed:
        lines = "\n".join(f"plugin {plugin}: {why}" for plugin, why in registry.failed.items())
        raise PluginError(f"plugins.strict=true, and these could not be loaded (plugins.block=[NAME] hides one):\n{lines}")
    return registry


@lru_cache
def _discover(block: tuple[str, ...]) -> Registry:
    registry = Registry(blocked=block)
    registry.manager.add_hookspecs(hooks)
    registry.manager.register(_Builder(), name=PROJECT)
    for entry, distribution in _entry_points(block):
        try:
            found, packages = _load(registry.manager, entry, distribution)
        except (Exception, SystemExit) as error:  # whatever a plugin does at import, the others go on
            if registry.manager.has_plugin(entry.name):
                registry.manager.unregister(name=entry.name)
            text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
            registry.failed[entry.name] = f"{distribution.name} {distribution.version}: {' '.join(text.split())}"
            continue
        for item in found:
            _add(registry, item)
        registry.presets |= dict.fromkeys(packages, entry.name)
    return registry


discover.cache_clear = _discover.cache_clear  # type: ignore[attr-defined]


def _entry_points(block: tuple[str, ...]) -> Iterator[tuple[metadata.EntryPoint, metadata.Distribution]]:
    owners: dict[str, metadata.Distribution] = {}
    entries = sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda e: (_owner(e).name != PROJECT, e.name))
    if not any(_owner(entry).name == PROJECT for entry in entries):
        raise PluginError(
            f"{PROJECT} is not installed here, so its own plugins are not found: run `pip install -e .` in the checkout"
        )
    for entry in entries:
        distribution = _owner(entry)
        if entry.name in block or distribution.name in block:
            continue
        if other := owners.get(entry.name):
            raise PluginError(
                f"two distributions have a plugin named {entry.name}: {other.name} {other.version} and {distribution.name} "
                f"{distribution.version}; plugins.block=[{distribution.name}] hides one, or uninstall it"
            )
        owners[entry.name] = distribution
        yield entry, distribution


def _owner(entry: metadata.EntryPoint) -> metadata.Distribution:
    assert entry.dist is not None
    return entry.dist


def _load(
    manager: pluggy.PluginManager, entry: metadata.EntryPoint, distribution: metadata.Distribution
) -> tuple[list[Found], list[str]]:
    module = import_light(entry)
    check_hooks(manager, module)
    manager.register(module, name=entry.name)
    where = entry.name, distribution.name, distribution.version, _origin(distribution)
    components = [check_component(c) for c in _answers(manager, "inferlab_components", entry.name)]
    packages = _answers(manager, "inferlab_presets", entry.name)
    check_packages(packages)
    return [Found(c, *where) for c in components], packages


def _answers(manager: pluggy.PluginManager, hook: str, plugin: str) -> list[Any]:
    implementations = getattr(manager.hook, hook).get_hookimpls()
    return [item for impl in implementations if impl.plugin_name == plugin for item in impl.function()]


def _origin(distribution: metadata.Distribution) -> str:
    if distribution.name == PROJECT:
        return "built-in"
    direct = distribution.read_text("direct_url.json")
    return "editable" if direct and json.loads(direct).get("dir_info", {}).get("editable") else "wheel"


def _add(registry: Registry, found: Found) -> None:
    key = found.component.kind, found.component.name
    if other := registry.components.get(key):
        raise PluginError(
            f"{key[0]}={key[1]} is offered by {other} (plugin {other.plugin}) and by {found} (plugin {found.plugin}); "
            f"plugins.block=[{found.plugin}] hides one"
        )
    registry.components[key] = found
