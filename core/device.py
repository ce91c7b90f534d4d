"""The machine: which devices there are, how much memory, and how bytes travel. The only file of the core that knows CUDA.

Every function has a CPU twin, so that the runner is written once.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.interfaces import Drawn, Sampled


def available_cuda() -> int:
    """Number of usable CUDA devices (CUDA_VISIBLE_DEVICES honoured)."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pick(device: str) -> str:
    """As `core.machine.pick`, which comes here where a driver is."""
    count = available_cuda()
    if device == "auto":
        return "cuda:0" if count else "cpu"
    if device == "cpu":
        return device
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdigit():
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if int(index or 0) >= count:
        why = f"{count} CUDA device(s) visible" if count else f"no CUDA device is visible to torch {torch.__version__}"
        raise ValueError(f"device={device}: {why}; use device=auto or device=cpu")
    return f"cuda:{index or 0}"


def available_memory() -> int:
    """Bytes of main memory that can still be used: the machine's and the cgroup's."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        free = next(int(line.split()[1]) * 1024 for line in meminfo.open() if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)


def describe(device: str) -> dict[str, Any]:
    """For result.json."""
    facts: dict[str, Any] = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    if device != "cpu":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def use(device: torch.device) -> None:
    """What this thread allocates, records and captures from now on belongs to this device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Start of a warm-up: give cached memory back and count the peak anew."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def memory(device: torch.device) -> dict[str, int]:
    """Bytes: total and used by the driver's view (other processes included), torch's current and peak."""
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    current, peak = stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]
    return {"total": total, "used": total - free, "current": current, "peak": peak}


def release(device: torch.device) -> None:
    """After the last reference is gone: hand cached memory back to the driver."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def moment(device: torch.device) -> Any:
    """A point in the device's stream of work, for `between`; None on a CPU, where work is done when it returns."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(start: Any, end: Any) -> float:
    """Seconds from one moment to another; both must have passed."""
    return start.elapsed_time(end) / 1e3


def time_of(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that the device needs for `work`."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start = moment(device)
    work()
    end = moment(device)
    synchronize(device)
    return between(start, end)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Bytes: torch's peak and what the driver counts as used now; on a CPU the largest resident size of the process."""
    if device.type == "cuda":
        return {name: memory(device)[name] for name in ("peak", "used", "total")}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


class Graph:
    """Captured work on fixed addresses; replaying it costs the host one call."""

    def __init__(self, work: Callable[[], Any], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.result = work()

    def replay(self) -> Any:
        """Run it again; its result lies where it always does."""
        self._graph.replay()
        return self.result


def graph_pool() -> Any:
    """Memory that all graphs share: they never run at the same time."""
    return torch.cuda.graph_pool_handle()


class Staging:
    """Named arrays of fixed size that travel to fixed addresses on a device in one asynchronous copy.

    depth: host buffers in turn. The one written now was copied `depth` steps ago, and that step has been waited for.
    """

    def __init__(self, sections: Mapping[str, np.dtype], size: int, depth: int, device: torch.device) -> None:
        at, spans = 0, {}
        for name, dtype in sections.items():
            spans[name] = (at, dtype)
            at += -(-size * dtype.itemsize // 16) * 16
        pin = device.type != "cpu"
        self._host = [torch.zeros(at, dtype=torch.uint8, pin_memory=pin) for _ in range(depth)]
        self._device = torch.zeros(at, dtype=torch.uint8, device=device)
        self._views = [{n: b.numpy()[s : s + size * d.itemsize].view(d) for n, (s, d) in spans.items()} for b in self._host]
        self.on_device = {
            n: self._device[s : s + size * d.itemsize].view(torch.from_numpy(np.zeros(0, d)).dtype)
            for n, (s, d) in spans.items()
        }
        self._turn = 0

    def next(self) -> dict[str, np.ndarray]:
        """The host arrays to be filled now."""
        self._turn = (self._turn + 1) % len(self._host)
        return self._views[self._turn]

    def send(self) -> None:
        self._device.copy_(self._host[self._turn], non_blocking=True)


class Ready:
    """Drawn on a device that computes at once."""

    def __init__(self, sampled: Sampled, order: np.ndarray | None) -> None:
        self.sampled = _on_host(sampled.tokens, sampled.extras, order)

    def wait(self) -> Sampled:
        return self.sampled


class OnItsWay:
    """Drawn on a CUDA device: an asynchronous copy and its event."""

    def __init__(self, sampled: Sampled, order: np.ndarray | None) -> None:
        def start(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)

        self.tokens, self.extras = start(sampled.tokens), {k: start(v) for k, v in sampled.extras.items()}
        self.order, self.done = order, torch.cuda.Event()
        self.done.record()

    def wait(self) -> Sampled:
        self.done.synchronize()
        return _on_host(self.tokens, self.extras, self.order)


def _on_host(tokens: Tensor, extras: Mapping[str, Tensor], order: np.ndarray | None) -> Sampled:
    def rows(x: Tensor) -> np.ndarray:
        found = x.numpy()
        if order is None:
            return found
        sorted_back = np.empty_like(found)
        sorted_back[order] = found
        return sorted_back

    return Sampled(rows(tokens), {name: rows(x) for name, x in extras.items()})


def to_host(sampled: Sampled, order: np.ndarray | None = None) -> Drawn:
    """Start the copy of what was drawn; waits for nothing. order[i]: the plan's row that row i of `sampled` is; None: i."""
    return OnItsWay(sampled, order) if sampled.tokens.is_cuda else Ready(sampled, order)


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Host arrays of one step as tensors; one pinned buffer and one asynchronous copy where the device is another one."""
    if device.type == "cpu":
        return {name: torch.from_numpy(a) for name, a in arrays.items()}
    sizes = {name: -(-a.nbytes // 16) * 16 for name, a in arrays.items()}
    # A fresh buffer each step: torch's pinned allocator reuses it only after the copy that reads it.
    staged = torch.empty(sum(sizes.values()), dtype=torch.uint8, pin_memory=True)
    host, at = staged.numpy(), 0
    for name, a in arrays.items():
        host[at : at + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        at += sizes[name]
    moved, out, at = staged.to(device, non_blocking=True), {}, 0
    for name, a in arrays.items():
        part = moved[at : at + a.nbytes]
        out[name] = part.view(torch.from_numpy(a[:0]).dtype).view(a.shape)
        at += sizes[name]
    return out
