"""What the user reads when something is wrong: one message, and the nearest right name."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

USER_ERRORS = (ValueError, OSError, ImportError, NotImplementedError, HydraException, OmegaConfBaseException)


class ConfigError(ValueError):
    """A setting that does not exist, or whose value is not allowed."""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Names that `word` was probably meant to be, best first; dotted names also match by their last part."""
    names = sorted(name for name in set(known) if not word.startswith(f"{name}."))
    leaf = word.rpartition(".")[2]
    exact = [n for n in names if n.rpartition(".")[2] == leaf and n != word]
    by_leaf = [n for n in names if difflib.SequenceMatcher(None, leaf, n.rpartition(".")[2]).ratio() >= 0.75]
    return list(dict.fromkeys([*exact, *difflib.get_close_matches(word, names, n=2, cutoff=0.7), *by_leaf]))[:3]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence: `; did you mean a or b?`, or a full stop where no name is near."""
    names = nearest(word, known)
    return f"; did you mean {' or '.join(names)}?" if names else "."


def message(error: BaseException, debug: bool = False) -> str:
    """The text for stderr: a traceback goes before it only if asked for."""
    if debug:
        return "".join(traceback.format_exception(error)) + message(error)
    if isinstance(error, USER_ERRORS):
        cause = error.__cause__ if isinstance(error, HydraException) else None
        return f"error: {error}" + (f"\n{cause}" if isinstance(cause, OmegaConfBaseException) else "")
    return f"error: {type(error).__name__}: {error} (not one of the foreseen errors: --debug shows where it comes from)"
