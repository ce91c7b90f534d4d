"""A prefix cache that gives up the least used first: blocks that many requests shared outlive those that one request left.

A full block is known by a digest of all tokens up to its end. Each block is blank (no content), idle (nobody holds it, its
content can still be found) or held.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from core.interfaces import Component, HostContext, KVAllocator, KVSettings, hookimpl, setting


@dataclass
class Settings(KVSettings):
    """Given as kv_allocator.NAME=VALUE; block_size is inherited."""

    memory: int = setting(8, "uses of a block that are counted at most; 0: the longest unused block goes first", "uses")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory < 0:
            raise ValueError(f"kv_allocator.memory must be >= 0, got {self.memory}")


class MyPluginAllocator(KVAllocator):
    """Ids 1 .. num_blocks; id 0 is the core's."""

    def __init__(self, settings: Settings, context: HostContext) -> None:
        super().__init__(settings, context)
        self.size = context.block_size
        self.blank = list(range(context.num_blocks, 0, -1))
        self.holders = [0] * (context.num_blocks + 1)
        self.found: dict[bytes, int] = {}  # digest -> the block that has this content
        self.digest: dict[int, bytes] = {}  # the same, the other way round
        self.uses = [0] * (context.num_blocks + 1)  # how often the block's content was held
        self.unused: dict[int, int] = {}  # block -> when its last holder gave it back
        self.queue: list[tuple[int, int, int]] = []  # heap of (uses, when, block); an entry whose `when` is old is void
        self.time = 0

    def match(self, tokens: Sequence[int], keys: list[Any]) -> list[int]:
        blocks: list[int] = []
        for digest in self._digests(tokens, keys):
            if digest not in self.found:
                break
            blocks.append(self.found[digest])
        return blocks

    def allocate(self, count: int, hits: Sequence[int] = ()) -> list[int] | None:
        if count > len(self.blank) + len(self.unused) - sum(block in self.unused for block in hits):
            return None
        for block in hits:
            self.unused.pop(block, None)
        fresh = [self.blank.pop() if self.blank else self._reclaim() for _ in range(count)]
        blocks = [*hits, *fresh]
        for block in blocks:
            self.holders[block] += 1
            self.uses[block] += 1
        return blocks

    def publish(self, tokens: Sequence[int], blocks: Sequence[int], start: int, keys: list[Any]) -> Sequence[int]:
        digests = list(self._digests(tokens[: len(blocks) * self.size], keys))
        for digest, block in zip(digests[start:], blocks[start:], strict=True):
            if digest not in self.found and block not in self.digest:
                self.found[digest], self.digest[block] = block, digest
        return [self.found.get(digest, block) for digest, block in zip(digests[start:], blocks[start:], strict=True)]

    def free(self, blocks: Sequence[int]) -> None:
        for block in filter(None, reversed(blocks)):  # tails first: a prefix is worth more than what follows it
            self.holders[block] -= 1
            if not self.holders[block]:
                self._release(block)

    def forget(self, blocks: Iterable[int] | None = None) -> None:
        for block in list(self.digest) if blocks is None else blocks:
            self._drop(block)
            if self.unused.pop(block, None) is not None:
                self.blank.append(block)

    def audit(self) -> tuple[int, int, int]:
        assert all(self.digest[block] == digest for digest, block in self.found.items())
        assert all(block in self.digest and not self.holders[block] for block in self.unused)
        return len(self.blank), len(self.unused), sum(count > 0 for count in self.holders)

    def _release(self, block: int) -> None:
        if block not in self.digest:
            self.uses[block] = 0
            self.blank.append(block)
            return
        self.time += 1
        self.unused[block] = self.time
        heapq.heappush(self.queue, (min(self.uses[block], self.settings.memory), self.time, block))
        if len(self.queue) > 4 * len(self.holders):  # mostly void entries, of blocks that were held again
            self.queue = [entry for entry in self.queue if self.unused.get(entry[2]) == entry[1]]
            heapq.heapify(self.queue)

    def _reclaim(self) -> int:
        """The idle block that was used least, of these the one that is idle longest; its content is lost."""
        while True:
            _, when, block = heapq.heappop(self.queue)
            if self.unused.get(block) == when:
                del self.unused[block]
                self._drop(block)
                return block

    def _drop(self, block: int) -> None:
        self.uses[block] = self.holders[block]
        if block in self.digest:
            del self.found[self.digest.pop(block)]

    def _digests(self, tokens: Sequence[int], keys: list[Any]) -> Iterator[bytes]:
        """One per full block of `tokens`. `keys` belongs to the request and remembers them, so no prompt is hashed twice."""
        for i in range(len(tokens) // self.size):
            if i == len(keys):
                own = array("i", tokens[i * self.size : (i + 1) * self.size]).tobytes()
                keys.append(blake2b((keys[-1] if keys else b"") + own, digest_size=16).digest())
            yield keys[i]


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="kv_allocator",
        name="my-plugin",
        target="my_plugin:MyPluginAllocator",
        settings=Settings,
        summary="prefix cache that gives up the least used block first",
        provides={"prefix_cache": True},
        api=(1, 0),
    )
