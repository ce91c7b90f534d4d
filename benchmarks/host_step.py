"""Host time of a step (schedule, seal, commit; launch not counted): 256 running requests with prompts of 2,000 tokens.

    python -m benchmarks.host_step [--steps 200] [--requests 256] [--prompt 2000] [--overlap 0]

Prints one JSON line per scheduler x allocator: median, mean and 99th percentile in ms per step.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from typing import Any

import numpy as np

from core.engine import Engine
from core.interfaces import Executor, HostContext, KVSettings, Limits, Sampled, SamplingParams, StepPlan
from plugins.kv_allocators.block_hash import BlockHash
from plugins.kv_allocators.paged import Paged
from plugins.schedulers.entry import FcfsSettings, MixedSettings
from plugins.schedulers.fcfs import Fcfs
from plugins.schedulers.mixed import Mixed


class Constant(Executor):
    """Draws token 7 for every row, at once; its own time is taken out of the step's."""

    num_blocks = 0
    spent = 0.0

    def launch(self, plan: StepPlan) -> Any:
        started = time.perf_counter()
        self.sampled = Sampled(np.full(int(plan.draws.sum()), 7, np.int64))
        self.spent += time.perf_counter() - started
        return self

    def wait(self) -> Sampled:
        return self.sampled

    def close(self) -> None: ...


def measure(scheduler: Any, allocator: Any, args: argparse.Namespace) -> list[float]:
    blocks = args.requests * (-(-(args.prompt + args.steps + 50) // args.block_size))
    limits = Limits(args.requests, args.requests * args.prompt, args.prompt + args.steps + 50)
    context = HostContext(limits, args.block_size, blocks, time.perf_counter)
    executor = Constant(None, context)
    engine = Engine(
        scheduler(context), allocator(KVSettings(args.block_size), context), executor, context, overlap=args.overlap
    )
    rng = random.Random(0)
    for _ in range(args.requests):
        engine.submit([rng.randrange(10_000) for _ in range(args.prompt)], SamplingParams(max_tokens=args.steps + 40))
    for _ in range(5):
        engine.step()
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(args.steps):
        executor.spent, started = 0.0, time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started - executor.spent) * 1e3)
    assert engine.stats.decode_tokens >= args.requests * args.steps, "not a decode-only measurement"
    gc.unfreeze()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("requests", 256), ("prompt", 2000), ("steps", 200), ("block-size", 16), ("overlap", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    for name, scheduler in (
        ("fcfs", lambda c: Fcfs(FcfsSettings(), c)),
        ("mixed", lambda c: Mixed(MixedSettings(), c)),
    ):
        for allocator in (BlockHash, Paged):
            times = measure(scheduler, allocator, args)
            row = {"scheduler": name, "allocator": allocator.__name__, **vars(args)}
            row |= {
                "median_ms": statistics.median(times),
                "mean_ms": statistics.fmean(times),
                "p99_ms": np.percentile(times, 99),
            }
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}))


if __name__ == "__main__":
    main()
