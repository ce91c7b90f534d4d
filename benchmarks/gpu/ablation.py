"""What each part of the engine is worth on a load: every variant changes one setting, each in a process of its own.

    python -m benchmarks.gpu.ablation model=DIRECTORY [SETTING=VALUE ...] [--only graphs,flash] [--repeats 5] [--out FILE.json]

Processes of a group (the baseline and `--together` variants) live at the same time, each with a KV pool that is as large as
the load needs, and take turns: one run of each, then the next run of each. A variant that is refused gets a row that says
why. FILE.md beside FILE.json holds the table; a second call with the same FILE adds its rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

BASELINE = "baseline"
VARIANTS: dict[str, list[str]] = {
    "overlap": ["overlap=0"],
    "graphs": ["graphs=off"],
    "fusion": ["fusion=off"],
    "compile": ["compile=on"],
    "triton": ["attention=triton"],
    "flash": ["attention=flash"],
    "sdpa": ["attention=sdpa"],
    "block16": ["kv_allocator.block_size=16"],
    "block64": ["kv_allocator.block_size=64"],
    "block256": ["kv_allocator.block_size=256"],
    "greedy": ["sampler=greedy", "sampling.temperature=0"],
}
SLACK = 256  # positions per request beyond what it holds: its last block is not full


class Worker:
    """A process with one engine; `ask` runs one run of the load in it."""

    def __init__(self, name: str, overrides: Sequence[str], positions: int, log: Path) -> None:
        self.name, self.overrides, self.path = name, list(overrides), log
        self.reason = ""
        command = [sys.executable, "-m", "benchmarks.gpu.ablation", "--positions", str(positions), *overrides]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
            )
        self.facts = self._answer()

    def ask(self, number: int) -> dict[str, Any] | None:
        """The record of run `number`; None once the process has ended."""
        if self.reason:
            return None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the answer says why
            self.process.stdin.write(f"{number}\n")
        return self._answer()

    def close(self) -> None:
        """Its standard input ends, so it does."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _answer(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.process.wait()
        text = [line for line in self.path.read_text(errors="replace").splitlines() if line.strip()]
        errors = [i for i, line in enumerate(text) if line.startswith("error: ")]
        self.reason = " ".join(text[errors[-1] :]).removeprefix("error: ") if errors else (text or ["no message"])[-1]
        return None


def worker(overrides: list[str], positions: int) -> int:
    """Reads numbers of runs, writes their records: one line each. positions: room of the KV pool."""
    from core import device
    from core.bench.task import Bench
    from core.config import compose
    from core.errors import message
    from core.resolve import decide, describe

    try:
        composed = compose(overrides)
        if "num_kv_blocks" not in composed.explicit:
            size = decide(composed).block_size
            composed = compose([*overrides, f"num_kv_blocks={-(-positions // size)}"])
        bench = Bench(composed, decide(composed))
        with bench.llm as llm:
            facts = {"summary": describe(llm.resolved)[0], "report": dict(llm.engine.executor.report())}
            print(json.dumps(facts, default=str), flush=True)
            for line in sys.stdin:
                record = bench.run(int(line))
                print(json.dumps({**record, "memory": device.peak_memory(bench.where)}), flush=True)
    except Exception as error:  # told to the other side, which goes on without this variant
        print(message(error), file=sys.stderr)
        return 1
    return 0


def pool(overrides: Sequence[str], numbers: Sequence[int]) -> int:
    """Positions that the runs hold at most at one time."""
    from core.bench.limit import passes
    from core.checkpoint import open_checkpoint
    from core.config import compose
    from core.limits import limits
    from core.loads import draw_load

    composed = compose(overrides)
    config = open_checkpoint(composed.config.model).config
    found = limits(composed, config, on_cpu=False)[0]
    most = 0
    for number in numbers:
        load = draw_load(composed.config.load, number, config["vocab_size"])
        decodes = (step.pairs for step in passes(load.lengths, 0, found) if step.rows == step.tokens)
        held = max([load.input_tokens, *decodes])
        most = max(most, held + SLACK * len(load.prompts))
    return most


def run_group(names: Sequence[str], args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """name -> {overrides, reason, facts, runs}."""
    numbers = list(range(args.repeats))
    positions = pool(args.overrides, [*numbers, args.repeats])
    workers = []
    for name in names:
        own = [*args.overrides, "task=bench", *VARIANTS.get(name, [])]
        workers.append(Worker(name, own, positions, logs / f"{name}.log"))
    runs: dict[str, list[dict[str, Any]]] = {w.name: [] for w in workers}
    try:
        for number in [args.repeats, *numbers]:  # the first one warms up
            for w in workers:
                record = w.ask(number)
                if record is not None and number != args.repeats:
                    runs[w.name].append(record)
    finally:
        for w in workers:
            w.close()
    return {w.name: {"overrides": w.overrides, "reason": w.reason, "facts": w.facts, "runs": runs[w.name]} for w in workers}


def rows(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One per variant, compared with the baseline of its own group."""
    found = []
    for number, group in enumerate(groups):
        base = _summary(group[BASELINE])
        for name, result in group.items():
            summary = _summary(result)
            if "seconds" in summary and "seconds" in base:
                summary["change"] = summary["seconds"] / base["seconds"] - 1
            label = " ".join(VARIANTS.get(name, [])) or f"{BASELINE}, group {number + 1}"
            found.append({"name": name, "label": label, "reason": result["reason"], **summary})
    return found


def _summary(result: Mapping[str, Any]) -> dict[str, Any]:
    runs = result["runs"]
    if not runs or result["reason"]:
        return {}
    launch = [r["host_per_decode_step_us"]["launch"] for r in runs if r["host_per_decode_step_us"]["launch"] is not None]
    seconds = [r["seconds"] for r in runs]
    return {
        "seconds": statistics.median(seconds),
        "lowest": min(seconds),
        "highest": max(seconds),
        "tokens_per_s": statistics.median(r["output_tokens_per_s"] for r in runs),
        "launch_us": statistics.median(launch) if launch else None,
        "peak_gib": max(r["memory"]["peak"] for r in runs) / 2**30,
    }


def markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """The table, one row per variant."""
    titles = ("changed", "output tok/s", "seconds (lowest to highest)", "time", "host launch per decode step, us", "peak GiB")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in found:
        if "seconds" not in row:
            lines.append(f"| {row['label']} | n/a: {row['reason'].replace('|', '/')} | | | | |")
            continue
        change = "" if row["name"] == BASELINE else f"{row['change']:+.1%}" if "change" in row else "?"
        launch = "-" if row["launch_us"] is None else f"{row['launch_us']:.0f}"
        spread = f"{row['seconds']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f})"
        lines.append(
            f"| {row['label']} | {row['tokens_per_s']:,.0f} | {spread} | {change} | {launch} | {row['peak_gib']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="settings of core.run, the same for all variants")
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants, separated by commas")
    parser.add_argument("--together", type=int, default=3, help="variants beside the baseline at one time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--positions", type=int, help=argparse.SUPPRESS)  # makes it a worker
    args = parser.parse_args()
    if args.positions:
        return worker(args.overrides, args.positions)
    names = [name for name in args.only.split(",") if name]
    if unknown := set(names) - set(VARIANTS):
        parser.error(f"unknown variants {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    groups = json.loads(args.out.read_text())["groups"] if args.out and args.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for at in range(0, len(names), args.together):
            groups.append(run_group([BASELINE, *names[at : at + args.together]], args, Path(folder)))
            if args.out:  # after each group: a call that is cut short keeps what it has
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({"groups": groups, "rows": rows(groups)}, indent=1) + "\n")
                args.out.with_suffix(".md").write_text(markdown(rows(groups)) + "\n")
    print(markdown(rows(groups)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
