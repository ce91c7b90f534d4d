"""State machine over a KV allocator alone: random allocation, growth, publication, release and forgetting against a plain
model of who holds what and which content lies where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from core.interfaces import KVAllocator
from core.testing.life import machine_settings

Maker = Callable[[int, int], KVAllocator]  # usable blocks, tokens per block
BINARY = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@dataclass
class Holding:
    """What one request would hold."""

    tokens: list[int]
    blocks: list[int]
    keys: list[Any] = field(default_factory=list)
    published: int = 0


class Books(RuleBasedStateMachine):
    """Does what the step builder does. A chain is all tokens up to the end of a block: the identity of its content."""

    make: Maker
    sizes: Sequence[int] = (1, 2, 3)

    @initialize(data=st.data(), pool=st.integers(1, 9))
    def build(self, data: st.DataObject, pool: int) -> None:
        self.size, self.pool = data.draw(st.sampled_from(self.sizes)), pool
        self.kv = type(self).make(pool, self.size)
        self.held: list[Holding] = []
        self.written: dict[int, tuple[int, ...]] = {}  # block -> chain that lies in it

    @rule(tokens=BINARY, reserve=st.integers(0, 2))
    def take(self, tokens: list[int], reserve: int) -> None:
        keys: list[Any] = []
        before = self.kv.audit()
        hits = self.kv.match(tokens[:-1], keys)
        self.check_hits(hits, tokens[:-1])
        count = -(-len(tokens) // self.size) - len(hits) + reserve
        idle = sum(not self.holders()[block] for block in set(hits) if 1 <= block <= self.pool)
        blocks = self.kv.allocate(count, hits)
        if any(not 1 <= block <= self.pool for block in hits):
            room = before[0] + before[1] - idle - len(hits)  # what lies in a lower tier needs blocks too
            assert blocks is not None or count > room, f"allocate({count}, {hits}) was refused with room for {room}"
        else:
            room = before[0] + before[1] - idle
            answer = "refused" if blocks is None else f"granted as {blocks}"
            assert (blocks is None) == (count > room), f"allocate({count}, {hits}) was {answer} with room for {room}"
        if blocks is None:
            assert self.kv.audit() == before, "refused, and the books have changed all the same"
            return
        self.arrive(hits, blocks)
        holding = Holding(list(tokens), blocks, keys, len(hits))
        self.held.append(holding)
        self.publish(holding)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        """Drawn tokens: fresh blocks where they are needed, the same memo."""
        holding = data.draw(st.sampled_from(self.held))
        needed = -(-(len(holding.tokens) + len(more)) // self.size) - len(holding.blocks)
        fresh = self.kv.allocate(needed) if needed > 0 else []
        if fresh is None:
            return
        self.arrive([], fresh)
        holding.blocks += fresh
        holding.tokens += more
        self.publish(holding)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), hole=st.booleans())
    def give_back(self, data: st.DataObject, hole: bool) -> None:
        holding = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        free, reusable, held = self.kv.audit()
        self.kv.free([*holding.blocks, 0] if hole else holding.blocks)
        idle = len(set(holding.blocks) - set(self.holders()))
        after = self.kv.audit()
        assert after[2] == held - idle and after[0] + after[1] == free + reusable + idle, (
            "free gave back more or less than was held"
        )

    @rule(everything=st.booleans())
    def forget(self, everything: bool) -> None:
        holding = self.held[-1] if self.held and not everything else None
        self.kv.forget(holding.blocks if holding else None)
        for other in self.held:
            hits = self.kv.match(other.tokens, [])
            assert not hits if holding is None else not set(hits) & set(holding.blocks), "forgotten content is still found"

    def check_hits(self, hits: Sequence[int], tokens: Sequence[int]) -> None:
        assert len(hits) <= len(tokens) // self.size, f"{len(hits)} hits for {len(tokens)} tokens in blocks of {self.size}"
        for i, block in enumerate(hits):
            chain = tuple(tokens[: (i + 1) * self.size])
            assert block != 0, "the scratch block is no hit"
            assert self.written.get(block) == chain, f"a hit for {chain}: block {block} holds {self.written.get(block)}"

    def arrive(self, hits: Sequence[int], blocks: list[int]) -> None:
        """Fresh blocks hold nothing known; what comes back from another tier is moved before it is read."""
        fresh = blocks[len(hits) :]
        held = self.holders()
        assert len(set(blocks)) == len(blocks) and all(1 <= b <= self.pool for b in blocks), f"wrong ids: {blocks}"
        assert not [b for b in fresh if held[b]], "a block that somebody holds was handed out as fresh"
        for source, target in self.kv.moves():
            if source in self.written:
                self.written[target] = self.written[source]
        for block in fresh:
            self.written.pop(block, None)

    def publish(self, holding: Holding) -> None:
        full = len(holding.tokens) // self.size
        for i in range(holding.published, full):
            self.written[holding.blocks[i]] = tuple(holding.tokens[: (i + 1) * self.size])
        named = self.kv.publish(holding.tokens, holding.blocks[:full], holding.published, holding.keys)
        want = max(full - holding.published, 0)
        assert len(named) == want, f"publish answered {len(named)} blocks for {want}"
        for i, block in enumerate(named, holding.published):
            chain = tuple(holding.tokens[: (i + 1) * self.size])
            assert self.written.get(block) == chain, f"publish says that block {block} holds {chain}"
        holding.published = full

    def holders(self) -> Counter[int]:
        return Counter(block for holding in self.held for block in holding.blocks)

    @invariant()
    def balance(self) -> None:
        if hasattr(self, "kv"):
            free, reusable, held = self.kv.audit()
            assert free + reusable + held == self.pool, "the books do not balance"
            assert held == len(self.holders()), f"audit says that {held} blocks are held, {len(self.holders())} are"

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for holding in self.held:
                self.kv.free(holding.blocks)
            free, reusable, held = self.kv.audit()
            assert (free + reusable, held) == (self.pool, 0), (
                f"nobody holds a block of {self.pool}, audit says ({free}, {reusable}, {held}) (free, reusable, held)"
            )
            assert self.kv.allocate(self.pool) is not None, "the whole pool cannot be had when nobody holds a block"


def keep_books(make: Maker, sizes: Sequence[int], examples: int, steps: int) -> None:
    """Run the machine. make(usable blocks, tokens per block)."""
    machine = type("Books", (Books,), {"make": staticmethod(make), "sizes": sizes})
    run_state_machine_as_test(machine, settings=machine_settings(examples, steps))
