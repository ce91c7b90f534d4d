"""What measuring costs: the same load with the watch of `task=bench` and without it, in turn, on one engine.

    python -m benchmarks.metrics_overhead

On: every step and request is noted, as `task=bench` does, and a schedule is recorded if --record. Off: requests are submitted
and the engine steps until all have ended. The cost is the median over the pairs of on / off - 1; who goes first alternates.
The same of the time on the CPU is told beside it: what else runs on the machine disturbs it less. `watch_us` is the cost of the
watch alone, in microseconds per step of 64 requests, with an engine that does nothing: the least of several tries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import timeit
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from core.bench.measure import measure
from core.bench.schedule import Recorder
from core.bench.task import Bench
from core.bench.watch import Watch
from core.clock import Clock
from core.config import compose
from core.environment import environment
from core.files import write_json
from core.resolve import decide

LOAD = ("load=offline", "load.input_min=16", "load.input_max=128", "load.output_min=16", "load.output_max=96")


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


def compare(overrides: list[str], pairs: int, record: bool) -> dict[str, Any]:
    """The record; both runs of a pair have the same prompts."""
    composed = compose(["task=bench", *LOAD, *overrides])
    bench, ratios, work = Bench(composed, decide(composed)), [], []
    with bench.llm:
        on(bench, pairs, record), off(bench, pairs)
        for number in range(pairs):
            first = number % 2
            seconds, used = {first: 0.0, 1 - first: 0.0}, [0.0, 0.0]
            for watched in seconds:
                before = time.process_time()
                seconds[watched] = on(bench, number, record) if watched else off(bench, number)
                used[watched] = time.process_time() - before
            ratios.append(seconds[1] / seconds[0])
            work.append(used[1] / used[0])
    drawn = np.median(np.random.default_rng(0).choice(ratios, (2000, pairs)), axis=1)
    low, high = (np.percentile(drawn, (2.5, 97.5)) - 1).tolist()
    return {
        "command": f"python -m benchmarks.metrics_overhead --pairs {pairs}" + (" --record" if record else ""),
        "overrides": [*LOAD, *overrides],
        "environment": environment("cpu"),
        "on_over_off": ratios,
        "cost": statistics.median(ratios) - 1,
        "low": low,
        "high": high,
        "cpu_time_on_over_off": work,
        "cpu_time_cost": statistics.median(work) - 1,
        "watch_us": watch_us(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--record", action="store_true", help="with bench.record_schedule=true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", default=["model=smollm2", "load.num_requests=16"])
    args = parser.parse_args()
    found = compare(args.overrides, args.pairs, args.record)
    if args.out:
        write_json(args.out, found)
    print(json.dumps({name: found[name] for name in ("cost", "low", "high", "cpu_time_cost", "watch_us")}))


if __name__ == "__main__":
    main()
