"""One pass over q, k and v: RMSNorm of q and k heads, rotary embedding, store of k and v into the paged cache.

T tokens, H query heads, K KV heads, D head size. A row is one head of one token; a program takes ROWS rows of q, of k or
of v, so that few and wide programs run whatever H and K are.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.interfaces import Prologue
from plugins.common.launch import await_turn, early


@triton.jit
def _load_halves(x, token_stride, head_stride, tokens, heads, dims, mask, HALF: tl.constexpr):
    at = x + tokens.to(tl.int64)[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)


@triton.jit
def _constants(weight, cos_sin, positions, dims, mask, HALF: tl.constexpr, NORM: tl.constexpr):
    """Norm weights of both halves, cosines and sines."""
    at = cos_sin + positions[:, None] * (2 * HALF) + dims[None, :]
    cos, sin = tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)
    gain, gain2 = cos, cos  # not used
    if NORM:
        gain = tl.load(weight + dims, mask=dims < HALF, other=0.0)
        gain2 = tl.load(weight + HALF + dims, mask=dims < HALF, other=0.0)
    return gain, gain2, cos, sin


@triton.jit
def _turned(first, second, gain, gain2, cos, sin, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves normed and rotated, in float32."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        first *= scale * gain.to(tl.float32)[None, :]
        second *= scale * gain2.to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_halves(at, first, second, mask, HALF: tl.constexpr):
    tl.store(at, first.to(at.dtype.element_ty), mask=mask)
    tl.store(at + HALF, second.to(at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slots", "positions", "tokens", "q_programs", "k_programs"])
def _prologue_store(
    q,
    k,
    v,
    out,
    keys,
    values,
    slots,
    positions,
    q_norm,
    k_norm,
    cos_sin,
    eps,
    tokens,
    q_programs,
    k_programs,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    block_stride,
    cache_head,
    place_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    HALF_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TURN: tl.constexpr,  # false: k is stored as it is, q is not touched
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Slots, positions, weights and tables were there before the step began: only q, k and v must wait.
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, HALF_PADDED)
    if program < q_programs:
        if TURN:
            row += program * ROWS
            token, head = row // H, row % H
            mask = (row < tokens * H)[:, None] & (dims < HALF)[None, :]
            position = tl.load(positions + token, mask=token < tokens, other=0)
            gain, gain2, cos, sin = _constants(q_norm, cos_sin, position, dims, mask, HALF, NORM)
            await_turn(EARLY)
            x, y = _load_halves(q, q_token, q_head, token, head, dims, mask, HALF)
            turned_x, turned_y = _turned(x, y, gain, gain2, cos, sin, eps, HALF, NORM)
            _store_halves(out + row.to(tl.int64)[:, None] * (2 * HALF) + dims[None, :], turned_x, turned_y, mask, HALF)
    else:
        is_key = program < q_programs + k_programs
        row += (program - q_programs - tl.where(is_key, 0, k_programs)) * ROWS
        token, head = row // K, row % K
        mask = (row < tokens * K)[:, None] & (dims < HALF)[None, :]
        slot = tl.load(slots + token, mask=token < tokens, other=0)
        place = (slot // P * block_stride + slot % P * place_stride + head * cache_head)[:, None] + dims[None, :]
        if is_key:
            if TURN:
                position = tl.load(positions + token, mask=token < tokens, other=0)
                gain, gain2, cos, sin = _constants(k_norm, cos_sin, position, dims, mask, HALF, NORM)
                await_turn(EARLY)
                x, y = _load_halves(k, k_token, k_head, token, head, dims, mask, HALF)
                turned_x, turned_y = _turned(x, y, gain, gain2, cos, sin, eps, HALF, NORM)
                _store_halves(keys + place, turned_x, turned_y, mask, HALF)
            else:
                await_turn(EARLY)
                x, y = _load_halves(k, k_token, k_head, token, head, dims, mask, HALF)
                _store_halves(keys + place, x, y, mask, HALF)
        else:
            await_turn(EARLY)
            x, y = _load_halves(v, v_token, v_head, token, head, dims, mask, HALF)
            _store_halves(values + place, x, y, mask, HALF)


def prologue_store(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, prologue: Prologue | None
) -> Tensor:
    """Store k and v at `slots`; with a prologue apply it to q and k first. -> q, as it came or normed and turned [T, H, D]"""
    tokens, heads, size = q.shape
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    assert size % 2 == 0 and keys.stride() == values.stride() and all(x.stride(-1) == 1 for x in (q, k, v, keys))
    rows = 8 if tokens * (heads + 2 * kv_heads) < 4096 else 32
    q_programs = triton.cdiv(tokens * heads, rows) if prologue else 0
    k_programs = triton.cdiv(tokens * kv_heads, rows)
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device) if prologue else q
    q_norm, k_norm = (prologue.q_norm, prologue.k_norm) if prologue else (None, None)
    _prologue_store[(q_programs + 2 * k_programs,)](
        q,
        k,
        v,
        out,
        keys,
        values,
        slots,
        positions,
        q_norm,
        k_norm,
        prologue.cos_sin if prologue else None,
        prologue.eps if prologue else 0.0,
        tokens,
        q_programs,
        k_programs,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *keys.stride()[:3],
        H=heads,
        K=kv_heads,
        P=block_size,
        HALF=size // 2,
        HALF_PADDED=triton.next_power_of_2(size // 2),
        ROWS=rows,
        TURN=prologue is not None,
        NORM=q_norm is not None,
        num_warps=rows // 8,
        **early(q),
    )
    return out
