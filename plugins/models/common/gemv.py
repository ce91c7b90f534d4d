"""Products of few tokens with large weights, limited by how fast the weights come: one kernel from residual to residual.

y = [residual +] [silu(gate) * up of] W [norm of] x, with the roundings of the plain functions. Up to FEW tokens every program
holds its rows of the weight in registers and multiplies on the CUDA cores; above, tiles go through the tensor cores and the
input width may be split over programs, of which the last one to finish adds the parts in order. Weights are requested
before the kernel waits for its predecessor (programmatic dependent launch), so nothing may write them just before.

T tokens, IN inputs, OUT outputs. A token's result does not depend on the others', but may round otherwise for another T.
"""

# Launch options and calls inside kernels mean nothing to a type checker.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.models.common import kernels


class Few(NamedTuple):
    """How a product of up to FEW tokens is laid out."""

    rows: int  # outputs of a program
    held: int  # pieces of WIDE inputs whose weights are requested before the first one is used
    warps: int = 4


class Tile(NamedTuple):
    """How a product of up to MOST tokens is laid out."""

    rows: int  # outputs of a program
    step: int  # inputs per step
    splits: int  # programs that share the inputs of the same outputs
    stages: int  # steps in flight
    warps: int = 4


FEW, MOST = 4, 16  # tokens; above MOST a model takes cuBLAS
NORM_INSIDE = 16  # tokens up to which the norm is part of the product
WIDE, HELD_BYTES = 1024, 32_768
# (outputs up to, outputs of a program): about two programs for each of 132 multiprocessors, more where there is more to read.
FEW_ROWS, FEW_ROWS_GATED = ((2048, 4), (1 << 30, 8)), ((4096, 8), (1 << 30, 8))
TILE_ROWS, TILE_ROWS_GATED, PROGRAMS, STEP, STAGES = 32, 16, 256, 128, 5


def few_plan(outs: int, ins: int, gated: bool) -> Few:
    """The layout for up to FEW tokens."""
    rows = next(rows for most, rows in (FEW_ROWS_GATED if gated else FEW_ROWS) if outs <= most)
    return Few(rows, max(HELD_BYTES // (rows * WIDE * (4 if gated else 2)), 1))


def tile_plan(outs: int, ins: int, gated: bool) -> Tile:
    """The layout above FEW tokens. A split has at least two steps; gate and up must meet in one program."""
    rows = TILE_ROWS_GATED if gated else TILE_ROWS
    splits = 1 if gated else max(min(PROGRAMS // -(-outs // rows), ins // (2 * STEP)), 1)
    return Tile(rows, STEP, splits, STAGES)


class Skinny:
    """The products of one device."""

    def __init__(self, device: torch.device) -> None:
        # Zero between kernels: the last program of a tile resets its counter. Allocated before any graph is captured.
        self.counters = torch.zeros(16_384, dtype=torch.int32, device=device)
        self.early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
        plan: Few | Tile | None = None,
    ) -> Tensor:
        """x [T, IN], weight [OUT, IN] or, gated, [2 OUT, IN], residual [T, OUT] -> [T, OUT], new memory."""
        assert x.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())
        (tokens, ins), outs = x.shape, weight.shape[0] // (2 if gated else 1)
        if plan is None:
            plan = (few_plan if tokens <= FEW else tile_plan)(outs, ins, gated)
        if norm is not None and tokens > NORM_INSIDE:
            x, norm = kernels.rms_norm(x, *norm), None
        out, (scale, eps) = x.new_empty(tokens, outs), norm or (None, 0.0)
        given = (x, weight, bias, scale, residual, out)
        if isinstance(plan, Few):
            self._few(given, eps, plan, gated)
        else:
            self._tiles(given, eps, plan, gated)
        return out

    def _few(self, given: tuple[Tensor | None, ...], eps: float, plan: Few, gated: bool) -> None:
        x, out = given[0], given[-1]
        assert x is not None and out is not None
        (tokens, ins), outs = x.shape, out.shape[1]
        constants = (outs, ins, tokens, plan.rows, plan.held, gated, self.early)
        _few[(-(-outs // plan.rows),)](*given, eps, *constants, num_warps=plan.warps, **self._launch())

    def _tiles(self, given: tuple[Tensor | None, ...], eps: float, plan: Tile, gated: bool) -> None:
        x, out = given[0], given[-1]
        assert x is not None and out is not None and not (gated and plan.splits > 1)
        (tokens, ins), outs = x.shape, out.shape[1]
        share = -(-ins // (plan.step * plan.splits)) * plan.step
        splits, padded = -(-ins // share), max(triton.next_power_of_2(tokens), 16)
        tiles = -(-outs // plan.rows)
        assert tiles <= len(self.counters)
        parts = x.new_empty((splits, tokens, outs), dtype=torch.float32) if splits > 1 else None
        # Rows that are not whole lines of 16 bytes cannot be fetched ahead in bulk.
        fetch = self.early and ins * x.element_size() % 16 == 0
        constants = (outs, ins, padded, plan.rows, plan.step, share, splits, gated, self.early, fetch)
        _tiles[(tiles, splits)](
            *given, parts, self.counters, eps, tokens, *constants, plan.stages, num_warps=plan.warps, **self._launch()
        )

    def _launch(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self.early else {}


@triton.jit
def _few(
    x,
    weight,
    bias,
    scale,
    residual,
    out,
    eps,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    HELD: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Threads lie along the inputs and warps along the outputs, so that only the last of three sums crosses threads."""
    GROUPS: tl.constexpr = (IN + 1023) // 1024
    first = tl.program_id(0) * ROWS
    held, held_up, scales = (), (), ()
    for g in tl.static_range(GROUPS):
        if g < HELD:
            held += (_weights(weight, first, g, OUT, IN, ROWS),)
            if GATED:
                held_up += (_weights(weight + OUT * IN, first, g, OUT, IN, ROWS),)
        if scale is not None:
            scales += (_inputs(scale, g, IN),)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    factors = ()
    if scale is not None:
        for t in tl.static_range(T):
            factors += (_factor(x + t * IN, eps, IN, GROUPS),)
    sums, sums_up = (), ()
    for t in tl.static_range(T):
        sums += (tl.zeros((ROWS, 256), tl.float32),)
        if GATED:
            sums_up += (tl.zeros((ROWS, 256), tl.float32),)
    for g in tl.static_range(GROUPS):
        if g + HELD < GROUPS:
            held += (_weights(weight, first, g + HELD, OUT, IN, ROWS),)
            if GATED:
                held_up += (_weights(weight + OUT * IN, first, g + HELD, OUT, IN, ROWS),)
        new, new_up = (), ()
        for t in tl.static_range(T):
            part = _inputs(x + t * IN, g, IN)
            if scale is not None:
                part = (part * factors[t] * scales[g]).to(x.dtype.element_ty).to(tl.float32)
            new += (sums[t] + tl.sum(held[g].to(tl.float32) * part, 0),)
            if GATED:
                new_up += (sums_up[t] + tl.sum(held_up[g].to(tl.float32) * part, 0),)
        sums, sums_up = new, new_up
    row = first + tl.arange(0, ROWS)
    for t in tl.static_range(T):
        total = tl.sum(sums[t], 1)
        up = tl.sum(sums_up[t], 1) if GATED else total
        _finish(total, up, bias, residual, out, row, t * OUT + row, row < OUT, OUT, GATED)


@triton.jit
def _weights(weight, first, group, OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr):
    row = first + tl.arange(0, ROWS)[None, :, None]
    column = group * 1024 + tl.arange(0, 4)[:, None, None] * 256 + tl.arange(0, 256)[None, None, :]
    at = weight + row.to(tl.int64) * IN + column
    if OUT % ROWS == 0 and IN % 1024 == 0:
        return tl.load(at)
    return tl.load(at, mask=(row < OUT) & (column < IN), other=0.0)


@triton.jit
def _inputs(x, group, IN: tl.constexpr):
    column = group * 1024 + tl.arange(0, 4)[:, None, None] * 256 + tl.arange(0, 256)[None, None, :]
    return tl.load(x + column, mask=column < IN, other=0.0).to(tl.float32)


@triton.jit
def _factor(x, eps, IN: tl.constexpr, GROUPS: tl.constexpr):
    """1 / rms of one token."""
    squares = tl.zeros((4, 1, 256), tl.float32)
    for g in tl.static_range(GROUPS):
        part = _inputs(x, g, IN)
        squares += part * part
    return tl.rsqrt(tl.sum(squares) / IN + eps)


@triton.jit
def _finish(total, up, bias, residual, out, row, place, inside, OUT: tl.constexpr, GATED: tl.constexpr):
    """Rounded as often as the plain path rounds: the product, SiLU, their product, the sum."""
    kind: tl.constexpr = out.dtype.element_ty
    if bias is not None:
        total += tl.load(bias + row, mask=row < OUT, other=0.0).to(tl.float32)
    total = total.to(kind)
    if GATED:
        if bias is not None:
            up += tl.load(bias + OUT + row, mask=row < OUT, other=0.0).to(tl.float32)
        gate = total.to(tl.float32)
        hot = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
        total = (hot * up.to(kind).to(tl.float32)).to(kind)
    if residual is not None:
        total = (total.to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)).to(kind)
    tl.store(out + place, total, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _tiles(
    x,
    weight,
    bias,
    scale,
    residual,
    out,
    parts,
    counters,
    eps,
    tokens,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    T: tl.constexpr,  # tokens, padded
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    SHARE: tl.constexpr,  # inputs per split
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    FETCH: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    start = split * SHARE
    if FETCH:
        _fetch(weight, tile * ROWS, start, OUT, IN, ROWS, SHARE)
        if GATED:
            _fetch(weight + OUT * IN, tile * ROWS, start, OUT, IN, ROWS, SHARE)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, row = tl.arange(0, T), tile * ROWS + tl.arange(0, ROWS)
    at_x = x + token[:, None] * IN
    at_weight = weight + row.to(tl.int64)[None, :] * IN
    real, inside = (token < tokens)[:, None], (row < OUT)[None, :]
    factor = tl.zeros((T,), tl.float32)
    if scale is not None:
        for k in range(0, IN, STEP):
            column = k + tl.arange(0, STEP)[None, :]
            part = tl.load(at_x + column, mask=real & (column < IN), other=0.0).to(tl.float32)
            factor += tl.sum(part * part, 1)
        factor = tl.rsqrt(factor / IN + eps)
    total, up = tl.zeros((T, ROWS), tl.float32), tl.zeros((T, ROWS), tl.float32)
    for k in tl.range(start, start + SHARE, STEP, num_stages=STAGES):
        column = k + tl.arange(0, STEP)
        part = tl.load(at_x + column[None, :], mask=real & (column < IN)[None, :], other=0.0)
        if scale is not None:
            by = tl.load(scale + column, mask=column < IN, other=0.0).to(tl.float32)
            part = (part.to(tl.float32) * factor[:, None] * by[None, :]).to(part.dtype)
        mask = inside & (column < IN)[:, None]
        total = tl.dot(part, tl.load(at_weight + column[:, None], mask=mask, other=0.0), total, input_precision="ieee")
        if GATED:
            wide = tl.load(at_weight + OUT * IN + column[:, None], mask=mask, other=0.0)
            up = tl.dot(part, wide, up, input_precision="ieee")
    place, valid = token[:, None] * OUT + row[None, :], real & inside
    if SPLITS == 1:
        _finish(total, up, bias, residual, out, row[None, :], place, valid, OUT, GATED)
    else:
        tl.store(parts + split * tokens * OUT + place, total, mask=valid)
        tl.debug_barrier()  # the whole program has stored before its first thread says so
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((T, ROWS), tl.float32)
            for s in range(SPLITS):
                total += tl.load(parts + s * tokens * OUT + place, mask=valid, other=0.0, cache_modifier=".cg")
            _finish(total, total, bias, residual, out, row[None, :], place, valid, OUT, GATED)
            tl.store(counters + tile, 0)


@triton.jit
def _fetch(weight, first, start, OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr):
    """Ask for this program's weights to be in the L2 cache, row by row, in four pieces."""
    row, piece = first + tl.arange(0, ROWS)[:, None], tl.arange(0, 4)[None, :] * (SHARE // 4)
    at = (weight + row.to(tl.int64) * IN + start + piece).to(tl.int64)
    left = tl.minimum(IN - start - piece, SHARE // 4)
    size = tl.where((row < OUT) & (left > 0), left, 0) * (weight.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        """{ .reg .pred some; setp.gt.s32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }""",
        "=r,l,r",
        [at, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
