"""From a plan to the arrays of a batch: arithmetic on int32 arrays only, so that it can be tested without a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.interfaces import Array, StepPlan


@dataclass(frozen=True, slots=True)
class Layout:
    """Host side of one step. T tokens, B chunks, S drawn rows, M blocks of the longest row."""

    tokens: Array  # [T] int64, ON_DEVICE where the value is in last_token
    token_slots: Array  # [T] int64, row of each token's request
    positions: Array  # [T] int64
    kv_slots: Array  # [T] int64
    cu_q: Array  # [B + 1] int32
    kv_lens: Array  # [B] int32
    block_table: Array  # [B, M] int32
    last: Array  # [S] int64, tokens that draw
    rows: Array  # [S] int64, slots of the rows that draw
    draw_positions: Array  # [S] int64, positions of the tokens to be drawn
    max_q: int
    max_kv: int


def update_table(table: Array, new_blocks: Array) -> None:
    """Apply table changes in order: of two changes of one entry the later one holds."""
    if len(new_blocks):
        slots, columns, blocks = new_blocks.T
        table[slots, columns] = blocks


def lay_out(plan: StepPlan, table: Array, block_size: int) -> Layout:
    """`table`: [slots, blocks], already updated with plan.new_blocks."""
    counts, ends = plan.counts.astype(np.int64), plan.starts + plan.counts
    cu_q = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=cu_q[1:])
    chunk = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(chunk)) - cu_q[chunk] + plan.starts[chunk]
    token_slots = plan.slots[chunk].astype(np.int64)
    blocks = table[token_slots, positions // block_size].astype(np.int64)
    last = _trailing(cu_q[1:].astype(np.int64), plan.draws)
    longest = -(-int(ends.max(initial=1)) // block_size)
    return Layout(
        tokens=plan.tokens.astype(np.int64),
        token_slots=token_slots,
        positions=positions,
        kv_slots=blocks * block_size + positions % block_size,
        cu_q=cu_q,
        kv_lens=ends.astype(np.int32),
        block_table=table[plan.slots, :longest],
        last=last,
        rows=token_slots[last],
        draw_positions=positions[last] + 1,
        max_q=int(counts.max(initial=0)),
        max_kv=int(ends.max(initial=0)),
    )


def _trailing(ends: Array, counts: Array) -> Array:
    """The last counts[i] indices before ends[i], for each i, concatenated."""
    if (counts == 1).all():
        return ends - 1
    row = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return ends[row] - counts[row] + np.arange(len(row)) - before[row]
