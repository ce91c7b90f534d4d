"""The penalty by its formula, draws by their distribution, and what a row may depend on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from repetition import RequestSettings
from repetition.sampler import Repetition

from core.interfaces import Rows, SamplingParams

VOCAB, SLOTS = 12, 4
NOTHING = np.zeros(0, np.int32)


@pytest.fixture
def sampler() -> Repetition:
    return build()


def build() -> Repetition:
    context: Any = SimpleNamespace(
        limits=SimpleNamespace(max_num_seqs=SLOTS), device=torch.device("cpu"), vocab_size=VOCAB, config={}
    )
    return Repetition(None, context)  # type: ignore[arg-type]


def rows(slots: list[int], positions: list[int], masks: torch.Tensor | None = None) -> Rows:
    return Rows(torch.tensor(slots), torch.tensor(positions), masks)


def logits(seed: int, count: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((count, VOCAB)).astype(np.float32) * 2)


def frequencies(params: SamplingParams, row: torch.Tensor, draws: int = 20_000, history: list[int] = []) -> np.ndarray:  # noqa: B006
    """Of `draws` tokens at different positions; each is forgotten again."""
    sampler = build()
    sampler.admit(0, params, np.array(history, np.int32))
    seen = sampler.seen.clone()
    drawn = sampler.sample(row.expand(draws, -1), rows([0] * draws, list(range(draws)))).tokens
    assert (sampler.seen >= seen).all()
    return np.bincount(drawn.numpy(), minlength=VOCAB) / draws


def test_the_penalty_is_the_formula(sampler: Repetition) -> None:
    """Positive logits are divided, negative ones multiplied; other tokens stay. The likeliest loses its place."""
    sampler.admit(0, SamplingParams(temperature=0, repetition_penalty=2.0), np.array([3, 5], np.int32))
    row = torch.full((1, VOCAB), -9.0)
    row[0, [3, 4, 5]] = torch.tensor([3.0, 1.6, -1.0])
    assert sampler.sample(row, rows([0], [2])).tokens.tolist() == [4]  # 1.5, 1.6, -2
    assert sampler.sample(row, rows([0], [3])).tokens.tolist() == [3]  # 1.5, 0.8, -2: what was drawn counts too


@pytest.mark.parametrize("penalty", [1.0, 1.7, 0.5])
def test_draws_have_the_penalized_distribution(penalty: float) -> None:
    """20,000 draws: a frequency is off by more than 0.02 in fewer than 1 of 10**7 runs; the seed is fixed anyway."""
    row, history = logits(1)[0], [0, 2, 4, 4]
    z = row.clone()
    z[history] = torch.where(row > 0, row / penalty, row * penalty)[history]
    want = (z / 0.8).softmax(0).numpy()
    got = frequencies(SamplingParams(temperature=0.8, seed=7, repetition_penalty=penalty), row[None], history=history)
    assert np.abs(got - want).max() < 0.02


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [2, 3]),
        ({"top_p": 0.6}, [2, 3]),  # the token that crosses stays
        ({"top_p": 1e-9}, [3]),
        ({"min_p": 0.6}, [2, 3]),
        ({"top_k": 3, "top_p": 0.5}, [2, 3]),  # of what top-k left: 4/9 < 0.5
        ({}, [0, 1, 2, 3]),
    ],
)
def test_filters(params: dict[str, Any], kept: list[int]) -> None:
    """Probabilities 0.1, 0.2, 0.3, 0.4: the rest keep their proportions."""
    row = torch.full((1, VOCAB), -torch.inf)
    row[0, :4] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    want = np.zeros(VOCAB)
    want[kept] = (np.array(kept) + 1) / sum(k + 1 for k in kept)
    assert np.abs(frequencies(SamplingParams(temperature=1.0, seed=3, **params), row) - want).max() < 0.02


def continue_alone(params: SamplingParams, count: int, slot: int = 0, history: list[int] | None = None) -> list[int]:
    """Each token is drawn from logits that follow from the text so far."""
    sampler, text = build(), [1, 2, 3, *(history or [])]
    sampler.admit(slot, params, np.array(text, np.int32))
    while len(text) < count:
        text += sampler.sample(logits(sum(text)), rows([slot], [len(text)])).tokens.tolist()
    return text


def test_draws_do_not_depend_on_batch_slot_or_preemption() -> None:
    """Beside others, in another slot, and admitted again with what was drawn so far."""
    params = SamplingParams(temperature=1.0, seed=11, repetition_penalty=1.5)
    alone = continue_alone(params, 20)
    assert continue_alone(params, 20, slot=2) == alone
    assert continue_alone(params, 20, history=alone[3:9]) == alone
    sampler, texts = build(), [[1, 2, 3], [4, 4], [9]]
    others = [params, SamplingParams(temperature=0.7, seed=5, top_k=3), SamplingParams(temperature=0)]
    for slot, (p, text) in enumerate(zip(others, texts, strict=True)):
        sampler.admit(slot, p, np.array(text, np.int32))
    while len(texts[0]) < 20:
        batch = torch.cat([logits(sum(text)) for text in texts])
        drawn = sampler.sample(batch, rows([0, 1, 2], [len(text) for text in texts])).tokens.tolist()
        for text, token in zip(texts, drawn, strict=True):
            text.append(token)
    assert texts[0] == alone
    assert len(set(alone)) > 4, "the text must not be trivial"


def test_a_slot_forgets_its_former_request(sampler: Repetition) -> None:
    sampler.admit(0, SamplingParams(temperature=0, repetition_penalty=5.0), np.arange(VOCAB, dtype=np.int32))
    sampler.admit(0, SamplingParams(temperature=0, repetition_penalty=5.0), NOTHING)
    assert not sampler.seen[0].any()


def test_masks_and_broken_rows(sampler: Repetition) -> None:
    """A masked token is never drawn; NaN anywhere, or nothing finite, gives -1 for that row alone."""
    for slot in range(SLOTS):
        sampler.admit(slot, SamplingParams(temperature=float(slot % 2), seed=slot), NOTHING)
    masks = torch.zeros(4, VOCAB, dtype=torch.bool)
    masks[:3, 6] = True
    batch = logits(2, 4)
    batch[1, 0] = torch.nan
    batch[2, 6] = torch.inf
    assert sampler.sample(batch, rows([0, 1, 2, 3], [5, 5, 5, 5], masks)).tokens.tolist() == [6, -1, -1, -1]


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "2", True, float("nan")])
def test_the_parameter_is_checked(value: Any) -> None:
    with pytest.raises(ValueError, match="repetition_penalty must be a finite number > 0"):
        RequestSettings(value)
