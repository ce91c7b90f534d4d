"""Several ranks of one machine: this process is rank 0 and decides; the others run the same plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import TCPStore

from core.interfaces import Drawn, Executor, Sampled, StepPlan
from core.parallel import Group
from core.runner import Runner
from plugins.executors.processes import Processes, WorkerDied
from plugins.executors.wire import PLAN, pack


class Workers(Executor):
    def __init__(self, settings: Any, context: Any) -> None:
        super().__init__(settings, context)
        self.runner: Runner | None = None
        self.group: Group | None = None
        self.sound = False  # every rank has run all that was sent
        size, devices = context.tensor_parallel_size, _devices(context)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port
        self.processes = Processes(size)
        try:
            self._start(store, size, devices)
        except BaseException as error:
            self._lost(error)
            raise
        self.sound = True

    def _start(self, store: TCPStore, size: int, devices: list[str]) -> None:
        self.processes.begin(self.context, store.port, devices)
        self.group = Group(store, 0, size, torch.device(devices[0]), neighbours=size, address="127.0.0.1")
        self.group.check = self.processes.check
        self.runner = Runner(self.context, self.group)
        self.num_blocks = self.runner.num_blocks

    def launch(self, plan: StepPlan) -> Drawn:
        if not self.sound or self.runner is None:
            raise WorkerDied("the ranks are gone; make a new LLM")
        self.sound = False
        try:
            self.processes.check()
            self.processes.send(pack(plan), PLAN)
            drawn = self.runner.launch(plan)
        except BaseException as error:
            self._lost(error)
            raise
        self.sound = True
        return Watched(drawn, self)

    def _lost(self, error: BaseException) -> None:
        """End every rank. Raises WorkerDied from the error if one had died before."""
        try:
            if isinstance(error, RuntimeError | OSError | EOFError) and not isinstance(error, WorkerDied):
                try:
                    self.processes.explain()
                except WorkerDied as died:
                    raise died from error
        finally:
            self._end(kill=True)

    def report(self) -> Mapping[str, Any]:
        return self.runner.report() if self.runner else {}

    def close(self) -> None:
        self._end(kill=not self.sound)
        self.context = None

    def _end(self, *, kill: bool) -> None:
        self.sound = False
        self.processes.end(kill=kill)
        if self.runner is not None:
            self.runner.close()
            self.runner = None
        if self.group is not None:
            self.group.close(abort=kill)
            self.group = None


class Watched:
    """What was drawn, unless a rank died meanwhile."""

    def __init__(self, drawn: Drawn, workers: Workers) -> None:
        self.drawn, self.workers = drawn, workers

    def wait(self) -> Sampled:
        try:
            return self.drawn.wait()
        except BaseException as error:
            self.workers._lost(error)
            raise


def _devices(context: Any) -> list[str]:
    """One for each rank. ValueError if there are too few."""
    kind, _, first = context.device.partition(":")
    if kind == "cpu":
        return ["cpu"] * context.tensor_parallel_size
    last, count = int(first) + context.tensor_parallel_size - 1, torch.cuda.device_count()
    if last >= count:
        raise ValueError(
            f"tensor_parallel_size={context.tensor_parallel_size} on {context.device} needs {kind}:{first} to {kind}:{last}, "
            f"{count} are visible; lower tensor_parallel_size, or device={kind}:0"
        )
    return [f"{kind}:{n}" for n in range(int(first), last + 1)]
