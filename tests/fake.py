"""The kit's fake engine with built-in schedulers and allocators by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.interfaces import HostContext, KVAllocator, KVSettings, Scheduler
from core.testing import fake
from core.testing.fake import FakeEngine
from plugins.kv_allocators.block_hash import BlockHash
from plugins.kv_allocators.paged import Paged
from plugins.schedulers.entry import FcfsSettings, MixedSettings
from plugins.schedulers.fcfs import Fcfs
from plugins.schedulers.mixed import Mixed

SCHEDULERS: dict[str, tuple[type[Scheduler], Any]] = {"fcfs": (Fcfs, FcfsSettings), "mixed": (Mixed, MixedSettings)}
ALLOCATORS: dict[str, type[KVAllocator]] = {"block_hash": BlockHash, "paged": Paged}
LIMITS = ("block_size", "blocks", "slots", "budget", "max_len", "overlap", "clock", "eos")


def make_engine(
    scheduler: str | type[Scheduler] = "fcfs",
    allocator: str | Callable[[Any, HostContext], KVAllocator] = "block_hash",
    **arguments: Any,
) -> FakeEngine:
    """Of `arguments`, what `core.testing.fake.make_engine` does not know are settings of the scheduler."""
    settings = {name: value for name, value in arguments.items() if name not in LIMITS}
    kv = ALLOCATORS[allocator] if isinstance(allocator, str) else allocator

    def policy(context: HostContext) -> Scheduler:
        if isinstance(scheduler, str):
            kind, kind_settings = SCHEDULERS[scheduler]
            return kind(kind_settings(**settings), context)
        return scheduler(None, context)

    limits = {name: value for name, value in arguments.items() if name in LIMITS}
    return fake.make_engine(policy, lambda context: kv(KVSettings(context.block_size), context), **limits)
