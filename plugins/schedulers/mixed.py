"""Decodes and prompt chunks in one step (Sarathi-Serve, Agrawal et al., 2024): no running request waits for a prompt."""

from __future__ import annotations

from core.interfaces import Request, Step
from plugins.schedulers.common import Queues


class Mixed(Queues):
    """Running requests that draw go first, then prompts under way, then new ones, each with what is left of the budget."""

    def schedule(self, step: Step) -> None:
        chunk = self.settings.max_chunk or None
        decodes = [request for request in self.running if not request.prefilling]
        prompts = [request for request in self.running if request.prefilling]
        self._decode(step, decodes)
        for request in prompts:
            if request in self.running and not step.grant(request, chunk) and step.short == "tokens":
                return
        while self.waiting and step.grant(self.waiting[0], chunk, reserve=self.waiting[0].length):
            self.running[self.waiting.popleft()] = None

    def _decode(self, step: Step, decodes: list[Request]) -> None:
        granted: set[Request] = set()
        for request in decodes:
            while request in self.running:
                if step.grant(request):
                    granted.add(request)
                    break
                if step.short != "blocks":
                    break
                # Never one that advances in this step; `request` itself is among the candidates.
                self.give_way(step, next(r for r in reversed(self.running) if r not in granted))
