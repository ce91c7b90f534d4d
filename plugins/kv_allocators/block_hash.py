"""Prefix cache over chained block hashes with reference counts and lazy invalidation.

A block's content is the chain of all tokens up to its end. The hash (xxh64 over the parent's digest and the block's own
tokens) finds a candidate; a hit also compares own tokens and the identity of the parent, so that no collision can share.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import xxhash

from core.interfaces import HostContext, KVAllocator
from plugins.kv_allocators.eviction import LeastRecentlyOffered


class Content:
    """A chain of full blocks, one object per distinct chain: equal content is the same object."""

    __slots__ = ("__weakref__", "block", "digest", "parent", "tokens")

    def __init__(self, digest: int, tokens: bytes, parent: Content | None) -> None:
        self.digest, self.tokens, self.parent = digest, tokens, parent
        self.block = 0  # where it is found; 0: nowhere


def chain_hash(parent: int | None, tokens: bytes) -> int:
    """xxh64 over the parent's digest (8 little-endian bytes, none for a first block) and int32 token ids."""
    return xxhash.xxh64_intdigest((b"" if parent is None else parent.to_bytes(8, "little")) + tokens)


class BlockHash(KVAllocator):
    """Full blocks are shared by content; a freed block stays findable until its room is needed."""

    def __init__(self, settings: Any, context: HostContext, *, hash: Callable[[int | None, bytes], int] = chain_hash) -> None:
        super().__init__(settings, context)
        self.block_size, self.hash = context.block_size, hash
        self.blank = deque(range(1, context.num_blocks + 1))
        self.holders = [0] * (context.num_blocks + 1)
        self.content: dict[int, Content] = {}  # block -> what is found in it
        self.reusable = LeastRecentlyOffered()
        # Weak: a chain is known while a block or a live request's memo refers to it.
        self.known: WeakValueDictionary[int, Content] = WeakValueDictionary()

    def match(self, tokens: Sequence[int], keys: list[Any]) -> list[int]:
        found: list[int] = []
        for i in range(len(tokens) // self.block_size):
            block = self._chain(tokens, keys, i).block
            if not block:
                break
            found.append(block)
        return found

    def allocate(self, count: int, hits: Sequence[int] = ()) -> list[int] | None:
        idle = sum(not self.holders[block] for block in hits) if hits else 0
        if count > len(self.blank) + len(self.reusable) - idle:
            return None
        for block in hits:
            if not self.holders[block]:
                self.reusable.withdraw(block)
            self.holders[block] += 1
        blocks = list(hits)
        for _ in range(count):
            block = self.blank.popleft() if self.blank else self._take_over()
            self.holders[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, tokens: Sequence[int], blocks: Sequence[int], start: int, keys: list[Any]) -> Sequence[int]:
        named: list[int] = []
        for i in range(start, len(blocks)):
            content, own = self._chain(tokens, keys, i), blocks[i]
            if not content.block and own not in self.content:
                content.block = own
                self.content[own] = content
            named.append(content.block or own)
        return named

    def free(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if not block:
                continue
            assert self.holders[block] > 0, f"block {block} was freed more often than held"
            self.holders[block] -= 1
            if not self.holders[block]:
                self._idle(block)

    def forget(self, blocks: Iterable[int] | None = None) -> None:
        for block in list(self.content) if blocks is None else blocks:
            content = self.content.pop(block, None)
            if content is not None:
                content.block = 0
                if not self.holders[block]:
                    self.reusable.withdraw(block)
                    self.blank.append(block)

    def audit(self) -> tuple[int, int, int]:
        # Loops inside the interpreter's own functions: observers and benchmarks ask while the engine runs.
        holders, idle = self.holders, self.reusable._order
        assert [c.block for c in self.content.values()] == list(self.content), "a content is found elsewhere than it lies"
        assert min(holders) == 0, "a block was freed more often than held"
        assert not any(map(holders.__getitem__, idle)) and idle.keys() <= self.content.keys()
        assert not any(map(holders.__getitem__, self.blank)) and self.content.keys().isdisjoint(self.blank)
        assert not holders[0] and 0 not in self.content
        held = len(holders) - holders.count(0)
        return len(self.blank), len(self.reusable), held

    def idle(self) -> int:
        return len(self.blank) + len(self.reusable)

    def _idle(self, block: int) -> None:
        if block in self.content:
            self.reusable.offer(block)
        else:
            self.blank.append(block)

    def _take_over(self) -> int:
        block = self.reusable.pop()
        self.content.pop(block).block = 0
        return block

    def _chain(self, tokens: Sequence[int], keys: list[Any], i: int) -> Content:
        """The content of block i of `tokens`; `keys` remembers those before, so that a prompt is hashed once."""
        size = self.block_size
        while len(keys) <= i:
            at = len(keys) * size
            keys.append(self._intern(keys[-1] if keys else None, array("i", tokens[at : at + size]).tobytes()))
        return keys[i]

    def _intern(self, parent: Content | None, tokens: bytes) -> Content:
        digest = self.hash(None if parent is None else parent.digest, tokens)
        content = self.known.get(digest)
        while content is not None and (content.tokens != tokens or content.parent is not parent):
            digest = (digest + 1) % 2**64  # a collision: the next name is free or the right one
            content = self.known.get(digest)
        if content is None:
            content = self.known[digest] = Content(digest, tokens, parent)
        return content
