"""Samplers: exact distributions, streams that depend on nothing but seed and position, and the noise beneath them.

Seeds are fixed: a test that passes keeps passing. Odds of a false alarm are those of the first run after a change of the noise.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.interfaces import Limits, NoSettings, Rows
from core.params import SamplingParams
from plugins.samplers import entry
from plugins.samplers import gumbel as module
from plugins.samplers.common import noise
from plugins.samplers.greedy import Greedy
from plugins.samplers.gumbel import Gumbel

torch.set_num_threads(1)
INF, NAN = float("inf"), float("nan")
NOTHING = np.empty(0, np.int32)


def make(vocab, *params, cls: Any = Gumbel, compile=False):
    """A sampler with one slot per given dict of parameters, seeded by slot unless they say otherwise."""
    limits = Limits(max(len(params), 1), 100, 100)
    context = SimpleNamespace(limits=limits, device=torch.device("cpu"), vocab_size=vocab, compile=compile, fused=False)
    made = cls(NoSettings(), context)
    for slot, given in enumerate(params):
        made.admit(slot, SamplingParams(**{"seed": slot, **given}), NOTHING)
    return made


def sample(sampler, logits, slots=None, positions=None, masks=None, variant=None):
    count = len(logits)
    slots = torch.arange(count) if slots is None else torch.as_tensor(slots)
    positions = torch.full((count,), 7) if positions is None else torch.as_tensor(positions)
    return sampler.sample(logits, Rows(slots, positions, masks, variant)).tokens


def gumbel(seeds, positions, tokens):
    seeds, positions = (torch.as_tensor(x, dtype=torch.int64) for x in (seeds, positions))
    return noise.gumbel(seeds, positions, torch.as_tensor(tokens, dtype=torch.int32))


# The noise


def exact(bits):
    """float64, from uint32 bits."""
    return -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32))


def test_noise_is_accurate_everywhere():
    """Absolute error below 1e-5 at both ends, in the middle, at powers of two, on the first and on a random million."""
    rng = np.random.default_rng(0)
    edges = [2**k + d for k in range(32) for d in (-2, -1, 0, 1, 2) if 0 <= 2**k + d < 2**32]
    parts = [edges, np.arange(1 << 20), 2**32 - 1 - np.arange(1 << 20), rng.integers(0, 2**32, 1 << 20)]
    parts += [rng.integers(0, 2**k, 10_000) for k in range(1, 32)]
    bits = np.concatenate([np.asarray(x, np.int64) for x in parts]).astype(np.uint32)
    got = noise.to_gumbel(torch.from_numpy(bits.view(np.int32))).double().numpy()
    assert np.abs(got - exact(bits)).max() < 1e-5
    assert -3.2 < got.min() < got.max() < 22.9


def twin(seed, position, tokens):
    """The recipe in the docstring of noise.py once more, in numpy's uint32 and float32."""
    word, one = np.uint32, np.float32(1)

    def finish(x):
        x = (x ^ (x >> word(15))) * word(0x846CA68B)
        return x ^ (x >> word(16))

    def mix(x):
        return finish((x ^ (x >> word(16))) * word(0x7FEB352D))

    def neglog(y, d):
        e = (y.view(np.int32) - np.int32(0x3F3504F3)) >> np.int32(23)
        f = (np.ldexp(y, -e) - one) + d
        p = np.zeros_like(f)
        for c in reversed(noise.Q):
            p = p * f + np.float32(c)
        return e.astype(np.float32) * np.float32(-noise.LN2) - f * (f * p + one)

    low, high, pos = (np.array([x], word) for x in (seed & 0xFFFFFFFF, seed >> 32, position))
    first = mix(mix(mix(low + word(0x9E3779B9)) ^ high) ^ pos)
    second = mix(mix(mix(pos + word(0x3C6EF372)) ^ high) ^ low)
    x = tokens.astype(word) * word(0x9E3779B1) + first
    x = (x ^ (x >> word(16))) * word(0x7FEB352D)
    x = finish(x ^ second)
    upper = x >> word(31) == 1
    t = (np.where(upper, ~x, x).astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    y = np.where(upper, t, one - t)
    return neglog(neglog(y, np.where(upper, np.float32(0), (one - y) - t)), np.float32(0))


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (1, 2), (2**32 - 1, 5), (2**63 - 1, 2**31 - 1), (0x9E3779B97F4A7C15 >> 1, 4095)]
)
def test_noise_has_the_bits_of_its_recipe(seed, position):
    """Whoever writes a kernel from the docstring gets equal bits; 20,000 tokens each, ids beyond 2**24 too."""
    tokens = np.concatenate([np.arange(10_000), 2**27 + np.arange(10_000)])
    with np.errstate(over="ignore"):
        want = twin(seed, position, tokens)
    assert np.array_equal(gumbel([seed], [position], tokens)[0].numpy().view(np.int32), want.view(np.int32))


def test_noise_is_pure():
    """Values do not depend on which other rows and tokens are asked for."""
    seeds, positions = torch.arange(5) * 12345, torch.arange(5) + 3
    whole = gumbel(seeds, positions, torch.arange(1000))
    ids = torch.tensor([[5, 999, 0], [1, 1, 2]])
    assert torch.equal(gumbel(seeds[3:], positions[3:], ids), whole[3:].gather(1, ids))
    assert torch.equal(gumbel(seeds[2:3], positions[2:3], torch.arange(1000)), whole[2:3])


def kolmogorov(uniforms):
    """sqrt(n) * largest distance to the uniform distribution."""
    x, n = np.sort(uniforms), len(uniforms)
    return max((np.arange(1, n + 1) / n - x).max(), (x - np.arange(n) / n).max()) * np.sqrt(n)


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds", "high seeds"])
def test_noise_is_gumbel_distributed(axis):
    """Kolmogorov-Smirnov on a million values along each input; 2.7 is passed by chance once in a million."""
    many = torch.arange(1000)
    seeds, positions = {
        "tokens": ([1], [1]),
        "positions": (torch.zeros(1000), many),
        "seeds": (many, torch.ones(1000)),
        "high seeds": (many << 32, torch.ones(1000)),
    }[axis]
    values = gumbel(seeds, positions, torch.arange(1_000_000 if axis == "tokens" else 1000)).double().numpy().ravel()
    assert len(values) == 1_000_000
    assert kolmogorov(np.exp(-np.exp(-values))) < 2.7


@pytest.mark.parametrize("lag", [1, 2, 64, 1024])
def test_neighbouring_inputs_are_uncorrelated(lag):
    """Correlation of uniforms over tokens, positions, seeds and both at once (the same sum of seed and position, too), with
    2**19 pairs each. |r| * sqrt(n) above 5: once in 1.7 million per comparison, and there are 20."""
    n = 512
    base = torch.arange(n)

    def uniforms(seeds, positions, tokens):
        x = gumbel(seeds, positions, tokens).double()
        return torch.exp(-torch.exp(-x)).flatten() - 0.5

    same, tokens = torch.full((n,), 3), torch.arange(1024)
    here = uniforms(base * 2048, same, tokens)
    others = (
        uniforms(base * 2048, same, tokens + lag),
        uniforms(base * 2048, same + lag, tokens),
        uniforms(base * 2048 + lag, same, tokens),
        uniforms(base * 2048 + (lag << 32), same, tokens),
        uniforms(base * 2048 - lag + 4096, same + lag, tokens),
    )
    for other in others:
        assert abs(float((here * other).mean())) * 12 * np.sqrt(len(here)) < 5


def test_every_input_bit_changes_half_of_the_bits():
    """Avalanche: each bit of seed and position flips each output bit in 45 to 55 % of 20,000 cases (seven sigma is 2.5 %)."""
    rng = np.random.default_rng(0)
    seeds, positions = torch.from_numpy(rng.integers(0, 2**62, 20_000)), torch.from_numpy(rng.integers(0, 2**30, 20_000))
    tokens = torch.tensor([77], dtype=torch.int32)
    here = noise.bits(seeds, positions, tokens)
    flips = [(seeds ^ (1 << k), positions) for k in range(62)] + [(seeds, positions ^ (1 << k)) for k in range(30)]
    for changed in flips:
        different = noise.bits(*changed, tokens) ^ here
        rates = torch.stack([((different >> k) & 1).double().mean() for k in range(32)])
        assert 0.45 < float(rates.min()) < float(rates.max()) < 0.55


def test_large_vocabularies_are_drawn_evenly():
    """150,000 equal logits: granular noise would tie and favour low ids. Ids of 400 draws are uniform, and the winners' noise
    has the distribution of a maximum (V * exp(-G) is exponential). Kolmogorov's 2.7: once in a million each."""
    vocab, rows = 150_000, 400
    drawn = sample(make(vocab, {}), torch.zeros(rows, vocab), [0] * rows, range(rows)).numpy()
    assert kolmogorov((drawn + 0.5) / vocab) < 2.7
    assert len(set(drawn.tolist())) >= rows - 8  # 0.5 equal pairs are expected
    best = gumbel([0] * rows, range(rows), torch.from_numpy(drawn)[:, None])[:, 0].double().numpy()
    assert kolmogorov(np.exp(-vocab * np.exp(-best))) < 2.7


# Distributions

LOGITS = np.array([0.3, -1.0, 2.0, 1.9, 0.0, -3.0, 1.2, 1.2, -0.4, 0.8, -8.0, 1.5])


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The definition in float64: temperature, top-k, top-p on the renormalised rest, min-p; ties by id."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    p = np.exp((logits - logits.max()) / temperature)[order]
    if top_k:
        p[top_k:] = 0
    p /= p.sum()
    p[np.concatenate([[0.0], p.cumsum()[:-1]]) >= top_p] = 0
    p[p < min_p * p[0]] = 0
    out = np.empty_like(p)
    out[order] = p / p.sum()
    return out


def chi_squared_odds(counts, p):
    """The probability of a fit at least as bad; 0 for a count where nothing may be."""
    if counts[p == 0].any():
        return 0.0
    counts, p = counts[p > 0], p[p > 0]
    expected = p * counts.sum()
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(p) - 1
    return 1.0 if freedom == 0 else float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)))


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_k": 1},
    {"top_k": 5, "temperature": 1.7},
    {"top_p": 0.6},
    {"top_p": 0.9, "temperature": 0.5},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.3, "temperature": 1.3},
    {"top_p": 0.8, "min_p": 0.5, "temperature": 2.0},
]


@pytest.mark.parametrize("given", FILTERS, ids=str)
@pytest.mark.parametrize("vary", ["positions", "seeds"])
def test_draws_have_the_exact_distribution(given, vary):
    """Chi-squared of 40,000 draws over consecutive positions of one seed, or over consecutive seeds at one position. A fit
    that bad comes once in 100,000: 28 cases give a false alarm once in 3,600 changes of the noise."""
    n = 40_000 if vary == "positions" else 8_000
    logits = torch.tensor(LOGITS, dtype=torch.float32).expand(n, -1)
    if vary == "positions":
        drawn = sample(make(len(LOGITS), given), logits, [0] * n, range(n))
    else:
        drawn = sample(make(len(LOGITS), *[given] * n), logits)
    counts = np.bincount(drawn.numpy(), minlength=len(LOGITS))
    assert chi_squared_odds(counts, distribution(LOGITS, **given)) > 1e-5


def test_top_p_keeps_the_token_that_crosses():
    """B29: .1 .2 .3 .4: 0.6 leaves the last two, 1 leaves all, a tiny one leaves one. Equal logits are ranked by id."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(2000, -1)
    for top_p, kept in ((0.6, {2, 3}), (0.3, {3}), (0.75, {1, 2, 3}), (1.0, {0, 1, 2, 3}), (1e-12, {3})):
        drawn = sample(make(4, {"top_p": top_p}), p, [0] * 2000, range(2000))
        assert set(drawn.tolist()) == kept
    flat = torch.zeros(500, 8)
    for given, kept in (({"top_k": 3}, {0, 1, 2}), ({"top_p": 0.3}, {0, 1, 2}), ({"min_p": 1.0}, set(range(8)))):
        assert set(sample(make(8, given), flat, [0] * 500, range(500)).tolist()) == kept


@pytest.mark.parametrize("given", FILTERS[3:], ids=str)
def test_ranking_few_tokens_or_all_is_the_same(given, monkeypatch):
    """Rows whose filters keep more than the tokens ranked at first fall back to the whole vocabulary, others do not. Found:
    top-p after a top-k wider than what was ranked took the ranked part for the whole."""
    rng = np.random.default_rng(1)
    scales = torch.linspace(0.02, 4, 64)[:, None]
    logits = torch.from_numpy(rng.standard_normal((64, 600)).astype(np.float32)) * scales
    sampler, results = make(600, given), []
    for ranked in (600, 32, 4, 1):
        monkeypatch.setattr(module, "RANKED", ranked)
        results.append(sample(sampler, logits, [0] * 64, range(64)).tolist())
    assert results.count(results[0]) == 4


@pytest.mark.parametrize("given", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.5}, {"temperature": 0}], ids=str)
def test_masked_tokens_are_never_drawn(given):
    """Masks act before the filters: the distribution is that of the logits without the masked tokens."""
    n, allowed = 8000, np.array([i in (0, 1, 4, 6, 7, 9, 11) for i in range(len(LOGITS))])
    logits, masks = torch.tensor(LOGITS, dtype=torch.float32).expand(n, -1), torch.from_numpy(allowed).expand(n, -1)
    drawn = sample(make(len(LOGITS), given), logits, [0] * n, range(n), masks)
    counts = np.bincount(drawn.numpy(), minlength=len(LOGITS))
    left = np.where(allowed, LOGITS, -INF)
    want = np.eye(len(LOGITS))[left.argmax()] if given.get("temperature") == 0 else distribution(left, **given)
    assert chi_squared_odds(counts, want) > 1e-5


# Rows

MIXED = [
    {},
    {"temperature": 0},
    {"top_k": 40},
    {"top_p": 0.95},
    {"temperature": 1e-9},
    {"min_p": 0.02},
    {"temperature": 1.4, "top_p": 0.999},
]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_alone_and_in_any_batch(threads):
    """B32: any batch, order and neighbours, half-precision logits too; a vocabulary so large that threads share one row."""
    vocab, rng = 40_000, np.random.default_rng(2)
    params = [{**MIXED[i % len(MIXED)], "seed": 99} for i in range(14)]
    sampler, positions = make(vocab, *params), torch.arange(14) * 3
    values = torch.from_numpy(rng.standard_normal((14, vocab)).astype(np.float32)) * torch.linspace(0.5, 6, 14)[:, None]
    torch.set_num_threads(threads)
    try:
        for logits in (values, values.bfloat16())[: 3 - threads]:
            alone = [int(sample(sampler, logits[i : i + 1], [i], positions[i : i + 1])[0]) for i in range(14)]
            for size in (14, 5, 2):
                chosen = torch.from_numpy(rng.permutation(14)[:size])
                assert sample(sampler, logits[chosen], chosen, positions[chosen]).tolist() == [alone[i] for i in chosen]
    finally:
        torch.set_num_threads(1)


def test_temperature_zero_is_argmax_and_leaves_others_alone():
    """B28: 0 and 1e-9 equal argmax and top_k=1; the hot neighbours draw what they draw without them."""
    logits = torch.from_numpy(np.random.default_rng(3).standard_normal((6, 50)).astype(np.float32))
    params = [{"temperature": 0}, {}, {"temperature": 1e-9}, {"top_k": 1}, {"top_p": 0.9}, {"temperature": 1e-5}]
    sampler = make(50, *params)
    drawn = sample(sampler, logits)
    best = logits.argmax(-1)
    assert drawn[[0, 2, 3, 5]].tolist() == best[[0, 2, 3, 5]].tolist()
    assert drawn[[1, 4]].tolist() == sample(sampler, logits[[1, 4]], [1, 4]).tolist()
    assert sample(make(50, cls=Greedy), logits).tolist() == best.tolist()


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0, "top_p": 1 - 1e-9}, {"temperature": 1e50}, {"temperature": 1.0, "min_p": 1e-60}], ids=str
)
def test_values_that_vanish_in_float32(params):
    """Such a row must be of one kind on host and device: it was argmax alone and random beside a hot row (B32)."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    alone, both = make(300, {**params, "seed": 3}), make(300, {**params, "seed": 3}, {"temperature": 1.0, "seed": 9})
    drawn = [int(sample(alone, logits, positions=[i])[0]) for i in range(40)]
    beside = [int(sample(both, logits.repeat(2, 1), positions=[i, i])[0]) for i in range(40)]
    assert drawn == beside and len(set(drawn)) > 20


@pytest.mark.parametrize("cls", [Gumbel, Greedy])
def test_ties_go_to_the_lowest_id(cls):
    """For greedy rows and for top_k=1, which must equal them."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0], [5.0, 5.0, 5.0, 5.0, 5.0], [-0.0, 0.0, -1.0, -1.0, 0.0]])
    for given in ({"temperature": 0}, {"top_k": 1}):
        assert sample(make(5, *[given] * 3, cls=cls), logits).tolist() == [1, 0, 0]


@pytest.mark.parametrize("cls", [Gumbel, Greedy])
@pytest.mark.parametrize("given", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_rows_without_a_finite_logit_are_refused(cls, given):
    """B34: NaN anywhere (masked or not), all -inf, a maximum of +inf, or nothing allowed: -1; the others are unharmed."""
    good = torch.linspace(-1, 1, 6)
    broken = [torch.full((6,), NAN), good.clone(), torch.full((6,), -INF), good.clone(), good.clone(), good.clone()]
    broken[1][0], broken[3][2], broken[4][5] = NAN, INF, NAN
    logits = torch.stack([good, *broken, good])
    masks = torch.ones(8, 6, dtype=torch.bool)
    masks[5, 5], masks[6] = False, False
    sampler = make(6, *[given] * 8, cls=cls)
    drawn = sample(sampler, logits, masks=masks)
    alone = [int(sample(sampler, logits[i : i + 1], [i])[0]) for i in (0, 7)]
    assert drawn.tolist() == [alone[0], *[-1] * 6, alone[1]]
    assert min(alone) >= 0
    partly = torch.where(torch.arange(6) < 5, -INF, good)[None]
    assert sample(sampler, partly, [0]).tolist() == [5]


def test_plan_says_which_work_the_rows_need():
    """(hot without filters, filtered) from host copies; the slot for padding is greedy; a slot forgets its former request."""
    sampler = make(50, {"temperature": 0}, {}, {"top_k": 3}, {"top_p": 1.0, "top_k": 50}, {"temperature": 0, "top_k": 3})
    answers = {slot: sampler.plan(np.array([slot])) for slot in range(6)}
    assert answers == {
        0: (False, False),
        1: (True, False),
        2: (False, True),
        3: (True, False),
        4: (False, False),
        5: (False, False),
    }
    assert sampler.plan(np.array([0, 1, 2])) == (True, True)
    logits = torch.from_numpy(np.random.default_rng(4).standard_normal((6, 50)).astype(np.float32))
    assert sample(sampler, logits).tolist() == sample(sampler, logits, variant=(True, True)).tolist()
    sampler.admit(2, SamplingParams(seed=1), NOTHING)
    assert sampler.plan(np.array([2])) == (True, False)
    assert sample(sampler, logits[:1], [2]).tolist() == sample(sampler, logits[:1], [1]).tolist()  # both have seed 1 now


def test_positions_and_seeds_give_new_draws():
    """One request draws afresh at each position; two requests of different seeds differ; equal seeds agree."""
    logits = torch.zeros(100, 1000)
    sampler = make(1000, {"seed": 5}, {"seed": 6}, {"seed": 5}, {"seed": 5 + 2**40})
    draws = [sample(sampler, logits, [slot] * 100, range(100)).tolist() for slot in range(4)]
    assert len(set(draws[0])) > 80
    assert draws[0] == draws[2]
    assert sum(a == b for a, b in zip(draws[0], draws[1], strict=True)) < 10
    assert sum(a == b for a, b in zip(draws[0], draws[3], strict=True)) < 10


def test_declarations():
    """greedy accepts no other temperature than 0; both targets exist."""
    found = {c.name: c for c in entry.inferlab_components()}
    allowed = found["greedy"].capabilities["sampling.temperature"]
    assert [allowed.ok(t) for t in (0, 0.0, 0.6)] == [True, True, False]
    assert {c.target for c in found.values()} == {f"{cls.__module__}:{cls.__name__}" for cls in (Gumbel, Greedy)}


@pytest.mark.nightly
def test_compiled_draws_equal_the_plain_ones():
    """compile=True fuses the noise; no bit may change. Nightly: the compiler takes a minute."""
    logits = torch.from_numpy(np.random.default_rng(5).standard_normal((9, 30_000)).astype(np.float32))
    plain, compiled = (make(30_000, *[{"temperature": 0.7}] * 9, compile=flag) for flag in (False, True))
    for count in (1, 9):
        assert sample(compiled, logits[:count]).tolist() == sample(plain, logits[:count]).tolist()
    args = torch.arange(9), torch.arange(9), torch.arange(30_000, dtype=torch.int32)
    assert torch.equal(torch.compile(noise.gumbel, dynamic=True)(*args), noise.gumbel(*args))
