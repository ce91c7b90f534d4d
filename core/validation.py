"""What Hydra composed, checked again against the typed settings of every slot: +, ++ and ~ pass Hydra's own checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from hydra.core.override_parser.types import OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from core.errors import ConfigError
from core.interfaces import NoSettings
from core.plugins import Found, Registry
from core.plugins.checks import KINDS
from core.vocabulary import (
    AUTO_KINDS,
    default_choices,
    field_names,
    flatten,
    option_names,
    parse,
    plain,
    preset_settings,
    text_of,
    unknown,
    vocabulary,
)


@dataclass(frozen=True)
class Options:
    """What Hydra composed: still unchecked."""

    node: DictConfig  # without the hydra node
    chosen: Mapping[str, Any]  # group -> option
    overrides: Sequence[str]  # of the task, not Hydra's own
    registry: Registry

    @property
    def raw(self) -> dict[str, Any]:
        """Plain containers, interpolations resolved."""
        container = OmegaConf.to_container(self.node, resolve=True)
        assert isinstance(container, dict)
        return {str(k): v for k, v in container.items()}

    def validated(self, root: type) -> tuple[Any, dict[str, str]]:
        """(root object with a settings object in every slot, kind -> option)."""
        for kind in KINDS:
            refuse_choice(kind, self.chosen.get(kind), self.registry)
        choices = {kind: str(self.chosen[kind]) for kind in KINDS}
        kinds = {**{kind: self._settings(kind, name) for kind, name in choices.items()}, **preset_settings()}
        self._refuse_unknown("", root, {k: v for k, v in self.node.items() if k not in kinds}, root)
        slots = {kind: self._object(kind, settings, self.node.get(kind), root) for kind, settings in kinds.items()}
        theirs = self._theirs(choices["sampler"])
        rest = self.node.copy()
        with open_dict(rest):
            for kind in kinds:
                rest.pop(kind, None)
        config = _typed("", root, rest)
        config.sampling.theirs = theirs
        for slot, settings in slots.items():
            setattr(config, slot, settings)
        return config, choices

    def _settings(self, kind: str, name: str) -> type:
        return NoSettings if name == "auto" and kind in AUTO_KINDS else self.registry.find(kind, name).component.settings

    def _object(self, prefix: str, settings: type, node: Any, root: type) -> Any:
        node = OmegaConf.create({}) if node is None else node
        self._refuse_unknown(prefix, settings, node, root)
        return _typed(prefix, settings, node)

    def _refuse_unknown(self, prefix: str, settings: type, node: Mapping[Any, Any], root: type) -> None:
        own = {f.name: f.default_factory for f in fields(settings)}
        for key, value in node.items():
            full = f"{prefix}.{key}" if prefix else str(key)
            if key not in own:
                known = vocabulary(root, self.registry) | {f"{prefix}.{name}".lstrip(".") for name in own}
                raise ConfigError(unknown(full, known, self.registry, self.chosen))
            inner = own[key]
            if isinstance(inner, type) and is_dataclass(inner) and isinstance(value, DictConfig):
                self._refuse_unknown(full, inner, value, root)

    def _theirs(self, sampler: str) -> dict[str, Any]:
        given = self.raw.get("sampling", {}).get("theirs") or {}
        settings = self.registry.find("sampler", sampler).component.request_settings
        names = field_names(settings) if settings else []
        for name in given:
            if name not in names:
                others = [f"sampler={f.component.name}" for f in self.registry.options("sampler") if _adds(f, name)]
                whose = f"is a parameter of {' or '.join(others)}" if others else "does not exist"
                has = f"has {', '.join(names)}" if names else "has no parameters of its own"
                raise ConfigError(f"sampling.{name} {whose}; the chosen sampler={sampler} {has}")
        if settings is None:
            return {}
        checked = _typed("sampling", settings, given)
        return {name: getattr(checked, name) for name in given}

    def given(self) -> set[str]:
        """Dotted keys, groups and single leaves, that the overrides name."""
        overrides = (o for o in parse(self.overrides) if o.type is not OverrideType.DEL)
        keys = {key for o in overrides for key in _leaves(o.key_or_group, o.value())}
        return {key.replace("sampling.theirs.", "sampling.") for key in keys}

    def changed(self, root: type) -> set[str]:
        """Keys whose value is not the default of the typed settings; model and load, which are presets, are left out."""
        defaults = plain(OmegaConf.structured(root))
        for kind in KINDS:
            defaults[kind] = plain(OmegaConf.structured(self._settings(kind, self.chosen[kind])))
        usual, standard = default_choices(), flatten(defaults)
        leaves = flatten({k: v for k, v in self.raw.items() if k in defaults and k not in preset_settings()})
        return {k for k, v in leaves.items() if standard.get(k) != v} | {k for k in KINDS if self.chosen[k] != usual[k]}


def _adds(found: Found, name: str) -> bool:
    settings = found.component.request_settings
    return settings is not None and name in field_names(settings)


def refuse_choice(kind: str, name: Any, registry: Registry) -> None:
    """A slot takes one option, and it must exist."""
    names = option_names(kind, registry)
    if name is None:
        raise ConfigError(f"{kind} has no option; give one: {kind}={' or '.join(names)}")
    if isinstance(name, list):
        given = ",".join(str(text_of(n)) for n in name)
        raise ConfigError(f"{kind} takes one of {', '.join(names)}, got [{given}]; to try each in turn: -m {kind}={given}")
    if text_of(name) not in names:
        registry.find(kind, str(text_of(name)))


def _typed(prefix: str, settings: type, node: Any) -> Any:
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(settings), plain(node)))
    except OmegaConfBaseException as error:
        key = ".".join(filter(None, (prefix, error.full_key)))
        raise ConfigError(f"{key}: {str(error.msg or error).splitlines()[0]}") from error


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{text_of(name)}", item)
    else:
        yield key
