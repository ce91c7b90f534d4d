"""Contract suite for attention backends: every answer against the definition in float64, over shapes drawn from what the
component declares. Runs where the backend runs: on a CPU, else on the CUDA device, else it is skipped with the reason.

A backend that attends otherwise overrides `mask` (sliding window, visible sinks) or `definition` (learned sinks, soft caps).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from core.device import pick as pick_device
from core.interfaces import AttentionBackend, DeviceContext, Limits
from core.parallel import Solo
from core.testing.paged import PADDING, Shape, Trial, causal, make_batch, softmax_attention
from core.testing.suite import Suite, pick, seeded

BLOCK_SIZES = (16, 1, 3, 32, 64)
HEADS = ((6, 2), (2, 2), (4, 1), (9, 3), (8, 2))
HEAD_SIZES = (64, 8, 16, 80, 128)
DTYPES = ("float32", "bfloat16", "float16")
NUMBERS = pytest.mark.parametrize("number", range(5))  # of drawn shapes: each accepted value occurs in one at least


class AttentionSuite(Suite):
    """All that a batch can hold: prompts, cached prefixes, chunks, decodes, padding; blocks in any order, NaN elsewhere."""

    kind = "attention"
    config: ClassVar[Mapping[str, Any]] = {}  # of the model, in config.json's words, if the backend reads it
    fused: ClassVar[bool] = False  # the context's `fused`
    interpreter: ClassVar[bool] = False  # run a GPU backend on a CPU all the same (TRITON_INTERPRET=1)
    block_sizes: ClassVar[tuple[int, ...]] = BLOCK_SIZES  # candidates; what is not declared is left out
    head_sizes: ClassVar[tuple[int, ...]] = HEAD_SIZES
    dtypes: ClassVar[tuple[str, ...]] = DTYPES

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries [n, 1] and keys [1, L] are positions -> [n, L] bool, True where a query sees a key. Default: causal."""
        return causal(queries, keys)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
        """q [n, H, D], k and v [L, K, D], visible [n, L] -> [n, H, D], all float64. Default: softmax attention."""
        return softmax_attention(q, k, v, visible, scale)

    @classmethod
    def device(cls) -> torch.device:
        """Where the backend runs here."""
        want, here = cls.declared().capabilities.get("device"), pick_device("auto")
        if cls.interpreter or want is None or want.ok("cpu"):
            return torch.device("cpu")
        if not want.ok(here.partition(":")[0]):
            pytest.skip(f"attention={cls.declared().name} runs on {want}; here is {here}")
        return torch.device(here)

    @classmethod
    def shape(cls, number: int) -> Shape:
        """The shapes together cover every accepted candidate."""
        values = [cls.accepted(*x) for x in (("block_size", cls.block_sizes), ("head_size", cls.head_sizes))]
        dtypes = cls.accepted("dtype", cls.dtypes)
        heads, kv_heads = HEADS[number % len(HEADS)]
        block_size, head_size = (options[number % len(options)] for options in values)
        return Shape(block_size, heads, kv_heads, head_size, dtypes[number % len(dtypes)])

    def build(self, shape: Shape) -> AttentionBackend:
        """A fresh backend, without a cache."""
        context = DeviceContext(
            limits=Limits(8, 1024, 4096),
            device=self.device(),
            dtype=getattr(torch, shape.dtype),
            config=self.config,
            vocab_size=100,
            parallel=Solo(),
            block_size=shape.block_size,
            spec=shape.spec(),
            fused=self.fused,
        )
        return self.target()(self.new_settings(), context)

    def trial(self, shape: Shape, seed: int = 0, poison: bool = True) -> Trial:
        """A backend with a cache full of NaN, beside the definition."""
        backend = self.build(shape)
        blocks = 100 if shape.block_size < 8 else 24
        backend.allocate(shape.spec(), blocks, shape.block_size)
        trial = Trial(backend, shape, blocks, self.device(), self.definition, self.mask, seed)
        if poison:
            self.poison(trial)
        return trial

    def poison(self, trial: Trial) -> None:
        """Fill the cache with NaN: by default through `forward`, which needs no knowledge of its layout."""
        trial.poison()

    @NUMBERS
    def test_prompts(self, number: int) -> None:
        """Whole prompts that end just before, at and behind an edge of a block, alone and together."""
        trial = self.trial(self.shape(number))
        size = trial.shape.block_size
        for length in (1, size, size + 1, 2 * size):
            trial.step([trial.chunk(f"alone{length}", length)])
        trial.step([trial.chunk(name, n) for name, n in (("a", size + 1), ("b", 1), ("c", 2 * size - 1))], stale=(7,))

    @NUMBERS
    def test_decodes(self, number: int) -> None:
        """One token each, across the edges of blocks; entries of the table beyond a row's length are stale."""
        trial = self.trial(self.shape(number))
        size = trial.shape.block_size
        lengths = {"a": size - 1 or 1, "b": 1, "c": 2 * size}
        trial.step([trial.chunk(name, n) for name, n in lengths.items()])
        for _ in range(min(size + 2, 6)):
            trial.step([trial.chunk(name, 1) for name in lengths], stale=(7,))

    @NUMBERS
    def test_chunks_and_cached_prefixes(self, number: int) -> None:
        """A prompt in pieces cut anywhere: each piece sees all that was stored before, by itself or by another request."""
        trial = self.trial(self.shape(number))
        size = trial.shape.block_size
        for count in (size, 1, max(size - 1, 1), size // 2 + 1):
            trial.step([trial.chunk("a", count)])
        trial.share("b", "a", 2)
        trial.step([trial.chunk("b", size), trial.chunk("a", 1)])

    @NUMBERS
    def test_mixed_steps(self, number: int) -> None:
        """Random steps of prompts, pieces and decodes together, in any order, with padding behind them."""
        rng, trial = seeded("mixed", number), self.trial(self.shape(number), seed=number)
        most = max(trial.shape.block_size + 3, 5)
        for _ in range(4):
            names = rng.sample("abcd", rng.randint(1, 4))
            counts = [1 if name in trial.lengths and rng.random() < 0.6 else rng.randint(1, most) for name in names]
            chunks = [trial.chunk(name, count) for name, count in zip(names, counts, strict=True)]
            stale = rng.choices(range(1, trial.blocks), k=rng.randint(0, 3))
            trial.step([*chunks, *[PADDING] * rng.randint(0, 2)], stale=stale)

    def test_what_is_hidden_has_no_influence(self) -> None:
        """Causality: the value of a later token changes no earlier answer, and does change those that see it."""
        trial, n = self.trial(self.shape(0)), 12
        q, k, v = trial.packed(n)
        batch = make_batch([trial.chunk("a", n)], trial.shape.block_size, trial.device)
        sees = self.mask(torch.arange(n)[:, None], torch.arange(n)[None])
        first = trial.backend.forward(0, q, k, v, batch, trial.backend.plan(batch), trial.prologue).clone()
        for changed in (n - 1, n // 2):
            other = v.clone()
            other[changed] += 1
            got = trial.backend.forward(0, q, k, other, batch, trial.backend.plan(batch), trial.prologue)
            moved = (got - first).abs().amax(dim=(1, 2)).cpu() > 0
            wrong = (moved & ~sees[:, changed]).nonzero().flatten().tolist()
            assert not wrong, f"positions {wrong} see position {changed}, which is hidden from them"
            blind = (~moved & sees[:, changed]).nonzero().flatten().tolist()
            assert not blind, f"positions {blind} do not see position {changed}"

    @NUMBERS
    def test_scale(self, number: int) -> None:
        """Scores are scaled with spec.scale, head_size ** -0.5: two keys, one of them zero, tell it exactly."""
        trial = self.trial(self.shape(number))
        if trial.backend.fuses_prologue:
            pytest.skip("the prologue is fused: q and k are not in the test's hand")
        q, k, v = (torch.zeros_like(x) for x in trial.packed(2))
        root = trial.shape.head_size**0.5
        q[:], k[1], v[1] = 1.0, 1 / root, 1.0  # the score of position 1 is root * scale
        got, want = trial.answer(0, [trial.chunk("a", 2)], (q, k, v))
        share = got[1].double().mean().cpu()
        found = float(torch.logit(share)) / root
        assert abs(share - want[1].mean()) < 5e-3, f"scores seem to be scaled by {found:.4g}, not by {trial.spec.scale:.4g}"

    @NUMBERS
    def test_query_heads_read_their_kv_head(self, number: int) -> None:
        """Query head h reads KV head h * K // H."""
        trial = self.trial(self.shape(number))
        q, k, v = trial.packed(3)
        v = torch.arange(trial.shape.kv_heads, device=v.device).to(v.dtype)[None, :, None].expand_as(v).contiguous()
        got, want = trial.answer(0, [trial.chunk("a", 3)], (q, k, v))
        heads = [[round(float(x), 2) for x in rows.mean(dim=(0, 2))] for rows in (got.double().cpu(), want)]
        assert heads[0] == pytest.approx(heads[1], abs=0.05), (
            f"KV head that each query head reads: {heads[0]}, right: {heads[1]}"
        )

    @NUMBERS
    @pytest.mark.parametrize("reader_first", [True, False])
    def test_a_chunk_reads_what_another_one_writes(self, number: int, reader_first: bool) -> None:
        """Requests of one step share a prefix: all stores precede all reads, and the reader may come first in the batch."""
        trial = self.trial(self.shape(number))
        writer = trial.chunk("a", trial.shape.block_size)
        trial.share("b", "a", 1)
        chunks = [trial.chunk("b", 1), writer] if reader_first else [writer, trial.chunk("b", 1)]
        trial.step(chunks, parents={"b": "a"})

    @NUMBERS
    def test_padding_harms_nobody(self, number: int) -> None:
        """B47: padded rows have length 1 on the scratch block; other rows, and blocks that are not in the step, stay as they
        are."""
        trial = self.trial(self.shape(number))
        size, last = trial.shape.block_size, trial.blocks - 1
        trial.free.remove(last)
        trial.free.append(last)  # handed out first: where a place of -1 would be written
        trial.step([trial.chunk("kept", size), trial.chunk("a", size)])
        stale = trial.tables["kept"]
        for padding in (1, 3):
            trial.step([trial.chunk("b", size), *[PADDING] * padding], stale=stale)
            trial.step([trial.chunk("a", 1), trial.chunk("b", 1), *[PADDING] * padding], stale=stale)
        trial.step([trial.chunk("kept", 1)])

    @NUMBERS
    def test_blocks_move(self, number: int) -> None:
        """`move` copies whole blocks of all layers, in order: a target may be the source of a later pair."""
        trial = self.trial(self.shape(number))
        size = trial.shape.block_size
        trial.step([trial.chunk(name, size) for name in "abc"])
        (a,), (b,) = trial.tables["a"], trial.tables["b"]
        one, two = trial.free.pop(), trial.free.pop()
        trial.backend.move(np.array([[a, one], [one, two], [b, a]], np.int32))
        trial.tables["a"], trial.tables["b"] = [two], [a]
        trial.step([trial.chunk(name, 1) for name in "abc"])
        trial.backend.move(np.empty((0, 2), np.int32))
        trial.step([trial.chunk(name, 1) for name in "cba"])

    @NUMBERS
    def test_the_cache_is_allocated_again(self, number: int) -> None:
        """Sizing allocates a second time, larger or smaller; `block_bytes` is a whole number over all layers."""
        shape = self.shape(number)
        backend = self.build(shape)
        each = backend.block_bytes(shape.spec(), shape.block_size)
        assert isinstance(each, int) and each > 0, f"block_bytes must be a whole number > 0, got {each!r}"
        twice = backend.block_bytes(replace(shape.spec(), num_layers=2 * shape.spec().num_layers), shape.block_size)
        assert twice > each, f"block_bytes counts all layers: {each} for {shape.spec().num_layers}, {twice} for twice as many"
        for blocks in (4, 30, 12):
            backend.allocate(shape.spec(), blocks, shape.block_size)
            trial = Trial(backend, shape, blocks, self.device(), self.definition, self.mask, seed=blocks)
            trial.step([trial.chunk("a", shape.block_size + 1)])
            trial.step([trial.chunk("a", 1)])

    def test_a_given_state_is_refreshed(self) -> None:
        """A captured batch is planned once; from the second step on `plan` gets that state back and refreshes it in place."""
        graphs = self.declared().capabilities.get("graphs")
        if graphs is not None and not graphs.ok(True):
            pytest.skip("declares that it cannot be captured (graphs)")
        trial, state = self.trial(self.shape(0)), None
        size = trial.shape.block_size
        trial.step([trial.chunk(name, n) for name, n in {"a": size, "b": 1, "c": 2 * size - 1}.items()])
        for _ in range(min(size, 5)):
            before = state
            state = trial.step([*(trial.chunk(name, 1) for name in "abc"), PADDING], state, stale=(7,), bound=3 * size)
            assert before is None or state is before, "plan must give the state back that it was given"

    @pytest.mark.parametrize("key", ["block_size", "head_size", "dtype"])
    def test_what_is_not_declared_is_refused_or_right(self, key: str) -> None:
        """The engine refuses such a configuration by the declaration; built all the same, the backend raises or is right.
        A wrong answer without a word is what must not be."""
        candidates = {"block_size": (*BLOCK_SIZES, 5, 48), "head_size": (*HEAD_SIZES, 24, 96), "dtype": DTYPES}[key]
        outside = self.refused(key, candidates)
        if not outside:
            pytest.skip(f"accepts each of {candidates}: nothing to refuse")
        for value in outside:
            shape = Shape(**{**vars(self.shape(0)), key: value})
            try:
                trial = self.trial(shape, poison=False)
                chunks = [trial.chunk("a", shape.block_size + 1), trial.chunk("b", 2)]
                answer = trial.answer(0, chunks, trial.packed(shape.block_size + 3))
            except Exception:
                continue
            try:
                trial.compare(0, chunks, *answer)
            except AssertionError as error:
                raise AssertionError(f"{key}={value} is not declared, not refused, and answered wrongly: {error}") from None

    @NUMBERS
    def test_other_declared_shapes(self, number: int) -> None:
        """Combinations of declared values other than those above."""
        rng = seeded("shape", number)
        sizes, heads = self.accepted("block_size", (2, 5, 16, 48, 64)), self.accepted("head_size", (4, 24, 32, 96, 128))
        query_heads, kv_heads = pick(rng, HEADS)
        shape = Shape(pick(rng, sizes), query_heads, kv_heads, pick(rng, heads), self.shape(number).dtype)
        trial = self.trial(shape, seed=number)
        trial.step([trial.chunk("a", shape.block_size + 1), trial.chunk("b", 2), PADDING])
        trial.step([trial.chunk("a", 1), trial.chunk("b", shape.block_size), PADDING])
