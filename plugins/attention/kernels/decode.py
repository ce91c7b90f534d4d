"""Attention of one query per row over the paged cache, split over many programs whatever the lengths are.

The grid is (splits, K, B) and does not depend on lengths, so a captured graph serves all of them: every program computes
its share of the row's positions on the device. Shares are equal up to a tile; those left empty end at once. The program
that finishes a row's last share combines the parts, so no second kernel waits for the slowest row.

B rows, H query heads, K KV heads, G = H / K, D head size, S splits, R parts of a common prefix (see prefix.py).
Parts of a row and KV head: R of the prefix, then S of its own. Each is a normalised output [G, D] with log2 of its sum [G].
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.interfaces import KVSpec
from plugins.attention.kernels.tiles import attend, block_ids, load_rows, prefetch
from plugins.common.launch import await_turn, early

LOG2E = 1.4426950408889634
PROGRAMS = 3.8  # per processor
COMBINE = 2048  # elements of one round of combining: more registers than the loop itself needs would cost occupancy


@dataclass(frozen=True)
class Shape:
    """How the work is cut, all known on the host."""

    splits: int
    tile: int  # positions per round
    least: int  # positions that a program takes at least, so that short rows are not shredded
    warps: int
    stages: int


@dataclass(frozen=True)
class Scratch:
    """Where parts wait for the last one. The counters are zero between launches."""

    parts: Tensor  # [B * K * (R + S) * G * D] float32
    sums: Tensor  # [B * K * (R + S) * G] float32
    arrived: Tensor  # [B * K] int32

    @classmethod
    def make(cls, rows: int, parts: int, spec: KVSpec, device: torch.device) -> Scratch:
        """Room for `parts` parts of each of `rows` rows."""
        outputs = rows * parts * spec.num_heads
        return cls(
            torch.empty(outputs * spec.head_size, dtype=torch.float32, device=device),
            torch.empty(outputs, dtype=torch.float32, device=device),
            torch.zeros(rows * spec.num_kv_heads, dtype=torch.int32, device=device),
        )

    def holds(self, rows: int, parts: int, spec: KVSpec) -> bool:
        """Whether that much fits."""
        return len(self.sums) >= rows * parts * spec.num_heads and len(self.arrived) >= rows * spec.num_kv_heads


@dataclass(frozen=True)
class PrefixParts:
    """What prefix.py has left in the scratch for every row before `decode`."""

    length: Tensor  # [1] int32, positions of the prefix; 0: there is none
    count: int  # parts at most
    tile: int  # the share of a part is a multiple of it


@triton.jit
def _combine(parts, sums, out, first, n, G: tl.constexpr, D: tl.constexpr, GD: tl.constexpr, ROUND: tl.constexpr):
    """Parts [first, first + n) of one row and KV head -> out [G * D]."""
    lane = tl.arange(0, GD)
    valid = lane < G * D
    acc = tl.zeros((GD,), tl.float32)
    total = tl.zeros((GD,), tl.float32)
    top = tl.full((GD,), float("-inf"), tl.float32)
    for start in range(first, first + n, ROUND):
        part = start + tl.arange(0, ROUND)
        mask = (part < first + n)[:, None] & valid[None, :]
        # Written by other programs during this launch: not to be taken from this processor's own cache.
        weight = tl.load(sums + part[:, None] * G + (lane // D)[None, :], mask=mask, other=float("-inf"), cache_modifier=".cg")
        x = tl.load(parts + part[:, None] * (G * D) + lane[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(tl.maximum(top, tl.max(weight, 0)), -1e30)  # finite in the lanes beyond G * D too
        weight = tl.exp2(weight - higher[None, :])
        decay = tl.exp2(top - higher)
        acc = acc * decay + tl.sum(weight * x, 0)
        total = total * decay + tl.sum(weight, 0)
        top = higher
    total = tl.maximum(total, 1.0)  # it is at least 1 but in the lanes beyond G * D
    tl.store(out + lane, (acc / total).to(out.dtype.element_ty), mask=valid)


# A step is never to wait for a compiler because a length or an address happens to be a multiple of 16.
@triton.jit(do_not_specialize=["table", "lens", "common", "table_row", "splits", "least"])
def _decode(
    q,
    keys,
    values,
    table,
    lens,
    out,
    parts,
    sums,
    arrived,
    common,
    q_row,
    q_head,
    block_stride,
    head_stride,
    place_stride,
    table_row,
    scale,
    splits,
    least,
    SINGLE: tl.constexpr,  # one split and no prefix: nothing to combine
    R: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,  # rows of the product: tensor cores take 16 at least
    D: tl.constexpr,
    DP: tl.constexpr,
    GD: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    PREFIX_TILE: tl.constexpr,
    ROUND: tl.constexpr,
    EARLY: tl.constexpr,
):
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + row)
    skipped, prefix_parts = 0, 0
    if R > 0:
        prefix = tl.load(common)
        # A padded row is shorter than the prefix of the others: it reads all that it has itself.
        skipped = tl.where(length > prefix, prefix, 0)
        prefix_share = tl.cdiv(tl.cdiv(prefix, R), PREFIX_TILE) * PREFIX_TILE
        prefix_parts = tl.where(skipped > 0, tl.cdiv(prefix, tl.maximum(prefix_share, 1)), 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(length - skipped, splits), TILE) * TILE, least)
    n = tl.cdiv(length - skipped, share)
    if split >= n:
        return
    begin = skipped + split * share
    end = tl.minimum(begin + share, length)
    keys += head * head_stride
    values += head * head_stride
    table += row.to(tl.int64) * table_row
    ids = block_ids(table, begin, end, tl.arange(0, TILE), P, P % TILE == 0)
    if EARLY and D == DP:
        # Lengths, table and nearly all of the tile were there before the step: only q and the newest position must wait.
        prefetch(keys, ids, begin, block_stride, place_stride, D, P, TILE)
        prefetch(values, ids, begin, block_stride, place_stride, D, P, TILE)
    await_turn(EARLY)

    group = tl.arange(0, GP)
    dims = tl.arange(0, DP)
    at = row.to(tl.int64) * q_row + (head * G + group)[:, None] * q_head + dims[None, :]
    query = load_rows(q + at, group < G, dims, D, DP, True)
    acc, total, top = attend(
        query,
        keys,
        values,
        table,
        ids,
        begin,
        end,
        group,
        tl.zeros((GP, DP), tl.float32),
        tl.zeros((GP, TILE), tl.float32),
        tl.full((GP,), float("-inf"), tl.float32),
        scale,
        block_stride,
        place_stride,
        D,
        DP,
        P,
        TILE,
        True,
        False,
        True,
    )
    total = tl.sum(total, 1)
    acc = acc / total[:, None]
    pair = row.to(tl.int64) * tl.num_programs(1) + head
    mask = (group < G)[:, None] & (dims < D)[None, :]
    inner = group[:, None] * D + dims[None, :]
    if SINGLE or n + prefix_parts == 1:
        tl.store(out + pair * (G * D) + inner, acc.to(out.dtype.element_ty), mask=mask)
    else:
        part = pair * (R + splits) + R + split
        tl.store(parts + part * (G * D) + inner, acc, mask=mask)
        tl.store(sums + part * G + group, top + tl.log2(total), mask=group < G)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == n - 1:
            tl.store(arrived + pair, 0)
            base = pair * (R + splits)
            _combine(
                parts + base * (G * D),
                sums + base * G,
                out + pair * (G * D),
                R - prefix_parts,
                prefix_parts + n,
                G,
                D,
                GD,
                ROUND,
            )


def shape_for(pairs: int, size: int, itemsize: int, max_kv: int, processors: int) -> Shape:
    """`pairs`: rows times KV heads. Nearly four programs per processor hide each other's waits and even out the rows' lengths;
    more only add parts to combine, and programs that find nothing to do (measured on an H200, benchmarks/gpu/attention.py)."""
    tile = 16 if itemsize == 4 else 32 if size > 128 else 64
    most = min(max(8, max_kv // 512), 64, -(-max_kv // tile))
    splits = max(1, min(-(-int(PROGRAMS * processors) // pairs), most))
    least = 128 if pairs <= processors // 2 else 256
    stages = max(2, min(3, (96 << 10) // (2 * tile * size * itemsize)))
    return Shape(splits, tile, least if splits > 1 else tile, 4, stages)


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lens: Tensor,
    out: Tensor,
    scale: float,
    shape: Shape,
    scratch: Scratch | None,
    prefix: PrefixParts | None = None,
) -> None:
    """q [B, H, D], keys and values [blocks, K, P, D], table [B, M], lens [B] -> out [B, H, D], contiguous."""
    rows, heads, size = q.shape
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    lanes = triton.next_power_of_2(group * size)
    assert out.is_contiguous() and q.stride(-1) == keys.stride(-1) == 1 and keys.stride() == values.stride()
    assert scratch is not None or (shape.splits == 1 and prefix is None)
    _decode[(shape.splits, kv_heads, rows)](
        q,
        keys,
        values,
        table,
        lens,
        out,
        scratch.parts if scratch else None,
        scratch.sums if scratch else None,
        scratch.arrived if scratch else None,
        prefix.length if prefix else None,
        *q.stride()[:2],
        *keys.stride()[:3],
        table.stride(0),
        scale * LOG2E,
        shape.splits,
        triton.cdiv(max(shape.least, 1), shape.tile) * shape.tile,
        SINGLE=shape.splits == 1 and prefix is None,
        R=prefix.count if prefix else 0,
        G=group,
        GP=max(16, triton.next_power_of_2(group)),
        D=size,
        DP=max(16, triton.next_power_of_2(size)),
        GD=lanes,
        P=block_size,
        TILE=shape.tile,
        PREFIX_TILE=prefix.tile if prefix else 1,
        ROUND=max(1, min(64, COMBINE // lanes)),
        num_warps=shape.warps,
        num_stages=shape.stages,
        **early(q),
    )
