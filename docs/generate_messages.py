"""Writes docs/messages.md: `python -m docs.generate_messages [--check]`.

Every message is provoked by `docs.provoked`. `sample` provokes a part of them, for tests that must be quick.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from docs.provoked import Row, of_check, of_clashes, of_commands, of_plugins, of_runs, of_words, of_wrappers

PAGE = Path(__file__).parent / "messages.md"
HEAD = """# Messages

What inferlab says when something is wrong with a plugin, a choice or a word. Every message below is real output, provoked by
`python -m docs.generate_messages`; a test checks that the page is current. `SITE` stands for the folder that packages are
installed in, `CHECKOUT` and `PYTHON` for those of inferlab and of Python's own modules. The cases: a broken plugin (P1), an
absent one (P2), two of one name (P3), a slip of the pen (P4), another version of the plugin API (P6). P5, worker processes, has
no message: they use what the parent resolved and look for no plugins.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; each line of a message on its own."""
    lines = [head, ["---"] * len(head), *dict.fromkeys(tuple(row) for row in rows)]
    return "\n".join(map(_line, lines))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    text = text.replace("|", "\\|")
    if not text.startswith(("`", "-")):
        text = re.sub(r"([<>*_])", r"\\\1", text)
    return "<br>".join(text.splitlines())


SECTIONS: tuple[tuple[str, tuple[str, ...], Callable[[], Iterator[Row]]], ...] = (
    ("Plugins", ("case", "situation", "message"), of_plugins),
    ("Wrappers of `inferlab_build`", ("the wrapper", "message"), of_wrappers),
    ("Choices that clash", ("pair", "given", "message"), of_clashes),
    ("What `plugins check` reports", ("level", "finding"), of_check),
    ("Settings and options", ("mistake", "given", "message"), of_words),
    ("Runs, benchmarks and sweeps", ("of", "mistake", "given", "message"), of_runs),
    ("Commands", ("given", "message"), of_commands),
)


def page() -> str:
    """The whole document."""
    parts = [(title, table(head, (line for row in rows() for line in row.lines()))) for title, head, rows in SECTIONS]
    return "\n".join([HEAD, *(f"## {title}\n\n{text}\n" for title, text in parts)])


def section(title: str) -> list[str]:
    """The lines of a table as the page has them, without its head."""
    text = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("|")][2:]


EVERY = 4
SLOW = {
    "Wrappers of `inferlab_build`": 100,
    "Choices that clash": 8,
    "Runs, benchmarks and sweeps": 6,
}  # provoked word by word in tests of their own, too


def sample() -> list[str]:
    """What is not current, as far as a part tells: rows that nothing gives, and a part of the messages, provoked again."""
    wrong = []
    for title, _, rows in SECTIONS:
        have, all_rows = section(title), list(rows())
        starts = [f"| {' | '.join(map(_cell, row.cells))} | " for row in all_rows if row.cells]
        wrong += [f"{title}: nothing gives {line}" for line in have if starts and not line.startswith(tuple(starts))]
        every = SLOW.get(title, EVERY)
        for row in all_rows[every // 2 :: every]:
            wrong += [f"{title}: lacks {line}" for line in map(_line, row.lines()) if line not in have]
    return wrong


def main() -> int:
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
        return 0
    lines = difflib.unified_diff(PAGE.read_text().splitlines(), text.splitlines(), "messages.md", "now", lineterm="", n=0)
    if difference := "\n".join(lines):
        print(f"{difference}\npython -m docs.generate_messages brings it up to date", file=sys.stderr)
    return int(bool(difference))


if __name__ == "__main__":
    raise SystemExit(main())
