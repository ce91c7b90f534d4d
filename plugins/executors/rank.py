"""A worker process: one rank that runs what rank 0 sends. It looks for no plugins: the parent's choice comes ready made."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections import deque

from plugins.executors.wire import PLAN, receive, send, unpack

GRACE_S = 5.0  # between the parent's end and this process's


def main(number: int, path: str) -> None:
    """number: of the inherited socket. path: the parent's sys.path, as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    sys.path[:] = json.loads(path)
    connection = socket.socket(fileno=number)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    resolved, rank, size, port, device = pickle.loads(receive(connection)[1])
    import torch
    from torch.distributed import TCPStore

    from core.parallel import Group
    from core.runner import Runner

    send(connection, b"h")  # imported: from here on the parent may wait in a collective
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = Group(store, rank, size, torch.device(device), neighbours=size, address="127.0.0.1")
    runner = Runner(resolved, group)
    flight = deque()
    while True:
        kind, message = receive(connection)
        if kind != PLAN:
            break
        flight.append(runner.launch(unpack(message)))
        while len(flight) > resolved.overlap:  # staging buffers are used again
            flight.popleft().wait()
    group.close()


def _end_with_parent(connection: socket.socket) -> None:
    gone = select.POLLHUP | getattr(select, "POLLRDHUP", 0)
    poll = select.poll()
    poll.register(connection, gone)
    poll.poll()
    threading.Event().wait(GRACE_S)
    os._exit(1)
