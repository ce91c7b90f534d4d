"""`--help`: every slot with its options, every setting with its default and rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass

from core.config import Config
from core.loads import LoadSettings
from core.plugins import Registry
from core.plugins.checks import KINDS
from core.plugins.presets import files, folder
from core.vocabulary import AUTO_KINDS, conf_dir, default_choices

HEAD = """inferlab {version}: an LLM inference engine made of plugins

python -m core.run [SETTING=VALUE ...] [flags]        (or: inferlab ...)
  python -m core.run 'prompts=["What is 2 + 2?"]' sampling.temperature=0
  python -m core.run model=qwen3-0.6b model.path=DIRECTORY scheduler=mixed
  python -m core.run -m scheduler=fcfs,mixed overlap=0,1
"""
FLAGS = """Flags
  -m, --multirun      run every combination of values separated by commas, each in a process of its own
  --cfg job           show the settings that would be used
  --config-dir DIR    more presets
  --debug             show tracebacks (also INFERLAB_DEBUG=1)
  --version, --help, --hydra-help
"""


def help_text(registry: Registry, version: str) -> str:
    """What `--help` prints."""
    lines = [
        HEAD.format(version=version),
        "Slots: SLOT=OPTION, SLOT.NAME=VALUE for the settings of the chosen option (* default)",
    ]
    for kind in KINDS:
        lines += _slot(kind, registry)
    roots = [conf_dir(), *map(folder, registry.presets)]
    found = sorted({name for root in roots for name in files(root)})
    models, loads = (", ".join(n.partition("/")[2] for n in found if n.startswith(f"{group}/")) for group in ("model", "load"))
    lines += [
        f"  model: {models}, or a directory, a .gguf file, a hub id ORG/NAME (* {default_choices()['model']})",
        f"  load (of task=bench): {loads} (* {default_choices()['load']})",
        *(f"      load.{item.name}={default_text(item)}" for item in fields(LoadSettings)),
        "",
    ]
    lines += ["Settings", *_settings(Config, "")]
    return "\n".join([*lines, "", FLAGS])


def _slot(kind: str, registry: Registry) -> Iterator[str]:
    default = default_choices()[kind]
    yield f"  {kind}"
    if kind in AUTO_KINDS:
        yield f"    auto{'*' * (default == 'auto')}: chosen from model and machine"
    for found in registry.options(kind):
        component = found.component
        origin = "" if found.origin == "built-in" else f" [{found}]"
        yield f"    {component.name}{'*' * (default == component.name)}: {component.summary}{origin}"
        for item in fields(component.settings):
            yield f"      {f'{kind}.{item.name}={default_text(item)}':<30} {item.metadata.get('doc', '')}".rstrip()


def _settings(settings: type, prefix: str) -> Iterator[str]:
    for item in fields(settings):
        inner = item.default_factory
        if isinstance(inner, type) and is_dataclass(inner):
            yield from _settings(inner, f"{prefix}{item.name}.")
        elif doc := item.metadata.get("doc"):
            yield f"  {f'{prefix}{item.name}={default_text(item)}':<34} {doc}"


def default_text(item: Field) -> str:
    """As it is written on the command line."""
    if item.default is not MISSING:
        return (
            "null"
            if item.default is None
            else str(item.default).lower()
            if isinstance(item.default, bool)
            else str(item.default)
        )
    value = item.default_factory() if item.default_factory is not MISSING else "required"
    return "[...]" if isinstance(value, list) and value else str(value)
