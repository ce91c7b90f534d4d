"""What the attention kernels share: reading tiles of keys and values through a block table, and softmax over them.

M query rows, TILE positions, D head size, DP the power of two not below it, P positions per block. A tile that lies
within one block (WHOLE) needs one table entry, any other one entry per position. Softmax is in base 2: scores come
multiplied by log2(e). Offsets are 64-bit wherever a block id is multiplied.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_ids(table, start, end, offsets, P: tl.constexpr, WHOLE: tl.constexpr):
    """Blocks of positions start + offsets; 0 from `end` on, where the table may hold anything."""
    if WHOLE:
        ids = tl.load(table + start // P, mask=start < end, other=0)
    else:
        at = start + offsets
        ids = tl.load(table + at // P, mask=at < end, other=0)
    return ids.to(tl.int64)


@triton.jit
def tile_offsets(ids, start, offsets, block_stride, place_stride, P: tl.constexpr, WHOLE: tl.constexpr):
    """[TILE] where each position's row begins."""
    if WHOLE:
        place = start % P + offsets
    else:
        place = (start + offsets) % P
    return ids * block_stride + place * place_stride


@triton.jit
def prefetch(x, ids, start, block_stride, place_stride, D: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr):
    """Ask for a tile to be in the L2 cache. D: a power of two."""
    line: tl.constexpr = 1024 // x.dtype.element_ty.primitive_bitwidth  # 128 bytes
    lines: tl.constexpr = (D + line - 1) // line
    offsets = tl.arange(0, TILE)
    rows = tile_offsets(ids, start, offsets, block_stride, place_stride, P, P % TILE == 0)
    at = x + rows[:, None] + tl.arange(0, lines)[None, :] * line
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_rows(pointers, rows, dims, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """[M, DP]; zeros where `rows` is false and beyond D, so that nothing unwritten (NaN) enters a product."""
    if MASKED and D == DP:
        x = tl.load(pointers, mask=rows[:, None], other=0.0)
    elif MASKED:
        x = tl.load(pointers, mask=rows[:, None] & (dims[None, :] < D), other=0.0)
    elif D == DP:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=dims[None, :] < D, other=0.0)
    return x


@triton.jit
def attend(
    q,
    keys,
    values,
    table,
    ids,  # block_ids of the first tile
    begin,
    end,
    last,
    acc,
    total,
    top,
    scale,
    block_stride,
    place_stride,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # false: all tiles are full and visible to all rows
    CAUSAL: tl.constexpr,  # row m sees positions up to last[m]
    LAZY: tl.constexpr,  # total is [M, TILE], summed by the caller: spares a reduction over warps per tile
):
    """q [M, DP] against positions [begin, end), begin a multiple of TILE. -> (acc [M, DP], total, top [M]), carried on."""
    WHOLE: tl.constexpr = P % TILE == 0
    offsets = tl.arange(0, TILE)
    dims = tl.arange(0, DP)
    # The next tile's ids are loaded one round early: loaded in its own round they would count as a load that the tile's loads
    # depend on, and halve how far ahead those are issued.
    for start in tl.range(begin, end, TILE):
        next_ids = block_ids(table, start + TILE, end, offsets, P, WHOLE)
        at = tile_offsets(ids, start, offsets, block_stride, place_stride, P, WHOLE)[:, None] + dims[None, :]
        inside = start + offsets < end
        k = load_rows(keys + at, inside, dims, D, DP, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAUSAL:
            scores = tl.where(inside[None, :] & (start + offsets[None, :] <= last[:, None]), scores, float("-inf"))
        elif MASKED:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(top - higher)
        if LAZY:
            total = total * decay[:, None] + weights
        else:
            total = total * decay + tl.sum(weights, 1)
        v = load_rows(values + at, inside, dims, D, DP, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = higher
        ids = next_ids
    return acc, total, top
