"""Everything that is Hydra's: options and presets offered to it, overrides prepared for it, its result checked again.

Hydra's own checks let some things pass (`+atention.x=1`, `scheduler=[a,b]`, `~scheduler`), and an override of a name that does
not exist gets no hint, so the result is validated against the typed settings, and both kinds of error are told in our words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra.conf  # noqa: F401  (fills the ConfigStore with Hydra's own groups)
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import ChoiceSweep, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from core.errors import ConfigError, did_you_mean, nearest
from core.interfaces import NoSettings
from core.loads import LoadSettings
from core.model_settings import ModelSettings
from core.plugins import Registry, discover
from core.plugins.checks import KINDS
from core.plugins.presets import check_clashes, files, folder
from core.validation import Options, refuse_choice
from core.vocabulary import (
    AUTO_KINDS,
    CONFIG_NAME,
    conf_dir,
    default_choices,
    parse,
    plain,
    request_names,
    text_of,
    unknown,
    vocabulary,
)

_packages: list[str] = []


class Presets(SearchPathPlugin):
    """Adds the presets of plugins to Hydra's search path while we compose."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for package in _packages:
            search_path.append("inferlab", f"pkg://{package}")


@contextmanager
def world(root: type, registry: Registry) -> Iterator[None]:
    """Hydra's global state holds our options and presets inside, and what it held before afterwards."""
    check_clashes(conf_dir(), registry.presets)
    Plugins.instance().register(Presets)
    store = ConfigStore.instance()
    before, packages = store.repo, list(_packages)
    store.repo, _packages[:] = {"hydra": store.repo["hydra"]}, list(registry.presets)
    store.store(name="base_config", node=_base(root))
    store.store(group="model", name="base_model", node=ModelSettings)
    store.store(group="load", name="base_load", node=LoadSettings)
    for (kind, name), found in registry.components.items():
        store.store(group=kind, name=name, node=found.component.settings, provider=str(found))
    for kind in AUTO_KINDS:
        store.store(group=kind, name="auto", node=NoSettings, provider="inferlab")
    try:
        yield
    finally:
        store.repo, _packages[:] = before, packages


def _base(root: type) -> DictConfig:
    node = OmegaConf.structured(root)
    node.model, node.load = OmegaConf.structured(ModelSettings), OmegaConf.structured(LoadSettings)
    return node


def override(key: str, value: Any) -> str:
    """`key=value` in Hydra's grammar, for any plain Python value."""
    return f"{key}={_literal(value)}"


def _literal(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ",".join(map(_literal, value)) + "]"
    return QuotedString(text=str(value), quote=Quote.single).with_quotes()


def registry_for(overrides: Sequence[str]) -> Registry:
    """plugins.block and plugins.strict decide what Hydra is offered, so they are read before it composes."""
    values = {o.key_or_group: o.value() for o in parse(o for o in overrides if re.match(r"\+*plugins\.(block|strict)=", o))}
    block = values.get("plugins.block") or []
    names = [str(text_of(name)) for name in (block if isinstance(block, list) else [block])]
    return discover(block=names, strict=values.get("plugins.strict") is True)


def rewrite(overrides: Iterable[str], registry: Registry, folders: Sequence[Path] = ()) -> list[str]:
    """`model=V` that names no preset means `model=custom model.path=V`; parameters of a sampler need no + of Hydra's."""
    roots = [conf_dir(), *map(folder, registry.presets), *folders]
    presets = {name.partition("/")[2] for root in roots for name in files(root) if name.startswith("model/")}
    own = request_names(registry)
    result: list[str] = []
    for text in overrides:
        name = text.removeprefix("sampling.").partition("=")[0]
        if text.startswith("model="):
            result += _model(text, presets)
        elif text.startswith("sampling.") and name in own:
            result.append(f"++sampling.theirs.{text.removeprefix('sampling.')}")
        else:
            result.append(text)
    return result


def _model(text: str, presets: set[str]) -> list[str]:
    given = text.removeprefix("model=")
    try:
        value = parse([text])[0].value()
    except Exception:  # a path may hold signs that mean something in Hydra's grammar
        value = given
    names = [str(text_of(v)) for v in (value.list if isinstance(value, ChoiceSweep) else [value])]
    strangers = [name for name in names if name not in presets]
    if not strangers or value is None:
        return [text]
    for name in strangers:
        if "/" not in name and not Path(name).expanduser().exists() and nearest(name, presets):
            raise ConfigError(
                f"model={name}: no preset, no file or directory, no hub id (ORG/NAME){did_you_mean(name, presets)}"
            )
    if len(strangers) < len(names):
        raise ConfigError(f"model={given} mixes presets with paths or hub ids: sweep over model.path=... with model=custom")
    return ["model=custom", "model.path=" + ",".join(map(_literal, names))]


def translate(error: Exception, root: type, registry: Registry, overrides: Sequence[str]) -> Exception:
    """Hydra's complaint about an override, in our words where ours say more."""
    if not isinstance(error, ConfigCompositionException):
        return error
    parsed = parse(o for o in overrides if not o.lstrip("+~").startswith("hydra."))
    chosen = {**default_choices(), **{o.key_or_group: o.value() for o in parsed if o.key_or_group in KINDS}}
    try:
        for kind in KINDS:
            for name in chosen[kind].list if isinstance(chosen[kind], ChoiceSweep) else [chosen[kind]]:
                refuse_choice(kind, name, registry)
    except ValueError as better:
        return better
    if found := re.match(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", str(error)):
        return ConfigError(unknown(found[1].lstrip("+~"), vocabulary(root, registry), registry, chosen))
    if isinstance(cause := error.__cause__, OmegaConfBaseException):
        override, why = str(error).removeprefix("Error merging override "), str(cause.msg or cause).splitlines()[0]
        return ConfigError(f"{override}: {'a list is needed: KEY=[A,B]' if 'not a ListConfig' in why else why}")
    return error


def composed_by_hydra(root: type, overrides: list[str]) -> Options:
    """Compose outside of a Hydra application; an application that is running keeps its state."""
    registry = registry_for(overrides)
    overrides = rewrite(overrides, registry)
    try:
        with world(root, registry), _no_application(), initialize_config_dir(str(conf_dir()), version_base="1.3"):
            node = compose(CONFIG_NAME, overrides, return_hydra_config=True)
    except Exception as error:
        raise _as_value_error(translate(error, root, registry, overrides)) from error
    chosen = plain(node.hydra.runtime.choices)
    with open_dict(node):
        del node["hydra"]
    return Options(node, chosen, [o for o in overrides if not o.lstrip("+~").startswith("hydra.")], registry)


@contextmanager
def _no_application() -> Iterator[None]:
    """Somebody's Hydra application may be running: it is set aside, Hydra allows one at a time."""
    running, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running


def _as_value_error(error: Exception) -> Exception:
    return error if isinstance(error, ValueError) else ConfigError(str(error))
