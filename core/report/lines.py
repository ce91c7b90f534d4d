"""Plots with lines: a metric over the values of a numeric factor, and two factors together (interactions)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from core.report.axes import LINES, grid, logarithmic, png_of
from core.report.effects import series
from core.report.table import Metric, Table

ENOUGH = 3  # numeric values that make a curve
MOST_PAIRS = 10
Row = tuple[str, str | None]  # factor along x, factor that makes the lines


def numeric(value: str) -> bool:
    try:
        return np.isfinite(float(value))
    except ValueError:
        return False


def line_plots(table: Table) -> dict[str, tuple[str, bytes]]:
    """File name -> title, PNG. Means over repeats and over all other factors; of logarithms where all values are positive."""
    curves, pairs = plotted(table)
    found = {}
    if curves and table.headlines:
        title = "Over the values of a numeric factor (all repeats as dots, lines through their means)"
        found["curves.png"] = (title, _plot(table, curves))
    if pairs and table.headlines:
        title = "Two factors together: where lines are parallel, the effect of one does not depend on the other"
        found["interactions.png"] = (title, _plot(table, pairs))
    return found


def plotted(table: Table) -> tuple[list[Row], list[Row]]:
    """Curves of the numeric factors (one for each other factor), and the pairs that are left."""
    asked = {f: values for f, values in table.sweep.factors.items() if len(values) > 1}
    curved = [f for f, values in asked.items() if len(values) >= ENOUGH and all(map(numeric, values))]
    curves: list[Row] = [(f, g) for f in curved for g in [h for h in asked if h != f] or [None]]
    return curves, [pair for pair in combinations(asked, 2) if not set(pair) & set(curved)]


def _plot(table: Table, rows: Sequence[Row]) -> bytes:
    """A column for each metric."""
    rows, metrics = rows[:MOST_PAIRS], table.headlines
    figure, axes = grid(len(rows) * len(metrics), 2.4, columns=len(metrics), lined="y", sharey="col")
    figure.set_size_inches(1.5 + 2.6 * len(metrics), 2.6 * len(rows))
    for at, axis in enumerate(axes):
        (along, split), metric = rows[at // len(metrics)], metrics[at % len(metrics)]
        _panel(axis, table, along, split, metric)
        if at < len(metrics):
            axis.set_title(f"{metric.heading}\n{metric.direction}", fontsize=9)
        if split and at % len(metrics) == len(metrics) - 1:
            place = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
            axis.legend(title=split, fontsize=8, title_fontsize=8, frameon=False, **place)
    for axis, metric in zip(axes, metrics, strict=False):  # the y axis of a column is shared
        if series(table, metric)[1]:
            low, high = axis.get_ylim()
            axis.set_ylim(max(low, high / 1e6), max(high, 1.3 * low))
            logarithmic(axis, "{:,.6g}", "y")
    return png_of(figure)


def _panel(axis: Any, table: Table, along: str, split: str | None, metric: Metric) -> None:
    values: Any
    values, ratio = series(table, metric)
    asked = table.sweep.factors
    curve = len(asked[along]) >= ENOUGH and all(map(numeric, asked[along]))
    places = {value: float(value) if curve else float(at) for at, value in enumerate(asked[along])}
    for at, of in enumerate(asked[split] if split else [None]):
        mine = values if of is None else values[values.index.get_level_values(str(split)) == of]
        shown = {x: float(np.exp(y)) if ratio else y for x, y in means(mine, along, places).items()}
        colour = LINES[at % len(LINES)]
        axis.plot(list(shown), list(shown.values()), "o-", color=colour, label=of, markersize=5)
        if curve:
            xs = [places[str(value)] for value in mine.index.get_level_values(along)]
            axis.plot(xs, np.exp(mine) if ratio else mine, ".", color=colour, alpha=0.3)
    axis.set_xlabel(along, fontsize=8)
    if not curve:
        axis.set_xticks(list(places.values()), list(places), fontsize=8)
        axis.set_xlim(-0.4, len(places) - 0.6)
    elif min(places.values()) > 0 and max(places.values()) > 8 * min(places.values()):
        logarithmic(axis, "{:,.6g}")
    if ratio:
        axis.set_yscale("log")


def means(values: Any, along: str, places: Mapping[str, float]) -> dict[float, float]:
    """Each combination of the other factors counts once, however many repeats are left of it."""
    levels = [name for name in values.index.names if name != "repeat"]
    cells = values.groupby(level=levels).mean()
    means = cells.groupby(level=along).mean() if len(levels) > 1 else cells
    return {x: float(means[value]) for value, x in sorted(places.items(), key=lambda item: item[1]) if value in means.index}
