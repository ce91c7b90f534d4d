"""Products of few tokens against torch, in Triton's interpreter (compiled where there is a GPU)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.interpreter import DEVICE  # isort: skip  (before triton)

from core.interfaces import NoSettings
from plugins.models.common.gemm import skinny
from plugins.models.common.gemv import MOST, Few, Skinny, Tile, choose
from plugins.models.llama import Llama
from plugins.models.qwen3 import Qwen3
from tests import test_models

torch.set_num_threads(1)
# x -> y: norm, gate and up, residual, bias
FORMS = {"plain": (0, 0, 0, 1), "qkv": (1, 0, 0, 0), "gated": (1, 1, 0, 1), "out": (0, 0, 1, 0), "all": (1, 1, 1, 1)}
# tokens, inputs, outputs, layout: sizes that fill nothing, several pieces of 1,024, splits that end unevenly
CASES = [
    (1, 48, 21, None),
    (3, 1025, 6, Few(4, 1)),
    (4, 2080, 9, Few(8, 2)),
    (2, 3072, 4, Few(4, 4)),
    (5, 300, 50, None),
    (3, 520, 33, Tile(16, 128, 4, 3)),
    (17, 576, 37, Tile(32, 64, 1, 2)),
    (33, 100, 18, Tile(16, 32, 3, 2)),
]


def plain(x: Tensor, weight: Tensor, bias: Any, norm: Any, residual: Any, gated: bool) -> Tensor:
    """The definition, as the layers spell it out."""
    if norm is not None:
        x = F.rms_norm(x, norm[0].shape, *norm)
    y = F.linear(x, weight, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


def given(form: str, tokens: int, ins: int, outs: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    """Arguments of a product."""
    random = torch.Generator(DEVICE).manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=DEVICE).to(dtype)

    norm, gated, residual, bias = FORMS[form]
    rows = outs * (1 + gated)
    return {
        "x": values(tokens, ins),
        "weight": (values(rows, ins) / ins**0.5).to(dtype),
        "bias": values(rows) if bias else None,
        "norm": (values(ins), 1e-5) if norm else None,
        "residual": values(tokens, outs) if residual else None,
        "gated": bool(gated),
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "ins", "outs", "plan"), CASES, ids=str)
def test_every_form_equals_the_definition(form: str, tokens: int, ins: int, outs: int, plan: Any) -> None:
    """Any sizes and layouts; counters of split products are zero again, so that the next one works, too."""
    if isinstance(plan, Tile) and FORMS[form][1]:
        plan = plan._replace(splits=1)
    product = Skinny(torch.device(DEVICE))
    arguments = given(form, tokens, ins, outs, torch.float32)
    for _ in range(2):
        torch.testing.assert_close(product(**arguments, plan=plan), plain(**arguments), atol=2e-5, rtol=2e-5)
    assert not bool(product.counters.any())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", [Few(4, 4), Tile(16, 64, 1, 2)], ids=str)
def test_half_precision_has_the_same_roundings(form: str, plan: Any) -> None:
    """float16: nearly all values are equal, as they are not when a product enters SiLU or the residual unrounded."""
    arguments = given(form, 4, 264, 40, torch.float16)
    got, want = Skinny(torch.device(DEVICE))(**arguments, plan=plan), plain(**arguments)
    assert float((got != want).double().mean()) < 0.05
    torch.testing.assert_close(got, want, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(("tokens", "plan"), [(4, Few(4, 2)), (9, Tile(16, 64, 1, 2))], ids=str)
def test_a_token_does_not_depend_on_the_others(tokens: int, plan: Any) -> None:
    """B32: the bits of one row are the same whoever comes with it, NaN included; unwritten memory does not shine through."""
    product, arguments = Skinny(torch.device(DEVICE)), given("all", tokens, 130, 24, torch.float32)
    before = product(**arguments, plan=plan)
    arguments["x"][1:] = torch.nan
    arguments["residual"][1:] = torch.inf
    after = product(**arguments, plan=plan)
    assert torch.equal(after[0], before[0])
    assert bool(after[1:].isnan().all())


def test_layouts_of_known_models() -> None:
    """Every shape has a layout that its kernel takes; narrow products are split, so that all multiprocessors read."""
    shapes = [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (4096, 12_288), (576, 1536), (960, 576), (49_152, 576)]
    for outs, ins in shapes:
        for tokens in (1, 4, 5, MOST):
            plan = choose(tokens, outs, ins, False)
            assert isinstance(plan, Tile) or -(-outs // plan.rows) >= 128
            assert isinstance(plan, Few) or -(-outs // plan.rows) * plan.splits >= min(96, outs * ins // 2**14)
            gated = choose(tokens, outs, ins, True)
            assert isinstance(gated, Few) or gated.splits == 1


@pytest.mark.parametrize(("cls", "tokens"), [(Llama, 1), (Qwen3, 3), (Qwen3, MOST)])
def test_the_model_agrees(cls: type, tokens: int) -> None:
    """float16: few tokens take the four products of a layer, and the logits are those of the plain model but for rounding."""
    config = {**test_models.TINY, "attention_bias": True, "mlp_bias": True}
    half = test_models.context(config, dtype=torch.float16)
    reference = cls(NoSettings(), half)
    random = torch.Generator().manual_seed(1)
    weights = {
        name: (0.2 * torch.randn(*shape, generator=random) + float("norm" in name)).half()
        for name, shape in reference.weights().items()
    }
    quick = cls(NoSettings(), replace(half, fused=True, device=torch.device(DEVICE)))
    assert quick._skinny.fits(tokens) and not quick._skinny.fits(MOST + 1)
    results = []
    for model in (reference, quick):
        test_models.loaded(model, weights)
        device = model.context.device
        with torch.inference_mode():
            positions = torch.arange(tokens, device=device)
            hidden = model.forward(positions * 7 % 101, positions, test_models.full_attention(positions))
            results.append(model.logits(hidden).float().cpu())
    assert results[0].std() > 0.05
    torch.testing.assert_close(results[1], results[0], atol=0.02 * float(results[0].std()), rtol=0)


def test_where_the_kernels_are_not_used() -> None:
    """Plain engines and float32."""
    half = test_models.context(test_models.TINY, dtype=torch.float16, fused=True)
    assert skinny(half) is not None
    for other in (replace(half, fused=False), replace(half, dtype=torch.float32)):
        assert skinny(other) is None
