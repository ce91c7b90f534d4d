"""The command line: `python -m core.run` and `inferlab`. Hydra composes and runs; errors and exit codes are ours."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from core.composition import registry_for, rewrite, translate, world
from core.config import Config, finish
from core.errors import ConfigError, did_you_mean, message
from core.interfaces import PROJECT
from core.plugins import Registry
from core.sweep.lead import Refused, lead, run_cell
from core.sweep.plan import with_repeats
from core.sweep.process import python, stop
from core.validation import Options
from core.vocabulary import CONFIG_NAME, conf_dir, plain

# Ours, and those of Hydra's that make sense here.
FLAGS = (
    *("--help", "-h", "--version", "--debug", "--multirun", "-m", "--run", "-r", "--cfg", "-c", "--resolve", "--package", "-p"),
    *("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--info", "-i", "--hydra-help"),
    *("--shell-completion", "-sc", "--experimental-rerun"),
)
# Those whose value may be the next word.
WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--info", "-i"),
    "--experimental-rerun",
)

log = logging.getLogger(PROJECT)
_errors: list[Exception] = []  # of the job: Hydra would print it in its own way, and more than once


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command. Every user error is one message on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--debug" in arguments:
        arguments.remove("--debug")
        os.environ["INFERLAB_DEBUG"] = "1"  # for the jobs of a sweep too
    try:
        return _main(arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our answer has gone, as `| head` does: nothing is wrong, and nobody is told
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still in the buffer
        return 141
    except Exception as error:
        print(message(error, os.environ.get("INFERLAB_DEBUG") == "1"), file=sys.stderr)
        return 1


def _main(arguments: list[str]) -> int:
    if "--version" in arguments:
        print(PROJECT, metadata.version(PROJECT))
        return 0
    if arguments[:1] == ["plugins"]:
        from core.plugins.commands import main as plugins

        return plugins(arguments[1:], f"{PROJECT} plugins")
    _refuse_unknown_words(arguments)
    registry = registry_for(arguments)
    for plugin, why in registry.failed.items():
        print(f"warning: plugin {plugin} could not be loaded: {why}", file=sys.stderr)
    for line in registry.slow:
        print(f"note: {line}", file=sys.stderr)
    if "--help" in arguments or "-h" in arguments:
        from core.helptext import help_text

        print(help_text(registry, metadata.version(PROJECT)), flush=True)
        return 0
    lead.command = [*python("core.run"), *arguments]
    if {"-m", "--multirun"} & set(arguments):
        arguments = with_repeats(arguments)
    return _hydra(rewrite(_words_first(arguments), registry, _config_dirs(arguments)), registry)


def _refuse_unknown_words(arguments: Sequence[str]) -> None:
    """Hydra would print its whole usage, or speak of its grammar."""
    for before, word in zip(["", *arguments], arguments, strict=False):
        flag = word.partition("=")[0]
        if flag.startswith("-") and flag not in FLAGS:
            raise ConfigError(f"unknown flag {flag}{did_you_mean(flag, FLAGS)} Settings are given as NAME=VALUE; see --help")
        if flag == word and not word.startswith(("-", "~")) and before not in WITH_VALUE:
            hint = did_you_mean(word, ["plugins"])
            raise ConfigError(f"{word!r} is no command{hint} Settings are given as NAME=VALUE; see --help")


def _words_first(arguments: Sequence[str]) -> list[str]:
    """Settings, then flags with their values: Hydra refuses settings on both sides of a flag."""
    flags, words = [], []
    for before, word in zip(["", *arguments], arguments, strict=False):
        value = before in WITH_VALUE and not (before in ("--info", "-i") and "=" in word)
        (flags if value or word.startswith("-") else words).append(word)
    return words + flags


def _config_dirs(arguments: Sequence[str]) -> list[Path]:
    """--config-dir in its spellings: its presets count as known."""
    folders: list[str] = []
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in ("--config-dir", "-cd"):
            folders += [value] if equals else arguments[at + 1 : at + 2]
    return [Path(folder) for folder in folders]


def _hydra(arguments: list[str], registry: Registry) -> int:
    run = hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, version_base="1.3")(_job)
    _errors.clear()
    try:
        with world(Config, registry), _process(arguments):
            run()
            lead.wait()
    except Refused as error:
        raise error.__cause__ or error from None
    except Exception as error:
        raise translate(error, Config, registry, [a for a in arguments if "=" in a and not a.startswith("-")]) from error
    finally:
        code = lead.report(interrupted=isinstance(sys.exception(), KeyboardInterrupt | SystemExit))
    if _errors:
        raise _errors[0]
    return code


@contextmanager
def _process(arguments: list[str]) -> Iterator[None]:
    """What Hydra reads from the process: its arguments, and that errors are to be raised, not printed."""
    before, argv = os.environ.get("HYDRA_FULL_ERROR"), sys.argv
    os.environ["HYDRA_FULL_ERROR"], sys.argv = "1", [argv[0], *arguments]
    stop.clear()
    on_term = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that children are ended too
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:  # a process in the background ignores it, and shall
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, on_term)
        signal.signal(signal.SIGINT, on_interrupt)
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR") if before is None else os.environ.update(HYDRA_FULL_ERROR=before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. An exception that is raised in a destructor is lost: who waits for a cell's process looks at `stop` too."""
    stop.set()
    raise KeyboardInterrupt


def _job(node: DictConfig) -> Any:
    settings = HydraConfig.get()
    if settings.mode == RunMode.MULTIRUN:
        return run_cell(node, settings)  # type: ignore[arg-type]
    try:
        return _run(node, settings)
    except Exception as error:
        _errors.append(error)


def _run(node: DictConfig, settings: Any) -> dict[str, Any]:
    overrides = [str(o) for o in settings.overrides.task]
    composed = finish(Options(node, plain(settings.runtime.choices), overrides, registry_for(overrides)))
    log.setLevel(composed.config.log_level.upper())
    from core.resolve import decide

    resolved = decide(composed)  # refuses what cannot run before torch, which both tasks load, is imported
    if composed.config.task == "bench":
        from core.bench.task import run_job
    else:
        from core.app import run_job
    return run_job(composed, Path(settings.runtime.output_dir), resolved)
