"""What all suites share: which component is tested, how it is built, and which values its capabilities accept."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from core.capabilities import AtLeast, MultipleOf, OneOf, unknown_keys
from core.interfaces import Component
from core.plugins import discover
from core.plugins.loading import load, missing


class Suite:
    """Base of the suites of all kinds. Subclass one of those, not this."""

    kind: ClassVar[str]
    name: ClassVar[str] = ""  # the option, as on the command line
    component: ClassVar[Component | None] = None  # instead of `name`: a declaration that is not installed
    settings: ClassVar[Mapping[str, Any]] = {}  # its settings where they are not the defaults
    examples: ClassVar[int] = 40  # runs of each state machine
    steps: ClassVar[int] = 30  # rules in a run
    seeds: ClassVar[int] = 3  # random workloads of each loop

    @classmethod
    def declared(cls) -> Component:
        """The component under test."""
        if cls.component is not None:
            return cls.component
        assert cls.name, f"{cls.__name__} must say which component it tests: name = ..."
        return discover().find(cls.kind, cls.name).component

    @classmethod
    def target(cls) -> type[Any]:
        """Its class. Skips where this machine lacks what the component requires."""
        component = cls.declared()
        if lacking := missing(component):
            pytest.skip(f"{cls.kind}={component.name} needs {', '.join(lacking)}; {component.install}".rstrip("; "))
        return load(component)

    @classmethod
    def new_settings(cls, **more: Any) -> Any:
        """A fresh settings object."""
        return cls.declared().settings(**{**cls.settings, **more})

    @classmethod
    def accepted(cls, key: str, candidates: Iterable[Any]) -> list[Any]:
        """Those of `candidates` that the component's capabilities accept; where none is, values that these name."""
        want = cls.declared().capabilities.get(key)
        if want is None:
            return list(candidates)
        named = (
            want.values if isinstance(want, OneOf) else (want.n, 2 * want.n) if isinstance(want, MultipleOf | AtLeast) else ()
        )
        fitting = [value for value in candidates if want.ok(value)]
        return fitting or [value for value in named if want.ok(value)]

    @classmethod
    def refused(cls, key: str, candidates: Iterable[Any]) -> list[Any]:
        """Those of `candidates` that its capabilities do not accept."""
        want = cls.declared().capabilities.get(key)
        return [] if want is None else [value for value in candidates if not want.ok(value)]

    def test_declaration(self) -> None:
        """One line that says what it is, defaults that build, capabilities on values that exist, and a class behind it."""
        component = self.declared()
        assert component.kind == self.kind, f"{component.kind}={component.name} is tested with the suite for {self.kind}"
        assert component.summary and "\n" not in component.summary, "summary: one line is wanted for --help and listings"
        component.settings()
        unknown = unknown_keys(component.capabilities)
        assert not unknown, f"capabilities on {', '.join(unknown)} would never be checked: there is no such value"
        self.target()


def seeded(*parts: Any) -> random.Random:
    """The same numbers in every run and process."""
    return random.Random(repr(parts))


def pick(rng: random.Random, values: Sequence[Any]) -> Any:
    return values[rng.randrange(len(values))]
