"""What happens to q and k before attention, for backends that do not fuse it: per-head RMSNorm, then rotary embedding.

T tokens, H query heads, K KV heads, D head size. Pairs are half-split: element i turns with element i + D / 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from core.interfaces import Prologue


def apply_prologue(q: Tensor, k: Tensor, positions: Tensor, prologue: Prologue) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, K, D], positions [T] -> both normed and rotated, computed in float32, in the input's dtype.

    The inputs may be strided views of one buffer and stay unchanged; the results are views of one new buffer.
    """
    heads, half = q.shape[1], q.shape[2] // 2
    x = torch.cat((_normed(q, prologue.q_norm, prologue.eps), _normed(k, prologue.k_norm, prologue.eps)), 1).float()
    cos, sin = prologue.cos_sin.index_select(0, positions)[:, None].split(half, -1)  # [T, 1, D / 2]
    first, second = x.split(half, -1)
    turned = x.unflatten(-1, (2, half)) * cos[:, None]
    turned[:, :, 0].addcmul_(second, sin, value=-1)
    turned[:, :, 1].addcmul_(first, sin)
    turned = turned.flatten(-2).to(q.dtype)
    return turned[:, :heads], turned[:, heads:]


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
