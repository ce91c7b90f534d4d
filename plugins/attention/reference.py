"""The definition of paged attention, against which every other backend is tested: plain PyTorch, softmax in float32.

H query heads, K KV heads, D head size, n tokens of a chunk, L positions it may read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.interfaces import Array, AttentionBackend, Batch, KVSpec, Prologue


class Reference(AttentionBackend):
    """Slow and obvious. Cache: keys and values, each [layers, blocks * block_size, K, D]."""

    spec: KVSpec
    block_size: int
    keys: Tensor
    values: Tensor

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Keys and values of all layers."""
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize * block_size

    def allocate(self, spec: KVSpec, blocks: int, block_size: int) -> None:
        """Uninitialised on purpose: no result may depend on what was never written."""
        self.keys = self.values = torch.empty(0)
        self.spec, self.block_size = spec, block_size
        shape = (spec.num_layers, blocks * block_size, spec.num_kv_heads, spec.head_size)
        self.keys = torch.empty(shape, dtype=spec.dtype, device=self.context.device)
        self.values = torch.empty_like(self.keys)

    def plan(self, batch: Batch, state: Any = None) -> None:
        """Nothing to prepare; chunks without tokens or positions must not exist."""
        assert min(batch.cu_q.diff().min(), batch.kv_lens.min()) > 0, "a chunk of length 0"

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: Any, prologue: Prologue) -> Tensor:
        """All stores, then chunk after chunk."""
        keys, values = self.keys[layer], self.values[layer]
        keys[batch.kv_slots], values[batch.kv_slots] = k, v
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        bounds = batch.cu_q.tolist()
        for i, length in enumerate(batch.kv_lens.tolist()):
            tokens = slice(bounds[i], bounds[i + 1])
            at = torch.arange(length, device=q.device)
            slots = batch.block_table[i, at // self.block_size].long() * self.block_size + at % self.block_size
            visible = at <= batch.positions[tokens, None]
            out[tokens] = _attend(q[tokens], keys[slots], values[slots], visible, self.spec.scale)
        return out

    def move(self, pairs: Array) -> None:
        """One after the other: a block may be the target of one pair and the source of a later one."""
        for tensor in (self.keys, self.values):
            blocks = tensor.unflatten(1, (-1, self.block_size))
            for source, target in pairs.tolist():
                blocks[:, target] = blocks[:, source]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [n, H, D], k and v [L, K, D], visible [n, L] -> [n, H, D]"""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), k) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, v).to(q.dtype)
