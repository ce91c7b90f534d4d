"""Attention for models under test: contiguous histories in float64, no cache layout and no block.

T tokens of a step, H query heads, K KV heads, D head size, L positions of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.interfaces import Attend, Prologue
from core.prologue import apply_prologue
from core.testing.paged import causal, softmax_attention


@dataclass
class Histories:
    """Keys and values of every request and layer, as they would lie in a KV cache."""

    seen: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # (name, layer) -> k, v [L, K, D]
    layers: list[int] = field(default_factory=list)  # in the order of the calls
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # (H, K, D) of the calls

    def length(self, name: str) -> int:
        return len(self.seen[name, self.layers[0]][0]) if self.layers and (name, self.layers[0]) in self.seen else 0

    def attend(self, chunks: Sequence[tuple[str, int]], positions: Tensor) -> Attend:
        """For a step of (request, tokens) chunks at `positions` [T]."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, prologue: Prologue) -> Tensor:
            self.layers.append(layer)
            self.shapes.add((q.shape[1], k.shape[1], q.shape[2]))
            q, k = apply_prologue(q, k, positions, prologue)
            sizes = [count for _, count in chunks]
            parts = zip(chunks, q.double().split(sizes), k.double().split(sizes), v.double().split(sizes), strict=True)
            return torch.cat([self._one(layer, name, *qkv) for (name, _), *qkv in parts]).to(q.dtype)

        return attend

    def _one(self, layer: int, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = self.seen.get((name, layer), (k[:0], v[:0]))
        k, v = (torch.cat(pair) for pair in zip(past, (k, v), strict=True))
        self.seen[name, layer] = k, v
        queries = torch.arange(len(k) - len(q), len(k))[:, None]
        return softmax_attention(q, k, v, causal(queries, torch.arange(len(k))[None]), q.shape[2] ** -0.5)
