"""Every scheduler x allocator x overlap x block size x budget draws the tokens of the definition (fake model)."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from core.testing.fake import drive, expected, workload
from tests.fake import ALLOCATORS, SCHEDULERS, make_engine

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


@pytest.mark.parametrize("setting", [{"decode_after": 1}, {"decode_after": 2}, {"max_chunk": 1}, {"max_chunk": 5}], ids=str)
@pytest.mark.parametrize("overlap", [0, 1])
def test_settings_of_schedulers(setting: dict[str, Any], overlap: int) -> None:
    """Tight pools and small budgets, so that prompts are cut and requests give way under each setting."""
    scheduler = "fcfs" if "decode_after" in setting else "mixed"
    for seed in range(12):
        work = workload(seed)
        engine = make_engine(scheduler, "paged", blocks=17 + seed % 5, slots=4, budget=6, overlap=overlap, **setting)
        run = drive(engine, work, seed)
        assert run.tokens == expected(work) and "error" not in run.ends.values()


@pytest.mark.nightly
@pytest.mark.parametrize(("scheduler", "allocator", "overlap", "block_size", "budget"), PRODUCT)
def test_same_tokens_long(scheduler: str, allocator: str, overlap: int, block_size: int, budget: tuple[int, int]) -> None:
    for seed in range(3, 60):
        check(scheduler, allocator, overlap, block_size, budget, seed)
