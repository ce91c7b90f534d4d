"""What changing one factor does, all else equal: pairs of runs of the same repeat that differ in that factor alone.

The main effect of a factor is the mean of these differences over all combinations of the other factors; an interaction is how
much the effect of one factor differs between two values of another. Values that are all positive are compared as ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from core.interfaces import Array
from core.report.noise import EXACT, LEVEL, Difference, difference, holm
from core.report.table import Metric, Table
from core.report.words import change, metric_value

FAR = 10.0
TINY = 0.01  # share; a difference that is real but smaller is said to be so


@dataclass(frozen=True)
class Effect:
    """One difference with its verdict. factors: one, or two for an interaction; change: (from, to) of each."""

    metric: Metric
    factors: tuple[str, ...]
    change: tuple[tuple[str, str], ...]
    ratio: bool  # the difference is one of logarithms
    found: Difference
    combinations: int
    p: float | None = None  # adjusted for all effects of the report

    @property
    def exact(self) -> bool:
        """Repeats do not scatter at all, as counts do."""
        return self.found.error is not None and self.found.error < EXACT

    @property
    def real(self) -> bool:
        """Beyond noise."""
        return self.p is not None and self.p < LEVEL

    @property
    def share(self) -> float | None:
        """Of the value before; None where values are not compared as ratios."""
        return math.expm1(self.found.estimate) if self.ratio else None

    @property
    def tiny(self) -> bool:
        return self.share is not None and abs(self.share) < TINY

    @property
    def good(self) -> int:
        """1: beyond noise and for the better, -1: for the worse."""
        return int(math.copysign(self.metric.better, self.metric.better * self.found.estimate)) if self.real else 0

    @property
    def size(self) -> str:
        """In words: a share, or a number with its unit."""
        return self._say(self.found.estimate)

    @property
    def interval(self) -> str:
        ends = self.found.interval
        return "" if ends is None else f"{self._say(ends[0])} to {self._say(ends[1])}"

    @property
    def verdict(self) -> str:
        if self.p is None:
            return "one repeat: noise unknown"
        if not self.real:
            return "no difference beyond noise"
        return "beyond noise, but tiny" if self.tiny else {1: "better", -1: "worse", 0: "beyond noise"}[self.good]

    def _say(self, value: float) -> str:
        return change(math.expm1(value)) if self.ratio else f"{'+' if value > 0 else ''}{metric_value(value, self.metric)}"


def effects(table: Table) -> list[Effect]:
    """Main effects, then interactions, for each of the compared metrics, with verdicts on all of them together."""
    found = []
    for metric in table.headlines:
        values, ratio = series(table, metric)
        found += [_effect(metric, ratio, values, *what) for what in [*_mains(table), *_interactions(table)]]
    kept = [effect for effect in found if effect is not None]
    return adjusted(kept)


def adjusted(found: Sequence[Effect]) -> list[Effect]:
    """With p values for all of them together; those without noise are certain and do not count."""
    values = holm([None if effect.exact else effect.found.p for effect in found])
    return [replace(effect, p=effect.found.p if effect.exact else p) for effect, p in zip(found, values, strict=True)]


def series(table: Table, metric: Metric) -> tuple[pd.Series, bool]:
    """(factors, repeat) -> value of the runs that are ok; whether these are logarithms. Outliers are left out."""
    scaled, ratio = _scaled(table, metric)
    return scaled.loc[~outlying(scaled)], ratio


def outliers(table: Table, metric: Metric) -> list[str]:
    """The runs that the verdicts leave out, in words."""
    scaled, _ = _scaled(table, metric)
    frame = scaled.loc[outlying(scaled)].index.to_frame(index=False)
    return [" ".join(f"{name}={row[name]}" for name in frame.columns) for row in frame.to_dict("records")]


def _scaled(table: Table, metric: Metric) -> tuple[pd.Series, bool]:
    frame = table.ok[[*table.factors, "repeat", metric.name]].dropna()
    values = frame.groupby([*table.factors, "repeat"], sort=False)[metric.name].median()
    ratio = bool(len(values)) and bool((values > 0).all())
    return pd.Series(np.log(values.to_numpy()) if ratio else values.to_numpy(), index=values.index), ratio


def outlying(values: pd.Series) -> Array:
    """Repeats that are so far from the median of their cell that they belong to something else: a machine that was busy, a cold
    disk. One such run would drown every difference. Far: by FAR times the typical distance from the median, of all cells or of
    this one, whichever is larger; cells of fewer than four repeats have none."""
    frame = values.index.to_frame(index=False).drop(columns="repeat")
    cells = (
        frame.groupby(list(frame.columns), sort=False).ngroup().to_numpy() if len(frame.columns) else np.zeros(len(frame), int)
    )
    numbers = values.to_numpy(dtype=float)
    of_cell = [cells == cell for cell in range(cells.max(initial=-1) + 1)]
    away, typical, size = np.zeros(len(numbers)), np.zeros(len(numbers)), np.zeros(len(numbers))
    for mine in of_cell:
        away[mine] = np.abs(numbers[mine] - np.median(numbers[mine]))
        typical[mine], size[mine] = np.median(away[mine]), mine.sum()
    typical = np.maximum(typical, np.median(away)) if len(away) else typical
    return (away > FAR * typical + EXACT) & (size >= 4)


Steps = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]  # factors, (from, to) of each


def _mains(table: Table) -> list[Steps]:
    """Every value against the first of its factor."""
    return [((f,), ((values[0], other),)) for f, values in table.sweep.factors.items() for other in values[1:]]


def _interactions(table: Table) -> list[Steps]:
    return [
        ((f, g), ((a[0], b), (c[0], d)))
        for (f, a), (g, c) in combinations(table.sweep.factors.items(), 2)
        for b in a[1:]
        for d in c[1:]
    ]


def _effect(
    metric: Metric, ratio: bool, values: pd.Series, factors: tuple[str, ...], steps: tuple[tuple[str, str], ...]
) -> Effect | None:
    groups = _pairs(values, factors, steps)
    several = [group for group in groups if len(group) > 1]
    groups = several or groups  # a single pair says nothing about its noise
    if not groups:
        return None
    found = difference(groups, [1 / len(groups)] * len(groups))
    return Effect(metric, factors, steps, ratio, found, len(groups))


def _pairs(values: pd.Series, factors: tuple[str, ...], steps: tuple[tuple[str, str], ...]) -> list[Array]:
    """For each combination of the other factors: the differences, one for each repeat."""
    if values.empty:
        return []
    wide = values.unstack(list(factors))
    total: pd.Series | float = 0.0
    for corner in range(2 ** len(steps)):
        ends = [(corner >> at) & 1 for at in range(len(steps))]
        key = [step[end] for step, end in zip(steps, ends, strict=True)]
        column: Any = tuple(key) if len(key) > 1 else key[0]
        if column not in wide.columns:
            return []
        total = total + (-1) ** (len(steps) - sum(ends)) * wide[column]
    assert isinstance(total, pd.Series)
    left = total.dropna()
    others = [name for name in left.index.names if name != "repeat"]
    return [g.to_numpy() for _, g in left.groupby(others, sort=False)] if others else [left.to_numpy()] if len(left) else []
