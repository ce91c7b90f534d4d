"""The kernels of plugins.models.common.gemv. T tokens, IN inputs, OUT outputs."""

# Launch options and calls inside kernels mean nothing to a type checker.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def few(
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
    if scale is not None and GROUPS == 1:
        scales += (_inputs(scale, 0, IN, ROWS),)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    factors = ()
    if scale is not None:
        for t in tl.static_range(T):
            factors += (_factor(x + t * IN, eps, IN, ROWS, GROUPS),)
    sums, sums_up = (), ()
    for _ in tl.static_range(T):
        sums += (tl.zeros((ROWS, 256), tl.float32),)
        if GATED:
            sums_up += (tl.zeros((ROWS, 256), tl.float32),)
    for g in tl.static_range(GROUPS):
        if g + HELD < GROUPS:
            held += (_weights(weight, first, g + HELD, OUT, IN, ROWS),)
            if GATED:
                held_up += (_weights(weight + OUT * IN, first, g + HELD, OUT, IN, ROWS),)
        if scale is not None and GROUPS > 1:
            scales += (_inputs(scale, g, IN, ROWS),)
        new, new_up = (), ()
        for t in tl.static_range(T):
            part = _inputs(x + t * IN, g, IN, ROWS).to(tl.float32)
            if scale is not None:
                part = (part * factors[t] * scales[g].to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
            new += (sums[t] + tl.sum(held[g].to(tl.float32) * part, 1),)
            if GATED:
                new_up += (sums_up[t] + tl.sum(held_up[g].to(tl.float32) * part, 1),)
        sums, sums_up = new, new_up
    row = first + tl.arange(0, ROWS)
    for t in tl.static_range(T):
        total = tl.sum(sums[t], 1)
        up = tl.sum(sums_up[t], 1) if GATED else total
        _finish(total, up, bias, residual, out, row, t * OUT + row, row < OUT, OUT, GATED)


@triton.jit
def _weights(weight, first, group, OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr):
    row = first + tl.arange(0, ROWS)[:, None, None]
    column = group * 1024 + tl.arange(0, 4)[None, :, None] * 256 + tl.arange(0, 256)[None, None, :]
    at = weight + row.to(tl.int64) * IN + column
    if OUT % ROWS == 0 and IN % 1024 == 0:
        return tl.load(at)
    return tl.load(at, mask=(row < OUT) & (column < IN), other=0.0)


@triton.jit
def _inputs(x, group, IN: tl.constexpr, ROWS: tl.constexpr):
    """The same for every output: loaded as often, so that each warp has its copy and need not wait for another."""
    column = group * 1024 + tl.arange(0, 4)[None, :, None] * 256 + tl.arange(0, 256)[None, None, :]
    column = column + tl.zeros((ROWS, 1, 1), tl.int32)
    if IN % 1024 == 0:
        return tl.load(x + column)
    return tl.load(x + column, mask=column < IN, other=0.0)


@triton.jit
def _factor(x, eps, IN: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """1 / rms of one token."""
    squares = tl.zeros((ROWS, 256), tl.float32)
    for g in tl.static_range(GROUPS):
        part = _inputs(x, g, IN, ROWS).to(tl.float32)
        squares += tl.sum(part * part, 1)
    return tl.rsqrt(tl.sum(squares, 1) / IN + eps)[:, None, None]


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
def tiles(
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
        squares = tl.zeros((T, 256), tl.float32)
        for k in tl.static_range(0, IN, 256):
            wide = k + tl.arange(0, 256)[None, :]
            whole = tl.load(at_x + wide, mask=real & (wide < IN), other=0.0).to(tl.float32)
            squares += whole * whole
        factor = tl.rsqrt(tl.sum(squares, 1) / IN + eps)
    total, up = tl.zeros((T, ROWS), tl.float32), tl.zeros((T, ROWS), tl.float32)
    column = start + tl.arange(0, STEP)
    if scale is not None:
        by = tl.load(scale + column, mask=column < IN, other=0.0)
    for k in tl.range(start, start + SHARE, STEP, num_stages=STAGES):
        column = k + tl.arange(0, STEP)
        part = tl.load(at_x + column[None, :], mask=real & (column < IN)[None, :], other=0.0)
        if scale is not None:
            part = (part.to(tl.float32) * factor[:, None] * by.to(tl.float32)[None, :]).to(part.dtype)
            by = tl.load(scale + column + STEP, mask=column + STEP < IN, other=0.0)  # a step ahead of its use
        mask = inside & (column < IN)[:, None]
        total = tl.dot(part, tl.load(at_weight + column[:, None], mask=mask, other=0.0), total, input_precision="ieee")
        if GATED:
            second = tl.load(at_weight + OUT * IN + column[:, None], mask=mask, other=0.0)
            up = tl.dot(part, second, up, input_precision="ieee")
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
