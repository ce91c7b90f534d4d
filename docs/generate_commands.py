"""Writes docs/commands.md: `python -m docs.generate_commands [--check]`, from what the commands themselves read."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

from core.cli import FLAGS
from core.config import Config
from core.helptext import FLAGS as FLAG_TEXT
from core.helptext import default_text
from core.loads import LoadSettings
from core.model_settings import ModelSettings
from core.plugins import discover
from core.plugins.checks import KINDS
from core.plugins.commands import COMMANDS, parser
from core.report.__main__ import main as report
from core.vocabulary import AUTO_KINDS, conf_dir, default_choices

PAGE = Path(__file__).parent / "commands.md"
HEAD = """# Commands

Written by `python -m docs.generate_commands`; a test checks that the page is current. `inferlab` and `python -m
core.run` are the same command, so are `inferlab plugins` and `python -m core.plugins`. Answers go to stdout; progress,
warnings and errors go to stderr. Exit code 0: done; 1: something is wrong, one message says what; 2: the command of
`inferlab plugins` is not understood; 130: ended by Ctrl-C.
"""
RUN = """## `inferlab [SETTING=VALUE ...] [flags]`

Answers prompts (`task=generate`), or measures a load (`task=bench`). `-m` runs every combination of values separated by commas.
[Sweeps](sweeps.md) says how.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n"


def settings(kind: type, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Name, default, unit, meaning; groups inside are opened."""
    for item in fields(kind):
        inner = item.default_factory
        if isinstance(inner, type) and is_dataclass(inner):
            yield from settings(inner, f"{prefix}{item.name}.")
        elif item.metadata.get("doc") or prefix:
            unit, doc = item.metadata.get("unit", ""), item.metadata.get("doc", "")
            yield f"`{prefix}{item.name}`", f"`{default_text(item)}`", unit or "-", doc or "-"


def model_presets() -> str:
    names = sorted(p.stem for p in (conf_dir() / "model").glob("*.yaml"))
    return ", ".join(f"`{name}`" for name in names if name not in ("base_model", "custom"))


SETTINGS = ("setting", "default", "unit", "meaning")


def run_part() -> Iterator[str]:
    """Flags, slots with their options, settings."""
    yield RUN
    told = {word for line in FLAG_TEXT.splitlines() for word in line.replace(",", " ").split() if word.startswith("-")}
    others = ", ".join(f"`{flag}`" for flag in FLAGS if flag not in told)
    ours = FLAG_TEXT.partition("\n")[2].rstrip()
    yield f"### Flags\n\n```text\n{ours}\n```\n\nOf Hydra, as it documents them: {others}.\n"
    yield "### Slots\n\n`SLOT=OPTION` chooses, `SLOT.NAME=VALUE` sets what the chosen option has. `*` is the default.\n"
    registry, defaults = discover(), default_choices()
    for kind in KINDS:
        rows = (
            [(f"`{kind}=auto`{' *' * (defaults[kind] == 'auto')}", "chosen from model and machine")]
            if kind in AUTO_KINDS
            else []
        )
        own: list[tuple[str, str, str, str, str]] = []
        for found in registry.options(kind):
            part = found.component
            if found.origin != "built-in":
                continue
            rows.append((f"`{kind}={part.name}`{' *' * (defaults[kind] == part.name)}", part.summary))
            own += [(f"`{part.name}`", *row) for row in settings(part.settings, f"{kind}.")]
            if part.request_settings:
                own += [(f"`{part.name}`", *row) for row in settings(part.request_settings, "sampling.")]
        yield table((kind, "what it is"), rows)
        if own:
            yield table(("of", *SETTINGS), own)
    yield f"### Settings\n\n{table(SETTINGS, settings(Config, ''))}"
    yield "### The model\n"
    yield f"`model=PRESET` sets these; `model=V` of any other word is `model.path=V`. Presets: {model_presets()}.\n"
    yield table(SETTINGS, settings(ModelSettings, "model."))
    yield f"### The load of `task=bench`\n\n{table(SETTINGS, settings(LoadSettings, 'load.'))}"


def plugins_part() -> Iterator[str]:
    """Each command with its arguments, from its parser."""
    yield "## `inferlab plugins COMMAND`\n"
    yield table(
        ("command", "what it answers"), [(f"[`{name}`](#inferlab-plugins-{name})", text) for name, text in COMMANDS.items()]
    )
    top = parser("inferlab plugins")
    own = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction)).choices
    for name, sub in own.items():
        text = f"{COMMANDS[name][:1].upper()}{COMMANDS[name][1:]}"
        yield f"### inferlab plugins {name}\n\n{text}.\n\n{arguments(sub)}"
    yield "`--debug` shows the traceback of an error, with any command.\n"


def report_part() -> Iterator[str]:
    """`core.report`, from its own --help."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        report(["--help"])
    words = re.findall(r"^  (-?[\w, -]+?(?: [A-Z]+)?)  +(.*(?:\n {6,}.*)*)", out.getvalue(), re.M)
    rows = [(f"`{name}`", " ".join(text.split())) for name, text in words if name.strip() and "--help" not in name]
    text = table(("argument", "meaning"), rows)
    yield f"## `python -m core.report folder`\n\nThe report of a sweep, written again.\n\n{text}"


def arguments(sub: argparse.ArgumentParser) -> str:
    rows = [(f"`{_argument(action)}`", action.help or "") for action in sub._actions if action.dest != "help"]
    return table(("argument", "meaning"), rows)


def _argument(action: argparse.Action) -> str:
    value = action.metavar if action.nargs != 0 else ""
    return " ".join(filter(None, [", ".join(action.option_strings), str(value or "")]))


def page() -> str:
    return "\n".join([HEAD, *run_part(), *plugins_part(), *report_part()])


def main() -> int:
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        print("docs/commands.md is not current: python -m docs.generate_commands", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
