"""The least time that a load can take on a machine: every operator of every step at its roofline, one after the other.

Counted is necessary work only: weights once per step, each cached position once per step (a prefix that all prompts share
once for all rows), logits written and read once. Steps are those of prompts-first scheduling with a cache that never
evicts. No launch costs anything, and nothing between the products of a layer does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.interfaces import Limits


@dataclass(frozen=True)
class Machine:
    """What the device was seen to do."""

    bandwidth: float  # bytes/s, read and written ones both counted
    flops: float  # FLOP/s of a matrix product


@dataclass(frozen=True)
class Sizes:
    """What a decoder reads and computes, all layers together."""

    body: int  # weights in the matrices of the layers
    head: int  # weights of the LM head
    vocab: int
    kv: int  # numbers stored for one position
    pair_flop: int  # of attention, for one query and one key

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """From config.json's words."""
        hidden, layers, heads = (config[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        size = config.get("head_dim") or hidden // heads
        queries, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
        layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * config["intermediate_size"]
        vocab = config["vocab_size"]
        return cls(layers * layer, hidden * vocab, vocab, 2 * layers * keys, 4 * layers * queries)


@dataclass(frozen=True)
class Pass:
    """One step."""

    tokens: int  # computed
    rows: int  # drawn
    reads: int  # cached positions read, each counted once
    pairs: int  # (query, key) pairs that attend


def passes(lengths: Sequence[tuple[int, int]], shared: int, limits: Limits) -> Iterator[Pass]:
    """Prompts first, as many as fit; one longer than the budget goes in pieces. lengths: (prompt, output) per request."""
    waiting = deque((min(shared, prompt - 1) if i else 0, prompt, output) for i, (prompt, output) in enumerate(lengths))
    running: list[tuple[int, int]] = []  # (positions visible to its next token, tokens still to draw)
    while waiting or running:
        if chunks := list(_admit(waiting, running, limits)):
            yield _prefill(chunks, shared)
            continue
        context = sum(visible for visible, _ in running)
        common = min(shared, min(visible for visible, _ in running))
        yield Pass(len(running), len(running), context - (len(running) - 1) * common - len(running), context)
        running = [(visible + 1, left - 1) for visible, left in running if left > 1]


def _admit(
    waiting: deque[tuple[int, int, int]], running: list[tuple[int, int]], limits: Limits
) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether it draws) of the chunks of one step."""
    budget, seats, first = limits.max_num_batched_tokens, limits.max_num_seqs - len(running), True
    while waiting and seats and budget:
        start, prompt, output = waiting[0]
        if prompt - start > budget and not first:
            return
        end, first = min(prompt, start + budget), False
        budget, seats = budget - (end - start), seats - 1
        if end < prompt:
            waiting[0] = end, prompt, output
        else:
            waiting.popleft()
            if output > 1:
                running.append((prompt + 1, output - 1))
        yield start, end, end == prompt


def _prefill(chunks: Sequence[tuple[int, int, bool]], shared: int) -> Pass:
    common = min(shared, max(end for _, end, _ in chunks))
    return Pass(
        tokens=sum(end - start for start, end, _ in chunks),
        rows=sum(draws for _, _, draws in chunks),
        reads=common + sum(end - min(common, end) for _, end, _ in chunks),
        pairs=sum((end * (end + 1) - start * (start + 1)) // 2 for start, end, _ in chunks),
    )


def seconds_of(step: Pass, sizes: Sizes, machine: Machine, width: int) -> dict[str, float]:
    """Operator -> seconds. width: bytes per number, of weights, cache and logits."""

    def roof(numbers: float, flop: float) -> float:
        return max(numbers * width / machine.bandwidth, flop / machine.flops)

    return {
        "attention": roof(sizes.kv * (step.reads + step.tokens), sizes.pair_flop * step.pairs),
        "layers": roof(sizes.body, 2 * sizes.body * step.tokens),
        "head": roof(sizes.head, 2 * sizes.head * step.rows) if step.rows else 0.0,
        "sampling": roof(2 * step.rows * sizes.vocab, 0.0),
    }


def limit_of(
    lengths: Sequence[tuple[int, int]], shared: int, limits: Limits, sizes: Sizes, machine: Machine, width: int
) -> dict[str, Any]:
    """Seconds, output tokens/s, seconds by operator, and steps."""
    parts: Counter[str] = Counter()
    steps = 0
    for step in passes(lengths, shared, limits):
        steps += 1
        for name, seconds in seconds_of(step, sizes, machine, width).items():
            parts[name] += seconds  # type: ignore[assignment]
    seconds = float(sum(parts.values()))
    tokens = sum(output for _, output in lengths)
    return {"seconds": seconds, "output_tokens_per_s": tokens / seconds, "parts_s": dict(parts), "steps": steps}
