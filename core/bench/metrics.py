"""Definitions of the latencies, on the times at which tokens were received."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Received:
    """Output events of one request: when it was sent, and when how many tokens came. Seconds on one clock."""

    sent: float
    events: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.events)

    @property
    def ttft(self) -> float:
        """Time to first token: first one received - request sent."""
        return self.events[0][0] - self.sent

    @property
    def e2e(self) -> float:
        """End to end: last token received - request sent."""
        return self.events[-1][0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; not defined for a single one."""
        return (self.e2e - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def normalised(self) -> float:
        """Normalised latency: end to end, per output token."""
        return self.e2e / self.tokens

    @property
    def gaps(self) -> list[float]:
        """Between output events."""
        return [b - a for (a, _), (b, _) in zip(self.events, self.events[1:], strict=False)]


def latencies(requests: Sequence[Received]) -> dict[str, Any]:
    """TTFT, TPOT and E2E: one number per request; ITL: the gaps of all requests pooled. Seconds."""
    return {
        "ttft_s": percentiles(r.ttft for r in requests),
        "tpot_s": percentiles(r.tpot for r in requests if r.tpot is not None),
        "itl_s": percentiles(gap for r in requests for gap in r.gaps),
        "e2e_s": percentiles(r.e2e for r in requests),
    }


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """mean, p50, p90, p99 (linear between neighbours); None where there is no value."""
    numbers = list(values)
    if not numbers:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(numbers, (50, 90, 99)).tolist()
    return {"mean": statistics.fmean(numbers), "p50": p50, "p90": p90, "p99": p99}


def medians(records: Sequence[Any]) -> Any:
    """One record like the given ones, each number the median of theirs; what is no number stays if all agree."""
    first = records[0]
    if isinstance(first, dict):
        return {key: medians([record[key] for record in records]) for key in first}
    if any(isinstance(r, bool) or not isinstance(r, int | float) for r in records):
        return first if all(r == first for r in records) else None
    return statistics.median(records)
