"""Ranks that torchrun has started, on any number of machines. Rendezvous, addresses and restarts are its business.

Every rank composes the same command; those other than 0 compare their choice with rank 0's and then run its plans.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import threading
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from core.parallel import ExecutorLost, Group
from plugins.executors.processes import while_alive
from plugins.executors.rank import GONE, end_with, serve
from plugins.executors.wire import QUIT, receive, send

COMPARED = (
    *("limits", "dtype", "block_size", "num_kv_blocks", "tensor_parallel_size"),
    *("overlap", "graphs", "compile", "fused", "seed"),
)
_joined: list[bool] = []  # the group of a process that torchrun started is formed once


def join(context: Any) -> Launched:
    """Rank 0's end of the group. On the other ranks it runs plans and then raises SystemExit."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if size != context.tensor_parallel_size:
        raise ValueError(
            f"torchrun started {size} ranks, tensor_parallel_size is {context.tensor_parallel_size}: they must be equal; "
            f"set tensor_parallel_size={size}"
        )
    if _joined:
        raise ValueError(
            "ranks that torchrun started end with their first executor, so there is no second one and no LLM.restart(); "
            "start the command again, or give torchrun --max-restarts"
        )
    _joined.append(True)
    store: Any = next(iter(rendezvous("env://")))[0]
    store = PrefixStore(f"inferlab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    address = _own_address()
    if rank:
        _follow(context, store, rank, size, address)
        raise SystemExit(0)
    return Launched(context, store, size, address)


class Launched:
    """The plan channel from rank 0 to the others, over TCP."""

    def __init__(self, context: Any, store: Store, size: int, address: str) -> None:
        self.death: ExecutorLost | None = None
        self.connections: list[socket.socket] = []
        self._poll = select.poll()
        token = secrets.token_bytes(16)
        with socket.create_server((address, 0), family=_family(address)) as server:  # a free port
            store.set("channel", json.dumps([address, server.getsockname()[1], token.hex()]))
            while len(self.connections) < size - 1:
                connection, _ = server.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _, message = receive(connection)
                if not secrets.compare_digest(message, token):
                    connection.close()  # a stranger
                    continue
                self.connections.append(connection)
                self._poll.register(connection, GONE)
                send(connection, b"c", json.dumps(_choice(context)).encode())
        self.group = while_alive(lambda: _group(context, store, 0, size, address), self.check)
        self.group.check = self.check

    def build(self, resolved: Any) -> None:
        """Each rank builds from its own, equal choice."""

    def send(self, kind: bytes, message: bytes) -> None:
        """To every rank."""
        for connection in self.connections:
            send(connection, kind, message)

    def check(self) -> None:
        """ExecutorLost if a connection has ended: an agent of torchrun ends the ranks of its own machine only."""
        if self.death is None and self._poll.poll(0):
            self.death = ExecutorLost("a rank that torchrun started is gone; the output of its torchrun has its last words")
        if self.death is not None:
            raise self.death

    def fail(self, error: BaseException) -> None:
        """The agents end every rank once one has failed."""
        self.death = self.death or ExecutorLost(f"a rank failed: {error}")
        self._close()
        if isinstance(error, RuntimeError | OSError | EOFError) and not isinstance(error, ExecutorLost):
            raise ExecutorLost(f"a rank failed ({error}); torchrun's output shows its last words") from error

    def end(self) -> None:
        """Tell every rank that it is over."""
        for connection in self.connections:
            with suppress(OSError):
                send(connection, QUIT)
        self._close()

    def _close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.connections = []
        self.group.close()


def _follow(context: Any, store: Store, rank: int, size: int, address: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    where, port, token = json.loads(store.get("channel"))
    connection = socket.create_connection((where, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    send(connection, b"t", bytes.fromhex(token))
    theirs, ours = json.loads(receive(connection)[1]), _choice(context)
    if differing := [f"{name}: {theirs[name]} on rank 0, {ours[name]} here" for name in ours if ours[name] != theirs[name]]:
        raise ValueError(f"rank {rank} has other settings than rank 0: {'; '.join(differing)}; start the same on each machine")
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    group = _group(context, store, rank, size, address)
    serve(connection, group, context)
    connection.close()
    group.close()


def _group(context: Any, store: Store, rank: int, size: int, address: str) -> Group:
    kind = context.device.partition(":")[0]
    device = torch.device("cpu" if kind == "cpu" else f"{kind}:{os.environ['LOCAL_RANK']}")
    return Group(store, rank, size, device, neighbours=int(os.environ["LOCAL_WORLD_SIZE"]), address=address)


def _choice(context: Any) -> dict[str, str]:
    """What must be the same on every rank."""
    parts = {kind: f"{c.component.name} {c.version} {c.settings}" for kind, c in context.choices.items()}
    return {**{name: str(getattr(context, name)) for name in COMPARED}, **parts, "model": str(context.checkpoint.config)}


def _own_address() -> str:
    """Of this machine, as it is seen from the first one: the way there begins at it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        return probe.getsockname()[0]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
