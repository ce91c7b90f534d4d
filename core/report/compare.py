"""Two sweeps: the same cells before and after, with a verdict on noise.

Cells are matched by their factors. Two sweeps are not interleaved, so a machine that changed in between looks like a change of
code: a difference counts only if it is larger than TOLERANCE by more than noise.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from core.report import facts
from core.report.effects import Effect, adjusted, series
from core.report.files import put, render
from core.report.noise import difference
from core.report.table import Table, read_table
from core.report.words import name_of
from core.sweep.equal import check_equal, difference_text

TOLERANCE = 0.05  # share; a machine differs from itself by as much on another day


@dataclass(frozen=True)
class Comparison:
    before: Table
    after: Table
    rows: list[Effect]  # factors: the cell's name
    unmatched: list[str]
    changed: list[tuple[str, str]]
    tokens: dict[str, Any]  # as equal_output in sweep.json, over both sweeps; {} if nothing was to be compared

    @property
    def real(self) -> list[Effect]:
        return [row for row in self.rows if counts(row)]

    @property
    def verdict(self) -> str:
        """The first line."""
        if any(row.p is None for row in self.rows):
            return "nothing can be said about noise: some cells have fewer than two repeats; use sweep.repeats=5"
        if not self.real:
            return "no difference beyond noise"
        return f"{len(self.real)} of {len(self.rows)} comparisons differ beyond noise and by more than {TOLERANCE:.0%}"

    @property
    def wrong(self) -> list[str]:
        """Where the second sweep drew other tokens than the first, in words."""
        return [difference_text(found) for found in self.tokens.get("differences", [])]

    @property
    def faster(self) -> list[str]:
        """Metrics in which the second sweep is better, in some cell."""
        return list(dict.fromkeys(row.metric.name for row in self.real if row.good > 0))

    @property
    def output(self) -> str:
        """The second line."""
        if not self.tokens:
            return "output was not compared: that needs greedy sampling (sampling.temperature=0) and equal settings"
        if not self.wrong:
            return f"equal output: the {self.tokens['compared']} runs that should have drawn the same tokens did"
        faster = f"; better in {', '.join(self.faster)}: faster, but not the same answers" if self.faster else ""
        return f"NOT EQUAL: {len(self.wrong)} of {self.tokens['compared']} runs drew other tokens than they should{faster}"


def counts(row: Effect) -> bool:
    return row.real and (row.share is None or abs(row.share) > TOLERANCE)


def compare(before: Path, after: Path, metrics: Sequence[str] = ()) -> Comparison:
    """ValueError where the sweeps have no cell in common."""
    first, second = read_table(before, metrics), read_table(after, metrics)
    if first.factors != second.factors:
        raise ValueError(
            f"{before} sweeps {first.factors}, {after} sweeps {second.factors}; compare sweeps of the same settings"
        )
    order = dict.fromkeys(name_of(cell.factors) for cell in first.sweep.cells)
    rows: list[Effect] = []
    for metric in (m for m in first.headlines if m.name in second.metrics):
        (a, ratio), (b, other) = series(first, metric), series(second, metric)
        if ratio != other:
            raise ValueError(f"{metric.name} is above 0 in all runs of one sweep only, so no ratio can be made of it")
        left, right = _groups(a), _groups(b)
        for cell in (name for name in order if name in left and name in right):
            found = difference([left[cell], right[cell]], [-1, 1])
            rows.append(Effect(metric, (cell,), (("before", "after"),), ratio, found, 1))
    if not rows:
        raise ValueError(f"{before} and {after} have no finished cell with a metric in common")
    names = [{name_of(c.factors) for c in t.sweep.cells if c.status == "ok"} for t in (first, second)]
    told = [facts.facts_of(c, t.result(c)) for t in (first, second) for c in t.sweep.cells if c.status == "ok"]
    _, differ = facts.split(told)
    changed = facts.not_asked_for(differ, first.factors)
    unmatched = sorted(names[0] ^ names[1])
    return Comparison(first, second, _judged(rows), unmatched, changed, _tokens(first, second))


def _tokens(first: Table, second: Table) -> dict[str, Any]:
    """Every run against the first that should have drawn the same; only where both sweeps have such runs."""
    runs = [[replace(c, folder=str(t.folder / c.folder)) for c in t.sweep.cells] for t in (first, second)]
    ours, theirs = ({run.folder for run in group} for group in runs)
    found = check_equal(Path(), [*runs[0], *runs[1]])
    groups = [g for g in found.get("groups", []) if ours & set(g["cells"]) and theirs & set(g["cells"])]
    if not groups:
        return {}
    cells = {folder for group in groups for folder in group["cells"]}
    differences = [d for d in found["differences"] if d["folder"] in cells]
    return {"compared": len(cells), "groups": groups, "differences": differences}


def _judged(rows: Sequence[Effect]) -> list[Effect]:
    """Against a machine that is up to TOLERANCE faster or slower, not against none: p is that of what lies beyond it."""
    beyond = [replace(row.found, estimate=max(abs(row.found.estimate) - math.log1p(TOLERANCE), 0.0)) for row in rows]
    shifted = [replace(row, found=far if row.ratio else row.found) for row, far in zip(rows, beyond, strict=True)]
    return [replace(row, p=judged.p) for row, judged in zip(rows, adjusted(shifted), strict=True)]


def _groups(values: pd.Series) -> dict[str, np.ndarray]:
    """Name of the cell -> its repeats."""
    found: dict[str, list[float]] = {}
    frame = values.index.to_frame(index=False).drop(columns="repeat")
    for chosen, value in zip(frame.to_dict("records"), values.tolist(), strict=True):
        found.setdefault(name_of({str(k): str(v) for k, v in chosen.items()}), []).append(value)
    return {name: np.array(group) for name, group in found.items()}


def write_comparison(before: Path, after: Path, metrics: Sequence[str] = ()) -> tuple[Comparison, list[Path]]:
    """compare.md, compare.html and plots/compare.png in the second folder."""
    from core.report.plots import plot_comparison

    found = compare(before, after, metrics)
    drawn = plot_comparison(found.rows, counts)
    told: dict[str, Any] = {"c": found, "counts": counts, "tolerance": f"{TOLERANCE:.0%}"}
    image = base64.b64encode(drawn).decode() if drawn else ""
    paths = [put(after / "plots/compare.png", drawn)] if drawn else []
    for kind in ("md", "html"):
        paths.append(put(after / f"compare.{kind}", render(f"compare.{kind}.j2", **told, image=image)))
    return found, paths
