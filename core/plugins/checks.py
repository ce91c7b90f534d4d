"""What a plugin must look like before its options are offered; each complaint names the culprit and the right spelling."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import pluggy
from omegaconf import OmegaConf
from packaging.requirements import InvalidRequirement, Requirement

from core import hooks
from core.capabilities import FACTS, SLOTS, unknown_keys
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
MODULE_API = "INFERLAB_API"  # in an entry module: the API version that its hooks are written for
HOOKS = [name for name in vars(hooks) if name.startswith("inferlab_")]


class PluginError(ValueError):
    """A plugin is missing, broken, ambiguous, or written for another version."""


def import_light(entry: metadata.EntryPoint) -> tuple[Any, list[str]]:
    """The entry module, and what is wrong with it: that it brings a heavy package in, or would have if it were not there."""
    before = set(sys.modules)
    plugin = entry.load()
    names = (set(sys.modules) - before) | {entry.module}
    heavy = {name.partition(".")[0] for name in names} & set(HEAVY)
    # Once torch is loaded by somebody else the difference shows nothing, so the names bound in the module count too.
    values = [v for name in names if name.startswith(entry.module.partition(".")[0]) for v in _globals(name)]
    heavy |= {_home(v).partition(".")[0] for v in values if isinstance(v, ModuleType | type)} & set(HEAVY)
    words = ", ".join(sorted(heavy))
    text = f"its entry module {entry.module} imports {words}; import them in the target's module, which is loaded when chosen"
    return plugin, [text] if heavy else []


def _home(value: ModuleType | type) -> str:
    return value.__name__ if isinstance(value, ModuleType) else str(value.__module__)


def _globals(module: str) -> list[Any]:
    return list(vars(sys.modules[module]).values()) if module in sys.modules else []


def hook_problems(manager: pluggy.PluginManager, plugin: Any) -> Iterator[str]:
    """Misspelt hooks, forgotten decorators and wrong arguments: the first two are silent in pluggy."""
    for name in (n for n in dir(plugin) if n.startswith("inferlab_") and callable(getattr(plugin, n))):
        options = manager.parse_hookimpl_opts(plugin, name)
        if name not in HOOKS:
            yield f"there is no hook {name}{did_you_mean(name, HOOKS)} Hooks: {', '.join(HOOKS)}"
            continue
        if options is None:
            yield f"{name} lacks the decorator: @hookimpl from core.interfaces"
        elif name == "inferlab_build" and not options["wrapper"]:
            yield "inferlab_build must be a wrapper: @hookimpl(wrapper=True), then `part = yield; return part`"
        elif name != "inferlab_build" and (options["wrapper"] or options["hookwrapper"]):
            yield f"{name} cannot be a wrapper: only inferlab_build is one; decorate it with @hookimpl alone"
        known = inspect.signature(getattr(hooks, name)).parameters
        for argument in inspect.signature(getattr(plugin, name)).parameters:
            if argument not in known:
                takes = ", ".join(known) or "no argument"
                yield f"{name} has no argument {argument}{did_you_mean(argument, known)} It takes {takes}"


def component_problems(component: Any) -> Iterator[str]:
    """Form of the declaration, and the version of the interface that it was written for."""
    if not isinstance(component, Component):
        yield f"inferlab_components must give Component objects, got {component!r}"
        return
    label = f"{component.kind}={component.name}"
    yield from api_problems(label, component.api)
    if component.kind not in KINDS:
        yield f"{label}: no such kind{did_you_mean(component.kind, KINDS)} Kinds: {', '.join(KINDS)}"
    if not re.fullmatch(r"[A-Za-z][\w.-]*", component.name) or component.name == "auto":
        yield f"{label}: a name is letters, digits, _ . - and not auto"
    if not re.fullmatch(r"[\w.]+:\w+", component.target):
        yield f'{label}: target must be "module:Class", got {component.target!r}'
    for text in (t for group in component.requires for t in ((group,) if isinstance(group, str) else group)):
        try:
            Requirement(text)
        except InvalidRequirement:
            yield f"{label}: requires {text!r}, which is no requirement such as module>=1.2"
    for key in unknown_keys(component.capabilities):
        hint = did_you_mean(key, (*FACTS, *SLOTS))
        yield f"{label}: nothing is known as {key!r}, so this capability would never be checked{hint}"
    yield from _settings_problems(label, component)


def _settings_problems(label: str, component: Component) -> Iterator[str]:
    for settings in filter(None, (component.settings, component.request_settings)):
        if not dataclasses.is_dataclass(settings) or settings.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            yield f"{label}: settings must be a plain dataclass that is not frozen, got {settings!r}"
            continue
        try:
            OmegaConf.structured(settings)
        except Exception as error:
            yield f"{label}: {settings.__name__} has a field of a type that settings cannot have: {error}"
    if component.kind == "kv_allocator" and not issubclass(component.settings, KVSettings):
        yield f"{label}: settings of a KV allocator extend core.interfaces.KVSettings (block_size is the core's word)"


def api_problems(label: str, wanted: Any) -> Iterator[str]:
    """The version of the interface that something was written for: the same major number, and no later minor one."""
    if not isinstance(wanted, tuple) or [type(n) for n in wanted] != [int, int]:
        yield f"{label}: a version of the plugin API is (MAJOR, MINOR), got {wanted!r}"
    elif wanted[0] != API_VERSION[0] or wanted[1] > API_VERSION[1]:
        newer = "a newer inferlab, or an older version of this plugin"
        way = newer if wanted > API_VERSION else "a newer version of this plugin, or an older inferlab"
        yield (
            f"{label} is written for plugin API {version_text(wanted)}, this inferlab has {version_text(API_VERSION)}; "
            f"install {way}"
        )


def written_for(source: str) -> Iterator[str]:
    """Of an entry module that cannot be imported: what its source says of the API version. It may be the cause."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        value: ast.expr | None = None
        if isinstance(node, ast.Assign) and MODULE_API in map(ast.unparse, node.targets):
            label, value = "it", node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Component"):
            label, value = "its component", next((k.value for k in node.keywords if k.arg == "api"), None)
        with contextlib.suppress(ValueError):  # computed, not written down
            yield from api_problems(label, ast.literal_eval(value)) if value else ()


def import_hint(error: BaseException) -> str:
    """A name that the interface does not have comes from another version of it, or is misspelt."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "core":
        found = re.search(r"cannot import name '(\w+)'", str(error))
        known = [n for n in vars(sys.modules.get(error.name or "", object)) if not n.startswith("_")] if found else []
        hint = did_you_mean(found[1], known) if found else "."
        return f"{hint} This inferlab has plugin API {version_text(API_VERSION)}: is the plugin written for another one?"
    return ""


def version_text(version: tuple[int, ...]) -> str:
    """(1, 0) -> 1.0"""
    return ".".join(map(str, version))
