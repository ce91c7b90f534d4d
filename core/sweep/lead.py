"""The process that leads a sweep: plans it, hands out its cells, shows how far it is, and always leaves a report.

Hydra's launcher calls `run_cell` for every cell, here or in processes and on machines of its own. Where several GPUs are there
(or sweep.parallel says so) and the launcher is Hydra's own, which works one by one, cells are only noted then, and run in
threads that wait for their processes.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from core.config import SweepSettings
from core.files import read_json
from core.sweep import gpus, names, process
from core.sweep.bar import Bar
from core.sweep.cell import CELL, Cell, wants_gpu
from core.sweep.equal import check_equal, lines
from core.sweep.plan import make_plan, plan_of
from core.sweep.records import STATUSES, SweepRecord, cell_of, write_sweep
from core.vocabulary import plain


class Refused(BaseException):
    """The sweep is not begun; __cause__ says why. Hydra turns an Exception of a callback into a warning."""


class Lead:
    """The sweep that this process leads, if any."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.command: list[str] = []
        self.started = 0.0
        self.pool: ThreadPoolExecutor | None = None
        self.waiting: dict[Path, Future[Any]] = {}  # by folder: cells of equal configuration are one cell
        self.bar: Bar | None = None

    def begin(self, config: DictConfig) -> None:
        """Before the first cell: all of them are checked."""
        SweepSettings(**plain(config.sweep))
        self.started = time.time()
        plan = make_plan(config)
        self.folder = Path(str(config.hydra.sweep.dir)).absolute()
        for cell in plan.cells.values():
            if cell.get("reason"):
                print(f"incompatible: {' '.join(cell['overrides'])}: {cell['reason']}", file=sys.stderr)
        self.bar = Bar(self.folder, self.started, len(plan.runs))
        count = parallel(config)
        if count > 1 and str(config.hydra.launcher._target_).endswith("BasicLauncher"):
            process.stop.clear()
            self.pool = ThreadPoolExecutor(count)

    def cell(self, cell: Cell) -> dict[str, Any] | None:
        """Run it, or note that it is to be run."""
        if self.pool is None:
            return cell.run()
        if cell.folder not in self.waiting:
            self.waiting[cell.folder] = self.pool.submit(cell.run)
        return None

    def wait(self) -> None:
        """Until the cells that were noted have been run."""
        for future in self.waiting.values():
            future.result()

    def report(self, interrupted: bool) -> int:
        """Whatever happened: end what runs, write sweep.json and the report. 1 if a cell failed or none is ok."""
        if self.folder is None:
            return 0
        folder, self.folder = self.folder, None
        self._end(folder, interrupted)
        sweep = collect(folder, self.command, self.started, interrupted)
        write_sweep(folder, sweep)
        for line in lines(sweep.equal_output):
            print(line, file=sys.stderr)
        counts = ", ".join(f"{count} {status}" for status in STATUSES[1:] if (count := sweep.count(status)))
        ok, total = sweep.count("ok"), len(sweep.cells)
        print(f"{ok} of {total} jobs ok{f' ({counts})' if counts else ''}; {folder / 'sweep.json'}", file=sys.stderr)
        written = write_report(folder)
        return int(not written or ok == 0 or any(sweep.count(status) for status in ("failed", "crashed", "timeout")))

    def _end(self, folder: Path, interrupted: bool) -> None:
        if interrupted:
            process.stop.set()
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=interrupted)
            self.pool, self.waiting = None, {}
        if interrupted:  # what jobs of another launcher may have left on this machine
            for record in records(folder, self.started):
                host, pid = record.get("process", (None, 0))
                if host == platform.node():
                    process.send(pid, signal.SIGKILL)
        if self.bar is not None:
            self.bar.close()


lead = Lead()
names.register()  # also in processes of other launchers, which come here for run_cell


class Announce(Callback):
    """Hydra says that a sweep begins. (It calls on_multirun_end only if nothing went wrong.)"""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            lead.begin(config)
        except Exception as error:
            raise Refused from error


def run_cell(node: DictConfig, hydra: DictConfig) -> dict[str, Any] | None:
    """What Hydra's launcher calls, in whatever process; None if the cell is run later."""
    return lead.cell(Cell(node, hydra))


def parallel(config: DictConfig) -> int:
    """Cells that run at a time."""
    given = config.sweep.parallel
    if given != "auto":
        return int(given)
    return max(len(gpus.visible()), 1) if wants_gpu(config) else 1


def records(folder: Path, since: float) -> list[dict[str, Any]]:
    """What cell.json holds, of the cells that were reached since then, in that order."""
    found = [read_json(path) for path in folder.glob(f"jobs/*/*/{CELL}")]
    return sorted((r for r in found if r and r["visited"] >= since), key=lambda r: r["visited"])


def collect(folder: Path, command: Sequence[str], started: float, interrupted: bool) -> SweepRecord:
    """The sweep from what its cells left. After Ctrl-C, what an earlier start had finished counts too."""
    plan = plan_of(folder)
    asked = {(cell["hash"], repeat): at for at, (cell, repeat) in enumerate(plan.runs) if "hash" in cell}
    found = {_id(r): r for r in records(folder, started)}
    if interrupted:
        before = {_id(r): {**r, "resumed": True} for r in records(folder, 0) if r["status"] == "ok" and _id(r) in asked}
        found = {**before, **found}
    order = sorted(found, key=lambda key: asked.get(key, len(asked)))  # stable: else as they were reached
    cells = [cell_of({**found[key], "folder": f"jobs/{key[0]}/{key[1]}"}) for key in order]
    return SweepRecord(
        command=list(command),
        started=started,
        finished=time.time(),
        interrupted=interrupted,
        factors=factors([cell["factors"] for cell, _ in plan.runs] or [cell.factors for cell in cells]),
        cells=cells,
        repeats=1 + max((repeat for _, repeat in plan.runs), default=0),
        planned=len({(cell.get("hash", key), repeat) for (cell, repeat), (key, _) in zip(plan.runs, plan.order, strict=True)}),
        equal_output=check_equal(folder, cells),
    )


def factors(of_cells: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """Swept name -> its values, in the order in which they come."""
    found: dict[str, dict[str, None]] = {}
    for values in of_cells:
        for name, value in values.items():
            found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def write_report(folder: Path) -> bool:
    """Whether nothing went wrong. A report that cannot be written must not cost the sweep."""
    if importlib.util.find_spec("core.report") is None:
        return True
    try:
        importlib.import_module("core.report").write(folder)
    except Exception as error:
        print(f"the report could not be written: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True


def _id(record: dict[str, Any]) -> tuple[str, int]:
    return record["hash"], record["repeat"]
