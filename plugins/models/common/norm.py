"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from core.interfaces import DeviceContext
from plugins.models.common.pieces import Piece, Pieces, fastest, parameter


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; torch accumulates in float32. [..., E] -> [..., E]"""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum). Both inputs stay unchanged."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


class RMSNorm:
    """A norm with its weight [E], the same on every rank."""

    def __init__(self, size: int, eps: float, context: DeviceContext) -> None:
        self.weight, self.eps = parameter(context, size), eps
        self._norm, self._add_norm = fastest(rms_norm, context), fastest(add_rms_norm, context)

    def pieces(self) -> Pieces:
        """The one weight."""
        yield "weight", Piece(tuple(self.weight.shape), (slice(None),), self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). The caller gives both up: fused, the results take their memory."""
        return self._add_norm(x, residual, self.weight, self.eps)
