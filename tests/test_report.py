"""Reports of sweeps: what a reader must see is there, and the verdicts are right."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.report.__main__ import main
from core.report.compare import compare
from core.report.effects import effects
from core.report.noise import Difference, beyond, critical, difference, holm, median_interval
from core.report.table import read_table
from core.sweep.records import CellRecord, SweepRecord, read_sweep, write_sweep

ROOT = Path(__file__).parent.parent
FACTORS = {"scheduler": ["fcfs", "mixed"], "kv_allocator": ["block_hash", "paged"]}
Values = Mapping[str, tuple[float, str]]


def slot(name: str) -> dict[str, Any]:
    return {"name": name, "distribution": "inferlab", "version": "0.1.0", "settings": {}, "reason": "auto", "target": "x:Y"}


def make_sweep(
    folder: Path,
    measure: Callable[[dict[str, str], int], Values],
    factors: Mapping[str, Sequence[str]] = FACTORS,
    repeats: int = 5,
    endings: Mapping[str, tuple[str, str]] | None = None,  # hash -> status, reason
    commit: str = "abc",
    result: Mapping[str, Any] | None = None,  # further entries of every result.json
    **more: Any,
) -> SweepRecord:
    """As a real one leaves it; measure: (factors, repeat) -> metrics."""
    cells = []
    for repeat, values in product(range(repeats), product(*factors.values())):
        chosen = dict(zip(factors, values, strict=True))
        name = "-".join(values) or "one"
        status, reason = (endings or {}).get(name, ("ok", ""))
        place = folder / "jobs" / name / str(repeat)
        place.mkdir(parents=True, exist_ok=True)
        plugins = {"scheduler": slot(chosen.get("scheduler", "fcfs")), "attention": slot("sdpa")}
        environment = {"host": "here", "commit": commit, "packages": {"torch": "2.13"}, "argv": [name]}
        if status == "ok":
            metrics = {k: {"value": v, "unit": u, "low": None, "high": None} for k, (v, u) in measure(chosen, repeat).items()}
            settings = {**chosen, "load": {"rate": 8.0}, "seed": 0, "sweep": {"repeat": repeat}}
            bench = {"metrics": metrics, "model": "tiny", "load": "poisson", "dtype": "float32"}
            found = {"settings": settings, "plugins": plugins, "environment": environment, "bench": bench, "seed": 0}
            (place / "result.json").write_text(json.dumps({**found, "metrics": {}, **(result or {})}))
        overrides = ["task=bench", *(f"{k}={v}" for k, v in chosen.items()), "load.rate=8"]
        command = ["python", "-m", "core.run", *overrides, "prompts=['a b']"]
        record = CellRecord(name, repeat, chosen, overrides, status, reason, 1.0, f"jobs/{name}/{repeat}", plugins, environment)
        cells.append(CellRecord(**{**asdict(record), "command": command}))
    asked = {k: list(v) for k, v in factors.items()}
    known = {"repeats": repeats, "planned": len(cells), **more}
    sweep = SweepRecord(["/bin/python", "-m", "core.run", "-m"], 1e9, 1e9 + 90, False, asked, cells, **known)
    write_sweep(folder, sweep)
    return sweep


def noisy(seed: int, scatter: float = 0.03, drift: float = 0.0, effects: Mapping[str, float] | None = None) -> Any:
    """Metrics with noise; effects: what a value of a factor multiplies them with."""
    rng = np.random.default_rng(seed)
    machine = drift * rng.standard_normal()

    def measure(chosen: dict[str, str], repeat: int) -> Values:
        true = float(np.prod([(effects or {}).get(value, 1.0) for value in chosen.values()]))
        names = {"throughput_tok_s": 100.0, "ttft_ms_p50": 50.0, "tpot_ms_p50": 10.0, "itl_ms_p99": 30.0, "e2e_ms_p50": 500.0}
        draws = rng.standard_normal(len(names))
        found = {
            name: (base * true * float(np.exp(machine + scatter * z)), "ms")
            for (name, base), z in zip(names.items(), draws, strict=True)
        }
        return {**found, "hit_rate": (0.75 if chosen.get("kv_allocator") == "block_hash" else 0.0, "")}

    return measure


def test_students_t() -> None:
    """Against the printed tables."""
    for df, t in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (8, 2.306), (16, 2.120), (30, 2.042)):
        assert critical(0.05, df) == pytest.approx(t, abs=1e-3)
        assert beyond(t, df) == pytest.approx(0.05, abs=1e-4)
    assert critical(0.001, 5) == pytest.approx(6.869, abs=1e-3) and beyond(0.0, 7) == 1.0


def test_differences_and_their_noise() -> None:
    """Welch's test by hand; no noise is certainty; one repeat says nothing."""
    found = difference([np.array([1.0, 2, 3]), np.array([5.0, 6, 7, 8])], [-1, 1])
    assert found.estimate == pytest.approx(4.5) and found.error == pytest.approx((1 / 3 + 5 / 12) ** 0.5) and found.df == 4
    exact = difference([np.array([1.0, 1]), np.array([2.0, 2])], [-1, 1])
    assert exact.p == 0.0 and exact.interval == (1.0, 1.0)
    assert difference([np.array([1.0, 1]), np.array([1.0, 1])], [-1, 1]).p == 1.0
    assert difference([np.array([1.0]), np.array([2.0, 3])], [-1, 1]) == Difference(1.5)
    assert Difference(1.5).p is None and Difference(1.5).interval is None
    assert holm([0.04, None, 0.01, 0.9]) == [pytest.approx(0.08), None, pytest.approx(0.03), 0.9]


def test_intervals_of_medians() -> None:
    """Five repeats: smallest to largest holds the median in 94 of 100 cases; more repeats allow less."""
    assert median_interval([3, 1, 2, 5, 4]) == (1, 5, 0.9375)
    assert median_interval([7.0]) == (7.0, 7.0, 0.0)
    low, high, sure = median_interval(list(range(20)))
    assert (low, high) == (5, 14) and sure == pytest.approx(0.9586, abs=1e-4)


def test_results_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each cell and repeat; the reader sees what changed, what was equal, medians with their spread, verdicts,
    reasons, and how to run a cell again."""
    endings = {"mixed-paged": ("failed", "no | luck\nat all")}
    make_sweep(tmp_path, noisy(0, effects={"mixed": 1.5}), endings=endings)
    assert main([str(tmp_path)]) == 0
    assert str(tmp_path / "report.md") in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert len(rows) == 20 and [r["status"] for r in rows].count("failed") == 5
    assert list(rows[0])[:6] == ["hash", "repeat", "status", "scheduler", "kv_allocator", "throughput_tok_s"]
    assert float(rows[0]["itl_ms_p99"]) > 0 and rows[3]["itl_ms_p99"] == "" and rows[3]["reason"].startswith("no | luck")
    text = (tmp_path / "report.md").read_text()
    assert "**15 of 20 runs are ok (5 failed)" in text
    assert "| `scheduler` | fcfs, mixed |" in text and "| attention | sdpa (inferlab 0.1.0) |" in text
    assert "| load.rate | 8 |" in text and "| commit | abc |" in text
    assert "| mixed | paged | failed | 0 | - |" in text and r"no \| luck at all" in text
    row = re.search(r"\| scheduler: fcfs → mixed \| throughput_tok_s \| \+(\d\d) % \| (.+) to (.+) \| \*\*better\*\*", text)
    assert row and 40 <= int(row[1]) <= 60
    assert "**worse**" in text and "**better**" in text and "no difference beyond noise" in text
    assert "python -m core.run task=bench scheduler=fcfs kv_allocator=block_hash load.rate=8 'prompts=['\"'\"'a b'" in text


def test_what_is_no_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One message, with the way out."""
    assert main([str(tmp_path)]) == 1
    assert "give the folder of a sweep" in capsys.readouterr().err
    make_sweep(tmp_path, noisy(0), repeats=1)
    assert main([str(tmp_path), "--metrics", "itl_ms_p95"]) == 1
    err = capsys.readouterr().err
    assert "did you mean itl_ms_p99" in err and err.count("error: ") == 1


def test_one_repeat_says_nothing_about_noise(tmp_path: Path) -> None:
    make_sweep(tmp_path, noisy(0, effects={"mixed": 2.0}), repeats=1)
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert (
        "nothing can be said about noise" in text
        and "one repeat: noise unknown" in text
        and "better" not in text.split("##")[4]
    )


def test_starting_a_run_loads_nothing_of_the_report() -> None:
    """pandas and matplotlib cost a second."""
    heavy = "('pandas', 'matplotlib', 'core.report')"
    code = f"import sys, core.cli\ncore.cli.main(['--cfg', 'job'])\nprint([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_page_stands_alone(tmp_path: Path) -> None:
    """No outside links; what a cell says cannot break out of it; plots are inside."""
    make_sweep(tmp_path, noisy(0), endings={"mixed-paged": ("crashed", "</script><script>alert(1)</script>")})
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "http" not in page and page.count("<script>") == 1 and page.count("data:image/png;base64,") == 2
    assert (tmp_path / "plots/cells.png").read_bytes().startswith(b"\x89PNG")
    assert "![" in (tmp_path / "report.md").read_text()


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


@pytest.mark.parametrize("scatter", [0.03, pytest.param(0.2, marks=pytest.mark.nightly)])
def test_where_nothing_differs_nothing_is_called_a_difference(tmp_path: Path, scatter: float) -> None:
    """20 reports of equal cells: at least 9 of 10 name no difference. (Expected false alarms: at most 1 of 20.)"""
    wrong = 0
    for seed in range(20):
        make_sweep(tmp_path, noisy(seed, scatter))
        wrong += any(e.real for e in effects(read_table(tmp_path)) if e.metric.name != "hit_rate")
    assert wrong <= 2


def test_differences_are_found(tmp_path: Path) -> None:
    """A change of a fifth against a scatter of 3 %, in at least 9 of 10 reports, with one outlier in each."""
    found = 0
    for seed in range(20):
        measure = noisy(seed, effects={"mixed": 1.2})
        slow = {"scheduler": "fcfs", "kv_allocator": "paged"}

        def with_outlier(chosen: dict[str, str], repeat: int, measure: Any = measure, slow: Any = slow) -> Values:
            times = 10.0 if chosen == slow and repeat == 0 else 1.0
            return {k: (v * times, u) for k, (v, u) in measure(chosen, repeat).items()}

        make_sweep(tmp_path, with_outlier)
        real = {(e.factors, e.metric.name) for e in effects(read_table(tmp_path)) if e.real and len(e.factors) == 1}
        found += (("scheduler",), "ttft_ms_p50") in real
    assert found >= 18


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


def test_two_sweeps_of_the_same_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At least 9 of 10 pairs: no difference beyond noise. The machine drifts by 2 %, repeats scatter by 3 %."""
    verdicts = []
    for seed in range(20):
        for at in (0, 1):
            make_sweep(tmp_path / str(at), noisy(2 * seed + at, 0.03, drift=0.02))
        verdicts.append(compare(tmp_path / "0", tmp_path / "1").verdict)
    assert verdicts.count("no difference beyond noise") >= 18
    assert main([str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == verdicts[-1]


def test_two_sweeps_of_different_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A change by a quarter is found in at least 9 of 10 pairs; the commit that changed is named; others cannot be compared."""
    found = 0
    for seed in range(10):
        make_sweep(tmp_path / "0", noisy(2 * seed))
        make_sweep(tmp_path / "1", noisy(2 * seed + 1, effects={"mixed": 1.25}), commit="def")
        real = compare(tmp_path / "0", tmp_path / "1").real
        found += bool(real) and all("scheduler=mixed" in row.factors[0] for row in real)
    assert found >= 9
    assert main([str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    assert "| `environment.commit` | abc \\| def |" in (tmp_path / "1/compare.md").read_text()
    make_sweep(tmp_path / "2", noisy(0), factors={"overlap": ["0", "1"]})
    assert main([str(tmp_path / "0"), str(tmp_path / "2")]) == 1
    assert "compare sweeps of the same settings" in capsys.readouterr().err
