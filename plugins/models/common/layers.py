"""Layers that are tensor-parallel by construction, after Megatron-LM: columns, then rows, one all-reduce per pair.

Frozen weights only. Each layer names the checkpoint tensors it holds a piece of. Weights are [out, in].
T tokens, S rows drawn, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.interfaces import DeviceContext
from plugins.models.common.gemm import linear, packed
from plugins.models.common.pieces import Cut, Piece, Pieces, parameter


class MergedColumnLinear:
    """Several linear maps of one input in one weight. Each rank has its part of every map's outputs, side by side."""

    def __init__(self, size_in: int, cuts: Mapping[str, Cut], bias: bool, context: DeviceContext) -> None:
        self.size_in, self.cuts = size_in, dict(cuts)
        self.sizes = [cut.size for cut in cuts.values()]
        self.weight = parameter(context, sum(self.sizes), size_in)
        self.bias = parameter(context, sum(self.sizes)) if bias else None

    def pieces(self) -> Pieces:
        """One weight, and perhaps one bias, per map."""
        begin = 0
        for name, cut in self.cuts.items():
            rows = slice(begin, begin + cut.size)
            yield f"{name}.weight", Piece((cut.full, self.size_in), (cut.slice, slice(None)), self.weight[rows])
            if self.bias is not None:
                yield f"{name}.bias", Piece((cut.full,), (cut.slice,), self.bias[rows])
            begin += cut.size

    def pack(self) -> None:
        """All pieces are loaded: change to the fastest layout."""
        self.weight = packed(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class ColumnLinear(MergedColumnLinear):
    """One linear map, its outputs shared out over the ranks."""

    def __init__(self, name: str, size_in: int, size_out: int, bias: bool, context: DeviceContext) -> None:
        super().__init__(size_in, {name: Cut.even(size_out, context.parallel, f"outputs of {name}")}, bias, context)


class QKVLinear(MergedColumnLinear):
    """q, k and v of one layer, sharded by head. With more ranks than KV heads each rank keeps a copy of one KV head."""

    def __init__(self, size_in: int, heads: int, kv_heads: int, head_size: int, bias: bool, context: DeviceContext) -> None:
        q, kv = head_cuts(heads, kv_heads, context)
        self.heads, self.kv_heads, self.head_size = q.size, kv.size, head_size
        q, kv = (Cut(*(head_size * n for n in (cut.full, cut.begin, cut.end))) for cut in (q, kv))
        super().__init__(size_in, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias, context)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, E] -> q [T, H, D], k and v [T, K, D]: views of one buffer."""
        return self.split(linear(x, self.weight, self.bias))

    def split(self, product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (H + 2 K) D] -> q, k and v."""
        heads = product.view(product.shape[0], -1, self.head_size)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
        return q, k, v


def head_cuts(heads: int, kv_heads: int, context: DeviceContext) -> tuple[Cut, Cut]:
    """Which query heads and which KV heads this rank has. ValueError if they cannot be shared out evenly."""
    parallel = context.parallel
    q = Cut.even(heads, parallel, "num_attention_heads")
    if kv_heads % parallel.size == 0:
        return q, Cut.even(kv_heads, parallel, "num_key_value_heads")
    if parallel.size % kv_heads:
        raise ValueError(
            f"num_key_value_heads ({kv_heads}) must be a multiple or a divisor of tensor_parallel_size ({parallel.size});"
            f" choose a divisor or a multiple of {kv_heads}"
        )
    mine = parallel.rank * kv_heads // parallel.size
    return q, Cut(kv_heads, mine, mine + 1)


class RowLinear:
    """A linear map whose inputs are shared out over the ranks; the outputs are summed."""

    def __init__(self, name: str, size_in: int, size_out: int, bias: bool, context: DeviceContext) -> None:
        self.name, self.parallel = name, context.parallel
        self.cut = Cut.even(size_in, context.parallel, f"inputs of {name}")
        self.size_out = size_out
        self.weight = parameter(context, size_out, self.cut.size)
        # Rank 0 alone has the bias: the all-reduce then adds it once.
        self.bias_cut = Cut(size_out, 0, size_out if self.parallel.rank == 0 else 0) if bias else None
        self.bias = parameter(context, size_out) if self.bias_cut and self.bias_cut.size else None

    def pieces(self) -> Pieces:
        """The weight and perhaps the bias, of which ranks other than 0 take nothing."""
        yield f"{self.name}.weight", Piece((self.size_out, self.cut.full), (slice(None), self.cut.slice), self.weight)
        if self.bias_cut:
            into = self.weight.new_empty(0) if self.bias is None else self.bias
            yield f"{self.name}.bias", Piece((self.size_out,), (self.bias_cut.slice,), into)

    def pack(self) -> None:
        """All pieces are loaded: change to the fastest layout."""
        self.weight = packed(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return self.parallel.all_reduce(linear(x, self.weight, self.bias))

    def onto(self, residual: Tensor, x: Tensor, product: Any) -> Tensor:
        """residual + the map of x, with products of few tokens. As the bias, rank 0 alone adds the residual to its part."""
        own = residual if self.parallel.rank == 0 else None
        return self.parallel.all_reduce(product(x, self.weight, self.bias, residual=own))


class VocabEmbedding:
    """Rows of the vocabulary, shared out over the ranks; the last rank's are padded with zeros where V is uneven."""

    def __init__(self, vocab: int, size: int, context: DeviceContext) -> None:
        self.parallel, self.share = context.parallel, -(-vocab // context.parallel.size)
        self.cut = Cut(vocab, *(min(vocab, self.share * n) for n in (self.parallel.rank, self.parallel.rank + 1)))
        self.weight = parameter(context, self.share, size)
        self.weight[self.cut.size :] = 0

    def pieces(self) -> Pieces:
        """The one weight."""
        shape = (self.cut.full, self.weight.shape[1])
        yield "weight", Piece(shape, (self.cut.slice, slice(None)), self.weight[: self.cut.size])

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, E]"""
        if self.parallel.size == 1:
            return F.embedding(tokens, self.weight)
        row = tokens - self.share * self.parallel.rank
        mine = (row >= 0) & (row < self.share)
        x = F.embedding(torch.where(mine, row, 0), self.weight)
        return self.parallel.all_reduce(x * mine[:, None])


class LMHead(VocabEmbedding):
    """Logits of the whole vocabulary. Tied: it has no tensor of its own and computes with the embedding's rows."""

    def __init__(self, vocab: int, size: int, context: DeviceContext, tied: VocabEmbedding | None = None) -> None:
        if tied is None:
            super().__init__(vocab, size, context)
        else:
            self.parallel, self.cut, self.weight = tied.parallel, tied.cut, tied.weight

    def pack(self) -> None:
        """All pieces are loaded: change to the fastest layout (a copy, where the embedding keeps its rows)."""
        self.weight = packed(self.weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[S, E] -> [S, V]"""
        logits = linear(hidden, self.weight)
        return self.parallel.all_gather(logits)[:, : self.cut.full] if self.parallel.size > 1 else logits
