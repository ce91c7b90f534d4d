"""Contract suite for architectures: against transformers where the architecture exists there, and against itself: in chunks,
from a cache, in a batch. Sizes are tiny and weights random, so no checkpoint is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from core.interfaces import DeviceContext, Limits, ModelArch
from core.parallel import Solo
from core.testing.dense import Histories
from core.testing.suite import Suite, seeded

MAX_LEN = 64
TINY: Mapping[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CLOSE = 1e-4  # of logits in float32


class ArchSuite(Suite):
    """The equations, whatever the tokens of a step are: one request whole, in pieces, beside others."""

    kind = "arch"
    config: ClassVar[Mapping[str, Any]] = TINY  # in config.json's words; small

    def build(self, **changes: Any) -> ModelArch:
        """A model without weights, in float32 on a CPU unless `changes` of the context say otherwise."""
        config = {**self.config, **changes.pop("config", {})}
        context = DeviceContext(
            limits=Limits(8, 64, MAX_LEN),
            device=torch.device("cpu"),
            dtype=changes.get("dtype", torch.float32),
            config=config,
            vocab_size=config["vocab_size"],
            parallel=Solo(),
            block_size=16,
        )
        return self.target()(self.new_settings(), context)

    @staticmethod
    def weights(model: ModelArch, seed: int = 0) -> dict[str, Tensor]:
        """Random, and so large that a wrong product shows; norms around 1."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name) for name, shape in model.weights().items()
        }

    def loaded(self, seed: int = 0, tensors: Mapping[str, Tensor] | None = None, **changes: Any) -> ModelArch:
        """A model with random weights, or these; they come in an order of no meaning."""
        model = self.build(**changes)
        given = self.weights(model, seed) if tensors is None else tensors
        names = list(model.weights())
        seeded("weights", seed).shuffle(names)
        dtype = changes.get("dtype", torch.float32)

        def stream() -> Iterator[tuple[str, Any]]:
            for name in names:
                yield name, given[name].to(dtype)

        model.load(stream())
        return model

    def tokens(self, count: int, seed: int = 0) -> Tensor:
        return torch.randint(0, self.config["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))

    @staticmethod
    def step(model: ModelArch, cache: Histories, chunks: Sequence[tuple[str, Tensor]]) -> Tensor:
        """One step of (request, its next tokens) -> logits [T, V] of all tokens."""
        starts = [cache.length(name) for name, _ in chunks]
        positions = torch.cat([torch.arange(at, at + len(tokens)) for at, (_, tokens) in zip(starts, chunks, strict=True)])
        attend = cache.attend([(name, len(tokens)) for name, tokens in chunks], positions)
        with torch.inference_mode():
            return model.logits(model.forward(torch.cat([tokens for _, tokens in chunks]), positions, attend))

    def whole(self, model: ModelArch, tokens: Tensor) -> Tensor:
        return self.step(model, Histories(), [("a", tokens)])

    @staticmethod
    def close(got: Tensor, want: Tensor, what: str) -> None:
        assert got.shape == want.shape, f"{what}: logits are {tuple(got.shape)}, not {tuple(want.shape)}"
        error = (got.float() - want.float()).abs().nan_to_num(nan=float("inf"))
        worst = int(error.amax(dim=1).argmax())
        assert error.max() < CLOSE, f"{what}: logits of row {worst} are off by {float(error.max()):.2g}"

    def test_it_says_whose_models_it_runs(self) -> None:
        """`provides["architectures"]`: the words of config.json that lead here."""
        names = self.declared().provides.get("architectures")
        assert names and not isinstance(names, str), 'provides={"architectures": ("SomethingForCausalLM",)} is missing'

    @pytest.mark.parametrize("tied", [False, True])
    def test_logits_are_those_of_transformers(self, tied: bool) -> None:
        """The same weights, by the same names, give the same logits within 1e-4."""
        transformers = pytest.importorskip("transformers")
        known = [name for name in self.declared().provides.get("architectures", ()) if hasattr(transformers, name)]
        if not known:
            pytest.skip("transformers has none of its architectures")
        for name in known:
            made = getattr(transformers, name)
            config = made.config_class(**{**self.config, "tie_word_embeddings": tied})
            torch.manual_seed(0)
            theirs = made._from_config(config, attn_implementation="eager").eval()
            for parameter, weight in theirs.named_parameters():
                weight.data.normal_(1.0 if "norm" in parameter else 0.0, 0.2)
            ours = self.build(config=config.to_dict())
            tensors = theirs.state_dict()
            missing = sorted(set(ours.weights()) - set(tensors))
            assert not missing, f"{name}: weights() names tensors that a checkpoint lacks: {missing[:5]}"
            ours = self.loaded(tensors=tensors, config=config.to_dict())
            for length in (1, 7, 33):
                tokens = self.tokens(length)
                with torch.no_grad():
                    wanted = theirs(tokens[None]).logits[0]
                assert wanted.std() > 0.05, "logits too small to tell anything"
                self.close(self.whole(ours, tokens), wanted, f"{name}, {length} tokens")

    @pytest.mark.parametrize("sizes", [(12, 1, 1, 6), (1,) * 8, (5, 7), (3, 1, 9, 2)], ids=str)
    def test_chunks_equal_the_whole(self, sizes: tuple[int, ...]) -> None:
        """A prompt in pieces, its decodes included: positions go on where the piece before ended (B12, B33)."""
        model, tokens = self.loaded(), self.tokens(sum(sizes))
        cache = Histories()
        parts = torch.cat([self.step(model, cache, [("a", part)]) for part in tokens.split(list(sizes))])
        self.close(parts, self.whole(model, tokens), f"in chunks of {sizes}")

    def test_order_of_tokens_matters(self) -> None:
        """The same tokens at other positions give other logits."""
        model, tokens = self.loaded(), self.tokens(9)
        turned = torch.cat((tokens[:8].flip(0), tokens[8:]))
        difference = (self.whole(model, turned)[-1] - self.whole(model, tokens)[-1]).abs().max()
        assert difference > 1e-3, "the last logits are the same whatever the order before: positions are not used"

    def test_a_cached_prefix_changes_nothing(self) -> None:
        """What another request computed for the same prefix is as good as its own."""
        model, prefix = self.loaded(), self.tokens(10)
        cache = Histories()
        self.step(model, cache, [("a", prefix)])
        for layer in sorted(set(cache.layers)):
            cache.seen["b", layer] = cache.seen["a", layer]
        rest = self.tokens(5, seed=1)
        want = self.whole(model, torch.cat((prefix, rest)))[len(prefix) :]
        self.close(self.step(model, cache, [("b", rest)]), want, "after a cached prefix")

    def test_requests_of_a_step_do_not_meet(self) -> None:
        """Prompts, pieces and decodes in one step: each as if it were alone."""
        model, cache = self.loaded(), Histories()
        texts = {name: self.tokens(20, seed=i) for i, name in enumerate("abc")}
        at = dict.fromkeys(texts, 0)
        wanted = {name: self.whole(model, tokens) for name, tokens in texts.items()}
        for counts in ({"a": 7}, {"a": 1, "b": 5}, {"c": 9, "b": 1, "a": 1}, {"b": 4, "c": 1}):
            chunks = [(name, texts[name][at[name] : at[name] + count]) for name, count in counts.items()]
            logits = self.step(model, cache, chunks).split(list(counts.values()))
            for (name, count), got in zip(counts.items(), logits, strict=True):
                self.close(got, wanted[name][at[name] : at[name] + count], f"request {name} among {list(counts)}")
                at[name] += count

    def test_few_rows_get_logits(self) -> None:
        """Only tokens that draw go through `logits`: rows in any number and order."""
        model, tokens = self.loaded(), self.tokens(12)
        positions, cache = torch.arange(12), Histories()
        with torch.inference_mode():
            hidden = model.forward(tokens, positions, cache.attend([("a", 12)], positions))
            everything = model.logits(hidden)
            self.close(model.logits(hidden[[11, 3]]), everything[[11, 3]], "two rows")

    def test_kv_spec_says_what_attention_sees(self) -> None:
        """Heads and head size of the calls, each layer once and in order."""
        model, cache = self.loaded(), Histories()
        self.step(model, cache, [("a", self.tokens(3))])
        spec = model.kv_spec
        assert cache.layers == list(range(spec.num_layers)), f"attend was called for layers {cache.layers}"
        want = {(spec.num_heads, spec.num_kv_heads, spec.head_size)}
        assert cache.shapes == want, f"(heads, KV heads, head size) of the calls: {cache.shapes}, kv_spec says {want}"
        assert spec.dtype == torch.float32, f"kv_spec.dtype is {spec.dtype} for a model in float32"

    def test_half_precision_stays_close(self) -> None:
        """In bfloat16 the error is that of the type, no more, and the answer has that type."""
        weights = {name: tensor.bfloat16().float() for name, tensor in self.weights(self.build()).items()}
        tokens = self.tokens(20)
        got = self.whole(self.loaded(tensors=weights, dtype=torch.bfloat16), tokens)
        want = self.whole(self.loaded(tensors=weights), tokens)
        assert got.dtype == torch.bfloat16, f"logits of a model in bfloat16 are {got.dtype}"
        error = float((got.float() - want).norm() / want.norm())
        assert error < 0.05, f"relative error of bfloat16: {error:.3f}"
