"""Tensor-parallel layers: several ranks, as threads in lock step, compute what one rank computes, each from its own slices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
import transformers
from torch import Tensor

from core.interfaces import ModelArch, NoSettings, Parallel
from core.parallel import Solo
from plugins.models.common.layers import ColumnLinear, LMHead, RowLinear, VocabEmbedding
from plugins.models.common.pieces import Cut, Piece
from plugins.models.llama import Llama
from plugins.models.qwen3 import Qwen3
from tests.test_models import LLAMA3, TINY, context, loaded, logits, reference

torch.set_num_threads(1)


class Group:
    """What the ranks of one group share."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class Rank:
    """One rank of a group of threads."""

    def __init__(self, rank: int, group: Group) -> None:
        self.rank, self.size, self.group, self.reductions = rank, len(group.parts), group, 0

    def _exchange(self, x: Tensor) -> list[Any]:
        self.group.parts[self.rank] = x
        self.group.barrier.wait()
        parts = list(self.group.parts)
        self.group.barrier.wait()
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        self.reductions += 1
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._exchange(x), dim)


def on_ranks(size: int, work: Callable[[Rank], Any]) -> list[Any]:
    """What `work` returns on each rank."""
    group = Group(size)

    def guarded(rank: int) -> Any:
        try:
            return work(Rank(rank, group))
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


class Counting:
    """A checkpoint's tensor that counts the elements read from it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.read = tensor, tuple(tensor.shape), 0

    def __getitem__(self, index: Any) -> Tensor:
        part = self.tensor[index]
        self.read += part.numel()
        return part


WORDS = {
    **TINY,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "hidden_size": 48,
    "intermediate_size": 24,
    "attention_bias": True,
    "rope_parameters": LLAMA3,
}


@pytest.mark.parametrize(("arch", "config"), [(Llama, transformers.LlamaConfig), (Qwen3, transformers.Qwen3Config)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (3, 3), (4, 2), (4, 1), (2, 6)])
def test_ranks_agree_with_one(arch: type[ModelArch], config: Any, tied: bool, size: int, kv_heads: int) -> None:
    """B40, B41: 2, 3, 4 ranks; KV heads shared out or copied; a vocabulary of 101 that no size divides; biases added once."""
    words = {**WORDS, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    if arch is Llama:
        words["mlp_bias"] = True
    weights = reference(config(**words)).state_dict()
    tokens = torch.arange(0, 100, 5)
    wanted = logits(loaded(arch(NoSettings(), context(words)), weights), tokens)

    def work(rank: Rank) -> tuple[Any, Tensor, int]:
        model = loaded(arch(NoSettings(), context(words, parallel=rank)), weights)
        return model.kv_spec, logits(model, tokens), rank.reductions

    for spec, got, reductions in on_ranks(size, work):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
        assert (spec.num_heads, spec.num_kv_heads) == (12 // size, max(1, kv_heads // size))
        assert reductions == 1 + 2 * words["num_hidden_layers"], "the embedding, then one per attention and MLP"


class Definition:
    """What the kernels for few tokens compute, for any number of them."""

    def fits(self, tokens: int) -> bool:
        return True

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Any = None, norm: Any = None, residual: Any = None, gated: bool = False
    ) -> Tensor:
        x = x if norm is None else functional.rms_norm(x, norm[0].shape, *norm)
        y = functional.linear(x, weight, bias)
        y = functional.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] if gated else y
        return y if residual is None else residual + y


@pytest.mark.parametrize("size", [1, 2, 4])
def test_few_tokens_on_several_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four products of a layer: the residual and the biases are added once, on rank 0; as many sums as ever."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # packed weights are opaque
    words = {**WORDS, "mlp_bias": True}
    weights = reference(transformers.LlamaConfig(**words)).state_dict()
    tokens = torch.arange(0, 100, 20)
    wanted = logits(loaded(Llama(NoSettings(), context(words)), weights), tokens)

    def work(rank: Rank) -> tuple[Tensor, int]:
        model = loaded(Llama(NoSettings(), context(words, parallel=rank)), weights)
        model._skinny = Definition()  # type: ignore[attr-defined]
        return logits(model, tokens), rank.reductions

    for got, reductions in on_ranks(size, work):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
        assert reductions == 1 * (size > 1) + 2 * words["num_hidden_layers"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_reads_its_slice_only(size: int) -> None:
    """Every sharded tensor is read once over all ranks (KV heads once per copy), norms once per rank, bias of rows once."""
    words = {**WORDS, "num_key_value_heads": 1}
    weights = reference(transformers.LlamaConfig(**words)).state_dict()
    read = dict.fromkeys(weights, 0)
    for rank in range(size):
        counting = {name: Counting(tensor) for name, tensor in weights.items()}
        model = Llama(NoSettings(), context(words, parallel=Rank(rank, Group(size))))
        model.load((name, counting[name]) for name in model.weights())
        for name, weight in counting.items():
            read[name] += weight.read
            if "proj.weight" in name and ".k_" not in name and ".v_" not in name:
                assert weight.read == weight.tensor.numel() // size, name
    for name, tensor in weights.items():
        copies = size if "norm" in name or ".k_proj" in name or ".v_proj" in name else 1
        assert read[name] == copies * tensor.numel(), name


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "message"),
    [
        (12, 3, 2, r"num_key_value_heads \(3\).*tensor_parallel_size \(2\)"),
        (12, 4, 6, r"num_key_value_heads \(4\).*tensor_parallel_size \(6\)"),
        (6, 6, 4, r"num_attention_heads \(6\).*tensor_parallel_size \(4\)"),
        (10, 5, 5, r"intermediate_size \(24\).*tensor_parallel_size \(5\)"),
    ],
)
def test_uneven_groups_are_refused(heads: int, kv_heads: int, size: int, message: str) -> None:
    """B41: both numbers, when the model is built, before any weight is read."""
    words = {**WORDS, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    with pytest.raises(ValueError, match=message):
        Llama(NoSettings(), context(words, parallel=Rank(0, Group(size))))


def test_column_then_row_is_one_product() -> None:
    """The pair of Megatron-LM by itself, with both biases."""
    first, second, x = torch.randn(24, 10), torch.randn(7, 24), torch.randn(5, 10)
    biases = torch.randn(24), torch.randn(7)
    wanted = torch.nn.functional.linear(torch.nn.functional.linear(x, first, biases[0]), second, biases[1])

    def work(rank: Parallel) -> Tensor:
        where = context(TINY, parallel=rank)
        column, row = ColumnLinear("a", 10, 24, True, where), RowLinear("b", 24, 7, True, where)
        tensors = {"a.weight": first, "a.bias": biases[0], "b.weight": second, "b.bias": biases[1]}
        for name, piece in (*column.pieces(), *row.pieces()):
            piece.load(Counting(tensors[name]))
        return row(column(x))

    for got in (work(Solo()), *on_ranks(3, work)):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("vocab", "size"), [(5, 4), (7, 2), (8, 4), (3, 4)])
def test_uneven_vocabulary(vocab: int, size: int) -> None:
    """Ranks whose share is partly or wholly padding: rows found, no logit of a padded row seen."""
    table, tokens, hidden = torch.randn(vocab, 6), torch.arange(vocab), torch.randn(2, 6)

    def work(rank: Parallel) -> tuple[Tensor, Tensor, Tensor]:
        where = context(TINY, parallel=rank)
        embed, own = VocabEmbedding(vocab, 6, where), LMHead(vocab, 6, where)
        for layer in (embed, own):
            for _, piece in layer.pieces():
                piece.load(Counting(table))
        return embed(tokens), own(hidden), LMHead(vocab, 6, where, tied=embed)(hidden)

    for rows, own, tied in on_ranks(size, work):
        assert torch.equal(rows, table)
        torch.testing.assert_close(own, hidden @ table.T, atol=1e-5, rtol=0)
        assert torch.equal(own, tied)


def test_pieces_read_safetensors_slices(tmp_path: Any) -> None:
    """The indices that pieces use are those that safetensors' lazy slices accept: rows, columns and vectors."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    stored = {"w": torch.randn(6, 4), "b": torch.randn(6)}
    save_file(stored, tmp_path / "x.safetensors")
    whole, cut = slice(None), Cut(6, 2, 4).slice
    takes = [("w", (cut, whole)), ("w", (whole, slice(1, 3))), ("b", (cut,)), ("b", (whole,))]
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        for name, take in takes:
            lazy, wanted = file.get_slice(name), stored[name][take]
            weight = Counting(stored[name])
            weight.tensor = lazy
            piece = Piece(weight.shape, take, torch.empty(wanted.shape))
            piece.load(weight)
            assert torch.equal(piece.into, wanted)
            assert weight.read == wanted.numel()
