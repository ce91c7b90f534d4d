"""`plugins describe KIND NAME`: all that is known of one option. The component itself is not imported, only its source read."""

from __future__ import annotations

import ast
import re
import shlex
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from core.composition import override
from core.errors import did_you_mean
from core.helptext import default_text
from core.interfaces import Component, OneOf
from core.negotiate import SETTINGS, show
from core.plugins import Found, PluginError, Registry
from core.plugins.checks import KINDS, version_text
from core.plugins.loading import find, missing, needs
from core.plugins.presets import files, folder
from core.plugins.tables import table, wrap
from core.vocabulary import conf_dir


def describe(registry: Registry, kind: str, name: str) -> dict[str, Any]:
    """For programs. Raises PluginError with the nearest name where there is no such kind or option."""
    if kind not in KINDS:
        raise PluginError(f"{kind}: no such kind{did_you_mean(kind, KINDS)} Kinds: {', '.join(KINDS)}")
    found = registry.find(kind, name)
    component = found.component
    file, line = locate(component.target)
    return {
        "kind": kind,
        "name": name,
        "summary": component.summary,
        "plugin": found.plugin,
        "distribution": found.distribution,
        "version": found.version,
        "origin": found.origin,
        "api": version_text(component.api),
        "target": component.target,
        "file": file,
        "line": line,
        "settings": list(_settings(component.settings, kind)),
        "request_settings": list(_settings(component.request_settings, "sampling")) if component.request_settings else [],
        "capabilities": {SETTINGS.get(key, key): show(want) for key, want in component.capabilities.items()},
        "prefers": {SETTINGS.get(key, key): list(values) for key, values in component.prefers.items()},
        "provides": {key: list(v) if isinstance(v, tuple) else v for key, v in component.provides.items()},
        "probe": component.probe,
        "requirements": [{"needs": n.wanted, "found": list(n.found), "ok": n.ok} for n in needs(component)],
        "install": component.install,
        "presets": presets(registry, found),
        "examples": examples(registry, component),
    }


def locate(target: str) -> tuple[str, int]:
    """File and line of "module:Name"; ("", 0) where the module is not there, line 0 where the name is not defined in it."""
    module, _, name = target.partition(":")
    spec = find(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return "", 0
    try:
        body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    except SyntaxError:
        return spec.origin, 0
    defined = (n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)
    node = next(defined, None)
    return spec.origin, node.lineno if node else 0


def _settings(settings: type, prefix: str) -> Iterator[dict[str, Any]]:
    try:
        hints = typing.get_type_hints(settings)
    except (NameError, TypeError):  # names that the module has only while types are checked
        hints = {}
    for item in fields(settings):
        yield {
            "name": f"{prefix}.{item.name}",
            "type": _type(hints.get(item.name, item.type)),
            "default": default_text(item),
            "unit": item.metadata.get("unit", ""),
            "doc": item.metadata.get("doc", ""),
        }


def _type(annotation: Any) -> str:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def presets(registry: Registry, found: Found) -> list[str]:
    """Presets that the same plugin brings, and all others that choose this option or a model that it runs."""
    packages = {folder(package): plugin for package, plugin in registry.presets.items()}
    names = []
    for root, plugin in {conf_dir(): "", **packages}.items():
        for name in files(root):
            if "/" in name and not name.startswith("hydra/") and (plugin == found.plugin or _chooses(root, name, found)):
                names.append(name)
    return sorted(names)


def _chooses(root: Path, name: str, found: Found) -> bool:
    try:
        node = OmegaConf.to_container(OmegaConf.load(root / f"{name}.yaml"))
    except Exception:  # `check` says what is wrong with it
        return False
    if not isinstance(node, dict):
        return False
    component, config = found.component, node.get("config") or {}
    if component.kind == "arch":
        return bool(set(config.get("architectures", ())) & set(component.provides.get("architectures", ())))
    words = (f"override /{component.kind}", f"/{component.kind}", component.kind)
    chosen = [e.get(w) for e in node.get("defaults") or [] if isinstance(e, dict) for w in words]
    return component.name in chosen


def examples(registry: Registry, component: Component) -> list[str]:
    """Command lines that choose it, each of which composes."""
    choice = [f"{component.kind}={component.name}"]
    if component.kind == "arch":
        choice.insert(0, "model=DIRECTORY")
    # A request's parameter counts when it is given: a value that is demanded must be said.
    given = [(k, want.values[0]) for k, want in component.capabilities.items() if isinstance(want, OneOf)]
    choice += [override(key, value) for key, value in given if key.startswith("sampling.")]
    lines = [choice]
    parts = [(component.kind, component.settings), ("sampling", component.request_settings)]
    for prefix, settings in parts:
        words = [_word(f"{prefix}.{f.name}", _default(f)) for f in fields(settings)] if settings else []
        lines += [[*choice, *words[:3]]] if words else []
    others = [f.component.name for f in registry.options(component.kind) if not missing(f.component)]
    if len(others) > 1 and component.kind != "arch" and len(choice) == 1:
        names = [component.name, *(name for name in others if name != component.name)]
        lines.append(["-m", f"{component.kind}={','.join(names[:2])}"])
    return [f"python -m core.run {' '.join(map(_quoted, line))}" for line in lines]


def _word(key: str, value: Any) -> str:
    """As one would type it: quotes only where Hydra's grammar needs them."""
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.-]*", value)
    return f"{key}={value}" if plain else override(key, value)


def _quoted(word: str) -> str:
    """For a shell; in double quotes where that is easier to read."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def _default(item: Field) -> Any:
    if item.default is not MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not MISSING else "???"


def describe_text(entry: dict[str, Any]) -> str:
    """Paragraphs; those that would be empty are left out."""
    place = f"{entry['file']}:{entry['line'] or 1}" if entry["file"] else "its module is not there"
    head = [f"{entry['kind']}={entry['name']}", wrap(entry["summary"] or "(no summary)", "    ")]
    facts = [
        ("plugin", f"{entry['plugin']}, from {entry['distribution']} {entry['version']} ({entry['origin']})"),
        ("plugin API", entry["api"]),
        ("class", entry["target"]),
        ("file", place),
        ("presets", ", ".join(entry["presets"])),
    ]
    width = max(len(key) for key, _ in facts) + 4
    lines = [
        wrap(value, " " * (width + 2)).replace(" " * (width + 2), f"    {key:<{width - 4}}  ", 1)
        for key, value in facts
        if value
    ]
    blocks = ["\n".join(head), "\n".join(lines)]
    for title, rows in (("Settings", entry["settings"]), ("Parameters of a request", entry["request_settings"])):
        if rows:
            cells = [[row[key] or "-" for key in ("name", "type", "default", "unit", "doc")] for row in rows]
            blocks.append(f"{title}\n{table(('name', 'type', 'default', 'unit', 'meaning'), cells, '    ')}")
    if not entry["settings"]:
        blocks.append("Settings\n    none")
    if entry["capabilities"]:
        cells = [[key, want] for key, want in entry["capabilities"].items()]
        blocks.append(f"Capabilities\n{table(('of', 'accepts'), cells, '    ')}")
    if entry["provides"] or entry["prefers"]:
        cells = [
            [key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)]
            for key, value in entry["provides"].items()
        ]
        cells += [[f"prefers {key}", ", ".join(map(show, values))] for key, values in entry["prefers"].items()]
        blocks.append(f"Facts\n{table(('name', 'value'), cells, '    ')}")
    if entry["requirements"]:
        cells = [
            ["ok" if n["ok"] else "no", ", ".join(n["found"]) or "not installed", n["needs"]] for n in entry["requirements"]
        ]
        blocks.append(f"Requirements\n{table(('met', 'found', 'needs'), cells, '    ')}")
        if entry["install"] and not all(n["ok"] for n in entry["requirements"]):
            blocks[-1] += f"\n    install: {entry['install']}"
    blocks.append("Examples\n" + "\n".join(f"    {line}" for line in entry["examples"]))
    return "\n\n".join(blocks)
