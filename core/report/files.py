"""Writes the files of a report. Each is whole or not there."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from core.report.content import content_of
from core.report.plots import plots
from core.report.table import read_table


def write_report(folder: Path, metrics: Sequence[str] = (), baseline: str = "") -> list[Path]:
    """results.csv, report.md, report.html, plots/*.png."""
    table = read_table(folder, metrics)
    content = content_of(table, baseline)
    drawn = plots(content)
    titles = [(name, title) for name, (title, _) in drawn.items()]
    images = [(title, base64.b64encode(png).decode()) for title, png in drawn.values()]
    return [
        put(folder / "results.csv", table.frame.to_csv(index=False)),
        *(put(folder / "plots" / name, png) for name, (_, png) in drawn.items()),
        put(folder / "report.md", render("report.md.j2", c=content, plots=titles)),
        put(folder / "report.html", render("report.html.j2", c=content, images=images)),
    ]


def render(template: str, **values: Any) -> str:
    """Text is escaped for HTML in *.html.j2."""
    world = Environment(
        loader=PackageLoader("core.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
    )
    world.filters["cell"] = cell
    return world.get_template(template).render(**values)


def cell(text: object) -> str:
    """For one line or one field of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def put(path: Path, content: str | bytes) -> Path:
    """A reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
    return path
