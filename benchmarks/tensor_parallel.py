"""What the workers cost a step: the message with the plan, and a whole step of ranks that compute next to nothing.

    python -m benchmarks.tensor_parallel message [--rows 1,16,64,256] [--ranks 2,4] [--repeats 2000]
    python -m benchmarks.tensor_parallel step [--ranks 1,2,3,4] [--steps 200]

message: plans of ROWS decodes, every 16th with a new block. Microseconds to pack one, to hand it to the system for all
ranks, to unpack it, and from packing it until every rank has unpacked it and answered (round trip). step: 16 decodes of
tiny-llama with 12 heads on a CPU, one thread for each rank. One JSON line each: medians and 99th percentiles.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from core.interfaces import SamplingParams, StepPlan
from plugins.executors.wire import PLAN, QUIT, pack, receive, send, unpack


def plan(rows: int) -> StepPlan:
    """A step of decodes in the middle of a run."""
    ints = np.arange(rows, dtype=np.int32)
    one, none = np.ones(rows, np.int32), np.zeros(0, np.int32)
    fresh = np.stack([ints[::16], ints[::16], ints[::16]], axis=1)
    pairs, masks = none.reshape(0, 2), np.zeros((0, 0), np.uint8)
    return StepPlan(ints, ints, one, one, -one, fresh, pairs, pairs, none, (), none, masks)


def answer(connection: socket.socket) -> None:
    """A rank that only unpacks."""
    while True:
        kind, message = receive(connection)
        if kind == QUIT:
            return
        unpack(message)
        connection.sendall(b"x")


def timed(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Microseconds."""
    times = []
    for i in range(repeats + repeats // 10):
        started = time.perf_counter()
        work()
        if i >= repeats // 10:
            times.append((time.perf_counter() - started) * 1e6)
    return {"median_us": round(statistics.median(times), 1), "p99_us": round(float(np.percentile(times, 99)), 1)}


def message(rows: int, ranks: int, repeats: int) -> dict[str, Any]:
    context, ends = multiprocessing.get_context("spawn"), [socket.socketpair() for _ in range(ranks - 1)]
    children = [context.Process(target=answer, args=(theirs,)) for _, theirs in ends]
    for child in children:
        child.start()
    step = plan(rows)
    packed = pack(step)

    def answers() -> None:
        for ours, _ in ends:
            ours.recv(1)

    def sends() -> None:
        for ours, _ in ends:
            send(ours, PLAN, packed)

    def round_trip() -> None:
        now = pack(step)
        for ours, _ in ends:
            send(ours, PLAN, now)
        answers()

    sent = []
    for _ in range(repeats):
        started = time.perf_counter()
        sends()
        sent.append((time.perf_counter() - started) * 1e6)
        answers()
    result = {
        "part": "message",
        "rows": rows,
        "ranks": ranks,
        "bytes": len(packed),
        "pack": timed(lambda: pack(step), repeats),
        "send": {"median_us": round(statistics.median(sent), 1), "p99_us": round(float(np.percentile(sent, 99)), 1)},
        "unpack": timed(lambda: unpack(packed), repeats),
        "round_trip": timed(round_trip, repeats),
    }
    for (ours, theirs), child in zip(ends, children, strict=True):
        send(ours, QUIT)
        child.join()
        ours.close()
        theirs.close()
    return result


def step(ranks: int, steps: int) -> dict[str, Any]:
    from core.llm import LLM

    settings: dict[str, Any] = {"max_model_len": steps + 64, "max_num_seqs": 16, "cpu_threads": ranks, "num_kv_blocks": 2000}
    extra = [f"model.config.{name}=12" for name in ("num_attention_heads", "num_key_value_heads")]
    extra.append("model.config.intermediate_size=192")
    with LLM("tiny-llama", device="cpu", tensor_parallel_size=ranks, overrides=extra, **settings) as llm:
        for i in range(16):
            llm.add_request([i + 1, 2, 3], SamplingParams(temperature=0, max_tokens=steps + 40, ignore_eos=True))
        return {"part": "step", "ranks": ranks, "rows": 16, **timed(llm.step, steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("part", choices=("message", "step"))
    parser.add_argument("--rows", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--ranks", type=numbers)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    machine = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    if args.part == "message":
        results = (message(rows, ranks, args.repeats) for ranks in args.ranks or [2, 4] for rows in args.rows)
    else:
        results = (step(ranks, args.steps) for ranks in args.ranks or [1, 2, 4])
    for result in results:
        print(json.dumps({**result, **machine}), flush=True)


if __name__ == "__main__":
    main()
