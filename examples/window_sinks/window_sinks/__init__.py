"""Declares attention=window_sinks. Light: the backend, which needs torch, is in window_sinks.backend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.interfaces import Component, OneOf, hookimpl, setting


@dataclass
class Settings:
    """Position p sees the last `window` positions up to p, and the first `sinks` of the text."""

    window: int = setting(1024, "the last ones that a query sees, its own included", "positions")
    sinks: int = setting(4, "leading ones that stay visible; 0: none", "positions")

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"attention.window must be a whole number >= 1, got {self.window}")
        if self.sinks < 0:
            raise ValueError(f"attention.sinks must be a whole number >= 0, got {self.sinks}")


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="attention",
        name="window_sinks",
        target="window_sinks.backend:WindowSinks",
        settings=Settings,
        summary="sliding window plus the first positions (attention sinks): what a step reads does not grow with the text",
        capabilities={"graphs": OneOf(False), "dtype": OneOf("float32", "bfloat16", "float16")},
        prefers={"block_size": (16,)},
    )
