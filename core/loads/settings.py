"""The group `load`: one typed record, filled by the presets in conf/load/. Light: imports no torch.

Arrivals, lengths, prefixes, sessions, clients and labels are chosen independently: `load=shared_prefix load.arrival=poisson
load.rate=8` is a load too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from core.errors import ConfigError

ARRIVALS = ("at_once", "poisson", "gamma", "ramp", "closed_loop", "trace")
CONTENTS = ("tokens", "text")
FORMATS = ("auto", "mooncake", "azure", "burstgpt")
LABELS = ("client", "priority", "deadline", "expected_tokens")
RANGES = ("input", "output", "long_input", "long_output", "deadline")


def setting(default: Any, doc: str) -> Any:
    """A field with the line that `--help` prints."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


@dataclass
class LoadSettings:
    """Lengths are in tokens, uniform between their two ends, both included."""

    num_requests: int = setting(256, "requests of a run (of a trace: its first ones)")
    seed: int = setting(0, "of the first run; each further one takes the next")
    arrival: str = setting("at_once", "at_once, poisson, gamma, ramp, closed_loop, trace")
    rate: float = setting(4.0, "requests per second (sessions, where turns > 1); of a ramp at its start")
    rate_end: float = setting(16.0, "ramp: requests per second at its end")
    burstiness: float = setting(1.0, "gamma: shape of the gaps; 1 is poisson, smaller comes in bursts, larger is more even")
    concurrency: int = setting(8, "closed_loop: requests (or sessions) under way at a time")
    turns: int = setting(1, "requests of a session; each continues the prompt and the answer of the one before")
    think_s: float = setting(1.0, "mean seconds between an answer and the next turn, exponential")
    clients: list[float] = setting([1.0], "relative rates of the clients; a request belongs to one of them")
    content: str = setting("tokens", "prompts are random token ids (tokens) or sentences through the tokenizer (text)")
    text_file: str | None = setting(None, "content=text: a UTF-8 file whose sentences are used; null: the built-in ones")
    shared: int = setting(0, "tokens that all prompts of a group begin with")
    groups: int = setting(1, "groups with a common beginning each")
    input_min: int = setting(100, "fewest tokens of each prompt's own; drawn uniformly up to input_max")
    input_max: int = setting(1024, "most tokens of each prompt's own")
    output_min: int = setting(100, "fewest tokens that a request generates; drawn uniformly up to output_max")
    output_max: int = setting(1024, "most tokens that a request generates")
    long_share: float = setting(0.0, "share of the requests that take the following lengths instead, in [0, 1]")
    long_input_min: int = setting(2048, "of the long requests: as input_min")
    long_input_max: int = setting(3072, "of the long requests: as input_max")
    long_output_min: int = setting(64, "of the long requests: as output_min")
    long_output_max: int = setting(256, "of the long requests: as output_max")
    max_token_id: int = setting(10_000, "lowered to the last id of the model's vocabulary")
    labels: list[str] = setting(list(LABELS), "labels that requests carry")
    priorities: int = setting(3, "priority is drawn from 0 .. priorities - 1; 0 is the most urgent")
    deadline_min_s: float = setting(5.0, "a deadline is at least so many seconds after the arrival; drawn uniformly")
    deadline_max_s: float = setting(30.0, "a deadline is at most so many seconds after the arrival")
    expected_error: float = setting(0.0, "expected_tokens is the output length times 1 +- this")
    kv_share: float | None = setting(
        None, "KV pool as a share of what the requests hold when all are longest; null: not shrunk"
    )
    file: str | None = setting(None, "trace: JSONL (Mooncake) or CSV (Azure, BurstGPT)")
    format: str = setting("auto", "trace: auto (by its columns), mooncake, azure, burstgpt")
    time_scale: float = setting(1.0, "trace: factor of all times; 0.5 is twice as fast")
    length_scale: float = setting(1.0, "trace: factor of all lengths, rounded up")

    def __post_init__(self) -> None:
        for name in ("num_requests", "concurrency", "turns", "groups", "max_token_id", "priorities"):
            self._at_least(name, 1)
        for name in ("input_min", "output_min", "long_input_min", "long_output_min"):
            self._at_least(name, 1)
        for name in ("seed", "shared", "think_s", "deadline_min_s", "expected_error"):
            self._at_least(name, 0)
        for name in ("rate", "rate_end", "burstiness", "time_scale", "length_scale"):
            self._above_zero(name, getattr(self, name))
        for name in RANGES:
            self._ordered(*(f.name for f in fields(self) if f.name.startswith((f"{name}_min", f"{name}_max"))))
        for name, allowed in (("arrival", ARRIVALS), ("content", CONTENTS), ("format", FORMATS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"load.{name} must be {' or '.join(allowed)}, got {getattr(self, name)!r}")
        self._check_lists()
        self._check_together()

    def _check_lists(self) -> None:
        if not self.clients:
            raise ConfigError("load.clients needs a relative rate for each client, e.g. [4,1,1]; got []")
        for share in self.clients:
            self._above_zero("clients", share)
        if strangers := [name for name in self.labels if name not in LABELS]:
            raise ConfigError(f"load.labels may hold {', '.join(LABELS)}; got {', '.join(strangers)}")

    def _check_together(self) -> None:
        if not 0 <= self.long_share <= 1:
            raise ConfigError(f"load.long_share must be in [0, 1], got {self.long_share}")
        if self.expected_error >= 1:
            raise ConfigError(f"load.expected_error must be in [0, 1), got {self.expected_error}")
        if self.kv_share is not None and not 0 < self.kv_share <= 1:
            raise ConfigError(f"load.kv_share must be in (0, 1] or null, got {self.kv_share}")
        if (self.arrival == "trace") != (self.file is not None):
            raise ConfigError(
                f"load.arrival={self.arrival} with load.file={self.file or 'null'}: a trace needs load.file=FILE, "
                "nothing else reads one"
            )
        if self.arrival == "trace" and (self.turns > 1 or self.shared):
            raise ConfigError("load.arrival=trace: prompts come from the file; leave load.turns and load.shared out")
        if self.text_file is not None and self.content != "text":
            raise ConfigError(f"load.text_file={self.text_file} is read with load.content=text only")

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not value >= least or not math.isfinite(value):
            raise ConfigError(f"load.{name} must be >= {least}, got {value!r}")

    def _above_zero(self, name: str, value: float) -> None:
        if isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"load.{name} must be > 0, got {value!r}")

    def _ordered(self, low: str, high: str) -> None:
        if getattr(self, low) > getattr(self, high):
            raise ConfigError(
                f"load.{low}={getattr(self, low)} is more than load.{high}={getattr(self, high)}; give both, or change one"
            )
