"""Declares sampler=repetition and the parameter that a request may give. Light: no torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from core.interfaces import Component, OneOf, hookimpl, setting


@dataclass
class RequestSettings:
    """What a request may say beyond the common parameters: SamplingParams(repetition_penalty=1.3)."""

    repetition_penalty: float = setting(1.0, "> 1 makes tokens that the text holds already less likely, < 1 more; 1 is off")

    def __post_init__(self) -> None:
        value = self.repetition_penalty
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"repetition_penalty must be a finite number > 0 (1: off), got {value!r}")


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="sampler",
        name="repetition",
        target="repetition.sampler:Repetition",
        request_settings=RequestSettings,
        summary="temperature, top-k, top-p, min-p, and a penalty on what prompt and answer hold already",
        capabilities={"graphs": OneOf(False), "tensor_parallel_size": OneOf(1)},
        provides={"wants_history": True},
    )
