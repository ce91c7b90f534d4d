"""What a sweep leaves: `sweep.json` in its folder, one record per cell and repeat. Light: nothing heavy is imported.

A cell's own files are in its `folder`: cell.json, log.txt, result.json, bench.json (task=bench), tokens.json (greedy).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from core.files import read_json, write_json

SWEEP = "sweep.json"
STATUSES = ("ok", "failed", "crashed", "timeout", "incompatible")


@dataclass(frozen=True)
class CellRecord:
    """One cell, run once."""

    hash: str  # of the configuration and the versions of the plugins; equal for the repeats of a cell
    repeat: int  # from 0
    factors: dict[str, str]  # swept name -> value, in the order of the command line
    overrides: list[str]  # all of the cell's, the swept ones and those that all cells share
    status: str  # one of STATUSES
    reason: str = ""  # why it is not ok; of an incompatible cell it begins with "n/a: "
    seconds: float = 0.0  # of its process; 0 if it was not started
    folder: str = ""  # relative to the folder of the sweep
    plugins: dict[str, dict[str, Any]] = field(default_factory=dict)  # kind -> name, distribution, version, provider, ...
    environment: dict[str, Any] = field(default_factory=dict)  # python, packages, commit, host
    command: list[str] = field(default_factory=list)  # runs the cell again by itself
    started: float = 0.0  # seconds since the epoch
    gpus: list[str] = field(default_factory=list)  # CUDA_VISIBLE_DEVICES of its process, where the sweep set it
    resumed: bool = False  # finished in an earlier start of the sweep


@dataclass(frozen=True)
class SweepRecord:
    """The whole sweep."""

    command: list[str]  # that started it (the last time)
    started: float  # seconds since the epoch
    finished: float
    interrupted: bool  # by Ctrl-C: cells that were not reached are missing
    factors: dict[str, list[str]]  # swept name -> its values, both in the order of the command line
    cells: list[CellRecord]  # in the order in which they are run: A B C A B C
    repeats: int = 1
    planned: int = 0  # cells and repeats asked for; 0 where a sweeper decides as it goes
    equal_output: dict[str, Any] = field(default_factory=dict)  # see core.sweep.equal; {} if nothing was to be compared

    def count(self, status: str) -> int:
        """Cells and repeats that ended so."""
        return sum(cell.status == status for cell in self.cells)


def write_sweep(folder: Path, sweep: SweepRecord) -> None:
    """All or nothing."""
    write_json(folder / SWEEP, asdict(sweep))


def read_sweep(folder: Path | str) -> SweepRecord:
    """ValueError where there is no whole sweep.json; keys of other versions of inferlab are ignored."""
    path = Path(folder) / SWEEP
    found = read_json(path)
    if not isinstance(found, dict) or "cells" not in found:
        raise ValueError(f"{path}: no such file, or no sweep in it; give the folder of a sweep (hydra.sweep.dir)")
    return SweepRecord(**{**_known(SweepRecord, found), "cells": [cell_of(cell) for cell in found["cells"]]})


def cell_of(found: Mapping[str, Any]) -> CellRecord:
    """From what a file holds."""
    return CellRecord(**_known(CellRecord, found))


def _known(kind: type, found: Mapping[str, Any]) -> dict[str, Any]:
    return {item.name: found[item.name] for item in fields(kind) if item.name in found}
