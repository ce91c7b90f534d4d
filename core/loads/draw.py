"""From settings to requests. Everything comes from the run's seed: the same on every machine.

Prompts and lengths are drawn from one generator (shared tokens, then every prompt: its length, then its tokens; then every
output length), so that `offline` is the load that others are measured by. What came later (arrivals, clients, groups, labels)
has generators of its own and leaves these numbers alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from core.loads.arrivals import arrivals
from core.loads.load import Load
from core.loads.settings import LABELS, LoadSettings
from core.loads.text import Writer
from core.loads.trace import Row, columns_of, read_trace

Encode = Callable[[str], list[int]]


def draw_load(settings: LoadSettings, number: int, vocab_size: int, encode: Encode | None = None) -> Load:
    """The load of run `number`: other lengths and tokens for each. encode: the tokenizer, for content=text."""
    s = settings
    seed = s.seed + number
    write = _content(s, seed, min(s.max_token_id, vocab_size - 1), encode)
    rows = read_trace(s) if s.arrival == "trace" else []
    prompts, outputs = _replayed(rows, seed, write) if rows else _drawn(s, seed, write)
    before, thinks = _sessions(s, seed)
    firsts = [i for i in range(s.num_requests) if i % s.turns == 0]
    times = [row.time for row in rows] or arrivals(s, len(firsts), _rng(seed, "arrivals"))
    due: list[float | None] = []
    if times is not None:
        due = [times[i // s.turns] if i % s.turns == 0 else None for i in range(s.num_requests)]
    elif s.arrival == "closed_loop" or s.turns > 1:
        due = [0.0 if s.arrival == "at_once" and i % s.turns == 0 else None for i in range(s.num_requests)]
    return Load(
        seed=seed,
        prompts=prompts,
        outputs=outputs,
        shared=s.shared if s.groups == 1 and s.turns == 1 else 0,
        arrivals=due,
        labels=_labels(s, seed, outputs, rows),
        before=before,
        thinks=thinks,
        concurrency=s.concurrency if s.arrival == "closed_loop" else None,
        split=s.groups > 1 or s.turns > 1 or any(row.hashes for row in rows),
    )


def filled_labels(settings: LoadSettings) -> frozenset[str]:
    """Labels that every request of the load carries. A trace tells of clients only where it has such a column."""
    named = frozenset(settings.labels)
    if settings.arrival == "trace" and not columns_of(settings).has_client:
        named -= {"client"}
    return named


Write = Callable[[random.Random, int], list[int]]  # so many token ids


def _rng(seed: int, name: str) -> random.Random:
    return random.Random(f"{seed} {name}")


def _content(s: LoadSettings, seed: int, last: int, encode: Encode | None) -> Write:
    if s.content == "tokens":
        return lambda rng, count: [rng.randint(0, last) for _ in range(count)]
    if encode is None:
        raise ValueError("load.content=text needs a model with a tokenizer; choose one, or load.content=tokens")
    return Writer(encode, s.text_file).write


def _drawn(s: LoadSettings, seed: int, write: Write) -> tuple[list[list[int]], list[int]]:
    rng = random.Random(seed)
    groups = [write(rng, s.shared) for _ in range(s.groups)]
    mixed, belongs = _rng(seed, "lengths"), _rng(seed, "groups")
    prompts: list[list[int]] = []
    long = [bool(s.long_share) and mixed.random() < s.long_share for _ in range(s.num_requests)]
    for i in range(s.num_requests):
        ends = (s.long_input_min, s.long_input_max) if long[i] else (s.input_min, s.input_max)
        tokens = write(rng, rng.randint(*ends))
        later = i % s.turns > 0  # it has the common beginning in its past
        prompts.append(tokens if later else groups[belongs.randrange(s.groups)] + tokens)
    outputs = [
        rng.randint(*((s.long_output_min, s.long_output_max) if is_long else (s.output_min, s.output_max))) for is_long in long
    ]
    return prompts, outputs


def _replayed(rows: Sequence[Row], seed: int, write: Write) -> tuple[list[list[int]], list[int]]:
    """Prompts of a trace: blocks that it says are equal are equal, all else is drawn."""
    blocks: dict[int, list[int]] = {}
    prompts: list[list[int]] = []
    for i, row in enumerate(rows):
        parts: list[int] = []
        for name in row.hashes:
            if name not in blocks:
                blocks[name] = write(_rng(seed, f"block {name}"), row.block)
            parts += blocks[name]
        own = write(_rng(seed, f"prompt {i}"), max(0, row.input - len(parts)))
        prompts.append((parts + own)[: row.input])
    return prompts, [row.output for row in rows]


def _sessions(s: LoadSettings, seed: int) -> tuple[list[int | None], list[float]]:
    if s.turns == 1:
        return [], []
    rng = _rng(seed, "sessions")
    before = [i - 1 if i % s.turns else None for i in range(s.num_requests)]
    thinks = [rng.expovariate(1 / s.think_s) if s.think_s and i % s.turns else 0.0 for i in range(s.num_requests)]
    return before, thinks


def _labels(s: LoadSettings, seed: int, outputs: Sequence[int], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One session is one client's; the other labels are drawn for each request."""
    rng, ends = _rng(seed, "labels"), list(accumulate(s.clients))
    filled, labels, client = filled_labels(s), [], 0
    for i, output in enumerate(outputs):
        if i % s.turns == 0:
            spot = rng.random() * ends[-1]
            client = next((c for c, end in enumerate(ends) if spot < end), len(ends) - 1)
        error = 1 + s.expected_error * rng.uniform(-1, 1)
        drawn = {
            "client": rows[i].client if rows else str(client),
            "priority": rng.randrange(s.priorities),
            "deadline": rng.uniform(s.deadline_min_s, s.deadline_max_s),
            "expected_tokens": max(1, round(output * error)),
        }
        labels.append({name: drawn[name] for name in LABELS if name in filled})
    return labels
