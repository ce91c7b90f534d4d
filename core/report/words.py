"""Numbers as people read them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.report.table import Metric


def number(value: float) -> str:
    """Three digits that mean something; whole numbers whole."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 100 or (size >= 1 and value == int(value)):
        return f"{value:,.0f}"
    return (
        f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}" if size >= 0.001 else f"{value:.2g}"
    )


def metric_value(value: float, metric: Metric) -> str:
    """With its unit."""
    return f"{number(value)} {metric.unit}".rstrip()


def change(share: float) -> str:
    """0.12 -> +12 %; large growth as a factor."""
    if share >= 2:
        return f"x {number(1 + share)}"
    percent = share * 100
    text = f"{percent:+.1f}" if abs(percent) < 10 else f"{percent:+.0f}"
    return f"{text} %" if float(text) else "0 %"


def moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def name_of(factors: dict[str, str]) -> str:
    """A cell, as it is spoken of."""
    return " ".join(f"{name}={value}" for name, value in factors.items()) or "the only cell"
