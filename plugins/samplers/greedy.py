"""Argmax for every request."""

from __future__ import annotations

from torch import Tensor

from core.interfaces import Array, DeviceContext, NoSettings, Rows, Sampled, Sampler, SamplingParams
from plugins.samplers.common.greedy import argmax, masked, reject


class Greedy(Sampler):
    """Keeps nothing: seeds, top-k, top-p and min-p change no argmax."""

    def __init__(self, settings: NoSettings, context: DeviceContext) -> None:
        super().__init__(settings, context)
        self._best = best
        if context.fused:
            from plugins.samplers.kernels import draw

            self._best = draw

    def admit(self, slot: int, params: SamplingParams, tokens: Array) -> None:
        """Nothing to keep."""

    def sample(self, logits: Tensor, rows: Rows) -> Sampled:
        """The likeliest token of each row; -1 where no logit is finite or one is NaN."""
        return Sampled(self._best(logits, rows.masks))


def best(logits: Tensor, masks: Tensor | None) -> Tensor:
    """[S, V] -> [S]"""
    return reject(*argmax(masked(logits, masks)))
