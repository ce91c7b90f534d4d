"""Which suites `--inferlab-plugin NAME` runs: one class per component of the plugins that NAME means, and one per plugin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from packaging.utils import canonicalize_name

from core.errors import did_you_mean
from core.interfaces import Component
from core.plugins import Plugin, PluginError, Registry, discover
from core.testing import KINDS, SUITES

names: list[str] = []  # as given on the command line
overrides: dict[str, Any] = {}  # likewise: attributes of every suite


def meant(registry: Registry, name: str) -> tuple[list[Plugin], list[Component]]:
    """Plugin, distribution or component -> (plugins, components to test). PluginError with the nearest names if nothing."""
    wanted = canonicalize_name(name)
    for label in (lambda p: p.name, lambda p: p.distribution):
        if found := [p for p in registry.plugins if canonicalize_name(label(p)) == wanted]:
            return found, [c for p in found if not p.problems for c in p.components]
    options = [(p, c) for p in registry.plugins if not p.problems for c in p.components]
    exact = [(p, c) for p, c in options if name in (f"{c.kind}={c.name}", c.name)]
    if exact:
        return list({p.name: p for p, _ in exact}.values()), [c for _, c in exact]
    known = {n for p in registry.plugins for n in (p.name, p.distribution)} | {c.name for _, c in options}
    raise PluginError(
        f"--inferlab-plugin {name}: no plugin, distribution or component of that name{did_you_mean(name, known)} "
        f"Installed: {', '.join(sorted(known))}"
    )


def suites(chosen: Sequence[str], **attributes: Any) -> Iterator[tuple[str, type[Any]]]:
    """(name of the test class, the class) for names of plugins, distributions and components; `attributes` for each class."""
    registry = discover()
    done: dict[str, type[Any]] = {}
    for name in chosen:
        plugins, components = meant(registry, name)
        for plugin in plugins:
            done[_title("plugin", plugin.name)] = _suite("PackagingSuite", {"name": plugin.name} | attributes)
        for component in components:
            given: dict[str, Any] = {"name": component.name, "component": component}
            done[_title(component.kind, component.name)] = _suite(KINDS[component.kind], given | attributes)
    yield from done.items()


def check(given: Sequence[str]) -> None:
    """Refuse unknown names before anything is collected."""
    for name in given:
        meant(discover(), name)


def _title(kind: str, name: str) -> str:
    return "Test_" + re.sub(r"\W", "_", f"{kind}_{name}")


def _suite(name: str, attributes: dict[str, Any]) -> type[Any]:
    base = getattr(import_module(SUITES[name]), name)
    return type(base.__name__, (base,), attributes)
