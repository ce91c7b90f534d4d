"""One GPU against several: equal tokens, offline throughput, one request, what all-reduce and plan take, a worker that dies.

    python -m benchmarks.gpu.tensor_parallel --out FILE.json [--models qwen3-0.6b,qwen3-14b,qwen3-8b] [--ranks 1,2]

Random weights, bfloat16, CUDA graphs and overlap on (the defaults on a GPU). A checkpoint is written below --folder for each
model and removed once the model is done (14B: 30 GB). Every part is a process of its own with a time limit, all parts
together have --limit. FILE.json and FILE.md, the tables, are written after each part; a part that is stopped keeps the
loads that it has run. The same command again does what is missing or failed. Exit code 1 if anything is, if tokens differ
where the margin is wide, if a dead worker is reported late, or if a GPU is not free afterwards. NVLink multicast is left off.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.config import compose
from core.environment import software

SETTINGS = ("max_num_seqs=256",)
JUDGED = ("max_model_len=4096", "max_num_batched_tokens=4096")
LATE, SLACK = 5.0, 256  # seconds until a death is reported; MiB of a GPU that may differ from before
LIMITS = {"checkpoint": 150.0, "serve": 240.0, "judge": 120.0, "plan": 30.0, "reduce": 60.0, "kill": 120.0}  # seconds
LEAST = 20.0  # no part starts with less
ROWS = (1, 256)  # decodes of a step, in `plan` and `reduce`
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
Row = dict[str, Any]  # model, given; parts: what each has found, by its label; failed: why, by label


class Failed(Exception):
    """A part ended without a result, or with only some of it."""

    def __init__(self, why: str, found: dict[str, Any] | None = None) -> None:
        super().__init__(why)
        self.found = found


def run(module: str, arguments: Sequence[str], limit: float) -> dict[str, Any]:
    """The last line of JSON that a process prints; it and its ranks are ended at the limit."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | NO_MULTICAST, start_new_session=True)
    why = ""
    try:
        out, _ = done.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)
        out, why = done.communicate()[0], f"stopped after {limit:.0f} s"
    except BaseException:
        os.killpg(done.pid, signal.SIGKILL)
        raise
    if done.returncode and not why:
        why = f"ended with {done.returncode}: its standard error says why"
    lines = [line for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    found = json.loads(lines[-1]) if lines else None
    if why or found is None:
        raise Failed(why or "printed no result", found)
    return found


def used() -> list[int]:
    """MiB in use on each GPU, by whomever; nothing without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.split()]


def parts_of(row: Row, model: str, args: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """Label and arguments of each part; the first word of a label is the part's name. What another found is in the row."""
    given = [f"model={model}", *row["given"]]
    config: Any = compose([f"model={row['model']}"]).config.model.config
    first = args.ranks[0]
    for size in args.ranks:
        yield f"serve {size}", [str(args.repeats), args.loads, *given, *SETTINGS, f"tensor_parallel_size={size}"]
        serves = [row["parts"].get(f"serve {n}") for n in (first, size)]
        if size != first and all(serves):
            files = [scratch / f"{n}.json" for n in ("first", "second")]
            for file, serve in zip(files, serves, strict=True):
                file.write_text(json.dumps(serve))
            yield f"judge {size}", [*map(str, files), *given, *(JUDGED if args.device != "cpu" else ())]
    last, count = args.ranks[-1], 2 * config["num_hidden_layers"] + 1
    if last > 1:
        yield f"kill {last}", [*given, *SETTINGS, f"tensor_parallel_size={last}"]
    for size in [n for n in args.ranks if n > 1]:
        amounts = [str(rows * config["hidden_size"] * 2) for rows in ROWS]
        yield f"reduce {size}", [str(size), args.device, str(count), *amounts]
        yield f"plan {size}", [str(size), *map(str, ROWS)]


def measure(row: Row, args: argparse.Namespace, scratch: Path, end: float, save: Any) -> None:
    """What is missing of one model, as far as the time goes."""
    parts, failed, folder = row["parts"], row["failed"], args.folder / row["model"]

    def attempt(label: str, module: str, arguments: Sequence[str]) -> dict[str, Any] | None:
        left, started = end - time.monotonic(), time.monotonic()
        failed.pop(label, None)
        try:
            if left < LEAST:
                raise Failed("no time left")
            return run(module, arguments, min(left, LIMITS[label.split()[0]]))
        except Failed as error:
            failed[label] = str(error)
            return error.found
        finally:
            print(f"{row['model']}: {label}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    def needed() -> bool:  # on a CPU the preset itself has random weights
        return args.device != "cpu" and not (folder / "config.json").exists()

    for label, arguments in parts_of(row, row["model"] if args.device == "cpu" else str(folder), args, scratch):
        name = label.split()[0]
        if label in parts and label not in failed:
            continue
        if name in ("serve", "judge", "kill") and needed():
            unfinished = f"{folder}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            attempt("checkpoint", "make_checkpoint", [row["model"], unfinished])
            if "checkpoint" in failed:
                shutil.rmtree(unfinished, ignore_errors=True)
                failed[label] = "no checkpoint"
                save()
                continue
            Path(unfinished).rename(folder)
        before = used()
        found = attempt(label, "tensor_parallel_parts", [name, *arguments])
        if name == "kill" and found:
            found |= {"mib_before": before, "mib_after": used()}
        if found:
            parts[label] = found
        save()
    if args.device != "cpu" and not args.keep and not failed:
        shutil.rmtree(folder, ignore_errors=True)


def rate(row: Row, size: str, load: str) -> float | None:
    """Output tokens per second, median of the repeats."""
    records = row["parts"].get(f"serve {size}", {}).get("loads", {}).get(load)
    return statistics.median(r["output_tokens_per_s"] for r in records) if records else None


def markdown(rows: Sequence[Row]) -> str:
    """Throughput side by side; tokens; shares of a decode step of one request; the dead worker."""
    lines = ["| model | ranks | offline, output tok/s | one request, tok/s | times one GPU | tokens equal, parted, wrong |"]
    lines.append("|---" * 6 + "|")
    shares = [
        "| model | ranks | step of one request, us | all-reduces | us each | share | one-shot, us each | plan, us | share |"
    ]
    shares.append("|---" * 9 + "|")
    for row in rows:
        sizes = [label.split()[1] for label in row["parts"] if label.startswith("serve")]
        for size in sizes:
            offline, single, base = rate(row, size, "offline"), rate(row, size, "single"), rate(row, sizes[0], "single")
            tokens = row["parts"].get(f"judge {size}")
            told = f"{tokens['compared']} of {tokens['of']}, {tokens['parted']}, {len(tokens['wrong'])}" if tokens else "-"
            gain = single / base if single and base else None
            cells = _said(offline, ",.0f"), _said(single, ",.1f"), _said(gain, ".2f"), told
            lines.append(f"| {row['model']} | {size} | {' | '.join(cells)} |")
            if single and int(size) > 1:
                shares.append(f"| {row['model']} | {size} | {' | '.join(_shares(row['parts'], size, 1e6 / single))} |")
    ends = [_death(row["model"], part) for row in rows for label, part in row["parts"].items() if label.startswith("kill")]
    return "\n".join([*lines, "", *shares, "", *ends])


def _said(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form) if isinstance(value, float) else str(value).replace("|", "/")


def _shares(parts: Mapping[str, Any], size: str, step: float) -> list[str]:
    reduce, plan = parts.get(f"reduce {size}"), parts.get(f"plan {size}")
    cells = [f"{step:.0f}"]
    if reduce:
        ways = [min(times.items(), key=lambda item: int(item[0]))[1] for times in reduce["seconds"].values()]
        each, *shot = [1e6 * way if isinstance(way, float) else way for way in ways]
        share = reduce["count"] * each / step if isinstance(each, float) else None
        cells += [str(reduce["count"]), _said(each, ".1f"), _said(share, ".0%"), _said(shot[0] if shot else None, ".1f")]
    else:
        cells += ["-"] * 4
    sent = sum(plan["rows"][0][work]["median_us"] for work in ("pack", "send")) if plan else None
    return [*cells, _said(sent, ".1f"), _said(sent / step if sent else None, ".1%")]


def _death(model: str, kill: Mapping[str, Any]) -> str:
    gpus = f", MiB in use before {kill['mib_before']} and after {kill['mib_after']}" if kill["mib_before"] else ""
    return (
        f"{model}: a worker killed in a step was reported after {kill['reported_s']:.2f} s, the engine closed after "
        f"{kill['closed_s']:.2f} s, {len(kill['left'])} of {kill['workers']} workers left{gpus}."
    )


def problems(rows: Sequence[Row]) -> list[str]:
    """What must not be, and what is missing."""
    found = []
    for row in rows:
        found += [f"{row['model']}: {label}: {why}" for label, why in row["failed"].items()]
        for label, part in row["parts"].items():
            name, size = label.split()
            if name == "judge":
                found += [f"{row['model']} on {size} ranks: {wrong}" for wrong in part["wrong"]]
                if 2 * part["compared"] < part["of"]:
                    found.append(
                        f"{row['model']} on {size} ranks: only {part['compared']} of {part['of']} tokens could be compared"
                    )
            elif name == "kill":
                late, busy = (
                    part["reported_s"] > LATE or not part["said"],
                    zip(part["mib_before"], part["mib_after"], strict=True),
                )
                found += [f"{row['model']}: a dead worker was reported after {part['reported_s']:.1f} s"] if late else []
                found += [f"{row['model']}: workers {part['left']} are still there"] if part["left"] else []
                found += [f"{row['model']}: GPU {i} is not free" for i, (a, b) in enumerate(busy) if b > a + SLACK]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    end = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="further settings of core.run")
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-14b,qwen3-8b")
    parser.add_argument("--ranks", default="1,2", help="in ascending order; tokens and times are compared with the first")
    parser.add_argument("--loads", default="single,offline")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for all; what is not done by then is left out")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tensor_parallel")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    end += args.limit
    args.ranks = sorted(int(n) for n in args.ranks.split(","))
    if args.device == "cuda" and len(used()) < args.ranks[-1]:
        parser.error(f"--ranks {args.ranks[-1]} needs as many GPUs, got {len(used())}; take fewer ranks")
    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    facts = {key: value for key, value in software().items() if key not in ("host", "platform")}
    command = " ".join(["python -m benchmarks.gpu.tensor_parallel", *(sys.argv[1:] if argv is None else argv)])
    record |= {"command": command, **facts}
    given = [f"device={args.device}", *args.overrides]

    def save() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(record["rows"]) + "\n")

    for preset in args.models.split(","):
        row = next((row for row in record["rows"] if row["model"] == preset), None)
        if row is None or row["given"] != given or row["load"] != [args.loads, args.repeats]:
            record["rows"] = [old for old in record["rows"] if old is not row]
            row = {"model": preset, "given": given, "load": [args.loads, args.repeats], "parts": {}, "failed": {}}
            record["rows"].append(row)
        with tempfile.TemporaryDirectory() as scratch:
            measure(row, args, Path(scratch), end, save)
    print(markdown(record["rows"]))
    wrong = problems(record["rows"])
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
