"""What measuring costs: the same load with the watch of `task=bench` and without it, in turn, on one engine.

    python -m benchmarks.metrics_overhead

On: every step and request is noted, as `task=bench` does, and a schedule is recorded if --record. Off: requests are submitted
and the engine steps until all have ended. Each round runs the load once on and twice off, and who comes first rotates. Rounds
are short, since a shared machine drifts within seconds. The cost is the median over the rounds of on / off - 1; `control`, the
same of the second off, tells what the machine makes of nothing. Time on the CPU is told beside it. `watch_us` is the cost of
the watch alone, in microseconds per step of 64 requests, with an engine that does nothing: the least of several tries.
"""

from __future__ import annotations

import argparse
import json
import time
import timeit
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from core.bench.measure import measure
from core.bench.schedule import Recorder
from core.bench.task import Bench
from core.bench.watch import Watch
from core.clock import Clock
from core.config import compose
from core.environment import environment
from core.files import write_json
from core.resolve import decide

LOAD = ("load=offline", "load.input_min=16", "load.input_max=128", "load.output_min=8", "load.output_max=24")
RUNS = ("on", "off", "off again")


def on(bench: Bench, number: int, record: bool) -> float:
    """Seconds of a run that is measured."""
    load, params = bench.load(number)
    bench.llm.engine.kv.forget(None)
    return measure(bench.llm.engine, load, params, bench.where, None, Recorder() if record else None).seconds


def off(bench: Bench, number: int) -> float:
    """Seconds of the same run when nobody looks."""
    (load, params), engine = bench.load(number), bench.llm.engine
    engine.kv.forget(None)
    started = time.perf_counter()
    for tokens, p in zip(load.prompts, params, strict=True):
        engine.submit(tokens, p)
    while engine.busy:
        engine.step()
    return time.perf_counter() - started


def watch_us(rows: int = 64, steps: int = 300) -> float:
    """What `Watch` adds to a step: parts that return at once are watched. No look at the KV pool, which is rationed by time."""
    drawn = SimpleNamespace(wait=lambda: None)
    parts: dict[str, Any] = {"scheduler": SimpleNamespace(schedule=lambda step: None), "clock": Clock()}
    parts["executor"] = SimpleNamespace(launch=lambda plan: drawn, num_blocks=1)
    engine: Any = SimpleNamespace(**parts, kv=SimpleNamespace(audit=lambda: (1, 0, 0)))
    ones, requests = np.ones(rows, np.int32), [SimpleNamespace(id=i) for i in range(rows)]
    plan: Any = SimpleNamespace(**dict.fromkeys(("tokens", "slots", "starts", "counts", "draws"), ones), shared_blocks=0)
    outputs: Any = [SimpleNamespace(request=request, tokens=(1,)) for request in requests]
    step = SimpleNamespace(chunks=requests, admitted=[], evicted=[])
    watch = Watch(engine, torch.device("cpu"))

    def once() -> None:
        watch.begin()
        engine.scheduler.schedule(step)
        engine.executor.launch(plan).wait()
        watch.end(outputs)

    with watch.watching():
        return min(timeit.repeat(once, number=steps, repeat=15)) / steps * 1e6


def compare(overrides: list[str], rounds: int, record: bool) -> dict[str, Any]:
    """The record; the runs of a round have the same prompts."""
    composed = compose(["task=bench", *LOAD, *overrides])
    bench, walls, used = Bench(composed, decide(composed)), [], []
    with bench.llm:
        on(bench, rounds, record)
        off(bench, rounds)
        for number in tqdm(range(rounds), unit="round"):
            wall, cpu = dict.fromkeys(RUNS, 0.0), dict.fromkeys(RUNS, 0.0)
            for at in range(len(RUNS)):
                run, before = RUNS[(number + at) % len(RUNS)], time.process_time()
                wall[run] = on(bench, number, record) if run == "on" else off(bench, number)
                cpu[run] = time.process_time() - before
            walls.append(wall)
            used.append(cpu)
    return {
        "command": f"python -m benchmarks.metrics_overhead --rounds {rounds}" + (" --record" if record else ""),
        "overrides": [*LOAD, *overrides],
        "environment": environment("cpu"),
        "seconds": walls,
        "cost": ratio(walls, "on"),
        "control": ratio(walls, "off again"),
        "cpu_time_cost": ratio(used, "on"),
        "cpu_time_control": ratio(used, "off again"),
        "watch_us": watch_us(),
    }


def ratio(rounds: Sequence[Mapping[str, float]], run: str) -> dict[str, float]:
    """The median of run / off - 1 and its 95 % bootstrap interval."""
    found = np.array([taken[run] / taken["off"] - 1 for taken in rounds])
    drawn = np.median(np.random.default_rng(0).choice(found, (2000, len(found))), axis=1)
    low, high = np.percentile(drawn, (2.5, 97.5)).tolist()
    return {"median": float(np.median(found)), "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--record", action="store_true", help="with bench.record_schedule=true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", default=["model=smollm2", "max_model_len=256", "load.num_requests=8"])
    args = parser.parse_args()
    found = compare(args.overrides, args.rounds, args.record)
    if args.out:
        write_json(args.out, found)
    print(json.dumps({name: found[name] for name in ("cost", "control", "cpu_time_cost", "watch_us")}))


if __name__ == "__main__":
    main()
