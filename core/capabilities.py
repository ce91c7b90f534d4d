"""Constraints that components declare on values of the configuration, the model, the machine, or each other. Light.

What a constraint is about is named by its key in `Component.capabilities`:

    block_size, dtype, device, head_size, graphs, overlap, tensor_parallel_size, max_model_len, max_num_seqs,
    max_num_batched_tokens   a value of the run
    sampling.NAME            a parameter that a request gives explicitly
    model.NAME               a word of the model's config.json; None where it is not there
    load.labels              the labels that the requests of a benchmark's load carry
    SLOT                     the name of what fills another slot: "kv_allocator": OneOf("block_hash")
    SLOT.NAME                what that component states in `provides`: "kv_allocator.prefix_cache": OneOf(True); None where
                             it states nothing
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

SLOTS = ("scheduler", "kv_allocator", "attention", "arch", "sampler", "executor")
FACTS = (
    *("block_size", "dtype", "device", "head_size", "graphs", "overlap", "tensor_parallel_size"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "load.labels"),
)


@dataclass(frozen=True, init=False)
class OneOf:
    """The value is one of those listed."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)

    def ok(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return " or ".join(map(str, self.values))


@dataclass(frozen=True)
class MultipleOf:
    """A positive multiple of `n`."""

    n: int

    def ok(self, value: Any) -> bool:
        return isinstance(value, int) and value > 0 and value % self.n == 0

    def __str__(self) -> str:
        return f"a multiple of {self.n}"


@dataclass(frozen=True)
class AtLeast:
    """`n` or more."""

    n: int

    def ok(self, value: Any) -> bool:
        return isinstance(value, int) and value >= self.n

    def __str__(self) -> str:
        return f"at least {self.n}"


@dataclass(frozen=True, init=False)
class Includes:
    """The value is a collection that holds all of these."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)

    def ok(self, value: Any) -> bool:
        return isinstance(value, Collection) and all(v in value for v in self.values)

    def __str__(self) -> str:
        return f"a collection with {' and '.join(map(str, self.values))}"


Constraint = OneOf | MultipleOf | AtLeast | Includes


def unknown_keys(keys: Iterable[str]) -> list[str]:
    """Keys that nothing is known under: a constraint on one would never be checked."""
    names = (*FACTS, *SLOTS)
    prefixes = ("sampling.", "model.", *(f"{slot}." for slot in SLOTS))
    return [key for key in keys if key not in names and not key.startswith(prefixes)]


@dataclass(frozen=True)
class Probe:
    """What the probe of a chosen component found on this machine."""

    provider: str = ""  # e.g. the package that does the work
    version: str = ""
    capabilities: dict[str, Constraint] | None = None  # replace the declared ones, key by key
    problem: str = ""  # why it cannot run here, with the way out; "" if it can
