"""YAML presets that plugins bring: packages that must exist, and files that must not hide each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from core.plugins.checks import KINDS, PluginError


def folder(package: str) -> Path:
    """Where a package's presets lie. Hydra says nothing about a package that is not there, so this raises."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:
        spec = None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations:
        raise PluginError(f"inferlab_presets names the package {package}, which does not exist")
    return Path(locations[0])


def package_problems(packages: Iterable[str]) -> Iterator[str]:
    """Packages that do not exist, and files where a component's name belongs (YAML would beat the typed option)."""
    for package in packages:
        try:
            root = folder(package)
        except PluginError as error:
            yield str(error)
            continue
        for name in files(root):
            if name.partition("/")[0] in KINDS:
                yield f"{package} holds {name}.yaml: options of a slot are declared as components, not as YAML"


def files(root: Path) -> Iterator[str]:
    """Names as Hydra sees them: group/name."""
    return (path.relative_to(root).with_suffix("").as_posix() for path in sorted(root.rglob("*.yaml")))


def check_clashes(own: Path, packages: Mapping[str, str]) -> None:
    """Of two files with one name Hydra silently takes the first."""
    owners = dict.fromkeys(files(own), "inferlab")
    for package, plugin in packages.items():
        for name in files(folder(package)):
            if name in owners:
                raise PluginError(
                    f"the preset {name} is offered by {owners[name]} and by {package} (plugin {plugin}); "
                    f"plugins.block=[{plugin}] hides one"
                )
            owners[name] = package
