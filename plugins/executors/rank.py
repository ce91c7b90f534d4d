"""A rank other than 0: it runs what rank 0 sends. It looks for no plugins: the choice comes ready made."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from plugins.executors.wire import BUILD, PLAN, QUIT, receive, send, unpack

if TYPE_CHECKING:
    from core.parallel import Group

GONE = select.POLLHUP | getattr(select, "POLLRDHUP", 0)
GRACE_S = 5.0  # between the end of rank 0 and that of this process


def started() -> bool:
    """Whether torchrun started this process, with others. Here: one rank alone asks it too, without torch.distributed."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


def main(number: int) -> None:
    """A worker process that rank 0 has started. number: of the socket that it inherited."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; rank 0 decides
    connection = socket.socket(fileno=number)
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    rank, size, port, device = pickle.loads(receive(connection)[1])
    import torch
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    import core.runner  # noqa: F401  (what takes long)
    from core.parallel import Group

    send(connection, BUILD)  # from here on rank 0 may wait for this one in a collective
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = Group(store, rank, size, torch.device(device), neighbours=size, address="127.0.0.1")
    serve(connection, group)
    group.close()


def serve(connection: socket.socket, group: Group, resolved: Any = None) -> None:
    """Build a runner for each choice that comes, or for `resolved`, and run its plans, until rank 0 says that it is over."""
    from core.runner import Runner

    runner, flight = Runner(resolved, group) if resolved else None, deque()
    while True:
        kind, message = receive(connection)
        if kind == QUIT:
            break
        if kind == BUILD:
            flight.clear()
            if runner is not None:
                runner.close()
            runner = Runner(pickle.loads(message), group)
            continue
        assert kind == PLAN and runner is not None, kind
        flight.append(runner.launch(unpack(message)))
        while len(flight) > runner.resolved.overlap:  # staging buffers are used again
            flight.popleft().wait()
    if runner is not None:
        runner.close()


def end_with(connection: socket.socket) -> None:
    """Whatever this process waits for, it ends soon after rank 0."""
    poll = select.poll()
    poll.register(connection, GONE)
    poll.poll()
    threading.Event().wait(GRACE_S)
    os._exit(1)
