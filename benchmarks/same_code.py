"""How often two sweeps of the same code are said to differ: real sweeps, each compared with each.

    python -m benchmarks.same_code [--sweeps 5] [--out benchmarks/results/same_code.json]

The answer should be: never, or nearly. Every sweep runs its cells anew, in processes of their own; the machine is whatever it
is at that hour. A pair counts as equal if `python -m core.report A B` says "no difference beyond noise" and no tokens differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

from core.environment import environment
from core.files import write_json
from core.report.compare import compare

SWEEP = (
    *("task=bench", "model=smollm2", "device=cpu", "scheduler=fcfs,mixed", "overlap=0,1"),
    *("load=poisson", "load.rate=8", "load.num_requests=8", "load.input_min=16", "load.input_max=64"),
    *("load.output_min=8", "load.output_max=16", "sampling.temperature=0", "max_model_len=256"),
    *("bench.repeats=1", "bench.records=false", "sweep.repeats=5", "sweep.timeout_s=300"),
)


def pair(before: Path, after: Path) -> dict[str, Any]:
    """What the comparison of two finished sweeps says."""
    found = compare(before, after)
    return {
        "sweeps": [before.name, after.name],
        "verdict": found.verdict,
        "output": found.output,
        "equal": found.verdict == "no difference beyond noise" and not found.wrong,
        "comparisons": len(found.rows),
        "real": [[row.metric.name, *row.factors, row.share, row.p] for row in found.real],
        "largest_share": max(abs(row.share) for row in found.rows if row.share is not None),
    }


def run(folder: Path, sweeps: int, overrides: list[str]) -> dict[str, Any]:
    """The record; RuntimeError if a sweep fails."""
    folders = [folder / f"sweep{number}" for number in range(sweeps)]
    for each in folders:
        command = [sys.executable, "-m", "core.run", "-m", *SWEEP, *overrides, f"hydra.sweep.dir={each}"]
        if subprocess.run(command).returncode:
            raise RuntimeError(f"the sweep in {each} failed; its report.md says why")
    pairs = [pair(*two) for two in combinations(folders, 2)]
    return {
        "command": f"python -m benchmarks.same_code --sweeps {sweeps}",
        "sweep": [*SWEEP, *overrides],
        "environment": environment("cpu"),
        "equal": sum(found["equal"] for found in pairs),
        "pairs": pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=5, help="at least two; n of them make n (n - 1) / 2 pairs")
    parser.add_argument("--folder", type=Path, help="where the sweeps are kept; left out: a temporary folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.sweeps < 2:
        parser.error(f"--sweeps={args.sweeps}: at least 2, so that there is something to compare")
    with tempfile.TemporaryDirectory() as temporary:
        found = run((args.folder or Path(temporary)).resolve(), args.sweeps, args.overrides)
    if args.out:
        write_json(args.out, found)
    print(json.dumps({"pairs": len(found["pairs"]), "equal": found["equal"]}))


if __name__ == "__main__":
    main()
