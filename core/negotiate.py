"""Capabilities as data: which values satisfy every chosen component, and all reasons where none does. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.capabilities import AtLeast, Constraint, MultipleOf, OneOf
from core.plugins import Found

SETTINGS = {"block_size": "kv_allocator.block_size", "head_size": "the model's head size"}  # else key and setting agree


@dataclass(frozen=True)
class Part:
    """A component under consideration, with what its probe replaced."""

    found: Found
    capabilities: Mapping[str, Constraint]

    @property
    def label(self) -> str:
        return f"{self.found.component.kind}={self.found.component.name}"


@dataclass(frozen=True)
class Fact:
    """A value that is not open to choice, and who says so."""

    value: Any
    source: str  # "from the command line", "of the model", ...


Alternatives = Callable[[Part, str, Any], list[str]]  # other options of the part's slot that accept this value


def negotiate(
    parts: Sequence[Part], facts: Mapping[str, Fact], defaults: Mapping[str, Any], alternatives: Alternatives
) -> tuple[dict[str, Any], list[str]]:
    """(values of `defaults`' keys that are not facts, reasons why this cannot run). Facts are never changed."""
    reasons = [
        refusal(part, key, constraint, facts[key], alternatives)
        for part in parts
        for key, constraint in part.capabilities.items()
        if key in facts and not constraint.ok(facts[key].value)
    ]
    values = {}
    for key in (k for k in defaults if k not in facts):
        bounds = [(part, part.capabilities[key]) for part in parts if key in part.capabilities]
        fitting = [v for v in _candidates(key, parts, bounds, defaults[key]) if all(c.ok(v) for _, c in bounds)]
        if fitting:
            values[key] = fitting[0]
        else:
            wants = ", ".join(f"{part.label} needs {show(constraint)}" for part, constraint in bounds)
            reasons.append(
                f"no value of {SETTINGS.get(key, key)} satisfies all: {wants}; choose another option for one of them"
            )
    return values, reasons


def _candidates(key: str, parts: Sequence[Part], bounds: list[tuple[Part, Constraint]], default: Any) -> list[Any]:
    """In order of preference: what components prefer, the core's default, then what the constraints themselves name."""
    preferred = [v for part in parts for v in part.found.component.prefers.get(key, ())]
    steps = [c.n for _, c in bounds if isinstance(c, MultipleOf)]
    named = [v for _, c in bounds if isinstance(c, OneOf) for v in c.values]
    least = [c.n for _, c in bounds if isinstance(c, AtLeast)]
    rounded = [math.lcm(*steps) * -(-n // math.lcm(*steps)) for n in least] if steps else []
    return [*preferred, default, *named, *([math.lcm(*steps)] if steps else []), *least, *rounded]


def refusal(part: Part, key: str, want: Constraint, got: Fact, alternatives: Alternatives) -> str:
    """Who wants what, what it is and why, and the way out."""
    setting = SETTINGS.get(key, key)
    ways = [f"{setting}=auto"] if key in ("block_size", "overlap", "graphs", "dtype") and "from the" in got.source else []
    ways += [f"{part.found.component.kind}={name}" for name in alternatives(part, key, got.value)]
    ways += [f"{setting}={show(want.values[0])}"] if key.startswith("sampling.") and isinstance(want, OneOf) else []
    out = f"; way out: {' or '.join(ways)}" if ways else ""
    return f"{part.label} needs {setting} to be {show(want)}, got {show(got.value)} ({got.source}){out}"


def show(value: Any) -> str:
    """True and False are words of the command line: on and off."""
    if isinstance(value, OneOf):
        return " or ".join(dict.fromkeys(map(show, value.values)))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
