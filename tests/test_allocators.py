"""KV allocators: sharing, collisions, reuse, and a state machine that keeps its own books."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.interfaces import HostContext, KVAllocator, KVSettings, Limits
from core.testing.fake import VirtualClock
from plugins.kv_allocators.block_hash import BlockHash
from tests.fake import ALLOCATORS

BLOCK = 3


def context(blocks: int, block_size: int = BLOCK) -> HostContext:
    return HostContext(Limits(4, 64, 64), block_size, blocks, VirtualClock())


def hold(kv: KVAllocator, tokens: list[int]) -> list[int] | None:
    """As the builder does: match all but the last token, allocate, publish."""
    keys: list[Any] = []
    hits = kv.match(tokens[:-1], keys)
    blocks = kv.allocate(-(-len(tokens) // BLOCK) - len(hits), hits)
    if blocks is not None:
        kv.publish(tokens, blocks[: len(tokens) // BLOCK], len(hits), keys)
    return blocks


@pytest.mark.parametrize(("length", "hits"), [(4, 0), (7, 1), (8, 1), (9, 2)])
def test_hits_leave_one_token_to_compute(length: int, hits: int) -> None:
    """B01, block 4: floor((n - 1) / block) blocks are hits; the last block of a wholly cached prompt is computed again."""
    kv = BlockHash(KVSettings(4), context(8, 4))
    tokens, keys = list(range(length)), []
    blocks = kv.allocate(-(-length // 4))
    assert blocks is not None
    kv.publish(tokens, blocks[: length // 4], 0, keys)
    kv.free(blocks)
    assert kv.match(tokens[:-1], []) == blocks[:hits]
    more = [*tokens, 1, 2, 3, 4]
    assert kv.match(more, []) == blocks[: length // 4], "the chain does not extend over the last block"


def test_match_has_no_side_effect() -> None:
    """A holding or touching match reorders eviction at every refused grant."""
    kv = BlockHash(KVSettings(BLOCK), context(4))
    first, second = hold(kv, [1, 2, 3]), hold(kv, [4, 5, 6])
    assert first and second
    kv.free(first)
    kv.free(second)
    for _ in range(3):
        assert kv.match([1, 2, 3], []) == first
    assert kv.audit() == (2, 2, 0)
    taken = kv.allocate(3)
    assert taken is not None and first[0] in taken and second[0] not in taken, "the first offered is the first reused"


def test_hit_over_reused_room_is_a_miss() -> None:
    """B04: pool of 2; X, free, Y over the same blocks, X again: miss, and every entry lies where it says."""
    kv = BlockHash(KVSettings(BLOCK), context(2))
    x, y = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
    for tokens in (x, y):
        blocks = hold(kv, tokens)
        assert blocks is not None
        kv.free(blocks)
    assert kv.match(x, []) == []
    assert len(kv.match(y, [])) == 2
    assert len(kv.content) <= 2 and kv.audit() == (0, 2, 0)


def test_a_hash_without_the_parent_shares_nothing_wrong() -> None:
    """B18: [A,B] and [C] cached, [C,B] asked, under a hash that ignores the parent: B is not reused."""
    kv = BlockHash(KVSettings(BLOCK), context(8), hash=lambda parent, tokens: sum(tokens))
    a, b, c = [1, 2, 3], [4, 5, 6], [9, 8, 7]
    ab, only_c = hold(kv, [*a, *b]), hold(kv, [*c])
    assert ab and only_c
    assert kv.match([*c, *b], []) == only_c
    assert kv.match([*a, *b], []) == ab


def test_a_constant_hash_is_still_exact() -> None:
    """Every chain collides with every other one; hits are decided by tokens and parents."""
    kv, rng = BlockHash(KVSettings(BLOCK), context(60), hash=lambda parent, tokens: 5), random.Random(0)
    chains = [[rng.randrange(2) for _ in range(9)] for _ in range(12)]
    for tokens in chains:
        assert hold(kv, tokens) is not None
    for tokens in chains:
        assert len(kv.match(tokens, [])) == 3
    wrong = [[2, *tokens[1:]] for tokens in chains]
    assert all(kv.match(tokens, []) == [] for tokens in wrong)


def test_tails_go_first() -> None:
    """Of one prompt the tail is reused first: a cut prefix is still worth something, a cut tail is worth nothing."""
    kv = BlockHash(KVSettings(BLOCK), context(3))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    blocks = hold(kv, tokens)
    assert blocks is not None
    kv.free(blocks)
    kv.allocate(1)
    assert kv.match(tokens, []) == blocks[:2]


def test_allocate_counts_idle_hits_once() -> None:
    """Hits that nobody holds leave the reusable room that the fresh blocks could have had."""
    kv = BlockHash(KVSettings(BLOCK), context(3))
    blocks = hold(kv, [1, 2, 3, 4, 5, 6])
    assert blocks is not None
    kv.free(blocks)
    hits = kv.match([1, 2, 3, 4, 5, 6], [])
    assert kv.allocate(2, hits) is None and kv.audit() == (1, 2, 0)
    assert kv.allocate(1, hits) == [*hits, 3]


def test_forget() -> None:
    """Forgotten content is not found; holders keep their blocks; a block freed later is blank."""
    kv = BlockHash(KVSettings(BLOCK), context(4))
    held, idle = hold(kv, [1, 2, 3]), hold(kv, [4, 5, 6])
    assert held and idle
    kv.free(idle)
    kv.forget(held)
    assert kv.match([1, 2, 3], []) == [] and kv.match([4, 5, 6], []) == idle and kv.audit() == (2, 1, 1)
    kv.forget(None)
    assert kv.match([4, 5, 6], []) == [] and kv.audit() == (3, 0, 1)
    kv.free(held)
    assert kv.audit() == (4, 0, 0)


class Books(RuleBasedStateMachine):
    """Random allocation, publication, release and forgetting against a plain model of who holds what."""

    kind: type[KVAllocator] = BlockHash

    @initialize(blocks=st.integers(1, 9))
    def build(self, blocks: int) -> None:
        self.blocks, self.kv = blocks, self.kind(KVSettings(BLOCK), context(blocks))
        self.held: list[tuple[list[int], list[int], list[Any]]] = []  # tokens, blocks, keys
        self.written: dict[int, tuple[int, ...]] = {}  # block -> chain whose content it holds

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), reserve=st.integers(0, 2))
    def take(self, tokens: list[int], reserve: int) -> None:
        keys: list[Any] = []
        before = self.kv.audit()
        hits = self.kv.match(tokens[:-1], keys)
        assert len(hits) <= (len(tokens) - 1) // BLOCK
        for i, block in enumerate(hits):
            assert self.written[block] == tuple(tokens[: (i + 1) * BLOCK]), "a hit on other content"
        count = -(-len(tokens) // BLOCK) - len(hits) + reserve
        blocks = self.kv.allocate(count, hits)
        idle_hits = sum(not any(block in b for _, b, _ in self.held) for block in hits)
        assert (blocks is None) == (count > before[0] + before[1] - idle_hits), "refused or granted against the books"
        if blocks is None:
            assert self.kv.audit() == before
            return
        assert blocks[: len(hits)] == hits and len(set(blocks)) == len(blocks) and 0 not in blocks
        others = {block for _, b, _ in self.held for block in b}
        assert others.isdisjoint(blocks[len(hits) :]), "a held block was handed out"
        full = len(tokens) // BLOCK
        for i in range(len(hits), full):
            self.written[blocks[i]] = tuple(tokens[: (i + 1) * BLOCK])
        for block in blocks[full:]:
            self.written.pop(block, None)
        named = self.kv.publish(tokens, blocks[:full], len(hits), keys)
        for i, block in enumerate(named, len(hits)):
            assert self.written[block] == tuple(tokens[: (i + 1) * BLOCK])
        self.held.append((tokens, blocks, keys))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        _, blocks, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.kv.free(blocks)

    @rule(all_of_it=st.booleans())
    def forget(self, all_of_it: bool) -> None:
        blocks = None if all_of_it or not self.held else self.held[-1][1]
        self.kv.forget(blocks)
        for tokens, held, _ in self.held[-1:]:
            assert self.kv.match(tokens, []) == [] or held[0] not in self.kv.match(tokens, [])

    @invariant()
    def balance(self) -> None:
        if hasattr(self, "kv"):
            free, reusable, held = self.kv.audit()
            assert free + reusable + held == self.blocks
            assert held == len({block for _, b, _ in self.held for block in b})


class PagedBooks(Books):
    kind = ALLOCATORS["paged"]

    @rule()
    def nothing_is_ever_found(self) -> None:
        assert self.kv.match([0] * 12, []) == [] and self.kv.audit()[1] == 0


Books.TestCase.settings = PagedBooks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockHashBooks = Books.TestCase
TestPagedBooks = PagedBooks.TestCase
