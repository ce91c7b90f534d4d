"""Sweeps with made-up numbers, as a real one leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from core.sweep.records import CellRecord, SweepRecord, write_sweep

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
