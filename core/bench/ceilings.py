"""What this device does at best, seen in the same run: a large copy, and a large matrix product."""

from __future__ import annotations

from collections.abc import Callable

import torch

from core import device
from core.bench.limit import Machine


def ceilings(where: torch.device, repeats: int = 12) -> Machine:
    """The best of several of each, on random numbers (products of zeros run faster). On a CPU smaller and in float32."""
    with torch.inference_mode():
        machine = Machine(_bandwidth(where, repeats), _flops(where, repeats))
    device.release(where)
    return machine


def _bandwidth(where: torch.device, repeats: int) -> float:
    count = 1 << 24 if where.type == "cpu" else 1 << 30
    source = torch.randint(0, 1 << 15, (count,), dtype=torch.int16, device=where)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), where, repeats)


def _flops(where: torch.device, repeats: int) -> float:
    side, dtype = (512, torch.float32) if where.type == "cpu" else (8192, torch.bfloat16)
    a, b = (torch.randn(side, side, device=where, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / _best(lambda: torch.mm(a, b, out=out), where, repeats)


def _best(work: Callable[[], object], where: torch.device, repeats: int) -> float:
    for _ in range(2):
        work()
    return min(device.time_of(work, where) for _ in range(repeats))
