"""Top-n-sigma (Tang et al., 2024): only tokens whose logit is within n standard deviations of the largest may be drawn.

Unlike top-p, what is kept does not depend on the temperature. One uniform number per row, made from the request's seed and
the position, picks the token by inverting the cumulative distribution: equal tokens alone and in any batch.
This module is imported at every start of inferlab, so torch is imported where it is used.

S rows drawn, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.interfaces import (
    Array,
    Component,
    DeviceContext,
    NoSettings,
    OneOf,
    Rows,
    Sampled,
    Sampler,
    SamplingParams,
    hookimpl,
    setting,
)

if TYPE_CHECKING:
    from torch import Tensor

COLDEST = 1e-5  # temperatures below are 0: the likeliest token


@dataclass
class RequestSettings:
    """Parameters that a request may give beside the common ones: sampling.NAME=VALUE, SamplingParams(NAME=VALUE)."""

    n_sigma: float = setting(0.0, "tokens further below the largest logit are left out; 0: off", "standard deviations")

    def __post_init__(self) -> None:
        if not 0 <= self.n_sigma < math.inf:
            raise ValueError(f"n_sigma must be a finite number >= 0 (0: off), got {self.n_sigma}")


class MyPluginSampler(Sampler):
    """Parameters of each slot in rows of two tables; the last row is for padding."""

    def __init__(self, settings: NoSettings, context: DeviceContext) -> None:
        import torch

        super().__init__(settings, context)
        slots = context.limits.max_num_seqs + 1
        self.params = torch.zeros(slots, 2, dtype=torch.float64, device=context.device)  # temperature, n_sigma
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=context.device)

    def admit(self, slot: int, params: SamplingParams, tokens: Array) -> None:
        temperature = params.temperature if params.temperature >= COLDEST else 0.0
        self.params[slot] = self.params.new_tensor([temperature, params.extra.get("n_sigma", 0.0)])
        self.seeds[slot] = params.seed or 0

    def sample(self, logits: Tensor, rows: Rows) -> Sampled:
        logits = logits.double()
        if rows.masks is not None:  # NaN stays where it is, so that a broken row is noticed
            logits = logits.masked_fill(~rows.masks & ~logits.isnan(), -math.inf)
        temperature, n_sigma = self.params[rows.slots].T[..., None]  # [S, 1] each
        best, likeliest = logits.max(1, keepdim=True)  # NaN counts as the largest
        sound = best.isfinite().squeeze(1)
        hot = temperature > 0
        weights = ((logits - best) / temperature.where(hot, 1.0)).exp()
        cdf = weights.masked_fill(far_below(logits, best, n_sigma), 0.0).cumsum(1)
        target = uniform(self.seeds[rows.slots], rows.positions)[:, None] * cdf[:, -1:]
        drawn = (cdf <= target).sum(1, keepdim=True)  # the first token whose sum exceeds the target
        tokens = drawn.where(hot, likeliest).squeeze(1)
        return Sampled(tokens.where(sound, -1))


def far_below(logits: Tensor, best: Tensor, n_sigma: Tensor) -> Tensor:
    """[S, V]: more than n standard deviations (of the row's finite logits) below its largest one."""
    finite = logits.isfinite()
    count = finite.sum(1, keepdim=True).clamp(min=1)
    mean = logits.where(finite, 0.0).sum(1, keepdim=True) / count
    sigma = ((logits - mean).where(finite, 0.0).square().sum(1, keepdim=True) / count).sqrt()
    return (logits < best - n_sigma * sigma) & (n_sigma > 0)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[S] float64 in (0, 1), a function of seed and position alone: no generator, so nothing that a batch could advance."""
    x = mix(mix(mix(seeds & 0xFFFFFFFF) ^ (seeds >> 32)) + positions)
    return (x.double() + 0.5) / 2**32


def mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits, held in int64, in which each bit of the input changes half of the output's."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B + 0x9E3779B9) & 0xFFFFFFFF
    return x ^ (x >> 16)


@hookimpl
def inferlab_components() -> Iterable[Component]:
    yield Component(
        kind="sampler",
        name="my-plugin",
        target="my_plugin:MyPluginSampler",
        request_settings=RequestSettings,
        summary="temperature and top-n-sigma, drawn by inverting the cumulative distribution",
        capabilities={
            # What it does not do is declared: a request that asks for it is refused, not answered wrongly.
            "sampling.top_k": OneOf(0, -1),
            "sampling.top_p": OneOf(1.0),
            "sampling.min_p": OneOf(0.0),
            "graphs": OneOf(False),
            "tensor_parallel_size": OneOf(1),
        },
        api=(1, 0),
    )
