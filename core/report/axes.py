"""What the plots share: grids of small axes, logarithmic ones with few ticks, PNG. No pyplot: nothing global is touched."""

from __future__ import annotations

import io
import math
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

BLUE, GREY, GREEN, RED = "#2b6cb0", "#8a94a0", "#2f855a", "#c53030"
LINES = (BLUE, "#c05621", GREEN, "#6b46c1", GREY, "#97266d", "#2c7a7b", "#744210")
COLUMNS = 3
STEPS = ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))  # marks within a decade, from many to few


def png_of(figure: Figure) -> bytes:
    file = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def grid(count: int, height: float, columns: int = COLUMNS, lined: str = "x", **shared: Any) -> tuple[Figure, list[Any]]:
    """count axes, row by row; lined: the axis with grid lines."""
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(1.5 + 3.6 * columns, rows * height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis=lined, color="#e2e6ea")
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
    return figure, axes[:count]


def logarithmic(axis: Any, label: str, which: str = "x") -> None:
    """With few ticks, so that their labels have room."""
    getattr(axis, f"set_{which}scale")("log")
    limits = getattr(axis, f"get_{which}lim")()
    numbers = getattr(axis, f"{which}axis")
    numbers.set_major_locator(FixedLocator(ticks(*limits)))
    numbers.set_minor_locator(NullLocator())
    numbers.set_major_formatter(lambda value, _: label.format(value))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers in a logarithmic range: at most `most`, and two or more."""
    if high > 3 * low:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in STEPS:
            found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
            if 2 <= len(found) <= most:
                return found
        tens = [10.0**decade for decade in decades if low <= 10.0**decade <= high]
        return tens[:: -(-len(tens) // most)]
    return [float(value) for value in MaxNLocator(most - 1).tick_values(low, high) if low <= value <= high]
