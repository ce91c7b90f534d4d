"""When requests come, in seconds after the start of a run."""

from __future__ import annotations

import math
from random import Random

from core.loads.settings import LoadSettings


def arrivals(s: LoadSettings, count: int, rng: Random) -> list[float] | None:
    """Of `count` requests (or sessions), ascending; None where their time is not known before: at once, closed loop."""
    if s.arrival == "poisson":
        return _sums(rng.expovariate(s.rate) for _ in range(count))
    if s.arrival == "gamma":
        return _sums(rng.gammavariate(s.burstiness, 1 / (s.rate * s.burstiness)) for _ in range(count))
    if s.arrival == "ramp":
        return [_on_ramp(s, count, at) for at in _sums(rng.expovariate(1.0) for _ in range(count))]
    return None


def _sums(gaps) -> list[float]:
    total, times = 0.0, []
    for gap in gaps:
        total += gap
        times.append(total)
    return times


def _on_ramp(s: LoadSettings, count: int, events: float) -> float:
    """The time at which `events` requests are expected, where the rate grows evenly from `rate` to `rate_end` while `count`
    come: rate * t + slope * t**2 / 2 = events."""
    duration = 2 * count / (s.rate + s.rate_end)
    slope = (s.rate_end - s.rate) / duration
    if abs(slope) < 1e-12:
        return events / s.rate
    inside = s.rate**2 + 2 * slope * events
    last = duration + max(0.0, events - count) / s.rate_end  # beyond the ramp the rate stays
    return last if events > count or inside < 0 else (math.sqrt(inside) - s.rate) / slope
