"""Paged KV blocks without sharing (Kwon et al., 2023, section 4): a free list and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from core.interfaces import HostContext, KVAllocator


class Paged(KVAllocator):
    """Every block has one holder; no content is ever found again."""

    def __init__(self, settings: Any, context: HostContext) -> None:
        super().__init__(settings, context)
        self.blank = deque(range(1, context.num_blocks + 1))
        self.held: set[int] = set()

    def match(self, tokens: Sequence[int], keys: list[Any]) -> list[int]:
        return []

    def allocate(self, count: int, hits: Sequence[int] = ()) -> list[int] | None:
        assert not hits, "this allocator never answers a match"
        if count > len(self.blank):
            return None
        blocks = [self.blank.popleft() for _ in range(count)]
        self.held.update(blocks)
        return blocks

    def publish(self, tokens: Sequence[int], blocks: Sequence[int], start: int, keys: list[Any]) -> Sequence[int]:
        return blocks[start:]

    def free(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block:
                self.held.remove(block)
                self.blank.append(block)

    def audit(self) -> tuple[int, int, int]:
        assert self.held.isdisjoint(self.blank) and 0 not in self.held and 0 not in self.blank
        return len(self.blank), 0, len(self.held)

    def idle(self) -> int:
        return len(self.blank)
