"""Three ways to get drawn ids onto every rank when each rank has the logits of its share of the vocabulary.

    python -m benchmarks.tensor_parallel_gather [--ranks 2,4] [--rows 1,16,64,256] [--device cuda] [--out FILE.json]

gather      the logits go to rank 0, which draws; the ids are broadcast
all_gather  the logits go to every rank, and every rank draws the same
winners     every rank draws the best of its share; value and id go to every rank, which takes the best of all

Noise depends on (seed, position, token id) alone, so a share can be drawn by itself and all ways give the same ids: this is
checked for every row. Time is that of the slowest rank, from logits to ids, and once more without drawing ("moved": only what
is sent). gloo and one thread per rank on CPUs, NCCL and one GPU per rank with `--device cuda`.

R rows, V vocabulary, W share of one rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from core.environment import software
from plugins.samplers.common.noise import gumbel

COLUMNS = 1 << 16  # scores computed at once on a CPU: its caches hold the temporaries


class Way:
    """What the ways share: this rank's ids, and the noise of every row."""

    def __init__(self, rows: int, vocab: int, hot: bool, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.rows, self.vocab, self.share, self.hot, self.device = rows, vocab, -(-vocab // self.size), hot, device
        self.seeds = torch.arange(rows, device=device) * 7919 + 5
        self.positions = torch.arange(rows, device=device) + 100
        kind = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.logits = torch.full((rows, self.share), float("-inf"), dtype=kind, device=device)  # padding is never drawn
        mine = min(vocab, (self.rank + 1) * self.share) - self.rank * self.share
        generator = torch.Generator(device).manual_seed(self.rank)
        self.logits[:, :mine] = torch.randn((rows, mine), generator=generator, device=device).to(kind)
        self.all = [torch.empty_like(self.logits) for _ in range(self.size)]
        self.ids = torch.empty(rows, dtype=torch.int64, device=device)
        self.best = torch.empty(self.size, rows, 2, dtype=torch.float64, device=device)

    def draw(self, logits: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """The best score of each row, and its token: ids begin at `offset`."""
        if not self.hot:
            values, tokens = logits.float().max(-1)
            return values, tokens + offset
        found = []
        step = max(COLUMNS // self.rows, 1) if self.device.type == "cpu" else logits.shape[1]
        for at in range(0, logits.shape[1], step):
            part = logits[:, at : at + step].float()
            ids = torch.arange(at + offset, at + offset + part.shape[1], dtype=torch.int32, device=self.device)
            values, tokens = (part + gumbel(self.seeds, self.positions, ids)).max(-1)
            found.append((values, tokens + at + offset))
        values, tokens = (torch.stack(parts) for parts in zip(*found, strict=True))
        best = values.max(0)
        return best.values, tokens.gather(0, best.indices[None])[0]

    def gather(self, draw: bool) -> Tensor:
        dist.gather(self.logits, self.all if self.rank == 0 else None)
        if self.rank == 0 and draw:
            self.ids = self.draw(torch.cat(self.all, 1), 0)[1]
        dist.broadcast(self.ids, 0)
        return self.ids

    def all_gather(self, draw: bool) -> Tensor:
        dist.all_gather(self.all, self.logits)
        return self.draw(torch.cat(self.all, 1), 0)[1] if draw else self.ids

    def winners(self, draw: bool) -> Tensor:
        own = torch.stack(self.draw(self.logits, self.rank * self.share), 1).double() if draw else self.best[0]
        dist.all_gather(list(self.best), own)
        first = self.best[:, :, 0].max(0).indices  # lowest rank first among equals, which has the lower ids
        return self.best[:, :, 1].gather(0, first[None])[0].long()


WAYS = ("gather", "all_gather", "winners")


def timed(run: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median over repeats of the slowest rank's seconds."""
    seconds = []
    for _ in range(repeats + 2):
        _wait(device)
        dist.barrier()
        started = time.perf_counter()
        run()
        _wait(device)
        took = torch.tensor([time.perf_counter() - started], device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(float(took))
    return statistics.median(seconds[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bytes_sent(way: str, rows: int, vocab: int, size: int, element: int) -> int:
    """What arrives at the rank that gets most."""
    logits, ids = (size - 1) * rows * -(-vocab // size) * element, rows * 8
    return {"gather": logits + ids, "all_gather": logits, "winners": (size - 1) * rows * 16}[way]


def rank_main(rank: int, size: int, meeting: str, args: argparse.Namespace, out: str) -> None:
    """Every cell on one rank; rank 0 writes the rows."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size)
    found = []
    for rows in args.rows:
        for hot in (False, True):
            ways = Way(rows, args.vocab, hot, device)
            row: dict[str, Any] = {"ranks": size, "rows": rows, "vocab": args.vocab, "rows_are": "hot" if hot else "greedy"}
            element = ways.logits.element_size()
            wanted = ways.all_gather(True)
            for way in WAYS:
                run = getattr(ways, way)
                assert torch.equal(run(True), wanted), f"{way} draws other tokens"
                row[way] = {
                    "us": round(timed(partial(run, True), args.repeats, device) * 1e6, 1),
                    "moved_us": round(timed(partial(run, False), args.repeats, device) * 1e6, 1),
                    "bytes": bytes_sent(way, rows, args.vocab, size, element),
                }
            found.append(row)
    dist.destroy_process_group()
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def measure(size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells on `size` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        mp.spawn(rank_main, args=(size, f"{folder}/meeting", args, str(out)), nprocs=size)  # type: ignore[attr-defined]
        return json.loads(out.read_text())


def markdown(rows: list[dict[str, Any]]) -> str:
    """Microseconds from logits to ids on every rank, in brackets those of sending alone."""
    lines = ["| ranks | rows | drawn | " + " | ".join(WAYS) + " |", "|---" * (3 + len(WAYS)) + "|"]
    for row in rows:
        cells = (f"{row[way]['us']:,.0f} ({row[way]['moved_us']:,.0f})" for way in WAYS)
        lines.append(f"| {row['ranks']} | {row['rows']} | {row['rows_are']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default=[2, 4])
    parser.add_argument("--rows", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.device == "cuda" and torch.cuda.device_count() < max(args.ranks):
        parser.error(f"--ranks {max(args.ranks)} needs as many GPUs, got {torch.cuda.device_count()}; take fewer ranks")
    rows = [row for size in args.ranks for row in measure(size, args)]
    given = sys.argv[1:] if argv is None else argv
    command = "python -m benchmarks.tensor_parallel_gather " + " ".join(part for part in given)
    facts = {key: value for key, value in software().items() if key not in ("host", "platform")}
    record = {"command": command.strip(), "device": args.device, **facts, "rows": rows}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
