"""What is measured of requests and steps, and what observers are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the engine's clock; counts of this request. Written by the engine."""

    arrival: float = 0.0
    first_token: float | None = None
    finish: float | None = None
    cached_tokens: int = 0  # prompt positions found in the cache at the first admission
    preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def latency(self) -> float | None:
        """End to end: ttft + tpot x (tokens - 1)."""
        return None if self.finish is None else self.finish - self.arrival

    def tpot(self, tokens: int) -> float | None:
        """Time per output token after the first of `tokens`; undefined for a single one."""
        if self.latency is None or self.ttft is None or tokens < 2:
            return None
        return (self.latency - self.ttft) / (tokens - 1)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One executed step, when its tokens are known on the host."""

    index: int
    now: float  # seconds on the engine's clock
    chunks: int
    tokens: int
    draws: int
    evictions: int
    waiting: int  # requests without a seat
    running: int
    free_blocks: int  # blank and reusable


@dataclass(frozen=True, slots=True)
class RequestRecord:
    id: int
    finish_reason: str
    num_prompt: int
    num_generated: int
    metrics: RequestMetrics
    labels: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    value: float
    unit: str
    doc: str = ""
