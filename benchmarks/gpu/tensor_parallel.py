"""One GPU against several: equal tokens, offline throughput, one request, what all-reduce and plan take, a worker that dies.

    python -m benchmarks.gpu.tensor_parallel [--models qwen3-0.6b,qwen3-8b,qwen3-14b] [--ranks 1,2] [--out FILE.json]

Random weights, bfloat16, CUDA graphs and overlap on (the defaults on a GPU). A checkpoint is written below --folder for each
model and removed after it (14B: 30 GB). One engine process for each model and number of ranks. FILE.md beside FILE.json holds
the tables; a second call with the same FILE adds its models. Exit code 1 if tokens differ where the margin is wide, if a dead
worker is reported late, or if a GPU is not free afterwards. NVLink multicast is left off (NCCL_NVLS_ENABLE=0).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.config import compose
from core.environment import software

SETTINGS = ("max_num_seqs=256",)
JUDGED = ("max_model_len=4096", "max_num_batched_tokens=4096")
LATE, SLACK = 5.0, 256  # seconds until a death is reported; MiB of a GPU that may differ from before


class Failed(Exception):
    """A part ended without a result."""


def part(*arguments: str) -> dict[str, Any]:
    """The JSON of one process."""
    command = [sys.executable, "-m", "benchmarks.gpu.tensor_parallel_parts", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NCCL_NVLS_ENABLE": "0"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise Failed(f"{arguments[0]} ended with {done.returncode}: its standard error says why")
    return json.loads(lines[-1])


def used() -> list[int]:
    """MiB in use on each GPU, by whomever; nothing without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.split()]


def checkpoint(preset: str, args: argparse.Namespace) -> str:
    """A directory with the preset's shape; on a CPU the preset itself, whose weights are random as well."""
    if args.device == "cpu":
        return preset
    folder = args.folder / preset
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, "-m", "benchmarks.gpu.make_checkpoint", preset, str(folder)], check=True)
    return str(folder)


def measure(preset: str, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All of one model."""
    model = checkpoint(preset, args)
    given = [f"model={model}", f"device={args.device}", *args.overrides]
    row: dict[str, Any] = {"model": preset, "ranks": {}}
    for size in args.ranks:
        found = part("serve", str(args.repeats), args.loads, *given, *SETTINGS, f"tensor_parallel_size={size}")
        (scratch / f"{preset}-{size}.json").write_text(json.dumps(found))
        row["ranks"][size] = {key: found[key] for key in ("loads", "summary", "report")}
        if size != args.ranks[0]:
            files = (scratch / f"{preset}-{n}.json" for n in (args.ranks[0], size))
            row["ranks"][size]["tokens"] = part("judge", *map(str, files), *given, *(JUDGED if args.device != "cpu" else ()))
    config: Any = compose([f"model={preset}"]).config.model.config
    count = 2 * config["num_hidden_layers"] + 1
    for size in [n for n in args.ranks if n > 1]:
        amounts = [str(rows * config["hidden_size"] * 2) for rows in (1, 256)]
        row["ranks"][size]["reduce"] = part("reduce", str(size), args.device, str(count), *amounts)["seconds"]
        row["ranks"][size]["reductions"] = count
    if args.ranks[-1] > 1:
        before = used()
        row["kill"] = part("kill", *given, *SETTINGS, f"tensor_parallel_size={args.ranks[-1]}")
        row["kill"]["mib_before"], row["kill"]["mib_after"] = before, used()
    if args.device != "cpu" and not args.keep:
        shutil.rmtree(model)
    return row


def rate(ranks: Mapping[str, Any], size: str, load: str) -> float:
    """Output tokens per second, median of the repeats."""
    return statistics.median(r["output_tokens_per_s"] for r in ranks[size]["loads"][load])


def launch(ranks: Mapping[str, Any], size: str, load: str) -> float:
    """Host microseconds from a finished plan to its last kernel or message, per decode step."""
    return statistics.median(r["host_per_decode_step_us"]["launch"] or 0.0 for r in ranks[size]["loads"][load])


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Throughput side by side; tokens; shares of a decode step of one request; the dead worker."""
    lines = ["| model | ranks | offline, output tok/s | one request, tok/s | times one GPU | tokens equal, parted, wrong |"]
    lines.append("|---" * 6 + "|")
    shares = [
        "| model | ranks | step of one request, us | all-reduces | us each | share | launch, us more than one GPU | share |"
    ]
    shares.append("|---" * 8 + "|")
    for row in rows:
        ranks = {str(key): value for key, value in row["ranks"].items()}
        first = next(iter(ranks))
        for size, found in ranks.items():
            single = rate(ranks, size, "single")
            offline = f"{rate(ranks, size, 'offline'):,.0f}" if "offline" in found["loads"] else "-"
            tokens = found.get("tokens")
            told = f"{tokens['compared']} of {tokens['of']}, {tokens['parted']}, {len(tokens['wrong'])}" if tokens else "-"
            speed = f"{offline} | {single:,.1f} | {single / rate(ranks, first, 'single'):.2f}"
            lines.append(f"| {row['model']} | {size} | {speed} | {told} |")
            if "reduce" in found:
                ways = {way: min(times.items(), key=lambda item: int(item[0]))[1] for way, times in found["reduce"].items()}
                step, each = 1e6 / single, 1e6 * next(iter(ways.values()))
                more = launch(ranks, size, "single") - launch(ranks, first, "single")
                cells = (f"{step:.0f}", str(found["reductions"]), f"{each:.1f}", f"{found['reductions'] * each / step:.0%}")
                shot = ways.get("one_shot", "-")
                other = f"{1e6 * shot:.1f}" if isinstance(shot, float) else shot.replace("|", "/")
                shares.append(f"| {row['model']} | {size} | {' | '.join(cells)} | {other} | {more:.0f} | {more / step:.0%} |")
    ends = [_death(row["model"], row["kill"]) for row in rows if "kill" in row]
    return "\n".join([*lines, "", *shares, "", *ends])


def _death(model: str, kill: Mapping[str, Any]) -> str:
    gpus = f", MiB in use before {kill['mib_before']} and after {kill['mib_after']}" if kill["mib_before"] else ""
    return (
        f"{model}: a worker killed in a step was reported after {kill['reported_s']:.2f} s, the engine closed after "
        f"{kill['closed_s']:.2f} s, {len(kill['left'])} of {kill['workers']} workers left{gpus}."
    )


def problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must not be."""
    found = []
    for row in rows:
        for size, ranks in row["ranks"].items():
            found += [f"{row['model']} on {size} ranks: {wrong}" for wrong in ranks.get("tokens", {}).get("wrong", [])]
        if kill := row.get("kill"):
            late, busy = kill["reported_s"] > LATE or not kill["said"], zip(kill["mib_before"], kill["mib_after"], strict=True)
            found += [f"{row['model']}: a dead worker was reported after {kill['reported_s']:.1f} s"] if late else []
            found += [f"{row['model']}: workers {kill['left']} are still there"] if kill["left"] else []
            found += [f"{row['model']}: GPU {i} is not free" for i, (a, b) in enumerate(busy) if b > a + SLACK]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="further settings of core.run")
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-8b,qwen3-14b")
    parser.add_argument("--ranks", default="1,2", help="in ascending order; tokens and times are compared with the first")
    parser.add_argument("--loads", default="single,offline")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tensor_parallel")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    args.ranks = sorted(int(n) for n in args.ranks.split(","))
    if args.device == "cuda" and len(used()) < args.ranks[-1]:
        parser.error(f"--ranks {args.ranks[-1]} needs as many GPUs, got {len(used())}; take fewer ranks")
    record: dict[str, Any] = {"rows": []}
    if args.out and args.out.exists():
        record = json.loads(args.out.read_text())
    facts = {key: value for key, value in software().items() if key not in ("host", "platform")}
    record |= {
        "command": " ".join(["python -m benchmarks.gpu.tensor_parallel", *(sys.argv[1:] if argv is None else argv)]),
        **facts,
    }
    with tempfile.TemporaryDirectory() as scratch:
        for preset in args.models.split(","):
            row = json.loads(json.dumps(measure(preset, args, Path(scratch))))
            record["rows"] = [old for old in record["rows"] if old["model"] != preset] + [row]
            if args.out:  # after each model: a call that is cut short keeps what it has
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(record, indent=1) + "\n")
                args.out.with_suffix(".md").write_text(markdown(record["rows"]) + "\n")
    print(markdown(record["rows"]))
    wrong = problems(record["rows"])
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
