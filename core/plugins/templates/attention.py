"""Attention in passes over the KV cache: some blocks at a time with a running maximum, so no row of scores exists as a whole.

The idea of FlashAttention (Dao et al., 2022) in plain PyTorch, one chunk after the other: exact, easy to change, not fast.
This module is imported at every start of inferlab, so torch is imported where it is used.

H query heads, K KV heads, D head size, n tokens of a chunk, L positions of a pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.interfaces import (
    Array,
    AttentionBackend,
    Batch,
    Component,
    DeviceContext,
    KVSpec,
    OneOf,
    Prologue,
    hookimpl,
    setting,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Settings:
    """Given as attention.NAME=VALUE."""

    blocks: int = setting(16, "of the KV cache that one pass reads", "blocks")

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"attention.blocks must be >= 1, got {self.blocks}")


class MyPluginAttention(AttentionBackend):
    """Cache: keys and values, each [layers, blocks, block_size, K, D]."""

    spec: KVSpec
    cache: Tensor

    def __init__(self, settings: Settings, context: DeviceContext) -> None:
        super().__init__(settings, context)

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize

    def allocate(self, spec: KVSpec, blocks: int, block_size: int) -> None:
        import torch

        self.spec, self.cache = spec, torch.empty(0)  # a former cache is given up first
        shape = (2, spec.num_layers, blocks, block_size, spec.num_kv_heads, spec.head_size)
        self.cache = torch.empty(shape, dtype=spec.dtype, device=self.context.device)

    def plan(self, batch: Batch, state: Any = None) -> tuple[list[int], list[int]]:
        """Bounds of the chunks and their lengths, read from the device once per step, not once per layer."""
        return batch.cu_q.tolist(), batch.kv_lens.tolist()

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: Any, prologue: Prologue) -> Tensor:
        keys, values = self.cache[:, layer]
        # All stores come before all reads: a chunk may read what another one of the same step writes.
        keys.flatten(0, 1)[batch.kv_slots], values.flatten(0, 1)[batch.kv_slots] = k, v
        out = q.new_empty(q.shape)
        bounds, lengths = state
        for i, length in enumerate(lengths):
            chunk = slice(bounds[i], bounds[i + 1])
            blocks = batch.block_table[i, : -(-length // keys.shape[1])].long()
            out[chunk] = self._attend(q[chunk], keys, values, blocks, batch.positions[chunk]).to(q.dtype)
        return out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        """q [n, H, D]; blocks: ids in order of position -> [n, H, D] float32"""
        import torch

        group, start = q.shape[1] // keys.shape[2], 0
        q = q.float().transpose(0, 1) * self.spec.scale  # [H, n, D]
        best = q.new_full((*q.shape[:2], 1), float("-inf"))  # the largest score so far
        total, weighted = q.new_zeros(best.shape), q.new_zeros(q.shape)
        for some in blocks.split(self.settings.blocks):
            k, v = (x[some].flatten(0, 1).float().repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
            hidden = torch.arange(start, start + k.shape[1], device=q.device) > positions[:, None]  # [n, L]
            scores = (q @ k.transpose(1, 2)).masked_fill(hidden, float("-inf"))
            # A cache holds anything where nothing was stored, NaN too, and 0 * NaN is NaN.
            v = v.masked_fill(hidden.all(0)[:, None], 0.0)
            top = best.maximum(scores.amax(-1, keepdim=True))
            rescale, weights = (best - top).exp(), (scores - top).exp()
            total = total * rescale + weights.sum(-1, keepdim=True)
            weighted = weighted * rescale + weights @ v
            best, start = top, start + k.shape[1]
        return (weighted / total).transpose(0, 1)

    def move(self, pairs: Array) -> None:
        for source, target in pairs.tolist():
            self.cache[:, :, target] = self.cache[:, :, source]


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="attention",
        name="my-plugin",
        target="my_plugin:MyPluginAttention",
        settings=Settings,
        summary="exact attention in passes over some blocks at a time, in plain PyTorch",
        capabilities={"graphs": OneOf(False)},  # `plan` reads from the device: it cannot be captured
        prefers={"block_size": (16,)},
        api=(1, 0),
    )
