"""Captured decode steps: model, LM head and sampler of a whole batch replayed by one call.

One graph per batch size, sampler variant and size class of the common prefix, over persistent buffers; smaller batches are
padded. A padded row has one token at position 0 of the scratch block. Rows are sorted, the longest first: the programs of a
kernel start in the order of rows, and what starts last should be short. A key that was not captured yet runs eagerly over the
same buffers, as the step that it is, and is captured behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core import device
from core.interfaces import Array, AttentionBackend, Batch, Rows, Sampled, Sampler, StepPlan

SECTIONS = {name: np.dtype(np.int64) for name in ("slots", "tokens", "positions", "draws", "kv_slots", "changed")}
SECTIONS |= {name: np.dtype(np.int32) for name in ("kv_lens", "blocks")}

Forward = Callable[[Batch, Rows, Any], Sampled]


def sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, every 8 up to 64, then every 16; the last one covers `largest`."""
    steps = [1, 2, 4, 8, *range(16, 65, 8), *range(80, largest + 16, 16)]
    return [n for i, n in enumerate(steps) if i == 0 or steps[i - 1] < largest]


@dataclass
class Captured:
    """What every replay of one graph sees."""

    batch: Batch
    rows: Rows
    state: Any
    graph: device.Graph | None = None


class DecodeGraphs:
    """Runs decode steps. `table` [slots, M] and `last_token` [slots] are the runner's, on the device."""

    def __init__(
        self,
        forward: Forward,
        attention: AttentionBackend,
        sampler: Sampler,
        table: Tensor,
        last_token: Tensor,
        block_size: int,
        depth: int,
    ) -> None:
        self.forward, self.attention, self.sampler = forward, attention, sampler
        self.table, self.last_token, self.block_size = table, last_token, block_size
        self.pad, self.columns = table.shape[0] - 1, table.shape[1]
        self.sizes = sizes(self.pad)
        largest = self.sizes[-1]
        self.staging = device.Staging(SECTIONS, largest, depth, table.device)
        self.block_table = torch.zeros(largest, self.columns, dtype=torch.int32, device=table.device)
        self.tokens = torch.zeros(largest, dtype=torch.int64, device=table.device)
        self.cu_q = torch.arange(largest + 1, dtype=torch.int32, device=table.device)
        self.last = torch.arange(largest, dtype=torch.int64, device=table.device)
        self.captured: dict[tuple[int, Hashable, int], Captured] = {}
        self.padded_rows = 0  # computed for nothing, since the graphs were made
        self.pool = device.graph_pool()

    def fits(self, plan: StepPlan) -> bool:
        """A step of plain decodes whose changes of the block table have room in the staging buffer."""
        if len(plan.slots) != len(plan.tokens) or len(plan.moves) or len(plan.mask_rows) or not (plan.draws == 1).all():
            return False
        return len(plan.new_blocks) <= self._padded(len(plan.slots))

    def run(self, plan: StepPlan, host_table: Array) -> tuple[Sampled, Array]:
        """`host_table` holds plan.new_blocks already. Returns the drawn rows, still on the device, and which of the plan's
        rows each is."""
        count, order = len(plan.slots), np.argsort(-plan.starts, kind="stable")
        size = self._padded(count)
        self.padded_rows += size - count
        self._stage(plan, order, host_table, size)
        rows = np.full(size, self.pad)
        rows[:count] = plan.slots[order]
        key = size, self.sampler.plan(rows), plan.shared_blocks.bit_length()
        step = self.captured.get(key)
        if step is None:
            step = self.captured[key] = self._prepare(size, key[1], plan.shared_blocks)
        elif step.graph is not None:
            step.batch.shared_blocks = plan.shared_blocks
            self.attention.plan(step.batch, step.state)
        drawn = step.graph.replay() if step.graph else self._first(step)
        return Sampled(drawn.tokens[:count], {name: values[:count] for name, values in drawn.extras.items()}), order

    def warm_up(self) -> None:
        """Capture every size with rows of padding, the largest first: the smaller ones then fit into its memory."""
        none = np.zeros(0, np.int32)
        empty = StepPlan(none, none, none, none, none, none.reshape(0, 3), none, none, none, (), none, none)
        for size in reversed(self.sizes):
            self._stage(empty, none, np.zeros((self.pad + 1, 1), np.int32), size)
            variant = self.sampler.plan(np.full(size, self.pad))
            step = self.captured[size, variant, 0] = self._prepare(size, variant, 0)
            self._first(step)

    def _padded(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _stage(self, plan: StepPlan, order: Array, host_table: Array, size: int) -> None:
        count, changes = len(plan.slots), len(plan.new_blocks)
        host = self.staging.next()
        for name, filler in (
            ("slots", self.pad),
            ("tokens", 0),
            ("positions", 0),
            ("draws", 1),
            ("kv_slots", 0),
            ("kv_lens", 1),
        ):
            host[name][count:size] = filler
        starts, slots = plan.starts[order], plan.slots[order]
        host["slots"][:count], host["tokens"][:count], host["positions"][:count] = slots, plan.tokens[order], starts
        host["draws"][:count] = host["kv_lens"][:count] = starts + 1
        blocks = host_table[slots, starts // self.block_size]
        host["kv_slots"][:count] = blocks.astype(np.int64) * self.block_size + starts % self.block_size
        # Unused entries write a zero where the row of padding has one; a later change of an entry is the one that holds.
        host["changed"][:size], host["blocks"][:size] = self.pad * self.columns, 0
        if changes:
            place = plan.new_blocks[:, 0].astype(np.int64) * self.columns + plan.new_blocks[:, 1]
            host["changed"][:changes] = place
            host["blocks"][:changes] = host_table[plan.new_blocks[:, 0], plan.new_blocks[:, 1]]
        self.staging.send()

    def _prepare(self, size: int, variant: Hashable, shared_blocks: int) -> Captured:
        on_device = {name: view[:size] for name, view in self.staging.on_device.items()}
        batch = Batch(
            tokens=self.tokens[:size],
            positions=on_device["positions"],
            cu_q=self.cu_q[: size + 1],
            kv_lens=on_device["kv_lens"],
            block_table=self.block_table[:size],
            kv_slots=on_device["kv_slots"],
            last=self.last[:size],
            max_q=1,
            max_kv=self.columns * self.block_size,
            num_decodes=size,
            shared_blocks=shared_blocks,
        )
        rows = Rows(on_device["slots"], on_device["draws"], None, variant)
        return Captured(batch, rows, self.attention.plan(batch))

    def _first(self, step: Captured) -> Sampled:
        """Run the step that it is, which also compiles what it needs; then capture it without running it."""
        drawn = self._work(step)
        step.graph = device.Graph(lambda: self._work(step), self.pool)
        return drawn

    def _work(self, step: Captured) -> Sampled:
        size, staged = len(step.batch.tokens), self.staging.on_device
        slots = staged["slots"][:size]
        self.table.view(-1).scatter_(0, staged["changed"][:size], staged["blocks"][:size])
        torch.index_select(self.table, 0, slots, out=step.batch.block_table)
        torch.where(staged["tokens"][:size] < 0, self.last_token[slots], staged["tokens"][:size], out=step.batch.tokens)
        return self.forward(step.batch, step.rows, step.state)
