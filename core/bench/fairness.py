"""How evenly clients are served."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from core.interfaces import Array


def service_gap(service: Array, queued: Array) -> float:
    """The largest difference, between two clients, of what they were served in any time in which both had work waiting.

    service [steps + 1, clients]: served so far; queued [steps, clients]: had a request without a seat when the step began.
    """
    widest = 0.0
    for a, b in combinations(range(service.shape[1]), 2):
        lead = service[:, a] - service[:, b]
        both = np.flatnonzero(queued[:, a] & queued[:, b])
        for period in np.split(both, np.flatnonzero(np.diff(both) > 1) + 1):
            if len(period):
                inside = lead[period[0] : period[-1] + 2]
                widest = max(widest, float(inside.max() - inside.min()))
    return widest


def jain(rates: Sequence[float]) -> float | None:
    """1: all equal; 1 / n: one has everything. None where nobody has anything."""
    squares = sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / (len(rates) * squares) if squares else None
