"""The loop: schedule, launch, commit. Knows requests, plans and drawn tokens; no tensor, no text, no device.

With overlap 1 a step is launched before the one in flight is committed: a token's value arrives one step late, a stop by
token is then a late event and the surplus token is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from core.arrays import all_below
from core.clock import Clock
from core.interfaces import Drawn, Executor, HostContext, KVAllocator, Request, SamplingParams, Scheduler, StepPlan
from core.observers import Observers, request_record, step_record
from core.parallel import ExecutorLost
from core.stats import Stats
from core.step import Chunk, Seats, StepBuilder


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one request. `finish_reason` is None while it goes on."""

    request: Request
    tokens: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(slots=True)
class InFlight:
    chunks: list[Chunk]
    drawn: Drawn
    evictions: int


class Engine:
    """One scheduler, one allocator, one executor."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVAllocator,
        executor: Executor,
        context: HostContext,
        *,
        clock: Clock | None = None,
        overlap: int = 0,
        vocab_size: int = 2**31 - 1,
        eos: frozenset[int] = frozenset(),
        wants_history: bool = False,
        observers: Observers | None = None,
    ) -> None:
        self.scheduler, self.kv, self.executor, self.context = scheduler, kv, executor, context
        self.clock, self.observers = clock or Clock(), observers or Observers()
        self.overlap, self.vocab_size, self.eos, self.wants_history = overlap, vocab_size, eos, wants_history
        self.seats = Seats(kv, context.limits.max_num_seqs, context.block_size)
        self.stats = Stats()
        self.live: dict[int, Request] = {}  # submitted, not finished
        self._queued: dict[int, Request] = {}  # of these, known to the scheduler
        self._flight: deque[InFlight] = deque()
        self._early: list[Output] = []  # ended without a step
        self._ends: dict[int, Callable[[int], bool]] = {}  # of requests that something else than a token id may end
        self._submitted = 0
        self.lost: ExecutorLost | None = None  # every step raises it, until `revive`

    @property
    def busy(self) -> bool:
        return bool(self._queued or self._flight or self._early)

    def limit_of(self, tokens: list[int], params: SamplingParams) -> int:
        """Total length at which the request ends. ValueError if the prompt can never run."""
        longest, pool = self.context.limits.max_model_len, self.context.num_blocks * self.context.block_size
        n = len(tokens)
        if not n:
            raise ValueError("the prompt is empty (0 tokens); give at least one token")
        if n > longest:
            raise ValueError(f"the prompt has {n} tokens, max_model_len is {longest}; shorten it or raise max_model_len")
        if n > pool:
            raise ValueError(f"the prompt has {n} tokens, the KV cache holds {pool}; shorten it or raise num_kv_blocks")
        if not all_below(tokens, self.vocab_size):
            bad = next(t for t in tokens if not 0 <= t < self.vocab_size)
            raise ValueError(f"token id {bad} of the prompt is outside the vocabulary (0 to {self.vocab_size - 1})")
        return min(n + params.max_tokens, longest, pool)

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        labels: Mapping[str, Any] | None = None,
        arrival: float | None = None,
        limit: int | None = None,
        ends: Callable[[int], bool] | None = None,
    ) -> Request:
        """Queue a request; ValueError (and nothing queued) if it can never run. limit: what `limit_of` answered, if asked.
        ends: told every drawn token in order; True ends the request with "stop". Stop strings need it: there is no text here.

        An unseeded one gets its seed from the engine's and the number of the submission, so that a run can be repeated.
        """
        limit = self.limit_of(tokens, params) if limit is None else limit
        assert ends is not None or not params.stop, "stop strings without the one who finds them"
        number = self._submitted
        self._submitted += 1
        if params.seed is None:
            params = params.with_seed((self.context.seed * 1_000_003 + number) % 2**63)
        stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)
        arrival = self.clock() if arrival is None else arrival
        request = self.live[number] = Request(number, list(tokens), params, limit, stop, arrival, labels or {})
        if ends is not None:
            self._ends[number] = ends
        if request.exhausted:
            self._end_early(request, "length")
        else:
            self._queued[number] = request
            self.scheduler.add(request)
        return request

    def abort(self, number: int) -> None:
        """End a request now, blocks and all; unknown and finished ones are ignored."""
        if number in self.live:
            self._finish(self.live[number], "abort")

    def step(self) -> list[Output]:
        """Schedule and launch one step, commit what is due; returns the tokens that became known."""
        if self.lost is not None:
            raise self.lost
        launched = bool(self._queued) and self._launch()
        outputs, self._early = self._early, []
        while len(self._flight) > (self.overlap if launched else 0):
            self._commit(self._flight.popleft(), outputs)
        return outputs

    def revive(self, scheduler: Scheduler, kv: KVAllocator, executor: Executor, context: HostContext) -> None:
        """Go on with new parts. Unfinished requests are queued again as they were submitted, their tokens so far known."""
        self.scheduler, self.kv, self.executor, self.context = scheduler, kv, executor, context
        self.seats = Seats(kv, context.limits.max_num_seqs, context.block_size)
        self.lost = None
        self._flight.clear()
        self._queued.clear()
        for request in list(self.live.values()):
            request.metrics.preemptions += request.seat is not None
            request.seat, request.promised = None, 0
            request.draft, request.keys = [], []
            request.limit = min(request.limit, context.num_blocks * context.block_size)
            if request.exhausted:
                self._end_early(request, "length")
            else:
                self._queued[request.id] = request
                scheduler.add(request)

    def _launch(self) -> bool:
        budget = self.context.limits.max_num_batched_tokens
        builder = StepBuilder(self.seats, budget, self.clock(), self.wants_history)
        try:
            self.scheduler.schedule(builder)
        except BaseException:
            builder.abandon()
            raise
        for request in builder.evicted:
            request.metrics.preemptions += 1
        self.stats.evictions += len(builder.evicted)
        if builder.empty:
            self._idle(builder)
            return False
        for request in builder.admitted:
            if not request.metrics.preemptions:
                request.metrics.cached_tokens = builder.chunks[request].start
                self.stats.cached_tokens += request.metrics.cached_tokens
        plan, chunks = builder.seal()
        try:
            drawn = self.executor.launch(plan)
        except BaseException as error:
            self._broken(chunks, error)
            raise
        self._flight.append(InFlight(chunks, drawn, len(builder.evicted)))
        self._count(plan)
        for chunk in chunks:
            request = chunk.request
            if len(request.tokens) + request.promised >= request.limit:
                self._retire(request)
        return True

    def _count(self, plan: StepPlan) -> None:
        self.stats.steps += 1
        self.stats.tokens += len(plan.tokens)
        self.stats.decode_tokens += int(((plan.counts == 1) & (plan.draws == 1)).sum())

    def _idle(self, builder: StepBuilder) -> None:
        """Nothing was granted. Right while a step is in flight or seats changed; else wait as asked, or end who blocks."""
        if self._flight or builder.evicted:
            return
        if builder.until is not None:
            self.clock.wait(builder.until)
            return
        stuck = builder.refused or next(iter(self._queued.values()))
        free, reusable, held = self.kv.audit()
        stuck.message = (
            f"request {stuck.id} ({stuck.length} tokens) can never run: nothing is in flight and the scheduler granted nothing "
            f"(last refusal: {builder.short or 'none'}; KV blocks: {free} free, {reusable} reusable, {held} held)"
        )
        self._end_early(stuck, "error")

    def _commit(self, step: InFlight, outputs: list[Output]) -> None:
        try:
            ids = step.drawn.wait().tokens.tolist()
        except BaseException as error:
            self._broken(step.chunks, error)
            raise
        now, row = self.clock(), 0
        for chunk in step.chunks:
            request, draws = chunk.request, chunk.draws
            row += draws
            if request.finish_reason is not None:
                self.stats.surplus += draws > 0
                continue
            why = None
            if draws:
                drawn = ids[row - draws : row]
                why = self._draw(chunk, drawn if draws == 1 else self._accept(chunk, drawn), now, outputs)
            if why != "error":
                self.seats.settle(chunk)
            if why is not None:
                self._finish(request, why)
        if self.observers.step:
            record = step_record(self, step.chunks, step.evictions, now)
            self.observers.notify(self.observers.step, record)

    def _draw(self, chunk: Chunk, drawn: list[int], now: float, outputs: list[Output]) -> str | None:
        """Append what was drawn, as far as the request goes; why it ends, if it does."""
        request, why = chunk.request, None
        tokens, before, ends = request.tokens, len(request.tokens), self._ends.get(request.id)
        request.promised -= 1
        for token in drawn:
            if token < 0:
                why = "error"
                request.message = f"no finite logit for position {len(tokens)} (NaN or all masked)"
                self.kv.forget(chunk.seat.blocks)  # one bad row must not fail every later prompt that shares its blocks
                break
            tokens.append(token)
            if token in request.stop_ids or (ends is not None and ends(token)):
                why = "stop"
            elif len(tokens) >= request.limit:
                why = "length"
            if why is not None:
                break
        if request.metrics.first_token is None:
            request.metrics.first_token = now
        outputs.append(Output(request, tuple(tokens[before:]), why))
        return why

    def _accept(self, chunk: Chunk, drawn: list[int]) -> list[int]:
        """Sample and compare: exact, since noise depends on seed and position only."""
        right = 0
        while right < len(chunk.draft) and drawn[right] == chunk.draft[right]:
            right += 1
        self.stats.drafted += len(chunk.draft)
        self.stats.accepted += right
        chunk.request.draft = []
        return drawn[: right + 1]

    def _end_early(self, request: Request, why: str) -> None:
        self._finish(request, why)
        self._early.append(Output(request, (), why))

    def _finish(self, request: Request, why: str) -> None:
        request.finish_reason, request.metrics.finish = why, self.clock()
        self._retire(request)
        del self.live[request.id]
        self._ends.pop(request.id, None)
        if request.seat is not None:
            self.seats.release(request)
        if self.observers.finished:
            self.observers.notify(self.observers.finished, request_record(request))

    def _retire(self, request: Request) -> None:
        """It draws nothing more: the scheduler need not think of it."""
        if self._queued.pop(request.id, None) is not None:
            self.scheduler.remove(request)

    def _broken(self, chunks: list[Chunk], error: BaseException) -> None:
        """The executor failed: requests of that step end, no content of the cache can be trusted. After a lost one all wait."""
        if isinstance(error, ExecutorLost):
            steps = [chunks, *(step.chunks for step in self._flight)]
            error.requests = tuple(sorted({chunk.request.id for step in steps for chunk in step} & self.live.keys()))
            self.lost = error
            return
        for chunk in chunks:
            if chunk.request.finish_reason is None:
                chunk.request.message = f"{type(error).__name__}: {error}"
                self._end_early(chunk.request, "error")
        self.kv.forget(None)
        # Changes of the block table that travelled with the failed plan may not have arrived: tell them all again.
        seats = [request.seat for request in self.live.values() if request.seat]
        self.seats.rows = [(seat.slot, i, block) for seat in seats for i, block in enumerate(seat.blocks)]
