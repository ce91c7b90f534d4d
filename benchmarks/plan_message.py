"""What the message of a decode step costs: microseconds from a plan on rank 0 to every rank of one machine.

    python -m benchmarks.plan_message [--ranks 2,4] [--rows 1,16,64,256] [--out FILE.json]

Rank 0 packs the plan and sends it to a process for each other rank, as the executor `workers` does. `us` is what that takes.
The others unpack it and answer; `answered_us` is how long rank 0 would wait if it had nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.environment import software
from core.interfaces import ON_DEVICE, StepPlan
from plugins.executors import wire


def decodes(count: int) -> StepPlan:
    """A step of one token for each of `count` requests, of which one in sixteen needs a new block."""
    rows, one = np.arange(count, dtype=np.int32), np.ones(count, np.int32)
    none, pairs, masks = np.zeros(0, np.int32), np.zeros((0, 2), np.int32), np.zeros((0, 0), np.uint8)
    return StepPlan(
        slots=rows,
        starts=700 * one,
        counts=one,
        draws=one,
        tokens=ON_DEVICE * one,
        new_blocks=np.stack([rows, one, rows], axis=1)[::16],
        moves=pairs,
        admitted=pairs,
        history=none,
        params=(),
        mask_rows=none,
        masks=masks,
    )


def answer(connection: socket.socket) -> None:
    """The other end: unpacks each plan and says so, until there are no more."""
    while True:
        kind, message = wire.receive(connection)
        if kind == wire.QUIT:
            return
        wire.unpack(message)
        wire.send(connection, b"h")


def quietest(times: Sequence[float], rounds: int = 5) -> float:
    each = max(1, len(times) // rounds)
    return min(statistics.median(times[at : at + each]) for at in range(0, len(times), each))


def measure(ranks: int, rows: int, repeats: int = 5000) -> dict[str, Any]:
    """The lowest median of five rounds: whatever else the machine does only adds to it."""
    connections, children = [], []
    for _ in range(1, ranks):
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "benchmarks.plan_message", "--answer", str(theirs.fileno())]
            children.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
        connections.append(ours)
    plan, sent, answered, message = decodes(rows), [], [], b""
    for _ in range(repeats + 1):
        started = time.perf_counter()
        message = wire.pack(plan)
        for connection in connections:
            wire.send(connection, wire.PLAN, message)
        sent.append(time.perf_counter() - started)
        for connection in connections:
            wire.receive(connection)
        answered.append(time.perf_counter() - started)
    for connection, child in zip(connections, children, strict=True):
        wire.send(connection, wire.QUIT)
        connection.close()
        assert child.wait() == 0
    us = {name: quietest(times[1:]) * 1e6 for name, times in (("us", sent), ("answered_us", answered))}
    return {"ranks": ranks, "rows": rows, "bytes": len(message), **us}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.answer is not None:
        answer(socket.socket(fileno=args.answer))
        return 0
    rows = [measure(int(ranks), int(count)) for ranks in args.ranks.split(",") for count in args.rows.split(",")]
    facts = {key: value for key, value in software().items() if key not in ("host", "platform")}
    command = f"python -m benchmarks.plan_message --ranks {args.ranks} --rows {args.rows}"
    print("| ranks | rows | bytes | pack and send, us | answered after, us |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['ranks']} | {row['rows']} | {row['bytes']:,} | {row['us']:.0f} | {row['answered_us']:.0f} |")
    if args.out:
        args.out.write_text(json.dumps({"command": command, **facts, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
