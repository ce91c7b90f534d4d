"""Every hook that a plugin may implement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from core.interfaces import Component, Metric, RequestRecord, StepRecord, hookspec


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
    """Build a component. Implement it as a wrapper (hookimpl(wrapper=True)) to time or decorate what is built; it returns one.
    A wrapper that raises or returns none is named with its plugin, and ends the run."""


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
