"""`python -m core.report DIR [DIR2]`: the report of a sweep, written again; or two sweeps compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from core.errors import message


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m core.report", description="The report of a sweep.")
    parser.add_argument("folder", help="of a sweep (its hydra.sweep.dir)")
    parser.add_argument("other", nargs="?", help="of a second sweep: compare the two")
    parser.add_argument("--metrics", default="", help="further metrics to compare, separated by commas: kv_use,step_ms_p99")
    parser.add_argument("--baseline", default="", help="the cell that others are compared with: scheduler=fcfs,overlap=0")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    given = parser.parse_args(argv)
    try:
        from core.report import write

        metrics = [name for name in given.metrics.split(",") if name]
        if given.other:
            from core.report.compare import write_comparison

            if given.baseline:
                raise ValueError("--baseline is for one sweep; of two, each cell is compared with the same cell")
            found, paths = write_comparison(Path(given.folder), Path(given.other), metrics)
            print(found.verdict, found.output, *found.wrong, *paths, sep="\n")
            return 0
        for path in write(given.folder, metrics, given.baseline):
            print(path)
    except Exception as error:
        print(message(error, given.debug), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
