"""How far a sweep is, on a terminal: a thread counts the cells that have ended, whichever process ran them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tqdm import tqdm

from core.files import read_json
from core.sweep.cell import CELL, UNFINISHED

EVERY_S = 0.5


class Bar:
    """Shown until `close`; nothing where stderr is no terminal."""

    def __init__(self, folder: Path, since: float, total: int) -> None:
        self.folder, self.since = folder, since
        self.bar = tqdm(total=total or None, desc="cells", unit="cell", disable=not sys.stderr.isatty())
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        if not self.bar.disable:
            self.thread.start()

    def close(self) -> None:
        self.closed.set()
        if self.thread.is_alive():
            self.thread.join()
        self.bar.close()

    def _watch(self) -> None:
        while not self.closed.wait(EVERY_S):
            self.show()
        self.show()

    def show(self) -> None:
        """Count again."""
        found = [read_json(path) for path in self.folder.glob(f"jobs/*/*/{CELL}")]
        states = [r["status"] for r in found if r and r["visited"] >= self.since and r["reason"] != UNFINISHED["reason"]]
        self.bar.n = len(states)
        self.bar.set_postfix({status: states.count(status) for status in dict.fromkeys(states)}, refresh=True)
