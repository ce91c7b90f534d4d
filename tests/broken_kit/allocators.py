"""KV allocators with one defect each: the built-in ones, changed in one place."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from core.interfaces import HostContext
from plugins.kv_allocators.block_hash import BlockHash, Content
from plugins.kv_allocators.paged import Paged
from tests.broken_kit.defect import Defect


class Leaks(BlockHash):
    """The last block of a freed list is forgotten."""

    def free(self, blocks: Sequence[int]) -> None:
        super().free(blocks[:-1])


class FreesTwice(Paged):
    """A freed block is put into the free list twice."""

    def free(self, blocks: Sequence[int]) -> None:
        self.held.difference_update(blocks)
        self.blank.extend(block for block in [*blocks, *blocks[:1]] if block)

    def audit(self) -> tuple[int, int, int]:
        return self.context.num_blocks - len(self.held), 0, len(self.held)


class ForgetsOtherHolders(BlockHash):
    """A shared block is free when its first holder leaves."""

    def free(self, blocks: Sequence[int]) -> None:
        for block in filter(None, blocks):
            self.holders[block] = min(self.holders[block], 1)
        super().free([block for block in blocks if self.holders[block]])


class HandsOutScratch(Paged):
    """Counts blocks from 0, which is the core's."""

    def __init__(self, settings: Any, context: HostContext) -> None:
        super().__init__(settings, context)
        self.blank.remove(context.num_blocks)
        self.blank.appendleft(0)

    def audit(self) -> tuple[int, int, int]:
        return len(self.blank), 0, len(self.held)


class MissesTheLastBlock(BlockHash):
    """Off by one at the edge of a block: the last full block of the tokens is not looked for."""

    def match(self, tokens: Sequence[int], keys: list[Any]) -> list[int]:
        return super().match(tokens[:-1], keys)


class FindsHalfBlocks(BlockHash):
    """Off by one at the edge of a block: the last block counts as found when only its beginning is equal."""

    def match(self, tokens: Sequence[int], keys: list[Any]) -> list[int]:
        hits = super().match(tokens, keys)
        rest = list(tokens[len(hits) * self.block_size :])
        for block, content in self.content.items():
            own, parent = array("i", content.tokens).tolist(), content.parent
            if rest and own[: len(rest)] == rest and (parent.block if parent else 0) == (hits[-1] if hits else 0):
                return [*hits, block]
        return hits


class FindsWhatIsGone(BlockHash):
    """A stale hit: the content of a block is still found after its room was handed out."""

    def _take_over(self) -> int:
        block = self.reusable.pop()
        self.content.pop(block)
        return block

    def audit(self) -> tuple[int, int, int]:
        return len(self.blank), len(self.reusable), sum(count > 0 for count in self.holders)


class IgnoresTheParent(BlockHash):
    """A block is known by its own tokens alone."""

    def _intern(self, parent: Content | None, tokens: bytes) -> Content:
        return super()._intern(None, tokens)


class TrustsItsHash(BlockHash):
    """Two contents of one hash are taken for the same: nothing is compared."""

    def _intern(self, parent: Content | None, tokens: bytes) -> Content:
        digest = (0 if parent is None else parent.digest) * 31 + sum(tokens)
        content = self.known.get(digest)
        if content is None:
            content = self.known[digest] = Content(digest, tokens, parent)
        return content


class HoldsWhatItMatches(BlockHash):
    """`match` holds what it finds."""

    def match(self, tokens: Sequence[int], keys: list[Any]) -> list[int]:
        hits = super().match(tokens, keys)
        for block in hits:
            self.holders[block] += 1
        return hits

    def audit(self) -> tuple[int, int, int]:
        held = sum(count > 0 for count in self.holders)
        return len(self.blank), self.context.num_blocks - held - len(self.blank), held


class ReordersWhatItMatches(BlockHash):
    """`match` counts as a use, so that a refused request changes which block is reused next."""

    def match(self, tokens: Sequence[int], keys: list[Any]) -> list[int]:
        hits = super().match(tokens, keys)
        for block in hits:
            if block in self.reusable:
                self.reusable.withdraw(block)
                self.reusable.offer(block)
        return hits


class HoldsHitsOfTheRefused(BlockHash):
    """Not all or nothing: the hits are held before it is known whether the rest can be had."""

    def allocate(self, count: int, hits: Sequence[int] = ()) -> list[int] | None:
        blocks = super().allocate(0, hits)
        fresh = super().allocate(count)
        return None if fresh is None or blocks is None else blocks + fresh


class HandsOutLess(Paged):
    """Gives what there is when asked for more."""

    def allocate(self, count: int, hits: Sequence[int] = ()) -> list[int] | None:
        return super().allocate(min(count, len(self.blank)), hits)


class ReusesHeadsFirst(BlockHash):
    """Of a freed list the head goes first, so that what remains of a prefix is worth nothing."""

    def free(self, blocks: Sequence[int]) -> None:
        super().free(list(reversed(blocks)))


class ForgetsOnlyHeld(BlockHash):
    """Content in blocks that nobody holds survives a reset of the cache."""

    def forget(self, blocks: Iterable[int] | None = None) -> None:
        super().forget([b for b in (list(self.content) if blocks is None else blocks) if self.holders[b]])


class RenamesEqualContent(BlockHash):
    """`publish` moves the name of a content to the block that came last."""

    def publish(self, tokens: Sequence[int], blocks: Sequence[int], start: int, keys: list[Any]) -> Sequence[int]:
        for i in range(start, len(blocks)):
            content = self._chain(tokens, keys, i)
            if content.block and content.block != blocks[i] and blocks[i] not in self.content and self.holders[content.block]:
                del self.content[content.block]
                content.block = 0
        return super().publish(tokens, blocks, start, keys)


class FindsNothing(BlockHash):
    """Claims a prefix cache and publishes nothing."""

    def publish(self, tokens: Sequence[int], blocks: Sequence[int], start: int, keys: list[Any]) -> Sequence[int]:
        return blocks[start:]


class SharesItsPool(Paged):
    """One pool for all instances: a mutable class attribute."""

    all_held: ClassVar[set[int]] = set()

    def __init__(self, settings: Any, context: HostContext) -> None:
        super().__init__(settings, context)
        self.held = self.all_held

    def audit(self) -> tuple[int, int, int]:
        return self.context.num_blocks - len(self.held), 0, len(self.held)


class MiscountsHolders(Paged):
    """What `audit` says of the held blocks is made up."""

    def audit(self) -> tuple[int, int, int]:
        return self.context.num_blocks, 0, 0


class CountsBlankOnly(BlockHash):
    """`idle` leaves out what is reusable."""

    def idle(self) -> int:
        return len(self.blank)


def broken(target: type, *caught: str, says: str, cache: bool = True) -> Defect:
    provides = {"prefix_cache": True} if cache else {}
    return Defect(target, tuple(f"test_{name}" for name in caught), says, "kv_allocator", provides)


DEFECTS = [
    broken(Leaks, "the_whole_pool_is_handed_out_and_comes_back", says=r"blank blocks were freed, audit says \(4, 0, 2\)"),
    broken(
        FreesTwice,
        "the_whole_pool_is_handed_out_and_comes_back",
        says=r"handed out were the blocks \[1, 3, 3, 4, 5, 6\], not 1 to 6",
        cache=False,
    ),
    broken(
        ForgetsOtherHolders,
        "shared_blocks_stay_until_their_last_holder_leaves",
        says=r"a block that somebody holds counts as free",
    ),
    broken(
        HandsOutScratch,
        "the_whole_pool_is_handed_out_and_comes_back",
        says=r"handed out were the blocks \[0, 1, 2, 3, 4, 5\], not 1 to 6",
        cache=False,
    ),
    broken(MissesTheLastBlock, "hits_at_block_edges", says=r"of \d+ tokens in blocks of \d+, \d+ blocks are found, not \d+"),
    broken(FindsHalfBlocks, "hits_at_block_edges", says=r"of \d+ tokens in blocks of \d+, \d+ blocks are found, not \d+"),
    broken(FindsWhatIsGone, "content_whose_room_was_reused_is_not_found", says=r"found where other content lies by now"),
    broken(IgnoresTheParent, "a_block_is_found_behind_its_own_parent_only", says=r"block B was computed after A"),
    broken(
        TrustsItsHash,
        "the_order_of_tokens_is_part_of_the_content",
        says=r"\[1, 2, 3, 4, 5, 6\] is cached, and of \[.*\] 2 blocks are found",
    ),
    broken(HoldsWhatItMatches, "match_only_looks", says=r"match has a side effect: audit says \(0, 1, 1\)"),
    broken(ReordersWhatItMatches, "match_only_looks", says=r"match changes which block is reused first"),
    broken(HoldsHitsOfTheRefused, "what_is_refused_changes_nothing", says=r"refused, and the books changed from .* to"),
    broken(
        HandsOutLess,
        "the_whole_pool_is_handed_out_and_comes_back",
        says=r"the pool is empty, and allocate\(1\) gave",
        cache=False,
    ),
    broken(ReusesHeadsFirst, "tails_are_reused_first", says=r"of three freed blocks one was reused, and 0 are found"),
    broken(ForgetsOnlyHeld, "forgotten_content_is_not_found", says=r"forgotten content is still found"),
    broken(RenamesEqualContent, "equal_content_has_one_name", says=r"publish must name the block that has the content already"),
    broken(FindsNothing, "hits_at_block_edges", says=r"of \d+ tokens in blocks of \d+, 0 blocks are found, not \d+"),
    broken(SharesItsPool, "allocators_share_nothing", says=r"what one allocator holds, another one lacks", cache=False),
    broken(
        MiscountsHolders,
        "the_whole_pool_is_handed_out_and_comes_back",
        says=r"all blocks are held, audit says \(6, 0, 0\)",
        cache=False,
    ),
    broken(CountsBlankOnly, "idle_is_what_audit_says", says=r"idle says \d; audit says \d free and \d reusable"),
]
