"""Programmatic dependent launch: a kernel is set up while its predecessor still runs, and waits inside for what it reads.

Every kernel that is launched so calls `await_turn` in every program, before it writes anything: from there on all that came
before is complete. What it may read earlier is what was there before the step's first ordinary kernel (the embedding, say,
or a product of cuBLAS): weights, tables, lengths, positions, what older steps left in the KV cache.
"""

# Triton fills tl.extra when it finds a GPU.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def await_turn(EARLY: tl.constexpr):
    """Let the next kernel be set up, then wait for the one before."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def early(x: Tensor) -> dict[str, Any]:
    """The launch options of a kernel that calls `await_turn`."""
    return {"EARLY": True, "launch_pdl": True} if x.is_cuda and able(x.device.index or 0) else {"EARLY": False}


@cache
def able(device: int) -> bool:
    """Hopper or newer, and a Triton that knows how (3.4)."""
    return torch.cuda.get_device_capability(device) >= (9, 0) and hasattr(tl.extra.cuda, "gdc_wait")
