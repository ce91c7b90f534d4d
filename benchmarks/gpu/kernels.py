"""Microseconds and GB/s of the elementwise and sampling kernels against plain torch, each as a CUDA graph.

    python -m benchmarks.gpu.kernels [--quick]

Sizes are those of Qwen3-0.6B: hidden 1024, intermediate 3072, vocabulary 151936, bfloat16. GB/s counts each value read or
written once. Without --quick other launch configurations are timed too, which is how the constants in the source were chosen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.interfaces import Limits, NoSettings, Rows, SamplingParams
from plugins.models.common import kernels as fused
from plugins.models.common import norm
from plugins.models.common.decoder import silu_mul
from plugins.samplers import kernels as sampling
from plugins.samplers.greedy import Greedy
from plugins.samplers.gumbel import Gumbel

HIDDEN, INTERMEDIATE, VOCAB = 1024, 3072, 151_936
TOKENS, BATCHES = (1, 16, 131, 256, 4096, 16_384), (1, 16, 131, 256)


def per_call(call: Callable[[], Any], calls: int = 20, replays: int = 10) -> float:
    """Microseconds on the device: the median of several replays of one graph of `calls` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[replays // 2]


def host_cost(call: Callable[[], Any], calls: int = 300) -> float:
    """Microseconds that the host spends on one launch."""
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - started
    torch.cuda.synchronize()
    return spent / calls * 1e6


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def elementwise(tokens: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any], int]]:
    """Name -> kernel, plain function, bytes."""
    x, residual, weight, packed = (
        random(tokens, HIDDEN),
        random(tokens, HIDDEN),
        random(HIDDEN),
        random(tokens, 2 * INTERMEDIATE),
    )
    row = 2 * tokens
    return {
        "add_rms_norm": (
            lambda: fused.add_rms_norm(x, residual, weight, 1e-6),
            lambda: norm.add_rms_norm(x, residual, weight, 1e-6),
            4 * row * HIDDEN,
        ),
        "rms_norm": (
            lambda: fused.rms_norm(x, weight, 1e-6),
            lambda: norm.rms_norm(x, weight, 1e-6),
            2 * row * HIDDEN,
        ),
        "silu_mul": (lambda: fused.silu_mul(packed), lambda: silu_mul(packed), 3 * row * INTERMEDIATE),
    }


def sampler(cls: Any, batch: int, given: dict[str, Any], fuse: bool) -> Callable[[], Any]:
    """A call that draws `batch` rows."""
    context = SimpleNamespace(
        limits=Limits(batch, batch, 4096), device=torch.device("cuda"), vocab_size=VOCAB, compile=False, fused=fuse
    )
    made = cls(NoSettings(), context)
    for slot in range(batch):
        made.admit(slot, SamplingParams(**{"seed": slot, **given}), np.empty(0, np.int32))
    slots = torch.arange(batch, device="cuda")
    rows = Rows(slots, slots + 500, None, made.plan(np.arange(batch)))
    logits = random(batch, VOCAB)
    return lambda: made.sample(logits, rows)


@contextmanager
def changed(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def configurations() -> list[str]:
    """Other launch configurations of the norm and of the search."""
    lines = []
    for warps in (1, 2, 4, 8):
        with changed(fused, shape=lambda width, warps=warps: (width, 1, warps)):
            cells = [f"{per_call(elementwise(t)['add_rms_norm'][0]):8.2f}" for t in TOKENS]
        lines.append(f"add_rms_norm warps={warps}: {' '.join(cells)}")
    for tile, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        for programs in (512, 1024, 2048):
            with changed(sampling, TILE=tile, WARPS=warps, PROGRAMS=programs):
                cells = [f"{per_call(sampler(Gumbel, b, {'temperature': 0.6}, True), 5):8.2f}" for b in BATCHES]
            lines.append(f"gumbel tile={tile} warps={warps} programs={programs}: {' '.join(cells)}")
    return lines


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the configurations in use")
    args = parser.parse_args()
    torch.manual_seed(0)
    lines = [] if args.quick else ["us; columns: tokens", *configurations()]
    lines.append(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; host: us per launch outside a graph")
    lines.append(f"{'kernel':<22}{'rows':>7}{'us':>9}{'GB/s':>7}{'plain us':>10}{'x':>6}{'host':>7}{'plain':>7}")

    def add(name: str, rows: int, kernel: Callable[[], Any], plain: Callable[[], Any], size: int, calls: int) -> None:
        ours, theirs = per_call(kernel, calls), per_call(plain, calls)
        hosts = (host_cost(kernel), host_cost(plain)) if rows == 1 else (0.0, 0.0)
        cells = "".join(f"{h:7.1f}" if h else f"{'':7}" for h in hosts)
        speed = size / ours / 1e3
        lines.append(f"{name:<22}{rows:>7}{ours:>9.2f}{speed:>7.0f}{theirs:>10.2f}{theirs / ours:>6.1f}{cells}")

    for tokens in TOKENS:
        for name, (kernel, plain, size) in elementwise(tokens).items():
            add(name, tokens, kernel, plain, size, 20)
    for batch in BATCHES:
        for name, cls, given in (("gumbel", Gumbel, {"temperature": 0.6}), ("greedy", Greedy, {})):
            ours, plain = (sampler(cls, batch, given, flag) for flag in (True, False))
            add(name, batch, ours, plain, 2 * batch * VOCAB, 3)
    for batch in BATCHES[:2]:
        call = sampler(Gumbel, batch, {"top_p": 0.9}, True)
        lines.append(f"{'gumbel, top-p':<22}{batch:>7}{per_call(call, 2, 5):>9.2f}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
