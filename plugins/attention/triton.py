"""Paged attention in Triton: prologue and store in one kernel, split decode, chunks of many tokens, common prefixes once.

The cache is [layers, 2, blocks, K, P, D], keys then values: what one KV head reads of a block is contiguous. K KV heads,
P positions per block, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.interfaces import Array, AttentionBackend, Batch, KVSpec, Prologue
from plugins.attention.kernels.decode import PrefixParts, Scratch, Shape, decode, shape_for
from plugins.attention.kernels.prefill import prefill
from plugins.attention.kernels.prefix import PARTS, attend_prefix, prefix_tile
from plugins.attention.kernels.prologue import prologue_store

COMMON_WORTH = 4096  # positions of a common prefix times rows from which one more kernel per layer pays
PROCESSORS = 132  # assumed where there is no GPU to ask


@dataclass(slots=True)
class State:
    """Of one step, or of one captured batch: everything here keeps its address."""

    shape: Shape
    scratch: Scratch | None  # None: no chunk of one token, or nothing to combine
    prefix: PrefixParts | None


class Triton(AttentionBackend):
    """Any GPU that Triton supports; on a CPU in Triton's interpreter, for tests."""

    spec: KVSpec
    block_size: int
    cache: Tensor

    def __init__(self, settings: Any, context: Any) -> None:
        super().__init__(settings, context)
        self.fuses_prologue = context.fused
        device = context.device
        self.processors = PROCESSORS
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._scratch: Scratch | None = None

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Keys and values of all layers."""
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize * block_size

    def allocate(self, spec: KVSpec, blocks: int, block_size: int) -> None:
        """Uninitialised on purpose: no result may depend on what was never written."""
        self.cache, self.layers = torch.empty(0), list[tuple[Tensor, Tensor]]()
        self._scratch = None
        self.spec, self.block_size = spec, block_size
        shape = (spec.num_layers, 2, blocks, spec.num_kv_heads, block_size, spec.head_size)
        self.cache = torch.empty(shape, dtype=spec.dtype, device=self.context.device)
        self.layers = [(layer[0], layer[1]) for layer in self.cache.unbind(0)]

    def plan(self, batch: Batch, state: State | None = None) -> State:
        """Host arithmetic on sizes only. A given state keeps its kernels; the length of the common prefix is refreshed."""
        common = batch.shared_blocks * self.block_size
        if state is None:
            return self._state(batch, common)
        if state.prefix is not None:
            state.prefix.length.fill_(common)
        return state

    def _state(self, batch: Batch, common: int) -> State:
        spec, rows = self.spec, batch.num_decodes
        size, itemsize, pairs = spec.head_size, spec.dtype.itemsize, max(1, rows * spec.num_kv_heads)
        shape = shape_for(pairs, size, itemsize, batch.max_kv, self.processors)
        prefix = None
        if rows > 1 and rows * common >= COMMON_WORTH:
            length = torch.full((1,), common, dtype=torch.int32, device=self.context.device)
            prefix = PrefixParts(length, PARTS, prefix_tile(itemsize))
        parts = shape.splits + (PARTS if prefix else 0)
        return State(shape, self._room(rows, parts) if rows and parts > 1 else None, prefix)

    def _room(self, rows: int, parts: int) -> Scratch:
        """One scratch serves all layers and batches in turn; an outgrown one lives on in the captured batches that use it."""
        spec, scratch = self.spec, self._scratch
        if scratch is None or not scratch.holds(rows, parts, spec):
            scratch = self._scratch = Scratch.make(rows, parts, spec, self.context.device)
        return scratch

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: State, prologue: Prologue) -> Tensor:
        """Store all, then the leading chunks of one token, then the others."""
        keys, values = self.layers[layer]
        fused = prologue if self.fuses_prologue else None
        q = prologue_store(q, k, v, keys, values, batch.kv_slots, batch.positions, fused)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rows, scale, table = batch.num_decodes, self.spec.scale, batch.block_table
        if rows:
            single = q[:rows]
            if state.prefix is not None:
                assert state.scratch is not None
                attend_prefix(single, keys, values, table, scale, state.shape, state.scratch, state.prefix)
            decode(single, keys, values, table, batch.kv_lens, out, scale, state.shape, state.scratch, state.prefix)
        if rows < len(batch.kv_lens):
            prefill(q, keys, values, table, batch.kv_lens, batch.cu_q, out, scale, batch.max_q, rows)
        return out

    def move(self, pairs: Array) -> None:
        """One after the other: a block may be the target of one pair and the source of a later one."""
        for source, target in pairs.tolist():
            self.cache[:, :, target] = self.cache[:, :, source]
