"""Collected by the inner pytest of tests/test_broken_kit.py: the suite of its kind for every broken plugin."""

from __future__ import annotations

from importlib import import_module

from core.testing import KINDS, SUITES
from tests.broken_kit.defect import Defect
from tests.broken_kit.defects import DEFECTS


def suite(defect: Defect) -> type:
    """As an author would write it, for a declaration that is not installed."""
    name = KINDS[defect.kind]
    base = getattr(import_module(SUITES[name]), name)
    attributes = {"component": defect.component(), "examples": 25, "seeds": 1, "draws": 4000}
    return type(defect.title, (base,), attributes)


globals().update({defect.title: suite(defect) for defect in DEFECTS})
