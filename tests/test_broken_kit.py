"""The conformance kit against plugins with one defect each: every defect is found, and named in words.

A suite that passes a broken plugin is a hole in the kit. All suites run in this process, in one pytest inside of the test.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

from tests.broken_kit.defect import Defect
from tests.broken_kit.defects import DEFECTS

SUITES = Path(__file__).parent / "broken_kit/suites.py"
QUIET = ["-q", "--tb=no", "-p", "no:cacheprovider", "--noconftest"]


@dataclass
class Reports:
    """A plugin of the inner pytest. `wanted`: class -> tests to run; all of them if None."""

    wanted: dict[str, tuple[str, ...]] | None
    failed: dict[str, dict[str, list[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    passed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        if self.wanted is not None:
            items[:] = [i for i in items if i.cls and i.originalname in self.wanted.get(i.cls.__name__, ())]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        title, name = report.nodeid.split("::")[1:3]
        name = name.partition("[")[0]
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[title][name].append(crash.message if crash else str(report.longrepr))
        elif report.when == "call" and report.passed:
            self.passed[title].add(name)


def run(wanted: dict[str, tuple[str, ...]] | None) -> Reports:
    reports, before = Reports(wanted), settings.get_current_profile_name()
    settings.register_profile("first failure", phases=[Phase.generate])  # the shortest one takes minutes
    settings.load_profile("first failure")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny: on a busy machine more threads wait for each other
    try:
        code = pytest.main([str(SUITES), *QUIET], plugins=[reports])
    finally:
        settings.load_profile(before)
        torch.set_num_threads(threads)
    assert code == pytest.ExitCode.TESTS_FAILED, code
    return reports


@pytest.fixture(scope="module")
def reports() -> Reports:
    """Only the tests that each defect names."""
    return run({defect.title: defect.caught for defect in DEFECTS})


def check(defect: Defect, reports: Reports) -> None:
    failed = reports.failed[defect.title]
    missed = sorted(set(defect.caught) - set(failed))
    assert not missed, f"{missed} passed with {defect.name}: {defect.target.__doc__}"
    messages = [message for name in defect.caught for message in failed[name]]
    assert any(re.search(defect.says, message) for message in messages), "\n\n".join(messages)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{d.kind}-{d.name}")
def test_every_defect_is_named(defect: Defect, reports: Reports) -> None:
    check(defect, reports)
