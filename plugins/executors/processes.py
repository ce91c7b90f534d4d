"""Worker processes of one machine: started, watched by their handles, ended. Nothing of them outlives the parent."""

from __future__ import annotations

import json
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from core.parallel import ExecutorLost, Group
from plugins.executors.wire import BUILD, QUIT, receive, send

END_S, EXPLAIN_S, LOOK_S, WORDS = 5.0, 3.0, 0.1, 1500
_CODE = "import json, sys; sys.path[:] = json.loads({!r}); from plugins.executors.rank import main; main({})"


class Process:
    """One worker. Its output goes to a file without a name, for its last words."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by Processes.end)
        self.connection, theirs = socket.socketpair()
        code = _CODE.format(json.dumps(sys.path), theirs.fileno())  # plugins are found where the parent found them
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
    """Ranks 1 to size - 1, and the group that they form with this process."""

    def __init__(self, devices: list[str]) -> None:
        self.all: list[Process] = []
        self.group: Group | None = None
        self.death: ExecutorLost | None = None
        self._over = threading.Event()
        try:
            for rank in range(1, len(devices)):
                self.all.append(Process(rank, len(devices)))
            self._connect(devices)
        except BaseException as error:
            self.fail(error)
            raise

    def _connect(self, devices: list[str]) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port
        for p in self.all:
            send(p.connection, BUILD, pickle.dumps((p.rank, p.size, store.port, devices[p.rank])))
        for p in self.all:
            while not select.select([p.connection], [], [], LOOK_S)[0]:
                self.check()
            receive(p.connection)
        where, size = torch.device(devices[0]), len(devices)
        self.group = while_alive(lambda: Group(store, 0, size, where, neighbours=size, address="127.0.0.1"), self.check)
        self.group.check = self.check
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """A kernel that waits for a dead rank waits for ever, unless the group is ended under it."""
        while not self._over.wait(LOOK_S):
            try:
                self.check()
            except ExecutorLost:
                group = self.group
                if group is not None and group.device.type != "cpu":
                    group.abort()
                return

    def build(self, resolved: Any) -> None:
        """Have every rank build its runner."""
        self.send(BUILD, pickle.dumps(resolved))

    def send(self, kind: bytes, message: bytes) -> None:
        """To every rank."""
        for p in self.all:
            send(p.connection, kind, message)

    def check(self) -> None:
        """ExecutorLost if a handle says that a process has ended."""
        dead = [p for p in self.all if p.child.poll() is not None]
        if dead and self.death is None:
            dead.sort(key=lambda p: p.child.returncode >= 0)  # signals are causes, exit codes may follow from them
            self.death = ExecutorLost("; ".join(p.obituary() for p in dead))
        if self.death is not None:
            raise self.death

    def fail(self, error: BaseException) -> None:
        """What is left of the group cannot go on: end it. Raises ExecutorLost if a process had died before."""
        try:
            if isinstance(error, Exception) and error is not self.death:
                patience = EXPLAIN_S if isinstance(error, RuntimeError | OSError | EOFError) else 0.0
                deadline = time.monotonic() + patience
                self.check()
                while time.monotonic() < deadline:
                    time.sleep(0.02)
                    self.check()
        except ExecutorLost as died:
            raise died from error
        finally:
            self.end(kill=True)

    def end(self, *, kill: bool = False) -> None:
        """Ask, or kill; then wait for each. Twice is fine."""
        self._over.set()
        for p in self.all:
            with suppress(OSError):
                p.child.kill() if kill else send(p.connection, QUIT)
            p.connection.close()
        if self.group is not None:
            self.group.close()
            self.group = None
        for p in self.all:
            try:
                p.child.wait(END_S)
            except subprocess.TimeoutExpired:
                p.child.kill()
                p.child.wait()
            p.output.close()
        self.all = []


def while_alive(connect: Callable[[], Group], check: Callable[[], None]) -> Group:
    """Connecting waits for every rank and cannot be interrupted; this can, by `check`."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(connect())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_S)
        check()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
