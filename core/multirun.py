"""Multirun: every job is a process of its own, so that nothing leaks from one to the next and none can end the sweep.

Hydra runs all jobs of a sweep in one process and stops at the first that raises. Here the function that it calls starts
`python -m core.run` with the job's overrides in the folder jobs/<hash of the configuration>, waits, and never raises. A sweep
that is started again into the same folder skips what was finished with the same configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from core.composition import override
from core.files import read_json, write_json
from core.vocabulary import plain

CELL, LOG, RESULT = "cell.json", "log.txt", "result.json"
GRACE_S = 10.0  # between asking a process to end and ending it
NOT_WHAT_IS_RUN = ("hydra", "sweep", "log_level")  # settings that leave a job's result as it is
PARENTS = ("hydra.mode", "hydra.run", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper")


class Sweep:
    """The sweep that this process leads, if any."""

    folder: Path | None = None
    started: float = 0.0
    flags: Sequence[str] = ()  # for the children: --config-dir and such


sweep = Sweep()


class Announce(Callback):
    """Tells `report` where the sweep lies. (Hydra calls on_multirun_end only if nothing went wrong.)"""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        sweep.folder, sweep.started = Path(config.hydra.sweep.dir).absolute(), time.time()


def digest(root: DictConfig) -> str:
    """Name of a job: equal for equal configurations, however they were spelt."""
    settings = {key: plain(value) for key, value in root.items() if key not in NOT_WHAT_IS_RUN}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]


OmegaConf.register_new_resolver("inferlab.cell", lambda _root_: digest(_root_), replace=True)


def cell(node: DictConfig, hydra: DictConfig) -> dict[str, Any]:
    """Run one job of the sweep to its end, whatever that is; what cell.json holds."""
    folder = Path(hydra.runtime.output_dir)
    overrides = [str(o) for o in hydra.overrides.task]
    record: dict[str, Any] = {"overrides": overrides, "folder": str(folder), "status": "crashed", "reason": "interrupted"}
    before = read_json(folder / CELL)
    if before and before["status"] == "ok" and (folder / RESULT).is_file():
        record = {**before, "visited": time.time()}
        write_json(folder / CELL, record)
        _tell(hydra, overrides, "finished before, skipped")
    else:
        started = time.time()
        try:
            record |= _run(_command(overrides, hydra, folder), folder, float(node.sweep.timeout_s))
        except Exception as error:
            record |= {"status": "failed", "reason": f"could not be started: {type(error).__name__}: {error}"}
        finally:  # also on Ctrl-C: the books must be right
            record |= {"seconds": time.time() - started, "visited": time.time()}
            write_json(folder / CELL, record)
            _tell(hydra, overrides, f"{record['status']} after {record['seconds']:.1f} s. {record['reason']}".rstrip(". "))
    return record


def _tell(hydra: DictConfig, overrides: Sequence[str], text: str) -> None:
    print(f"[job {hydra.job.num}] {' '.join(overrides)}: {text}", file=sys.stderr, flush=True)


def _command(overrides: Sequence[str], hydra: DictConfig, folder: Path) -> list[str]:
    # A core.py in the working directory would be run instead of ours, so -P; a checkout that is not installed needs its own.
    safe = [] if Path.cwd() == Path(__file__).parent.parent else ["-P"]
    theirs = [o for o in map(str, hydra.overrides.hydra) if not o.lstrip("+~").startswith(PARENTS)]
    own = [override("hydra.run.dir", folder), "hydra.mode=RUN"]
    return [sys.executable, *safe, "-m", "core.run", *sweep.flags, *overrides, *theirs, *own]


def _run(command: Sequence[str], folder: Path, timeout_s: float) -> Mapping[str, str]:
    (folder / RESULT).unlink(missing_ok=True)
    with (folder / LOG).open("wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(child, signal.SIGTERM)
            return {"status": "timeout", "reason": f"not finished after sweep.timeout_s={timeout_s:g} seconds"}
        except BaseException:
            _end(child, signal.SIGINT)
            raise
        finally:
            _signal(child, signal.SIGKILL)  # what it may have left behind
    return _judge(code, folder)


def _end(child: subprocess.Popen[bytes], first: signal.Signals) -> None:
    _signal(child, first)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        _signal(child, signal.SIGKILL)
        child.wait()


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the child and all that it started: they share a process group, whose number is the child's."""
    with suppress(ProcessLookupError, PermissionError):  # all gone (macOS says the latter of zombies)
        os.killpg(child.pid, number)


def _judge(code: int, folder: Path) -> dict[str, str]:
    """ok, failed (it said why), or crashed."""
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace").rstrip()
    if code == 0 and (folder / RESULT).is_file():
        return {"status": "ok", "reason": ""}
    start = 0 if log.startswith("error: ") else log.rfind("\nerror: ") + 1
    if code == 1 and log.startswith("error: ", start):
        return {"status": "failed", "reason": log[start:].removeprefix("error: ")}
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = log.rpartition("\n")[2]
    missing = f", and left no {RESULT}" if code == 0 else ""
    return {"status": "crashed", "reason": f"{how}{missing}" + (f"; last line of {LOG}: {last}" if last else "")}


def report() -> int:
    """Write sweep.json from what this sweep's jobs left; 1 if any is not ok, or there is none."""
    if sweep.folder is None:
        return 0
    folder, sweep.folder = sweep.folder, None
    records = [read_json(path) for path in folder.glob(f"jobs/*/{CELL}")]
    cells = sorted((r for r in records if r and r["visited"] >= sweep.started), key=lambda r: r["visited"])
    write_json(folder / "sweep.json", {"cells": cells})
    bad = [c for c in cells if c["status"] != "ok"]
    if cells:
        print(f"{len(cells) - len(bad)} of {len(cells)} jobs ok; {folder / 'sweep.json'}", file=sys.stderr)
    return int(bool(bad) or not cells)
