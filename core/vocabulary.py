"""The words that settings may use: slots, options, and the dotted name of every setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from omegaconf import OmegaConf

from core.errors import ConfigError, did_you_mean
from core.loads import LoadSettings, filled_labels
from core.model_settings import ModelSettings
from core.plugins import Registry

AUTO_KINDS = ("attention", "arch", "executor")  # may be left to core.resolve
CONFIG_NAME = "config"


def conf_dir() -> Path:
    """conf/: inside a wheel core/_conf, in a checkout beside core."""
    inside = Path(__file__).parent / "_conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def preset_settings() -> dict[str, type]:
    """The groups whose options are YAML presets, and the settings that they fill."""
    return {"model": ModelSettings, "load": LoadSettings}


def loads_that(fill: Callable[[Any], bool]) -> list[str]:
    """Names of the presets in conf/load/ that fill labels which satisfy `fill`."""
    names, base = [], OmegaConf.structured(LoadSettings)
    for file in sorted((conf_dir() / "load").glob("*.yaml")):
        node = {key: value for key, value in plain(OmegaConf.load(file)).items() if key != "defaults"}
        with suppress(ConfigError):  # a preset that needs more, such as the file of a trace
            if fill(filled_labels(OmegaConf.to_object(OmegaConf.merge(base, node)))):  # type: ignore[arg-type]
                names.append(file.stem)
    return names


def option_names(kind: str, registry: Registry) -> list[str]:
    """Words that may follow `kind=`."""
    return (["auto"] if kind in AUTO_KINDS else []) + [found.component.name for found in registry.options(kind)]


@cache
def default_choices() -> Mapping[str, str]:
    """kind -> option, from conf/config.yaml."""
    entries = plain(OmegaConf.select(OmegaConf.load(conf_dir() / f"{CONFIG_NAME}.yaml"), "defaults"))
    return {k: v for entry in entries if isinstance(entry, dict) for k, v in entry.items()}


def vocabulary(root: type, registry: Registry) -> set[str]:
    """Every dotted name that some choice of options accepts."""
    names = {*default_choices(), *flatten(plain(OmegaConf.structured(root)))} | {f.name for f in fields(root)}
    names |= {f"{group}.{f.name}" for group, settings in preset_settings().items() for f in fields(settings)}
    names |= {f"sampling.{name}" for name in request_names(registry)}
    names |= {f"{kind}.{f.name}" for (kind, _), found in registry.components.items() for f in fields(found.component.settings)}
    return {name for name in names if "/" not in name and name not in ("override", "sampling.theirs")}


def request_names(registry: Registry) -> set[str]:
    """Parameters of a request that some sampler adds."""
    added = (found.component.request_settings for found in registry.options("sampler"))
    return {name for settings in added if settings for name in field_names(settings)}


def unknown(key: str, known: Iterable[str], registry: Registry, chosen: Mapping[str, Any]) -> str:
    """The message for a setting that does not exist, or that the chosen option does not have."""
    kind, _, leaf = key.partition(".")
    name = chosen.get(kind)
    if leaf and kind in AUTO_KINDS and name == "auto":
        return f"{key}: {kind}=auto has no settings of its own; name the option that is meant, {kind}=NAME"
    if key in known and (found := registry.components.get((kind, str(name)))):
        others = [f.component.name for f in registry.options(kind) if leaf in field_names(f.component.settings)]
        has = ", ".join(field_names(found.component.settings)) or "no settings"
        return f"{key} is a setting of {kind}={' or '.join(others)}; the chosen {kind}={name} has {has}"
    return f"unknown setting {key}{did_you_mean(key, known)} --help lists all settings."


def field_names(settings: type) -> list[str]:
    """The settings of a component."""
    return [f.name for f in fields(settings)]


def parse(overrides: Iterable[str]) -> list[Override]:
    """Hydra's own parser; its message names the override and the place."""
    return OverridesParser.create().parse_overrides(list(overrides))


def text_of(value: Any) -> Any:
    """A parsed override value without Hydra's quotes."""
    return value.text if isinstance(value, QuotedString) else value


def plain(node: Any) -> Any:
    """Containers without OmegaConf in them."""
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries -> dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
