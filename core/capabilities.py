"""Constraints that components declare on values of the configuration, the model or the machine. Light: imports nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, init=False)
class OneOf:
    """The value is one of those listed."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)

    def ok(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return " or ".join(map(str, self.values))


@dataclass(frozen=True)
class MultipleOf:
    """A positive multiple of `n`."""

    n: int

    def ok(self, value: Any) -> bool:
        return isinstance(value, int) and value > 0 and value % self.n == 0

    def __str__(self) -> str:
        return f"a multiple of {self.n}"


@dataclass(frozen=True)
class AtLeast:
    """`n` or more."""

    n: int

    def ok(self, value: Any) -> bool:
        return isinstance(value, int) and value >= self.n

    def __str__(self) -> str:
        return f"at least {self.n}"


Constraint = OneOf | MultipleOf | AtLeast


@dataclass(frozen=True)
class Probe:
    """What the probe of a chosen component found on this machine."""

    provider: str = ""  # e.g. the package that does the work
    version: str = ""
    capabilities: dict[str, Constraint] | None = None  # replace the declared ones, key by key
    problem: str = ""  # why it cannot run here, with the way out; "" if it can
