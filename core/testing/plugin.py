"""pytest plugin: `pytest -p core.testing.plugin --pyargs core.testing --inferlab-plugin NAME` runs the suites without code.

It is no entry point of pytest's, so that it is there only when asked for.
"""

from __future__ import annotations

import pytest

from core.testing import selection


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("inferlab", "conformance suites of inferlab plugins")
    group.addoption(
        "--inferlab-plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="run the suites of this plugin, distribution or component; may be given several times",
    )
    group.addoption("--inferlab-examples", type=int, metavar="N", help="runs of each state machine (default: 40)")


def pytest_configure(config: pytest.Config) -> None:
    selection.names[:] = config.getoption("--inferlab-plugin") or ()
    if (examples := config.getoption("--inferlab-examples")) is not None:
        selection.overrides["examples"] = examples
    try:
        selection.check(selection.names)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    # An author's own patterns must not hide the suites: nothing collected would look like nothing wrong.
    for option, pattern in (("python_files", "test_*.py"), ("python_classes", "Test"), ("python_functions", "test")):
        config.addinivalue_line(option, pattern)
