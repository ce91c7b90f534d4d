"""The tensor-parallel group of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Solo:
    """A group of one rank: every collective is the identity."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over one rank: `x` itself."""
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The parts of one rank side by side: `x` itself."""
        return x
