"""All of them."""

from __future__ import annotations

from tests.broken_kit import allocators, archs, attention, samplers, schedulers

DEFECTS = [*schedulers.DEFECTS, *allocators.DEFECTS, *attention.DEFECTS, *archs.DEFECTS, *samplers.DEFECTS]
