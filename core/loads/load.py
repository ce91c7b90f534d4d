"""A load as it was drawn: plain data, ready to be sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Load:
    """What one run sends. Lists have an entry per request; empty ones mean: none."""

    seed: int
    prompts: list[list[int]]  # of a later turn: what it adds to the conversation
    outputs: list[int]  # tokens wanted of each
    shared: int  # leading tokens that are the same in all prompts
    arrivals: Sequence[float | None] = ()  # seconds after the start; None: when another one has ended; empty: all at once
    labels: Sequence[Mapping[str, Any]] = ()  # deadline in seconds after the arrival
    before: Sequence[int | None] = ()  # the turn before it
    thinks: Sequence[float] = ()  # seconds between the answer to that and this request
    concurrency: int | None = None  # closed loop: so many first turns under way
    split: bool = False  # several groups share prefixes, or turns do: no single bound of the work is known

    @property
    def at_once(self) -> bool:
        return not self.arrivals

    @property
    def open_loop(self) -> bool:
        """Requests come when they come, however long the queue is."""
        return bool(self.arrivals) and self.concurrency is None

    @cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, output) of each request; the prompt of a later turn holds all that was said before."""
        found: list[tuple[int, int]] = []
        for i, (prompt, output) in enumerate(zip(self.prompts, self.outputs, strict=True)):
            former = self.before[i] if self.before else None
            found.append((len(prompt) + (sum(found[former]) if former is not None else 0), output))
        return found

    @property
    def input_tokens(self) -> int:
        return sum(n for n, _ in self.lengths)

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)
