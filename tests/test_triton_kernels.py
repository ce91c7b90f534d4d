"""The elementwise and sampling kernels against the plain functions, in Triton's interpreter (compiled where there is a GPU)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.interpreter import DEVICE  # isort: skip  (before triton)

import triton
import triton.language as tl

from core.interfaces import Limits, NoSettings, Rows, SamplingParams
from plugins.models.common import kernels as fused
from plugins.models.common.decoder import silu_mul
from plugins.models.common.norm import add_rms_norm, rms_norm
from plugins.models.qwen3 import Qwen3
from plugins.samplers import kernels as sampling
from plugins.samplers.common import noise
from plugins.samplers.common.table import SlotTable
from plugins.samplers.greedy import Greedy
from plugins.samplers.gumbel import Gumbel
from tests import test_models

torch.set_num_threads(1)
INF, NAN = float("inf"), float("nan")
NOTHING = np.empty(0, np.int32)
SHAPES = [(1, 5), (9, 64), (17, 96), (3, 576), (3, 1024), (2, 1025)]
# The interpreter cuts bfloat16 off instead of rounding; there the step is one of 2**-7.
STEP = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", list(STEP), ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_norms_and_silu(rows: int, width: int, dtype: torch.dtype) -> None:
    """Any width, rows that do not fill the last program; the sum is rounded before it is normed, SiLU before the product."""
    x, residual, weight = (values(*s, dtype=dtype, seed=i) for i, s in enumerate([(rows, width), (rows, width), (width,)]))

    def close(got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got, want, atol=STEP[dtype], rtol=STEP[dtype])

    close(fused.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    total = x + residual
    normed, added = fused.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    close(added, total)
    close(normed, rms_norm(added, weight, 1e-5))
    packed = 4 * values(rows, 2 * width, dtype=dtype, seed=3)
    close(fused.silu_mul(packed), silu_mul(packed.clone()))


def test_half_precision_has_the_same_roundings() -> None:
    """float16, which the interpreter rounds correctly: all but a few of 5,000 values are equal, as they are not when the norm
    takes the unrounded sum or SiLU stays in float32."""
    x, residual, weight = values(5, 1000, dtype=torch.float16), values(5, 1000, dtype=torch.float16, seed=1), values(1000)
    weight = weight.half()
    for got, want in (
        (fused.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), add_rms_norm(x, residual, weight, 1e-5)),
        ([fused.silu_mul(torch.cat([x, residual], 1))], [silu_mul(torch.cat([x, residual], 1))]),
    ):
        assert all(int((a != b).sum()) < 15 for a, b in zip(got, want, strict=True))


def test_rows_do_not_touch_their_neighbours() -> None:
    """Results lie in the memory of the inputs; what lies behind them stays."""
    guarded = torch.full((6, 100), 7.0, device=DEVICE)
    x, residual, weight = guarded[:3].clone(), guarded[:5], torch.ones(100, device=DEVICE)
    normed, total = fused.add_rms_norm(x, residual[:3], weight, 1e-5)
    assert normed.data_ptr() == x.data_ptr() and total.data_ptr() == guarded.data_ptr()
    assert bool((guarded[:3] == 14).all()) and bool((guarded[3:] == 7).all())


def test_fused_model_agrees() -> None:
    """A whole model with `fused` set: the kernels are chosen by name, the logits are those of the plain model (B43)."""
    config = test_models.TINY
    plain = Qwen3(NoSettings(), test_models.context(config))
    weights = {name: 0.2 * values(*shape, seed=i).cpu() for i, (name, shape) in enumerate(plain.weights().items())}
    quick = Qwen3(NoSettings(), replace(test_models.context(config), fused=True, device=torch.device(DEVICE)))
    assert quick.norm._add_norm is fused.add_rms_norm
    tokens = torch.arange(11) * 7 % config["vocab_size"]
    attends = test_models.full_attention(torch.arange(11)), test_models.full_attention(torch.arange(11, device=DEVICE))
    results = []
    for model, attend in zip((plain, quick), attends, strict=True):
        test_models.loaded(model, weights)
        device = model.context.device
        with torch.inference_mode():
            hidden = model.forward(tokens.to(device), torch.arange(11, device=device), attend)
            results.append(model.logits(hidden).cpu())
    assert results[0].std() > 0.05
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=0)


# The sampler


@triton.jit
def _noise_of(bits, noise_out, bound_out, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    word = tl.load(bits + at).to(tl.uint32, bitcast=True)
    tl.store(noise_out + at, sampling._gumbel(word))
    tl.store(bound_out + at, sampling._ceiling(word))


def test_noise_has_equal_bits_and_a_bound_above_it() -> None:
    """Steps 3 and 4 of the recipe at both ends, at powers of two and on 60,000 words; the bound that skips tiles is never
    below the noise, nor far above where the noise is large."""
    rng = np.random.default_rng(0)
    edges = [(1 << k) + d for k in range(32) for d in (-2, -1, 0, 1, 2)] + [*range(1000), *range(2**32 - 1000, 2**32)]
    words = np.array([x % 2**32 for x in edges] + rng.integers(0, 2**32, 1 << 16).tolist(), np.uint64)[: 1 << 16]
    bits = torch.from_numpy(words.astype(np.uint32).view(np.int32)).to(DEVICE)
    got, bound = torch.empty(2, 1 << 16, device=DEVICE)
    _noise_of[(4,)](bits, got, bound, 1 << 14, enable_fp_fusion=False)  # pyright: ignore[reportCallIssue]
    want = noise.to_gumbel(bits)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    assert bool((bound > want + 5e-4).all())
    assert float((bound - want)[want > 3].max()) < 0.1


def make(vocab: int, *params: dict[str, Any], fused: bool = True, cls: Any = Gumbel) -> Any:
    limits = Limits(max(len(params), 1), 40_000, 100)
    context = SimpleNamespace(limits=limits, device=torch.device(DEVICE), vocab_size=vocab, compile=False, fused=fused)
    made = cls(NoSettings(), context)
    for slot, given in enumerate(params):
        made.admit(slot, SamplingParams(**{"seed": slot * 0x123456789, **given}), NOTHING)
    return made


def sample(sampler: Any, logits: Tensor, slots: Any = None, positions: Any = None, masks: Tensor | None = None) -> list[int]:
    count = len(logits)
    slots = torch.arange(count) if slots is None else torch.as_tensor(slots)
    positions = torch.arange(count) + 7 if positions is None else torch.as_tensor(positions)
    masks = masks if masks is None else masks.to(DEVICE)
    return sampler.sample(logits.to(DEVICE), Rows(slots.to(DEVICE), positions.to(DEVICE), masks)).tokens.tolist()


ROWS = [{}, {"temperature": 0}, {"temperature": 0.3}, {"top_k": 5}, {"temperature": 4, "top_p": 0.9}, {"min_p": 0.1}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "programs"), [(5, 1024), (64, 1024), (2500, 1024), (9001, 12)])
def test_tokens_equal_the_plain_path(vocab: int, programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, hot and filtered rows; vocabularies that end inside a tile, one and several turns per program (B28, B32)."""
    monkeypatch.setattr(sampling, "PROGRAMS", programs)
    plain, quick = (make(vocab, *ROWS, fused=flag) for flag in (False, True))
    for seed, scale in enumerate((0.01, 1.0, 8.0)):
        logits = values(len(ROWS), vocab, seed=seed).mul(scale).to(dtype)
        assert sample(quick, logits) == sample(plain, logits)
    assert sample(make(vocab, cls=Greedy), logits) == logits.argmax(-1).tolist()


def test_a_row_is_the_same_alone_and_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """B32: neighbours, the number of programs per row and strided logits change nothing."""
    sampler, logits, drawn = make(9000, *[{"temperature": 0.8}] * 3), values(3, 9100)[:, :9000], []
    for programs in (1, 6, 1024):
        monkeypatch.setattr(sampling, "PROGRAMS", programs)
        drawn.append(sample(sampler, logits))
    assert drawn[0] == drawn[1] == drawn[2]
    assert [sample(sampler, logits[i : i + 1], [i], [i + 7])[0] for i in range(3)] == drawn[0]


def test_ties_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tile, in the next turn of a program, in another program; zeros of both signs are equal."""
    for programs in (1, 1024):
        monkeypatch.setattr(sampling, "PROGRAMS", programs)
        logits = torch.full((3, 6000), -1.0)
        logits[0, [4, 9, 2050, 5999]] = 3.0
        logits[1, 2100], logits[1, 4500] = -0.0, 0.0
        for cls, given in ((Greedy, {}), (Gumbel, {"temperature": 0})):
            assert sample(make(6000, *[given] * 3, cls=cls), logits) == [4, 2100, 0]


@pytest.mark.parametrize(("cls", "given"), [(Greedy, {}), *((Gumbel, g) for g in ({"temperature": 0}, {}, {"top_k": 3}))])
def test_broken_rows_and_masks(cls: Any, given: dict[str, Any]) -> None:
    """B34: NaN (masked or not, after the best or before), +inf, no finite logit, nothing allowed: -1, others unharmed; a
    masked +inf does no harm; masked tokens are not drawn."""
    vocab = 4500
    good = values(vocab).cpu()
    rows, masks = good.repeat(9, 1), torch.ones(9, vocab, dtype=torch.bool)
    rows[0, 4400], rows[1, 3], rows[2, 2500], rows[3] = NAN, NAN, INF, -INF
    rows[4, 7], masks[4, 7], masks[5] = NAN, False, False
    rows[6, 7], masks[6, 7] = INF, False
    masks[7, : vocab - 3] = False
    sampler = make(vocab, *[given] * 9, cls=cls)
    drawn = sample(sampler, rows, masks=masks)
    plain = make(vocab, *[given] * 9, cls=cls, fused=False)
    assert drawn[:6] == [-1] * 6 and drawn == sample(plain, rows, masks=masks)
    assert drawn[6] >= 0 and drawn[7] >= vocab - 3 and drawn[8] == sample(sampler, rows[8:], [8], [15])[0]


def test_slot_table_sends_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows carry their own slot number, so one copy of any of them lands in its place; a clean table sends nothing."""
    sent = []
    table = SlotTable(6, (0.0, 2.0, -INF, 0.0), torch.device("cpu"))
    table.tensor = table.tensor.clone()  # as on a device: other memory
    monkeypatch.setattr("plugins.samplers.common.table.on_host", lambda tensor: False)
    monkeypatch.setattr("plugins.samplers.common.table.staged", lambda array: sent.append(array) or torch.from_numpy(array))
    table.flush()
    for slot in (5, 2, 5):
        table.floats[slot], table.seeds[slot] = slot, 2**40 + slot
        table.change(slot)
    assert not sent and float(table.tensor.view(torch.float32)[5, 0]) == 0.0
    table.flush()
    table.flush()
    assert len(sent) == 1 and len(sent[0]) == 2
    assert torch.equal(table.tensor, torch.from_numpy(table._host))
