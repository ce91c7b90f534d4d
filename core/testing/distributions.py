"""The exact distribution of a draw in float64, and how well counts fit it. V vocabulary."""

from __future__ import annotations

import numpy as np
import torch

from core.interfaces import Array, SamplingParams


def distribution(logits: Array, params: SamplingParams) -> Array:
    """logits [V] -> probabilities [V]: temperature, top-k, top-p on the renormalised rest, min-p; ties by id."""
    if params.temperature < 1e-5:
        return np.eye(len(logits))[logits.argmax()]
    order = np.lexsort((np.arange(len(logits)), -logits))
    p = np.exp((logits - logits.max()) / params.temperature)[order]
    if params.top_k:
        p[params.top_k :] = 0
    p /= p.sum()
    p[np.concatenate([[0.0], p.cumsum()[:-1]]) >= params.top_p] = 0
    p[p < params.min_p * p[0]] = 0
    out = np.empty_like(p)
    out[order] = p / p.sum()
    return out


def chi_squared_odds(counts: Array, p: Array) -> float:
    """The probability of a fit at least as bad; 0 for a count where nothing may be. counts and p: [V]"""
    if counts[p == 0].any():
        return 0.0
    counts, p = counts[p > 0], p[p > 0]
    expected = p * counts.sum()
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(p) - 1
    return 1.0 if freedom == 0 else float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)))
