"""The contract of an architecture, and that a Llama checkpoint gives the tokens of arch=llama."""

from __future__ import annotations

from core.llm import LLM, SamplingParams
from core.testing import ArchSuite


class TestContract(ArchSuite):
    name = "my-plugin"


class TestParallel(ArchSuite):
    name = "my-plugin"
    settings = {"parallel": True}


def answers(*overrides: str) -> list[list[int]]:
    """Greedy tokens of a tiny Llama with random weights."""
    with LLM("tiny-llama", overrides=list(overrides), num_kv_blocks=64) as llm:
        outputs = llm.generate(["Hello", "The quick brown fox"], SamplingParams(temperature=0, max_tokens=8))
        return [output["token_ids"] for output in outputs]


def test_tokens_are_those_of_llama() -> None:
    assert answers("arch=my-plugin") == answers("arch=llama")


def test_parallel_branches_are_another_model() -> None:
    assert answers("arch=my-plugin", "arch.parallel=true") != answers("arch=llama")
