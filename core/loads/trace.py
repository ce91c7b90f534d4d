"""Recorded workloads: arrivals and lengths (and, from Mooncake, which blocks of prompts are equal) out of a file.

mooncake: JSONL with timestamp (milliseconds), input_length, output_length, hash_ids (one per 512 tokens).
azure: CSV with TIMESTAMP (a date and time), ContextTokens, GeneratedTokens.
burstgpt: CSV with Timestamp (seconds), Model, Request tokens, Response tokens; a model is taken for a client. Rows without a
response are requests that failed there, and are left out.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.loads.settings import LoadSettings

MOONCAKE_BLOCK = 512  # tokens per hash id


@dataclass(frozen=True)
class Row:
    """One request of a trace."""

    time: float  # seconds since the first one
    input: int
    output: int
    client: str = ""
    hashes: tuple[int, ...] = ()
    block: int = 0  # tokens per hash


@dataclass(frozen=True)
class Columns:
    """What a format calls what the engine needs."""

    time: str
    input: str
    output: str
    seconds: Callable[[Any], float]
    client: str = ""
    hashes: str = ""

    @property
    def has_client(self) -> bool:
        return bool(self.client)


def _date(text: str) -> float:
    """Without a zone it is UTC: the clocks of this machine's zone may change in the middle of a trace."""
    found = datetime.fromisoformat(text.strip())
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


COLUMNS = {
    "mooncake": Columns("timestamp", "input_length", "output_length", lambda ms: float(ms) / 1e3, hashes="hash_ids"),
    "azure": Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", _date),
    "burstgpt": Columns("Timestamp", "Request tokens", "Response tokens", float, client="Model"),
}


def columns_of(s: LoadSettings) -> Columns:
    """Of the format that is named, or whose columns the first row has. ConfigError says what is there instead."""
    path = _path(s)
    first = next(_rows(path), None)
    if first is None:
        raise ConfigError(f"load.file={path} holds no request")
    fitting = {name: c for name, c in COLUMNS.items() if {c.time, c.input, c.output} <= first.keys()}
    wanted = list(COLUMNS) if s.format == "auto" else [s.format]
    for name in wanted:
        if name in fitting:
            return fitting[name]
    needed = "; ".join(f"{n}: {c.time}, {c.input}, {c.output}" for n, c in COLUMNS.items() if n in wanted)
    raise ConfigError(f"load.file={path} has the columns {', '.join(first)}; needed are {needed}")


def read_trace(s: LoadSettings) -> list[Row]:
    """The first `num_requests` requests by time, scaled. ConfigError names file and row."""
    path, columns, found = _path(s), columns_of(s), []
    for number, row in enumerate(_rows(path), 1):
        try:
            output = int(row[columns.output])
            if output > 0:
                found.append((columns.seconds(row[columns.time]), int(row[columns.input]), output, row))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"load.file={path}, request {number}: {type(error).__name__}: {error}") from None
    if len(found) < s.num_requests:
        raise ConfigError(
            f"load.num_requests={s.num_requests}, but {path} holds {len(found)} answered requests; "
            f"load.num_requests={len(found)} takes all"
        )
    found = sorted(found, key=lambda item: item[0])[: s.num_requests]
    start = found[0][0]
    return [_scaled(s, columns, time - start, *rest) for time, *rest in found]


def _scaled(s: LoadSettings, columns: Columns, time: float, tokens_in: int, tokens_out: int, row: Mapping[str, Any]) -> Row:
    def length(tokens: int) -> int:
        return max(1, math.ceil(tokens * s.length_scale))

    return Row(
        time=time * s.time_scale,
        input=length(tokens_in),
        output=length(tokens_out),
        client=str(row[columns.client]) if columns.client else "",
        hashes=tuple(row[columns.hashes]) if columns.hashes and row.get(columns.hashes) else (),
        block=length(MOONCAKE_BLOCK),
    )


def _path(s: LoadSettings) -> Path:
    path = Path(str(s.file)).expanduser()
    if not path.is_file():
        raise ConfigError(f"load.file={s.file}: no such file")
    return path


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """JSON objects, a line each, or rows of a CSV file with a header."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        if path.suffix.lower() in (".jsonl", ".json"):
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _object(path, number, line)
        else:
            yield from csv.DictReader(lines)


def _object(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"load.file={path}, line {number} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"load.file={path}, line {number} must hold a JSON object, it holds {type(found).__name__}")
    return found
