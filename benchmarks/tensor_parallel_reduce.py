"""The sum over ranks after a layer, two ways: gloo's all-reduce, and one shot, where every rank gathers all parts and adds.

    python -m benchmarks.tensor_parallel_reduce [--ranks 2,4] [--rows 1,16,64,256] [--repeats 200] [--out FILE.json]

A ring sends 2 (N - 1) messages one after the other, of 1/N of the data each; one shot sends N - 1 whole parts at once: fewer
steps, more bytes, so it can win for small messages (`core.parallel.ONE_SHOT_BYTES`). In one run, taking turns, float32, one
thread per rank on CPUs; time is that of the slowest rank. On GPUs `benchmarks.gpu.tensor_parallel` compares NCCL with torch's
one-shot kernel.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import spawn

from core.parallel import Group


def one_shot(group: Group, x: Tensor) -> Tensor:
    return group.all_gather(x.unsqueeze(0), dim=0).sum(0)


def ring(group: Group, x: Tensor) -> Tensor:
    group._group.allreduce([x], group._sum).wait()  # not Group.all_reduce, which chooses
    return x


WAYS = {"all_reduce": ring, "one_shot": one_shot}


def rank_of(rank: int, size: int, port: int, rows: list[int], width: int, repeats: int, queue: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = Group(store, rank, size, torch.device("cpu"), neighbours=size, address="127.0.0.1")
    for count in rows:
        own = torch.randn(count, width, generator=torch.Generator().manual_seed(rank))
        wanted = sum(torch.randn(count, width, generator=torch.Generator().manual_seed(r)) for r in range(size))
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for i in range(repeats + 10):
            for name, way in WAYS.items():
                x = own.clone()
                started = time.perf_counter()
                found = way(group, x)
                if i >= 10:
                    times[name].append((time.perf_counter() - started) * 1e6)
                else:
                    torch.testing.assert_close(found, wanted)
        queue.put((rank, count, times))
    group.close()


def measure(size: int, rows: list[int], width: int, repeats: int) -> list[dict[str, Any]]:
    """A record per number of rows: median microseconds of the slowest rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = multiprocessing.get_context("spawn").Queue()
    ranks = spawn(rank_of, (size, store.port, rows, width, repeats, queue), nprocs=size, join=False)
    assert ranks is not None
    found = [queue.get(timeout=300) for _ in range(size * len(rows))]
    ranks.join()
    records = []
    for count in rows:
        of_ranks = [times for _, c, times in found if c == count]
        slowest = {name: [max(times) for times in zip(*(t[name] for t in of_ranks), strict=True)] for name in WAYS}
        medians = {f"{name}_us": round(statistics.median(times), 1) for name, times in slowest.items()}
        records.append({"ranks": size, "rows": count, "bytes": 4 * count * width, **medians})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--ranks", type=numbers, default=[2, 4])
    parser.add_argument("--rows", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    machine |= {"torch": torch.__version__, "width": args.width, "repeats": args.repeats}
    records = []
    for size in args.ranks:
        for record in measure(size, args.rows, args.width, args.repeats):
            records.append(record)
            print(json.dumps(record), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"machine": machine, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
