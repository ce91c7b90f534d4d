"""Processes of a sweep: how they are started, waited for, and ended with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

GRACE_S = 10.0  # between asking a process to end and ending it
POLL_S = 0.02
stop = threading.Event()  # set: cells that run in threads are to end


def python(module: str) -> list[str]:
    """Runs a module of ours. A core.py in the working directory would be run instead, so -P; a checkout that is not installed
    needs its working directory."""
    safe = [] if Path.cwd() == Path(__file__).parent.parent.parent else ["-P"]
    return [sys.executable, *safe, "-m", module]


def wait(child: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Its exit code. subprocess.TimeoutExpired after so long; KeyboardInterrupt once `stop` is set."""
    if not ended(child, timeout_s):
        raise subprocess.TimeoutExpired(child.args, timeout_s)
    return child.returncode


def end(child: subprocess.Popen[bytes], first: signal.Signals = signal.SIGKILL) -> None:
    """Ask with `first`, then insist; what it may have left behind goes too."""
    send(child.pid, first)
    if not ended(child, GRACE_S, stoppable=False):
        send(child.pid, signal.SIGKILL)
        ended(child, GRACE_S, stoppable=False)
    send(child.pid, signal.SIGKILL)


def ended(child: subprocess.Popen[bytes], timeout_s: float, stoppable: bool = True) -> bool:
    """Whether it has, within so long.

    Not Popen.wait: a Ctrl-C at the wrong moment leaves its lock taken, and the next wait never returns.
    """
    deadline = time.monotonic() + timeout_s
    while child.returncode is None:
        try:
            pid, status = os.waitpid(child.pid, os.WNOHANG)
        except ChildProcessError:  # a Ctrl-C came between the call and its result
            child.returncode = -signal.SIGINT
            break
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
        elif stoppable and stop.is_set():
            raise KeyboardInterrupt
        elif time.monotonic() >= deadline:
            return False
        else:
            time.sleep(POLL_S)
    return True


def send(pid: int, number: signal.Signals) -> None:
    """To a child and all that it started: they share a process group, whose number is the child's."""
    with suppress(ProcessLookupError, PermissionError):  # all gone (macOS says the latter of zombies)
        os.killpg(pid, number)
