"""Whether a model can be shared out over ranks: what its architecture states, against `tensor_parallel_size`. Light.

An architecture states it as `provides["shares"]`: a word of config.json -> how its number is shared out.

    even     a multiple of the ranks: query heads, the width of the MLP
    copied   a multiple of the ranks, or a divisor, and then several ranks hold the same one: KV heads
    padded   any number that leaves no rank without: the vocabulary, of which the last rank may have less
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EVEN, COPIED, PADDED = "even", "copied", "padded"
RULES = (EVEN, COPIED, PADDED)
MOST = 64  # ranks that are looked at for a way out


def refused(shares: Mapping[str, str], model: Mapping[str, Any], ranks: int) -> list[str]:
    """What of the model this many ranks cannot share out, with the numbers. Words that the model lacks are not judged."""
    found = []
    for word, rule in shares.items():
        if isinstance(number := model.get(word), int) and (text := _against(rule, number, ranks)):
            found.append(f"{word} ({number}) {text}")
    return found


def _against(rule: str, number: int, ranks: int) -> str:
    if rule == EVEN:
        return "is no multiple of it" if number % ranks else ""
    if rule == COPIED:
        return "is neither a multiple nor a divisor of it" if number % ranks and ranks % number else ""
    assert rule == PADDED, f"no way to share out is called {rule!r}"
    # Every rank has ceil(number / ranks) places, filled from the first rank on.
    return "leaves a rank without any of it" if (ranks - 1) * -(-number // ranks) >= number else ""


def fitting(shares: Mapping[str, str], model: Mapping[str, Any]) -> list[int]:
    """Numbers of ranks that can share the model out; 1 always can."""
    return [ranks for ranks in range(1, MOST + 1) if not refused(shares, model, ranks)]


def refusal(shares: Mapping[str, str], model: Mapping[str, Any], ranks: int, source: str, name: str) -> list[str]:
    """One reason with everything that does not fit and what would, or none. source: who gave the number of ranks."""
    found = refused(shares, model, ranks)
    if not found:
        return []
    ways = " or ".join(f"tensor_parallel_size={n}" for n in fitting(shares, model))
    return [f"tensor_parallel_size={ranks} ({source}) cannot share out {name}: {', '.join(found)}; way out: {ways}"]
