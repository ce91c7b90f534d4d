"""How the messages of docs/messages.md are provoked: plugins are laid out as pip installs them, the command is run in this
process, and what it said is put down. Left out are folders (they read SITE, HERE, CHECKOUT, PYTHON) and numbers that only tests
put into names.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from core.cli import main as run
from core.plugins import discover
from core.plugins.commands import main as plugins
from tests.broken_plugins import BROKEN, GOOD, TWINS, Broken
from tests.plugins_fixtures import Site
from tests.test_capabilities import PAIRS
from tests.test_plugin_commands import test_check_finds, test_typing_errors
from tests.test_plugin_new import test_names_that_cannot_work


@dataclass(frozen=True)
class Row:
    """A line of a table: what is said before the message, and how the message is provoked; several are lines of their own."""

    cells: tuple[str, ...]
    provoke: Callable[[], list[str]]

    def lines(self) -> list[tuple[str, ...]]:
        return [(*self.cells, text) for text in self.provoke() if text]


TWIN = {"second_fcfs": "two distributions offer one option", "other": "two distributions have a plugin of one name"}
WORDS = {
    "a setting that does not exist": ["schedulr=fcfs"],
    "a setting of a slot that does not exist": ["kv_allocator.blok_size=16"],
    "the same, added with +": ["+atention.x=1"],
    "the same, forced with ++": ["++attention.typo=2"],
    "a value of the wrong form": ["kv_allocator.block_size=abc"],
    "a list where one option belongs": ["scheduler=[fcfs,mixed]"],
    "an option that does not exist": ["scheduler=fcf"],
    "a slot that is taken away": ["~scheduler"],
    "a preset that does not exist": ["model=smollm3"],
    "a flag that does not exist": ["--hepl"],
    "two values that exclude each other": ["max_num_batched_tokens=4", "max_num_seqs=8"],
}
WRAPPERS = {
    "raises": "    yield\n    raise KeyError(kind)",
    "returns nothing": "    part = yield",
    "never yields": "    if False:\n        yield",
    "yields twice": "    part = yield\n    yield\n    return part",
}


@contextmanager
def installed(*wheels: Broken) -> Iterator[Site]:
    """A folder on sys.path with these distributions, and a working directory; both are gone afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        site, here = Site(Path(folder, "site")), Path(folder, "here")
        here.mkdir()
        site.path.mkdir()
        for plugin in wheels:
            with zipfile.ZipFile(plugin.wheel(here)) as archive:
                archive.extractall(site.path)
        sys.path.insert(0, str(site.path))
        importlib.invalidate_caches()
        discover.cache_clear()  # type: ignore[attr-defined]
        try:
            with contextlib.chdir(here):
                yield site
        finally:
            sys.path[:] = path
            discover.cache_clear()  # type: ignore[attr-defined]
            for name in set(sys.modules) - modules:
                if folder in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]


def said(words: Sequence[str], site: Site) -> str:
    """What a command writes to stderr, or to stdout where it answers; without folders."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        plugins(words[1:], "inferlab plugins") if words[0] == "plugins" else run(words)
    text = out.getvalue() if "--json" in words else err.getvalue()
    folders = {
        site.path: "SITE",
        site.path.parent / "here": "HERE",
        Path(__file__).parents[1]: "CHECKOUT",
        Path(os.__file__).parent: "PYTHON",
    }
    for folder, name in folders.items():
        for form in (os.path.realpath(folder), str(folder)):
            text = text.replace(form, name)
    return re.sub(r"\b(acme)_\d+", r"\1", text).strip()


def errors(words: Sequence[str], site: Site) -> str:
    """Without the warnings before the error."""
    text = said(words, site)
    return text[text.index("error: ") :]


SMALL = ["model=tiny-llama", "device=cpu"]


def given(words: Sequence[str], *wheels: Broken, source: str = "", answer: Callable[..., str] = errors) -> list[str]:
    """What a command says where these are installed, and a plugin acme of this source."""
    with installed(*wheels) as site:
        if source:
            site.add("acme", source)
        return [answer(words, site)]


def of_plugins() -> Iterator[Row]:
    """P1 to P6 of the situations that plugins bring about."""
    for broken in BROKEN:
        name, healthy = broken.name, [*SMALL, "scheduler=healthy", "--cfg", "job"]
        yield Row((broken.case, f"`{name}` is installed, not chosen"), partial(given, healthy, broken, GOOD, answer=said))
        yield Row((broken.case, f"`scheduler={name}`"), partial(given, [*SMALL, f"scheduler={name}"], broken, GOOD))
    yield Row(("P2", "`scheduler=absent`"), partial(given, [*SMALL, "scheduler=absent"], BROKEN[0]))
    yield Row(("P3", TWIN["other"]), partial(given, SMALL, *TWINS[1:]))
    yield Row(("P3", TWIN["second_fcfs"]), partial(given, [*SMALL, "scheduler=fcfs"], TWINS[0]))
    yield Row(("", "`plugins.strict=true`"), partial(given, [*SMALL, "plugins.strict=true"], BROKEN[0]))


def of_clashes() -> Iterator[Row]:
    """Each pair of choices that can clash."""
    for pair, (declaration, words, _) in PAIRS.items():
        source = f'@hookimpl\ndef inferlab_components():\n    yield Component({declaration}, target="m:X")'
        yield Row((pair, f"`{' '.join(words)}`"), partial(given, [*SMALL, *words], source=source))


def of_wrappers() -> Iterator[Row]:
    """A plugin's wrapper around what is built."""
    for what, body in WRAPPERS.items():
        source = f"@hookimpl(wrapper=True)\ndef inferlab_build(kind):\n{body}"
        yield Row((what,), partial(given, [*SMALL, "prompts=[a]", "sampling.max_tokens=1"], source=source))


def of_check() -> Iterator[Row]:
    """All findings of a plugin that is broken in one way."""
    for source, files, text in test_check_finds.pytestmark[0].args[1]:
        yield Row((), partial(_findings, source, files, text))


def _findings(source: str, files: dict[str, str], text: str) -> list[str]:
    with installed() as site:
        site.add("acme", source, files=files)
        found = json.loads(said(["plugins", "check", "acme", "--json"], site))["plugins"][0]["findings"]
    texts = [f["text"] for f in found if f["level"] == "error"]
    assert any(text in t for t in texts), (text, texts)
    return texts


def of_words() -> Iterator[Row]:
    """What is typed wrongly."""
    for what, words in WORDS.items():
        yield Row((what, f"`{' '.join(words)}`"), partial(given, [*SMALL, *words]))


def of_commands() -> Iterator[Row]:
    """`inferlab plugins ...`, typed wrongly."""
    for arguments, *_ in test_typing_errors.pytestmark[0].args[1]:
        yield Row((f"`{' '.join(['plugins', *arguments])}`",), partial(given, ["plugins", *arguments]))
    acme = '@hookimpl\ndef inferlab_components():\n    yield Component("scheduler", "theirs", "m:X")'
    for name, kind, _ in test_names_that_cannot_work.pytestmark[0].args[1]:
        words = ["plugins", "new", name, "--kind", kind]
        yield Row((f"`{' '.join(words)}`",), partial(given, words, source=acme))
