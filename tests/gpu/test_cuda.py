"""The same engine on a CUDA device: run these on a machine that has one (`pytest -m gpu tests/gpu`)."""

from __future__ import annotations

from typing import Any

import pytest

from core.device import available_cuda, memory
from core.llm import LLM, SamplingParams
from tests.real import runner_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available_cuda(), reason="no CUDA device")]
TINY: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 96,
    "dtype": "float32",
}


def work() -> list[tuple[list[int], SamplingParams]]:
    shared = list(range(40))
    return [
        ([*shared, i, 3], SamplingParams(temperature=i % 2, seed=i, top_k=20 if i % 3 == 0 else 0, max_tokens=12))
        for i in range(8)
    ]


def tokens(model: str, **settings: Any) -> list[list[int]]:
    with LLM(model, overrides=["kv_allocator.block_size=16"], **TINY, **settings) as llm:
        prompts, params = zip(*work(), strict=True)
        outputs = [o.token_ids for o in llm.generate(list(prompts), list(params))]
        assert [o.token_ids for o in llm.generate(list(prompts), list(params))] == outputs, "from the cache"
        assert llm.engine.stats.cached_tokens > 0
        return outputs


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, list[list[int]]]:
    return {model: tokens(model, device="cpu") for model in ("tiny-qwen3", "tiny-llama")}


@pytest.mark.parametrize("fusion", ["on", "off"])
@pytest.mark.parametrize(("attention", "graphs"), [("sdpa", "off"), ("reference", "off"), ("triton", "off"), ("triton", "on")])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-llama"])
def test_same_tokens_as_on_a_cpu(
    on_cpu: dict[str, list[list[int]]], model: str, overlap: int, attention: str, graphs: str, fusion: str
) -> None:
    """float32, chunked, cached, preempting, greedy, seeded and filtered rows; tokens stay on the device under overlap."""
    settings = {"attention": attention, "graphs": graphs, "overlap": overlap, "fusion": fusion}
    assert tokens(model, device="cuda", **settings) == on_cpu[model]


def test_a_common_prefix_in_captured_steps() -> None:
    """All rows share a long prefix: the steps read it once, and draw what they draw without graphs."""
    shared = [i % 200 for i in range(1024)]
    prompts = [[*shared, i, 7] for i in range(16)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = []
    for graphs in ("on", "off"):
        with LLM(
            "tiny-qwen3", max_model_len=1100, num_kv_blocks=400, dtype="float32", attention="triton", graphs=graphs
        ) as llm:
            outputs.append([o.token_ids for o in llm.generate(prompts, params)])
            if llm.resolved.graphs:
                captured = runner_of(llm).graphs
                assert captured is not None and any(shared for *_, shared in captured.captured)
    assert outputs[0] == outputs[1]


def test_pool_by_measurement() -> None:
    """Total x fraction - used - (peak - current): the pool is that large, and the device holds no more than the fraction."""
    with LLM("tiny-qwen3", max_model_len=96, gpu_memory_utilization=0.2) as llm:
        runner = runner_of(llm)
        seen = memory(runner.device)
        assert runner.sizing.kv > 0.1 * seen["total"] and seen["used"] <= 0.21 * seen["total"]
        assert llm.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True))[0].finish_reason == "length"


def test_too_large_a_pool_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no room for the KV cache.*GiB"):
        LLM("tiny-qwen3", max_model_len=96, num_kv_blocks=10**9)


def test_memory_comes_back() -> None:
    """H1: engine after engine."""
    used = []
    for _ in range(3):
        with LLM("tiny-qwen3", max_model_len=96, gpu_memory_utilization=0.3) as llm:
            device = runner_of(llm).device
        used.append(memory(device)["used"])
    assert max(used) - min(used) < 64 << 20
