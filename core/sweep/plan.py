"""The cells of a sweep, checked before the first of them runs. plan.json holds them, for the jobs wherever they run.

Each is checked in a process of its own kind (`core.sweep.check`), because what a plugin does there may end a process or never
return; a cell that could not be checked is simply run.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from omegaconf import DictConfig

from core.errors import ConfigError
from core.files import read_json, write_json
from core.sweep.process import end, ended, python
from core.vocabulary import parse, plain

PLAN = "plan.json"
CHECK_S = 60.0  # longest that the check of one cell takes
REPEAT = "sweep.repeat="


def with_repeats(arguments: Sequence[str]) -> list[str]:
    """The repeats as the first, hence slowest, of the swept settings: A B C A B C. ConfigError for a list."""
    given = [a.partition("=")[2] for a in arguments if a.lstrip("+").startswith("sweep.repeats=")]
    if given and "," in given[-1]:
        raise ConfigError(f"sweep.repeats={given[-1]}: how often each cell is run is one number; give sweep.repeats=5")
    if not given or not given[-1].isdigit() or int(given[-1]) < 2:  # a wrong value is refused later, with its reason
        return list(arguments)
    at = next(
        i for i, a in enumerate(arguments) if "=" in a and not a.startswith("-") and not arguments[i - 1].startswith("--")
    )
    return [*arguments[:at], f"{REPEAT}{','.join(map(str, range(int(given[-1]))))}", *arguments[at:]]


def cells_of(config: DictConfig) -> tuple[list[list[str]], list[str]]:
    """(overrides of each cell in the order in which they are run, names that are swept). Nothing, where a sweeper other than
    Hydra's own decides as it goes."""
    sweeper = config.hydra.sweeper
    if not str(sweeper.get("_target_", "")).endswith("BasicSweeper"):
        return [], []
    arguments = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    overrides = parse([*arguments, *(str(o) for o in config.hydra.overrides.task)])
    swept = [o.get_key_element() for o in overrides if o.is_sweep_override()]
    return [list(cell) for batch in BasicSweeper.split_arguments(overrides, None) for cell in batch], swept


def factors_of(overrides: Sequence[str], swept: Sequence[str]) -> dict[str, str]:
    """Swept name, as it is spoken of -> value in this cell."""
    found = dict(o.split("=", 1) for o in overrides if "=" in o)
    names = [key for key in swept if f"{key}=" != REPEAT]
    return {key.lstrip("+").replace("sampling.theirs.", "sampling."): found[key] for key in names}


def key_of(overrides: Sequence[str]) -> str:
    """The same for all repeats of a cell."""
    return json.dumps([o for o in overrides if not o.startswith(REPEAT)])


@dataclass(frozen=True)
class Plan:
    """Which cells there are."""

    order: Sequence[tuple[str, int]] = ()  # (key, repeat) in the order in which they are run
    cells: Mapping[str, dict[str, Any]] = field(
        default_factory=dict
    )  # key -> overrides, factors; checked: hash, plugins, reason
    environment: Mapping[str, Any] = field(default_factory=dict)

    def of(self, overrides: Sequence[str]) -> dict[str, Any]:
        """A cell; {} where it is not in here."""
        return self.cells.get(key_of(overrides), {})

    @property
    def runs(self) -> list[tuple[dict[str, Any], int]]:
        """(cell, repeat)"""
        return [(self.cells[key], repeat) for key, repeat in self.order]


def plan_of(folder: Path | str) -> Plan:
    """Of the sweep in `folder`; an empty one where none was written."""
    return Plan(**(read_json(Path(folder) / PLAN) or {}))


def make_plan(config: DictConfig) -> Plan:
    """Check all cells and write plan.json."""
    runs, swept = cells_of(config)
    keys = list(dict.fromkeys(map(key_of, runs)))
    theirs = [str(o) for o in config.hydra.overrides.hydra]
    found = _check([json.loads(key) for key in keys], theirs, _folders(config), float(config.sweep.timeout_s))
    cells = {
        key: {"overrides": json.loads(key), "factors": factors_of(json.loads(key), swept), **found.get(at, {})}
        for at, key in enumerate(keys)
    }
    plan = Plan([(key_of(run), repeat_of(run)) for run in runs], cells, found.get(-1, {}))
    write_json(Path(str(config.hydra.sweep.dir)) / PLAN, asdict(plan))
    return plan


def repeat_of(overrides: Sequence[str]) -> int:
    """From 0."""
    return next((int(o.removeprefix(REPEAT)) for o in overrides if o.startswith(REPEAT)), 0)


def _folders(config: DictConfig) -> list[str]:
    """--config-dir, as Hydra understood it."""
    sources = plain(config.hydra.runtime.config_sources)
    return [source["path"] for source in sources if source["provider"] == "command-line"]


def _check(cells: Sequence[Sequence[str]], theirs: Sequence[str], folders: Sequence[str], timeout_s: float) -> dict[int, Any]:
    """Number of the cell -> what was found; -1: the environment. A process that ends or hangs is replaced by another, which
    goes on after the cell that was to blame."""
    found: dict[int, Any] = {}
    first = 0
    with tempfile.TemporaryDirectory() as place:
        while first < len(cells):
            asked, answers = Path(place) / "cells.json", Path(place) / f"from{first}.jsonl"
            write_json(asked, {"cells": cells, "first": first, "hydra": list(theirs), "folders": list(folders)})
            _run_check([*python("core.sweep.check"), str(asked), str(answers)], answers, min(CHECK_S, timeout_s))
            lines = [json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else []
            found |= {line.pop("at"): line for line in lines}
            first = max(first, *found) + 1
    return found


def _run_check(command: Sequence[str], answers: Path, patience_s: float) -> None:
    """Until it ends, or has had no new answer for so long."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(command, start_new_session=True, **quiet)  # type: ignore[call-overload]
    size, since = -1, time.monotonic()
    try:
        while not ended(child, 0.05) and time.monotonic() - since < patience_s:
            now = answers.stat().st_size if answers.exists() else -1
            size, since = (now, time.monotonic()) if now != size else (size, since)
    finally:
        end(child)
