"""Microseconds and TB/s of products of few tokens: Triton kernels of plugins.models.common.gemv against cuBLAS.

    python -m benchmarks.gpu.gemm [--quick]

Each time is that of one product among 28 with weights of their own in one CUDA graph, so that no weight is found in the L2
cache. The kernels do what they do in a layer (qkv and gate_up with the norm before them, gate_up with SiLU, o and down with
the residual), cuBLAS does the product alone. Then whole layers without attention, both ways. --quick: the smallest model and
few layouts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.models.common import kernels
from plugins.models.common.gemv import FEW, FEW_INPUTS, Few, Plan, Skinny, Tile, choose

CUDA, EPS, COPIES = torch.device("cuda"), 1e-6, 28
TOKENS = (1, 2, 4, 8, 16, 32, 64, 131)
MODELS = {"0.6B": (1024, 2048, 4096, 3072), "8B": (4096, 4096, 6144, 12_288), "14B": (5120, 5120, 7168, 17_408)}
FEWS = [Few(4, 4), Few(8, 4), Few(8, 8), Few(4, 2, 4), Few(8, 4, 8), Few(16, 4, 8), Few(2, 4, 2)]
TILES = [
    Tile(32, 128, 8, 5),
    Tile(32, 128, 4, 5),
    Tile(32, 128, 2, 5),
    Tile(32, 128, 1, 5),
    Tile(16, 128, 4, 5),
    Tile(32, 256, 4, 3),
    Tile(64, 128, 8, 4),
    Tile(64, 64, 4, 6),
    Tile(64, 128, 1, 4),
]
GATED = [Tile(16, 128, 1, 5), Tile(32, 128, 1, 4), Tile(16, 64, 1, 8), Tile(16, 256, 1, 3), Tile(32, 64, 1, 6)]
Shape = tuple[str, int, int]  # form, outputs, inputs


def shapes(model: str) -> list[Shape]:
    """The products of a layer."""
    hidden, heads, qkv, wide = MODELS[model]
    return [("qkv", qkv, hidden), ("o", hidden, heads), ("gate_up", wide, hidden), ("down", hidden, wide)]


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, device=CUDA, dtype=torch.bfloat16).normal_(0, scale)


def layouts(shape: Shape, tokens: int, quick: bool) -> list[Plan]:
    """The one in use first, then others worth a try."""
    form, outs, ins = shape
    quick = quick or ins >= 5120  # the largest model only confirms
    gated, chosen = form == "gate_up", choose(tokens, outs, ins, form == "gate_up")
    if tokens > 64:
        return []
    tiles = (GATED if gated else TILES)[: 3 if quick else None if tokens <= 16 else 5]
    tiles = [t for t in tiles if t.splits * 2 * t.step <= ins]
    if tokens > 16 and not quick:
        tiles += [Tile(64, 64, 1, 4)] if gated else [Tile(64, 128, 4, 4)]
    fews = [few._replace(held=2) if gated else few for few in FEWS[: 3 if quick else None]] if tokens <= FEW else []
    if ins > FEW_INPUTS:
        fews = fews[:1] if tokens == 1 else []
    return list(dict.fromkeys([chosen, *fews, *tiles]))


def call(product: Skinny, shape: Shape, tokens: int) -> Callable[[Tensor, Plan | None], Tensor]:
    """weight, layout -> one product as a layer asks for it."""
    form, outs, ins = shape
    x, scale, residual = random(tokens, ins), random(ins), random(tokens, outs)
    given: dict[str, Any] = {"residual": residual} if form in ("o", "down") else {"norm": (scale, EPS)}
    return lambda weight, plan: product(x, weight, gated=form == "gate_up", plan=plan, **given)


def compiled(jobs: list[tuple[Shape, int, Plan, bool]]) -> int:
    """Fill Triton's cache with these, in a process of its own."""
    for shape, tokens, plan, early in jobs:
        form, outs, ins = shape
        product = Skinny(CUDA)
        product.early = early
        call(product, shape, tokens)(random(outs * (1 + (form == "gate_up")), ins), plan)
    torch.cuda.synchronize()
    return len(jobs)


def compile_all(models: list[str], quick: bool) -> None:
    """One process per core: compiling one kernel after the other would take most of the time."""
    jobs = []
    for model in models:
        for shape in shapes(model):
            for tokens in (1, 2, 4, 16, 32, 64):
                found = layouts(shape, tokens, quick)
                jobs += [(shape, tokens, plan, True) for plan in found] + [(shape, tokens, found[0], False)]
    workers = max(min((os.cpu_count() or 2) - 2, 14, len(jobs)), 1)
    started = time.perf_counter()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        done = sum(pool.map(compiled, [jobs[i::workers] for i in range(workers)]))
    print(f"{done} kernels compiled by {workers} processes in {time.perf_counter() - started:.0f} s", flush=True)


def per_call(work: Callable[[], Any], calls: int, replays: int = 7) -> float:
    """Microseconds of one of `calls` calls: the median of some replays."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return times[replays // 2] * 1e3 / calls


def measure(shape: Shape, quick: bool, name: str) -> tuple[list[str], dict[int, Plan]]:
    """A line per number of tokens; the fastest layouts."""
    form, outs, ins = shape
    rows = outs * (1 + (form == "gate_up"))
    weights = [random(rows, ins, scale=0.02) for _ in range(COPIES)]
    lines, best, product = [], {}, Skinny(CUDA)
    for tokens in TOKENS:
        x, one = random(tokens, ins), call(product, shape, tokens)
        theirs = per_call(lambda x=x: [F.linear(x, w) for w in weights], COPIES)
        tried: dict[Plan, float] = {}
        for plan in layouts(shape, tokens, quick):
            try:
                tried[plan] = per_call(lambda one=one, plan=plan: [one(w, plan) for w in weights], COPIES)
            except Exception as error:  # a layout that does not fit this GPU must not end the run
                print(f"{name} {form} T={tokens} {plan}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        cells = f"{name:<5}{form:<8}{tokens:>4}{theirs:>8.2f}{rows * ins * 2 / theirs / 1e6:>6.2f}"
        if tried:
            chosen = layouts(shape, tokens, quick)[0]
            best[tokens] = plan = min(tried, key=lambda p: tried[p])
            product.early = False
            late = per_call(lambda one=one, chosen=chosen: [one(w, chosen) for w in weights], COPIES)
            product.early = True
            ours = tried.get(chosen, float("nan"))
            cells += f"{ours:>8.2f}{late:>8.2f}{tried[plan]:>8.2f}{rows * ins * 2 / tried[plan] / 1e6:>6.2f}"
            cells += f"  {type(plan).__name__}{tuple(plan)}" + (" (in use)" if plan == chosen else "")
        lines.append(cells)
    return lines, best


def layer(model: str, tokens: int, best: dict[Shape, dict[int, Plan]]) -> str:
    """Norms, products and SiLU of whole layers: plain, with the layouts in use, with the fastest ones, without early start."""
    hidden, heads, qkv, wide = MODELS[model]
    count = COPIES if model == "0.6B" else 12
    names = ((qkv, hidden), (hidden, heads), (2 * wide, hidden), (hidden, wide))
    layers = [[random(*s, scale=0.02) for s in names] for _ in range(count)]
    x, residual, seen, scale = random(tokens, hidden), random(tokens, hidden), random(tokens, heads), random(hidden)
    plans: list[Plan | None] = [best[shape].get(tokens) for shape in shapes(model)]

    def plain() -> Tensor:
        y, total = x.clone(), residual.clone()
        for a, b, c, d in layers:
            y, total = kernels.add_rms_norm(y, total, scale, EPS)
            F.linear(y, a)
            y, total = kernels.add_rms_norm(F.linear(seen, b), total, scale, EPS)
            y = F.linear(kernels.silu_mul(F.linear(y, c)), d)
        return y

    def few(product: Skinny, plans: list[Plan | None]) -> Tensor:
        y, norm = x, (scale, EPS)
        for a, b, c, d in layers:
            product(y, a, norm=norm, plan=plans[0])
            y = product(seen, b, residual=y, plan=plans[1])
            hot = product(y, c, norm=norm, gated=True, plan=plans[2])
            y = product(hot, d, residual=y, plan=plans[3])
        return y

    early, late = Skinny(CUDA), Skinny(CUDA)
    late.early = False
    ours = [
        per_call(lambda: few(early, [None] * 4), count),
        per_call(lambda: few(late, [None] * 4), count),
        per_call(lambda: few(early, plans), count),
    ]
    size = sum(a * b for a, b in names) * 2
    theirs = per_call(plain, count)
    cells = "".join(f"{us:>9.2f}" for us in (theirs, *ours))
    return f"{model:<6}{tokens:>4}{cells}{size / min(ours) / 1e6:>7.2f}{theirs / min(ours):>6.2f}x"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model and three layouts of each kind")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    models = ["0.6B"] if quick else list(MODELS)
    compile_all(models, quick)
    lines, chains = [], []
    for model in models:
        best: dict[Shape, dict[int, Plan]] = {}
        for shape in shapes(model):
            found, best[shape] = measure(shape, quick, model)
            lines += found
            torch.cuda.empty_cache()
        chains += [layer(model, tokens, best) for tokens in TOKENS if tokens <= 64]
        torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us per product, TB/s of weights")
    print(f"{'':<13}{'T':>4}{'cuBLAS':>8}{'TB/s':>6}{'in use':>8}{'late':>8}{'best':>8}{'TB/s':>6}  layout", *lines, sep="\n")
    print("us per layer without attention (late: no early start; best: the layouts above)")
    print(f"{'':<6}{'T':>4}{'plain':>9}{'in use':>9}{'late':>9}{'best':>9}{'TB/s':>7}", *chains, sep="\n")


if __name__ == "__main__":
    main()
