"""Two queues and who gives way: what most schedulers start from."""

from __future__ import annotations

from collections import deque
from typing import Any

from core.interfaces import HostContext, Request, Scheduler, Step


class Queues(Scheduler):
    """`waiting` in order of service; `running` in order of admission (a dict: ordered, and removal is O(1))."""

    def __init__(self, settings: Any, context: HostContext) -> None:
        super().__init__(settings, context)
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        if request in self.running:
            del self.running[request]
        else:
            self.waiting.remove(request)

    def give_way(self, step: Step, request: Request) -> None:
        """Back to the head of the queue, behind a prompt under way; what it computed is computed again."""
        step.evict(request)
        del self.running[request]
        # A cut prompt keeps its blocks: if others stood before it, they could wait for these blocks for ever.
        self.waiting.insert(int(bool(self.waiting) and self.waiting[0].seat is not None), request)
