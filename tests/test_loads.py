"""Loads: arrivals, sessions, labels and traces as their settings say; the pool of tight_kv."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import fields, replace
from itertools import takewhile
from pathlib import Path

import pytest

from core.bench.report import scaled
from core.bench.task import run_job
from core.config import compose
from core.errors import ConfigError
from core.loads import LoadSettings, draw_load
from core.loads.settings import ARRIVALS

ROOT = Path(__file__).parent.parent

MANY = LoadSettings(num_requests=4000, input_min=1, input_max=1, output_min=1, output_max=1, rate=5.0)


def gaps(settings: LoadSettings) -> list[float]:
    times = [at for at in draw_load(settings, 0, 100).arrivals if at is not None]
    assert times == sorted(times) and len(times) == settings.num_requests
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize(("arrival", "burstiness", "variation"), [("poisson", 1, 1), ("gamma", 0.25, 2), ("gamma", 4, 0.5)])
def test_gaps(arrival: str, burstiness: float, variation: float) -> None:
    """Their mean is 1 / rate; their coefficient of variation is 1 / sqrt(burstiness). 4,000 seeded gaps."""
    found = gaps(replace(MANY, arrival=arrival, burstiness=burstiness))
    assert statistics.fmean(found) == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(variation, rel=0.08)


def test_a_ramp() -> None:
    """From 5 to 15 per second: 4,000 requests take 400 s, and the rates at the ends are those."""
    found = gaps(replace(MANY, arrival="ramp", rate_end=15.0))
    assert sum(found) == pytest.approx(400, rel=0.05)
    assert 1 / statistics.fmean(found[:400]) == pytest.approx(5.5, rel=0.15)
    assert 1 / statistics.fmean(found[-400:]) == pytest.approx(14.7, rel=0.15)


def test_sessions_and_clients() -> None:
    """A later turn has no time of its own; it follows the one before it and is the same client's. Rates are relative."""
    load = draw_load(replace(MANY, arrival="poisson", turns=4, think_s=2.0, clients=[8.0, 1.0, 1.0]), 0, 100)
    assert [load.arrivals[i] is None for i in range(8)] == [False, True, True, True] * 2
    assert list(load.before[:5]) == [None, 0, 1, 2, None] and load.lengths[3] == (1 + 3 * 2, 1)
    assert statistics.fmean(t for i, t in enumerate(load.thinks) if i % 4) == pytest.approx(2.0, rel=0.06)
    names = [labels["client"] for labels in load.labels]
    assert all(len(set(names[i : i + 4])) == 1 for i in range(0, 4000, 4))
    assert names.count("0") / len(names) == pytest.approx(0.8, abs=0.05)


def test_bimodal_and_groups() -> None:
    settings = replace(MANY, long_share=0.25, long_input_min=50, long_input_max=60, shared=8, groups=5, num_requests=800)
    load = draw_load(settings, 0, 5000)
    assert sum(len(p) > 8 + 1 for p in load.prompts) / 800 == pytest.approx(0.25, abs=0.05)
    assert len({tuple(p[:8]) for p in load.prompts}) == 5


TRACES = {
    "mooncake.jsonl": "\n".join(
        json.dumps({"timestamp": t, "input_length": n, "output_length": o, "hash_ids": h})
        for t, n, o, h in ((1000, 600, 3, [1, 2]), (1500, 700, 4, [1, 3]), (4000, 20, 5, []))
    ),
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,600,3\n"
    "2023-11-16 18:17:04.4799600,700,4\n2023-11-16 18:17:06.9799600,20,5\n",
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n1,ChatGPT,600,3,603,API\n"
    "1.2,ChatGPT,9,0,9,API\n1.5,GPT-4,700,4,704,API\n4,ChatGPT,20,5,25,API\n",
}


@pytest.mark.parametrize("name", TRACES)
def test_traces(tmp_path: Path, name: str) -> None:
    """All three column layouts; times and lengths are scaled; equal hashes are equal blocks; unanswered rows are left out."""
    file = tmp_path / name
    file.write_text(TRACES[name])
    settings = LoadSettings(arrival="trace", file=str(file), num_requests=3, time_scale=0.5)
    load = draw_load(settings, 0, 50_000)
    assert load.lengths == [(600, 3), (700, 4), (20, 5)] and list(load.arrivals) == pytest.approx([0, 0.25, 1.5])
    assert (load.prompts[0][:512] == load.prompts[1][:512]) == (name == "mooncake.jsonl")
    clients = [labels.get("client") for labels in load.labels]
    assert clients == (["ChatGPT", "GPT-4", "ChatGPT"] if name == "burst.csv" else [None] * 3)
    assert draw_load(replace(settings, length_scale=0.01), 0, 50_000).lengths == [(6, 1), (7, 1), (1, 1)]
    with pytest.raises(ConfigError, match=r"holds 3 answered requests; load\.num_requests=3 takes all"):
        draw_load(replace(settings, num_requests=4), 0, 50_000)


def test_a_tight_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A share of what the requests hold at their longest, said in a note; requests give way. Two sizes are one too many."""
    small = ["task=bench", "model=tiny-llama", "max_model_len=96", "cpu_threads=1", "load=tight_kv", "load.num_requests=6"]
    small += [f"load.{name}=32" for name in ("input_min", "input_max", "output_min", "output_max")]
    result = run_job(compose([*small, "load.kv_share=0.5", "bench.repeats=1", "bench.warmup=0"]), tmp_path)
    assert "num_kv_blocks is 12: load.kv_share=0.5 of the 24 blocks" in capsys.readouterr().err
    assert result["bench"]["start"]["num_blocks"] == 12 and result["bench"]["metrics"]["preemptions"]["value"] > 0
    with pytest.raises(ValueError, match=r"load\.kv_share=0\.3 and num_kv_blocks=40 both size the KV cache"):
        run_job(compose([*small, "num_kv_blocks=40"]), tmp_path)


def test_numbers_for_people() -> None:
    numbers = [(0.00042, "s"), (3.72, "s"), (1500.0, "s"), (21.3e9, "B/s"), (4.3e12, "B/s"), (790e12, "FLOP/s"), (0.0, "s")]
    texts = ["420 us", "3.72 s", "1,500 s", "21.3 GB/s", "4.3 TB/s", "790 TFLOP/s", "0 s"]
    assert [scaled(*number) for number in numbers] == texts


def shown(value: object) -> str:
    return "null" if value is None else f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def test_the_page_of_loads_is_current() -> None:
    """docs/loads.md: every setting with default and meaning, every preset with its comment, every arrival; nothing else."""
    page, default = (ROOT / "docs/loads.md").read_text(), LoadSettings()
    rows = [f"| `load.{f.name}` | {shown(getattr(default, f.name))} | {f.metadata['doc']} |" for f in fields(LoadSettings)]
    assert [line for line in page.splitlines() if line.startswith("| `load.") and line.count("|") == 4][: len(rows)] == rows
    assert page.count("\n| `load.") == len(rows) + 1  # and the head of the arrivals
    for file in (ROOT / "conf/load").glob("*.yaml"):
        comment = " ".join(line[2:] for line in takewhile(lambda text: text.startswith("# "), file.read_text().splitlines()))
        assert f"| `{file.stem}` | {comment} |" in page, f"{file.name}: its row in docs/loads.md is out of date"
    assert all(f"| `{arrival}` | " in page for arrival in ARRIVALS)


def test_the_page_of_metrics_is_current() -> None:
    """docs/metrics.md has a row for each metric that core/bench/values.py names, and for nothing else."""
    source = (ROOT / "core/bench/values.py").read_text()
    named = set(re.findall(r'^\s+"(\w+)": \(', source, re.M)) | set(re.findall(r'found\["(\w+)"\]', source))
    named |= set(re.findall(r'\{"(\w+)": \(', source))
    named |= {f"step_{part}_us" for part in ("schedule", "prepare", "launch", "wait", "commit")}
    page = (ROOT / "docs/metrics.md").read_text().partition("## Files")[0]
    rows = re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert len(rows) == len(set(rows)) and set(rows) == named
