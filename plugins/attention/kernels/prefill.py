"""Causal attention of chunks of many tokens over the paged cache, cached prefixes included.

A program takes M query tokens of one head. Tiles that all of them see come first, without a mask; those on the diagonal
follow. T tokens, B chunks, H query heads, K KV heads, D head size.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from plugins.attention.kernels.decode import LOG2E
from plugins.attention.kernels.tiles import attend, block_ids, load_rows


@dataclass(frozen=True)
class Tiles:
    """How the work is cut."""

    queries: int
    keys: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["table", "lens", "cu_q", "first", "table_row"])
def _prefill(
    q,
    keys,
    values,
    table,
    lens,
    cu_q,
    out,
    first,
    q_row,
    q_head,
    block_stride,
    head_stride,
    place_stride,
    table_row,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
):
    head, chunk = tl.program_id(0), tl.program_id(2) + first
    # The longest rows of the triangle start first, so that none of them is left for the end.
    tile = (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    token = tl.load(cu_q + chunk)
    count = tl.load(cu_q + chunk + 1) - token
    if tile >= count:
        return
    length = tl.load(lens + chunk)
    rows = tile + tl.arange(0, M)
    dims, offsets = tl.arange(0, DP), tl.arange(0, TILE)
    lowest = length - count + tile  # position of the first row
    last = length - count + rows
    at = (token + rows).to(tl.int64)[:, None]
    query = load_rows(q + at * q_row + head * q_head + dims[None, :], rows < count, dims, D, DP, True)
    keys += head // G * head_stride
    values += head // G * head_stride
    table += chunk.to(tl.int64) * table_row
    acc = tl.zeros((M, DP), tl.float32)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    full = (lowest + 1) // TILE * TILE
    end = tl.minimum(lowest + M, length)
    ids = block_ids(table, 0, full, offsets, P, P % TILE == 0)
    acc, total, top = attend(
        query, keys, values, table, ids, 0, full, last, acc, total, top, scale, block_stride, place_stride,
        D, DP, P, TILE, False, False, False,
    )  # fmt: skip
    ids = block_ids(table, full, end, offsets, P, P % TILE == 0)
    acc, total, top = attend(
        query, keys, values, table, ids, full, end, last, acc, total, top, scale, block_stride, place_stride,
        D, DP, P, TILE, True, True, False,
    )  # fmt: skip
    heads = tl.num_programs(0)
    mask = (rows < count)[:, None] & (dims < D)[None, :]
    tl.store(out + (at * heads + head) * D + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def tiles_for(max_q: int, size: int, itemsize: int) -> Tiles:
    """64 queries a tile, the fastest of those measured at block size 256; float32 has no tensor cores and takes small ones."""
    if itemsize == 4:
        return Tiles(16, 16, 4, 2)
    queries = 64 if max_q > 16 else 16
    return Tiles(queries, 32, 4, 2) if size > 128 else Tiles(queries, 64, 4, 3)


def prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lens: Tensor,
    cu_q: Tensor,
    out: Tensor,
    scale: float,
    max_q: int,
    first: int = 0,
    tiles: Tiles | None = None,
) -> None:
    """Chunks `first` and later of q [T, H, D] -> their rows of out [T, H, D], contiguous. `max_q`: tokens of the longest."""
    size = q.shape[2]
    tiles = tiles or tiles_for(max_q, size, keys.element_size())
    assert out.is_contiguous() and q.stride(-1) == keys.stride(-1) == 1 and keys.stride() == values.stride()
    _prefill[(q.shape[1], triton.cdiv(max_q, tiles.queries), len(lens) - first)](
        q,
        keys,
        values,
        table,
        lens,
        cu_q,
        out,
        first,
        *q.stride()[:2],
        *keys.stride()[:3],
        table.stride(0),
        scale * LOG2E,
        G=q.shape[1] // keys.shape[1],
        D=size,
        DP=max(16, triton.next_power_of_2(size)),
        P=keys.shape[2],
        M=tiles.queries,
        TILE=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
