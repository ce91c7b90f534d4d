"""Triton kernels with the names and the roundings of the plain functions beside them. Imported only where they are used.

Each value is read once and written once; float32 inside. T rows, E their width, I intermediate size.
"""

# Launch options and calls inside kernels mean nothing to a type checker.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.common.launch import await_turn, early

TILE = 1024  # values per program where a row is not longer


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. [T, E] -> [T, E]"""
    assert x.is_contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // width
    block, group, warps = shape(width)
    _rms_norm[(-(-rows // group),)](x, weight, out, rows, eps, width, block, group, num_warps=warps, **early(x))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum), [T, E] each, in the memory of `x` and of `residual`."""
    assert x.is_contiguous() and residual.is_contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    block, group, warps = shape(width)
    _add_rms_norm[(-(-rows // group),)](x, residual, weight, rows, eps, width, block, group, num_warps=warps, **early(x))
    return x, residual


def silu_mul(x: Tensor) -> Tensor:
    """[T, 2 I], gate then up -> silu(gate) * up [T, I]."""
    assert x.is_contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    block = min(1 << (width - 1).bit_length(), TILE)
    _silu_mul[(rows, -(-width // block))](x, out, width, block, num_warps=max(block // 256, 1), **early(x))
    return out


@cache
def shape(width: int) -> tuple[int, int, int]:
    """Columns and rows of a program, and its warps: 16 values per thread, up to 8 warps."""
    block = 1 << (width - 1).bit_length()
    group = max(TILE // block, 1)
    return block, group, min(max(block * group // 512, 1), 8)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(x, weight, out, rows, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr):
    place, column, inside = _tile(rows, WIDTH, BLOCK, GROUP)
    gain = tl.load(weight + column, column < WIDTH, 0.0)  # a constant: it need not wait
    await_turn(EARLY)
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    tl.store(out + place, _normed(value, gain, eps, WIDTH).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm(
    x, residual, weight, rows, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr
):
    place, column, inside = _tile(rows, WIDTH, BLOCK, GROUP)
    gain = tl.load(weight + column, column < WIDTH, 0.0)  # a constant: it need not wait
    await_turn(EARLY)
    value = tl.load(x + place, inside, 0.0).to(tl.float32) + tl.load(residual + place, inside, 0.0).to(tl.float32)
    total = value.to(residual.dtype.element_ty)  # the norm is that of the sum as it is stored
    tl.store(residual + place, total, inside)
    tl.store(x + place, _normed(total.to(tl.float32), gain, eps, WIDTH).to(x.dtype.element_ty), inside)


@triton.jit
def _tile(rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    row = (tl.program_id(0) * GROUP + tl.arange(0, GROUP))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    return row.to(tl.int64) * WIDTH + column, column, (row < rows) & (column < WIDTH)


@triton.jit
def _normed(value, gain, eps, WIDTH: tl.constexpr):
    scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    return value * scale[:, None] * gain.to(tl.float32)


@triton.jit
def _silu_mul(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_turn(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, start = column < WIDTH, x + row * 2 * WIDTH
    gate = tl.load(start + column, inside, 0.0).to(tl.float32)
    up = tl.load(start + WIDTH + column, inside, 0.0).to(tl.float32)
    hot = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (hot * up).to(out.dtype.element_ty), inside)
