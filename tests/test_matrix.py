"""The equivalence matrix on tiny real models: a set that covers every pair of choices, the full product nightly."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from core.interfaces import SamplingParams
from core.llm import LLM
from tests.real import TINY, define

FACTORS: dict[str, list[Any]] = {
    "model": ["tiny-qwen3", "tiny-llama"],
    "scheduler": ["fcfs", "mixed"],
    "kv_allocator": ["block_hash", "paged"],
    "attention": ["reference", "sdpa"],
    "overlap": [0, 1],
    "block_size": [1, 3, 16],
    "budget": [8, 32],
}
PRODUCT = list(itertools.product(*FACTORS.values()))


def pairwise() -> list[tuple[Any, ...]]:
    """Greedily: rows of the product until every pair of values of two factors occurs together."""

    def pairs(row: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    left = set().union(*map(pairs, PRODUCT))
    chosen = []
    while left:
        best = max(PRODUCT, key=lambda row: len(pairs(row) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


def workload(seed: int, vocab: int) -> list[tuple[list[int], SamplingParams]]:
    """Shared prefixes, exact repeats, greedy and seeded rows with and without filters."""
    rng = random.Random(seed)
    shared, work = [rng.randrange(vocab) for _ in range(20)], []
    for i in range(8):
        prompt = shared[: rng.choice([0, 9, 20])] + [rng.randrange(vocab) for _ in range(rng.randrange(1, 30))]
        if i % 4 == 3:
            prompt = list(work[-1][0])
        params = [
            SamplingParams(temperature=0, max_tokens=9),
            SamplingParams(temperature=1.0, max_tokens=7, seed=i),
            SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=7, seed=i),
            SamplingParams(temperature=1.2, min_p=0.05, max_tokens=7, seed=i),
        ][rng.randrange(4)]
        work.append((prompt, params))
    return work


def check(row: tuple[Any, ...], seed: int) -> None:
    model, scheduler, allocator, attention, overlap, block_size, budget = row
    longest = -(-96 // block_size)
    settings = {**TINY, "num_kv_blocks": longest + random.Random(seed).choice([0, 4, 200]), "max_num_batched_tokens": budget}
    overrides = [f"kv_allocator.block_size={block_size}"]
    choice = {"scheduler": scheduler, "kv_allocator": allocator, "attention": attention, "overlap": overlap}
    with LLM(model, overrides=overrides, **settings, **choice) as llm:
        work = workload(seed, 250)
        outputs = llm.generate([p for p, _ in work], [s for _, s in work])
        assert [o.token_ids for o in outputs] == [define(llm, p, s) for p, s in work]
        assert llm.engine.kv.audit()[2] == 0


@pytest.mark.parametrize("row", pairwise(), ids=lambda row: "-".join(map(str, row)))
def test_pairwise(row: tuple[Any, ...]) -> None:
    """B32, B33: chunked, cached, batched, preempted, overlapped: the tokens of the definition."""
    check(row, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("row", PRODUCT, ids=lambda row: "-".join(map(str, row)))
def test_product(row: tuple[Any, ...]) -> None:
    for seed in (2, 3):
        check(row, seed)
