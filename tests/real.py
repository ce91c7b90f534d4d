"""Real models in tests: the definition without cache and without batch, and tiny engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.interfaces import Prologue, Rows, SamplingParams
from core.llm import LLM
from core.prologue import apply_prologue
from core.runner import Runner

TINY = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_kv_blocks": 96, "cpu_threads": 1}


def runner_of(llm: LLM) -> Runner:
    runner = llm.engine.executor.runner  # type: ignore[attr-defined]
    assert isinstance(runner, Runner)
    return runner


def dense_attend(positions: Tensor) -> Any:
    """Causal attention over the whole sequence, float64 softmax: no cache, no batch."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, prologue: Prologue) -> Tensor:
        q, k = apply_prologue(q, k, positions, prologue)
        group = q.shape[1] // k.shape[1]
        keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("thd,lhd->htl", q.double(), keys) * q.shape[-1] ** -0.5
        unseen = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, float("-inf"))
        return torch.einsum("htl,lhd->thd", scores.softmax(-1), values).to(q.dtype)

    return attend


@torch.inference_mode()
def dense_logits(llm: LLM, tokens: Sequence[int]) -> Tensor:
    """[T, V]: logits after every token."""
    runner = runner_of(llm)
    positions = torch.arange(len(tokens), device=runner.device)
    hidden = runner.model.forward(torch.tensor(tokens, device=runner.device), positions, dense_attend(positions))
    return runner.model.logits(hidden)


@torch.inference_mode()
def define(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What one request draws alone, everything recomputed for every token. On a CPU."""
    runner, tokens = runner_of(llm), list(prompt)
    sampler = llm.resolved.build("sampler", runner._context(runner.model.kv_spec))
    sampler.admit(0, params, np.zeros(0, np.int32))
    while len(tokens) < len(prompt) + params.max_tokens:
        rows = Rows(torch.tensor([0]), torch.tensor([len(tokens)]))
        token = int(sampler.sample(dense_logits(llm, tokens)[-1:], rows).tokens[0])
        tokens.append(token)
        if token in params.stop_token_ids:
            break
    return tokens[len(prompt) :]
