"""Which GPUs a cell gets, where there are several: each is used by one cell at a time, of all sweeps on this machine.

Light: asks the environment and the driver's own tool, loads neither torch nor the driver.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from core.sweep.process import stop

VISIBLE = "CUDA_VISIBLE_DEVICES"
AGAIN_S = 0.2


@cache
def visible() -> tuple[str, ...]:
    """Names of the GPUs that this process may use, as the variable takes them."""
    if (given := os.environ.get(VISIBLE)) is not None:
        return tuple(filter(None, (name.strip() for name in given.split(","))))
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.split())


@contextmanager
def reserved(count: int, names: Sequence[str]) -> Iterator[list[str]]:
    """Waits until `count` of them are free (all, if there are fewer); nobody else gets them until the block ends."""
    count = min(count, len(names))
    while True:
        with ExitStack() as held:
            mine: list[str] = []
            for name in names:
                mine += [name] if len(mine) < count and _take(name, held) else []
            if len(mine) == count:
                yield mine
                return
        if stop.is_set():
            raise KeyboardInterrupt
        time.sleep(AGAIN_S)


def _take(name: str, held: ExitStack) -> bool:
    path = Path(tempfile.gettempdir()) / f"inferlab-{os.getuid()}-gpu-{name}.lock"
    file: IO[str] = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    held.callback(file.close)
    return True
