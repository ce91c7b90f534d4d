"""The loads of `task=bench`: how many requests, how long their prompts and answers are, and what the prompts share.

Token ids only, drawn from one generator per run: shared tokens, then every prompt (its length, then its tokens), then
every output length. Presets are in conf/load/. Light: imports no torch, so that Hydra's options can be built from it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

from core.errors import ConfigError


@dataclass
class LoadSettings:
    """The group `load`. Lengths are in tokens, uniform between their two ends, both included."""

    num_requests: int = 256  # all sent at once
    shared: int = 0  # tokens that all prompts begin with
    input_min: int = 100  # tokens of each prompt's own
    input_max: int = 1024
    output_min: int = 100
    output_max: int = 1024
    max_token_id: int = 10_000  # lowered to the last id of the model's vocabulary
    seed: int = 0  # of the first run; each further one takes the next

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least = getattr(self, item.name), int(item.name not in ("shared", "seed"))
            if isinstance(value, bool) or not value >= least:
                raise ConfigError(f"load.{item.name} must be >= {least}, got {value!r}")
        for name in ("input", "output"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low > high:
                raise ConfigError(f"load.{name}_min={low} is more than load.{name}_max={high}; give both, or change one")


@dataclass(frozen=True)
class Load:
    """What one run sends."""

    seed: int
    prompts: list[list[int]]
    outputs: list[int]  # tokens wanted of each
    shared: int  # leading tokens that are the same in all prompts

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, output) of each request."""
        return [(len(p), n) for p, n in zip(self.prompts, self.outputs, strict=True)]

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)


def draw_load(settings: LoadSettings, number: int, vocab_size: int) -> Load:
    """The load of run `number`: other lengths and tokens for each, the same on every machine."""
    s, last = settings, min(settings.max_token_id, vocab_size - 1)
    draw = random.Random(s.seed + number).randint
    shared = [draw(0, last) for _ in range(s.shared)]
    prompts = [shared + [draw(0, last) for _ in range(draw(s.input_min, s.input_max))] for _ in range(s.num_requests)]
    outputs = [draw(s.output_min, s.output_max) for _ in range(s.num_requests)]
    return Load(s.seed + number, prompts, outputs, s.shared)
