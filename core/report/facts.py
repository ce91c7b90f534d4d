"""What was equal in all runs, what differs although nobody asked for it, and what went wrong in observers and plugins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from core.report.words import name_of
from core.sweep.records import CellRecord

NOT_COMPARED = re.compile(r"sweep\.|log_level$|environment\.argv$|slot\.\w+\.(reason|target)$")
NOT_LOADED = re.compile(r"(?:warning: )?plugin (\S+?) could not be loaded: (.+)")

Facts = dict[str, Any]  # dotted name -> value


def facts_of(cell: CellRecord, result: Mapping[str, Any]) -> Facts:
    """Settings, what fills the slots, versions and machine. Slots and environment are known of cells that were not run, too."""
    plugins = result.get("plugins") or cell.plugins
    environment = result.get("environment") or cell.environment
    found = dict(_flat(result.get("settings") or {}))
    found |= dict(_flat({"slot": plugins, "environment": environment}))
    for name in ("model", "dtype", "device", "load"):
        if name in result.get("bench", {}):
            found[f"run.{name}"] = result["bench"][name]
    return {name: value for name, value in found.items() if not NOT_COMPARED.match(name)}


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def split(found: Sequence[Facts]) -> tuple[Facts, dict[str, list[Any]]]:
    """(equal in all, name -> the different values). A name that some do not have differs."""
    same: Facts = {}
    differ: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for facts in found for name in facts):
        values = [facts.get(name) for facts in found]
        distinct = [value for at, value in enumerate(values) if value not in values[:at]]
        if len(distinct) == 1:
            same[name] = distinct[0]
        else:
            differ[name] = distinct
    return same, differ


def explained(name: str, factors: Iterable[str]) -> bool:
    """A swept name, what lies below it, and the slot of that name."""
    own = name.removeprefix("slot.").removeprefix("run.")
    return any(own == factor or own.startswith(f"{factor}.") or factor.startswith(f"{own}.") for factor in factors)


def not_asked_for(differ: Mapping[str, list[Any]], factors: Iterable[str]) -> list[tuple[str, str]]:
    """(name, its values) of what differs and is no factor."""
    names = list(factors)
    return [(k, " | ".join(map(shown, values))) for k, values in differ.items() if not explained(k, names)]


def held_fixed(same: Mapping[str, Any], given: Iterable[str]) -> list[tuple[str, str]]:
    """What a reader must know of what was equal: slots with versions, model, load, the settings given on the command line,
    the machine."""
    found = [(name, shown(same[f"run.{name}"])) for name in ("model", "dtype", "load", "device") if f"run.{name}" in same]
    for kind in dict.fromkeys(name.split(".")[1] for name in same if name.startswith("slot.")):
        if f"slot.{kind}.name" in same:
            found.append((kind, slot_text({k.split(".", 2)[2]: v for k, v in same.items() if k.startswith(f"slot.{kind}.")})))
    have = {name for name, _ in found}
    found += [
        (k, v) for k, v in (o.lstrip("+~").partition("=")[::2] for o in given) if k not in have and k.split(".")[0] != "sweep"
    ]
    for name in ("seed", "environment.host", "environment.gpu", "environment.threads", "environment.commit"):
        if same.get(name) is not None and name not in dict(found):
            found.append((name.removeprefix("environment."), shown(same[name])))
    packages = {k.removeprefix("environment.packages."): v for k, v in same.items() if k.startswith("environment.packages.")}
    versions = [f"{k} {v}" for k, v in packages.items() if v]
    python = same.get("environment.python")
    return [*found, ("versions", ", ".join([*([f"Python {python}"] if python else []), *versions]))] if versions else found


def slot_text(found: Mapping[str, Any]) -> str:
    """name version (distribution), settings."""
    by = f" by {found['provider']} {found.get('provider_version', '')}".rstrip() if found.get("provider") else ""
    text = f"{found.get('name')} ({found.get('distribution', '?')} {found.get('version', '?')}{by})"
    settings = found.get("settings") if isinstance(found.get("settings"), Mapping) else None
    if settings is None:
        settings = {k.removeprefix("settings."): v for k, v in found.items() if k.startswith("settings.")}
    return text + (f": {', '.join(f'{k}={shown(v)}' for k, v in settings.items())}" if settings else "")


def shown(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def troubles(found: Iterable[tuple[CellRecord, Mapping[str, Any], str]]) -> list[dict[str, Any]]:
    """Observers that were switched off (from result.json) and plugins that failed (from the log); one entry for each, with
    the runs in which it happened."""
    told: dict[tuple[str, str, str], list[str]] = {}
    for cell, result, log in found:
        failed = (result.get("failed_observers") or {}).items()
        seen = {("observer", name, f"{why} in {hook}") for name, of in failed for hook, why in of["raised"].items()}
        for line in log.splitlines():
            if match := NOT_LOADED.search(line):
                seen.add(("plugin", match[1], match[2]))
        for key in sorted(seen):
            told.setdefault(key, []).append(f"{name_of(cell.factors)}, repeat {cell.repeat}")
    return [{"kind": kind, "name": name, "why": why, "runs": runs} for (kind, name, why), runs in told.items()]
