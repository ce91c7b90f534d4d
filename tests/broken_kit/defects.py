"""All of them."""

from __future__ import annotations

from tests.broken_kit import allocators, schedulers

DEFECTS = [*schedulers.DEFECTS, *allocators.DEFECTS]
