"""Guards plugins' wrappers of `inferlab_build`: one that raises, or returns what is no component, is named with its plugin.

Such a wrapper is an error, not switched off as an observer is: what it decorates would be another component without a word.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from typing import Any

import pluggy

from core.interfaces import Component
from core.plugins.checks import KINDS, PluginError

ARGUMENTS = ("kind", "component", "settings", "context")
FAILURES = (Exception, SystemExit)  # not Ctrl-C


def guard(manager: pluggy.PluginManager, plugin: str) -> None:
    """From now on this plugin's wrapper answers for what it does."""
    for implementation in manager.hook.inferlab_build.get_hookimpls():
        if implementation.plugin_name == plugin:
            implementation.function = _guarded(plugin, implementation.function, implementation.argnames)  # type: ignore[misc]
            implementation.argnames = ARGUMENTS  # type: ignore[misc]


def _guarded(plugin: str, wrapper: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    def inferlab_build(kind: str, component: Component, settings: Any, context: Any) -> Generator[None, Any, Any]:
        given: dict[str, Any] = {"kind": kind, "component": component, "settings": settings, "context": context}
        generator = wrapper(*(given[name] for name in names))
        part, failure = None, None
        try:
            _start(generator)
            try:
                part = yield
            except BaseException as error:
                failure = error
            built = _end(generator, part, failure)
            if isinstance(failure, KeyboardInterrupt):
                raise failure
            if not isinstance(built, KINDS[kind]):
                after = f" after {type(failure).__name__}: {failure}" if failure else ""
                wanted = f"what `yield` gave it, or another {KINDS[kind].__name__}"
                raise _Defect(f"returned {built!r}{after}; it must return {wanted}")
            return built
        except FAILURES as error:
            if part is not None and kind == "executor":
                part.close()  # processes and memory of it would stay
            if error is failure:
                raise
            what = str(error) if isinstance(error, _Defect) else f"raised {type(error).__name__}: {error}{_place(error)}"
            text = f"plugin {plugin}: its wrapper inferlab_build, around {kind}={component.name}, {what}"
            raise PluginError(f"{text}; mend it, or leave the plugin out with plugins.block=[{plugin}]") from error

    return inferlab_build


class _Defect(Exception):
    """What is wrong with a wrapper that raised nothing."""


def _start(generator: Generator[None, Any, Any]) -> None:
    try:
        next(generator)
    except StopIteration:
        raise _Defect("never came to its `yield`") from None


def _end(generator: Generator[None, Any, Any], part: Any, failure: BaseException | None) -> Any:
    """What the wrapper makes of the component, or of the failure to build it."""
    try:
        generator.send(part) if failure is None else generator.throw(failure)
    except StopIteration as end:
        return end.value
    generator.close()
    raise _Defect("has a second `yield`")


def _place(error: BaseException) -> str:
    """The line of the plugin that raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
