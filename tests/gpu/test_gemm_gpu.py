"""Products of few tokens on a CUDA device at real sizes; `tests/test_triton_gemm.py` runs there, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreter import DEVICE  # isort: skip  (before triton)

from core.interfaces import NoSettings
from plugins.models.common.gemv import MOST, Few, Skinny, Tile, choose
from plugins.models.qwen3 import Qwen3
from tests import test_models
from tests.test_triton_gemm import FORMS, given, plain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device")]
CUDA = torch.device("cuda")
# Outputs and inputs: Qwen3-0.6B, Qwen3-8B, SmolLM2, odd ones.
SHAPES = [(4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (12_288, 4096), (4096, 12_288), (960, 576), (576, 1536)]
SHAPES += [(49_152, 576), (77, 1001)]
TOKENS = [1, 2, 3, 8, 16, 17, 64]


def made(form: str, tokens: int, ins: int, outs: int, seed: int = 0) -> dict[str, Any]:
    """Arguments; the weights lie still before a kernel may read them ahead of its turn."""
    arguments = given(form, tokens, ins, outs, torch.bfloat16, seed)
    torch.cuda.synchronize()
    return arguments


def exact(arguments: dict[str, Any]) -> Tensor:
    """The definition in float64."""

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) else value

    norm = arguments["norm"]
    given = {name: wide(value) for name, value in arguments.items()}
    return plain(**{**given, "norm": norm and (norm[0].double(), norm[1])})


def close(got: Tensor, want: Tensor) -> None:
    """Row by row; NaN fails."""
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert bool((error < 8e-3).all()), f"largest error {error.max():.2e}"


@pytest.mark.parametrize(("outs", "ins"), SHAPES)
def test_the_layouts_in_use_are_near_float64(outs: int, ins: int) -> None:
    """Every number of tokens; the forms take turns, since each is compiled. What a form rounds on the way costs a few steps of
    bfloat16."""
    product, forms = Skinny(CUDA), list(FORMS)
    for turn, tokens in enumerate(TOKENS, SHAPES.index((outs, ins))):
        arguments = made(forms[turn % len(forms)], tokens, ins, outs, tokens)
        close(product(**arguments), exact(arguments))
    assert not bool(product.counters.any())


LAYOUTS = [
    (Few(8, 1, 8), True),
    (Few(4, 2), False),
    (Tile(32, 64, 6, 3), True),
    (Tile(64, 128, 2, 4), False),
    (Tile(16, 128, 1, 5), True),
]


@pytest.mark.parametrize(("plan", "early"), LAYOUTS, ids=str)
def test_other_layouts(plan: Any, early: bool) -> None:
    """With and without the early start."""
    product = Skinny(CUDA)
    product.early = product.early and early
    for form in ("qkv", "gated", "out"):
        arguments = made(form, 4, 3072, 1024)
        fitting = plan._replace(splits=1) if isinstance(plan, Tile) and FORMS[form][1] else plan
        close(product(**arguments, plan=fitting), exact(arguments))


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of a call that ran before, and what its replays write."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_replays_of_a_chain_equal_calls_one_by_one(tokens: int) -> None:
    """Every kernel starts before its predecessor ends: 40 products that depend on each other, memory reused on the way, give
    the bits of products that wait. A missing wait shows as a difference in some replay."""
    early, late = Skinny(CUDA), Skinny(CUDA)
    late.early = False
    hidden, wide = 1024, 3072
    down, up = made("out", tokens, wide, hidden), made("gated", tokens, hidden, wide)
    weights = [[(torch.randn_like(w) / w.shape[1] ** 0.5) for w in (up["weight"], down["weight"])] for _ in range(20)]
    x, norm = down["residual"], up["norm"]
    torch.cuda.synchronize()

    def chain(product: Skinny, wait: bool) -> Tensor:
        y = x
        for a, b in weights:
            hot = product(y, a, norm=norm, gated=True)
            y = product(hot, b, residual=y)
            if wait:
                torch.cuda.synchronize()
        return y

    graph, result = captured(lambda: chain(early, False))
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(result, chain(late, True))
    assert bool(result.isfinite().all())


def test_a_token_does_not_depend_on_the_others() -> None:
    """B32: the same bits of row 0 for every company within one layout, though the tensor cores take 16 rows at once."""
    product = Skinny(CUDA)
    for tokens in (4, 16):
        arguments = made("gated", tokens, 1024, 3072)
        before = product(**arguments)[0].clone()
        arguments["x"][1:] = torch.nan
        assert torch.equal(product(**arguments)[0], before)
    split = made("out", 16, 3072, 1024)
    assert choose(16, 1024, 3072, False)._asdict()["splits"] > 1
    before = product(**split)
    assert all(torch.equal(product(**split), before) for _ in range(50)), "the parts are not added in a fixed order"


@pytest.mark.parametrize("tokens", range(1, MOST + 1))
def test_the_model_agrees(tokens: int) -> None:
    """Few tokens, fused and plain, in bfloat16: logits differ by rounding, and no more than plain bfloat16 from float32."""
    config = {
        **test_models.TINY,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    base = test_models.context(config, device=CUDA, dtype=torch.float32)
    half = replace(base, dtype=torch.bfloat16)
    models = [Qwen3(NoSettings(), context) for context in (base, half, replace(half, fused=True))]
    assert models[2]._skinny.fits(tokens)
    random = torch.Generator().manual_seed(tokens)
    weights = {
        name: (0.02 * torch.randn(*shape, generator=random) + float("norm" in name)).bfloat16().float()
        for name, shape in models[0].weights().items()
    }
    positions = torch.arange(tokens, device=CUDA)
    results = []
    for model in models:
        test_models.loaded(model, weights)
        torch.cuda.synchronize()
        with torch.inference_mode():
            hidden = model.forward(positions * 7 % 101, positions, test_models.full_attention(positions))
            results.append(model.logits(hidden).float())
    reference, direct, fused = results
    spread = float(reference.std())
    assert spread > 0.05
    error, allowed = (float((x - reference).abs().max()) / spread for x in (fused, direct))
    assert error < 2 * allowed + 0.01, f"{error:.3f} standard deviations, plain {allowed:.3f}"
