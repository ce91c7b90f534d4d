"""Gumbel noise as a pure function of (seed, position, token id), with equal bits on every device.

argmax(logits / T + noise) draws from softmax(logits / T). Nothing is stored and nothing advances: a draw does not depend on
batch mates, chunking, preemption or replay. A twin in another language has equal bits if it follows this recipe, in which all
integers are 32 bits and wrap, >> is the logical shift, and every float32 operation is rounded on its own (no fused
multiply-add, no library logarithm):

1. Row keys, from lo and hi (halves of the seed) and pos:  k0 = mix(mix(mix(lo + A) ^ hi) ^ pos),
   k1 = mix(mix(mix(pos + B) ^ hi) ^ lo), with mix(x): x ^= x >> 16; x *= M1; x ^= x >> 15; x *= M2; x ^= x >> 16.
2. Hash of a token:  x = token * M0 + k0; x ^= x >> 16; x *= M1; x ^= k1; x ^= x >> 15; x *= M2; x ^= x >> 16.
3. A uniform u = (x + 0.5) / 2**32 in (0, 1), held as its distance from the nearer end so that no digit is lost on either
   side: n = x or, if the top bit is set, ~x;  t = (float(n) + 0.5) * 2**-32. Without the top bit 1 - u = y + d with
   y = 1 - t, d = (1 - y) - t, the rounding error of y; with it 1 - u = y = t, d = 0.
4. E = neglog(y, d), noise = neglog(E, 0), where neglog(y, d) = -log(y + d): e = (bits(y) - bits(sqrt(0.5))) >> 23,
   arithmetic shift; m = y * 2**-e in [sqrt(0.5), sqrt(2)); f = (m - 1) + d;
   result = float(e) * -LN2 - f * (f * Q(f) + 1), Q by Horner's rule.

The noise is within 2e-6 of the exact value for that u; a token of probability 1 / 150,000 has u near 7e-6, known to 24 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


A, B = _signed(0x9E3779B9), 0x3C6EF372
M0, M1, M2 = _signed(0x9E3779B1), 0x7FEB352D, _signed(0x846CA68B)
SQRT_HALF = 0x3F3504F3  # bits of float32 sqrt(0.5)
LN2 = 0.6931471824645996  # float32
# log(1 + f) = f * (1 + f * Q(f)): minimax fit (iteratively reweighted least squares on 20,000 Chebyshev points in float64) over
# [sqrt(0.5) - 1, sqrt(2) - 1], relative error 1.8e-7 (2.8e-7 once evaluated in float32). Constant term first.
Q = (-0.5000032, 0.33334714, -0.24971229, 0.19906881, -0.17243227, 0.1618052, -0.10082392)


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """seeds [R] int64, positions [R] int64 (below 2**31), tokens [V] or [R, W] int32 -> float32 [R, V or W]"""
    return to_gumbel(bits(seeds, positions, tokens))


def bits(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """32 random bits each, as int32."""
    low, high, position = (seeds & 0xFFFFFFFF).to(torch.int32), (seeds >> 32).to(torch.int32), positions.to(torch.int32)
    first = _mix(_mix(_mix(low + A) ^ high) ^ position)[:, None]
    second = _mix(_mix(_mix(position + B) ^ high) ^ low)[:, None]
    x = tokens * M0 + first
    x ^= _shift(x, 16)
    x *= M1
    x ^= second
    return _finish(x)


def _mix(x: Tensor) -> Tensor:
    x = x ^ _shift(x, 16)
    x *= M1
    return _finish(x)


def _finish(x: Tensor) -> Tensor:
    x ^= _shift(x, 15)
    x *= M2
    x ^= _shift(x, 16)
    return x


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right of int32."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)


def to_gumbel(x: Tensor) -> Tensor:
    """Steps 3 and 4 on int32 bits."""
    top = x >> 31  # 0 or -1
    one = (top + 1).float()  # 1 below the middle, else 0
    t = ((x ^ top).float() + 0.5) * 2.0**-32
    signed = t * (1 - 2 * one)
    y = signed + one
    return _neglog(_neglog(y, (one - y) + signed))


def _neglog(y: Tensor, error: Tensor | None = None) -> Tensor:
    raw = y.view(torch.int32)
    exponent = (raw - SQRT_HALF) >> 23
    f = (raw - (exponent << 23)).view(torch.float32) - 1
    if error is not None:
        f += error
    p = f * Q[-1]
    for c in Q[-2::-1]:
        p += c
        p *= f
    p += 1
    p *= f
    return exponent.float() * -LN2 - p
