"""FlashAttention on an NVIDIA GPU, from whichever package is installed and able (see flash_providers).

Per step the leading chunks of one token are one call, all other chunks a second one. Nothing here waits for the device.
T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.interfaces import Array, AttentionBackend, Batch, KVSpec, Prologue
from plugins.attention.entry import FlashSettings
from plugins.attention.flash_choice import choose
from plugins.attention.flash_providers import Provider, Share


@dataclass(slots=True)
class State:
    """What `plan` computes for a step."""

    decodes: Share | None = None
    prompts: Share | None = None
    stale: Tensor | None = None  # rows of the values' cache that prompts load, but that nobody has written for them


class Flash(AttentionBackend):
    """Cache: [layers, 2, blocks, block_size, K, D]; first the keys, then the values."""

    spec: KVSpec
    block_size: int
    cache: Tensor
    provider: Provider

    def __init__(self, settings: FlashSettings, context: Any) -> None:
        super().__init__(settings, context)
        self.fuses_prologue = context.fused
        self.kind = choose(settings.provider, torch.cuda.get_device_capability(context.device)).provider
        self._check(context)

    def _check(self, context: Any) -> None:
        """A package that was named in the settings may want other things than the one that the probe found first."""
        given = {"dtype": str(context.dtype).removeprefix("torch."), "block_size": context.block_size}
        given |= {"head_size": context.spec.head_size} if context.spec else {}
        wants = self.kind.capabilities()
        if wrong := [f"{key} to be {wants[key]}, got {value}" for key, value in given.items() if not wants[key].ok(value)]:
            raise ValueError(
                f"attention=flash with {self.kind.name} ({self.kind.label}) needs {', and '.join(wrong)}; "
                "choose another attention.provider, kv_allocator.block_size or dtype, or attention=sdpa"
            )

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Keys and values of all layers."""
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize * block_size

    def allocate(self, spec: KVSpec, blocks: int, block_size: int) -> None:
        """Uninitialised on purpose: no result may depend on what was never written."""
        self.cache, self._layers = torch.empty(0), list[tuple[Tensor, Tensor]]()
        self.spec, self.block_size = spec, block_size
        shape = (spec.num_layers, 2, blocks, block_size, spec.num_kv_heads, spec.head_size)
        self.cache = torch.empty(shape, dtype=spec.dtype, device=self.context.device)
        self._layers = [(layer[0], layer[1]) for layer in self.cache]
        self.provider = self.kind(spec, block_size)

    def plan(self, batch: Batch, state: State | None = None) -> State:
        """A given `state` is that of the same captured batch: what its graph reads is refreshed where it is."""
        count = batch.num_decodes
        if state is None:
            state = State()
        former = state.decodes.extra if state.decodes and state.decodes.tokens == count else None
        state.decodes = self._decodes(batch, count, former) if count else None
        state.prompts = self._prompts(batch, count) if count < len(batch.kv_lens) else None
        least = self.provider.whole_blocks_from
        state.stale = self._behind(state.prompts) if state.prompts and least and self.block_size >= least else None
        return state

    def _decodes(self, batch: Batch, count: int, former: Any) -> Share:
        share = Share(batch.cu_q[: count + 1], batch.kv_lens[:count], batch.block_table[:count], count, 1, batch.max_kv)
        share.extra = self.provider.plan_decode(share, former)
        return share

    def _prompts(self, batch: Batch, count: int) -> Share:
        cu_q = batch.cu_q[count:] - count if count else batch.cu_q
        tokens = len(batch.tokens) - count
        share = Share(cu_q, batch.kv_lens[count:], batch.block_table[count:], tokens, batch.max_q, batch.max_kv)
        share.extra = self.provider.plan_prefill(share)
        return share

    def _behind(self, share: Share) -> Tensor:
        """[n * block_size] rows of the cache behind each chunk's last position in its last block, which is its own until it
        is full; where there are none, a row of the scratch block."""
        last = share.kv_lens.long()[:, None] - 1
        block = share.table.gather(1, last // self.block_size).long()
        at = torch.arange(self.block_size, device=last.device)
        return torch.where(at > last % self.block_size, block * self.block_size + at, 0).flatten()

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: State, prologue: Prologue) -> Tensor:
        """All stores, then one call for the decodes and one for the rest."""
        keys, values = self._layers[layer]
        if self.fuses_prologue:
            from plugins.attention.kernels.prologue import prologue_store

            heads_first = keys.transpose(1, 2), values.transpose(1, 2)
            q = prologue_store(q, k, v, *heads_first, batch.kv_slots, batch.positions, prologue)
        else:
            keys.flatten(0, 1).index_copy_(0, batch.kv_slots, k)
            values.flatten(0, 1).index_copy_(0, batch.kv_slots, v)
        if state.stale is not None:
            values.flatten(0, 1).index_fill_(0, state.stale, 0)
        count = state.decodes.tokens if state.decodes else 0
        outs = [self.provider.decode(q[:count], keys, values, state.decodes)] if state.decodes else []
        if state.prompts:
            outs.append(self.provider.prefill(q[count:], keys, values, state.prompts))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def move(self, pairs: Array) -> None:
        """One after the other: a block may be the target of one pair and the source of a later one."""
        for source, target in pairs.tolist():
            self.cache[:, :, target] = self.cache[:, :, source]
