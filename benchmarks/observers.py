"""What observers cost: host time of a decode step with none, with one that does nothing, and with five.

    python -m benchmarks.observers [--requests 64] [--steps 200] [--rounds 5] [--out benchmarks/results/observers.json]

The cases take turns in every round; `added_us` compares the quietest ones. `check_us` is what a step pays where nobody
listens: the question whether a list is empty. `notify_us` is what it pays otherwise, timed by itself: the record is made and
every observer called.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import timeit
from pathlib import Path
from typing import Any

from benchmarks.host_step import Constant
from core.engine import Engine
from core.interfaces import HostContext, KVSettings, Limits, SamplingParams, StepRecord
from core.observers import Observers, step_record
from core.step import Chunk
from plugins.kv_allocators.block_hash import BlockHash
from plugins.schedulers.entry import MixedSettings
from plugins.schedulers.mixed import Mixed

CASES = {"none": 0, "one": 1, "five": 5}  # observers


def nothing(record: StepRecord) -> None:
    """An observer that costs its call."""


def measure(observers: int, args: argparse.Namespace) -> tuple[float, float]:
    """Median microseconds of a step; least microseconds of making a record and calling the observers."""
    limits = Limits(args.requests, args.requests * 64, args.steps + 100)
    blocks = args.requests * (-(-(args.steps + 100) // 16))
    context = HostContext(limits, 16, blocks, time.perf_counter)
    engine = Engine(
        Mixed(MixedSettings(), context), BlockHash(KVSettings(16), context), Constant(None, context), context, vocab_size=1000
    )
    engine.observers = Observers()
    engine.observers.step = [(f"observer {i}", nothing) for i in range(observers)]
    for i in range(args.requests):
        engine.submit([i] * 32, SamplingParams(max_tokens=args.steps + 40))
    for _ in range(5):
        engine.step()
    times = []
    for _ in range(args.steps):
        started = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started) * 1e6)
    assert not engine.observers.failed and len(engine.observers.step) == observers
    chunks = [Chunk(r, r.seat, r.length - 1, 1, 1) for r in engine.live.values() if r.seat]

    def notify() -> None:
        engine.observers.notify(engine.observers.step, step_record(engine, chunks, 0, 0.0))

    return statistics.median(times), min(timeit.repeat(notify, number=1000, repeat=3)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("requests", 64), ("steps", 200), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in CASES}
    alone: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, observers in CASES.items():
            step, notify = measure(observers, args)
            found[name].append(step)
            alone[name] = min(notify, alone.get(name, notify))
    empty = Observers()
    check = min(timeit.repeat(lambda: 1 if empty.step else 0, number=100_000, repeat=5)) * 10
    least = {name: min(times) for name, times in found.items()}
    result: dict[str, Any] = {
        "command": "python -m benchmarks.observers",
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "requests": args.requests,
        "steps": args.steps,
        "step_us": {name: [round(t, 2) for t in times] for name, times in found.items()},
        "least_us": {name: round(t, 2) for name, t in least.items()},
        "added_us": {name: round(least[name] - least["none"], 2) for name in ("one", "five")},
        "check_us": round(check, 4),
        "notify_us": {name: round(alone[name], 2) for name in ("one", "five")},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
