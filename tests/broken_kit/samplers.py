"""Samplers with one defect each: inverting the cumulative distribution, changed in one place. S rows drawn, V vocabulary."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from core.interfaces import Array, DeviceContext, Rows, Sampled, Sampler, SamplingParams
from core.plugins.templates.sampler import uniform
from tests.broken_kit.defect import Defect


class Plain(Sampler):
    """Right: temperature, top-k, top-p on the rest, min-p; ties by id."""

    def __init__(self, settings: Any, context: DeviceContext) -> None:
        super().__init__(settings, context)
        self.params = [SamplingParams(temperature=0)] * (context.limits.max_num_seqs + 1)

    def admit(self, slot: int, params: SamplingParams, tokens: Array) -> None:
        self.params[slot] = params

    def sample(self, logits: Tensor, rows: Rows) -> Sampled:
        params = [self.params[slot] for slot in rows.slots.tolist()]
        logits = self.masked(logits.double(), rows.masks)
        column = torch.tensor([[p.temperature, p.top_k or math.inf, p.top_p, p.min_p] for p in params], dtype=torch.float64)
        temperature, top_k, top_p, min_p = column.T[..., None]
        hot = temperature >= 1e-5
        ranked, ids = logits.sort(descending=True, stable=True)
        p = ((ranked - ranked[:, :1]) / temperature.where(hot, 1.0)).exp()
        p = self.filtered(p, top_k, top_p, min_p)
        seeds = torch.tensor([p.seed or 0 for p in params])
        cdf = p.cumsum(1)
        drawn = (cdf <= self.noise(seeds, rows)[:, None] * cdf[:, -1:]).sum(1, keepdim=True).clamp(max=p.shape[1] - 1)
        tokens = self.pick(ids, drawn, hot).squeeze(1)
        return Sampled(tokens.where(self.sound(logits), self.reject()))

    def filtered(self, p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        p = p * (torch.arange(p.shape[1]) < top_k)
        p = p / p.sum(1, keepdim=True)
        p = p * (self.before(p) < top_p)
        return p * (p >= min_p * p[:, :1])

    def before(self, p: Tensor) -> Tensor:
        """What the likelier ones have together."""
        return p.cumsum(1) - p

    def masked(self, logits: Tensor, masks: Tensor | None) -> Tensor:
        return logits if masks is None else logits.masked_fill(~masks & ~logits.isnan(), -math.inf)

    def noise(self, seeds: Tensor, rows: Rows) -> Tensor:
        return uniform(seeds, rows.positions)

    def pick(self, ids: Tensor, drawn: Tensor, hot: Tensor) -> Tensor:
        return ids.gather(1, drawn.where(hot, 0))

    def sound(self, logits: Tensor) -> Tensor:
        return logits.amax(1).isfinite()

    def reject(self) -> int:
        return -1


class Biased(Plain):
    """Uniform numbers that lean to the likely tokens."""

    def noise(self, seeds: Tensor, rows: Rows) -> Tensor:
        return super().noise(seeds, rows) ** 1.5


class SeedsByRow(Plain):
    """The number of the row in the batch has a part in the noise: a request draws something else beside others."""

    def noise(self, seeds: Tensor, rows: Rows) -> Tensor:
        return uniform(seeds + torch.arange(len(seeds)), rows.positions)


class OneGenerator(Plain):
    """Draws from the global generator, which everybody advances."""

    def noise(self, seeds: Tensor, rows: Rows) -> Tensor:
        return torch.rand(len(seeds), dtype=torch.float64)


class IgnoresPositions(Plain):
    """One number per request, whatever the position."""

    def noise(self, seeds: Tensor, rows: Rows) -> Tensor:
        return uniform(seeds, torch.zeros_like(rows.positions))


class ShortSeeds(Plain):
    """Seeds that differ above bit 32 only are the same."""

    def noise(self, seeds: Tensor, rows: Rows) -> Tensor:
        return uniform(seeds & 0xFFFFFFFF, rows.positions)


class KeepsOneMore(Plain):
    """top_k is off by one."""

    def filtered(self, p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        return super().filtered(p, top_k + 1, top_p, min_p)


class DropsTheCrossing(Plain):
    """top_p leaves out the token that crosses it."""

    def before(self, p: Tensor) -> Tensor:
        return p.cumsum(1) * (torch.arange(p.shape[1]) > 0)


class IgnoresMinP(Plain):
    """min_p is accepted and not used."""

    def filtered(self, p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        return super().filtered(p, top_k, top_p, min_p * 0)


class DrawsCold(Plain):
    """Greedy rows are drawn like the others."""

    def pick(self, ids: Tensor, drawn: Tensor, hot: Tensor) -> Tensor:
        return ids.gather(1, drawn)


class IgnoresMasks(Plain):
    """What may not be drawn is drawn."""

    def masked(self, logits: Tensor, masks: Tensor | None) -> Tensor:
        return logits


class AnswersNanWithZero(Plain):
    """A row without a finite logit draws token 0."""

    def reject(self) -> int:
        return 0


class KeepsTheFormer(Plain):
    """A slot keeps the seed of the request that had it first."""

    def admit(self, slot: int, params: SamplingParams, tokens: Array) -> None:
        former = self.params[slot]
        self.params[slot] = params if former.seed is None else params.with_seed(former.seed)


class NarrowTokens(Plain):
    """Tokens are int32."""

    def sample(self, logits: Tensor, rows: Rows) -> Sampled:
        return Sampled(super().sample(logits, rows).tokens.int())


def broken(target: type, *caught: str, says: str) -> Defect:
    return Defect(target, tuple(f"test_{name}" for name in caught), says, "sampler")


FIT = r"a fit that bad comes once in \S+; drawn \(right\): 0: "
DEFECTS = [
    broken(Biased, "draws_have_the_exact_distribution", says="no filter: " + FIT),
    broken(SeedsByRow, "a_row_is_the_same_alone_and_in_any_batch", says=r"rows drew \[.*\] together and \[.*\] alone"),
    broken(OneGenerator, "seeds_and_positions_make_the_stream", says=r"the same seed and positions drew other tokens"),
    broken(IgnoresPositions, "seeds_and_positions_make_the_stream", says=r"draws at other positions are not fresh"),
    broken(ShortSeeds, "seeds_and_positions_make_the_stream", says=r"seeds 5 and 1099511627781 give the same stream"),
    broken(KeepsOneMore, "top_k_keeps_k_tokens", says=r"top_k=1: drawn were \[2, 3\]"),
    broken(
        DropsTheCrossing,
        "top_p_keeps_the_token_that_crosses",
        says=r"top_p=0\.6 of \.1 \.2 \.3 \.4: drawn were \{3\}, right: \{2, 3\}",
    ),
    broken(IgnoresMinP, "draws_have_the_exact_distribution", says=r"\{'min_p': 0\.2\}: " + FIT),
    broken(
        DrawsCold,
        "greedy_rows_take_the_likeliest_token",
        says=r"a row of \{'temperature': 0\} drew \d+, the likeliest token is \d+",
    ),
    broken(IgnoresMasks, "masked_tokens_are_never_drawn", says=r"no filter: tokens \[.*\] were drawn, which the mask forbids"),
    broken(
        AnswersNanWithZero,
        "rows_without_a_finite_logit_draw_minus_one",
        says=r"rows of NaN, with a NaN, of -inf, all masked: \[0, 0, 0, 0\], right: -1 each",
    ),
    broken(KeepsTheFormer, "a_slot_forgets_its_former_request", says=r"draws something else than in a fresh slot"),
    broken(NarrowTokens, "greedy_rows_take_the_likeliest_token", says=r"tokens must be int64 \[S\], got torch\.int32"),
]
