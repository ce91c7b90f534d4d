"""Wrappers around building a component: what one does wrong is told with its plugin, what the component does wrong is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from core.cli import main
from core.interfaces import HostContext, Scheduler
from core.plugins import PluginError
from tests.plugins_fixtures import Site
from tests.test_resolve import resolved

WRAPPER = "@hookimpl(wrapper=True)\ndef inferlab_build(kind):\n"
DEFECTS = {  # body -> what is said of it
    "    yield\n    raise ValueError('oops')": r"raised ValueError: oops \(\S+acme_\d+\.py:6\)",
    "    raise SystemExit(3)\n    yield": r"raised SystemExit: 3 \(\S+acme_\d+\.py:5\)",
    "    part = yield": r"returned None; it must return what `yield` gave it, or another Scheduler",
    "    yield\n    return kind": r"returned 'scheduler'; it must return",
    "    if False:\n        yield": r"never came to its `yield`",
    "    part = yield\n    yield\n    return part": r"has a second `yield`",
}
BROKEN_TARGET = (
    '@hookimpl\ndef inferlab_components():\n    yield Component("scheduler", "broken", "MODULE_target:Broken")\n',
    "class Broken(Scheduler):\n    def __init__(self, settings, context):\n        raise {error}\n"
    "    def add(self, request): ...\n    def remove(self, request): ...\n    def schedule(self, step): ...\n",
)


def build(kind: str = "scheduler", *overrides: str) -> Any:
    r = resolved(*overrides)
    return r.build(kind, HostContext(r.limits, 16, 8, lambda: 0.0))


@pytest.mark.parametrize("body", DEFECTS)
def test_a_broken_wrapper_is_named(site: Site, body: str) -> None:
    """Also with another plugin's wrapper outside and one inside: who is right is not blamed."""
    right = WRAPPER + "    return (yield)\n"
    site.add("aaa", right)
    site.add("acme", WRAPPER + body)
    site.add("zzz", right)
    with pytest.raises(PluginError) as caught:
        build()
    text = str(caught.value)
    assert text.startswith("plugin acme: its wrapper inferlab_build, around scheduler=fcfs, ")
    assert re.search(DEFECTS[body], text) and text.endswith("plugins.block=[acme]")
    assert isinstance(build("scheduler", "plugins.block=[acme]"), Scheduler)


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(4), KeyboardInterrupt()])
def test_the_components_own_error_passes_through(site: Site, error: BaseException) -> None:
    site.add("acme", BROKEN_TARGET[0], files={"MODULE_target.py": BROKEN_TARGET[1].format(error=repr(error))})
    site.add("timer", WRAPPER + "    try:\n        return (yield)\n    finally:\n        kind += '!'\n")
    with pytest.raises(type(error)) as caught:
        build("scheduler", "scheduler=broken")
    assert caught.value.args == error.args


def test_a_wrapper_that_swallows_an_error_is_told_which(site: Site) -> None:
    site.add("acme", BROKEN_TARGET[0], files={"MODULE_target.py": BROKEN_TARGET[1].format(error='ValueError("mine")')})
    site.add("eater", WRAPPER + "    try:\n        return (yield)\n    except ValueError:\n        return None\n")
    with pytest.raises(PluginError, match=r"plugin eater: .* returned None after ValueError: mine; it must return"):
        build("scheduler", "scheduler=broken")


def test_an_executor_that_was_built_is_closed(site: Site) -> None:
    """Its processes and its memory would outlive the error."""
    target = (
        "closed = []\nclass Idle(Executor):\n    def __init__(self, settings, context): ...\n"
        "    num_blocks = 8\n    def launch(self, plan): ...\n    def report(self): return {}\n"
        "    def close(self): closed.append(1)\n"
    )
    source = '@hookimpl\ndef inferlab_components():\n    yield Component("executor", "idle", "MODULE_target:Idle")\n'
    module = site.add("acme", source, files={"MODULE_target.py": target})
    site.add("loud", WRAPPER + "    yield\n    raise ValueError('oops')\n")
    with pytest.raises(PluginError, match=r"plugin loud: .* around executor=idle, raised ValueError: oops"):
        build("executor", "executor=idle")
    assert __import__(f"{module}_target").closed == [1]


def test_the_command_tells_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, no traceback, exit 1; `plugins.block` is the way out."""
    site.add("acme", WRAPPER + "    raise KeyError(kind)\n    yield\n")
    monkeypatch.chdir(tmp_path)
    settings = ["model=tiny-llama", "device=cpu", "prompts=[a]", "sampling.max_tokens=1", "hydra.run.dir=out"]
    assert main(settings) == 1
    text = capsys.readouterr().err
    assert "error: plugin acme: its wrapper inferlab_build, around executor=local, raised KeyError: 'executor'" in text
    assert "Traceback" not in text
    assert main([*settings, "plugins.block=[acme]"]) == 0
