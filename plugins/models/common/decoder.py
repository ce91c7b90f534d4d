"""The decoder that Llama and its relatives share: attention and gated MLP, each behind an RMSNorm, around one residual.

T tokens, S rows drawn, H query heads, K KV heads, D head size, E hidden size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from core.interfaces import Attend, DeviceContext, KVSpec, ModelArch, Prologue, Weight
from plugins.models.common.gemm import skinny
from plugins.models.common.layers import LMHead, MergedColumnLinear, QKVLinear, RowLinear, VocabEmbedding
from plugins.models.common.norm import RMSNorm
from plugins.models.common.pieces import Cut, Pieces, fastest, prefixed
from plugins.models.common.rope import rope_table
from plugins.models.common.settings import DecoderSizes


def silu_mul(x: Tensor) -> Tensor:
    """[T, 2 I], gate then up -> silu(gate) * up [T, I]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


class Attention:
    """q, k and v in one product; what lies between them and the output is the backend's."""

    def __init__(self, index: int, sizes: DecoderSizes, table: Tensor, qk_norm: bool, context: DeviceContext) -> None:
        s, self.index = sizes, index
        self.qkv = QKVLinear(s.hidden, s.heads, s.kv_heads, s.head_size, s.attention_bias, context)
        self.out = RowLinear("o_proj", s.heads * s.head_size, s.hidden, s.attention_bias, context)
        self.norms = {name: RMSNorm(s.head_size, s.eps, context) for name in ("q_norm", "k_norm") if qk_norm}
        q_norm, k_norm = (self.norms[n].weight if qk_norm else None for n in ("q_norm", "k_norm"))
        self.prologue = Prologue(q_norm, k_norm, s.eps, table)

    def pieces(self) -> Pieces:
        """q_proj, k_proj, v_proj, o_proj, and the norms if any."""
        yield from self.qkv.pieces()
        yield from self.out.pieces()
        for name, norm in self.norms.items():
            yield from prefixed(name, norm.pieces())

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(x)
        return self.out(attend(self.index, q, k, v, self.prologue).reshape(x.shape[0], -1))


class MLP:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, sizes: DecoderSizes, context: DeviceContext) -> None:
        cut = Cut.even(sizes.intermediate, context.parallel, "intermediate_size")
        self.gate_up = MergedColumnLinear(sizes.hidden, {"gate_proj": cut, "up_proj": cut}, sizes.mlp_bias, context)
        self.down = RowLinear("down_proj", sizes.intermediate, sizes.hidden, sizes.mlp_bias, context)
        self._silu_mul = fastest(silu_mul, context)

    def pieces(self) -> Pieces:
        """gate_proj, up_proj, down_proj."""
        yield from self.gate_up.pieces()
        yield from self.down.pieces()

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._silu_mul(self.gate_up(x)))


class Layer:
    """One layer. Its input comes in two parts, the residual and what is still to be added to it."""

    def __init__(self, index: int, sizes: DecoderSizes, table: Tensor, qk_norm: bool, context: DeviceContext) -> None:
        self.attention, self.mlp = Attention(index, sizes, table, qk_norm, context), MLP(sizes, context)
        self.before_attention = RMSNorm(sizes.hidden, sizes.eps, context)
        self.before_mlp = RMSNorm(sizes.hidden, sizes.eps, context)

    def pieces(self) -> Pieces:
        """Everything in the layer."""
        yield from prefixed("self_attn", self.attention.pieces())
        yield from prefixed("mlp", self.mlp.pieces())
        yield from prefixed("input_layernorm", self.before_attention.pieces())
        yield from prefixed("post_attention_layernorm", self.before_mlp.pieces())

    def __call__(self, x: Tensor, residual: Tensor | None, attend: Attend) -> tuple[Tensor, Tensor]:
        normed, total = (self.before_attention(x), x) if residual is None else self.before_attention.add(x, residual)
        normed, total = self.before_mlp.add(self.attention(normed, attend), total)
        return self.mlp(normed), total

    def few(self, x: Tensor, attend: Attend, product: Any) -> Tensor:
        """The same for few tokens, as four products with all that is between them, from residual to residual."""
        attention, qkv, gate_up = self.attention, self.attention.qkv, self.mlp.gate_up
        heads = product(x, qkv.weight, qkv.bias, norm=(self.before_attention.weight, self.before_attention.eps))
        seen = attend(attention.index, *qkv.split(heads), attention.prologue).reshape(x.shape[0], -1)
        x = attention.out.onto(x, seen, product)
        hot = product(x, gate_up.weight, gate_up.bias, norm=(self.before_mlp.weight, self.before_mlp.eps), gated=True)
        return self.mlp.down.onto(x, hot, product)


class Decoder(ModelArch):
    """A whole model. Subclasses say what differs."""

    qk_norm: ClassVar[bool] = False  # RMSNorm on each query and key head
    defaults: ClassVar[Mapping[str, Any]] = {}  # for keys that config.json may lack

    def __init__(self, settings: Any, context: DeviceContext) -> None:
        super().__init__(settings, context)
        config, length = {**self.defaults, **context.config}, context.limits.max_model_len
        self.sizes = s = DecoderSizes.read(config, length)
        table = rope_table(config, s.head_size, length, context.device)
        self.embed = VocabEmbedding(s.vocab, s.hidden, context)
        self.layers = [Layer(i, s, table, self.qk_norm, context) for i in range(s.layers)]
        self.norm = RMSNorm(s.hidden, s.eps, context)
        self.head = LMHead(s.vocab, s.hidden, context, self.embed if s.tied else None)
        qkv = self.layers[0].attention.qkv
        self.kv_spec = KVSpec(s.layers, qkv.heads, qkv.kv_heads, s.head_size, context.dtype)
        self._skinny = skinny(context)
        self._pieces = dict(self._all_pieces())
        self._shapes = {name: piece.shape for name, piece in self._pieces.items()}

    def _all_pieces(self) -> Pieces:
        yield from prefixed("model.embed_tokens", self.embed.pieces())
        for i, layer in enumerate(self.layers):
            yield from prefixed(f"model.layers.{i}", layer.pieces())
        yield from prefixed("model.norm", self.norm.pieces())
        if not self.sizes.tied:
            yield from prefixed("lm_head", self.head.pieces())

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Hugging Face names; without lm_head.weight where it is tied."""
        return self._shapes

    def load(self, tensors: Iterator[tuple[str, Weight]]) -> None:
        """Fill the parameters, once; then change them to the layout that products are fastest with."""
        for name, weight in tensors:
            self._pieces.pop(name).load(weight)
        assert not self._pieces, f"not loaded: {', '.join(self._pieces)}"
        for layer in self.layers:
            for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
                linear.pack()
        self.head.pack()

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[T], [T] -> normed hidden states [T, E]; positions matter to `attend` alone."""
        x, residual = self.embed(tokens), None
        if self._skinny is not None and self._skinny.fits(len(tokens)):
            for layer in self.layers:
                x = layer.few(x, attend, self._skinny)
            return self.norm(x)
        for layer in self.layers:
            x, residual = layer(x, residual, attend)
        assert residual is not None
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, E] -> [S, V]"""
        return self.head(hidden)
