"""The elementwise and sampling kernels on a CUDA device at real sizes; `tests/test_triton_kernels.py` runs there, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.interpreter import DEVICE  # isort: skip  (before triton)

from core.interfaces import Rows, SamplingParams
from plugins.models.common import kernels as fused
from plugins.models.common.decoder import silu_mul
from plugins.models.common.norm import add_rms_norm, rms_norm
from tests import test_samplers as plain_tests
from tests.test_triton_kernels import NOTHING, make, sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device")]
VOCAB = 151_936
SIZES = [1, 7, 256, 16_384]
HOT = [{"temperature": 0.6}, {"temperature": 0}, {}, {"temperature": 1.5}]
MIXED = [*HOT, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05, "temperature": 0.7}, {}]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def agree(got: Tensor, want: Tensor, steps: int) -> None:
    """At most so many steps of bfloat16 apart, and nearly all values equal."""
    got, want = got.double(), want.double()
    assert bool(got.isfinite().all())
    assert bool(((got - want).abs() <= steps * 2.0**-7 * want.abs() + 1e-30).all())
    assert float((got == want).double().mean()) > 0.99


@pytest.mark.parametrize("width", [576, 1024, 4096])
@pytest.mark.parametrize("rows", SIZES)
def test_norms(rows: int, width: int) -> None:
    """Equal sums; norms within one step of the plain path and as near to float64 as bfloat16 allows."""
    x, residual, weight = random(rows, width), random(rows, width, scale=3.0), random(width)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    got, added = fused.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(added, total)
    agree(got, normed, 1)
    agree(fused.rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6), 1)
    t = total.double()
    exact = t * (t.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert float((got.double() - exact).norm() / exact.norm()) < 3e-3


@pytest.mark.parametrize("width", [1536, 3072, 12_288])
@pytest.mark.parametrize("rows", SIZES)
def test_silu(rows: int, width: int) -> None:
    x = random(rows, 2 * width, scale=3.0)
    got, gate, up = fused.silu_mul(x), *x.double().chunk(2, -1)
    agree(got, silu_mul(x.clone()), 3)
    exact = gate * gate.sigmoid() * up
    assert float((got.double() - exact).norm() / exact.norm()) < 5e-3


@pytest.mark.parametrize("rows", [1, 7, 131, 256])
def test_tokens_equal_the_plain_path(rows: int) -> None:
    """Greedy, hot and three filtered rows of a large vocabulary: the tokens of plain torch, there and on a CPU."""
    params = [MIXED[i] if i < 8 else HOT[i % 4] for i in range(rows)]
    logits = random(rows, VOCAB, scale=2.0)
    quick, plain = (make(VOCAB, *params, fused=flag) for flag in (True, False))
    drawn = sample(quick, logits)
    assert drawn == sample(plain, logits)
    host = plain_tests.make(VOCAB, *({**p, "seed": i * 0x123456789} for i, p in enumerate(params[:4])))
    assert drawn[:4] == plain_tests.sample(host, logits[:4].cpu(), positions=torch.arange(len(drawn[:4])) + 7).tolist()


@pytest.mark.parametrize("given", plain_tests.FILTERS, ids=str)
def test_draws_have_the_exact_distribution(given: dict) -> None:
    """Chi-squared of 20,000 draws on the device; a fit that bad comes once in 100,000 per case."""
    n, logits = 20_000, plain_tests.LOGITS
    drawn = sample(make(len(logits), given), torch.tensor(logits, dtype=torch.float32).expand(n, -1), [0] * n, range(n))
    counts = np.bincount(np.array(drawn), minlength=len(logits))
    assert plain_tests.chi_squared_odds(counts, plain_tests.distribution(logits, **given)) > 1e-5


@contextmanager
def never_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("use", ["fused", "plain"])
def test_replays_draw_what_eager_steps_draw(use: str) -> None:
    """A graph captured once serves all later rows of its variant: others filtered, other seeds, positions and logits; admit
    and plan reach it without waiting for the device."""
    count, vocab = len(MIXED), 30_000
    quick, slots = make(vocab, *MIXED, fused=use == "fused"), np.arange(count)
    logits, on_device = random(count, vocab, scale=2.0), torch.arange(count, device="cuda")
    positions = on_device + 5
    variant = quick.plan(slots)
    assert variant == (True, 4)
    rows = Rows(on_device, positions, None, variant)
    quick.sample(logits, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quick.sample(logits, rows).tokens
    seen = set()
    for turn in range(4):
        params = [{**MIXED[(i + turn) % count], "seed": 100 * turn + i} for i in range(count)]
        logits.copy_(random(count, vocab, scale=2.0))
        positions += 3
        with never_waiting():
            for slot, given in enumerate(params):
                quick.admit(slot, SamplingParams(**given), NOTHING)
            assert quick.plan(slots) == variant
            graph.replay()
        drawn = captured.tolist()
        assert drawn == quick.sample(logits, rows).tokens.tolist()
        assert drawn == sample(make(vocab, *params, fused=False), logits, positions=positions.cpu())
        seen.add(tuple(drawn))
    assert len(seen) == 4


def test_filtered_rows_are_the_same_in_any_company() -> None:
    """B32: one filtered row, or more than are sorted at once, in batches of several sizes."""
    sampler, logits = make(5000, *[{"top_p": 0.9}] * 40, *[{}] * 8), random(48, 5000, scale=2.0)
    whole = sample(sampler, logits)
    assert [sample(sampler, logits[i : i + 1], [i], [i + 7])[0] for i in (0, 39, 47)] == [whole[i] for i in (0, 39, 47)]
    assert sample(sampler, logits[35:45], range(35, 45), range(42, 52)) == whole[35:45]
