"""The tensor-parallel group of a rank: none for one rank, else gloo on a CPU and NCCL on GPUs.

A group is an object of its own, not torch's global one: several engines may live in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ONE_SHOT_BYTES = (
    1 << 18
)  # up to so many, gloo's ring is slower than an exchange of whole parts (benchmarks.tensor_parallel_reduce)
PATIENCE = timedelta(days=7)  # of a collective: who is dead is found by process handle and connection, not by waiting


class ExecutorLost(ChildProcessError):
    """The executor runs no further step. Requests stay unfinished until `LLM.restart()` takes them up again, or `close`."""

    requests: tuple[int, ...] = ()  # whose steps were lost

    def __str__(self) -> str:
        lost = f"; requests in the steps that were lost: {', '.join(map(str, self.requests))}" if self.requests else ""
        return f"{super().__str__()}{lost}"


class Solo:
    """A group of one rank: every collective is the identity."""

    rank: int = 0
    size: int = 1
    neighbours: int = 1  # ranks on this machine, which share its cores and memory

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over one rank: `x` itself."""
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The parts of one rank side by side: `x` itself."""
        return x

    def least(self, value: int) -> int:
        """The smallest of one value."""
        return value

    def check(self) -> None:
        """Nobody else can be gone."""


class Group:
    """This rank's end of a group of `size`. Collectives run on the current stream and may be captured in a graph."""

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, *, neighbours: int, address: str | None = None
    ) -> None:
        """store: a torch.distributed store that all ranks reach. address: of this machine, where gloo listens."""
        import torch
        import torch.distributed

        from core.device import use

        use(device)
        dist: Any = torch.distributed  # its type stubs lack the options
        self.rank, self.size, self.device, self.neighbours = rank, size, device, neighbours
        self.check: Callable[[], None] = lambda: None  # raises once another rank is known to be gone
        self._sum, self._least = dist.AllreduceOptions(), dist.AllreduceOptions()
        self._least.reduceOp = dist.ReduceOp.MIN
        if device.type == "cpu":
            options = dist.ProcessGroupGloo._Options()
            options._timeout = PATIENCE
            where = {"hostname": address} if address else {}
            make = dist.ProcessGroupGloo.create_device if address else dist.ProcessGroupGloo.create_default_device
            options._devices = [make(**where)]
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = PATIENCE
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
            self.all_reduce(torch.zeros(1, device=device))  # connects, which no graph may capture

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, written over `x`. Every rank gets the same bits."""
        if x.device.type == "cpu" and x.nbytes <= ONE_SHOT_BYTES:
            return x.copy_(self._parts(x).sum(0))
        self._group.allreduce([x], self._sum).wait()
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The ranks' parts, side by side along `dim`, on every rank."""
        parts = self._parts(x)
        dim %= x.dim()
        shape = (*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])
        return parts.movedim(0, dim).reshape(shape)

    def _parts(self, x: Tensor) -> Tensor:
        """[size, *shape of x]"""
        parts = x.new_empty((self.size, *x.shape))
        self._group._allgather_base(parts.flatten(0, 1), x.contiguous()).wait()
        return parts

    def least(self, value: int) -> int:
        """The smallest over all ranks."""
        import torch

        x = torch.tensor([value], dtype=torch.int64, device=self.device)
        self._group.allreduce([x], self._least).wait()
        return int(x.item())

    def abort(self) -> None:
        """Another rank is gone: whoever waits for it is to stop waiting. From any thread."""
        if hasattr(self._group, "abort"):
            self._group.abort()

    def close(self) -> None:
        """Give the connections up; all ranks do, or are gone."""
        if self._group is not None and hasattr(self._group, "shutdown"):
            self._group.shutdown()
        self._group = None
