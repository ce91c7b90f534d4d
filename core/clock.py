"""Real time. A simulated executor brings a virtual clock with the same two methods."""

from __future__ import annotations

import time


class Clock:
    """Seconds since an arbitrary origin."""

    def __call__(self) -> float:
        return time.perf_counter()

    def wait(self, until: float) -> None:
        """Return at `until` or later."""
        time.sleep(max(0.0, until - self()))
