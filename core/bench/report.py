"""The table for people. Columns are the timed runs and their median."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

GIB = 1 << 30
ROWS: tuple[tuple[str, str, float, int], ...] = (  # label, dotted key, factor, decimals
    ("output tokens/s", "output_tokens_per_s", 1, 1),
    ("seconds", "seconds", 1, 3),
    ("TTFT p50 (ms)", "ttft_s.p50", 1e3, 1),
    ("TTFT p99 (ms)", "ttft_s.p99", 1e3, 1),
    ("TPOT p50 (ms)", "tpot_s.p50", 1e3, 2),
    ("TPOT p99 (ms)", "tpot_s.p99", 1e3, 2),
    ("ITL p99 (ms)", "itl_s.p99", 1e3, 2),
    ("steps", "steps", 1, 0),
    ("prefill tokens", "prefill_tokens", 1, 0),
    ("decode tokens", "decode_tokens", 1, 0),
    ("cached tokens", "cached_tokens", 1, 0),
    ("evictions", "evictions", 1, 0),
    ("schedule (us/step)", "host_per_step_us.schedule", 1, 1),
    ("launch (us/step)", "host_per_step_us.launch", 1, 1),
    ("  of a decode step", "host_per_decode_step_us.launch", 1, 1),
    ("wait (us/step)", "host_per_step_us.wait", 1, 1),
    ("commit (us/step)", "host_per_step_us.commit", 1, 1),
    ("exposed host gap (us/step)", "exposed_host_gap_per_step_us", 1, 1),
    ("share of the limit (%)", "limit.fraction", 1e2, 1),
    ("peer: output tokens/s", "peer.output_tokens_per_s", 1, 1),
    ("peer: seconds", "peer.seconds", 1, 3),
    ("times as fast as the peer", "peer.speedup", 1, 2),
)


def scaled(value: float, unit: str) -> str:
    """Three digits with the prefix that fits: 0.00042 s -> 420 us."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n")):
        if abs(value) >= factor * (1 if unit != "s" or factor <= 1 else math.inf):
            return f"{value / factor:,.3g} {prefix}{unit}" if value / factor < 1000 else f"{value / factor:,.0f} {prefix}{unit}"
    return f"{value:g} {unit}"


def look_up(record: Mapping[str, Any], key: str) -> Any:
    """A dotted key; None where it does not lead anywhere."""
    found: Any = record
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def table(bench: Mapping[str, Any]) -> str:
    """What is printed on stdout at the end."""
    columns = [*bench["repeats"], bench["median"]]
    rows = [["", *(f"run {i}" for i in range(len(columns) - 1)), "median"], *_rows(columns)]
    return "\n".join([_head(bench), "", *aligned(rows), "", *_feet(bench)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """First column to the left, all others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _rows(columns: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for label, key, factor, decimals in ROWS:
        values = [look_up(column, key) for column in columns]
        if any(value is not None for value in values):
            yield [label, *("-" if value is None else f"{value * factor:,.{decimals}f}" for value in values)]


def _head(bench: Mapping[str, Any]) -> str:
    first = bench["repeats"][0]
    return (
        f"load {bench['load']}: {first['requests']} requests, {first['input_tokens']:,} tokens in, "
        f"{first['output_tokens']:,} out (run 0); {bench['model']}, {bench['dtype']}, {bench['device']}"
    )


def _feet(bench: Mapping[str, Any]) -> Iterator[str]:
    limit, machine = bench["median"]["limit"], bench["machine"]
    if limit is not None:
        yield (
            f"limit {scaled(limit['seconds'], 's')} = {limit['output_tokens_per_s']:,.0f} tokens/s at "
            f"{scaled(machine['bandwidth'], 'B/s')} and {scaled(machine['flops'], 'FLOP/s')}, measured in this run"
        )
    if bench["metrics"].get("saturated", {}).get("value"):
        queue = " to ".join(f"{bench['metrics'][name]['value']:.1f}" for name in ("queue_half_way", "queue_at_end"))
        yield f"saturated: requests came faster than they were served, the queue grew from {queue} requests"
    yield "memory: " + ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in bench["memory"].items())
    if peer := bench["peer"]:
        yield f"peer: {peer['name']} {peer['version']}, in turn with ours, each with {peer['share']:.2f} of the memory"
    if trace := bench["profile"]:
        busy = "" if trace["gpu_busy_s"] is None else f", GPU at work for {trace['gpu_busy_s']:.3f} s of them"
        yield f"trace of {trace['steps']} steps in {trace['seconds']:.3f} s{busy}: {trace['trace']}"
