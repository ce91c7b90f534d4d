"""Sampling without softmax: argmax of logits / temperature + Gumbel noise.

Three kinds of rows, each paying for its own work only: greedy (temperature 0), hot, and filtered (hot with top-k, top-p or
min-p). Filters act in the order temperature, top-k, top-p on what top-k left, min-p relative to the likeliest token; tokens of
equal logit are ranked by id. R rows of one kind, V vocabulary, W ranked tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from core.interfaces import Array, DeviceContext, NoSettings, Rows, Sampled, Sampler, SamplingParams
from plugins.samplers.common.greedy import argmax, masked, reject
from plugins.samplers.common.noise import gumbel

COLDEST = 1e-5  # temperatures below are 0
RANKED = 1024  # tokens ranked at first; a row whose filters keep more ranks its whole vocabulary
CACHED = 1 << 16  # values per call on a CPU: the temporaries then stay in its cache


class Gumbel(Sampler):
    """Parameters live in device tables, one row per slot; the last one, for padding, stays greedy."""

    def __init__(self, settings: NoSettings, context: DeviceContext) -> None:
        super().__init__(settings, context)
        slots, device = context.limits.max_num_seqs + 1, context.device
        # [slots, 4]: 1 / temperature (0: greedy), top-p (2: off), log of min-p (-inf: off), top-k (0: off)
        self._floats = torch.tensor([0.0, 2.0, float("-inf"), 0.0], device=device).repeat(slots, 1)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._hot, self._filtered = np.zeros(slots, bool), np.zeros(slots, bool)
        self._draw = torch.compile(draw, dynamic=True) if context.compile else draw

    def admit(self, slot: int, params: SamplingParams, tokens: Array) -> None:
        """Writes the slot's row of every table."""
        hot, vocab = params.temperature >= COLDEST, self.context.vocab_size
        assert params.seed is not None or not hot, "the engine derives a seed for every request"
        top_k = params.top_k if 0 < params.top_k < vocab else 0
        top_p = params.top_p if params.top_p < 1 else 2.0
        min_p = float(np.log(params.min_p)) if params.min_p > 0 else float("-inf")
        self._hot[slot] = hot
        self._filtered[slot] = hot and (top_k > 0 or top_p < 1 or params.min_p > 0)
        self._floats[slot] = torch.tensor([1 / params.temperature if hot else 0.0, top_p, min_p, float(top_k)])
        self._seeds[slot] = params.seed or 0

    def plan(self, slots: Array) -> tuple[bool, bool]:
        """(any hot row without filters, any filtered row)"""
        hot, filtered = self._hot[slots], self._filtered[slots]
        return bool((hot & ~filtered).any()), bool(filtered.any())

    def sample(self, logits: Tensor, rows: Rows) -> Sampled:
        """The token of each row; -1 where no logit is finite or one is NaN."""
        logits = masked(logits, rows.masks)
        tokens, sound = argmax(logits)
        any_hot, any_filtered = rows.variant if isinstance(rows.variant, tuple) else self.plan(rows.slots.cpu().numpy())
        if any_hot or any_filtered:
            floats, seeds = self._floats[rows.slots], self._seeds[rows.slots]
            filtered = (floats[:, 1] < 1) | (floats[:, 2] > float("-inf")) | (floats[:, 3] > 0)
            hot = floats[:, 0] > 0
            if any_hot:
                tokens = _replace(tokens, hot & ~filtered, self._draw_all, logits, floats, seeds, rows.positions)
            if any_filtered:
                tokens = _replace(tokens, hot & filtered, draw_filtered, logits, floats, seeds, rows.positions)
        return Sampled(reject(tokens, sound))

    def _draw_all(self, logits: Tensor, floats: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        size = max(CACHED // logits.shape[1], 1) if logits.device.type == "cpu" else len(logits)
        parts = zip(*(x.split(size) for x in (logits, floats[:, 0], seeds, positions)), strict=True)
        return torch.cat([self._draw(*part) for part in parts])


def _replace(tokens: Tensor, chosen: Tensor, draw: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """`tokens` with the chosen rows drawn. On a device all rows are drawn: picking some would make the host wait."""
    if tokens.device.type != "cpu":
        return torch.where(chosen, draw(*args), tokens)
    if not bool(chosen.all()):
        index = chosen.nonzero().squeeze(1)
        return tokens.index_copy(0, index, draw(*(x[index] for x in args)))
    return draw(*args)


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
