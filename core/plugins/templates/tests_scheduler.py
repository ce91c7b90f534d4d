"""The contract of a scheduler, and what this one promises beyond it."""

from __future__ import annotations

import pytest

from core.interfaces import HostContext, Limits, Request, SamplingParams
from core.plugins.templates.scheduler import MyPluginScheduler, Settings
from core.testing import SchedulerSuite


class TestContract(SchedulerSuite):
    name = "my-plugin"

    def test_the_shortest_goes_first(self) -> None:
        """By tokens of prompt and answer together; there is one seat."""
        engine, ended = self.engine(slots=1), []
        for prompt, wanted in ((20, 9), (2, 3), (9, 9), (2, 9)):
            engine.submit([7] * prompt, SamplingParams(temperature=0, max_tokens=wanted))
        while engine.busy:
            ended += [output.request.id for output in engine.step() if output.finish_reason]
        assert ended == [1, 3, 2, 0]


@pytest.mark.parametrize(("patience", "first"), [(0.0, "short"), (5.0, "long"), (50.0, "short")])
def test_patience(patience: float, first: str) -> None:
    """A long request that came 9 seconds before a short one."""
    scheduler = MyPluginScheduler(Settings(patience), HostContext(Limits(8, 64, 64), 4, 40, lambda: 10.0))
    long = Request(0, [1] * 30, SamplingParams(), limit=60, arrival=1.0)
    short = Request(1, [1], SamplingParams(), limit=3, arrival=10.0)
    ranked = sorted((long, short), key=lambda request: scheduler.rank(request, now=10.0))
    assert ranked[0] is {"short": short, "long": long}[first]
