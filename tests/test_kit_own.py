"""Our own plugins under the conformance kit, as an author's are: every component by its defaults, and settings that matter."""

from __future__ import annotations

import pytest

from core.testing import SchedulerSuite, selection

globals().update(selection.suites(["inferlab"], examples=25, seeds=1))


class TestFcfsBounded(SchedulerSuite):
    name = "fcfs"
    settings = {"decode_after": 2}  # noqa: RUF012
    examples, seeds = 25, 1


class TestMixedChunked(SchedulerSuite):
    name = "mixed"
    settings = {"max_chunk": 3}  # noqa: RUF012
    examples, seeds = 25, 1


deep = {"examples": 1500, "steps": 60, "seeds": 20, "draws": 200_000, "pytestmark": [pytest.mark.nightly]}
globals().update({f"{title}_long": suite for title, suite in selection.suites(["inferlab"], **deep)})
