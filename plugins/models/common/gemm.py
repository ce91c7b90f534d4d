"""Linear maps by frozen weights: torch's own, oneDNN's with weights packed once for the CPU, Triton's for few tokens.

Packing is worth it on two Zen 4 cores: SmolLM2's products at 32 tokens take 43 ms instead of 75, its head alone 9 instead
of 25; and from two rows up a row's result does not depend on how many come with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.interfaces import DeviceContext


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in], weight [out, in], packed or not -> [T, out]."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def packed(weight: Tensor) -> Tensor:
    """The weight in the layout that `linear` is fastest with here: opaque on a CPU with oneDNN, unchanged elsewhere."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight)
    return weight


def skinny(context: DeviceContext) -> Any:
    """`gemv.Skinny` where the engine runs fused and in half precision."""
    if not context.fused or context.dtype == torch.float32:
        return None
    # Here: Triton need not be installed where nothing is fused.
    return import_module("plugins.models.common.gemv").Skinny(context.device)
