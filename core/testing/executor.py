"""Contract suite for executors: a tiny random model behind a whole engine draws the tokens that it draws alone.

An executor is chosen by `device` and `tensor_parallel_size`; a suite for another than the plain case sets `overrides`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from core.interfaces import DeviceContext, Rows, SamplingParams
from core.llm import LLM
from core.parallel import Solo
from core.resolve import Resolved
from core.testing.dense import Histories
from core.testing.suite import Suite, seeded
from core.weights import load_weights

SMALL: Mapping[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "cpu_threads": 1}
VOCAB = 250
OVERLAPS = pytest.mark.parametrize("overlap", [0, 1])


class ExecutorSuite(Suite):
    """Plans are run in the order of their launch; what is drawn is what the model draws without cache and batch."""

    kind = "executor"
    model: ClassVar[str] = "tiny-llama"  # a preset with random weights
    overrides: ClassVar[Sequence[str]] = ()  # e.g. tensor_parallel_size=2

    def llm(self, overlap: int = 0, **more: Any) -> LLM:
        """A tiny engine on the CPU with this executor."""
        own = [f"executor.{key}={value}" for key, value in self.settings.items()]
        values = {**SMALL, "device": "cpu", "num_kv_blocks": 24, **self._ranks(), **more}
        self.target()
        return LLM(self.model, executor=self.declared().name, overlap=overlap, overrides=[*own, *self.overrides], **values)

    def _ranks(self) -> dict[str, int]:
        """As few as the component accepts, unless `overrides` say how many."""
        want = self.declared().capabilities.get("tensor_parallel_size")
        if want is None or any(text.startswith("tensor_parallel_size=") for text in self.overrides):
            return {}
        return {"tensor_parallel_size": next(n for n in range(1, 65) if want.ok(n))}

    @staticmethod
    @torch.inference_mode()
    def define(resolved: Resolved, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """Alone: everything is computed again for every token, on one rank."""
        limits, config = resolved.limits, resolved.checkpoint.config
        dtype, vocab = getattr(torch, resolved.dtype), config["vocab_size"]
        context = DeviceContext(limits, torch.device("cpu"), dtype, config, vocab, Solo(), resolved.block_size)
        model, sampler = resolved.build("arch", context), resolved.build("sampler", context)
        load_weights(model, resolved.checkpoint, progress=False)
        sampler.admit(0, params, np.zeros(0, np.int32))
        tokens = list(prompt)
        for _ in range(params.max_tokens):
            positions = torch.arange(len(tokens))
            hidden = model.forward(torch.tensor(tokens), positions, Histories().attend([("a", len(tokens))], positions))
            rows = Rows(torch.tensor([0]), torch.tensor([len(tokens)]), None, sampler.plan(np.array([0])))
            tokens.append(int(sampler.sample(model.logits(hidden[-1:]), rows).tokens[0]))
        return tokens[len(prompt) :]

    @OVERLAPS
    def test_tokens_are_those_of_the_model_alone(self, overlap: int) -> None:
        """Chunked prompts, shared prefixes, more requests than seats, greedy and seeded rows, preemption in a tight pool."""
        rng = seeded("executor")
        shared = [rng.randrange(VOCAB) for _ in range(18)]
        work = []
        for i in range(7):
            prompt = shared[: rng.choice([0, 9, 18])] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
            work.append((prompt, SamplingParams(temperature=float(i % 2), max_tokens=6, seed=i, ignore_eos=True)))
        with self.llm(overlap, num_kv_blocks=8) as llm:
            outputs = llm.generate([prompt for prompt, _ in work], [params for _, params in work])
            for (prompt, params), output in zip(work, outputs, strict=True):
                want = self.define(llm.resolved, prompt, params)
                assert output.token_ids == want, f"a prompt of {len(prompt)} tokens drew {output.token_ids}, alone {want}"

    def test_the_pool_is_as_large_as_it_was_asked_for(self) -> None:
        """`num_blocks` counts usable blocks; the scratch block is extra."""
        with self.llm(num_kv_blocks=11) as llm:
            executor = llm.engine.executor
            assert executor.num_blocks == 11, f"num_kv_blocks=11 was asked for, num_blocks is {executor.num_blocks}"
            assert llm.engine.kv.audit() == (11, 0, 0), f"of 11 blocks: {llm.engine.kv.audit()} (free, reusable, held)"
            assert isinstance(executor.report(), Mapping), f"report() must give a mapping, got {executor.report()!r}"

    def test_close_twice(self) -> None:
        """Everything is released; a second close is fine, and another engine can follow in the same process."""
        for _ in range(2):
            llm = self.llm()
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
            executor = llm.engine.executor
            executor.close()
            executor.close()
            llm.close()

    def test_two_engines_at_once(self) -> None:
        """No port, group or global of one is in the way of the other."""
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        with self.llm() as one, self.llm() as two:
            answers = [llm.generate([[5, 6, 7]], params)[0].token_ids for llm in (one, two, one)]
            assert answers[0] == answers[1] == answers[2], f"two engines, one of them asked twice, answered {answers}"
