"""A setting with its line of documentation. Light: imports nothing but the standard library."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(default: Any, doc: str, unit: str = "") -> Any:
    """A field of a settings dataclass, with what `--help` and `plugins describe` say of it.

    doc: what it decides and its rule, without the default. unit: of the value (tokens, seconds, bytes, ...), "" if it has none.
    A list or dictionary is copied for each instance.
    """
    metadata = {"doc": doc, "unit": unit}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
