"""One rank, in this process: the core's runner and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.interfaces import Drawn, Executor, StepPlan
from core.runner import Runner
from plugins.executors.rank import started


class Local(Executor):
    def __init__(self, settings: Any, context: Any) -> None:
        super().__init__(settings, context)
        if started():
            raise ValueError(
                "torchrun started several ranks, tensor_parallel_size is 1; set it to their number, or leave torchrun out"
            )
        self.runner: Runner | None = Runner(context)
        self.num_blocks = self.runner.num_blocks

    def launch(self, plan: StepPlan) -> Drawn:
        assert self.runner is not None, "the executor is closed"
        return self.runner.launch(plan)

    def report(self) -> Mapping[str, Any]:
        return self.runner.report() if self.runner else {}

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
            self.runner = None
        self.context = None
