"""Attention over a sliding window and the first positions of the text, in plain PyTorch with softmax in float32.

Keys keep the rotary angle of their own position: nothing is renumbered, so a prefix that was cached by one request is right
for every other one that runs with the same settings.

T tokens, H query heads, K KV heads, D head size, n tokens of a chunk, L positions that one of them may see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.interfaces import Array, AttentionBackend, Batch, KVSpec, Prologue


@dataclass(frozen=True)
class Reads:
    """What one chunk reads, the same in every layer."""

    tokens: slice  # its tokens in the step
    places: Tensor  # [L] rows of the cache
    visible: Tensor  # [n, L] bool


class WindowSinks(AttentionBackend):
    """Cache: keys and values, each [layers, blocks * block_size, K, D]."""

    spec: KVSpec
    block_size: int
    keys: Tensor
    values: Tensor

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize * block_size

    def allocate(self, spec: KVSpec, blocks: int, block_size: int) -> None:
        self.keys = self.values = torch.empty(0)  # give the former cache up first
        self.spec, self.block_size = spec, block_size
        shape = (spec.num_layers, blocks * block_size, spec.num_kv_heads, spec.head_size)
        self.keys = torch.empty(shape, dtype=spec.dtype, device=self.context.device)
        self.values = torch.empty_like(self.keys)

    def plan(self, batch: Batch, state: Any = None) -> list[Reads]:
        bounds, ends = batch.cu_q.tolist(), batch.kv_lens.tolist()
        return [self._reads(batch, i, slice(bounds[i], bounds[i + 1]), end) for i, end in enumerate(ends)]

    def _reads(self, batch: Batch, chunk: int, tokens: slice, end: int) -> Reads:
        """Only positions that some token of the chunk sees are gathered: at most sinks + window + n - 1."""
        window, sinks = self.settings.window, self.settings.sinks
        start = end - (tokens.stop - tokens.start)
        assert start < end, "a chunk of length 0"
        tail = max(start - window + 1, 0)
        device = batch.positions.device
        head = torch.arange(min(sinks, tail), device=device)
        at = torch.cat((head, torch.arange(tail, end, device=device)))  # [L] positions
        query = batch.positions[tokens, None]
        visible = (at <= query) & ((at > query - window) | (at < sinks))
        places = batch.block_table[chunk, at // self.block_size].long() * self.block_size + at % self.block_size
        return Reads(tokens, places, visible)

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: list[Reads], prologue: Prologue
    ) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        keys[batch.kv_slots], values[batch.kv_slots] = k, v
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for reads in state:
            parts = q[reads.tokens], keys[reads.places], values[reads.places]
            out[reads.tokens] = attend(*parts, reads.visible, self.spec.scale)
        return out

    def move(self, pairs: Array) -> None:
        for tensor in (self.keys, self.values):
            blocks = tensor.unflatten(1, (-1, self.block_size))
            for source, target in pairs.tolist():
                blocks[:, target] = blocks[:, source]


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [n, H, D], k and v [L, K, D], visible [n, L] -> [n, H, D]"""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), k) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, v).to(q.dtype)
