"""Fixtures of all tests."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest

from tests.clean_env import clean as clean
from tests.clean_env import wheel as wheel
from tests.plugins_fixtures import site as site

# A shell starts jobs in the background with SIGINT ignored, and children inherit that: tests that press Ctrl-C would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Hydra configures the root logger, with a handler on the stderr of that moment: not for the tests that follow."""
    root, ours = logging.getLogger(), logging.getLogger("inferlab")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
