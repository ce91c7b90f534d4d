"""Two sweeps compared: verdicts, tokens, files."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest

from core.report.__main__ import main
from core.report.compare import compare
from tests.report_sweeps import FACTORS, Values, make_sweep, noisy


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


def test_tokens_of_two_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal ones are said to be; one token that differs is named and red, and a faster sweep with it is called wrong."""
    plain = {"task": "bench", "sampling": {"temperature": 0}, "bench": {"repeats": 1, "warmup": 0}, "model": {"path": "x"}}
    for at, effects in ((0, {}), (1, {"fcfs": 0.5, "mixed": 0.5})):
        sweep = make_sweep(tmp_path / str(at), noisy(at, effects=effects), result={"settings": plain})
        for cell in sweep.cells:
            (tmp_path / str(at) / cell.folder / "tokens.json").write_text(json.dumps({"runs": [[[1, 2, 3], [4, 5]]]}))
    assert compare(tmp_path / "0", tmp_path / "1").output == (
        "equal output: the 40 runs that should have drawn the same tokens did"
    )
    (tmp_path / "1/jobs/mixed-paged/2/tokens.json").write_text(json.dumps({"runs": [[[1, 2, 3], [4, 6]]]}))
    assert main([str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("NOT EQUAL: 1 of 40 runs drew other tokens") and "faster, but not the same answers" in out[1]
    assert "scheduler=mixed kv_allocator=paged" in out[2] and "drew token 6 where" in out[2] and "position 1" in out[2]
    assert out[3:] == [str(tmp_path / "1" / name) for name in ("plots/compare.png", "compare.md", "compare.html")]
    page = (tmp_path / "1/compare.html").read_text()
    assert re.search(r'<li class="bad">NOT EQUAL: 1 of 40 runs .+ttft_ms_p50.+faster, but not the same answers</li>', page)
    assert '<li class="better">scheduler=fcfs kv_allocator=block_hash: ttft_ms_p50 -' in page
    assert "http" not in page and page.count("data:image/png;base64,") == 1 and page.count('<td class="better">better</td>') > 8
    assert "**NOT EQUAL**" in (tmp_path / "1/compare.md").read_text()


def test_cells_keep_their_order(tmp_path: Path) -> None:
    """Also where the first run of the first cell is an outlier that is left out."""
    measure = noisy(0)

    def with_outlier(chosen: dict[str, str], repeat: int) -> Values:
        times = 20.0 if repeat == 0 and [*chosen.values()] == ["fcfs", "block_hash"] else 1.0
        return {k: (v * times, u) for k, (v, u) in measure(chosen, repeat).items()}

    for folder in ("0", "1"):
        make_sweep(tmp_path / folder, with_outlier)
    rows = compare(tmp_path / "0", tmp_path / "1").rows
    cells = [f"scheduler={scheduler} kv_allocator={allocator}" for scheduler, allocator in product(*FACTORS.values())]
    assert [row.factors[0] for row in rows[:4]] == cells and rows[0].found.df < rows[1].found.df
