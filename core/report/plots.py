"""Plots as PNG, without pyplot: nothing global is touched."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from core.report.content import Content
from core.report.effects import Effect

BLUE, GREY, GREEN, RED = "#2b6cb0", "#8a94a0", "#2f855a", "#c53030"
MOST_CELLS, COLUMNS = 40, 3


def plots(content: Content) -> dict[str, tuple[str, bytes]]:
    """File name -> title, PNG. The compared metrics of each cell, and the effects with their intervals."""
    found = {}
    if any(cell.stats for cell in content.cells) and content.table.headlines:
        found["cells.png"] = ("Each cell: every repeat (dots) and the median (bar)", _cells(content))
    if rows := [e for e in content.effects if e.ratio and e.found.interval]:
        found["effects.png"] = ("Effects with 95 % intervals; grey: no difference beyond noise", _effects(rows))
    return found


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _grid(count: int, height: float) -> tuple[Figure, list[Any]]:
    columns = min(count, COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(1.5 + 3.6 * columns, rows * height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", color="#e2e6ea")
        axis.set_axisbelow(True)
    return figure, axes[:count]


def _cells(content: Content) -> bytes:
    cells = [cell for cell in content.cells if cell.stats][:MOST_CELLS]
    metrics = content.table.headlines
    figure, axes = _grid(len(metrics), 0.9 + 0.28 * len(cells))
    for axis, metric in zip(axes, metrics, strict=True):
        for at, cell in enumerate(cells):
            if stat := cell.stats.get(metric.name):
                colour = RED if cell.differences else BLUE
                axis.plot(stat.values, [at] * len(stat.values), "o", color=colour, alpha=0.45, markersize=5)
                axis.plot([stat.median], [at], "|", color=colour, markersize=15, markeredgewidth=2.5)
        low = min((min(c.stats[metric.name].values) for c in cells if metric.name in c.stats), default=0)
        high = max((max(c.stats[metric.name].values) for c in cells if metric.name in c.stats), default=0)
        if low > 0 and high > 8 * low:
            _logarithmic(axis, "{:,.6g}")
        elif low >= 0:
            axis.set_xlim(left=0)
        unit = f" ({metric.unit})" if metric.unit else ""
        axis.set_title(f"{metric.name}{unit}\n{metric.direction}", fontsize=9)
    axes[0].set_yticks(range(len(cells)), [" ".join(cell.factors.values()) or cell.name for cell in cells], fontsize=8)
    axes[0].set_ylim(len(cells) - 0.5, -0.5)
    return _png(figure)


def _effects(rows: list[Effect]) -> bytes:
    names = list(dict.fromkeys(_label(e) for e in rows))[:MOST_CELLS]
    metrics = list(dict.fromkeys(e.metric.name for e in rows))
    figure, axes = _grid(len(metrics), 0.9 + 0.3 * len(names))
    for axis, metric in zip(axes, metrics, strict=True):
        axis.axvline(1, color="black", linewidth=0.8)
        for effect in (e for e in rows if e.metric.name == metric and _label(e) in names):
            low, high = effect.found.interval or (0.0, 0.0)
            colour = {1: GREEN, -1: RED, 0: BLUE if effect.real else GREY}[effect.good]
            at = names.index(_label(effect))
            axis.plot([_times(low), _times(high)], [at, at], "-", color=colour, linewidth=2)
            axis.plot([_times(effect.found.estimate)], [at], "o", color=colour, markersize=6)
        _logarithmic(axis, "x{:.3g}")
        axis.set_title(metric, fontsize=9)
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    return _png(figure)


def _logarithmic(axis: Any, label: str) -> None:
    """With few ticks, so that their labels have room."""
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,) if high > 300 * low else (1, 3)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: label.format(value))
    axis.tick_params(axis="x", labelsize=8)


def _times(logarithm: float) -> float:
    return 2.718281828459045**logarithm


def _label(effect: Effect) -> str:
    return " and ".join(f"{f}: {a} → {b}" for f, (a, b) in zip(effect.factors, effect.change, strict=True))
