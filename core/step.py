"""The step builder: the only place where requests and blocks meet.

A scheduler asks for grants; each is all or nothing. Every change of a seat is made here, those after the draw included.

      0          published*block     computed      start+count
      |  findable  |  full, unnamed  |  this chunk  |            blocks held: ceil(max(computed, reserved) / block)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.interfaces import ON_DEVICE, Array, KVAllocator, Request, Seat, StepPlan

NO_ROWS = np.zeros(0, np.int32)
NO_MASKS = np.zeros((0, 0), np.uint8)


@dataclass(slots=True)
class Chunk:
    """A request's share of a step."""

    request: Request
    seat: Seat
    start: int
    count: int
    draws: int = 0
    draft: tuple[int, ...] = ()
    twin: int = -1  # first block of this chunk that equals one published before; -1: none


class Seats:
    """What outlives a step: free slots, and changes of the block table that wait for the next plan."""

    def __init__(self, kv: KVAllocator, max_num_seqs: int, block_size: int) -> None:
        self.kv, self.block_size = kv, block_size
        self.free_slots = list(reversed(range(max_num_seqs)))
        self.rows: list[tuple[int, int, int]] = []  # slot, column, block

    def release(self, request: Request) -> None:
        """Slot and blocks back to the pools."""
        seat = request.seat
        assert seat is not None
        self.kv.free(seat.blocks)
        self.free_slots.append(seat.slot)
        if self.rows:
            self.rows = [row for row in self.rows if row[0] != seat.slot]
        request.seat = None

    def settle(self, chunk: Chunk) -> None:
        """The step of `chunk` is done and its tokens are known: name what became full, share what is there twice.

        Only here may a block be replaced by an equal one: no step in flight writes it any more.
        """
        request, seat = chunk.request, chunk.seat
        if request.seat is not seat:
            return  # preempted, or ended, since
        if chunk.draft:
            seat.computed = len(request.tokens) - 1  # rejected drafts are not in the cache
        full = min(chunk.start + chunk.count, len(request.tokens)) // self.block_size
        first = seat.published if chunk.twin < 0 else chunk.twin
        if full <= first:
            return
        for i, block in enumerate(self.kv.publish(request.tokens, seat.blocks[:full], first, request.keys), first):
            own = seat.blocks[i]
            if block != own and self.kv.allocate(0, [block]) is not None:
                self.kv.free([own])
                seat.blocks[i] = block
                self.rows.append((seat.slot, i, block))
        seat.published = max(full, seat.published)


class StepBuilder:
    """Implements interfaces.Step."""

    def __init__(self, seats: Seats, budget: int, now: float = 0.0, wants_history: bool = False) -> None:
        self.seats, self.kv, self.block_size = seats, seats.kv, seats.block_size
        self.tokens_left, self.now, self.wants_history = budget, now, wants_history
        self.chunks: dict[Request, Chunk] = {}
        self.new_blocks: list[tuple[int, int, int]] = []
        self.admitted: list[Request] = []
        self.evicted: list[Request] = []
        self.short = ""
        self.refused: Request | None = None
        self.until: float | None = None

    @property
    def empty(self) -> bool:
        return not self.chunks

    def grant(self, request: Request, limit: int | None = None, *, whole: bool = False, reserve: int = 0) -> int:
        if request in self.chunks:
            raise ValueError(f"request {request.id} was granted tokens in this step already; one grant each")
        if limit is not None and limit < 1:
            raise ValueError(f"limit of a grant must be >= 1, got {limit} (request {request.id})")
        if self.tokens_left <= 0:
            return self._refuse(request, "tokens")
        seat = request.seat
        if request.promised and (seat is None or request.host_bound):
            return self._refuse(request, "later")
        if seat is None:
            return self._admit(request, limit, whole, reserve)
        start = seat.computed
        left = len(request.tokens) + request.promised - start + len(request.draft)
        count = self._count(request, left, limit, whole)
        if not count:
            return 0
        needed = -(-max(start + count, reserve) // self.block_size) - len(seat.blocks)
        if needed > 0:
            blocks = self.kv.allocate(needed)
            if blocks is None:
                return self._refuse(request, "blocks")
            self._extend(seat, blocks)
        return self._advance(request, seat, start, count)

    def cached(self, request: Request) -> int:
        return len(self.kv.match(request.tokens[:-1], request.keys)) * self.block_size

    def evict(self, request: Request) -> None:
        if request in self.chunks:
            raise ValueError(f"request {request.id} advances in this step already; evict another one")
        if request.seat is None:
            raise ValueError(f"request {request.id} holds no seat; nothing to evict")
        self.evicted.append(request)
        self.seats.release(request)

    def wait(self, until: float) -> None:
        self.until = until if self.until is None else min(until, self.until)

    def _refuse(self, request: Request, why: str) -> int:
        self.short, self.refused = why, request
        return 0

    def _count(self, request: Request, left: int, limit: int | None, whole: bool) -> int:
        """Tokens to grant; 0 and the reason if `whole` cannot be."""
        if left <= 0:
            raise ValueError(f"request {request.id} has nothing left to compute")
        if whole and limit is not None and limit < left:
            raise ValueError(f"request {request.id}: whole=True asks for {left} tokens, but limit is {limit}")
        count = left if left < self.tokens_left else self.tokens_left
        if limit is not None and limit < count:
            count = limit
        if whole and count < left:
            return self._refuse(request, "whole")
        return count

    def _admit(self, request: Request, limit: int | None, whole: bool, reserve: int) -> int:
        if not self.seats.free_slots:
            return self._refuse(request, "slots")
        hits = self.kv.match(request.tokens[:-1], request.keys)  # the last token is always computed: it draws
        start = len(hits) * self.block_size
        count = self._count(request, len(request.tokens) - start + len(request.draft), limit, whole)
        if not count:
            return 0
        needed = -(-max(start + count, reserve) // self.block_size) - len(hits)
        blocks = self.kv.allocate(max(needed, 0), hits)
        if blocks is None:
            return self._refuse(request, "blocks")
        seat = request.seat = Seat(self.seats.free_slots.pop(), [], start, len(hits))
        self._extend(seat, blocks)
        self.admitted.append(request)
        return self._advance(request, seat, start, count)

    def _extend(self, seat: Seat, blocks: list[int]) -> None:
        column = len(seat.blocks)
        self.new_blocks += [(seat.slot, column + i, block) for i, block in enumerate(blocks)]
        seat.blocks += blocks

    def _advance(self, request: Request, seat: Seat, start: int, count: int) -> int:
        """Book the chunk. Known tokens are named at once: all stores of a layer precede its reads, so a later chunk of
        this very step may use them. A block that equals one published before stays: this step writes it."""
        seat.computed = end = start + count
        self.chunks[request] = chunk = Chunk(request, seat, start, count)
        self.tokens_left -= count
        self.short = ""
        full = (end if end < len(request.tokens) else len(request.tokens)) // self.block_size
        first = seat.published
        if full > first:
            own = seat.blocks[:full]
            named = self.kv.publish(request.tokens, own, first, request.keys)
            seat.published = full
            if list(named) != own[first:]:
                chunk.twin = first + next(i for i, block in enumerate(named) if block != own[first + i])
        return count

    def abandon(self) -> None:
        """The step will not run: whoever advanced loses the seat, and nothing it announced is found."""
        for request, chunk in self.chunks.items():
            if request.seat is chunk.seat:
                self.kv.forget(chunk.seat.blocks[chunk.start // self.block_size :])
                self.seats.release(request)

    def seal(self) -> tuple[StepPlan, list[Chunk]]:
        """The plan, and what the engine needs at commit. From here on the drawn tokens are promised."""
        chunks = list(self.chunks.values())
        tokens: list[int] = []
        for c in chunks:
            request, start, count = c.request, c.start, c.count
            known, end = len(request.tokens), start + count
            if count == 1:
                tokens.append(request.tokens[start] if start < known else ON_DEVICE)
            else:
                tokens += (request.tokens + request.draft)[start:end] if request.draft else request.tokens[start:end]
                if end > known and not request.draft:
                    tokens.append(ON_DEVICE)
            c.draws = draws = end - known - request.promised + 1
            if draws > 0:
                c.draft = tuple(request.draft[: draws - 1])
                request.promised += 1
            else:
                c.draws = 0
        admitted = self.admitted
        sizes = [(self.chunks[r].seat.slot, len(r.tokens) if self.wants_history else 0) for r in admitted]
        moves, rows = self.kv.moves(), self.seats.rows + self.new_blocks
        self.seats.rows = []
        plan = StepPlan(
            slots=_ints([c.seat.slot for c in chunks]),
            starts=_ints([c.start for c in chunks]),
            counts=_ints([c.count for c in chunks]),
            draws=_ints([c.draws for c in chunks]),
            tokens=_ints(tokens),
            new_blocks=_ints(rows).reshape(-1, 3),
            moves=_ints(moves).reshape(-1, 2),
            admitted=_ints(sizes).reshape(-1, 2),
            history=_ints([t for r in admitted for t in r.tokens]) if self.wants_history else NO_ROWS,
            params=tuple(r.params for r in admitted),
            mask_rows=NO_ROWS,
            masks=NO_MASKS,
            shared_blocks=shared_blocks(chunks, self.block_size),
        )
        return plan, chunks


def shared_blocks(chunks: list[Chunk], block_size: int) -> int:
    """Leading blocks that every chunk holds and that lie wholly before each chunk's start; 0 for a single chunk."""
    if len(chunks) < 2:
        return 0
    first = chunks[0].seat.blocks
    shared = min(len(first), chunks[0].start // block_size)
    for c in chunks:
        if not shared:
            break
        shared = min(shared, c.start // block_size)
        if c.seat.blocks[:shared] != first[:shared]:
            shared = next(i for i in range(shared) if c.seat.blocks[i] != first[i])
    return shared


def _ints(values: list) -> Array:
    return np.array(values, np.int32) if values else np.zeros(0, np.int32)
