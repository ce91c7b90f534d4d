"""report.html, the plots and the comparison with a baseline: what a reader sees and can click."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.report.__main__ import main
from core.report.axes import ticks
from core.report.baseline import against
from core.report.effects import series
from core.report.lines import line_plots, means, plotted
from core.report.table import Metric, read_table
from core.sweep.records import read_sweep, write_sweep
from tests.report_sweeps import make_sweep, noisy


def test_what_failed_and_what_is_wrong_is_red(tmp_path: Path) -> None:
    """An observer that was switched off, from result.json; a cell that is faster and draws other tokens than it should."""
    failed = {"loud": {"failures": 1, "raised": {"inferlab_step": "ValueError: <oops>"}}}
    make_sweep(tmp_path, noisy(0, effects={"mixed": 0.5}), result={"failed_observers": failed})
    sweep = read_sweep(tmp_path)
    wrong = sweep.cells[2]
    assert wrong.factors == {"scheduler": "mixed", "kv_allocator": "block_hash"}
    where = {"run": 0, "request": 3, "position": 7, "tokens": [5, None]}
    told = {"folder": wrong.folder, "reference": sweep.cells[0].folder, "factors": wrong.factors, **where}
    folders = [cell.folder for cell in sweep.cells]
    group = {"model": "tiny", "load": "poisson", "seed": 0, "reference": folders[0], "cells": folders, "equal": False}
    equal = {"compared": 20, "groups": [group], "differences": [told]}
    write_sweep(tmp_path, replace(sweep, equal_output=equal))
    assert main([str(tmp_path)]) == 0
    text, page = ((tmp_path / f"report.{kind}").read_text() for kind in ("md", "html"))
    assert "Observer loud failed in 20 runs: ValueError: <oops>" in text and "observer `loud`: ValueError: <oops>" in text
    assert '<li class="warn">Observer loud failed in 20 runs: ValueError: &lt;oops&gt; in inferlab_step</li>' in page
    red = re.findall(r'<li class="bad">(.+?)</li>', page)
    assert len(red) == 1 and "scheduler=mixed kv_allocator=block_hash is NOT EQUAL" in red[0]
    assert "ttft_ms_p50" in red[0] and "throughput" not in red[0] and "faster, but not the same answers" in red[0]
    assert page.count('<td class="bad">NOT EQUAL</td>') == 1 and "drew its end where" in page
    assert re.search(r"\*\*Output of scheduler=mixed kv_allocator=block_hash is NOT EQUAL .+same answers\.\*\*", text)


def test_the_page_stands_alone(tmp_path: Path) -> None:
    """No outside links; what a cell says cannot break out of it; plots are inside."""
    make_sweep(tmp_path, noisy(0), endings={"mixed-paged": ("crashed", "</script><script>alert(1)</script>")})
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "http" not in page and page.count("<script>") == 1 and page.count("data:image/png;base64,") == 3
    assert (tmp_path / "plots/cells.png").read_bytes().startswith(b"\x89PNG")
    assert "![" in (tmp_path / "report.md").read_text()


@pytest.mark.nightly
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """Chromium opens it from disk without an error on its console, and takes a picture of it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    make_sweep(tmp_path, noisy(0))
    assert main([str(tmp_path)]) == 0
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    place = [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'page.png'}", "--enable-logging=stderr"]
    page = (tmp_path / "report.html").as_uri()
    done = subprocess.run([browser, *flags, *place, page], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    assert (tmp_path / "page.png").stat().st_size > 10_000
    broken = tmp_path / "broken.html"  # what the assertion above would see
    broken.write_text("<script>nosuchthing()</script>")
    done = subprocess.run([browser, *flags, *place, broken.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" in done.stderr


CLICKS = """<script>
const rows = () => [...document.querySelectorAll("#cells tbody tr")].filter(r => r.offsetParent);
const column = at => rows().map(r => r.cells[at].textContent.trim());
const values = at => rows().map(r => Number(r.cells[at].dataset.value));
const heads = [...document.querySelectorAll("#cells th")], found = {sorted: {}, filtered: {}};
for (const name of ["kv_allocator", "ttft_ms_p50"]) { const at = heads.findIndex(h => h.textContent.startsWith(name));
  const read = () => name === "kv_allocator" ? column(at) : values(at);
  heads[at].click(); const up = read(); heads[at].click(); found.sorted[name] = [up, read()]; }
for (const box of document.querySelectorAll(".filters input")) { box.click();
  found.filtered[box.value] = rows().map(r => r.dataset.factors); box.click(); }
found.all = rows().length;
found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
found.inner = [...document.querySelectorAll(".wide")].map(w => w.scrollWidth - w.clientWidth);
document.title = "FOUND" + JSON.stringify(found);
</script>"""


@pytest.mark.nightly
def test_sorting_and_filtering_in_a_browser(tmp_path: Path) -> None:
    """Every filter hides exactly its rows; headings sort by number and by word, up and down; nothing is cut off at 1300 px."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    make_sweep(tmp_path, noisy(0, effects={"mixed": 30.0}))
    assert main([str(tmp_path)]) == 0
    page = tmp_path / "clicked.html"
    page.write_text((tmp_path / "report.html").read_text().replace("</body>", CLICKS + "</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    place = [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,3000", "--dump-dom"]
    done = subprocess.run([browser, *flags, *place, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    told = re.search(r"<title>FOUND(.+?)</title>", done.stdout)
    assert told, done.stderr
    found = json.loads(html.unescape(told[1]))
    for up, down in found["sorted"].values():
        assert len(up) == 4 and up == sorted(up) and down == sorted(up, reverse=True) and up != down
    assert set(found["filtered"]) == {"fcfs", "mixed", "block_hash", "paged"}
    for value, left in found["filtered"].items():
        assert len(left) == 2 and not any(value in json.loads(factors).values() for factors in left)
    assert found["all"] == 4 and found["wide"] <= 0 and max(found["inner"]) <= 0


def test_differences_from_a_baseline(tmp_path: Path) -> None:
    """From the first cell, or from the one that is named; a name that fits several cells or none is refused."""
    make_sweep(tmp_path, noisy(0, effects={"mixed": 2.0}))
    table = read_table(tmp_path)
    first = against(table)
    assert first and first.baseline == "scheduler=fcfs kv_allocator=block_hash" and len(first.cells) == 3
    for wrong, why in (
        ("scheduler=mixed", "2 cells fit"),
        ("schedule=fcfs", "mean scheduler?"),
        ("scheduler=x", "fcfs, mixed"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            against(table, wrong)
    assert main([str(tmp_path), "--baseline", "scheduler=mixed,kv_allocator=paged"]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "## Each cell against scheduler=mixed kv_allocator=paged" in text
    row = re.search(r"\| scheduler=fcfs kv_allocator=block_hash \| \*\*(-\d\d) %\*\*", text)
    assert row and -55 <= int(row[1]) <= -45
    assert re.search(r"\| scheduler=mixed kv_allocator=block_hash \| [-+0-9.]+ %", text)


def test_curves_of_numeric_factors() -> None:
    """Three numbers make a curve; two values, or words, are compared as they are."""
    table = SimpleNamespace(
        headlines=[], sweep=SimpleNamespace(factors={"load.rate": ["1", "2.5", "10"], "scheduler": ["a", "b"]})
    )
    assert plotted(table) == ([("load.rate", "scheduler")], [])  # type: ignore[arg-type]
    table.sweep.factors = {"load.rate": ["1", "2"], "scheduler": ["a", "b", "c"], "overlap": ["0"]}
    assert plotted(table) == ([], [("load.rate", "scheduler")])  # type: ignore[arg-type]
    table.sweep.factors = {"load.rate": ["1", "2", "4"]}
    assert plotted(table) == ([("load.rate", None)], [])  # type: ignore[arg-type]


def test_a_numeric_factor_is_drawn(tmp_path: Path) -> None:
    """With one failed value: the curve has the others."""
    make_sweep(tmp_path, noisy(0), {"load.rate": ["1", "2", "16", "64"]}, repeats=2, endings={"16": ("failed", "no")})
    table = read_table(tmp_path)
    assert list(line_plots(table)) == ["curves.png"]
    lines = means(series(table, Metric("hit_rate"))[0], "load.rate", {"1": 1.0, "2": 2.0, "16": 16.0, "64": 64.0})
    assert lines == {1.0: 0.0, 2.0: 0.0, 64.0: 0.0}


def test_ticks_have_room() -> None:
    """At most five, all inside, at least two: over five decades and over one hundredth."""
    for low, high in product((1e-4, 0.7, 99.0), (1.01, 1.5, 2.9, 3.1, 9.0, 47.0, 1e3, 1e6, 1e9)):
        found = ticks(low, low * high)
        assert 2 <= len(found) <= 5 and all(low <= value <= low * high for value in found), (low, high)
