"""The plots of a report: each cell, the main effects, and (core.report.lines) curves and interactions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from core.report.axes import BLUE, GREEN, GREY, RED, grid, logarithmic, png_of
from core.report.content import CellView, Content
from core.report.effects import Effect
from core.report.lines import line_plots, numeric

MOST_CELLS = 40


def plots(content: Content) -> dict[str, tuple[str, bytes]]:
    """File name -> title, PNG."""
    found = {}
    if any(cell.stats for cell in content.cells) and content.table.headlines:
        found["cells.png"] = ("Each cell: every repeat (dots) and the median (bar)", _cells(content))
    if rows := [e for e in content.mains if e.ratio and e.found.interval]:
        title = "Main effects with 95 % intervals (green: better, red: worse, grey: no difference beyond noise)"
        found["effects.png"] = (title, _effects(rows))
    return {**found, **line_plots(content.table)}


def _cells(content: Content) -> bytes:
    cells = [cell for cell in content.cells if cell.stats][:MOST_CELLS]
    metrics = content.table.headlines
    figure, axes = grid(len(metrics), 0.9 + 0.28 * len(cells), sharey=True)
    for axis, metric in zip(axes, metrics, strict=True):
        for at, cell in enumerate(cells):
            if stat := cell.stats.get(metric.name):
                colour = RED if cell.differences else BLUE
                axis.plot(stat.values, [at] * len(stat.values), "o", color=colour, alpha=0.45, markersize=5)
                axis.plot([stat.median], [at], "|", color=colour, markersize=15, markeredgewidth=2.5)
        low = min((min(c.stats[metric.name].values) for c in cells if metric.name in c.stats), default=0)
        high = max((max(c.stats[metric.name].values) for c in cells if metric.name in c.stats), default=0)
        if low > 0 and high > 8 * low:
            logarithmic(axis, "{:,.6g}")
        elif low >= 0:
            axis.set_xlim(left=0)
        axis.set_title(f"{metric.heading}\n{metric.direction}", fontsize=9)
    axes[0].set_yticks(range(len(cells)), [_short(cell) for cell in cells], fontsize=8)
    axes[0].set_ylim(len(cells) - 0.5, -0.5)
    return png_of(figure)


def _short(cell: CellView) -> str:
    """Its values; numbers with their name."""
    return " ".join(f"{f}={v}" if numeric(v) else v for f, v in cell.factors.items()) or cell.name


def _effects(rows: list[Effect]) -> bytes:
    return _intervals(rows, _label, lambda effect: effect.good if effect.real else None)


def _intervals(rows: Sequence[Effect], label: Callable[[Effect], str], verdict: Callable[[Effect], int | None]) -> bytes:
    """verdict: 1 better, -1 worse, 0 neither, None no difference."""
    names = list(dict.fromkeys(map(label, rows)))[:MOST_CELLS]
    metrics = list({e.metric.name: e.metric for e in rows}.values())
    figure, axes = grid(len(metrics), 0.9 + 0.3 * len(names), sharey=True)
    for axis, metric in zip(axes, metrics, strict=True):
        axis.axvline(1, color="black", linewidth=0.8)
        for effect in (e for e in rows if e.metric.name == metric.name and label(e) in names):
            low, high = effect.found.interval or (0.0, 0.0)
            colour, at = {1: GREEN, -1: RED, 0: BLUE, None: GREY}[verdict(effect)], names.index(label(effect))
            axis.plot([math.exp(low), math.exp(high)], [at, at], "-", color=colour, linewidth=2)
            axis.plot([math.exp(effect.found.estimate)], [at], "o", color=colour, markersize=6)
        logarithmic(axis, "x {:.4g}")
        axis.set_title(f"{metric.name}\n{metric.direction}", fontsize=9)
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    return png_of(figure)


def plot_comparison(rows: Sequence[Effect], counts: Callable[[Effect], bool]) -> bytes | None:
    """Of two sweeps: each cell's change as a ratio, with its interval; grey: it does not count."""
    shown = [row for row in rows if row.ratio and row.found.interval]
    if not shown:
        return None
    return _intervals(shown, lambda row: row.factors[0], lambda row: row.good if counts(row) else None)


def _label(effect: Effect) -> str:
    return " and ".join(f"{f}: {a} → {b}" for f, (a, b) in zip(effect.factors, effect.change, strict=True))
