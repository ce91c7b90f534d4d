"""Contract suite for KV allocators: alone against plain books, and under whole engines on the fake model.

`provides={"prefix_cache": True}` claims that full blocks are found again by their content; without it an allocator may find
nothing, and what it does find must still be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from core.interfaces import HostContext, KVAllocator, Limits, Scheduler
from core.plugins import discover
from core.plugins.loading import load
from core.testing.books import keep_books
from core.testing.fake import FakeEngine, VirtualClock, drive, expected, make_engine, workload
from core.testing.life import Maker, live
from core.testing.suite import Suite, seeded

OVERLAPS = pytest.mark.parametrize("overlap", [0, 1])


class AllocatorSuite(Suite):
    """Books balance, held blocks are nobody else's, what is found is what was asked for."""

    kind = "kv_allocator"
    schedulers: ClassVar[Sequence[str]] = ("fcfs", "mixed")  # options of scheduler to run with

    def make(self, blocks: int, block_size: int) -> KVAllocator:
        """A fresh allocator of `blocks` usable blocks."""
        context = HostContext(Limits(4, 64, 64), block_size, blocks, VirtualClock())
        return self.target()(self.new_settings(block_size=block_size), context)

    def engine(self, scheduler: str = "fcfs", **limits: Any) -> FakeEngine:
        policy, target = discover().find("scheduler", scheduler).component, self.target()

        def build(context: HostContext) -> Scheduler:
            return load(policy)(policy.settings(), context)

        def allocator(context: HostContext) -> KVAllocator:
            return target(self.new_settings(block_size=context.block_size), context)

        return make_engine(build, allocator, **limits)

    @property
    def size(self) -> int:
        """A block size that the component accepts, 3 if it may be."""
        return self.accepted("block_size", (3,))[0]

    def sizes(self) -> list[int]:
        return self.accepted("block_size", (1, 2, 3))

    def chain(self, *blocks: int) -> list[int]:
        """Tokens that fill one block for each given number; equal numbers, equal blocks."""
        return [100 * number + offset for number in blocks for offset in range(self.size)]

    def hold(self, kv: KVAllocator, tokens: list[int], memo: list[Any] | None = None) -> list[int]:
        """As the builder does: match all but the last token, allocate, publish. memo: the request's `keys`."""
        keys: list[Any] = [] if memo is None else memo
        hits = kv.match(tokens[:-1], keys)
        blocks = kv.allocate(-(-len(tokens) // self.size) - len(hits), hits)
        assert blocks is not None, f"{len(tokens)} tokens were refused: {kv.audit()} (free, reusable, held)"
        kv.publish(tokens, blocks[: len(tokens) // self.size], len(hits), keys)
        return blocks

    def caching(self) -> None:
        """Skip what needs hits, where nothing is claimed and nothing found."""
        if not self.declared().provides.get("prefix_cache"):
            kv = self.make(8, self.size)
            self.hold(kv, self.chain(1, 2))
            if not kv.match(self.chain(1, 2), []):
                pytest.skip("claims no prefix_cache, and finds nothing")

    def test_the_whole_pool_is_handed_out_and_comes_back(self) -> None:
        """Ids 1 to `num_blocks`, each once; after many rounds none is lost and none is there twice."""
        kv = self.make(6, self.size)
        for _ in range(5):
            first, rest = kv.allocate(2), kv.allocate(4)
            assert first is not None and rest is not None, "the pool has lost blocks: they leak"
            assert sorted(first + rest) == [1, 2, 3, 4, 5, 6], f"handed out were the blocks {sorted(first + rest)}, not 1 to 6"
            assert kv.audit() == (0, 0, 6), f"all blocks are held, audit says {kv.audit()} (free, reusable, held)"
            more = kv.allocate(1)
            assert more is None, f"the pool is empty, and allocate(1) gave {more}, not None"
            kv.free(rest)
            kv.free(first)
            assert kv.audit() == (6, 0, 0), f"blank blocks were freed, audit says {kv.audit()} (free, reusable, held)"

    def test_what_is_refused_changes_nothing(self) -> None:
        """All or nothing, with hits too: no block of a refused request is held."""
        kv = self.make(5, self.size)
        kv.free(self.hold(kv, self.chain(1, 2)))
        kept = self.hold(kv, self.chain(7, 8))
        before = kv.audit()
        hits = kv.match(self.chain(1, 2), [])
        answer = kv.allocate(4 - len(hits), hits)
        assert answer is None, f"4 blocks were asked for, 3 are there, the answer is {answer}, not None"
        assert kv.audit() == before, f"refused, and the books changed from {before} to {kv.audit()} (free, reusable, held)"
        assert kv.match(self.chain(1, 2), []) == hits, "a refused request changes what is found"
        blocks = kv.allocate(3 - len(hits), hits)
        assert blocks is not None and not set(blocks) & set(kept), "what remains can be had, and only that"

    def test_shared_blocks_stay_until_their_last_holder_leaves(self) -> None:
        """A block with two holders survives the first one that leaves."""
        self.caching()
        kv = self.make(4, self.size)
        first, second = self.hold(kv, [*self.chain(1), 5]), self.hold(kv, [*self.chain(1), 6])
        assert second[0] == first[0], "the common block is not shared"
        kv.free(first)
        assert kv.audit()[2] == 2, "a block that somebody holds counts as free"
        rest = kv.allocate(2)
        assert rest is not None and second[0] not in rest, "a block that somebody holds was handed out"
        kv.free(rest)
        kv.free(second)
        assert kv.audit()[2] == 0, f"nobody holds a block, audit says {kv.audit()} (free, reusable, held)"

    def test_hits_at_block_edges(self) -> None:
        """Full blocks only: of n tokens floor(n / block) are found, for n just below, at and above each edge (B01)."""
        self.caching()
        for size in self.sizes():
            kv = self.make(8, size)
            tokens = list(range(50, 50 + 4 * size))
            blocks = kv.allocate(4)
            assert blocks is not None, "4 blocks of an empty pool of 8 were refused"
            kv.publish(tokens, blocks, 0, [])
            for n in range(1, 4 * size + 1):
                hits, want = kv.match(tokens[:n], []), blocks[: n // size]
                assert len(hits) == len(want), (
                    f"of {n} tokens in blocks of {size}, {len(hits)} blocks are found, not {len(want)}"
                )
                assert hits == want, f"of {n} tokens in blocks of {size} the blocks {hits} are found, they lie in {want}"
                assert kv.match([*tokens[: n - 1], 7], []) == blocks[: (n - 1) // size], (
                    "a block with another last token is found"
                )

    def test_a_block_is_found_behind_its_own_parent_only(self) -> None:
        """B18: [A, B] and [C] are cached; of [C, B] only C is found, of [B] nothing."""
        self.caching()
        kv = self.make(8, self.size)
        ab, c = self.hold(kv, self.chain(1, 2)), self.hold(kv, self.chain(3))
        assert kv.match(self.chain(3, 2), []) == c, "block B was computed after A; after C its keys and values are others"
        assert kv.match(self.chain(2), []) == [], "block B was computed at another position"
        assert kv.match(self.chain(1, 2), []) == ab, "blocks A and B were published, and are not found"

    def test_the_order_of_tokens_is_part_of_the_content(self) -> None:
        """The same tokens in another order, within a block or over two, are another content, whatever the hash says of them."""
        self.caching()
        kv, tokens = self.make(8, self.size), list(range(1, 2 * self.size + 1))
        self.hold(kv, tokens)
        for other in {tuple(seeded("order", i).sample(tokens, len(tokens))) for i in range(20)} | {tuple(reversed(tokens))}:
            same = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b), len(tokens))
            hits = kv.match(other, [])
            assert len(hits) <= same // self.size, f"{tokens} is cached, and of {list(other)} {len(hits)} blocks are found"

    def test_content_whose_room_was_reused_is_not_found(self) -> None:
        """B04: X, free, Y over the same blocks: X is gone, Y is there."""
        self.caching()
        kv, memo = self.make(2, self.size), []
        kv.free(self.hold(kv, self.chain(1, 2), memo))
        kv.free(self.hold(kv, self.chain(3, 4)))
        for keys in (memo, []):  # a preempted request asks again with its own memo
            found = kv.match(self.chain(1, 2), keys)
            assert found == [], f"blocks {found} are found where other content lies by now"
        found = kv.match(self.chain(3, 4), [])
        assert len(set(found)) == 2, f"two blocks were published and are not found: match gave {found}"

    def test_match_only_looks(self) -> None:
        """Holds nothing and reorders nothing: at each refused grant a holding match would change who is reused next."""
        self.caching()

        def reused(look: bool) -> list[int]:
            kv = self.make(2, self.size)
            first, second = self.hold(kv, self.chain(1)), self.hold(kv, self.chain(2))
            kv.free(first)
            kv.free(second)
            for _ in range(3 * look):
                assert kv.match(self.chain(1), []) == first, "a block that nobody holds is not found"
                assert kv.audit() == (0, 2, 0), f"match has a side effect: audit says {kv.audit()}, before (0, 2, 0)"
            return kv.allocate(1) or []

        assert reused(look=True) == reused(look=False), "match changes which block is reused first"

    def test_tails_are_reused_first(self) -> None:
        """Of one freed list the tail goes first: a cut prefix is still worth something, a cut tail is worth nothing."""
        self.caching()
        kv = self.make(3, self.size)
        blocks = self.hold(kv, self.chain(1, 2, 3))
        kv.free(blocks)
        kv.allocate(1)
        found = kv.match(self.chain(1, 2, 3), [])
        assert found == blocks[:2], f"of three freed blocks one was reused, and {len(found)} are found: the tail must go first"

    def test_forgotten_content_is_not_found(self) -> None:
        """Of some blocks, of all; holders keep theirs, and what is freed later is blank."""
        self.caching()
        kv = self.make(4, self.size)
        held, idle = self.hold(kv, self.chain(1)), self.hold(kv, self.chain(2))
        kv.free(idle)
        kv.forget(held)
        assert kv.match(self.chain(1), []) == [], "forgotten content is still found"
        assert kv.match(self.chain(2), []) == idle, "content of other blocks is forgotten too"
        assert kv.audit() == (2, 1, 1), f"audit says {kv.audit()} (free, reusable, held), right is (2, 1, 1)"
        kv.forget(None)
        assert kv.match(self.chain(2), []) == [], "forgotten content is still found"
        assert kv.audit() == (3, 0, 1), f"audit says {kv.audit()} (free, reusable, held), right is (3, 0, 1)"
        kv.free(held)
        assert kv.audit() == (4, 0, 0), f"audit says {kv.audit()} (free, reusable, held), right is (4, 0, 0)"

    def test_equal_content_has_one_name(self) -> None:
        """Two requests that computed the same block: publish tells the second one where it is found from now on."""
        self.caching()
        kv = self.make(4, self.size)
        one, two = kv.allocate(1), kv.allocate(1)
        assert one and two, f"4 blocks are there; allocate(1) gave {one}, then {two}"
        names = [list(kv.publish(self.chain(1), blocks, 0, [])) for blocks in (one, two)]
        assert names == [one, one], f"publish must name the block that has the content already: {names}, right: {[one, one]}"
        assert kv.match(self.chain(1), []) == one, "publish names another block than match finds"
        assert kv.audit()[2] == 2, f"publish changes no holder: 2 blocks are held, audit says {kv.audit()[2]}"

    def test_holes_are_skipped(self) -> None:
        """Id 0 in a freed list is a position that was given up before; it is never handed out."""
        kv = self.make(2, self.size)
        blocks = kv.allocate(2)
        assert blocks is not None, "2 blocks of an empty pool of 2 were refused"
        kv.free([0, *blocks, 0])
        assert kv.audit() == (2, 0, 0), f"a hole counts as a block: audit says {kv.audit()} (free, reusable, held)"
        again = kv.allocate(2)
        assert again is not None and 0 not in again, f"block 0 was handed out: {again}"

    def test_idle_is_what_audit_says(self) -> None:
        """Free and reusable blocks, with blocks held, given back and handed out again."""
        kv = self.make(5, self.size)
        held = self.hold(kv, self.chain(1, 2))
        for change in (lambda: None, lambda: kv.free(held), lambda: kv.allocate(4)):
            change()
            free, reusable, _ = kv.audit()
            assert kv.idle() == free + reusable, f"idle says {kv.idle()}; audit says {free} free and {reusable} reusable"

    def test_allocators_share_nothing(self) -> None:
        """Two engines in one process have two pools."""
        one, two = self.make(3, self.size), self.make(3, self.size)
        self.hold(one, self.chain(1, 2))
        for other in (two, self.make(3, self.size)):
            assert other.audit() == (3, 0, 0), f"what one allocator holds, another one lacks: {other.audit()}"
            assert other.match(self.chain(1, 2), []) == [], "one allocator finds what another one holds"

    def test_books(self) -> None:
        """State machine on the allocator alone; tokens are 0 and 1, so that weak hashes collide."""
        keep_books(self.make, self.sizes(), self.examples, self.steps)

    def test_any_order_of_events(self) -> None:
        """State machine on whole engines: submissions, steps, aborts and cache resets in any order."""
        makers: list[Maker] = []
        for scheduler in self.schedulers:
            makers.append(lambda scheduler=scheduler, **limits: self.engine(scheduler, **limits))
        live(makers, self.accepted("block_size", (1, 3, 4)), (0, 1), self.examples, self.steps)

    @OVERLAPS
    def test_tokens_equal_an_ample_pool(self, overlap: int) -> None:
        """Random workloads with shared prefixes, exact repeats and stops, in tight and ample pools."""
        for seed in range(self.seeds):
            for scheduler in self.schedulers:
                for size in self.accepted("block_size", (1, 3, 4, 16)):
                    for room in (0, 3, 30):
                        limits = {"block_size": size, "blocks": -(-64 // size) + room, "budget": 16, "slots": 4}
                        work = workload(seed)
                        run = drive(self.engine(scheduler, overlap=overlap, **limits), work, seed)
                        assert run.tokens == expected(work), "the tokens of an ample pool without a cache are others"
