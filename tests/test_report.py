"""Reports of sweeps: what a reader must see is there, and the verdicts are right."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.report.__main__ import main
from core.report.effects import effects
from core.report.noise import Difference, beyond, critical, difference, holm, median_interval
from core.report.table import read_table
from tests.report_sweeps import Values, make_sweep, noisy

ROOT = Path(__file__).parent.parent


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
