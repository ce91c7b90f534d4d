"""The flat mapping `metrics` of bench.json: name -> value, unit, and the ends of a 95 % interval.

The value is the median over the runs. The interval is a bootstrap: runs are drawn with replacement and, where a metric has
percentiles, the requests within each of them (a request with all its gaps: gaps of one request are not independent). One run
says nothing about how runs differ: its numbers for a whole run have no interval (null).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from core.bench.measure import Run
from core.bench.values import Hardware, Pools, Slo, Values, distributions, scalars
from core.bench.walk import Walk
from core.interfaces import Array

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
RESAMPLES, LEVEL = 200, 95  # per cent


def flat_metrics(runs: Sequence[Run], walks: Sequence[Walk], slo: Slo, hardware: Hardware | None) -> dict[str, Any]:
    """Of all timed runs together. Deterministic: the resampling has a seed of its own."""
    found = of_pools([distributions(run) for run in runs])
    return found | of_values([scalars(run, walked, slo, hardware) for run, walked in zip(runs, walks, strict=True)])


def of_values(runs: Sequence[Values]) -> dict[str, Any]:
    """Numbers of whole runs."""
    rng, found = np.random.default_rng(0), {}
    for name, (_, unit) in runs[0].items():
        values = np.array([run[name][0] for run in runs if name in run], float)
        low = high = None
        if len(values) > 1:
            low, high = _ends(np.median(rng.choice(values, (1000, len(values))), axis=1))
        found[name] = {"value": float(np.median(values)), "unit": unit, "low": low, "high": high}
    return found


def of_pools(runs: Sequence[Pools]) -> dict[str, Any]:
    """name_p50, name_p90, name_p99 of each distribution that has a value in every run."""
    found: dict[str, Any] = {}
    for name, (_, unit) in runs[0].items():
        samples = [Sample(run[name][0]) for run in runs]
        if all(len(sample.values) for sample in samples):
            found |= _percentiles(name, unit, samples)
    return found


class Sample:
    """The values of one run, sorted, and whose each is."""

    def __init__(self, pools: Sequence[Sequence[float]]) -> None:
        values = np.array([value for pool in pools for value in pool], float)
        owners = np.repeat(np.arange(len(pools)), [len(pool) for pool in pools])
        order = np.argsort(values, kind="stable")
        self.values, self.owners, self.count = values[order], owners[order], len(pools)

    def quantiles(self) -> Array:
        """Linear between neighbours."""
        return np.quantile(self.values, list(QUANTILES.values()))

    def resampled(self, rng: np.random.Generator) -> Array | None:
        """Of as many requests, drawn with replacement; None if none of these has a value."""
        times = rng.multinomial(self.count, np.full(self.count, 1 / self.count))[self.owners]
        total = np.cumsum(times)
        if not total[-1]:
            return None
        return self.values[np.searchsorted(total, np.array(list(QUANTILES.values())) * total[-1])]


def _percentiles(name: str, unit: str, samples: Sequence[Sample]) -> dict[str, Any]:
    rng, drawn = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        picked = [samples[i].resampled(rng) for i in rng.integers(len(samples), size=len(samples))]
        if rows := [row for row in picked if row is not None]:
            drawn.append(np.median(rows, axis=0))
    seen, found = [sample.quantiles() for sample in samples], {}
    for at, quantile in enumerate(QUANTILES):
        value = statistics.median(float(row[at]) for row in seen)
        low, high = _ends(np.array([row[at] for row in drawn]))
        found[f"{name}_{quantile}"] = {"value": value, "unit": unit, "low": min(low, value), "high": max(high, value)}
    return found


def _ends(drawn: Array) -> tuple[float, float]:
    low, high = np.percentile(drawn, ((100 - LEVEL) / 2, (100 + LEVEL) / 2)).tolist()
    return low, high
