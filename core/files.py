"""JSON files: results, and those of models. Light: the parent of a sweep uses it without loading torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """All or nothing: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=indent, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> Any:
    """None where there is no such file, or not a whole one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file that belongs to a model; {} where there is no such file. ValueError names the file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON: {error}; download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds {type(found).__name__}; download it again")
    return found
