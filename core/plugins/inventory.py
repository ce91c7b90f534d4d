"""`plugins list` and `plugins hooks`: what is installed, from where, what became of it, and who listens to what."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

from core import hooks
from core.interfaces import PROJECT, Component
from core.plugins import Plugin, Registry
from core.plugins.checks import HOOKS, version_text
from core.plugins.loading import missing
from core.plugins.tables import table, wrap


def plugins(registry: Registry) -> list[dict[str, Any]]:
    """One entry per plugin, in the order of loading."""
    return [_plugin(plugin) for plugin in registry.plugins]


def _plugin(plugin: Plugin) -> dict[str, Any]:
    return {
        "plugin": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "origin": plugin.origin,
        "api": sorted({version_text(c.api) for c in plugin.components if isinstance(c, Component)}),
        "state": plugin.state,
        "reason": plugin.reason,
        "components": [
            {"kind": c.kind, "name": c.name, "summary": c.summary, "needs": missing(c), "install": c.install}
            for c in plugin.components
            if not plugin.problems
        ],
        "presets": list(plugin.presets),
        "import_s": round(plugin.seconds, 4),
    }


def plugins_text(entries: list[dict[str, Any]]) -> str:
    """The table, then a line for everything that failed or lacks something."""
    head = ("plugin", "distribution", "from", "api", "state", "components")
    rows = [
        (
            e["plugin"],
            f"{e['distribution']} {e['version']}",
            e["origin"],
            ", ".join(e["api"]) or "-",
            e["state"],
            _offers(e),
        )
        for e in entries
    ]
    notes = [f"failed: {e['plugin']}: {e['reason']}" for e in entries if e["reason"]]
    notes += [
        f"* {c['kind']}={c['name']} cannot be chosen here: it needs {need}" + (f"; {c['install']}" if c["install"] else "")
        for e in entries
        for c in e["components"]
        for need in c["needs"]
    ]
    return "\n".join([table(head, rows), *(f"\n{wrap(note)}" for note in notes)])


def _offers(entry: dict[str, Any]) -> str:
    names: dict[str, list[str]] = defaultdict(list)
    for component in entry["components"]:
        names[component["kind"]].append(component["name"] + "*" * bool(component["needs"]))
    parts = [f"{kind}: {', '.join(sorted(own))}" for kind, own in sorted(names.items())]
    return "; ".join([*parts, *([f"presets: {', '.join(entry['presets'])}"] if entry["presets"] else [])])


def hook_list(registry: Registry) -> list[dict[str, Any]]:
    """Every hook with its specification, and the plugins that implement it."""
    owners = {plugin.name: str(plugin) for plugin in registry.plugins} | {PROJECT: "the core itself"}
    entries = []
    for name in HOOKS:
        caller, function = getattr(registry.manager.hook, name), getattr(hooks, name)
        opts = caller.spec.opts
        entries.append(
            {
                "hook": name,
                "signature": f"{name}{inspect.signature(function)}".replace("'", ""),
                "doc": " ".join((inspect.getdoc(function) or "").split()),
                "first_result_only": bool(opts["firstresult"]),
                "implemented_by": [
                    {
                        "plugin": impl.plugin_name,
                        "distribution": owners[impl.plugin_name],
                        "wrapper": bool(impl.wrapper or impl.hookwrapper),
                    }
                    for impl in caller.get_hookimpls()
                ],
            }
        )
    return entries


def hooks_text(entries: list[dict[str, Any]]) -> str:
    """A paragraph per hook."""
    blocks = []
    for entry in entries:
        by = [f"{i['plugin']} ({i['distribution']}{', a wrapper' if i['wrapper'] else ''})" for i in entry["implemented_by"]]
        lines = [wrap(entry["signature"]), wrap(entry["doc"], "    ")]
        lines.append(wrap(f"implemented by {', '.join(by)}" if by else "implemented by nobody here", "    "))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
