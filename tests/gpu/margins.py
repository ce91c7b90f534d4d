"""Greedy tokens of two engines may part where the two best logits are close: the rule by which they are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.llm import LLM
from tests.real import dense_logits

BITS = 4 * 2.0**-8  # four roundings to bfloat16, as a share of the largest logit


@dataclass
class Agreement:
    """How far the tokens agree, and the requests that parted although the margin was wide."""

    compared: int = 0
    parted: int = 0
    wrong: list[str] | None = None


def compare(
    judge: LLM, prompts: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], got: Sequence[Sequence[int]]
) -> Agreement:
    """Each request up to its first difference; `judge` (float32) tells by how much its best logit is ahead there."""
    found = Agreement(wrong=[])
    assert found.wrong is not None
    for i, (prompt, a, b) in enumerate(zip(prompts, wanted, got, strict=True)):
        assert len(a) == len(b)
        same = next((n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        found.compared += same
        if same == len(a):
            continue
        found.parted += 1
        logits = dense_logits(judge, [*prompt, *a[:same]])[-1].double()
        margin, allowed = float(logits.max() - logits[b[same]]), float(logits.abs().max()) * BITS
        if margin > allowed:
            found.wrong.append(f"request {i}, token {same}: {b[same]} is {margin:.4f} behind {a[same]}, allowed {allowed:.4f}")
    return found
