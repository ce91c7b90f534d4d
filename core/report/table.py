"""A sweep as a table: a row for each cell and repeat, in the order in which they were run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from core.errors import did_you_mean
from core.files import read_json
from core.sweep.records import CellRecord, SweepRecord, read_sweep

FIRST, LAST = ["hash", "repeat", "status"], ["seconds", "reason", "folder"]
HEADLINES = (  # compared by default, where they are there
    *("throughput_tok_s", "goodput_req_s", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p99", "e2e_ms_p50", "hit_rate"),
    *("output_tokens_per_s", "decode_tokens_per_s", "ttft_s"),  # task=generate
)
MEANINGS = {  # for a reader who meets them the first time; defined in docs/metrics.md
    "throughput_tok_s": "drawn tokens per second, all requests together",
    "goodput_req_s": "requests per second that met their latency targets",
    "ttft_ms": "time to first token: from a request's arrival to its first token",
    "tpot_ms": "time per output token: the mean time from one token of a request to the next",
    "itl_ms": "inter-token latency: each single wait for the next token",
    "e2e_ms": "from a request's arrival to its last token",
    "hit_rate": "share of the prompt tokens that were found in the KV cache",
}
HIGHER = ("throughput_", "total_tok_s", "goodput_", "attainment", "deadline_attainment", "hit_rate", "jain", "mfu", "mbu")
LOWER = (
    *("ttft_", "tpot_", "itl_", "e2e_", "normalised_", "send_late_", "step_", "duration_s", "exposed_gap_", "generate_s"),
    *("preemptions", "recomputed_tokens", "padded_rows", "service_gap_", "queue_", "saturated", "start_s"),
)
SHARES = {"hit_rate", "attainment", "deadline_attainment", "kv_use", "kv_evictable", "mfu", "mbu", "jain"}


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str = ""
    better: int = 0  # 1: more is better, -1: less is better, 0: neither
    doc: str = ""

    @property
    def meaning(self) -> str:
        """In words, where it is known; of a distribution with its percentile."""
        base, _, percentile = self.name.rpartition("_p")
        if base in MEANINGS and percentile.isdigit():
            over = "half of the values are" if percentile == "50" else f"{percentile} of 100 values are"
            return f"{MEANINGS[base]}; {over} at most this"
        return MEANINGS.get(self.name, self.doc)

    @property
    def heading(self) -> str:
        """With its unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def direction(self) -> str:
        return {1: "higher is better", -1: "lower is better", 0: ""}[self.better]


@dataclass(frozen=True)
class Table:
    """frame: columns hash, repeat, status, the factors, the metrics, seconds, reason, folder."""

    folder: Path
    sweep: SweepRecord
    frame: pd.DataFrame
    metrics: dict[str, Metric]
    headlines: list[Metric]  # those that are compared

    @property
    def factors(self) -> list[str]:
        return list(self.sweep.factors)

    @property
    def ok(self) -> pd.DataFrame:
        return self.frame.loc[self.frame["status"] == "ok"]

    def result(self, cell: CellRecord) -> dict[str, Any]:
        """Its result.json; {} where there is none."""
        return result_of(self.folder, cell)


def read_table(folder: Path, wanted: Sequence[str] = ()) -> Table:
    """ValueError where there is no sweep, or no such metric."""
    sweep = read_sweep(folder)
    metrics: dict[str, Metric] = {}
    rows = []
    for cell in sweep.cells:
        values = measured(result_of(folder, cell)) if cell.status == "ok" else {}
        metrics.update({name: metric for name, (_, metric) in values.items()})
        rows.append({**_head(cell), **{name: value for name, (value, _) in values.items()}, **_foot(cell)})
    frame = pd.DataFrame(rows, columns=[*FIRST, *sweep.factors, *metrics, *LAST])
    return Table(folder, sweep, frame, metrics, headlines(metrics, wanted))


def result_of(folder: Path, cell: CellRecord) -> dict[str, Any]:
    found = read_json(folder / cell.folder / "result.json")
    return found if isinstance(found, dict) else {}


def measured(result: Mapping[str, Any]) -> dict[str, tuple[float, Metric]]:
    """Name -> value and what it is: the benchmark's, else the timings of task=generate; and those of plugins."""
    found = {name: _entry(name, m) for name, m in result.get("bench", {}).get("metrics", {}).items()}
    if not found:
        numbers = {k: v for k, v in result.get("timings", {}).items() if isinstance(v, int | float)}
        found = {name: _entry(name, {"value": value, "unit": _unit(name)}) for name, value in numbers.items()}
    for name, metric in (result.get("metrics") or {}).items():
        found[f"plugin_{name}" if name in found else name] = _entry(name, metric)
    return {name: entry for name, entry in found.items() if entry is not None}


def _entry(name: str, found: Mapping[str, Any]) -> Any:
    value = found.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    better = 1 if name.startswith(HIGHER) or "_per_s" in name else -1 if name.startswith(LOWER) else 0
    return float(value), Metric(name, found.get("unit") or "", better, found.get("doc") or "")


def _unit(name: str) -> str:
    return "tok/s" if name.endswith("tokens_per_s") else "s" if name.endswith("_s") else ""


def headlines(metrics: Mapping[str, Metric], wanted: Sequence[str]) -> list[Metric]:
    """The default ones, those that plugins explain, and those asked for."""
    for name in wanted:
        if name not in metrics:
            raise ValueError(f"metric {name}: no result has it{did_you_mean(name, metrics)} Known: {', '.join(metrics)}")
    names = [*(n for n in HEADLINES if n in metrics), *(n for n, m in metrics.items() if m.doc), *wanted]
    return [metrics[name] for name in dict.fromkeys(names)]


def _head(cell: CellRecord) -> dict[str, Any]:
    return {"hash": cell.hash, "repeat": cell.repeat, "status": cell.status, **cell.factors}


def _foot(cell: CellRecord) -> dict[str, Any]:
    return {"seconds": cell.seconds, "reason": cell.reason, "folder": cell.folder}
