"""Every scheduler x allocator x overlap x block size x budget draws the tokens of the definition (fake model)."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.fake import ALLOCATORS, SCHEDULERS, drive, expected, make_engine, workload

BUDGETS = ((8, 2), (8, 8), (16, 4), (64, 8))  # step tokens, slots
PRODUCT = list(itertools.product(SCHEDULERS, ALLOCATORS, (0, 1), (1, 3, 4, 16), BUDGETS))


def check(scheduler: str, allocator: str, overlap: int, block_size: int, budget: tuple[int, int], seed: int) -> None:
    work = workload(seed)
    ample = -(-64 // block_size)  # blocks of the longest request there can be
    blocks = random.Random(seed).choice([ample, ample + 2, ample * 2, ample * 8])
    tokens, slots = budget
    engine = make_engine(
        scheduler, allocator, block_size=block_size, blocks=blocks, slots=slots, budget=tokens, overlap=overlap
    )
    assert drive(engine, work, seed).tokens == expected(work)


@pytest.mark.parametrize(("scheduler", "allocator", "overlap", "block_size", "budget"), PRODUCT)
def test_same_tokens(scheduler: str, allocator: str, overlap: int, block_size: int, budget: tuple[int, int]) -> None:
    """Full product, three workloads each: prefixes shared, prompts repeated, stops in the middle, tight and ample pools."""
    for seed in range(3):
        check(scheduler, allocator, overlap, block_size, budget, seed)


@pytest.mark.nightly
@pytest.mark.parametrize(("scheduler", "allocator", "overlap", "block_size", "budget"), PRODUCT)
def test_same_tokens_long(scheduler: str, allocator: str, overlap: int, block_size: int, budget: tuple[int, int]) -> None:
    for seed in range(3, 60):
        check(scheduler, allocator, overlap, block_size, budget, seed)
