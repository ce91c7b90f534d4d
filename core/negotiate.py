"""Capabilities as data: which values satisfy every chosen component, and all reasons where none does. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.capabilities import SLOTS, AtLeast, Constraint, Includes, MultipleOf, OneOf
from core.plugins import Found

SETTINGS = {  # else key and setting agree
    "block_size": "kv_allocator.block_size",
    "head_size": "the model's head size",
    "load.labels": "the labels of the load",
}


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

    @property
    def given(self) -> bool:
        """By the user or a preset, so that it can be left out."""
        return self.source.startswith("from the ")


Ways = Callable[[Part, str, Constraint, Fact], list[str]]  # other choices under which this refusal would not stand


def negotiate(
    parts: Sequence[Part], facts: Mapping[str, Fact], defaults: Mapping[str, Any], ways: Ways
) -> tuple[dict[str, Any], list[str]]:
    """(values of `defaults`' keys that are not facts, reasons why this cannot run). Facts are never changed."""
    reasons = []
    for part in parts:
        for key, want in part.capabilities.items():
            if (got := facts.get(key)) is not None and not want.ok(got.value):
                out = [*_settings(parts, key, want, got, defaults), *ways(part, key, want, got)]
                reasons.append(refusal(part, key, want, got, out))
    values = {}
    for key in (k for k in defaults if k not in facts):
        if fitting := _fitting(parts, key, defaults[key]):
            values[key] = fitting[0]
        else:
            wants = ", ".join(f"{part.label} needs {show(constraint)}" for part, constraint in _bounds(parts, key))
            reasons.append(f"no value of {name_of(key)} satisfies all: {wants}; choose another option for one of them")
    return values, reasons


def _bounds(parts: Sequence[Part], key: str) -> list[tuple[Part, Constraint]]:
    return [(part, part.capabilities[key]) for part in parts if key in part.capabilities]


def _fitting(parts: Sequence[Part], key: str, default: Any) -> list[Any]:
    """Values that everybody accepts, in order: what components prefer, the default, then what the constraints name."""
    constraints = [constraint for _, constraint in _bounds(parts, key)]
    preferred = [v for part in parts for v in part.found.component.prefers.get(key, ())]
    steps = [c.n for c in constraints if isinstance(c, MultipleOf)]
    named = [v for c in constraints if isinstance(c, OneOf) for v in c.values]
    least = [c.n for c in constraints if isinstance(c, AtLeast)]
    rounded = [math.lcm(*steps) * -(-n // math.lcm(*steps)) for n in least] if steps else []
    candidates = [*preferred, default, *named, *([math.lcm(*steps)] if steps else []), *least, *rounded]
    return [v for v in candidates if all(c.ok(v) for c in constraints)]


def _settings(parts: Sequence[Part], key: str, want: Constraint, got: Fact, defaults: Mapping[str, Any]) -> list[str]:
    """What the same setting could be instead."""
    setting = SETTINGS.get(key, key)
    if key in defaults and got.given and _fitting(parts, key, defaults[key]):
        return [f"{setting}=auto"]
    value = want.values[0] if isinstance(want, OneOf) else getattr(want, "n", None)
    settable = key == "dtype" or (got.given and "." not in key) or key.startswith("sampling.")
    return [f"{setting}={show(value)}"] if settable and key not in (*SLOTS, *defaults, "device", "head_size") else []


def refusal(part: Part, key: str, want: Constraint, got: Fact, ways: Sequence[str]) -> str:
    """Who wants what, what it is and why, and the way out."""
    owner = key.partition(".")[0]
    last = (
        "another model"
        if key == "head_size" or owner == "model"
        else f"install a plugin with another {part.found.component.kind}"
    )
    out = f"; way out: {' or '.join(dict.fromkeys(ways)) or last}"
    wish = f"include {' and '.join(map(str, want.values))}" if isinstance(want, Includes) else f"be {show(want)}"
    return f"{part.label} needs {name_of(key)} to {wish}, got {show(got.value)} ({got.source}){out}"


def name_of(key: str) -> str:
    """What a capability is about, in words."""
    owner, _, name = key.partition(".")
    if name and owner in SLOTS:
        return f"{name} of the {owner}"
    return f"the model's {name}" if owner == "model" and name else SETTINGS.get(key, key)


def show(value: Any) -> str:
    """True and False are words of the command line: on and off."""
    if isinstance(value, OneOf):
        return " or ".join(dict.fromkeys(map(show, value.values)))
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(show, value)) or "none"
    return {True: "on", False: "off", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)
