"""Products of few tokens with large weights, limited by how fast the weights come: one kernel from residual to residual.

y = [residual +] [silu(gate) * up of] W [norm of] x, with the roundings of the plain functions. Up to FEW tokens every program
holds its rows of the weight in registers and multiplies on the CUDA cores; above, tiles go through the tensor cores and the
input width may be split over programs, of which the last one to finish adds the parts in order. Weights are requested
before the kernel waits for its predecessor (programmatic dependent launch), so no kernel just before it may write them.

T tokens, IN inputs, OUT outputs. A token's result does not depend on the others', but may round otherwise for another T.
"""

# Launch options mean nothing to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from plugins.common.launch import able
from plugins.models.common import gemv_kernels, kernels


class Few(NamedTuple):
    """How a product of up to FEW tokens is laid out."""

    rows: int  # outputs of a program
    held: int  # pieces of 1,024 inputs whose weights are requested before the first one is used
    warps: int = 4


class Tile(NamedTuple):
    """How a product of up to MOST tokens is laid out."""

    rows: int  # outputs of a program
    step: int  # inputs per step
    splits: int  # programs that share the inputs of the same outputs
    stages: int  # steps in flight
    warps: int = 4


Plan = Few | Tile
FEW, FEW_INPUTS, MOST = 4, 3072, 4  # above MOST tokens a model takes cuBLAS (measured: benchmarks/gpu/gemm.py)
NORM_INSIDE = 16_384  # values of x up to which the norm is part of the product: every program computes it
# Outputs up to, layout. Enough programs that all weights of a small product are requested at once.
FEW_PLANS, FEW_GATED = ((2048, Few(4, 4)), (1 << 30, Few(8, 4))), ((1 << 30, Few(4, 2)),)
TILE_PLANS, TILE_GATED = ((1 << 30, Tile(32, 128, 8, 5)),), ((1 << 30, Tile(16, 128, 1, 5)),)
PROGRAMS = 256  # where there are as many, nothing is split further


def choose(tokens: int, outs: int, ins: int, gated: bool) -> Plan:
    """The layout for a shape: a fixed rule, so that equal steps give equal bits."""
    if tokens <= FEW and ins <= FEW_INPUTS:
        return next(plan for most, plan in (FEW_GATED if gated else FEW_PLANS) if outs <= most)
    tile = next(plan for most, plan in (TILE_GATED if gated else TILE_PLANS) if outs <= most)
    splits = min(tile.splits, -(-PROGRAMS // -(-outs // tile.rows)), ins // (2 * tile.step))
    return tile._replace(splits=max(splits, 1))


class Skinny:
    """The products of one device."""

    def __init__(self, device: torch.device) -> None:
        # Zero between kernels: the last program of a tile resets its counter. Allocated before any graph is captured.
        self.counters = torch.zeros(16_384, dtype=torch.int32, device=device)
        self.early = device.type == "cuda" and able(device.index or 0)

    def fits(self, tokens: int) -> bool:
        """Whether a step of so many tokens is faster with these products than with cuBLAS."""
        return tokens <= MOST

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
        plan: Plan | None = None,
    ) -> Tensor:
        """x [T, IN], weight [OUT, IN] or, gated, [2 OUT, IN], residual [T, OUT] -> [T, OUT], new memory."""
        assert x.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())
        (tokens, ins), outs = x.shape, weight.shape[0] // (2 if gated else 1)
        if plan is None:
            plan = choose(tokens, outs, ins, gated)
        if norm is not None and tokens * ins > NORM_INSIDE:
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
        gemv_kernels.few[(-(-outs // plan.rows),)](*given, eps, *constants, num_warps=plan.warps, **self._launch())

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
        gemv_kernels.tiles[(tiles, splits)](
            *given, parts, self.counters, eps, tokens, *constants, plan.stages, num_warps=plan.warps, **self._launch()
        )

    def _launch(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self.early else {}
