"""`python -m core.plugins list [--json]`: what is installed, from where, and what failed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

from core.errors import message
from core.plugins import Registry, discover
from core.plugins.loading import missing

COLUMNS = ("kind", "name", "plugin", "distribution", "origin", "state")


def rows(registry: Registry) -> Iterator[dict[str, str]]:
    """One per option, then one per plugin that failed."""
    for (kind, name), found in sorted(registry.components.items()):
        lacking = "; ".join(missing(found.component))
        state = f"needs {lacking}" if lacking else "ok"
        values = (kind, name, found.plugin, str(found), found.origin, state)
        yield dict(zip(COLUMNS, values, strict=True))
    for plugin, why in registry.failed.items():
        yield dict(zip(COLUMNS, ("-", "-", plugin, "-", "-", f"failed: {why}"), strict=True))


def table(lines: Sequence[dict[str, str]]) -> str:
    """Columns as wide as their widest cell."""
    cells = [COLUMNS, *(tuple(line.values()) for line in lines)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def second_owners() -> Iterator[str]:
    """pip installs two distributions that own one package without a word, and removing one breaks the other."""
    for package in ("core", "plugins"):
        owners = sorted(set(metadata.packages_distributions().get(package, ())))
        if len(owners) > 1:
            yield f"warning: the package {package} is owned by {' and by '.join(owners)}: uninstall all but inferlab"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a plugin failed."""
    parser = argparse.ArgumentParser(prog="python -m core.plugins", description=__doc__)
    parser.add_argument("command", choices=["list"])
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--block", nargs="*", default=[], metavar="NAME", help="plugins or distributions to leave out")
    arguments = parser.parse_args(argv)
    try:
        registry = discover(block=arguments.block)
    except ValueError as error:
        print(message(error), file=sys.stderr)
        return 1
    lines = list(rows(registry))
    print(json.dumps(lines, indent=1) if arguments.json else table(lines))
    for warning in second_owners():
        print(warning, file=sys.stderr)
    return int(bool(registry.failed))


if __name__ == "__main__":
    raise SystemExit(main())
