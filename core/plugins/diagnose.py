"""`plugins check`: everything that can be wrong with a plugin, found before anybody chooses it. Imports every component."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from core.composition import composed_by_hydra
from core.config import Config, finish
from core.errors import did_you_mean, nearest
from core.interfaces import ENTRY_POINT_GROUP, PROJECT, Component
from core.plugins import Plugin, PluginError, Registry
from core.plugins.describe import locate
from core.plugins.loading import load, missing
from core.plugins.presets import check_clashes, files, folder
from core.plugins.tables import table
from core.vocabulary import conf_dir

ENVIRONMENT = "-"  # in the place of a plugin: what concerns the environment as a whole


@dataclass(frozen=True)
class Finding:
    """Something wrong: an error must be mended, a warning may be meant."""

    level: str  # error, warning
    plugin: str
    text: str


def chosen(registry: Registry, name: str | None) -> list[Plugin]:
    """The plugins that `name` means: a plugin, a distribution, or an option; all if None."""
    if name is None:
        return registry.plugins
    wanted = canonicalize_name(name)
    for names in (
        lambda p: [p.name],
        lambda p: [p.distribution],
        lambda p: [c.name for c in p.components if isinstance(c, Component)],
    ):
        if found := [p for p in registry.plugins if wanted in map(canonicalize_name, names(p))]:
            return found
    known = [n for p in registry.plugins for n in (p.name, p.distribution)]
    raise PluginError(f"{name}: no such plugin{did_you_mean(name, known)} Installed: {', '.join(sorted(set(known)))}")


def diagnose(registry: Registry, plugins: Iterable[Plugin], *, everything: bool) -> list[Finding]:
    """All findings, errors first for each plugin; `everything`: of the environment too."""
    findings = []
    owners = second_owners()
    for plugin in plugins:
        found = [Finding("error", plugin.name, text) for text in plugin.problems]
        told = {f.text for f in findings}  # plugins of one distribution: once, not for each
        found += [Finding("error", plugin.name, t) for name, t in owners if name == plugin.distribution and t not in told]
        if not plugin.blocked:
            found += [Finding(level, plugin.name, text) for level, text in _plugin(registry, plugin)]
        findings += sorted(dict.fromkeys(found), key=lambda f: f.level)
    if everything:
        seen = {f.text for f in findings}
        findings += [Finding("error", ENVIRONMENT, text) for _, text in owners if text not in seen]
        findings += [Finding("error", ENVIRONMENT, text) for text in misspelt_groups()]
    return findings


Complaint = tuple[str, str]  # level, text


def _plugin(registry: Registry, plugin: Plugin) -> Iterator[Complaint]:
    if plugin.origin != "built-in" or plugin is registry.plugins[0]:  # the built-in ones share one distribution
        yield from _metadata(plugin)
    yield from (("warning", line) for line in registry.slow if line.startswith(f"plugin {plugin.name} "))
    if plugin.problems:
        return
    if not plugin.components and not plugin.presets and not _listens(registry, plugin):
        yield "warning", f"{plugin.module} declares no component, no preset and no hook: does inferlab_components end early?"
    lacking = [c for c in plugin.components if missing(c)]
    for component in plugin.components:
        if component in lacking:
            level = "error" if len(lacking) == len(plugin.components) else "warning"
            yield level, _lacks(component)
        else:
            yield from _component(component)
        yield from _documented(component)
    yield from (("error", text) for package in plugin.presets for text in _presets(registry, folder(package)))
    try:
        check_clashes(conf_dir(), dict.fromkeys(plugin.presets, plugin.name))
    except PluginError as error:
        yield "error", str(error)


def _listens(registry: Registry, plugin: Plugin) -> bool:
    return any(
        name == plugin.name and registry.manager.get_hookcallers(module) for name, module in registry.manager.list_name_plugin()
    )


def _lacks(component: Component) -> str:
    label = f"{component.kind}={component.name}"
    return f"{label} cannot be chosen here: it needs {'; '.join(missing(component))}" + (
        f"; {component.install}" if component.install else ""
    )


def _component(component: Component) -> Iterator[Complaint]:
    label = f"{component.kind}={component.name}"
    try:
        load(component)
    except PluginError as error:
        yield "error", str(error)
    except (Exception, SystemExit) as error:
        yield "error", f"{label}: {component.target} cannot be imported: {type(error).__name__}: {error}"
    for settings in filter(None, (component.settings, component.request_settings)):
        try:
            settings()
        except Exception as error:
            yield "error", f"{label}: the defaults of {settings.__name__} are refused: {error}"
    if component.probe and not locate(component.probe)[1]:
        yield "error", f"{label}: there is no function {component.probe} (its probe)"


def _documented(component: Component) -> Iterator[Complaint]:
    label = f"{component.kind}={component.name}"
    if not component.summary:
        yield "warning", f"{label} has no summary, the line that --help shows"
    if missing(component) and not component.install:
        yield "warning", f"{label} names what it requires but not how to install it: Component(install=...)"
    for settings in filter(None, (component.settings, component.request_settings)):
        bare = [name for name, item in settings.__dataclass_fields__.items() if not item.metadata.get("doc")]
        if bare:
            yield (
                "warning",
                f"{label}: {', '.join(bare)} of {settings.__name__} undocumented: NAME: TYPE = setting(DEFAULT, DOC, UNIT)",
            )


def _metadata(plugin: Plugin) -> Iterator[Complaint]:
    """What pip would say, and what it does not say."""
    distribution = metadata.distribution(plugin.distribution)
    try:
        Version(plugin.version)
    except InvalidVersion:
        yield "warning", f"{plugin.distribution}: its version {plugin.version!r} is none that pip can compare"
    own = []
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            yield "error", f"{plugin.distribution}: its metadata require {text!r}, which is no requirement"
            continue
        own.append(canonicalize_name(requirement.name))
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from _installed(plugin, requirement)
    if plugin.distribution != PROJECT and PROJECT not in own:
        yield (
            "warning",
            f'{plugin.distribution} does not depend on {PROJECT}: dependencies = ["{PROJECT}"] in its pyproject.toml',
        )


def _installed(plugin: Plugin, requirement: Requirement) -> Iterator[Complaint]:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        yield "error", f"{plugin.distribution} depends on {requirement}, which is not installed; pip install '{requirement}'"
        return
    if not requirement.specifier.contains(version, prereleases=True):
        yield (
            "error",
            f"{plugin.distribution} depends on {requirement}, but {version} is installed; pip install '{requirement}'",
        )


def _presets(registry: Registry, root: Path) -> Iterator[str]:
    """Each preset of a plugin is composed as the command line would; what refuses it is told."""
    for name in files(root):
        group, _, option = name.partition("/")
        if not option or group == "hydra":
            continue
        word = f"{group}={option}" if group in ("model", "load") else f"+{group}={option}"
        try:
            finish(composed_by_hydra(Config, [word, *_blocked(registry)]))
        except Exception as error:
            yield f"the preset {name} ({root / name}.yaml) cannot be used: {' '.join(str(error).split())}"


def _blocked(registry: Registry) -> list[str]:
    return [f"plugins.block=[{','.join(registry.blocked)}]"] if registry.blocked else []


def second_owners() -> list[tuple[str, str]]:
    """(distribution, text): pip installs two owners of one package without a word, and removing one breaks the other."""
    found = []
    owned = metadata.packages_distributions()
    here = Path(__file__).parents[2]
    for package in ("core", "plugins"):
        others = sorted(set(owned.get(package, ())) - {PROJECT})
        found += [
            (o, f"the package {package} is owned by {PROJECT} and by {o}: uninstall {o}, then install {PROJECT} again")
            for o in others
        ]
        spec = importlib.util.find_spec(package)
        places = [Path(p).parent for p in (spec.submodule_search_locations or [] if spec else [])]
        if here not in places:
            where = places[0] if places else "nowhere"
            found.append((PROJECT, f"the package {package} is taken from {where}, not from {here}: look at PYTHONPATH"))
    return found


def misspelt_groups() -> list[str]:
    """Entry-point groups that are nearly ours: nothing of them is ever found."""
    found = metadata.entry_points()
    near = [group for group in found.groups if group != ENTRY_POINT_GROUP and nearest(group, [ENTRY_POINT_GROUP])]
    return [
        f"{entry.dist.name if entry.dist else '?'} has the entry-point group {entry.group}, so nothing of it is found; "
        f"did you mean {ENTRY_POINT_GROUP}?"
        for group in near
        for entry in found.select(group=group)
    ]


def as_data(plugins: Iterable[Plugin], findings: list[Finding]) -> dict[str, Any]:
    """For programs."""
    entries = [
        {
            "plugin": p.name,
            "distribution": p.distribution,
            "version": p.version,
            "state": p.state,
            "findings": [{"level": f.level, "text": f.text} for f in findings if f.plugin == p.name],
        }
        for p in plugins
    ]
    levels = [f.level for f in findings]
    return {
        "plugins": entries,
        "environment": [{"level": f.level, "text": f.text} for f in findings if f.plugin == ENVIRONMENT],
        "errors": levels.count("error"),
        "warnings": levels.count("warning"),
    }


def as_text(data: dict[str, Any]) -> str:
    """A line per finding, "ok" or "blocked" where there is none, and the sum."""
    rows = []
    for entry in data["plugins"]:
        label = entry["plugin"]
        rows += [(f["level"], label, f["text"]) for f in entry["findings"]] or [
            ("blocked" if entry["state"] == "blocked" else "ok", label, f"{entry['distribution']} {entry['version']}")
        ]
    rows += [(f["level"], ENVIRONMENT, f["text"]) for f in data["environment"]]
    counts = ((len(data["plugins"]), "plugin"), (data["errors"], "error"), (data["warnings"], "warning"))
    checked, errors, warnings = (f"{n} {word}{'s' * (n != 1)}" for n, word in counts)
    return f"{table(('result', 'plugin', 'what'), rows)}\n\n{checked} checked: {errors}, {warnings}"
