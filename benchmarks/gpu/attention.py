"""Decode, prefill, common prefix and prologue of attention=triton on one GPU, beside FlashAttention-3 where it can be imported.

    python -m benchmarks.gpu.attention [--configs 64x4x3,32x4x4] [--splits 1,2,4] [--blocks 64,256] [--skip decode,...]

Shapes are those of Qwen3-0.6B: 28 layers with a cache of their own each, 16 query heads, 8 KV heads, head size 128, bfloat16.
A number is one graph of all layers, the median of its replays; what is compared takes turns. A configuration is
tile x warps x stages. Every configuration is checked against float64 on some rows; FAILED stands where it is wrong.
Progress goes to stderr, the table comes last on stdout.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from core.interfaces import Batch, KVSpec, Prologue
from plugins.attention.kernels.decode import Scratch, Shape, decode
from plugins.attention.kernels.prefill import Tiles, prefill
from plugins.attention.kernels.prefix import attend_prefix
from plugins.attention.kernels.prologue import prologue_store
from plugins.attention.triton import State, Triton

SPEC = KVSpec(28, 16, 8, 128, torch.bfloat16)
TOKEN = 2 * SPEC.num_kv_heads * SPEC.head_size * 2  # bytes of keys and values of one position in one layer
PLACES = 256 * 900  # positions that the cache has room for
DECODES = [(1, 700, 700), (1, 4000, 4000), (16, 500, 800), (32, 800, 1000), (64, 500, 1300), (131, 300, 1500), (256, 100, 1100)]
PROMPTS = [(29, 560), (16, 1024), (4, 4096)]
PREFILL_TILES = [Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(128, 128, 8, 2)]
LAYERS = range(SPEC.num_layers)

flash_attn_varlen_func: Any = None
get_scheduler_metadata: Any = None
with suppress(ImportError):
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata  # type: ignore[import-not-found,no-redef]


def note(*words: Any) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s", *words, file=sys.stderr, flush=True)


STARTED = time.perf_counter()


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def medians(steps: list[Callable[[], Any]], rounds: int = 7) -> list[float]:
    """Milliseconds of each, taking turns."""
    graphs = [captured(step) for step in steps]
    times: list[list[float]] = [[] for _ in graphs]
    for turn in range(rounds + 1):
        for graph, found in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                found.append(start.elapsed_time(end))
    return [sorted(found)[len(found) // 2] for found in times]


class Pool:
    """One large buffer of random values, seen as the cache of a backend of any block size, and as FlashAttention's."""

    def __init__(self) -> None:
        elements = SPEC.num_layers * 2 * (PLACES + 256) * SPEC.num_kv_heads * SPEC.head_size
        self.buffer = torch.empty(elements, dtype=SPEC.dtype, device="cuda")
        for part in self.buffer.split(1 << 28):
            part.normal_()

    def backend(self, size: int) -> Triton:
        made = Triton(None, SimpleNamespace(device=torch.device("cuda"), fused=True))
        made.allocate(SPEC, 1, size)
        cache = self.buffer.view(SPEC.num_layers, 2, -1, SPEC.num_kv_heads, size, SPEC.head_size)
        made.cache, made.layers = cache, [(layer[0], layer[1]) for layer in cache]
        return made

    def flash(self, size: int) -> list[tuple[Tensor, Tensor]]:
        cache = self.buffer.view(SPEC.num_layers, 2, -1, size, SPEC.num_kv_heads, SPEC.head_size)
        return [(layer[0], layer[1]) for layer in cache]


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def table_of(lens: list[int], size: int, columns: int, shared: int = 0) -> Tensor:
    """Blocks in random order; the first `shared` ones are the same in all rows."""
    order = iter(torch.randperm(PLACES // size).add_(1).tolist())
    common = [next(order) for _ in range(shared)]
    rows = [common + [next(order) for _ in range(-(-n // size) - shared)] for n in lens]
    return int32([row + [0] * (columns - len(row)) for row in rows])


def wanted(q: Tensor, cache: tuple[Tensor, Tensor], table: Tensor, length: int, size: int) -> Tensor:
    """float64: q [n, H, D], the last n positions of a row of `length`."""
    at = torch.arange(length, device="cuda")
    blocks = table.long()[at // size]
    k, v = (x[blocks, :, at % size].double().repeat_interleave(SPEC.num_heads // SPEC.num_kv_heads, 1) for x in cache)
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * SPEC.scale
    last = torch.arange(length - len(q), length, device="cuda")
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(at > last[:, None], float("-inf")).softmax(-1), v)


def wrong(got: Tensor, want: Tensor) -> str:
    error = ((got.double() - want).norm() / want.norm()).item()
    return "" if error < 1e-2 else f" FAILED ({error:.1e})"


@dataclass
class Step:
    """A decode step over all layers of a backend."""

    backend: Triton
    lens: list[int]
    shared: int = 0

    def __post_init__(self) -> None:
        rows, size = len(self.lens), self.backend.block_size
        self.kv_lens = int32(self.lens)
        self.table = table_of(self.lens, size, 4096 // size, self.shared)
        self.q = [torch.randn(rows, SPEC.num_heads, SPEC.head_size, device="cuda", dtype=SPEC.dtype) for _ in LAYERS]
        self.out = torch.empty_like(self.q[0])
        self.sample = random.sample(range(rows), min(rows, 4))
        cache = self.backend.layers[-1]
        parts = [wanted(self.q[-1][i : i + 1], cache, self.table[i], self.lens[i], size) for i in self.sample]
        self.want = torch.cat(parts)

    def plan(self, shared: int = 0) -> State:
        none, rows = torch.empty(0), len(self.lens)
        batch = Batch(none, none, none, self.kv_lens, self.table, none, none, 1, 4096, rows, shared)
        return self.backend.plan(batch)

    def ours(self, shape: Shape, state: State | None = None) -> Callable[[], None]:
        prefix = state.prefix if state else None
        scratch = state.scratch if state else Scratch.make(len(self.lens), shape.splits, SPEC, torch.device("cuda"))

        def step() -> None:
            for q, (keys, values) in zip(self.q, self.backend.layers, strict=True):
                if prefix is not None and scratch is not None:
                    attend_prefix(q, keys, values, self.table, SPEC.scale, shape, scratch, prefix)
                decode(q, keys, values, self.table, self.kv_lens, self.out, SPEC.scale, shape, scratch, prefix)

        return step

    def flash(self, caches: list[tuple[Tensor, Tensor]]) -> Callable[[], Any]:
        cu_q = int32(range(len(self.lens) + 1))
        given = {
            "batch_size": len(self.lens),
            "max_seqlen_q": 1,
            "max_seqlen_k": 4096,
            "num_heads_q": SPEC.num_heads,
            "num_heads_kv": SPEC.num_kv_heads,
            "headdim": SPEC.head_size,
            "cache_seqlens": self.kv_lens,
            "qkv_dtype": SPEC.dtype,
            "cu_seqlens_q": cu_q,
            "page_size": self.backend.block_size,
            "causal": True,
            "num_splits": 0,
        }
        metadata = get_scheduler_metadata(**given)
        more = {"seqused_k": self.kv_lens, "block_table": self.table, "causal": True, "fa_version": 3}
        return lambda: [
            flash_attn_varlen_func(q, k, v, 1, cu_q, 4096, scheduler_metadata=metadata, **more)
            for q, (k, v) in zip(self.q, caches, strict=True)
        ]

    def wrong(self) -> str:
        found = wrong(self.out[self.sample], self.want)
        self.out.fill_(float("nan"))
        return found


def name(shape: Shape) -> str:
    return f"{shape.tile}x{shape.warps}x{shape.stages}/{shape.splits}"


def bench_decode(pool: Pool, options: argparse.Namespace) -> list[str]:
    """For each case and block size: FlashAttention-3, the built-in choice, and the best of the configurations asked for."""
    lines = []
    for size in options.blocks:
        backend, flash = pool.backend(size), pool.flash(size)
        for rows, low, high in DECODES:
            random.seed(0)
            step = Step(backend, [random.randint(low, high) for _ in range(rows)])
            gigabytes = sum(step.lens) * TOKEN * SPEC.num_layers / 1e9
            chosen = step.plan().shape
            shapes = [
                Shape(splits, tile, tile, warps, stages)
                for tile, warps, stages in options.configs
                for splits in options.splits
                if splits * tile < 2 * max(step.lens) and 100 <= rows * SPEC.num_kv_heads * splits <= 9000
            ]
            found = []
            for shape in [chosen, *shapes]:
                time_of = medians([step.ours(shape)], 5)[0]
                found.append((time_of, f"{name(shape)} {time_of:.3f}{step.wrong()}"))
            peers = [step.ours(chosen)] + ([step.flash(flash)] if flash_attn_varlen_func else [])
            ours, *theirs = medians(peers, 9)
            fa3 = f"FA3 {theirs[0]:.3f} ({gigabytes / theirs[0]:.2f} TB/s)" if theirs else "FA3 -"
            built_in = f"{name(chosen)}~{chosen.least} {ours:.3f} ({gigabytes / ours:.2f} TB/s)"
            best = "  ".join(text for _, text in sorted(found[1:])[:4])
            failed = "".join(text for _, text in found if "FAILED" in text)
            line = f"decode {rows:3}x{low}-{high} P{size}: {fa3} | {built_in} | best: {best} {failed}"
            lines.append(line)
            note(line)
    return lines


def bench_prefix(pool: Pool) -> list[str]:
    """256 rows that share 2,048 positions, with the prefix read row by row and once."""
    lines = []
    for rows in (16, 64, 256):
        size = 64
        backend = pool.backend(size)
        step = Step(backend, [2048 + random.randint(64, 128) for _ in range(rows)], 2048 // size)
        plain, once = step.plan(), step.plan(2048 // size)
        first, second = step.ours(plain.shape, plain), step.ours(once.shape, once)
        first()
        failed = step.wrong()
        second()
        failed += step.wrong()
        a, b = medians([first, second])
        lines.append(f"common prefix of 2048, {rows} rows: row by row {a:.3f} ms, once {b:.3f} ms{failed}")
        note(lines[-1])
    return lines


def bench_prefill(pool: Pool, options: argparse.Namespace) -> list[str]:
    """Whole prompts, read back from the cache as the backend does; FlashAttention-3 over the same kind of cache."""
    lines = []
    for size in options.blocks:
        backend, flash = pool.backend(size), pool.flash(size)
        for rows, length in PROMPTS:
            table, lens = table_of([length] * rows, size, -(-length // size)), int32([length] * rows)
            cu_q = int32([length * i for i in range(rows + 1)])
            q = torch.randn(rows * length, SPEC.num_heads, SPEC.head_size, device="cuda", dtype=SPEC.dtype)
            out = torch.empty_like(q)
            want = wanted(q[-length:], backend.layers[-1], table[-1], length, size)

            def ours(tiles: Tiles, q=q, table=table, lens=lens, cu_q=cu_q, out=out, length=length, backend=backend) -> Any:
                for keys, values in backend.layers:
                    prefill(q, keys, values, table, lens, cu_q, out, SPEC.scale, length, 0, tiles)

            steps: list[Callable[[], Any]] = []
            texts = []
            for tiles in PREFILL_TILES:
                out.fill_(float("nan"))
                steps.append(lambda ours=ours, tiles=tiles: ours(tiles))
                steps[-1]()
                texts.append(f"{tiles.queries}x{tiles.keys}x{tiles.warps}x{tiles.stages}{wrong(out[-length:], want)}")
            if flash_attn_varlen_func:
                more = {"seqused_k": lens, "block_table": table, "causal": True, "num_splits": 1, "fa_version": 3}
                call = lambda q=q, cu_q=cu_q, length=length, more=more, flash=flash: [  # noqa: E731
                    flash_attn_varlen_func(q, k, v, length, cu_q, length, **more) for k, v in flash
                ]
                steps.append(call)
                texts.append("FA3")
            tera = 4 * SPEC.num_heads * SPEC.head_size * rows * length * (length + 1) / 2 * SPEC.num_layers / 1e12
            pairs = zip(texts, medians(steps, 5), strict=True)
            found = [f"{text} {ms:.2f} ({tera / ms * 1e3:.0f} TF/s)" for text, ms in pairs]
            lines.append(f"prefill {rows}x{length} P{size}: " + "  ".join(found))
            note(lines[-1])
    return lines


def bench_prologue(pool: Pool) -> list[str]:
    """Norm, rotary embedding and store of one layer; every value read once and written once."""
    backend, lines = pool.backend(64), []
    heads = (SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads)
    weight = torch.rand(SPEC.head_size, device="cuda").to(SPEC.dtype)
    prologue = Prologue(weight, weight, 1e-6, torch.randn(4096, SPEC.head_size, device="cuda"))
    for tokens in (1, 16, 256, 4096, 16384):
        buffer = torch.randn(tokens, sum(heads), SPEC.head_size, device="cuda", dtype=SPEC.dtype)
        q, k, v = buffer.split(heads, 1)
        positions = torch.arange(tokens, device="cuda") % 4096
        slots = torch.randperm(PLACES, device="cuda")[:tokens]

        def step(given: Prologue | None, q=q, k=k, v=v, slots=slots, positions=positions) -> None:
            for keys, values in backend.layers:
                prologue_store(q, k, v, keys, values, slots, positions, given)

        both, store = (ms / SPEC.num_layers for ms in medians([lambda s=step: s(prologue), lambda s=step: s(None)]))
        moved = 2 * buffer.numel() * 2 / 1e6
        lines.append(
            f"prologue {tokens:5} tokens: {both * 1e3:.1f} us ({moved / both:.0f} GB/s), store alone {store * 1e3:.1f} us"
        )
        note(lines[-1])
    return lines


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default="64x4x3,64x4x2,32x4x4,128x8x2", help="tile x warps x stages, comma-separated")
    parser.add_argument("--splits", type=numbers, default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64])
    parser.add_argument("--blocks", type=numbers, default=[64, 256], help="block sizes")
    parser.add_argument("--skip", default="", help="decode, prefix, prefill, prologue")
    options = parser.parse_args()
    options.configs = [tuple(numbers(part.replace("x", ","))) for part in options.configs.split(",")]
    torch.manual_seed(0)
    pool = Pool()
    note("cache filled")
    parts = {
        "prologue": lambda: bench_prologue(pool),
        "prefix": lambda: bench_prefix(pool),
        "prefill": lambda: bench_prefill(pool, options),
        "decode": lambda: bench_decode(pool, options),
    }
    lines = [line for part, bench in parts.items() if part not in options.skip for line in bench()]
    print("\nms per step of 28 layers (prologue: us per layer); a shape is tile x warps x stages / splits")
    print("\n".join(lines))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
