"""How parameters are filled: each tensor of a checkpoint has a piece that this rank reads, and a place where it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from core.interfaces import DeviceContext, Parallel, Weight


@dataclass(frozen=True)
class Cut:
    """The part [begin, end) of a dimension of `full` elements that this rank keeps."""

    full: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def slice(self) -> slice:
        return slice(self.begin, self.end)

    @classmethod
    def whole(cls, full: int) -> Cut:
        """All of it."""
        return cls(full, 0, full)

    @classmethod
    def even(cls, full: int, parallel: Parallel, what: str) -> Cut:
        """An equal share of each rank. ValueError if there is none."""
        if full % parallel.size:
            raise ValueError(
                f"{what} ({full}) must be a multiple of tensor_parallel_size ({parallel.size}); choose a divisor of {full}"
            )
        share = full // parallel.size
        return cls(full, share * parallel.rank, share * (parallel.rank + 1))


@dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint as this rank sees it."""

    shape: tuple[int, ...]  # of the whole tensor
    take: tuple[slice, ...]  # what this rank reads
    into: Tensor  # where it goes: a view of a parameter, possibly a packed one

    def load(self, weight: Weight) -> None:
        """Read the slice, and nothing else of the tensor."""
        assert tuple(weight.shape) == self.shape, (weight.shape, self.shape)
        if self.into.numel():
            self.into.copy_(weight[self.take])


Pieces = Iterator[tuple[str, Piece]]
"""Pairs of a name, relative to the layer's own place in the checkpoint, and the piece."""


def prefixed(prefix: str, pieces: Iterable[tuple[str, Piece]]) -> Pieces:
    """The same pieces with `prefix` and a dot before each name."""
    return ((f"{prefix}.{name}", piece) for name, piece in pieces)


def parameter(context: DeviceContext, *shape: int) -> Tensor:
    """A frozen parameter, uninitialised, where the model lives."""
    return torch.empty(shape, device=context.device, dtype=context.dtype)


def fastest(function: Callable[..., Any], context: DeviceContext) -> Callable[..., Any]:
    """The Triton kernel of the same name if the engine runs fused, else the function, under torch.compile if so asked."""
    if context.fused:
        # Here: Triton need not be installed where nothing is fused.
        return getattr(import_module("plugins.models.common.kernels"), function.__name__)
    return torch.compile(function, dynamic=True) if context.compile else function
