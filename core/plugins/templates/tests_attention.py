"""The contract of an attention backend, in passes so small that most answers need several."""

from __future__ import annotations

from core.testing import AttentionSuite


class TestContract(AttentionSuite):
    name = "my-plugin"
    settings = {"blocks": 2}
