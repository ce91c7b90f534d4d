"""The contract of a sampler, and the exact distribution of its own parameter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.interfaces import Array, SamplingParams
from core.testing import SamplerSuite


class TestContract(SamplerSuite):
    name = "my-plugin"
    params = ({"n_sigma": 0.7}, {"n_sigma": 1.5, "temperature": 2.0}, {"n_sigma": 1.0, "temperature": 0})

    def definition(self, logits: Array, params: SamplingParams, history: Sequence[int]) -> Array:
        """The paper's words: a token stays if its logit is at least max - n * sigma."""
        n, known = params.extra["n_sigma"], logits[np.isfinite(logits)]
        kept = np.where((logits >= known.max() - n * known.std()) | (n == 0), logits, -np.inf)
        return super().definition(kept, params, history)
