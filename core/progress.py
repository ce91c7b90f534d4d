"""Prefill and decode speed, side by side: in a progress bar, and as a summary of the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from core.engine import Engine, Output


class Progress:
    """Steps an engine and keeps count. A step that holds prompt tokens counts as prefill time, any other one as decode."""

    def __init__(self, engine: Engine, total: int, show: bool) -> None:
        self.engine = engine
        self.tokens = {"prefill": 0, "decode": 0}
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self._latest = {"prefill": "-", "decode": "-"}
        self._bar = tqdm(total=total, desc="Generating", disable=not show, dynamic_ncols=True, file=sys.stderr)

    def step(self) -> list[Output]:
        """One step of the engine."""
        stats, started = self.engine.stats, time.perf_counter()
        tokens, decode = stats.tokens, stats.decode_tokens
        outputs = self.engine.step()
        seconds, decode = time.perf_counter() - started, stats.decode_tokens - decode
        prefill = stats.tokens - tokens - decode
        self.seconds["prefill" if prefill else "decode"] += seconds
        for name, count in (("prefill", prefill), ("decode", 0 if prefill else decode)):
            self.tokens[name] += count
            if count:
                self._latest[name] = f"{count / seconds:.0f} tok/s"
        if not self._bar.disable:
            self._bar.set_postfix(self._latest, refresh=False)
        return outputs

    def finished(self, count: int) -> None:
        """So many requests more have ended."""
        self._bar.update(count)

    def close(self) -> None:
        self._bar.close()

    def rates(self) -> dict[str, float]:
        """Tokens per second of prompts and of steps that only decode; 0 where there was none."""
        rates = {name: count / self.seconds[name] if count else 0.0 for name, count in self.tokens.items()}
        return {f"{name}_tokens_per_s": rate for name, rate in rates.items()}


@contextmanager
def progress(engine: Engine, total: int, show: bool | None) -> Iterator[Progress]:
    """show=None: if stderr is a terminal."""
    made = Progress(engine, total, sys.stderr.isatty() if show is None else show)
    try:
        yield made
    finally:
        made.close()
