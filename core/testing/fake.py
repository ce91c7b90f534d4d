"""A model without tensors: the next token is a function of everything that is read through the block table.

Each cell of the fake KV cache holds the token and position written there and a digest of what its writer could see, so a
wrong block, place, order or token changes what is drawn, as it would in a real model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from core.batch import lay_out, update_table
from core.clock import Clock
from core.engine import Engine
from core.interfaces import (
    ON_DEVICE,
    Executor,
    HostContext,
    KVAllocator,
    Limits,
    Request,
    Sampled,
    SamplingParams,
    Scheduler,
    StepPlan,
)
from core.testing.watch import WatchedAllocator, WatchedScheduler

VOCAB = 61
Cell = tuple[int, int, int]  # token, position, digest
Work = Sequence[tuple[list[int], SamplingParams]]


def next_token(seen: tuple[Cell, ...], seed: int) -> int:
    """What the fake model draws after `seen`; unseeded rows (seed 0) are greedy."""
    return hash((seen, seed)) % VOCAB


def digest(before: int, token: int, position: int) -> int:
    return hash((before, token, position)) & 0x7FFFFFFF


def define(prompt: Sequence[int], params: SamplingParams, limit: int) -> list[int]:
    """The definition: alone, without cache, without batch."""
    tokens, cells = list(prompt), []
    before, seed = 0, (params.seed or 0) if params.temperature > 0 else 0
    while len(tokens) < limit:
        for position in range(len(cells), len(tokens)):
            before = digest(before, tokens[position], position)
            cells.append((tokens[position], position, before))
        token = next_token(tuple(cells), seed)
        tokens.append(token)
        if token in params.stop_token_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class Ready:
    sampled: Sampled

    def wait(self) -> Sampled:
        return self.sampled


class FakeExecutor(Executor):
    """Runs plans on the fake model. `plans` keeps them for golden step lists."""

    def __init__(self, context: HostContext) -> None:
        self.context, self.num_blocks = context, context.num_blocks
        self.cells: dict[int, Cell] = {}  # place -> what lies there
        columns = -(-context.limits.max_model_len // context.block_size)
        self.table = np.zeros((context.limits.max_num_seqs + 1, columns), np.int32)
        self.last_token = np.zeros(context.limits.max_num_seqs + 1, np.int64)
        self.seeds = [0] * (context.limits.max_num_seqs + 1)
        self.plans: list[StepPlan] = []
        self.poison: Callable[[int], bool] = lambda token: False  # tokens that are drawn as -1
        self.closed = False

    def launch(self, plan: StepPlan) -> Ready:
        self.plans.append(plan)
        limits = self.context.limits
        assert (plan.counts > 0).all(), f"a chunk without tokens: {plan.counts}"
        assert len(set(plan.slots.tolist())) == len(plan.slots) <= limits.max_num_seqs, "one row twice in a step, or too many"
        assert plan.counts.sum() <= limits.max_num_batched_tokens, "the step is over its token budget"
        for source, target in plan.moves.tolist():
            self._move(source, target)
        update_table(self.table, plan.new_blocks)
        for (slot, _), params in zip(plan.admitted.tolist(), plan.params, strict=True):
            self.seeds[slot] = (params.seed or 0) if params.temperature > 0 else 0
        layout = lay_out(plan, self.table, self.context.block_size)
        tokens = np.where(layout.tokens == ON_DEVICE, self.last_token[layout.token_slots], layout.tokens)
        written: set[int] = set()
        for token, position, slot, place in zip(
            tokens.tolist(), layout.positions.tolist(), layout.token_slots.tolist(), layout.kv_slots.tolist(), strict=True
        ):
            assert place >= self.context.block_size, "the scratch block was written"
            assert place not in written, "two tokens of one step in one place"
            written.add(place)
            before = self._cell(slot, position - 1)[2] if position else 0
            self.cells[place] = (token, position, digest(before, token, position))
        drawn = []
        for slot, position in zip(layout.rows.tolist(), layout.draw_positions.tolist(), strict=True):
            seen = tuple(self._cell(slot, p) for p in range(position))
            token = next_token(seen, self.seeds[slot])
            drawn.append(-1 if self.poison(token) else token)
            self.last_token[slot] = max(drawn[-1], 0)
        return Ready(Sampled(np.array(drawn, np.int64)))

    def _move(self, source: int, target: int) -> None:
        size = self.context.block_size
        for offset in range(size):
            cell = self.cells.get(source * size + offset)
            if cell is not None:
                self.cells[target * size + offset] = cell

    def _cell(self, slot: int, position: int) -> Cell:
        size = self.context.block_size
        block = int(self.table[slot, position // size])
        cell = self.cells.get(block * size + position % size)
        assert block and cell is not None and cell[1] == position, f"slot {slot} reads position {position}: {cell}"
        return cell

    def close(self) -> None:
        self.closed = True


class FakeEngine(Engine):
    """An engine on the fake model whose scheduler and allocator are watched."""

    scheduler: WatchedScheduler
    kv: WatchedAllocator
    executor: FakeExecutor


class VirtualClock(Clock):
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


def make_engine(
    scheduler: Callable[[HostContext], Scheduler],
    allocator: Callable[[HostContext], KVAllocator],
    *,
    block_size: int = 4,
    blocks: int = 40,
    slots: int = 8,
    budget: int = 16,
    max_len: int = 64,
    overlap: int = 0,
    clock: Clock | None = None,
    eos: frozenset[int] = frozenset(),
) -> FakeEngine:
    """`blocks` are usable ones; `budget` tokens per step; at most `slots` requests resident."""
    clock = clock or VirtualClock()
    context = HostContext(Limits(slots, budget, max_len), block_size, blocks, clock)
    kv = WatchedAllocator(allocator(context), context)
    policy = WatchedScheduler(scheduler(context), context)
    return FakeEngine(policy, kv, FakeExecutor(context), context, clock=clock, overlap=overlap, vocab_size=VOCAB, eos=eos)


def check_books(engine: FakeEngine) -> None:
    """Every block of a live table has a holder, none twice in one table; free + reusable + held is the pool (B06, B20)."""
    _, _, held = engine.kv.audit()
    seats = [request.seat for request in engine.live.values() if request.seat]
    in_tables = [block for seat in seats for block in seat.blocks if block]
    assert all(len(set(seat.blocks) - {0}) == sum(block > 0 for block in seat.blocks) for seat in seats), "a block twice"
    assert len(set(in_tables)) == held, "blocks are held that no live request has, or the other way round"
    assert engine.kv.holders.total() == len(in_tables), "holds and tables differ"
    assert len({seat.slot for seat in seats}) == len(seats), "two requests on one seat"
    assert len(engine.seats.free_slots) + len(seats) == engine.context.limits.max_num_seqs, "a seat is lost"


@dataclass
class Run:
    """What came out of a workload, by number of request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    messages: dict[int, str] = field(default_factory=dict)
    steps: int = 0


def drive(engine: FakeEngine, work: Work, seed: int = 0, bound: int = 3000, label: bool = False) -> Run:
    """Submit while running, in bursts; check the books after every step. label: requests carry labels, as clients send them."""
    rng, todo, run = random.Random(seed), list(work), Run()
    requests: dict[int, Request] = {}
    while todo or engine.busy:
        for _ in range(rng.randrange(0, 4)):
            if todo:
                number = len(work) - len(todo)
                request = engine.submit(*todo.pop(0), labels=labels(number) if label else None)
                requests[request.id] = request
        if not engine.busy:
            continue
        for output in engine.step():
            number = output.request.id
            assert number not in run.ends, "output after the end"
            run.tokens.setdefault(number, []).extend(output.tokens)
            if output.finish_reason:
                run.ends[number], run.messages[number] = output.finish_reason, output.request.message
        check_books(engine)
        run.steps += 1
        assert run.steps < bound, f"no progress: {run.steps} steps, and {len(engine.live)} requests are not done"
    assert engine.kv.audit()[2] == 0, "blocks are held when all requests have ended"
    assert set(run.ends) == set(requests), "requests are lost"
    for number, request in requests.items():
        assert request.tokens[request.num_prompt :] == run.tokens.get(number, []), "the stream differs from the request"
    return run


def labels(number: int) -> dict[str, object]:
    """Labels that a request may carry, and often lacks."""
    return [{}, {"client": "ab"[number % 2]}, {"priority": number % 3}, {"deadline": 5.0, "expected_tokens": 7}][number % 4]


def workload(seed: int, count: int = 14, longest: int = 64) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share prefixes and repeat exactly; every second one stops at a token of its own continuation."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(12)]
    work: list[tuple[list[int], SamplingParams]] = []
    for i in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(0 if i % 3 else 1, 22))]
        prompt = list(work[-1][0]) if i % 5 == 4 else shared[: rng.choice([0, 4, 8, 12])] + own or [5]
        wanted, heat = rng.randrange(1, 20), float(i % 2)
        params = SamplingParams(temperature=heat, max_tokens=wanted, seed=i + 1 if heat else 0)
        if i % 4 < 2:
            stop = rng.choice(define(prompt, params, min(len(prompt) + wanted, longest)))
            params = SamplingParams(temperature=heat, max_tokens=wanted, seed=params.seed, stop_token_ids=[stop])
        work.append((prompt, params))
    return work


def expected(work: Work, longest: int = 64) -> dict[int, list[int]]:
    """The definition's tokens for each."""
    return {i: define(p, s, min(len(p) + s.max_tokens, longest)) for i, (p, s) in enumerate(work)}
