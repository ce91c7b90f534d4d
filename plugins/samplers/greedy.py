"""Argmax for every request."""

from __future__ import annotations

from torch import Tensor

from core.interfaces import Array, Rows, Sampled, Sampler, SamplingParams
from plugins.samplers.common.greedy import argmax, masked, reject


class Greedy(Sampler):
    """Keeps nothing: seeds, top-k, top-p and min-p change no argmax."""

    def admit(self, slot: int, params: SamplingParams, tokens: Array) -> None:
        """Nothing to keep."""

    def sample(self, logits: Tensor, rows: Rows) -> Sampled:
        """The likeliest token of each row; -1 where no logit is finite or one is NaN."""
        return Sampled(reject(*argmax(masked(logits, rows.masks))))
