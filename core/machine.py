"""What can be said of this machine without torch: whether a GPU may be there, and how many cores there are."""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache
from pathlib import Path

_DEVICES = r"auto|cpu|cuda(:\d+)?"


def pick(device: str) -> str:
    """auto, cpu or a GPU, with its number or without -> cpu, or a GPU with its number. Torch is asked only where a driver
    is. ValueError for a device that is not there."""
    if not re.fullmatch(_DEVICES, device):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if device == "cpu" or (device == "auto" and not has_driver()):
        return "cpu"
    if not has_driver():
        raise ValueError(f"device={device}: this machine has no driver of a GPU; use device=auto or device=cpu")
    from core import device as torch_device

    return torch_device.pick(device)


@cache
def has_driver() -> bool:
    """Whether the driver of a GPU is installed. Where it is not, torch finds no GPU either."""
    try:
        ctypes.CDLL("libcuda.so.1")  # loaded only, not started: processes may still be forked
    except OSError:
        return Path("/dev/kfd").exists()  # AMD's, whose libraries torch brings along
    return True


def default_threads() -> int:
    """Cores that this process may use: affinity and cgroup quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores
