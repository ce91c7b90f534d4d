"""What travels to the workers: a kind, a length of 8 bytes, and as many bytes as it says. A plan is flat arrays, of any size.

Parameters of admitted requests are pickled behind the arrays; a step that admits nobody carries none.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import fields

import numpy as np

from core.interfaces import StepPlan

BUILD, PLAN, QUIT = b"b", b"p", b"q"
_HEAD = struct.Struct("<cq")
_INTS = tuple(f.name for f in fields(StepPlan) if f.name not in ("params", "masks", "shared_blocks"))
_WIDTHS = {"new_blocks": 3, "moves": 2, "admitted": 2}


def pack(plan: StepPlan) -> bytes:
    """One message."""
    arrays = [np.ascontiguousarray(getattr(plan, name), np.int32) for name in _INTS]
    masks = np.ascontiguousarray(plan.masks, np.uint8)
    params = pickle.dumps(plan.params, pickle.HIGHEST_PROTOCOL) if plan.params else b""
    sizes = [plan.shared_blocks, masks.shape[1], masks.nbytes, len(params), *(a.size for a in arrays)]
    return b"".join((np.array(sizes, np.int64).tobytes(), *(a.tobytes() for a in arrays), masks.tobytes(), params))


def unpack(message: bytes) -> StepPlan:
    """The plan that was packed; its arrays are read-only views of the message."""
    count = 4 + len(_INTS)
    shared, width, mask_bytes, param_bytes, *sizes = np.frombuffer(message, np.int64, count).tolist()
    at, arrays = 8 * count, {}
    for name, size in zip(_INTS, sizes, strict=True):
        found = np.frombuffer(message, np.int32, size, at)
        arrays[name] = found.reshape(-1, _WIDTHS[name]) if name in _WIDTHS else found
        at += 4 * size
    masks = np.frombuffer(message, np.uint8, mask_bytes, at).reshape(-1, width) if width else np.zeros((0, 0), np.uint8)
    at += mask_bytes
    params = pickle.loads(message[at:]) if param_bytes else ()
    return StepPlan(**arrays, masks=masks, params=params, shared_blocks=shared)


def send(connection: socket.socket, kind: bytes, message: bytes = b"") -> None:
    """Returns once the system has taken it all."""
    connection.sendall(_HEAD.pack(kind, len(message)) + message)


def receive(connection: socket.socket) -> tuple[bytes, bytes]:
    """The next message. EOFError if the other end is gone."""
    kind, size = _HEAD.unpack(_exactly(connection, _HEAD.size))
    return kind, _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    message = bytearray(size)
    view, at = memoryview(message), 0
    while at < size:
        got = connection.recv_into(view[at:])
        if not got:
            raise EOFError("the other end of the plan channel is gone")
        at += got
    return bytes(message)
