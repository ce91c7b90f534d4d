"""From the start of the process to the first token and to the first decoded token, with warm and cold kernel caches.

    python -m benchmarks.gpu.startup model=DIRECTORY [SETTING=VALUE ...] [--repeats 3] [--out FILE]

Every start is a process of its own; the clock is this one's, so the interpreter and all imports count. Cold: the caches of
Triton and TorchInductor are new, empty folders. Warm: folders that an untimed start has filled. The file cache of the
operating system is warm in both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
COLUMNS = ("imported", "built", "first_token", "ready", "exited")


def child(overrides: list[str]) -> None:
    """Builds the engine and draws two tokens: one from the prompt, one by a decode step."""

    def tell(event: str, **more: Any) -> None:
        print(json.dumps({"event": event, **more}, default=str), flush=True)

    from core.config import compose
    from core.llm import LLM, SamplingParams

    tell("imported")
    with LLM.from_composed(compose(overrides)) as llm:
        tell("built", report=dict(llm.engine.executor.report()))
        llm.add_request(list(range(1, 65)), SamplingParams(temperature=0.6, max_tokens=2, ignore_eos=True))
        for event in ("first_token", "ready"):
            while not any(o.tokens for o in llm.engine.step()):
                pass
            tell(event)


def start(overrides: list[str], caches: Path) -> dict[str, Any]:
    """Seconds until each event of one start."""
    env = {**os.environ, **{name: str(caches / name.lower()) for name in CACHES}}
    command = [sys.executable, "-m", "benchmarks.gpu.startup", "--child", *overrides]
    started, seen = time.perf_counter(), {}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"event"'):
                event = json.loads(line)
                seen[event["event"]] = time.perf_counter() - started
                seen |= {"report": event["report"]} if "report" in event else {}
    if process.returncode or "ready" not in seen:
        raise SystemExit(f"a start failed with exit code {process.returncode}; the reason is above")
    return {**seen, "exited": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="settings of core.run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.overrides)
    runs: dict[str, list[dict[str, Any]]] = {"warm": [], "cold": []}
    with tempfile.TemporaryDirectory() as folder:
        start(args.overrides, Path(folder) / "warm")
        for number in range(args.repeats):
            runs["cold"].append(start(args.overrides, Path(folder) / f"cold{number}"))
            runs["warm"].append(start(args.overrides, Path(folder) / "warm"))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"overrides": args.overrides, "runs": runs}, indent=1) + "\n")
    print(f"seconds since the start of the process, median of {args.repeats} (ready: the first decoded token)")
    print(f"{'':8}" + "".join(f"{name:>14}" for name in COLUMNS))
    for name, records in runs.items():
        print(f"{name:8}" + "".join(f"{statistics.median(r[c] for r in records):14.2f}" for c in COLUMNS))


if __name__ == "__main__":
    main()
