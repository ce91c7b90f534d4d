"""QK-norm and rotary embedding before attention, against the formula written out; its tables against transformers'."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from core.interfaces import NoSettings, Prologue
from core.prologue import apply_prologue
from plugins.models.common.rope import rope_settings, rope_table
from plugins.models.llama import Llama
from tests.test_models import CPU, LLAMA3, MAX_LEN, TINY, context

torch.set_num_threads(1)
D, LENGTH, THETA = 8, 40, 100.0
TABLE = rope_table({"rope_theta": THETA}, D, LENGTH, torch.device("cpu"))
POSITIONS = torch.tensor([39, 0, 5, 5, 17])


def by_hand(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """One element after the other, in Python floats."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for t, position in enumerate(POSITIONS.tolist()):
        for head in range(x.shape[1]):
            row = [float(e) for e in x[t, head]]
            if weight is not None:
                scale = math.sqrt(sum(e * e for e in row) / D + eps)
                row = [e / scale * float(w) for e, w in zip(row, weight, strict=True)]
            for i in range(D // 2):
                angle = position * THETA ** (-2 * i / D)
                a, b = row[i], row[i + D // 2]
                out[t, head, i] = a * math.cos(angle) - b * math.sin(angle)
                out[t, head, i + D // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norms", ["neither", "both", "q alone"])
def test_prologue_equals_the_formula(dtype: torch.dtype, norms: str) -> None:
    """Strided views of one packed buffer go in and are unchanged; float32 inside, so one rounding at the end."""
    packed = torch.randn(5, (6 + 2 + 2) * D).to(dtype)
    q, k, _ = packed.clone().view(5, -1, D).split((6, 2, 2), 1)
    buffer = q.untyped_storage()
    before = bytes(buffer)
    q_norm = torch.rand(D).to(dtype) + 0.5 if norms != "neither" else None
    k_norm = torch.rand(D).to(dtype) + 0.5 if norms == "both" else None
    prologue = Prologue(q_norm, k_norm, 1e-5, TABLE)
    got_q, got_k = apply_prologue(q, k, POSITIONS, prologue)
    assert bytes(buffer) == before
    assert got_q.shape == q.shape
    assert got_k.shape == k.shape
    assert got_q.dtype == got_k.dtype == dtype
    step = torch.finfo(dtype).eps
    for got, x, weight in ((got_q, q, q_norm), (got_k, k, k_norm)):
        torch.testing.assert_close(got.double(), by_hand(x, weight, 1e-5), atol=20 * 1e-7, rtol=max(step, 1e-5))


def test_position_zero_turns_nothing() -> None:
    """cos 0 = 1, sin 0 = 0: without norms the input comes back bit for bit."""
    q, k = torch.randn(3, 4, D), torch.randn(3, 1, D)
    got_q, got_k = apply_prologue(q, k, torch.zeros(3, dtype=torch.int64), Prologue(None, None, 1e-5, TABLE))
    assert torch.equal(got_q, q)
    assert torch.equal(got_k, k)


def test_scores_depend_on_distance_only() -> None:
    """What a rotary embedding is for: q at i and k at j give the score of i - j."""
    q, k = torch.randn(1, 1, D).expand(LENGTH, 1, D), torch.randn(1, 1, D).expand(LENGTH, 1, D)
    q, k = apply_prologue(q, k, torch.arange(LENGTH), Prologue(None, None, 1e-5, TABLE))
    scores = q[:, 0] @ k[:, 0].T
    for distance in (0, 1, 7):
        line = scores.diagonal(-distance)
        torch.testing.assert_close(line, line[:1].expand_as(line), atol=1e-4, rtol=0)
    assert abs(scores[7, 0] - scores[0, 0]) > 1e-3


@pytest.mark.parametrize(
    "words", [LLAMA3, {"rope_type": "default", "rope_theta": 123.0}, None], ids=["llama3", "default", "none"]
)
def test_rope_tables_equal_transformers(words: dict[str, Any] | None) -> None:
    """B38: theta and type from transformers 5's dict, or its defaults."""
    config = transformers.LlamaConfig(**TINY, rope_parameters=words)
    table = rope_table(config.to_dict(), 12, MAX_LEN, CPU)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(MAX_LEN)[None])
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, torch.cat((cos[0, :, :6], sin[0, :, :6]), -1), atol=1e-6, rtol=0)


def test_rope_settings_of_every_age() -> None:
    """B38: config.json before transformers 5 keeps theta apart, and the older word for the type."""
    old = {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    older = {"rope_theta": 500.0, "rope_scaling": {**old["rope_scaling"], "type": "llama3"}}
    del older["rope_scaling"]["rope_type"]
    new = {"rope_parameters": LLAMA3}
    assert rope_settings(old) == rope_settings(older) == rope_settings(new)
    assert rope_settings({"rope_scaling": None}) == {"type": "default", "theta": 10000.0}
    assert rope_settings({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}})["theta"] == 7.0


def test_one_rope_table_for_all_layers() -> None:
    """The table is made once, as long as the longest request, and is no part of the checkpoint."""
    model = Llama(NoSettings(), context(TINY, max_len=50))
    assert len({id(layer.attention.prologue.cos_sin) for layer in model.layers}) == 1
    assert model.layers[0].attention.prologue.cos_sin.shape == (50, 12)
