"""One pass over the logits: argmax of logits / temperature + noise. Imported only where it is used.

A program goes through several tiles of one row. It computes the noise proper only for tiles that can hold a new best: a
cheap bound tells. What each program found is reduced by a second kernel. The noise has the bits of
plugins.samplers.common.noise, so both kernels are compiled without fused multiply-add. S rows, V vocabulary.
"""

# Launch options, calls inside kernels and names bound under a constant condition mean nothing to a type checker.
# pyright: reportCallIssue=false, reportUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.common.launch import await_turn, early
from plugins.samplers.common import noise
from plugins.samplers.common.table import INVERSE, SEED, WORDS

TILE, WARPS = 256, 1  # tokens per turn of a program, and its warps: one, so that a turn's maximum crosses no barrier
PROGRAMS = 4096  # what fills the device: a row is cut finer until there are that many

# Triton's functions see constants of this type only.
_A, _B, _M0, _M1, _M2 = (tl.constexpr(x & 0xFFFFFFFF) for x in (noise.A, noise.B, noise.M0, noise.M1, noise.M2))
_Q0, _Q1, _Q2, _Q3, _Q4, _Q5, _Q6 = (tl.constexpr(c) for c in noise.Q)
_SQRT_HALF, _LN2 = tl.constexpr(noise.SQRT_HALF), tl.constexpr(noise.LN2)
_TWO23, _SLOPE = tl.constexpr(0x4B000000), tl.constexpr(noise.LN2 / 2**15)
_CEILING = tl.constexpr((32 + 127 + 2**8) * noise.LN2 + 1e-3)  # 1e-3: more than the roundings of noise and bound
_TWO_32 = tl.constexpr(2.0**-32)
_INF, _LARGEST = tl.constexpr(float("inf")), tl.constexpr(0x7FFFFFFF)
_LOWEST = tl.constexpr(-0x7F800001)  # `_rank` of -inf
_NOTHING = tl.constexpr(-(1 << 63))
_INVERSE, _SEED, _WORDS = tl.constexpr(INVERSE), tl.constexpr(SEED), tl.constexpr(WORDS)


def draw(
    logits: Tensor,
    masks: Tensor | None,
    table: Tensor | None = None,
    slots: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """logits [S, V], masks [S, V] bool -> tokens [S] int64; -1 where no logit is finite or one is NaN.

    With a slot table: seeded draws, except for slots of inverse temperature 0. Without: the likeliest tokens.
    """
    rows, vocab = logits.shape
    tiles = -(-vocab // TILE)
    turns = -(-tiles // min(tiles, max(PROGRAMS // rows, 1)))
    programs = -(-tiles // turns)
    assert logits.stride(1) == 1 and (masks is None or masks.is_contiguous())
    parts = torch.empty(rows, programs, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _search[(rows, programs)](
        logits,
        logits.stride(0),
        masks if masks is None else masks.view(torch.uint8),
        table,
        slots,
        positions,
        parts,
        vocab,
        turns,
        MASKED=masks is not None,
        NOISE=table is not None,
        TILE=TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
        **early(logits),
    )
    _pick[(rows,)](parts, tokens, programs, 1 << (programs - 1).bit_length(), num_warps=1, **early(logits))
    return tokens


@triton.jit(do_not_specialize=["turns"])
def _search(
    logits,
    stride,
    masks,
    table,
    slots,
    positions,
    parts,
    vocab,
    turns,
    MASKED: tl.constexpr,
    NOISE: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes the best of a program's tiles as one number: rank of its score, then the token, lower ones first."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if NOISE:  # slots, table and positions were there before the step began
        words = table + tl.load(slots + row) * _WORDS
        inverse = tl.load(words + _INVERSE).to(tl.float32, bitcast=True)
        low, high = tl.load(words + _SEED).to(tl.uint32), tl.load(words + _SEED + 1).to(tl.uint32)
        position = tl.load(positions + row).to(tl.uint32)
        first = _mix(_mix(_mix(low + _A) ^ high) ^ position)
        second = _mix(_mix(_mix(position + _B) ^ high) ^ low)
    await_turn(EARLY)
    best, token, broken = float("-inf"), 0, 0
    for turn in range(turns):
        ids = (part * turns + turn) * TILE + tl.arange(0, TILE)
        inside = ids < vocab
        x = tl.load(logits + row * stride + ids, inside, float("-inf")).to(tl.float32)
        if MASKED:
            allowed = tl.load(masks + row * vocab + ids, inside, 0) != 0
            x = tl.where(allowed | (x != x), x, float("-inf"))
        x = tl.where(x < _INF, x, _INF)  # NaN becomes +inf: neither may occur
        bound = x
        if NOISE:  # noqa: SIM102 (the inner one is compiled only then)
            if inverse > 0:
                bound = x * inverse + _ceiling(_hash(ids, first, second))
        if tl.max(bound, 0) >= best:
            broken |= tl.max((x == _INF).to(tl.int32), 0)
            if NOISE:  # noqa: SIM102
                if inverse > 0:
                    bound = x * inverse + _gumbel(_hash(ids, first, second))
            top = tl.max(bound, 0)
            if top > best:
                token = tl.min(tl.where(bound == top, ids, _LARGEST), 0)
                best = top
    rank = tl.where(broken > 0, _LARGEST, _rank(best)).to(tl.int64)
    tl.store(parts + row * tl.num_programs(1) + part, (rank << 32) | (_LARGEST - token))


@triton.jit(do_not_specialize=["count"])
def _pick(parts, tokens, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The largest number of each row, as the token that it holds."""
    await_turn(EARLY)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    top = tl.max(tl.load(parts + row * count + i, i < count, _NOTHING), 0)
    rank = top >> 32
    token = _LARGEST - (top & _LARGEST)
    tl.store(tokens + row, tl.where((rank > _LOWEST) & (rank < _LARGEST), token, -1))


@triton.jit
def _rank(x):
    """int32 in the order of float32; equal for both zeros."""
    raw = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return raw ^ ((raw >> 31) & _LARGEST)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= _M1
    return _finish(x)


@triton.jit
def _finish(x):
    x ^= x >> 15
    x *= _M2
    return x ^ (x >> 16)


@triton.jit
def _hash(ids, first, second):
    x = ids.to(tl.uint32) * _M0 + first
    x ^= x >> 16
    x *= _M1
    return _finish(x ^ second)


@triton.jit
def _ceiling(bits):
    """Never less than the noise, seldom more by 0.06: -log(-log(1 - u)) <= -log(u), and log2(2**e * m) >= e + m - 1."""
    raw = (bits.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)  # e + 127 above 23 bits of m - 1
    fixed = ((raw >> 8) + _TWO23).to(tl.float32, bitcast=True)  # 2**23 + (raw >> 8), without a slow conversion
    return _CEILING - fixed * _SLOPE


@triton.jit
def _gumbel(bits):
    x = bits.to(tl.int32, bitcast=True)
    upper, t = x < 0, ((x ^ (x >> 31)).to(tl.float32) + 0.5) * _TWO_32
    y = tl.where(upper, t, 1 - t)
    return _neglog(_neglog(y, tl.where(upper, 0.0, (1 - y) - t)), 0.0)


@triton.jit
def _neglog(y, error):
    raw = y.to(tl.int32, bitcast=True)
    exponent = (raw - _SQRT_HALF) >> 23
    f = ((raw - (exponent << 23)).to(tl.float32, bitcast=True) - 1) + error
    q = (((((f * _Q6 + _Q5) * f + _Q4) * f + _Q3) * f + _Q2) * f + _Q1) * f + _Q0
    return exponent.to(tl.float32) * -_LN2 - f * (q * f + 1)
