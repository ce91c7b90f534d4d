"""Attention in a few large PyTorch calls per layer: fast on a CPU, right on any device.

Per step, `plan` sorts the chunks into groups of equal token count and similar length and computes, once for all layers,
which cache rows each group reads. Per layer a group costs one gather and two batched products (one token per chunk) or one
call of scaled_dot_product_attention (longer chunks).

n chunks of a group, c tokens of each, L positions of its longest, G = H / K query heads per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.interfaces import Array, AttentionBackend, Batch, KVSpec, Prologue

SPLIT_GAIN = 512  # padded places that one more group must save: about what its dozen calls per layer cost


@dataclass(slots=True)
class Group:
    """Chunks that are computed together."""

    tokens: Array  # [n * c] where they are in the step
    rows: Tensor  # [2 * n * K * L] rows of the layer's cache: keys, then values
    mask: Tensor | None  # added to the scores, -inf hides: [n * K, 1, L] or [1, 1, 1] if `single`, else [n, 1, c, L] or None
    causal: bool  # no mask needed: every chunk starts at position 0
    single: bool  # one token per chunk, in float32: two batched products beat scaled_dot_product_attention
    n: int


@dataclass(slots=True)
class State:
    """What `plan` computes for a step."""

    groups: list[Group] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # tokens of each group
    order: Tensor | None = None  # [T] tokens of the step, group after group; None if they are in that order anyway
    inverse: Tensor | None = None  # [T] back


class Sdpa(AttentionBackend):
    """Cache: [layers, 2 * K, blocks * block_size, D]; first K the keys, then the values, so that what one KV head reads is
    gathered into one contiguous matrix."""

    spec: KVSpec
    block_size: int
    cache: Tensor

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Keys and values of all layers."""
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize * block_size

    def allocate(self, spec: KVSpec, blocks: int, block_size: int) -> None:
        """Uninitialised on purpose: no result may depend on what was never written."""
        self.cache, self._layers = torch.empty(0), list[Tensor]()
        self.spec, self.block_size = spec, block_size
        shape = (spec.num_layers, 2 * spec.num_kv_heads, blocks * block_size, spec.head_size)
        self.cache = torch.empty(shape, dtype=spec.dtype, device=self.context.device)
        self._layers = list(self.cache.unbind(0))
        heads = torch.arange(2 * spec.num_kv_heads, device=self.context.device)
        self._heads = (heads * (blocks * block_size)).view(2, 1, spec.num_kv_heads, 1)

    def plan(self, batch: Batch, state: State | None = None) -> State:
        """Reads lengths on the host, so it waits for the device. A given `state` gets new groups: same object, new tensors."""
        cu_q, lens = batch.cu_q.cpu().numpy(), batch.kv_lens.cpu().numpy()
        counts = np.diff(cu_q)
        assert min(counts.min(), lens.min()) > 0, "a chunk of length 0"
        state = State() if state is None else state
        state.groups = [self._group(batch, chunks, cu_q, lens) for chunks in split(counts, lens)]
        state.sizes = [len(group.tokens) for group in state.groups]
        order = np.concatenate([group.tokens for group in state.groups])
        state.order = state.inverse = None
        if (np.diff(order) != 1).any():
            state.order = torch.from_numpy(order).to(batch.tokens.device)
            state.inverse = state.order.argsort()
        return state

    def _group(self, batch: Batch, chunks: Array, cu_q: Array, lens: Array) -> Group:
        device = batch.tokens.device
        first, length = cu_q[chunks].astype(np.int64), lens[chunks].astype(np.int64)
        n, c, width = len(chunks), int(cu_q[chunks[0] + 1] - first[0]), int(length.max())
        tokens = (first[:, None] + np.arange(c)).ravel()
        # Places beyond a chunk's length repeat its last one: whatever else is in the cache (NaN included) is never read.
        at = torch.from_numpy(np.minimum(np.arange(width), length[:, None] - 1)).to(device)
        table = batch.block_table[torch.from_numpy(chunks).to(device)].long()
        slots = table.gather(1, at // self.block_size) * self.block_size + at % self.block_size
        rows = (slots[None, :, None, :] + self._heads).reshape(-1)
        single, causal = c == 1 and self.spec.dtype == torch.float32, c > 1 and bool((length == c).all())
        mask = None if causal else self._mask(length, c, width, single)
        return Group(tokens, rows, mask, causal, single, n)

    def _mask(self, length: Array, c: int, width: int, single: bool) -> Tensor | None:
        device, dtype = self.context.device, self.spec.dtype
        if c == 1 and length.min() == width:
            return torch.zeros(1, 1, 1, dtype=dtype, device=device) if single else None
        last = torch.from_numpy(length[:, None] - c + np.arange(c)).to(device)  # [n, c] last visible position
        hidden = torch.arange(width, device=device) > last[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(self.spec.num_kv_heads, dim=0) if single else mask[:, None]

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: State, prologue: Prologue) -> Tensor:
        """All stores, then group after group."""
        cache = self._layers[layer]
        cache.index_copy_(1, batch.kv_slots, torch.cat((k, v), dim=1).transpose(0, 1))
        cache = cache.view(-1, self.spec.head_size)
        if state.order is not None:
            q = q.index_select(0, state.order)
        parts = zip(q.split(state.sizes), state.groups, strict=True)
        outs = [self._attend(part, cache, group) for part, group in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if state.inverse is None else out.index_select(0, state.inverse)

    def _attend(self, q: Tensor, cache: Tensor, group: Group) -> Tensor:
        """q [n * c, H, D] -> the same"""
        n, heads, size, scale = group.n, self.spec.num_kv_heads, self.spec.head_size, self.spec.scale
        places = cache.index_select(0, group.rows)
        if group.single:
            keys, values = places.view(2, n * heads, -1, size)
            assert group.mask is not None
            scores = torch.baddbmm(group.mask, q.reshape(n * heads, -1, size), keys.transpose(1, 2), alpha=scale)
            return torch.bmm(scores.softmax(dim=-1), values).view(q.shape)
        keys, values = places.view(2, n, heads, -1, size)
        query = q.unflatten(0, (n, -1)).transpose(1, 2)
        grouped = q.shape[1] != heads
        out = F.scaled_dot_product_attention(
            query, keys, values, group.mask, is_causal=group.causal, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).reshape(q.shape)

    def move(self, pairs: Array) -> None:
        """One after the other: a block may be the target of one pair and the source of a later one."""
        blocks = self.cache.unflatten(2, (-1, self.block_size))
        for source, target in pairs.tolist():
            blocks[:, :, target] = blocks[:, :, source]


def split(counts: Array, lens: Array) -> list[Array]:
    """Chunks of one group each: equal counts, and lengths so near that another group would not save SPLIT_GAIN places."""
    groups: list[Array] = []
    for count in dict.fromkeys(counts.tolist()):
        chunks = np.flatnonzero(counts == count)
        groups += _by_length(chunks[np.argsort(lens[chunks], kind="stable")], lens, count)
    return groups


def _by_length(chunks: Array, lens: Array, count: int) -> list[Array]:
    """`chunks` in order of length. Cuts where it saves most padding, then each half again."""
    if len(chunks) > 1:
        length = lens[chunks].astype(np.int64)
        gain = np.arange(1, len(chunks)) * (length[-1] - length[:-1]) * count
        cut = int(gain.argmax())
        if gain[cut] >= SPLIT_GAIN:
            return _by_length(chunks[: cut + 1], lens, count) + _by_length(chunks[cut + 1 :], lens, count)
    return [np.sort(chunks)]
