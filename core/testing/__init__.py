"""Conformance suites for plugin authors: the contracts of `core.interfaces`, as tests (docs/testing.md).

Subclass the suite of a kind and name the component:

    from core.testing import SchedulerSuite

    class TestMine(SchedulerSuite):
        name = "mine"
        settings = {"longest_first": True}

or run the suites of everything that a plugin brings, with no code:

    pytest -p core.testing.plugin --pyargs core.testing --inferlab-plugin NAME

Needs pytest and hypothesis (`pip install 'inferlab[testing]'`). A suite is imported when it is asked for, so that the tests
of a scheduler do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from core.testing.allocator import AllocatorSuite
    from core.testing.arch import ArchSuite
    from core.testing.attention import AttentionSuite
    from core.testing.executor import ExecutorSuite
    from core.testing.packaging import PackagingSuite
    from core.testing.sampler import SamplerSuite
    from core.testing.scheduler import SchedulerSuite

__all__ = [
    "AllocatorSuite",
    "ArchSuite",
    "AttentionSuite",
    "ExecutorSuite",
    "PackagingSuite",
    "SamplerSuite",
    "SchedulerSuite",
]
SUITES = {name: f"core.testing.{name.removesuffix('Suite').lower()}" for name in __all__}
KINDS = {
    "scheduler": "SchedulerSuite",
    "kv_allocator": "AllocatorSuite",
    "attention": "AttentionSuite",
    "arch": "ArchSuite",
    "sampler": "SamplerSuite",
    "executor": "ExecutorSuite",
}
HELPERS = ("books", "dense", "fake", "life", "paged", "suite", "watch")
pytest.register_assert_rewrite(*SUITES.values(), *(f"core.testing.{name}" for name in HELPERS))


def __getattr__(name: str) -> Any:
    if name in SUITES:
        return getattr(import_module(SUITES[name]), name)
    raise AttributeError(f"core.testing has no {name}; it has {', '.join(__all__)}")
