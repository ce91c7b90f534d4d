"""Argmax with the rule for broken rows."""

from __future__ import annotations

import torch
from torch import Tensor


def masked(logits: Tensor, masks: Tensor | None) -> Tensor:
    """Tokens that may not be drawn become -inf; NaN stays wherever it is, so that a broken row is noticed."""
    return logits if masks is None else torch.where(masks | logits.isnan(), logits, float("-inf"))


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[S, V] -> the likeliest tokens [S], lowest id first among equals, and which rows have a finite maximum and no NaN."""
    tokens = logits.argmax(dim=-1)  # takes NaN for the maximum
    return tokens, logits.gather(1, tokens[:, None]).isfinite().squeeze(1)


def reject(tokens: Tensor, sound: Tensor) -> Tensor:
    """-1 for the rows that are not sound."""
    return torch.where(sound, tokens, -1)
