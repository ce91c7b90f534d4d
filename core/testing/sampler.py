"""Contract suite for samplers: exact distributions, and rows that depend on nothing but their logits, seed and position.

Seeds are fixed, so that a sampler that passes keeps passing. Each comparison with a distribution rejects a right sampler once
in 100,000 changes of its noise (`ERROR`).

A sampler with a parameter of its own (its component's `request_settings`) adds values to try in `params` and overrides
`definition`, which gets the request's history too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from core.interfaces import Array, DeviceContext, Limits, Rows, Sampler, SamplingParams
from core.parallel import Solo
from core.testing.distributions import chi_squared_odds, distribution
from core.testing.suite import Suite

ERROR = 1e-5
LOGITS = np.array([0.3, -1.0, 2.0, 1.9, 0.0, -3.0, 1.2, 1.25, -0.4, 0.8, -8.0, 1.5])
VOCAB = len(LOGITS)
HISTORY = (2, 7, 7, 9)  # tokens of the request before the draw
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.3, "temperature": 1.3},
    {"temperature": 0},
)
NAN, INF = float("nan"), float("inf")


class SamplerSuite(Suite):
    """Whatever a request may ask for by the declared capabilities (`sampling.NAME`) is drawn as it is defined."""

    kind = "sampler"
    draws: ClassVar[int] = 10_000  # per comparison with a distribution
    params: ClassVar[Sequence[Mapping[str, Any]]] = ()  # values of the sampler's own parameters to try

    def definition(self, logits: Array, params: SamplingParams, history: Sequence[int]) -> Array:
        """logits [V] float64 -> probabilities [V] of the next token; `history` is empty without `wants_history`."""
        return distribution(logits, params)

    @classmethod
    def cases(cls) -> list[dict[str, Any]]:
        """Parameters to try: those of CASES that the declaration allows, and the sampler's own."""
        return [case for case in map(dict, (*CASES, *cls.params)) if cls.allows(case)]

    @classmethod
    def allows(cls, case: Mapping[str, Any]) -> bool:
        given = {"temperature": 1.0, **case}
        limits = cls.declared().capabilities
        return all(limits[f"sampling.{k}"].ok(v) for k, v in given.items() if f"sampling.{k}" in limits)

    @classmethod
    def case(cls) -> dict[str, Any]:
        """The plainest one that is allowed; a random draw if there is one."""
        return next(iter(cls.cases()), {"temperature": 0})

    @classmethod
    def random(cls) -> dict[str, Any]:
        """A case that draws at random, or skip."""
        hot = [case for case in cls.cases() if case.get("temperature", 1.0) > 0 and case.get("top_k") != 1]
        if not hot:
            pytest.skip("declares that it draws nothing at random")
        return hot[0]

    @classmethod
    def wants_history(cls) -> bool:
        return bool(cls.declared().provides.get("wants_history"))

    def parameters(self, case: Mapping[str, Any], seed: int = 0) -> SamplingParams:
        """As the engine hands them on: the sampler's own ones complete and typed."""
        params, own = SamplingParams(**{"seed": seed, **case}), self.declared().request_settings
        return params if own is None else SamplingParams(**{"seed": seed, **case, **vars(own(**params.extra))})

    def build(self, slots: int, vocab: int = VOCAB) -> Sampler:
        context = DeviceContext(
            limits=Limits(slots, max(slots, 100), 4096),
            device=torch.device("cpu"),
            dtype=torch.float32,
            config={"vocab_size": vocab},
            vocab_size=vocab,
            parallel=Solo(),
            block_size=16,
        )
        return self.target()(self.new_settings(), context)

    def admitted(self, cases: Sequence[Mapping[str, Any]], vocab: int = VOCAB, history: Sequence[int] = HISTORY) -> Sampler:
        """A sampler with one slot per case, seeded by slot unless the case says otherwise."""
        sampler = self.build(max(len(cases), 1), vocab)
        known = np.array(history if self.wants_history() else (), np.int32)
        ready: dict[str, SamplingParams] = {}
        for slot, case in enumerate(cases):
            params = ready.setdefault(repr(case), self.parameters(case))
            sampler.admit(slot, params if "seed" in case else params.with_seed(slot), known)
        return sampler

    @staticmethod
    def draw(sampler: Sampler, logits: Tensor, slots: Any = None, positions: Any = None, masks: Tensor | None = None) -> Tensor:
        """[S, V] -> tokens [S]; as the runner asks: `plan` first, on the host."""
        rows = torch.arange(len(logits)) if slots is None else torch.as_tensor(slots)
        where = torch.full((len(logits),), 7) if positions is None else torch.as_tensor(positions)
        answer = sampler.sample(logits, Rows(rows, where, masks, sampler.plan(rows.numpy()))).tokens
        assert answer.shape == (len(logits),) and answer.dtype == torch.int64, f"tokens must be int64 [S], got {answer.dtype}"
        return answer

    def count(self, case: Mapping[str, Any], masks: Tensor | None = None, over: str = "seeds") -> Array:
        """[V] how often each token was drawn, over consecutive seeds, or positions of one request."""
        n = self.draws if over == "positions" else self.draws // 5
        logits = torch.tensor(LOGITS, dtype=torch.float32).expand(n, -1)
        sampler = self.admitted([case] * (1 if over == "positions" else n))
        slots, positions = (torch.zeros(n).long(), torch.arange(n)) if over == "positions" else (None, None)
        drawn = self.draw(sampler, logits, slots, positions, None if masks is None else masks.expand(n, -1))
        return np.bincount(drawn.numpy(), minlength=VOCAB)

    def wanted(self, case: Mapping[str, Any], logits: Array = LOGITS) -> Array:
        return self.definition(logits, self.parameters(case), HISTORY if self.wants_history() else ())

    @staticmethod
    def check(counts: Array, wanted: Array, case: Any) -> None:
        odds = chi_squared_odds(counts, wanted)
        shares = ", ".join(
            f"{i}: {c / counts.sum():.3f} ({p:.3f})" for i, (c, p) in enumerate(zip(counts, wanted, strict=True))
        )
        assert odds > ERROR, (
            f"{case or 'no filter'}: a fit that bad comes once in {1 / max(odds, 1e-300):.0g}; drawn (right): {shares}"
        )

    def test_draws_have_the_exact_distribution(self) -> None:
        """Over consecutive seeds, and over consecutive positions of one request."""
        for case in self.cases():
            self.check(self.count(case), self.wanted(case), case)
            if not self.wants_history():  # with it each draw changes the next one
                self.check(self.count(case, over="positions"), self.wanted(case), case)

    def test_top_k_keeps_k_tokens(self) -> None:
        """The k likeliest, no more and no less."""
        if not self.allows({"top_k": 3}):
            pytest.skip("declares no top_k")
        for k in (1, 3, VOCAB):
            kept = set(np.flatnonzero(self.count({"top_k": k, "temperature": 3.0})).tolist())
            assert kept <= set(np.argsort(-LOGITS)[:k]), f"top_k={k}: drawn were {sorted(kept)}"
            assert k == VOCAB or len(kept) == k, f"top_k={k}: drawn were {sorted(kept)}"

    def test_top_p_keeps_the_token_that_crosses(self) -> None:
        """B29: .1 .2 .3 .4: with 0.6 the last two stay, with 1 all, with a tiny one the likeliest."""
        if not self.allows({"top_p": 0.5}):
            pytest.skip("declares no top_p")
        if self.params or self.wants_history():
            pytest.skip("has parameters of its own: test_draws_have_the_exact_distribution compares the whole distribution")
        logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(2000, -1)
        for top_p, kept in ((0.6, {2, 3}), (0.3, {3}), (0.75, {1, 2, 3}), (1.0, {0, 1, 2, 3}), (1e-12, {3})):
            sampler = self.admitted([{"top_p": top_p}] * 2000, 4)
            drawn = set(self.draw(sampler, logits).tolist())
            assert drawn == kept, f"top_p={top_p} of .1 .2 .3 .4: drawn were {drawn}, right: {kept}"

    def test_greedy_rows_take_the_likeliest_token(self) -> None:
        """B28: temperature 0 and 1e-9 are argmax, beside hot rows too."""
        logits = torch.from_numpy(np.random.default_rng(3).standard_normal((6, VOCAB)).astype(np.float32))
        for cold in filter(self.allows, ({"temperature": 0}, {"temperature": 1e-9})):
            cases = [cold, self.case(), cold, self.case(), cold, cold]
            drawn = self.draw(self.admitted(cases), logits)
            for row in (0, 2, 4, 5):
                want = int(self.wanted(cold, logits[row].double().numpy()).argmax())
                assert int(drawn[row]) == want, f"a row of {cold} drew {int(drawn[row])}, the likeliest token is {want}"

    def test_a_row_is_the_same_alone_and_in_any_batch(self) -> None:
        """B32: any batch, order and neighbours; the slot does not matter either."""
        vocab, rng, cases = 3000, np.random.default_rng(2), self.cases()
        rows = [{**cases[i % len(cases)], "seed": 99 + i // 3} for i in range(14)]
        logits = torch.from_numpy(rng.standard_normal((14, vocab)).astype(np.float32)) * torch.linspace(0.5, 6, 14)[:, None]
        positions = torch.arange(14) * 3 + 5
        alone = [
            int(self.draw(self.admitted([rows[i]], vocab), logits[i : i + 1], None, positions[i : i + 1])) for i in range(14)
        ]
        for size in (14, 5, 2):
            chosen = torch.from_numpy(rng.permutation(14)[:size])
            together = self.draw(self.admitted([rows[i] for i in chosen], vocab), logits[chosen], None, positions[chosen])
            want = [alone[i] for i in chosen]
            assert together.tolist() == want, f"rows drew {together.tolist()} together and {want} alone"

    def test_seeds_and_positions_make_the_stream(self) -> None:
        """Equal seed and position: the equal token, in another sampler too; another seed or position: another draw."""
        case = self.random()
        flat = torch.zeros(100, 1000)

        def stream(seed: int, first: int = 0) -> list[int]:
            sampler = self.admitted([{**case, "seed": seed, "top_k": 0}] * 100, 1000, ())
            return self.draw(sampler, flat, None, torch.arange(100) + first).tolist()

        torch.manual_seed(1)
        one = stream(5)
        torch.manual_seed(2)
        assert stream(5) == one, "the same seed and positions drew other tokens: something else has a part in it"
        assert stream(5, 50)[:50] == one[50:], "a draw depends on more than seed and position"
        assert len(set(one)) > 80, "draws at other positions are not fresh"
        for seed in (6, 5 + 2**40):
            assert sum(a == b for a, b in zip(one, stream(seed), strict=True)) < 10, f"seeds 5 and {seed} give the same stream"

    def test_a_slot_forgets_its_former_request(self) -> None:
        """Slots are reused: parameters, seed and history are those of the request that was admitted last."""
        cases = self.cases()
        logits = torch.tensor(LOGITS, dtype=torch.float32).expand(40, -1)
        known = np.array(HISTORY if self.wants_history() else (), np.int32)
        for before, after in zip(cases, cases[1:] + cases[:1], strict=True):
            used = self.admitted([{**before, "seed": 3}] * 40)
            self.draw(used, logits, None, torch.arange(40))
            for slot in range(40):
                used.admit(slot, self.parameters({**after, "seed": 8}), known)
            fresh = self.admitted([{**after, "seed": 8}] * 40)
            drawn = [self.draw(sampler, logits, None, torch.arange(40)).tolist() for sampler in (used, fresh)]
            assert drawn[0] == drawn[1], f"after {before}, a request of {after} draws something else than in a fresh slot"

    def test_masked_tokens_are_never_drawn(self) -> None:
        """Masks act before everything else: the distribution is that of the logits without the masked tokens."""
        allowed = np.array([i in (0, 1, 4, 6, 7, 9, 11) for i in range(VOCAB)])
        for case in self.cases()[:6]:
            counts = self.count(case, torch.from_numpy(allowed))
            wrong = np.flatnonzero(counts * ~allowed).tolist()
            assert not wrong, f"{case or 'no filter'}: tokens {wrong} were drawn, which the mask forbids"
            self.check(counts, self.wanted(case, np.where(allowed, LOGITS, -INF)), case)

    def test_rows_without_a_finite_logit_draw_minus_one(self) -> None:
        """B34: NaN anywhere, all -inf, nothing allowed: -1, never silently token 0; the others are unharmed."""
        good = torch.linspace(-1, 1, VOCAB)
        broken = [torch.full((VOCAB,), NAN), good.clone(), torch.full((VOCAB,), -INF), good.clone()]
        broken[1][1] = NAN
        logits = torch.stack([good, *broken, good])
        masks = torch.ones(6, VOCAB, dtype=torch.bool)
        masks[4] = False
        for case in self.cases():
            drawn = self.draw(self.admitted([case] * 6), logits, masks=masks)
            alone = self.draw(self.admitted([case] * 6), good.expand(6, -1))
            found, want = drawn.tolist(), alone.tolist()
            assert found[1:5] == [-1] * 4, f"{case}: rows of NaN, with a NaN, of -inf, all masked: {found[1:5]}, right: -1 each"
            assert found[::5] == want[::5], f"{case}: beside such rows the others draw {found[::5]}, alone {want[::5]}"

    def test_padding_has_a_slot_of_its_own(self) -> None:
        """Slot max_num_seqs is drawn for padded rows, and never admitted: no error, no influence."""
        cases = [self.case()] * 3
        logits = torch.tensor(LOGITS, dtype=torch.float32).expand(5, -1)
        padded = self.draw(self.admitted(cases), logits, [0, 1, 2, 3, 3])
        assert padded[:3].tolist() == self.draw(self.admitted(cases), logits[:3]).tolist(), "padding changes the other rows"

    def test_half_precision_logits(self) -> None:
        """Models in bfloat16 give bfloat16 logits."""
        logits = torch.from_numpy(np.random.default_rng(4).standard_normal((8, VOCAB)).astype(np.float32)).bfloat16()
        cases = (self.cases() * 8)[:8]
        same = [self.draw(self.admitted(cases), x).tolist() for x in (logits, logits.float())]
        assert same[0] == same[1], "bfloat16 logits and the same values in float32 draw different tokens"
