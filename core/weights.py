"""From a checkpoint's tensors to a model: every tensor exactly once, or an error that names the culprits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.checkpoint import Checkpoint
    from core.interfaces import ModelArch, Weight


def load_weights(
    model: ModelArch, checkpoint: Checkpoint, *, progress: bool | None = None, pulse: Callable[[], None] = lambda: None
) -> None:
    """Check names and shapes, then let the model take its tensors one by one.

    progress: a bar on stderr; None: on rank 0, if stderr is a terminal. pulse: called before each tensor; may raise.
    """
    wanted, parallel = model.weights(), model.context.parallel
    found, unused = checkpoint.shapes(wanted, (parallel.rank, parallel.size))
    check(wanted, found, unused, checkpoint.source.files)
    tensors = checkpoint.tensors(wanted, undo=model.from_gguf, dtype=model.context.dtype, shapes=found)
    tensors = _with_pulse(tensors, pulse)
    shown = parallel.rank == 0 and sys.stderr.isatty() if progress is None else progress
    model.load(_bar(tensors, len(wanted)) if shown else tensors)


def check(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], unused: set[str], files: list[str]
) -> None:
    """Raise ValueError for tensors that are missing, left over or of another shape, all at once."""
    misshapen = [
        f"{name} (wanted {tuple(wanted[name])}, got {tuple(shape)})"
        for name, shape in found.items()
        if tuple(shape) != tuple(wanted[name])
    ]
    problems = {"missing": set(wanted) - set(found), "unexpected": unused, "of another shape": misshapen}
    text = "; ".join(f"{len(names)} {what}: {_listed(names)}" for what, names in problems.items() if names)
    if text:
        raise ValueError(
            f"the checkpoint does not fit the model: {text}. Looked at {_listed(files)};"
            " is it complete, and is arch= the right one?"
        )


def _with_pulse(tensors: Iterator[tuple[str, Weight]], pulse: Callable[[], None]) -> Iterator[tuple[str, Weight]]:
    for item in tensors:
        pulse()
        yield item


def _bar(tensors: Iterator[tuple[str, Weight]], total: int) -> Iterator[tuple[str, Weight]]:
    from tqdm import tqdm

    yield from tqdm(tensors, total=total, desc="loading weights", unit="tensor", file=sys.stderr, leave=False)


def _listed(found: Iterable[str], limit: int = 8) -> str:
    """Names for a message, the first few of many."""
    names = sorted(found)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
