"""A traced run: trace.json for Chrome or Perfetto, and how long the device was really at work."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.profiler import profile

AT_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the trace


class Tracer:
    """Traces the first `steps` steps of a run: pass `on_step` to it, then `finish`."""

    def __init__(self, steps: int) -> None:
        self.wanted, self.steps, self.seconds = steps, 0, 0.0
        self.running = True
        self.profiler = profile()  # whatever the machine has: CPU, and the GPU if there is one
        self.profiler.start()
        self.started = time.perf_counter()

    def on_step(self, count: int) -> None:
        """`count` steps are done."""
        self.steps = self.steps if not self.running else count
        if count >= self.wanted:
            self._stop()

    def finish(self, path: Path) -> dict[str, Any]:
        """Write the trace; what is told of it in the record."""
        self._stop()
        self.profiler.export_chrome_trace(str(path))
        busy = busy_seconds(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
        return {"trace": path.name, "steps": self.steps, "seconds": self.seconds, "gpu_busy_s": busy}

    def _stop(self) -> None:
        if self.running:
            self.seconds, self.running = time.perf_counter() - self.started, False
            self.profiler.stop()


def busy_seconds(events: Iterable[dict[str, Any]]) -> float | None:
    """Time covered by work of the device; None where there is none in the trace."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in AT_WORK and "dur" in e)
    if not spans:
        return None
    covered, reached = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / 1e6
