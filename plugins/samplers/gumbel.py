"""Sampling without softmax: argmax of logits / temperature + Gumbel noise.

Three kinds of rows, each paying for its own work only: greedy (temperature 0), hot, and filtered (hot with top-k, top-p or
min-p). Filters act in the order temperature, top-k, top-p on what top-k left, min-p relative to the likeliest token; tokens of
equal logit are ranked by id. R rows of one kind, V vocabulary, W ranked tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from core.interfaces import Array, DeviceContext, NoSettings, Rows, Sampled, Sampler, SamplingParams
from plugins.samplers.common.greedy import argmax, masked, reject
from plugins.samplers.common.noise import gumbel
from plugins.samplers.common.table import SlotTable, staged, unpack

COLDEST = 1e-5  # temperatures below are 0
COOLEST = 2.0**-126  # smallest 1 / temperature: a smaller one is 0 in float32, which means greedy
RANKED = 1024  # tokens ranked at first; a row whose filters keep more ranks its whole vocabulary
CACHED = 1 << 16  # values per call on a CPU: the temporaries then stay in its cache
SORTED = 32  # filtered rows at once: each sorts its vocabulary in some 5 MB


class Gumbel(Sampler):
    """Parameters live in a table with one row per slot; the last one, for padding, stays greedy."""

    def __init__(self, settings: NoSettings, context: DeviceContext) -> None:
        super().__init__(settings, context)
        slots, self._on_cpu = context.limits.max_num_seqs + 1, context.device.type == "cpu"
        # 1 / temperature (0: greedy), top-p (2: off), log of min-p (-inf: off), top-k (0: off)
        self._table = SlotTable(slots, (0.0, 2.0, float("-inf"), 0.0), context.device)
        self._hot, self._filtered = np.zeros(slots, bool), np.zeros(slots, bool)
        most = 2 * max(slots, context.limits.max_num_batched_tokens)
        self._index = torch.zeros(most, dtype=torch.int64, device=context.device)  # the filtered rows, repeated to fill up
        self._draw = torch.compile(draw, dynamic=True) if context.compile else draw
        self._one_pass = None
        if context.fused:
            from plugins.samplers.kernels import draw as one_pass

            self._one_pass = one_pass

    def admit(self, slot: int, params: SamplingParams, tokens: Array) -> None:
        """Writes the slot's row on the host; the next `plan` sends it."""
        hot, vocab = params.temperature >= COLDEST, self.context.vocab_size
        assert params.seed is not None or not hot, "the engine derives a seed for every request"
        top_k = params.top_k if 0 < params.top_k < vocab else 0
        top_p = params.top_p if params.top_p < 1 else 2.0
        min_p = float(np.log(params.min_p)) if params.min_p > 0 else float("-inf")
        row = self._table.floats[slot]
        row[:] = max(1 / params.temperature, COOLEST) if hot else 0.0, top_p, min_p, top_k
        # As the device sees them: what vanishes in float32 must not make host and device disagree about a row's kind.
        self._hot[slot] = hot
        self._filtered[slot] = hot and bool(row[1] < 1 or row[2] > float("-inf") or row[3] > 0)
        self._table.seeds[slot] = params.seed or 0
        self._table.change(slot)

    def plan(self, slots: Array) -> tuple[bool, int]:
        """(any hot row without filters, how many filtered rows `sample` draws). Sends what the device lacks, in its order."""
        self._table.flush()
        filtered = self._filtered[slots]
        rows = np.flatnonzero(filtered)
        hot = self._one_pass is not None or bool((self._hot[slots] & ~filtered).any())
        if self._on_cpu:
            self._index = torch.from_numpy(rows)
            return hot, len(rows)
        if not len(rows):
            return hot, 0
        # Few sizes, so that few graphs are captured. At least 2: torch adds up a single row in another order.
        size = max(2, 1 << (len(rows) - 1).bit_length())
        self._index[:size].copy_(staged(np.resize(rows, size)), non_blocking=True)
        return hot, size

    def sample(self, logits: Tensor, rows: Rows) -> Sampled:
        """The token of each row; -1 where no logit is finite or one is NaN."""
        hot, size = rows.variant if isinstance(rows.variant, tuple) else self.plan(rows.slots.cpu().numpy())
        if self._one_pass is not None:
            tokens = self._one_pass(logits, rows.masks, self._table.tensor, rows.slots, rows.positions)
        else:
            tokens = self._draw_plain(logits, rows, hot)
        for index in self._index[:size].split(SORTED) if size else ():
            floats, seeds = unpack(self._table.tensor[rows.slots[index]])
            allowed = masked(logits[index], None if rows.masks is None else rows.masks[index])
            drawn = draw_filtered(allowed, floats, seeds, rows.positions[index])
            tokens = tokens.index_copy(0, index, reject(drawn, tokens[index] >= 0))
        return Sampled(tokens)

    def _draw_plain(self, logits: Tensor, rows: Rows, any_hot: bool) -> Tensor:
        logits = masked(logits, rows.masks)
        tokens, sound = argmax(logits)
        if any_hot:
            floats, seeds = unpack(self._table.tensor[rows.slots])
            args = logits, floats[:, 0], seeds, rows.positions
            if self._on_cpu:
                chosen = ((floats[:, 0] > 0) & ~_filters(floats)).nonzero().squeeze(1)
                args = args if len(chosen) == len(tokens) else tuple(x[chosen] for x in args)
                tokens = tokens.index_copy(0, chosen, self._draw_all(*args))
            else:  # all rows: picking some would make the host wait
                tokens = torch.where(floats[:, 0] > 0, self._draw(*args), tokens)
        return reject(tokens, sound)

    def _draw_all(self, *args: Tensor) -> Tensor:
        size = max(CACHED // args[0].shape[1], 1)
        return torch.cat([self._draw(*part) for part in zip(*(x.split(size) for x in args), strict=True)])


def _filters(floats: Tensor) -> Tensor:
    return (floats[:, 1] < 1) | (floats[:, 2] > float("-inf")) | (floats[:, 3] > 0)


def draw(logits: Tensor, inverse: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """logits [R, V], inverse temperatures, seeds and positions [R] -> tokens [R]"""
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return (logits.float() * inverse[:, None] + gumbel(seeds, positions, ids)).argmax(dim=-1)


def draw_filtered(logits: Tensor, floats: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """As `draw`, of the tokens that the filters leave. Ranks few tokens, then all for the rows where those were too few."""
    on_cpu, vocab = logits.device.type == "cpu", logits.shape[1]
    tokens, settled = draw_ranked(logits, floats, seeds, positions, min(RANKED, vocab) if on_cpu else vocab)
    if not on_cpu or vocab <= RANKED or bool(settled.all()):
        return tokens
    rest = (~settled).nonzero().squeeze(1)
    return tokens.index_copy(0, rest, draw_ranked(logits[rest], floats[rest], seeds[rest], positions[rest], vocab)[0])


def draw_ranked(logits: Tensor, floats: Tensor, seeds: Tensor, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Tokens [R] drawn from the `width` likeliest, and whether the filters of a row leave none beyond these."""
    inverse, top_p, min_p, top_k = floats[:, :, None].unbind(dim=1)  # [R, 1] each
    scaled = logits.float() * inverse
    ids = rank(scaled, width)
    values = scaled.gather(1, ids)
    keep = (torch.arange(width, device=ids.device) < top_k) | (top_k == 0)
    # cumsum and softmax work row by row; a plain sum of one row may be split over threads and then rounds differently.
    mass = (scaled.softmax(dim=-1).gather(1, ids) * keep).cumsum(dim=-1)
    enough = top_p * torch.where(top_k > 0, mass[:, -1:], 1.0)
    keep[:, 1:] &= mass[:, :-1] < enough
    keep &= values >= values[:, :1] + min_p
    settled = torch.where(top_k > 0, top_k <= width, (mass[:, -1:] >= enough) | (values[:, -1:] < values[:, :1] + min_p))
    scores = (values + gumbel(seeds, positions, ids.to(torch.int32))).masked_fill(~keep, float("-inf"))
    best = scores == scores.amax(dim=-1, keepdim=True)
    return torch.where(best, ids, logits.shape[1] - 1).amin(dim=-1), settled.squeeze(1)


def rank(values: Tensor, width: int) -> Tensor:
    """Ids [R, width] of the largest values of each row, in order; equal values by id."""
    vocab = values.shape[1]
    # What is sorted are integers that hold value and id: no two are equal, so topk and sort agree on ties.
    raw = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = (raw ^ ((raw >> 31) & 0x7FFFFFFF)).long() << 32
    ordered += torch.arange(vocab - 1, -1, -1, device=values.device)
    ordered = ordered.topk(width).values if width < vocab else ordered.sort(dim=-1, descending=True).values
    return vocab - 1 - (ordered & 0xFFFFFFFF)
