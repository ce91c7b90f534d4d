"""The report of a sweep: results.csv, report.md, report.html and plots, from what its cells left. Described in docs/reports.md.

Whatever is heavy (pandas, matplotlib, jinja2) is imported when a report is written, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write(folder: Path | str, metrics: Sequence[str] = (), baseline: str = "") -> list[Path]:
    """Everything, into the folder of the sweep. metrics: further ones to compare, by name; baseline: the cell that all others
    are compared with, as `scheduler=fcfs,overlap=0`; else the first that is ok. Answers what was written."""
    from core.report.files import write_report

    return write_report(Path(folder), metrics, baseline)
