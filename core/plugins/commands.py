"""`python -m core.plugins COMMAND` and `inferlab plugins COMMAND`: what is installed, what is wrong with it, and a new one."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from core.errors import did_you_mean, message
from core.plugins import PluginError, Registry, survey

COMMANDS = {
    "list": "every plugin: distribution, version, origin, API version, components, and its state",
    "describe": "one option: settings, capabilities, requirements, source, presets, examples",
    "check": "everything that can be wrong with a plugin; exit code 1 if there is an error",
    "hooks": "every hook: what it is for, and which plugins implement it",
    "new": "a complete package for an option of your own; it works when installed as it is",
}


class _Parser(argparse.ArgumentParser):
    """Complains in our way: one message, the nearest name, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise PluginError(f"{message[:1].lower()}{message[1:]}\n{self.format_usage().strip()}")


def parser(prog: str) -> argparse.ArgumentParser:
    """All commands with their arguments."""
    top = _Parser(prog=prog, description="Plugins: what is installed, and what is wrong with it.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    made = {name: commands.add_parser(name, help=text, description=text, allow_abbrev=False) for name, text in COMMANDS.items()}
    for name, sub in made.items():
        sub.add_argument("--json", action="store_true", help="for programs")
        if name != "new":
            sub.add_argument(
                "--block", action="append", default=[], metavar="NAME", help="a plugin or distribution to leave out"
            )
    made["describe"].add_argument("kind", metavar="KIND", help="scheduler, kv_allocator, attention, arch, sampler, executor")
    made["describe"].add_argument("name", metavar="NAME", help="the word on the command line of a run")
    made["new"].add_argument("name", metavar="NAME", help="of the distribution, the plugin and the option")
    made["new"].add_argument("--kind", required=True, metavar="KIND", help="scheduler, kv_allocator, attention, arch, sampler")
    made["new"].add_argument("--dir", default=".", metavar="DIR", help="where the folder NAME is made (default: here)")
    what = made["check"].add_mutually_exclusive_group()
    what.add_argument("name", nargs="?", metavar="NAME", help="a plugin, a distribution or an option")
    what.add_argument("--all", action="store_true", help="every plugin and the environment (the default)")
    return top


def main(argv: Sequence[str] | None = None, prog: str = "python -m core.plugins") -> int:
    """The exit code: 0, 1 if something is wrong, 2 if the command itself cannot be understood."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or os.environ.get("INFERLAB_DEBUG") == "1"
    try:
        options = _parse([a for a in arguments if a != "--debug"], prog)
    except PluginError as error:
        print(message(error), file=sys.stderr)
        return 2
    except SystemExit:  # --help
        return 0
    try:
        with contextlib.redirect_stdout(sys.stderr):  # plugins may print; our answer is for pipes
            text, code = _run(options)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(message(error, debug), file=sys.stderr)
        return 1
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)
    return code


def _parse(arguments: list[str], prog: str) -> argparse.Namespace:
    top = parser(prog)
    words = [a for a in arguments if not a.startswith("-")]
    if not words and not {"-h", "--help"} & set(arguments):
        raise PluginError(f"a command is missing: {', '.join(COMMANDS)}")
    if words and words[0] not in COMMANDS:
        raise PluginError(f"{words[0]}: no such command{did_you_mean(words[0], COMMANDS)} Commands: {', '.join(COMMANDS)}")
    options, rest = top.parse_known_args(arguments)
    if rest:
        own = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction)).choices[options.command]
        flags = list(own._option_string_actions)
        raise PluginError(f"{rest[0]} is not understood{did_you_mean(rest[0], flags)}\n{own.format_usage().strip()}")
    return options


def _run(options: argparse.Namespace) -> tuple[str, int]:
    registry = survey(tuple(sorted(getattr(options, "block", ()))))
    data, text, code = globals()[f"_{options.command}"](registry, options)
    return (json.dumps(data, indent=1) if options.json else text()), code


Answer = tuple[Any, Any, int]  # data, text, exit code


def _list(registry: Registry, options: argparse.Namespace) -> Answer:
    from core.plugins.inventory import plugins, plugins_text

    data = plugins(registry)
    return data, lambda: plugins_text(data), int(bool(registry.failed))


def _hooks(registry: Registry, options: argparse.Namespace) -> Answer:
    from core.plugins.inventory import hook_list, hooks_text

    data = hook_list(registry)
    return data, lambda: hooks_text(data), 0


def _describe(registry: Registry, options: argparse.Namespace) -> Answer:
    from core.plugins.describe import describe, describe_text

    data = describe(registry, options.kind, options.name)
    return data, lambda: describe_text(data), 0


def _check(registry: Registry, options: argparse.Namespace) -> Answer:
    from core.plugins.diagnose import as_data, as_text, chosen, diagnose

    plugins = chosen(registry, options.name)
    findings = diagnose(registry, plugins, everything=options.name is None)
    data = as_data(plugins, findings)
    return data, lambda: as_text(data), int(data["errors"] > 0)


def _new(registry: Registry, options: argparse.Namespace) -> Answer:
    from core.plugins.new import create, created_text

    data = create(registry, options.name, options.kind, Path(options.dir))
    return data, lambda: created_text(data), 0
