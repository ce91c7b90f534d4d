"""1, 2, 3 and 4 ranks draw equal tokens: every scheduler x allocator x overlap, on gloo. One group of processes per size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from core.build import build_engine
from core.config import Composed, compose, override
from core.engine import Engine
from core.interfaces import NoSettings
from core.llm import LLM
from core.resolve import decide
from plugins.executors.processes import Processes
from plugins.executors.workers import Workers
from tests.real import TINY
from tests.test_matrix import workload

CELLS = list(itertools.product(["fcfs", "mixed"], ["block_hash", "paged"], [0, 1]))
KV_HEADS = {2: (2, 1, 4), 3: (3, 1, 12), 4: (2, 1, 4)}  # shared out or copied
SIZES = {"num_attention_heads": 12, "hidden_size": 48, "intermediate_size": 24, "head_dim": 16, "num_hidden_layers": 2}
VOCAB = 263  # no size divides it


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Processes]:
    processes = Processes(["cpu"] * request.param)
    yield processes
    children = [p.child for p in processes.all]
    processes.end()
    assert [child.returncode for child in children] == [0] * (request.param - 1)


def settings(model: str, tied: bool, bias: bool, kv_heads: int, size: int, cell: tuple[Any, ...], **more: Any) -> Composed:
    words = {**SIZES, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied, "attention_bias": bias, "vocab_size": VOCAB}
    words |= {"mlp_bias": bias} if model == "tiny-llama" else {}
    scheduler, allocator, overlap = cell
    given = {
        "scheduler": scheduler,
        "kv_allocator": allocator,
        "overlap": overlap,
        "tensor_parallel_size": size,
        **TINY,
        **more,
    }
    pairs = {
        "model": model,
        "tensor_parallel_size": size,
        **given,
        **{f"model.config.{name}": value for name, value in words.items()},
    }
    return compose([override(name, value) for name, value in pairs.items()])


def tokens(engine: Engine) -> list[list[int]]:
    work = workload(5, 250)[:6]
    requests = [engine.submit(prompt, params) for prompt, params in work]
    while engine.busy:
        engine.step()
    assert engine.kv.audit()[2] == 0 and {r.finish_reason for r in requests} <= {"length", "stop"}
    return [r.tokens[r.num_prompt :] for r in requests]


def check(ranks: Processes, model: str, tied: bool, bias: bool, kv_heads: int, cells: list[tuple[Any, ...]]) -> None:
    size = len(ranks.all) + 1
    with LLM.from_composed(settings(model, tied, bias, kv_heads, 1, CELLS[0])) as llm:
        want = tokens(llm.engine)
    executor, evictions, cached = None, 0, 0
    for cell in cells:
        composed = settings(
            model, tied, bias, kv_heads, size, cell, num_kv_blocks=15, **{"kv_allocator.block_size": 4}
        )  # tight
        resolved = decide(composed)
        executor = executor or Workers(NoSettings(), resolved, ranks)
        assert executor.num_blocks == 15
        engine = build_engine(resolved, composed.registry, executor)
        assert tokens(engine) == want, cell
        evictions, cached = evictions + engine.stats.evictions, cached + engine.stats.cached_tokens
    assert executor is not None and evictions and cached
    executor.close()


@pytest.mark.parametrize(("model", "tied", "bias", "which"), [("tiny-qwen3", True, False, 0), ("tiny-llama", False, True, 1)])
def test_every_cell(ranks: Processes, model: str, tied: bool, bias: bool, which: int) -> None:
    """Chunked, cached, preempted, overlapped, greedy and seeded rows; KV heads shared out, and copied on every rank."""
    check(ranks, model, tied, bias, KV_HEADS[len(ranks.all) + 1][which], CELLS)


@pytest.mark.parametrize(("model", "tied", "bias"), [("tiny-qwen3", False, True), ("tiny-llama", True, False)])
def test_the_other_models(ranks: Processes, model: str, tied: bool, bias: bool) -> None:
    """Tied and untied, with and without bias, the other way round; two cells."""
    check(ranks, model, tied, bias, KV_HEADS[len(ranks.all) + 1][2], [CELLS[0], CELLS[-1]])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "tied", "bias", "which"),
    [*itertools.product(["tiny-qwen3", "tiny-llama"], [False, True], [False, True], range(3))],
)
def test_every_model_and_cell(ranks: Processes, model: str, tied: bool, bias: bool, which: int) -> None:
    check(ranks, model, tied, bias, KV_HEADS[len(ranks.all) + 1][which], CELLS)
