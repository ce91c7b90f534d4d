"""Writes docs/tensor_parallel_arithmetic.md: `python -m docs.generate_tensor_parallel [--check]`.

Sizes come from the models themselves, built without memory for each number of ranks, and from a forward pass that counts its
all-reduces. The table of measured times comes from benchmarks/results. Times on GPUs are arithmetic from ASSUMED below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from benchmarks.tensor_parallel import plan
from benchmarks.tensor_parallel_gather import markdown
from core.interfaces import DeviceContext, Limits, ModelArch, NoSettings
from plugins.executors.wire import pack
from plugins.models.qwen3 import Qwen3

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "tensor_parallel_arithmetic.md"
TEXT = PAGE.with_suffix(".txt")  # its words, with the names of the tables
MEASURED = ROOT / "benchmarks" / "results" / "tensor_parallel_gather.json"
MODELS, RANKS = ("qwen3-0.6b", "qwen3-8b", "qwen3-14b"), (1, 2, 4, 8)
ROWS, CONTEXT, PROMPT = 256, 700, 16_384  # of a full decode step, and of a step that is a prompt
BF16 = 2


@dataclass(frozen=True)
class Link:
    """How ranks are joined: an all-reduce costs `latency`, and its bytes at `rate`."""

    name: str
    latency: dict[int, float]  # seconds of a small all-reduce, by ranks
    rate: dict[int, float]  # bytes per second that pass from one rank of a ring to the next, by ranks


# Not measured here. Memory and kernels: what one H200 showed in benchmarks/results/h200.md (3.9 to 4.3 TB/s; one request of
# Qwen3-0.6B at 1,354 tokens/s). Links: published NCCL numbers of H100 hosts (6 us on two GPUs in a CUDA graph, bus bandwidth
# 366 GB/s with multicast, less without). Between hosts one 400 Gbit/s adapter per GPU, all of a host's used together.
MEMORY, PER_LAYER, FLOPS, ROOM = 4.0e12, 15e-6, 600e12, 141e9
HOST = Link("one NVLink host", {2: 6e-6, 4: 9e-6, 8: 12e-6}, dict.fromkeys(RANKS, 300e9))
HOSTS = Link("two hosts, half of the ranks on each", {2: 25e-6, 4: 28e-6, 8: 31e-6}, {n: 45e9 * n / 2 for n in RANKS})


class Counting:
    """A rank without peers that counts what it would send."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.reduced = 0, size, []

    def all_reduce(self, x: Any) -> Any:
        self.reduced.append(x.numel() * BF16)
        return x

    def all_gather(self, x: Any, dim: int = -1) -> Any:
        return x


@dataclass(frozen=True)
class Share:
    """What rank 0 of a group holds and sends."""

    weights: int  # bytes
    read: int  # bytes of weights that a decode step reads: all but the rows of the embedding
    position: int  # bytes of KV cache per position
    reductions: int  # all-reduces of a step
    width: int  # bytes that one token adds to an all-reduce
    layers: int
    vocab: int


@cache
def share(preset: str, size: int) -> Share:
    """From the model, on a device without memory."""
    config: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / f"{preset}.yaml"))
    config, group, meta = config["config"], Counting(size), torch.device("meta")
    where = DeviceContext(Limits(1, 8, 8), meta, torch.bfloat16, config, config["vocab_size"], group, block_size=16)
    model = Qwen3(NoSettings(), where)
    weights = sum(piece.into.numel() for _, piece in model._all_pieces()) * BF16
    reduced = count(model, group)
    spec = model.kv_spec
    embedding = 0 if model.sizes.tied else model.embed.weight.numel() * BF16
    return Share(
        weights=weights,
        read=weights - embedding,
        position=2 * spec.num_layers * spec.num_kv_heads * spec.head_size * BF16,
        reductions=len(reduced),
        width=max(reduced) if reduced else 0,
        layers=spec.num_layers,
        vocab=config["vocab_size"],
    )


def count(model: ModelArch, group: Counting) -> list[int]:
    """Bytes of each all-reduce of a step with one token."""
    if group.size == 1:
        return []
    token = torch.zeros(1, dtype=torch.int64, device="meta")
    model.forward(token, token, lambda layer, q, k, v, prologue: q)
    return group.reduced


def reduce_time(link: Link, size: int, amount: float) -> float:
    """Seconds of one all-reduce: every rank sends 2 (N - 1) / N of it."""
    return link.latency[size] + 2 * (size - 1) / size * amount / link.rate[size] if size > 1 else 0.0


def decode(preset: str, size: int, link: Link, rows: int, context: int) -> float:
    """Seconds of a step that draws one token for each row."""
    s = share(preset, size)
    memory = (s.read + rows * context * s.position) / MEMORY
    return memory + s.layers * PER_LAYER + s.reductions * reduce_time(link, size, rows * s.width)


def prefill(preset: str, size: int, link: Link) -> float:
    """Seconds of a step of PROMPT tokens, attention not counted."""
    s = share(preset, size)
    products = 2 * (s.read / BF16) * PROMPT / FLOPS
    return products + s.reductions * reduce_time(link, size, PROMPT * s.width)


def longest(preset: str, factor: float) -> float:
    """Seconds that a small all-reduce may take so that two ranks serve one request `factor` times as fast as one."""
    s = share(preset, 2)
    left = decode(preset, 1, HOST, 1, CONTEXT) / factor - (decode(preset, 2, HOST, 1, CONTEXT) - s.reductions * HOST.latency[2])
    return left / s.reductions


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def held() -> Iterator[str]:
    head = ["model", "ranks", "weights read and held, GB", "KV per position, kB", "positions that fit beside them"]
    rows = []
    for preset in MODELS:
        for size in RANKS:
            s = share(preset, size)
            room = (0.9 * ROOM - s.weights) / s.position
            rows.append([preset, str(size), f"{s.weights / 1e9:.2f}", f"{s.position / 1e3:.1f}", f"{room / 1e6:.2f} million"])
    yield from table(head, rows)


def sent() -> Iterator[str]:
    head = ["model", "all-reduces per step", "bytes each, 1 row", f"bytes each, {ROWS} rows", f"bytes per step, {ROWS} rows"]
    head += [f"sent by each of 2, 4, 8 ranks, {ROWS} rows, MB"]
    rows = []
    for preset in MODELS:
        s = share(preset, 2)
        step = s.reductions * ROWS * s.width
        each = ", ".join(f"{2 * (n - 1) / n * step / 1e6:.0f}" for n in RANKS[1:])
        amounts = [f"{s.reductions}", f"{s.width:,}", f"{ROWS * s.width:,}", f"{step / 1e6:.0f} MB", each]
        rows.append([preset, *amounts])
    yield from table(head, rows)


def ids() -> Iterator[str]:
    head = ["rows", "logits to rank 0, ids back", "logits to every rank", "value and id of each rank's best"]
    vocab = share(MODELS[-1], 2).vocab
    rows = []
    for count_ in (1, ROWS):
        parts = []
        for n in RANKS[1:]:
            logits = (n - 1) * count_ * -(-vocab // n) * BF16
            parts.append((logits + 8 * count_, logits, (n - 1) * count_ * 16))
        rows.append([str(count_), *(", ".join(f"{_kb(p[way])}" for p in parts) for way in range(3))])
    yield from table(head, rows)


def shares_of_gathering() -> Iterator[str]:
    """Expected time to get the logits of all ranks, inside a host."""
    head = ["model", "rows", *(f"{n} GPUs: us, share of the step" for n in RANKS[1:])]
    rows = []
    for preset in MODELS:
        for count_ in (1, ROWS):
            cells = []
            for n in RANKS[1:]:
                took = HOST.latency[n] + (n - 1) / n * count_ * share(preset, n).vocab * BF16 / HOST.rate[n]
                cells.append(f"{took * 1e6:.0f}, {took / (decode(preset, n, HOST, count_, CONTEXT) + took):.1%}")
            rows.append([preset, str(count_), *cells])
    yield from table(head, rows)


def _kb(amount: float) -> str:
    return f"{amount / 1e3:,.0f}" if amount >= 1e5 else f"{amount / 1e3:.3g}"


def speed() -> Iterator[str]:
    steps = {
        "one request": lambda p, n, link: decode(p, n, link, 1, CONTEXT),
        f"{ROWS} rows": lambda p, n, link: decode(p, n, link, ROWS, CONTEXT),
        f"prompt of {PROMPT:,}": prefill,
    }
    head = ["model", "step", "one GPU, ms", *(f"{n} GPUs: ms, times as fast, efficiency" for n in RANKS[1:])]
    for link in (HOST, HOSTS):
        yield f"**{link.name[0].upper()}{link.name[1:]}**\n"
        rows = []
        for preset in MODELS:
            for name, time in steps.items():
                one = time(preset, 1, link)
                cells = []
                for n in RANKS[1:]:
                    many = time(preset, n, link)
                    cells.append(f"{many * 1e3:.2f}, {one / many:.2f}, {one / many / n:.0%}")
                rows.append([preset, name, f"{one * 1e3:.2f}", *cells])
        yield from table(head, rows)


def measured() -> Iterator[str]:
    record = json.loads(MEASURED.read_text())
    yield f"`{record['command']}`, torch {record['packages']['torch']}, gloo on 2 cores (4 ranks share them).\n"
    yield markdown(record["rows"]) + "\n"


def page() -> str:
    """The whole text."""
    limits = {preset: longest(preset, 1.5) * 1e6 for preset in MODELS}
    bound = ", ".join(f"{preset} {limit:.0f} us" if limit > 0 else f"{preset} never" for preset, limit in limits.items())
    latencies = [", ".join(f"{1e6 * link.latency[n]:.0f}" for n in RANKS[1:]) for link in (HOST, HOSTS)]
    assumed = [
        ["memory", f"{MEMORY / 1e12:.1f} TB/s"],
        ["fixed cost of a layer (kernels that do not get shorter)", f"{PER_LAYER * 1e6:.0f} us"],
        ["products of a prompt", f"{FLOPS / 1e12:.0f} TFLOP/s"],
        ["small all-reduce, one NVLink host, 2, 4, 8 ranks", f"{latencies[0]} us"],
        ["link inside the host", f"{HOST.rate[2] / 1e9:.0f} GB/s"],
        ["small all-reduce, two hosts, 2, 4, 8 ranks", f"{latencies[1]} us"],
        ["links between the hosts, one for each GPU of a host", f"{HOSTS.rate[2] / 1e9:.0f} GB/s each"],
        ["context of each row", f"{CONTEXT} tokens"],
    ]
    tables = {"held": held(), "sent": sent(), "ids": ids(), "measured": measured(), "gathering": shares_of_gathering()}
    tables |= {"assumed": table(["assumed", "value"], assumed), "speed": speed()}
    facts = {"kb": len(pack(plan(ROWS))) / 1e3, "rows": ROWS, "vocab": share(MODELS[-1], 2).vocab}
    filled = {name: "\n".join(lines).rstrip("\n") for name, lines in tables.items()}
    return TEXT.read_text(encoding="utf-8").format(**filled, **facts, bound=bound, room=ROOM / 1e9)


def main(arguments: list[str]) -> int:
    """Write the page, or with --check say whether it is current; exit code 1 if not."""
    text = page()
    if "--check" in arguments:
        stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text
        if stale:
            print(f"not current: {PAGE.name}; run python -m docs.generate_tensor_parallel", file=sys.stderr)
        return int(stale)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
