"""Everything that the report of one sweep says, as data for its templates."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.report import facts
from core.report.baseline import Against, against
from core.report.effects import Effect, effects
from core.report.noise import median_interval
from core.report.table import Metric, Table
from core.report.words import duration, metric_value, moment, name_of, number
from core.sweep.equal import difference_text
from core.sweep.records import STATUSES, CellRecord


@dataclass(frozen=True)
class Stat:
    """A metric of a cell over its repeats."""

    values: list[float]
    median: float
    low: float
    high: float
    sure: float  # how surely low to high holds the median; 0 with one repeat

    @property
    def text(self) -> str:
        """0.62 (0.61 to 0.64)"""
        return f"{self.middle} ({self.spread})" if self.spread else self.middle

    @property
    def middle(self) -> str:
        return number(self.median)

    @property
    def spread(self) -> str:
        return f"{number(self.low)} to {number(self.high)}" if self.low < self.high else ""


@dataclass
class CellView:
    """All repeats of a cell."""

    id: str
    factors: dict[str, str]
    runs: list[CellRecord]
    stats: dict[str, Stat] = field(default_factory=dict)
    slots: list[tuple[str, str]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)  # of its output, in words
    compared: bool = False
    wrong_and_faster: list[str] = field(default_factory=list)  # metrics
    saturated: bool = False

    @property
    def name(self) -> str:
        return name_of(self.factors)

    @property
    def status(self) -> str:
        """ok, or how many ended how."""
        found = [(status, sum(run.status == status for run in self.runs)) for status in STATUSES]
        told = [(status, count) for status, count in found if count]
        return told[0][0] if len(told) == 1 else ", ".join(f"{count} {status}" for status, count in told)

    @property
    def reasons(self) -> list[tuple[str, list[int], str, str]]:
        """(status, repeats, reason, folder of the first) for each way in which it was not ok."""
        found: dict[tuple[str, str], list[CellRecord]] = {}
        for run in self.runs:
            if run.status != "ok":
                found.setdefault((run.status, run.reason), []).append(run)
        return [(status, [r.repeat for r in runs], why, runs[0].folder) for (status, why), runs in found.items()]

    @property
    def equal(self) -> str:
        return "NOT EQUAL" if self.differences else "equal" if self.compared else "not compared"

    @property
    def command(self) -> str:
        return shlex.join(self.runs[0].command)

    @property
    def ok(self) -> bool:
        return any(run.status == "ok" for run in self.runs)


@dataclass(frozen=True)
class Content:
    """What the templates are given."""

    table: Table
    cells: list[CellView]
    effects: list[Effect]
    fixed: list[tuple[str, str]]
    unasked: list[tuple[str, str]]  # differs, and is no factor
    troubles: list[dict[str, Any]]
    against: Against | None  # each cell and the baseline
    findings: list[tuple[str, str]]  # (good, bad, warn or plain; sentence)

    @property
    def title(self) -> str:
        return self.table.folder.resolve().name

    @property
    def command(self) -> str:
        return shlex.join(_short(self.table.sweep.command))

    @property
    def when(self) -> str:
        sweep = self.table.sweep
        return f"{moment(sweep.started)}, {duration(sweep.finished - sweep.started)}"

    @property
    def mains(self) -> list[Effect]:
        return [effect for effect in self.effects if len(effect.factors) == 1]

    @property
    def interactions(self) -> list[Effect]:
        return [effect for effect in self.effects if len(effect.factors) == 2]

    @property
    def explained(self) -> list[Metric]:
        return [metric for metric in self.table.headlines if metric.meaning]

    @property
    def failed(self) -> list[CellView]:
        return [cell for cell in self.cells if cell.reasons]

    @property
    def repeats(self) -> int:
        """Most that a cell has."""
        return max((sum(run.status == "ok" for run in cell.runs) for cell in self.cells), default=0)

    @property
    def sure(self) -> int:
        """Per cent."""
        found = [stat.sure for cell in self.cells for stat in cell.stats.values() if len(stat.values) == self.repeats]
        return round(100 * min(found, default=0.0))


def content_of(table: Table, baseline: str = "") -> Content:
    """Read what the cells left, and judge it."""
    cells = _cells(table)
    results = [(cell, table.result(cell)) for cell in table.sweep.cells]
    same, differ = facts.split([facts.facts_of(cell, result) for cell, result in results if cell.status == "ok"])
    shared = [
        o
        for o in (table.sweep.cells[0].overrides if table.sweep.cells else [])
        if o.partition("=")[0].lstrip("+~") not in table.factors
    ]
    troubles = facts.troubles((cell, result, _log(table.folder, cell)) for cell, result in results)
    found = effects(table)
    content = Content(
        table,
        cells,
        found,
        facts.held_fixed(same, shared),
        facts.not_asked_for(differ, table.factors),
        troubles,
        against(table, baseline),
        [],
    )
    from core.report.findings import findings

    content.findings.extend(findings(content))
    return content


def _short(command: Sequence[str]) -> list[str]:
    """The interpreter by its name alone."""
    return [Path(command[0]).name, *command[1:]] if command else []


def _log(folder: Path, cell: CellRecord) -> str:
    path = folder / cell.folder / "log.txt"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _cells(table: Table) -> list[CellView]:
    found: dict[str, CellView] = {}
    for run in table.sweep.cells:
        found.setdefault(run.hash, CellView(run.hash, run.factors, [])).runs.append(run)
    equal = table.sweep.equal_output
    compared = {folder for group in equal.get("groups", []) for folder in group["cells"]}
    for cell in found.values():
        rows = table.ok[table.ok["hash"] == cell.id]
        for metric in table.metrics.values():
            if values := [v for v in rows[metric.name].tolist() if math.isfinite(v)]:
                cell.stats[metric.name] = _stat(values)
        folders = {run.folder for run in cell.runs}
        cell.compared = bool(folders & compared)
        cell.differences = [difference_text(d) for d in equal.get("differences", []) if d["folder"] in folders]
        cell.saturated = cell.stats["saturated"].median > 0 if "saturated" in cell.stats else False
        cell.slots = [(kind, facts.slot_text(slot)) for kind, slot in cell.runs[0].plugins.items()]
    _faster(list(found.values()), table)
    return list(found.values())


def _stat(values: list[float]) -> Stat:
    ordered = sorted(values)
    low, high, sure = median_interval(ordered)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Stat(values, median, low, high, sure)


def _faster(cells: Sequence[CellView], table: Table) -> None:
    """Of cells with other output than their reference: where they look better."""
    by_folder = {run.folder: cell for cell in cells for run in cell.runs}
    for found in table.sweep.equal_output.get("differences", []):
        cell, reference = by_folder[found["folder"]], by_folder[found["reference"]]
        if cell is not reference:
            cell.wrong_and_faster = [m.name for m in table.headlines if _looks_better(m, cell, reference)]


def _looks_better(metric: Metric, cell: CellView, reference: CellView) -> bool:
    """Its worst repeat is better than the best of the reference."""
    ours, theirs = cell.stats.get(metric.name), reference.stats.get(metric.name)
    if not ours or not theirs or not metric.better:
        return False
    return min(ours.values) > max(theirs.values) if metric.better > 0 else max(ours.values) < min(theirs.values)


def value_text(metric: Metric, stat: Stat) -> str:
    """With its unit."""
    return metric_value(stat.median, metric)
