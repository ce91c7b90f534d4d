"""Scheduler and allocator under watch: what an engine cannot see, because it trusts its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from core.interfaces import HostContext, KVAllocator, Request, Scheduler, Step


class WatchedAllocator(KVAllocator):
    """Passes every call on and keeps books of its own: who holds what, and that all or nothing is handed out."""

    def __init__(self, inner: KVAllocator, context: HostContext) -> None:
        super().__init__(inner.settings, context)
        self.inner = inner
        self.holders: Counter[int] = Counter()  # block -> holds

    def match(self, tokens: Sequence[int], keys: list[Any]) -> list[int]:
        before = self.inner.audit()
        hits = self.inner.match(tokens, keys)
        most = len(tokens) // self.context.block_size
        assert len(hits) <= most, f"match found {len(hits)} blocks for {len(tokens)} tokens, which fill only {most} of them"
        assert self.inner.audit() == before, "match has a side effect: what audit says has changed"
        return hits

    def allocate(self, count: int, hits: Sequence[int] = ()) -> list[int] | None:
        before = self.inner.audit()
        blocks = self.inner.allocate(count, hits)
        if blocks is None:
            assert self.inner.audit() == before, (
                f"allocate({count}, hits={list(hits)}) refused and changed the books all the same"
            )
            return None
        assert len(blocks) == len(hits) + count, (
            f"allocate gave {len(blocks)} blocks, not {len(hits)} hits and {count} fresh ones"
        )
        assert all(1 <= b <= self.context.num_blocks for b in blocks), f"ids must be 1 to {self.context.num_blocks}: {blocks}"
        assert len(set(blocks)) == len(blocks), f"a block was handed out twice in one answer: {blocks}"
        held = [b for b in blocks[len(hits) :] if self.holders[b]]
        assert not held, f"blocks {held} were handed out as fresh while somebody holds them"
        self.holders.update(blocks)
        return blocks

    def publish(self, tokens: Sequence[int], blocks: Sequence[int], start: int, keys: list[Any]) -> Sequence[int]:
        named = self.inner.publish(tokens, blocks, start, keys)
        assert len(named) == len(blocks) - start, f"publish answered {len(named)} blocks for {len(blocks) - start}"
        return named

    def free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert not block or self.holders[block] > 0, f"block {block} is freed more often than held"
            self.holders[block] -= bool(block)
        self.inner.free(blocks)

    def audit(self) -> tuple[int, int, int]:
        free, reusable, held = self.inner.audit()
        pool, mine = self.context.num_blocks, sum(count > 0 for count in self.holders.values())
        assert free + reusable + held == pool, (
            f"the books do not balance: {free} free + {reusable} reusable + {held} held != {pool}"
        )
        assert held == mine, f"audit says that {held} blocks are held; {mine} have a holder"
        return free, reusable, held

    def idle(self) -> int:
        return self.inner.idle()

    def moves(self) -> list[tuple[int, int]]:
        return self.inner.moves()

    def forget(self, blocks: Iterable[int] | None = None) -> None:
        self.inner.forget(blocks)


STEP = [name for name in vars(Step) if not name.startswith("_")]


class WatchedStep:
    """The `Step` protocol and nothing else: a scheduler that reaches for the builder behind it is told so."""

    __slots__ = ("_asked", "_most", "_step", "_watch")

    def __init__(self, step: Step, watch: WatchedScheduler) -> None:
        for name, value in (("_step", step), ("_watch", watch), ("_asked", 0), ("_most", 100 + 20 * len(watch.known))):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the scheduler asked for step.{name}, which is not in the protocol: Step has {', '.join(STEP)}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"the scheduler wrote step.{name} = {value!r}: a step is changed by grant, evict and wait only")

    @property
    def tokens_left(self) -> int:
        return self._step.tokens_left

    @property
    def empty(self) -> bool:
        return self._step.empty

    @property
    def now(self) -> float:
        return self._step.now

    @property
    def short(self) -> str:
        return self._step.short

    def grant(self, request: Request, limit: int | None = None, *, whole: bool = False, reserve: int = 0) -> int:
        self._watch.check_known(request)
        object.__setattr__(self, "_asked", self._asked + 1)
        assert self._asked <= self._most, (
            f"{self._asked} grants were asked for in one step with {len(self._watch.known)} requests"
        )
        self._watch.check_untouched([request])
        count = self._step.grant(request, limit, whole=whole, reserve=reserve)
        self._watch.note(request)
        if count:
            self._watch.granted[request] = self._watch.granted.get(request, 0) + count
        else:
            self._watch.refusals.append(self._step.short)
        return count

    def cached(self, request: Request) -> int:
        return self._step.cached(request)

    def evict(self, request: Request) -> None:
        self._watch.check_known(request)
        self._watch.check_untouched([request])
        self._step.evict(request)
        self._watch.note(request)
        self._watch.evictions += 1

    def wait(self, until: float) -> None:
        self._step.wait(until)


def _state(request: Request) -> tuple[Any, ...]:
    seat = request.seat
    place = seat and (seat.slot, len(seat.blocks), seat.computed, seat.published)
    return seat, place, len(request.tokens), request.promised, request.finish_reason, request.limit, len(request.draft)


class WatchedScheduler(Scheduler):
    """Passes every call on. A scheduler asks for grants; it writes nothing of a request, and forgets who was removed."""

    def __init__(self, inner: Scheduler, context: HostContext) -> None:
        super().__init__(inner.settings, context)
        self.inner = inner
        self.known: dict[Request, tuple[Any, ...]] = {}  # added and not removed -> state as the engine left it
        self.granted: dict[Request, int] = {}  # of the last step
        self.refusals: list[str] = []  # of the last step
        self.evictions = 0

    def add(self, request: Request) -> None:
        self.known[request] = _state(request)
        self.inner.add(request)

    def remove(self, request: Request) -> None:
        del self.known[request]
        try:
            self.inner.remove(request)
        except Exception as error:
            raise AssertionError(
                f"remove(request {request.id}) raised {type(error).__name__}: is the request lost? "
                f"It ends with {request.finish_reason}: {request.message}"
            ) from error

    def schedule(self, step: Step) -> None:
        self.granted, self.refusals = {}, []
        for request in self.known:
            self.note(request)
        budget = step.tokens_left
        self.inner.schedule(WatchedStep(step, self))  # type: ignore[arg-type]
        self.check_untouched(self.known)
        spent = sum(self.granted.values())
        assert spent <= budget, f"{spent} tokens were granted in a step of {budget}"

    def note(self, request: Request) -> None:
        self.known[request] = _state(request)

    def check_known(self, request: Request) -> None:
        assert request in self.known, (
            f"request {request.id} was removed (or never added), and the scheduler still works with it"
        )

    def check_untouched(self, requests: Iterable[Request]) -> None:
        for request in requests:
            assert _state(request) == self.known[request], (
                f"the scheduler wrote to request {request.id}: seat, tokens and draft are not its own"
            )
