"""The third tier: what a chosen component needs, and its class, imported only now."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from packaging.requirements import Requirement

from core.errors import nearest
from core.interfaces import Component, Probe
from core.plugins.checks import KINDS, PluginError


@dataclass(frozen=True)
class Need:
    """One requirement of a component, and what was found of its alternatives."""

    wanted: str  # "a>=1 or b"
    found: tuple[str, ...]  # "a 0.9", "b" where it has no version
    ok: bool

    def __str__(self) -> str:
        return f"{self.wanted} ({'found ' + ', '.join(self.found) if self.found else 'not installed'})"


def needs(component: Component) -> list[Need]:
    """Every requirement with the versions found. Nothing is imported."""
    return [_need((group,) if isinstance(group, str) else tuple(group)) for group in component.requires]


def missing(component: Component) -> list[str]:
    """One text per requirement that is not met, with the version found; empty if the component can be imported."""
    return [str(need) for need in needs(component) if not need.ok]


def _need(alternatives: tuple[str, ...]) -> Need:
    found, ok = [], False
    for requirement in map(Requirement, alternatives):
        if find(requirement.name) is None:
            continue
        version = _version(requirement.name)
        ok = ok or version is None or requirement.specifier.contains(version, prereleases=True)
        found.append(f"{requirement.name} {version}" if version else requirement.name)
    return Need(" or ".join(alternatives), tuple(found), ok)


def find(module: str) -> ModuleSpec | None:
    """The spec of a dotted module without importing its parents: some take many seconds."""
    path, spec, parts = None, None, module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _version(module: str) -> str | None:
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:  # which distribution owns a module is answered by reading all of them: slow
        owners = metadata.packages_distributions().get(module.partition(".")[0], ())
    return next((metadata.version(name) for name in owners), None)


def load(component: Component) -> type:
    """The class behind `target`, checked against the contract of its kind."""
    label = f"{component.kind}={component.name}"
    module, _, name = component.target.partition(":")
    way_out = f"; {component.install}" if component.install else ""
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise PluginError(f"{label}: cannot import {module}: {error}{way_out}") from error
    target = getattr(imported, name, None)
    if not inspect.isclass(target):
        raise PluginError(f"{label}: {module} has no class {name}; it has {', '.join(_classes(imported)) or 'none'}")
    base = KINDS[component.kind]
    if not issubclass(target, base):
        raise PluginError(f"{label}: {component.target} must extend core.interfaces.{base.__name__}")
    if lacking := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginError(f"{label}: {component.target} lacks " + ", ".join(f"{m}(){_near(target, base, m)}" for m in lacking))
    return target


def run_probe(component: Component, settings: Any) -> Probe:
    """What the component finds on this machine, with its settings; a probe that fails is a reason, not a crash."""
    module, _, name = component.probe.partition(":")
    try:
        answer = getattr(importlib.import_module(module), name)(settings)
    except Exception as error:
        return Probe(problem=f"its probe {component.probe} failed: {type(error).__name__}: {error}")
    if not isinstance(answer, Probe):
        return Probe(problem=f"its probe {component.probe} must return a Probe, got {answer!r}")
    return answer


def _classes(module: Any) -> list[str]:
    return [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]


def _near(target: type, base: type, method: str) -> str:
    own = [n for n in vars(target) if not n.startswith("__") and not hasattr(base, n)]
    return f" (is {' or '.join(close)} a misspelling?)" if (close := nearest(method, own)) else ""


def construct(component: Component, settings: Any, context: Any) -> Any:
    """target(settings, context)."""
    return load(component)(settings, context)
