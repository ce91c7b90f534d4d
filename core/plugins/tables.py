"""Text for people: columns as wide as they need to be, the last one wrapped to the terminal (80 columns without one)."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

LEAST = 24  # a last column narrower than this goes on lines of its own


def terminal_width() -> int:
    """Columns to fill; wider than 120 nobody reads."""
    return min(shutil.get_terminal_size((80, 24)).columns, 120)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "", width: int = 0) -> str:
    """A heading and a line per row; of the cells only the last may be long."""
    cells, width = [[h.upper() for h in head], *rows], width or terminal_width()
    widths = [max(len(row[i]) for row in cells) for i in range(len(head) - 1)]
    hang = indent + " " * sum(w + 2 for w in widths)
    below = len(hang) > width - LEAST
    lines = []
    for row in cells:
        left = indent + "".join(f"{cell:<{w}}  " for cell, w in zip(row, widths, strict=False))
        if below:
            lines += [left.rstrip(), *([wrap(row[-1], f"{indent}    ", width)] if row[-1] else [])]
        else:
            lines.append(left + wrap(row[-1], hang, width).lstrip())
    return "\n".join(line.rstrip() for line in lines)


def wrap(text: str, indent: str = "", width: int = 0) -> str:
    """Lines of at most `width`, all indented; a word is never cut, so that paths can be copied."""
    return textwrap.fill(
        text,
        width or terminal_width(),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
