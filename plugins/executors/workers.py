"""Several ranks: this process is rank 0 and decides; the others run the same plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from core.interfaces import Drawn, Executor, Sampled, StepPlan
from core.parallel import ExecutorLost
from core.runner import Runner
from plugins.executors import torchrun
from plugins.executors.processes import Processes
from plugins.executors.rank import started
from plugins.executors.torchrun import Launched
from plugins.executors.wire import PLAN, pack

Ranks = Processes | Launched


class Workers(Executor):
    """Under torchrun the other ranks end in here: they run plans until rank 0 closes, and then exit."""

    def __init__(self, settings: Any, context: Any, ranks: Ranks | None = None) -> None:
        """ranks: of an earlier executor, that go on after this one."""
        super().__init__(settings, context)
        self.runner: Runner | None = None
        self._lent = ranks is not None
        self.ranks: Ranks | None = ranks or _start(context)
        try:
            self.ranks.build(context)
            self.runner = Runner(context, self.ranks.group)
        except BaseException as error:
            self._fail(error, "while starting")
            raise
        self.num_blocks = self.runner.num_blocks

    def launch(self, plan: StepPlan) -> Drawn:
        if self.ranks is None or self.runner is None:
            raise ExecutorLost("the ranks have been ended; LLM.restart() starts them again")
        try:
            self.ranks.check()
            self.ranks.send(PLAN, pack(plan))
            return Watched(self.runner.launch(plan), self)
        except BaseException as error:
            self._fail(error, "in a step")
            raise

    def _fail(self, error: BaseException, when: str) -> None:
        """The ranks no longer agree about what was done: end them. Raises ExecutorLost with the reason of a failing step."""
        ranks, self.ranks = self.ranks, None
        try:
            if ranks is not None:
                ranks.fail(error)
        finally:
            self._drop()
        if when == "in a step" and isinstance(error, Exception) and not isinstance(error, ExecutorLost):
            raise ExecutorLost(f"rank 0 failed {when}: {type(error).__name__}: {error}") from error

    def report(self) -> Mapping[str, Any]:
        return self.runner.report() if self.runner else {}

    def close(self) -> None:
        ranks, self.ranks = self.ranks, None
        if ranks is not None and not self._lent:
            ranks.end()
        self._drop()
        self.context = None

    def _drop(self) -> None:
        if self.runner is not None:
            self.runner.close()
            self.runner = None


class Watched:
    """What was drawn, unless a rank died meanwhile."""

    def __init__(self, drawn: Drawn, workers: Workers) -> None:
        self.drawn, self.workers = drawn, workers

    def wait(self) -> Sampled:
        try:
            sampled = self.drawn.wait()
            if self.workers.ranks is not None and self.workers.ranks.death is not None:
                raise self.workers.ranks.death  # its share of the sums never came
            return sampled
        except BaseException as error:
            self.workers._fail(error, "in a step")
            raise


def _start(context: Any) -> Ranks:
    return torchrun.join(context) if started() else Processes(_devices(context))


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
