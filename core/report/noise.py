"""Differences and what noise may do to them. Nothing here knows what a sweep is.

A difference is estimated from groups of repeats, each with a weight: its standard error comes from how far the repeats of each
group scatter, its degrees of freedom from Satterthwaite's formula, its interval from Student's t. Many differences are looked
at together, so p values are adjusted (Holm): where nothing differs, in at most 5 of 100 such families is anything called a
difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from core.interfaces import Array

LEVEL = 0.05  # a family of differences that are none: how often one of them is called a difference
EXACT = 1e-9  # scatter and differences below this are rounding


@dataclass(frozen=True)
class Difference:
    """On the scale of the values: logarithms where these were taken."""

    estimate: float
    error: float | None = None  # standard error; None: there is no second repeat
    df: int = 0

    @property
    def p(self) -> float | None:
        """How often noise alone makes a difference as large as this, either way; None: nothing can be said."""
        if self.error is None:
            return None
        if self.error < EXACT:
            return float(abs(self.estimate) < EXACT)
        return beyond(abs(self.estimate) / self.error, self.df)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %, of this difference by itself."""
        if self.error is None:
            return None
        half = critical(LEVEL, self.df) * self.error if self.error >= EXACT else 0.0
        return self.estimate - half, self.estimate + half


def difference(groups: Sequence[Array], weights: Sequence[float]) -> Difference:
    """The weighted sum of the groups' means. Groups of one repeat add nothing to what is known of the noise, so a sum that
    holds one has no error."""
    estimate = sum(weight * float(np.mean(group)) for group, weight in zip(groups, weights, strict=True))
    if any(len(group) < 2 for group in groups):
        return Difference(estimate)
    parts = [weight**2 * float(np.var(group, ddof=1)) / len(group) for group, weight in zip(groups, weights, strict=True)]
    total = sum(parts)
    if math.sqrt(total) < EXACT:
        return Difference(estimate, 0.0, sum(len(group) - 1 for group in groups))
    df = total**2 / sum(part**2 / (len(group) - 1) for group, part in zip(groups, parts, strict=True))
    return Difference(estimate, math.sqrt(total), max(int(df + EXACT), 1))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Adjusted p values, in the given order; None stays."""
    order = sorted((p, at) for at, p in enumerate(values) if p is not None)
    found: list[float | None] = [None] * len(values)
    least = 0.0
    for rank, (p, at) in enumerate(order):
        least = max(least, min(p * (len(order) - rank), 1.0))
        found[at] = least
    return found


def beyond(t: float, df: int) -> float:
    """P(|T| > t) of Student's t with whole degrees of freedom: the finite series, Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = total = 0.0 if df == 1 else cosine if df % 2 else 1.0
    for k in range(2 + df % 2, df, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    inside = (angle + sine * total) * 2 / math.pi if df % 2 else sine * total
    return max(1.0 - inside, 0.0)


def critical(p: float, df: int) -> float:
    """t with beyond(t, df) = p."""
    low, high = 0.0, 1.0
    while beyond(high, df) > p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle, df) > p else (low, middle)
    return high


def median_interval(values: Sequence[float], wanted: float = 0.93) -> tuple[float, float, float]:
    """(low, high, how sure): the narrowest pair of values, equally far from both ends, that holds the median of all runs that
    could be made so surely; the smallest and the largest where these few values allow no more. Five: 0.94."""
    ordered = sorted(values)
    sure = [1 - 2 * sum(math.comb(len(ordered), i) for i in range(k + 1)) / 2 ** len(ordered) for k in range(len(ordered) // 2)]
    k = sum(1 for _, later in pairwise(sure) if later >= wanted)
    return ordered[k], ordered[-1 - k], sure[k] if sure else 0.0
