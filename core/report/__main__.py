"""`python -m core.report DIR`: the report of a sweep, written again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from core.errors import message


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m core.report", description="The report of a sweep.")
    parser.add_argument("folder", help="of a sweep (its hydra.sweep.dir)")
    parser.add_argument("--metrics", default="", help="further metrics to compare, separated by commas: kv_use,step_ms_p99")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    given = parser.parse_args(argv)
    try:
        from core.report import write

        for path in write(given.folder, [name for name in given.metrics.split(",") if name]):
            print(path)
    except Exception as error:
        print(message(error, given.debug), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
