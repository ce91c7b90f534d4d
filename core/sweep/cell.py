"""One cell of a sweep, run to its end, whatever that is. Whoever calls this never sees an exception of the cell.

The cell is a process of its own, so that nothing leaks from one to the next and none can end the sweep. A cell that was
finished before, with the same configuration and the same versions of its plugins, is not run again.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm

from core.composition import override
from core.files import read_json, write_json
from core.sweep import gpus
from core.sweep.plan import REPEAT, plan_of, repeat_of
from core.sweep.process import end, python, send, wait
from core.sweep.records import CellRecord
from core.vocabulary import plain

CELL, LOG, RESULT = "cell.json", "log.txt", "result.json"
PARENTS = ("hydra.mode", "hydra.run", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper")
UNFINISHED = {"status": "crashed", "reason": "interrupted"}


class Cell:
    """What Hydra asks for. node: the cell's configuration; hydra: Hydra's own part of it."""

    def __init__(self, node: DictConfig, hydra: DictConfig) -> None:
        self.overrides, self.number = [str(o) for o in hydra.overrides.task], hydra.job.num
        self.folder, self.top = Path(hydra.runtime.output_dir), Path(str(hydra.sweep.dir)).absolute()
        self.command = command(self.overrides, hydra, self.folder)
        self.timeout_s = float(node.sweep.timeout_s)
        self.gpus = int(node.tensor_parallel_size) if wants_gpu(node) and len(gpus.visible()) > 1 else 0
        self.plan = plan_of(self.top)
        self.planned = self.plan.of(self.overrides)

    def run(self) -> dict[str, Any]:
        """What cell.json holds."""
        record = read_json(self.folder / CELL)
        if record and record["status"] == "ok" and (self.folder / RESULT).is_file():
            record = {**record, "resumed": True}
            self._write(record)
            self._tell("finished before, skipped")
            return record
        if self.planned.get("reason"):
            record = self._record(status="incompatible", reason=self.planned["reason"])
            self._write(record)
            self._tell(f"incompatible, not run. {record['reason']}")
            return record
        with gpus.reserved(self.gpus, gpus.visible()) as mine:
            return self._run(mine)

    def _run(self, mine: list[str]) -> dict[str, Any]:
        started = time.time()
        record = self._record(**UNFINISHED, started=started, gpus=mine)
        try:
            record |= self._process(record, mine)
        except Exception as error:
            record |= {"status": "failed", "reason": f"could not be started: {type(error).__name__}: {error}"}
        finally:  # also on Ctrl-C: the books must be right
            result = read_json(self.folder / RESULT) or {}
            record |= {"seconds": time.time() - started, **{k: result[k] for k in ("plugins", "environment") if k in result}}
            self._write(record)
            self._tell(f"{record['status']} after {record['seconds']:.1f} s. {record['reason']}".rstrip(". "))
        return record

    def _record(self, **values: Any) -> dict[str, Any]:
        return asdict(
            CellRecord(
                hash=self.folder.parent.name,
                repeat=repeat_of(self.overrides),
                factors=self.planned.get("factors", {}),
                overrides=[o for o in self.overrides if not o.startswith(REPEAT)],
                folder=os.path.relpath(self.folder, self.top),
                plugins=self.planned.get("plugins", {}),
                environment=dict(self.plan.environment),
                command=self.command,
                **values,
            )
        )

    def _write(self, record: Mapping[str, Any], **more: Any) -> None:
        write_json(self.folder / CELL, {**record, "visited": time.time(), **more})

    def _process(self, record: Mapping[str, Any], mine: Sequence[str]) -> Mapping[str, str]:
        (self.folder / RESULT).unlink(missing_ok=True)
        environment = {**os.environ, gpus.VISIBLE: ",".join(mine)} if mine else None
        with (self.folder / LOG).open("wb") as log:
            child = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
            )
            self._write(record, process=[platform.node(), child.pid])
            try:
                code = wait(child, self.timeout_s)
            except subprocess.TimeoutExpired:
                end(child, signal.SIGTERM)
                return {"status": "timeout", "reason": f"not finished after sweep.timeout_s={self.timeout_s:g} seconds"}
            except BaseException:
                end(child, signal.SIGINT)
                raise
            finally:
                send(child.pid, signal.SIGKILL)  # what it may have left behind
        return judge(code, self.folder)

    def _tell(self, text: str) -> None:
        tqdm.write(f"[job {self.number}] {' '.join(self.overrides)}: {text}", file=sys.stderr)


def wants_gpu(node: DictConfig) -> bool:
    """Any GPU: one that is named is the user's choice."""
    return str(node.device) != "cpu" and ":" not in str(node.device)


def flags_of(hydra: DictConfig) -> list[str]:
    """--config-dir, as Hydra understood it."""
    sources = plain(hydra.runtime.config_sources)
    return [word for s in sources if s["provider"] == "command-line" for word in ("--config-dir", s["path"])]


def command(overrides: Sequence[str], hydra: DictConfig, folder: Path) -> list[str]:
    """Runs the cell by itself, into `folder`."""
    theirs = [o for o in map(str, hydra.overrides.hydra) if not o.lstrip("+~").startswith(PARENTS)]
    own = [override("hydra.run.dir", folder), "hydra.mode=RUN"]
    return [*python("core.run"), *flags_of(hydra), *overrides, *theirs, *own]


def judge(code: int, folder: Path) -> dict[str, str]:
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
