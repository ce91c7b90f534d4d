"""What a plugin must look like before its options are offered; each complaint names the culprit and the right spelling."""

from __future__ import annotations

import dataclasses
import re
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pluggy
from omegaconf import OmegaConf

from core import hooks
from core.errors import did_you_mean
from core.interfaces import (
    API_VERSION,
    AttentionBackend,
    Component,
    Executor,
    KVAllocator,
    KVSettings,
    ModelArch,
    Part,
    Sampler,
    Scheduler,
)

KINDS: dict[str, type[Part]] = {
    "scheduler": Scheduler,
    "kv_allocator": KVAllocator,
    "attention": AttentionBackend,
    "arch": ModelArch,
    "sampler": Sampler,
    "executor": Executor,
}
HEAVY = ("torch", "triton", "flash_attn")
HOOKS = [name for name in vars(hooks) if name.startswith("inferlab_")]


class PluginError(ValueError):
    """A plugin is missing, broken, ambiguous, or written for another version."""


def import_light(entry: metadata.EntryPoint) -> Any:
    """Import the entry module; refuse it if that brings a heavy package in, or would have if it were not there yet."""
    before = set(sys.modules)
    plugin = entry.load()
    names = (set(sys.modules) - before) | {entry.module}
    heavy = {name.partition(".")[0] for name in names} & set(HEAVY)
    # Once torch is loaded by somebody else the difference shows nothing, so the names bound in the module count too.
    values = [v for name in names if name.startswith(entry.module.partition(".")[0]) for v in _globals(name)]
    heavy |= {v.__name__.partition(".")[0] for v in values if isinstance(v, ModuleType)} & set(HEAVY)
    if heavy:
        raise PluginError(
            f"its entry module {entry.module} imports {', '.join(sorted(heavy))}; import them in the target's module"
        )
    return plugin


def _globals(module: str) -> list[Any]:
    return list(vars(sys.modules[module]).values()) if module in sys.modules else []


def check_hooks(manager: pluggy.PluginManager, plugin: Any) -> None:
    """Misspelt hooks and forgotten decorators are silent in pluggy; here they are errors."""
    for name in (n for n in dir(plugin) if n.startswith("inferlab_") and callable(getattr(plugin, n))):
        options = manager.parse_hookimpl_opts(plugin, name)
        if name not in HOOKS:
            raise PluginError(f"there is no hook {name}{did_you_mean(name, HOOKS)} Hooks: {', '.join(HOOKS)}")
        if options is None:
            raise PluginError(f"{name} lacks the decorator: @hookimpl from core.interfaces")
        if name == "inferlab_build" and not (options["wrapper"] or options["hookwrapper"]):
            raise PluginError("inferlab_build must be a wrapper: @hookimpl(wrapper=True), then `part = yield; return part`")


def check_component(component: Any) -> Component:
    """Form of the declaration, and the version of the interface that it was written for."""
    if not isinstance(component, Component):
        raise PluginError(f"inferlab_components must give Component objects, got {component!r}")
    label = f"{component.kind}={component.name}"
    if component.api[0] != API_VERSION[0] or component.api[1] > API_VERSION[1]:
        wanted, ours = (".".join(map(str, v)) for v in (component.api, API_VERSION))
        raise PluginError(f"{label} is written for plugin API {wanted}, this inferlab has {ours}; install matching versions")
    if component.kind not in KINDS:
        raise PluginError(f"{label}: no such kind{did_you_mean(component.kind, KINDS)} Kinds: {', '.join(KINDS)}")
    if not re.fullmatch(r"[A-Za-z][\w.-]*", component.name) or component.name == "auto":
        raise PluginError(f"{label}: a name is letters, digits, _ . - and not auto")
    if not re.fullmatch(r"[\w.]+:\w+", component.target):
        raise PluginError(f'{label}: target must be "module:Class", got {component.target!r}')
    _check_settings(label, component)
    return component


def _check_settings(label: str, component: Component) -> None:
    for settings in filter(None, (component.settings, component.request_settings)):
        if not dataclasses.is_dataclass(settings) or settings.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise PluginError(f"{label}: settings must be a plain dataclass that is not frozen, got {settings!r}")
        try:
            OmegaConf.structured(settings)
        except Exception as error:
            raise PluginError(
                f"{label}: {settings.__name__} has a field of a type that settings cannot have: {error}"
            ) from error
    if component.kind == "kv_allocator" and not issubclass(component.settings, KVSettings):
        raise PluginError(
            f"{label}: settings of a KV allocator extend core.interfaces.KVSettings (block_size is the core's word)"
        )
