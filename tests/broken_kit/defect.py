"""What is known of a broken plugin: how it is declared, which tests of the kit must fail, and what they must say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.interfaces import Component, KVSettings, NoSettings

SUITES = {
    "scheduler": "SchedulerSuite",
    "kv_allocator": "AllocatorSuite",
    "attention": "AttentionSuite",
    "arch": "ArchSuite",
    "sampler": "SamplerSuite",
}


@dataclass(frozen=True)
class Defect:
    """One broken plugin."""

    target: type  # the class, which has one defect
    caught: tuple[str, ...]  # tests that must fail
    says: str  # a regular expression; the message of one of these tests matches it
    kind: str
    provides: Mapping[str, Any] = field(default_factory=dict)
    capabilities: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.target.__name__

    @property
    def title(self) -> str:
        """Of the test class."""
        return f"Test_{self.kind}_{self.name}"

    def component(self) -> Component:
        return Component(
            kind=self.kind,
            name=self.name.lower(),
            target=f"{self.target.__module__}:{self.name}",
            settings=KVSettings if self.kind == "kv_allocator" else NoSettings,
            summary=(self.target.__doc__ or "").splitlines()[0],
            provides=self.provides,
            capabilities=self.capabilities,
        )
