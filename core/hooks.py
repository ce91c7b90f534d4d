"""Every hook that a plugin may implement, and what observers are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from core.interfaces import Component, RequestMetrics, hookspec


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


@hookspec
def inferlab_components() -> Iterable[Component]:
    """The options that this plugin adds. Called once per plugin, so that a failure has a name."""
    return ()


@hookspec
def inferlab_presets() -> list[str]:
    """Packages with YAML presets, e.g. ["acme.conf"]; keep them light, they are imported at every start."""
    return []


@hookspec(firstresult=True)
def inferlab_build(kind: str, component: Component, settings: Any, context: Any) -> Any:
    """Build a component. Implement it as a wrapper (hookimpl(wrapper=True)) to time or decorate what is built."""


@hookspec
def inferlab_step(record: StepRecord) -> None:
    """After each step. A raising observer is named and switched off; the run goes on."""


@hookspec
def inferlab_request_finished(record: RequestRecord) -> None:
    """After each request; as `inferlab_step`."""


@hookspec
def inferlab_metrics(result: Mapping[str, Any]) -> dict[str, Metric]:
    """Additional numbers for result.json and reports."""
    return {}
