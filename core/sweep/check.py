"""`python -m core.sweep.check CELLS ANSWERS`: which cells can run, what fills their slots, what they are called.

A process of its own: what plugins do while they are asked cannot harm the sweep. Lines are appended as soon as they
are known, so that it is seen which cell never came back.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict

from core.composition import override, registry_for, world
from core.config import Config, finish
from core.environment import software
from core.plugins import Registry
from core.resolve import CapabilityError, decide, describe
from core.sweep.names import digest, name_of
from core.validation import Options
from core.vocabulary import CONFIG_NAME, conf_dir, plain


def check(node: DictConfig, overrides: Sequence[str], registry: Registry) -> dict[str, Any]:
    """reason: why the cell is not run, "" if it is. A value that is wrong by itself is told by the cell when it runs."""
    found, chosen = unchecked(node), plain(node.hydra.runtime.choices)
    with open_dict(node):
        del node["hydra"]
    try:
        resolved = decide(finish(Options(node, chosen, overrides, registry)))
    except CapabilityError as error:
        return {**found, "reason": f"n/a: {'; '.join(error.reasons)}"}
    except Exception:
        return found
    plugins = describe(resolved)[1]
    return {**found, "hash": name_of(found["hash"], plugins), "plugins": plugins}


def unchecked(node: DictConfig) -> dict[str, Any]:
    """What is known before any plugin was asked."""
    return {"hash": digest(node), "plugins": {}, "reason": ""}


def main(asked: str, answers: str) -> None:
    """CELLS: the overrides of every cell, where to begin, Hydra's own overrides, further folders of presets."""
    task = json.loads(Path(asked).read_text(encoding="utf-8"))
    cells, first = task["cells"], task["first"]
    paths = [override("hydra.searchpath", [f"file://{folder}" for folder in task["folders"]])] if task["folders"] else []
    with open(answers, "a", encoding="utf-8") as file:

        def tell(at: int, answer: dict[str, Any]) -> None:
            print(json.dumps({"at": at, **answer}, default=str), file=file, flush=True)

        if first == 0:
            tell(-1, software())
        for at, overrides in enumerate(cells[first:], first):
            registry = registry_for(overrides)
            with world(Config, registry), initialize_config_dir(str(conf_dir()), version_base="1.3"):
                node = compose(CONFIG_NAME, [*overrides, *task["hydra"], *paths], return_hydra_config=True)
            tell(at, unchecked(node))  # should the check never return
            tell(at, check(node, overrides, registry))


if __name__ == "__main__":
    main(*sys.argv[1:])
