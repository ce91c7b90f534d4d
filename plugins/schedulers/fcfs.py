"""First come, first served, prompts before decodes: the policy of nano-vLLM.

A step holds either prompts or decodes. Only its first prompt may be cut by the budget, and stays at the head of the queue
until it is done; blocks for a whole prompt are reserved at admission. While prompts keep coming, running requests wait:
`decode_after` bounds that.
"""

from __future__ import annotations

from typing import Any

from core.interfaces import HostContext, Step
from plugins.schedulers.common import Queues


class Fcfs(Queues):
    def __init__(self, settings: Any, context: HostContext) -> None:
        super().__init__(settings, context)
        self.prompt_steps = 0  # in a row

    def schedule(self, step: Step) -> None:
        bound = self.settings.decode_after
        if bound and self.prompt_steps >= bound and self.running:
            self._decode(step)
            self.prompt_steps = 0
        if step.empty:
            self._prefill(step)
            self.prompt_steps += 1
        if step.empty:
            self._decode(step)
            self.prompt_steps = 0

    def _prefill(self, step: Step) -> None:
        while self.waiting:
            request = self.waiting[0]
            if not step.grant(request, whole=not step.empty, reserve=request.length):
                return
            if request.remaining:
                return  # cut: its next chunk comes first in the next step
            self.running[self.waiting.popleft()] = None

    def _decode(self, step: Step) -> None:
        for request in list(self.running):
            while request in self.running and not step.grant(request) and step.short == "blocks":
                self.give_way(step, next(reversed(self.running)))  # the last to come, itself if need be
