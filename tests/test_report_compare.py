"""Two sweeps compared: verdicts, tokens, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.report.__main__ import main
from core.report.compare import compare
from tests.report_sweeps import make_sweep, noisy


def test_two_sweeps_of_the_same_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At least 9 of 10 pairs: no difference beyond noise. The machine drifts by 2 %, repeats scatter by 3 %."""
    verdicts = []
    for seed in range(10):
        for at in (0, 1):
            make_sweep(tmp_path / str(at), noisy(2 * seed + at, 0.03, drift=0.02))
        verdicts.append(compare(tmp_path / "0", tmp_path / "1").verdict)
    assert verdicts.count("no difference beyond noise") >= 9
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
