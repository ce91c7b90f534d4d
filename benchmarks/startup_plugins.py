"""Start-up with many third-party plugins: the time until the configuration is composed, and until the commands answer.

    python -m benchmarks.startup_plugins [--plugins 30] [--repeats 7] [--slow 0.3] [--cores 2] [--limit 1.0] [--json FILE]

The plugins are laid out as pip installs them, in a folder of their own: one fails to import, one needs a package that is not
there, one takes --slow seconds to import, the others offer a scheduler each with its settings. Prints one JSON line per command
(wall seconds of the whole process). Exit code 1 if the configuration takes longer than --limit, or if the slow plugin, the
broken one or the missing package is not named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GOOD = '''"""A scheduler as an author would declare it."""

from dataclasses import dataclass

from core.interfaces import Component, hookimpl, setting


@dataclass
class Settings:
    depth: int = setting(3, "how far it looks", "requests")
    weight: float = setting(0.5, "share of the oldest request, in [0, 1]")


@hookimpl
def inferlab_components():
    yield Component("scheduler", "{name}", "{name}_target:Target", Settings, "for a benchmark"{more})
'''
TARGET = """from plugins.schedulers.fcfs import Fcfs as Target
"""
COMMANDS = {
    "configuration": ("core.run", "scheduler=bench_04", "--cfg", "job"),  # composed, printed, not run
    "help": ("core.run", "--help"),
    "list": ("core.plugins", "list"),
    "describe": ("core.plugins", "describe", "scheduler", "bench_04"),
    "hooks": ("core.plugins", "hooks"),
}


def lay_out(folder: Path, count: int, slow: float) -> None:
    """`count` distributions with a plugin each; the first three are the broken, the lacking and the slow one."""
    odd = {
        0: ("bench_broken", "import nowhere_to_be_found\n" + GOOD, ""),
        1: ("bench_lacking", GOOD, ', requires=["nothing_there>=2"], install="pip install nothing_there"'),
        2: ("bench_slow", f"import time\n\ntime.sleep({slow})\n" + GOOD, ""),
    }
    for number in range(count):
        name, source, more = odd.get(number, (f"bench_{number:02}", GOOD, ""))
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(source.replace("{name}", name).replace("{more}", more))
        (folder / f"{name}_target.py").write_text(TARGET)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: inferlab\n")
        (info / "entry_points.txt").write_text(f"[inferlab.plugins]\n{name} = {name}\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in (f"{name}.py", f"{name}_target.py")))


def run(words: tuple[str, ...], site: Path, where: Path) -> tuple[float, str]:
    """Seconds of the process from start to end, and all that it said."""
    path = os.pathsep.join([str(site), str(ROOT)])
    env = {k: v for k, v in os.environ.items() if not k.startswith(("INFERLAB", "HYDRA"))} | {"PYTHONPATH": path}
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *words], cwd=where, env=env, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    # `list` answers 1 where a plugin failed, which is the case here.
    assert done.returncode == (words[1] == "list"), done.stderr
    return seconds, done.stdout + done.stderr


def complaints(said: dict[str, str]) -> list[str]:
    """What should have been named and was not."""
    wanted = [
        ("configuration", "note: plugin bench_slow took "),
        ("configuration", "warning: plugin bench_broken could not be loaded: bench_broken 1.0: ModuleNotFoundError"),
        ("list", "failed: bench_broken: "),
        ("list", "scheduler=bench_lacking cannot be chosen here: it needs nothing_there>=2"),
    ]
    texts = {command: " ".join(text.split()) for command, text in said.items()}
    return [f"{command} does not say {text!r}" for command, text in wanted if text not in texts[command]]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Per command: the first start (modules not compiled yet), then the median and the longest of --repeats."""
    rows, said = {}, {}
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as folder:
        site, where = Path(folder, "site"), Path(folder, "work")
        where.mkdir()
        lay_out(site, args.plugins, args.slow)
        for command, words in COMMANDS.items():
            first, said[command] = run(words, site, where)
            times = [run(words, site, where)[0] for _ in range(args.repeats)]
            rows[command] = {
                "first_s": round(first, 3),
                "median_s": round(statistics.median(times), 3),
                "longest_s": round(max(times), 3),
            }
            print(json.dumps({"command": " ".join(words), **rows[command]}), flush=True)
    return {
        "plugins": args.plugins,
        "slow_import_s": args.slow,
        "cores": args.cores,
        "repeats": args.repeats,
        "load_average": load,  # of the machine when it began: others may have used the cores
        "limit_s": args.limit,
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("hydra-core", "pluggy")},
        "commands": rows,
        "complaints": complaints(said),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plugins", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--slow", type=float, default=0.3, help="seconds that the slow one takes to import")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.0, help="seconds to the composed configuration")
    parser.add_argument("--json", type=Path, help="write all numbers here too")
    args = parser.parse_args()
    if args.plugins < 5:
        parser.error("--plugins must be at least 5: three are odd, and one of the others is chosen")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    result = measure(args)
    if (median := result["commands"]["configuration"]["median_s"]) >= args.limit:
        result["complaints"].append(f"the configuration takes {median} s, the limit is {args.limit} s")
    for line in result["complaints"]:
        print(f"error: {line}", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(result["complaints"]))


if __name__ == "__main__":
    raise SystemExit(main())
