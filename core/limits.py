"""The limits of a run from settings and model: which defaults hold, what is lowered and said so, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.config import Composed, given_count
from core.interfaces import Limits

MODEL_LEN = 4096  # tokens


def limits(composed: Composed, model: Mapping[str, Any], on_cpu: bool) -> tuple[Limits, list[str], list[str]]:
    """(limits, notes for the user, reasons why it cannot run)."""
    notes: list[str] = []
    reasons: list[str] = []
    length = _model_len(composed, model, notes, reasons)
    seqs, budget = _step(composed, on_cpu, notes, reasons)
    return Limits(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=length), notes, reasons


def _model_len(composed: Composed, model: Mapping[str, Any], notes: list[str], reasons: list[str]) -> int:
    given, own = given_count(composed.config.max_model_len), model.get("max_position_embeddings")
    if given is not None:
        if own and given > own:
            reasons.append(
                f"max_model_len={given} ({composed.where('max_model_len')}) is more than the model's max_position_embeddings "
                f"{own}; way out: max_model_len=auto or at most {own}"
            )
        return given
    if own and own < MODEL_LEN:
        notes.append(f"max_model_len lowered from {MODEL_LEN} to {own} (max_position_embeddings of the model)")
        return own
    return MODEL_LEN


def _step(composed: Composed, on_cpu: bool, notes: list[str], reasons: list[str]) -> tuple[int, int]:
    """Every running request must be able to decode in one step: requests <= budget. Values left open give way."""
    config = composed.config
    seqs = given_count(config.max_num_seqs) or (64 if on_cpu else 512)
    budget = given_count(config.max_num_batched_tokens) or (2048 if on_cpu else 16384)
    if seqs <= budget:
        return seqs, budget
    if config.max_num_seqs == "auto":
        notes.append(
            f"max_num_seqs lowered from {seqs} to {budget} (max_num_batched_tokens, so that every decode fits in a step)"
        )
        return budget, budget
    if config.max_num_batched_tokens == "auto":
        notes.append(
            f"max_num_batched_tokens raised from {budget} to {seqs} (max_num_seqs, so that every decode fits in a step)"
        )
        return seqs, seqs
    reasons.append(
        f"max_num_batched_tokens={budget} ({composed.where('max_num_batched_tokens')}) is less than max_num_seqs={seqs} "
        f"({composed.where('max_num_seqs')}): every decode must fit in a step; way out: leave one of them out"
    )
    return seqs, budget


def head_size(model: Mapping[str, Any]) -> int | None:
    """Given, or hidden size over query heads."""
    if size := model.get("head_dim"):
        return size
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    return hidden // heads if hidden and heads else None
