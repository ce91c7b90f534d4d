"""Declares the samplers. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from core.interfaces import Component, OneOf, hookimpl


@hookimpl
def inferlab_components() -> Iterable[Component]:
    """gumbel and greedy."""
    yield Component(
        kind="sampler",
        name="gumbel",
        target="plugins.samplers.gumbel:Gumbel",
        summary="temperature, top-k, top-p, min-p; counter-based noise from seed and position, so equal in any batch",
    )
    yield Component(
        kind="sampler",
        name="greedy",
        target="plugins.samplers.greedy:Greedy",
        summary="the likeliest token, always",
        capabilities={"sampling.temperature": OneOf(0)},
    )
