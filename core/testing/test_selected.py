"""Collected by `pytest -p core.testing.plugin --pyargs core.testing`: a class for everything that was asked for."""

from __future__ import annotations

import pytest

from core.testing import selection

if not selection.names:
    raise pytest.UsageError(
        "say which plugin is to be tested: -p core.testing.plugin --pyargs core.testing --inferlab-plugin NAME"
    )
globals().update(selection.suites(selection.names, **selection.overrides))
