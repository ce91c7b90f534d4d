"""Attention backends with one defect each: the built-in definition, changed in one place.

H query heads, K KV heads, D head size, n tokens of a chunk, L positions it may read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.interfaces import Array, Batch, KVSpec, MultipleOf, Prologue
from plugins.attention.reference import Reference
from tests.broken_kit.defect import Defect


class Changeable(Reference):
    """Right: the definition in steps that a subclass may change."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: Any, prologue: Prologue) -> Tensor:
        self.store(layer, k, v, batch)
        bounds = batch.cu_q.tolist()
        parts = []
        for i, length in enumerate(batch.kv_lens.tolist()):
            tokens = slice(bounds[i], bounds[i + 1])
            slots = self.slots(batch.block_table[i], torch.arange(length))
            visible = self.visible(torch.arange(length), batch.positions[tokens, None])
            parts.append(self.attend(q[tokens], self.keys[layer][slots], self.values[layer][slots], visible))
        return torch.cat(parts)

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        self.keys[layer][batch.kv_slots], self.values[layer][batch.kv_slots] = k, v

    def slots(self, table: Tensor, at: Tensor) -> Tensor:
        return table[at // self.block_size].long() * self.block_size + at % self.block_size

    def visible(self, keys: Tensor, queries: Tensor) -> Tensor:
        return keys <= queries

    def scale(self, size: int) -> float:
        return size**-0.5

    def spread(self, x: Tensor, heads: int) -> Tensor:
        return x.repeat_interleave(heads // x.shape[1], dim=1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        k, v = (self.spread(x.float(), q.shape[1]) for x in (k, v))
        scores = torch.einsum("nhd,lhd->hnl", q.float(), k) * self.scale(q.shape[2])
        return torch.einsum("hnl,lhd->nhd", self.weights(scores, visible), v).to(q.dtype)

    def weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)


class NotCausal(Changeable):
    """Every token of a chunk sees the whole chunk."""

    def visible(self, keys: Tensor, queries: Tensor) -> Tensor:
        return (keys <= queries.max()).expand(len(queries), -1)


class BlindToItself(Changeable):
    """Off by one: a token does not see its own position."""

    def visible(self, keys: Tensor, queries: Tensor) -> Tensor:
        return (keys < queries) | (keys == 0)


class WrongScale(Changeable):
    """Scores are divided by the head size, not by its root."""

    def scale(self, size: int) -> float:
        return 1 / size


class WrongHeads(Changeable):
    """Query heads read the KV heads in turn, not in groups."""

    def spread(self, x: Tensor, heads: int) -> Tensor:
        return x.repeat(1, heads // x.shape[1], 1)


class OffAtTheEdge(Changeable):
    """Off by one at the edge of a block: the last place of a block is looked for in the next one."""

    def slots(self, table: Tensor, at: Tensor) -> Tensor:
        column = ((at + 1) // self.block_size).clamp(max=len(table) - 1)
        return table[column].long() * self.block_size + at % self.block_size


class ForgetsTheCache(Changeable):
    """Sees the tokens of its own chunk only, as if every chunk were a whole prompt."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return super().attend(q, k[-len(q) :], v[-len(q) :], visible[:, -len(q) :])


class ReadsTooEarly(Changeable):
    """Each chunk is stored when its turn comes, after the reads of those before it."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: Any, prologue: Prologue) -> Tensor:
        bounds, parts = batch.cu_q.tolist(), []
        for i, length in enumerate(batch.kv_lens.tolist()):
            tokens = slice(bounds[i], bounds[i + 1])
            own = batch.kv_slots[tokens]
            self.keys[layer][own], self.values[layer][own] = k[tokens], v[tokens]
            slots = self.slots(batch.block_table[i], torch.arange(length))
            visible = self.visible(torch.arange(length), batch.positions[tokens, None])
            parts.append(self.attend(q[tokens], self.keys[layer][slots], self.values[layer][slots], visible))
        return torch.cat(parts)


class ReadsWhatNobodyWrote(Changeable):
    """Reads whole blocks and multiplies what is hidden by 0, which is no protection from NaN."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: Any, prologue: Prologue) -> Tensor:
        whole = -(-batch.kv_lens // self.block_size) * self.block_size
        batch.kv_lens, lens = whole, batch.kv_lens
        try:
            return super().forward(layer, q, k, v, batch, state, prologue)
        finally:
            batch.kv_lens = lens


class WritesPaddingElsewhere(Changeable):
    """Padded rows are stored at place -1: the last place of the pool."""

    def store(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        places = torch.where(batch.kv_slots < self.block_size, -1, batch.kv_slots)
        self.keys[layer][places], self.values[layer][places] = k, v


class MovesAtOnce(Reference):
    """All sources are read before any target is written: pairs that follow from each other come out wrong."""

    def move(self, pairs: Array) -> None:
        for tensor in (self.keys, self.values):
            blocks = tensor.unflatten(1, (-1, self.block_size))
            blocks[:, pairs[:, 1]] = blocks[:, pairs[:, 0]]


class MovesOneLayer(Reference):
    """Blocks are copied in the first layer only."""

    def move(self, pairs: Array) -> None:
        for tensor in (self.keys[:1], self.values[:1]):
            blocks = tensor.unflatten(1, (-1, self.block_size))
            for source, target in pairs.tolist():
                blocks[:, target] = blocks[:, source]


class KeepsTheFirstPlan(Changeable):
    """A state that is given back is not refreshed: later steps read the block tables of the first one."""

    def plan(self, batch: Batch, state: Any = None) -> Any:
        return [batch.kv_lens.clone()] if state is None else state

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, state: Any, prologue: Prologue) -> Tensor:
        batch.kv_lens, lens = state[0], batch.kv_lens
        try:
            return super().forward(layer, q, k, v, batch, state, prologue)
        finally:
            batch.kv_lens = lens


class KeepsTheFirstCache(Reference):
    """A second `allocate`, as sizing makes it, changes nothing."""

    def allocate(self, spec: KVSpec, blocks: int, block_size: int) -> None:
        if not hasattr(self, "keys"):
            super().allocate(spec, blocks, block_size)


class CountsOneLayer(Reference):
    """`block_bytes` is that of one layer, so the cache is sized far too large."""

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        return super().block_bytes(spec, block_size) // spec.num_layers


class AnswersInFloat32(Changeable):
    """The answer has the type of the scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return super().attend(q, k, v, visible).float()


class WrongBeyondItsWord(Changeable):
    """Declares multiples of 16 and answers wrongly, without a word, where the block size is another."""

    def slots(self, table: Tensor, at: Tensor) -> Tensor:
        width = max(self.block_size // 16 * 16, 16)
        return table[(at // width).clamp(max=len(table) - 1)].long() * self.block_size + at % self.block_size


def broken(target: type, tests: Sequence[str], says: str, **more: Any) -> Defect:
    return Defect(target, tuple(f"test_{name}" for name in tests), says, "attention", **more)


OFF = r"Shape\(.*\): layer \d, Chunk\(.*\): position \d+ is off by "
DEFECTS = [
    broken(NotCausal, ["what_is_hidden_has_no_influence"], r"positions \[.*\] see position 11, which is hidden from them"),
    broken(BlindToItself, ["what_is_hidden_has_no_influence"], r"positions \[11\] do not see position 11"),
    broken(WrongScale, ["scale"], r"scores seem to be scaled by 0\.015\d*, not by 0\.125"),
    broken(WrongHeads, ["query_heads_read_their_kv_head"], r"KV head that each query head reads: \[0\.0, 1\.0, 0\.0"),
    broken(OffAtTheEdge, ["prompts"], OFF),
    broken(ForgetsTheCache, ["decodes", "chunks_and_cached_prefixes"], OFF),
    broken(ReadsTooEarly, ["a_chunk_reads_what_another_one_writes"], OFF),
    broken(ReadsWhatNobodyWrote, ["prompts"], OFF + "inf"),
    broken(WritesPaddingElsewhere, ["padding_harms_nobody"], r"Chunk\(name='kept', .*: position \d+ is off by"),
    broken(MovesAtOnce, ["blocks_move"], OFF),
    broken(MovesOneLayer, ["blocks_move"], r"layer 1, Chunk"),
    broken(KeepsTheFirstPlan, ["a_given_state_is_refreshed"], OFF),
    broken(KeepsTheFirstCache, ["the_cache_is_allocated_again"], r"index \d+ is out of bounds|out of range"),
    broken(
        CountsOneLayer, ["the_cache_is_allocated_again"], r"block_bytes counts all layers: (\d+) for 2, \1 for twice as many"
    ),
    broken(AnswersInFloat32, ["prompts"], r"forward gave torch\.float32 for torch\.bfloat16"),
    broken(
        WrongBeyondItsWord,
        ["what_is_not_declared_is_refused_or_right"],
        r"block_size=\d+ is not declared, not refused, and answered wrongly: " + OFF,
        capabilities={"block_size": MultipleOf(16)},
    ),
]
