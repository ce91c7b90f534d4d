"""The resolved configuration: what executors and worker processes are built from, printed and recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.checkpoint import Checkpoint
from core.interfaces import Component, Limits
from core.negotiate import show
from core.plugins import Registry
from core.plugins.loading import construct


@dataclass(frozen=True)
class Choice:
    """What fills one slot, and why."""

    component: Component
    settings: Any
    distribution: str
    version: str
    provider: str = ""  # the package that does the work, as found by the component's probe
    provider_version: str = ""
    reason: str = "default"  # default, command line, auto: ...


@dataclass(frozen=True)
class Resolved:
    """Everything that an executor needs."""

    choices: Mapping[str, Choice]
    limits: Limits
    device: str  # cpu, or kind:index
    dtype: str
    block_size: int  # tokens
    num_kv_blocks: int | None  # usable ones; None: from memory
    kv_memory: int | None  # bytes on a CPU; None: what the limits need, at most a quarter of what is free
    gpu_memory_utilization: float
    tensor_parallel_size: int
    overlap: int
    graphs: bool
    compile: bool
    fused: bool
    seed: int
    cpu_threads: int
    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()  # for the user: values that were lowered or raised
    registry: Registry | None = field(default=None, repr=False, compare=False)  # stays behind when pickled

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "registry": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def build(self, kind: str, context: Any) -> Any:
        """Import the target and build it, through the `inferlab_build` hook where plugins are at hand."""
        choice = self.choices[kind]
        if self.registry is None:
            return construct(choice.component, choice.settings, context)
        return self.registry.manager.hook.inferlab_build(
            kind=kind, component=choice.component, settings=choice.settings, context=context
        )


def describe(resolved: Resolved) -> tuple[str, dict[str, Any]]:
    """(what is printed at start, the same for result.json)."""
    rows = [("slot", "choice", "from", "why"), *_rows(resolved)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    r, limits = resolved, resolved.limits
    values = {
        "device": f"{r.device}, {r.dtype}",
        "block_size": r.block_size,
        "overlap": r.overlap,
        "graphs": show(r.graphs),
        **({"fusion": show(r.fused)} if r.device != "cpu" else {}),
        **{name: getattr(limits, name) for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")},
        "seed": r.seed,
    }
    lines.append(f"{r.checkpoint.name}: " + ", ".join(f"{name} {value}" for name, value in values.items()))
    return "\n".join([*lines, *(f"note: {note}" for note in r.notes)]), {kind: _record(c) for kind, c in r.choices.items()}


def _rows(resolved: Resolved) -> Iterator[tuple[str, str, str, str]]:
    for kind, choice in resolved.choices.items():
        provider = f", {choice.provider} {choice.provider_version}".rstrip() if choice.provider else ""
        yield kind, choice.component.name, f"{choice.distribution} {choice.version}{provider}", choice.reason


def _record(choice: Choice) -> dict[str, Any]:
    return {
        "name": choice.component.name,
        "target": choice.component.target,
        "settings": dataclasses.asdict(choice.settings),
        "distribution": choice.distribution,
        "version": choice.version,
        "provider": choice.provider,
        "provider_version": choice.provider_version,
        "reason": choice.reason,
    }
