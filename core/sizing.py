"""How many KV blocks there are room for, and where the memory goes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from core import device
from core.interfaces import Batch, Rows

if TYPE_CHECKING:
    from core.runner import Runner

GIB = 1 << 30


@dataclass(frozen=True)
class Sizing:
    """Bytes of one rank."""

    num_blocks: int  # usable ones
    block_bytes: int
    kv: int
    weights: int  # as a checkpoint counts them
    activations: int  # largest temporary need of the warm-up; 0 where it is not measured
    rest: int  # other processes and the driver
    graphs: int = 0  # captured steps

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        parts = [f"{name} {getattr(self, name) / GIB:.2f}" for name in ("weights", "kv", "activations", "graphs", "rest")]
        return f"memory (GiB): {', '.join(parts)}; {self.num_blocks} KV blocks"


def size_pool(runner: Runner) -> Sizing:
    """An explicit block count is honoured; else the pool is what the limits can use, as far as memory allows."""
    resolved, spec = runner.resolved, runner.model.kv_spec
    bytes_per_block = runner.attention.block_bytes(spec, resolved.block_size)
    weights = sum(math.prod(shape) for shape in runner.model.weights().values()) * spec.dtype.itemsize
    activations = rest = 0
    wanted = resolved.limits.max_num_seqs * -(-resolved.limits.max_model_len // resolved.block_size)
    neighbours = runner.parallel.neighbours  # they take their shares of the same memory
    if runner.device.type == "cpu":
        budget = (resolved.kv_memory or device.available_memory() // 4) // neighbours
    else:
        wanted = 2**31  # a cache is worth having beyond what running requests need
        budget, activations, rest = _measure(runner, weights)
    count = resolved.num_kv_blocks or min(wanted, budget // bytes_per_block - 1)
    if resolved.num_kv_blocks and runner.device.type == "cpu":
        budget = device.available_memory() // neighbours  # an explicit count may take more than the default share
    need = (max(count, 1) + 1) * bytes_per_block
    if count < 1 or need > budget:
        raise ValueError(
            f"no room for the KV cache: {max(count, 1)} block(s) need {need / GIB:.2f} GiB, {budget / GIB:.2f} GiB are left "
            f"(weights {weights / GIB:.2f}, activations {activations / GIB:.2f}, others {rest / GIB:.2f} GiB); "
            "lower num_kv_blocks, max_num_batched_tokens or max_model_len, or raise gpu_memory_utilization or kv_memory"
        )
    count = runner.parallel.least(count)  # over all ranks: a block has the same number on each
    return Sizing(count, bytes_per_block, (count + 1) * bytes_per_block, weights, activations, rest)


def _measure(runner: Runner, weights: int) -> tuple[int, int, int]:
    """Run the largest step there can be; (bytes for KV, activations, what others use)."""
    limits = runner.resolved.limits
    length = min(limits.max_num_batched_tokens, limits.max_model_len)
    count = max(1, min(limits.max_num_batched_tokens // length, limits.max_num_seqs))
    runner.attention.allocate(runner.model.kv_spec, 1 + runner.table.shape[1], runner.block_size)
    device.reset_peak(runner.device)
    with torch.inference_mode():
        runner.run(*_largest(runner, count, length))
        runner.run(*_largest(runner, limits.max_num_seqs, 1))
    device.synchronize(runner.device)
    seen = device.memory(runner.device)
    activations = seen["peak"] - seen["current"]
    budget = int(seen["total"] * runner.resolved.gpu_memory_utilization) - seen["used"] - activations
    return budget, activations, seen["used"] - seen["current"]


def _largest(runner: Runner, count: int, length: int) -> tuple[Batch, Rows]:
    """`count` prompts of `length` tokens over the same few blocks: nobody reads the result."""
    columns = -(-length // runner.block_size)
    table = np.tile(np.arange(1, columns + 1, dtype=np.int32), (count, 1))
    position = np.tile(np.arange(length), count)
    cu_q = np.arange(count + 1, dtype=np.int32) * length
    slots = np.zeros(count, np.int64)
    t = device.to_device(
        {
            "positions": position,
            "tokens": np.zeros_like(position),
            "kv_slots": (position // runner.block_size + 1) * runner.block_size + position % runner.block_size,
            "cu_q": cu_q,
            "kv_lens": np.full(count, length, np.int32),
            "table": table,
            "last": cu_q[1:].astype(np.int64) - 1,
            "slots": slots,
        },
        runner.device,
    )
    places = (t[name] for name in ("tokens", "positions", "cu_q", "kv_lens", "table", "kv_slots", "last"))
    batch = Batch(*places, max_q=length, max_kv=length, num_decodes=count if length == 1 else 0)
    return batch, Rows(t["slots"], t["last"], None, runner.sampler.plan(slots))
