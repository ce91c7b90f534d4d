"""The leading blocks that all rows of a decode step share, read once for all of them.

Every program takes some query rows of one KV head and a share of the prefix; what it finds goes to the scratch of
decode.py as one more part per row, and is combined there with what the row has for itself.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from plugins.attention.kernels.decode import LOG2E, PrefixParts, Scratch, Shape
from plugins.attention.kernels.tiles import attend, block_ids, load_rows

PARTS = 8


def prefix_tile(itemsize: int) -> int:
    """Positions per round."""
    return 16 if itemsize == 4 else 64


@triton.jit(do_not_specialize=["table", "common", "queries", "splits"])
def _prefix(
    q,
    keys,
    values,
    table,
    parts,
    sums,
    common,
    queries,  # B * G of one KV head
    q_row,
    q_head,
    block_stride,
    head_stride,
    place_stride,
    scale,
    splits,  # parts of its own that a row has room for
    R: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
):
    split, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(common)
    share = tl.cdiv(tl.cdiv(length, R), TILE) * TILE
    begin = split * share
    if begin >= length:
        return
    end = tl.minimum(begin + share, length)
    query = tl.program_id(2) * M + tl.arange(0, M)
    row, group = (query // G).to(tl.int64), query % G
    valid = query < queries
    dims = tl.arange(0, DP)
    at = row[:, None] * q_row + (head * G + group)[:, None] * q_head + dims[None, :]
    acc, total, top = attend(
        load_rows(q + at, valid, dims, D, DP, True),
        keys + head * head_stride,
        values + head * head_stride,
        table,
        block_ids(table, begin, end, tl.arange(0, TILE), P, P % TILE == 0),
        begin,
        end,
        query,
        tl.zeros((M, DP), tl.float32),
        tl.zeros((M,), tl.float32),
        tl.full((M,), float("-inf"), tl.float32),
        scale,
        block_stride,
        place_stride,
        D,
        DP,
        P,
        TILE,
        True,
        False,
        False,
    )
    # The last of the R places first, so that the parts of a short prefix lie next to the row's own.
    part = (row * tl.num_programs(1) + head) * (R + splits) + R - 1 - split
    at = (part * G + group)[:, None] * D + dims[None, :]
    tl.store(parts + at, acc / total[:, None], mask=valid[:, None] & (dims < D)[None, :])
    tl.store(sums + part * G + group, top + tl.log2(total), mask=valid)


def attend_prefix(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, scale: float, shape: Shape, scratch: Scratch, prefix: PrefixParts
) -> None:
    """q [B, H, D], table [B, M]; the prefix is the first prefix.length positions of row 0. Fills prefix.count parts per row."""
    rows, heads, size = q.shape
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    exact = q.element_size() == 4  # float32: no tensor cores, so small tiles
    m = 16 if exact else 64 if rows * group > 32 and size <= 128 else 32
    _prefix[(prefix.count, kv_heads, triton.cdiv(rows * group, m))](
        q,
        keys,
        values,
        table,
        scratch.parts,
        scratch.sums,
        prefix.length,
        rows * group,
        *q.stride()[:2],
        *keys.stride()[:3],
        scale * LOG2E,
        shape.splits,
        R=prefix.count,
        G=group,
        D=size,
        DP=max(16, triton.next_power_of_2(size)),
        P=block_size,
        M=m,
        TILE=prefix.tile,
        num_warps=4,
        num_stages=2 if exact or size > 128 else 3,
    )
