"""Equal output: cells that should have drawn the same tokens did so, or the first difference is shown.

With greedy sampling, who is scheduled when, where the cache lies and how attention is computed must not change an answer. So
all cells and repeats with the same task, model, dtype, prompts or load, sampling and seed are compared with the first of them.

`equal_output` in sweep.json:

    compared     cells and repeats that left tokens.json
    groups       for each set of cells that should be equal: model, load, seed, reference (a folder), cells (folders), equal
    differences  one for each cell and repeat that differs: folder, reference, factors, run, request, position, tokens
                 (position: of the first drawn token that differs, from 0; tokens: [reference, this]; null: it had ended)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from core.files import read_json
from core.sweep.records import CellRecord
from core.sweep.tokens import TOKENS

SAME = ("task", "model", "load", "prompts", "prompts_file", "chat", "sampling", "seed", "max_model_len")  # settings


@dataclass(frozen=True)
class Difference:
    """Where two cells part for the first time."""

    run: int
    request: int
    position: int
    tokens: tuple[int | None, int | None]


def compare(ours: Sequence[Sequence[Sequence[int]]], theirs: Sequence[Sequence[Sequence[int]]]) -> Difference | None:
    """runs[run][request] -> tokens, of the reference and of another; None if they are equal."""
    for run, (a, b) in enumerate(zip_longest(ours, theirs, fillvalue=())):
        for request, (left, right) in enumerate(zip_longest(a, b, fillvalue=())):
            for position, pair in enumerate(zip_longest(left, right)):
                if pair[0] != pair[1]:
                    return Difference(run, request, position, pair)
    return None


def check_equal(folder: Path, cells: Sequence[CellRecord]) -> dict[str, Any]:
    """What sweep.json holds as equal_output; {} if there was nothing to compare."""
    groups: dict[str, list[tuple[CellRecord, Mapping[str, Any]]]] = {}
    for cell in cells:
        result = read_json(folder / cell.folder / "result.json") if cell.status == "ok" else None
        if result and (folder / cell.folder / TOKENS).is_file():
            groups.setdefault(_key(result), []).append((cell, result))
    groups = {key: group for key, group in groups.items() if len(group) > 1}
    if not groups:
        return {}
    told, differences = [], []
    for group in groups.values():
        (first, result), others = group[0], [cell for cell, _ in group[1:]]
        reference = _tokens(folder, first)
        found = [_difference(folder, cell, first, reference) for cell in others]
        differences += [difference for difference in found if difference]
        told.append(_group(result, group, not any(found)))
    return {"compared": sum(map(len, groups.values())), "groups": told, "differences": differences}


def lines(equal: Mapping[str, Any]) -> list[str]:
    """For the terminal: the differences, or that there is none."""
    if not equal:
        return []
    if not equal["differences"]:
        return [f"equal output: {equal['compared']} runs that should have drawn the same tokens did"]
    return [f"NOT EQUAL: {difference_text(difference)}" for difference in equal["differences"]]


def difference_text(found: Mapping[str, Any]) -> str:
    """One difference in words."""
    left, right = ("its end" if token is None else f"token {token}" for token in found["tokens"])
    name = " ".join(f"{k}={v}" for k, v in found["factors"].items()) or found["folder"]
    where = f"run {found['run']}, request {found['request']}, position {found['position']}"
    return f"{name} ({found['folder']}) drew {right} where {found['reference']} drew {left}: {where}"


def _key(result: Mapping[str, Any]) -> str:
    settings, plugins = result["settings"], result["plugins"]
    task = settings.get("task")
    same = {name: settings.get(name) for name in SAME if name != ("load" if task == "generate" else "prompts")}
    if task == "bench":
        same["repeats"] = [settings["bench"]["repeats"], settings["bench"]["warmup"]]
    same["dtype"] = [settings.get("dtype"), result["environment"].get("device", "").partition(":")[0]]
    same["arch"] = plugins.get("arch", {}).get("name")
    return hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()


def _group(result: Mapping[str, Any], group: Sequence[tuple[CellRecord, Any]], equal: bool) -> dict[str, Any]:
    settings, folders = result["settings"], [cell.folder for cell, _ in group]
    bench = result.get("bench", {})
    named = {"model": bench.get("model", settings["model"].get("path")), "load": bench.get("load"), "seed": result["seed"]}
    return {**named, "reference": folders[0], "cells": folders, "equal": equal}


def _difference(
    folder: Path, cell: CellRecord, first: CellRecord, reference: Sequence[Sequence[Sequence[int]]]
) -> dict[str, Any] | None:
    found = compare(reference, _tokens(folder, cell))
    if found is None:
        return None
    where = {"run": found.run, "request": found.request, "position": found.position, "tokens": list(found.tokens)}
    return {"folder": cell.folder, "reference": first.folder, "factors": cell.factors, **where}


def _tokens(folder: Path, cell: CellRecord) -> list[list[list[int]]]:
    return (read_json(folder / cell.folder / TOKENS) or {"runs": []})["runs"]
