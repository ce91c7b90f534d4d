"""Worker processes of one machine: started, watched by their handles, ended. Nothing of them outlives the parent."""

from __future__ import annotations

import json
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

from plugins.executors.wire import QUIT, receive, send

END_S, WORDS = 5.0, 2000
_CODE = "from plugins.executors.rank import main; main({}, {!r})"


class WorkerDied(ChildProcessError):
    """A rank is gone, and with it the executor."""


class Process:
    """One worker. Its output goes to a file without a name, for its last words."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by Processes.end)
        self.connection, theirs = socket.socketpair()
        path = json.dumps(sys.path)
        code = f"import json, sys; sys.path[:] = json.loads({path!r}); " + _CODE.format(theirs.fileno(), path)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited, until the child ignores it
        try:
            self.child = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def obituary(self) -> str:
        """How it ended and what it said last."""
        code, size = self.child.returncode, self.output.seek(0, 2)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.output.seek(max(0, size - WORDS))
        words = self.output.read().decode(errors="replace").strip()
        return f"rank {self.rank} of {self.size} (process {self.child.pid}) {how}. Its last words: {words or 'none'}"


class Processes:
    """Ranks 1 to size - 1."""

    def __init__(self, size: int) -> None:
        self.all: list[Process] = []
        try:
            self.all += (Process(rank, size) for rank in range(1, size))
        except BaseException:
            self.end(kill=True)
            raise

    def begin(self, resolved: Any, port: int, devices: list[str]) -> None:
        """Hand over what each rank is built from, and wait until all have imported it."""
        for p in self.all:
            send(p.connection, b"b", pickle.dumps((resolved, p.rank, p.size, port, devices[p.rank])))
        for p in self.all:
            receive(p.connection)

    def send(self, message: bytes, kind: bytes) -> None:
        """To every rank."""
        for p in self.all:
            send(p.connection, kind, message)

    def check(self) -> None:
        """WorkerDied if a handle says so."""
        dead = [p for p in self.all if p.child.poll() is not None]
        if dead:
            first = min(dead, key=lambda p: p.child.returncode >= 0)  # a signal is the cause, exit codes may follow from it
            raise WorkerDied(first.obituary())

    def explain(self, wait_s: float = 3.0) -> None:
        """A collective or connection failed: WorkerDied if a process has ended."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            self.check()
            time.sleep(0.02)

    def end(self, *, kill: bool = False) -> None:
        """Ask, or kill; then wait for each."""
        for p in self.all:
            with suppress(OSError):
                p.child.kill() if kill else send(p.connection, QUIT)
            p.connection.close()
        for p in self.all:
            try:
                p.child.wait(END_S)
            except subprocess.TimeoutExpired:
                p.child.kill()
                p.child.wait()
            p.output.close()
        self.all = []
