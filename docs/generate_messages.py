"""Writes docs/messages.md: `python -m docs.generate_messages [--check]`.

Every message is provoked: plugins are laid out as pip installs them, the command is run, and what it said is put down. Left out
are folders (they read SITE, HERE, CHECKOUT, PYTHON) and numbers that only the tests put into names of modules.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import json
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from core.cli import main as run
from core.plugins import discover
from core.plugins.commands import main as plugins
from tests.broken_plugins import BROKEN, GOOD, TWINS, Broken
from tests.plugins_fixtures import Site
from tests.test_capabilities import PAIRS
from tests.test_plugin_commands import test_check_finds, test_typing_errors
from tests.test_plugin_new import test_names_that_cannot_work

PAGE = Path(__file__).parent / "messages.md"
HEAD = """# Messages

What inferlab says when something is wrong with a plugin, a choice or a word. Every message below is real output, provoked by
`python -m docs.generate_messages`; a test checks that the page is current. `SITE` stands for the folder that packages are
installed in, `CHECKOUT` and `PYTHON` for those of inferlab and of Python's own modules. The cases: a broken plugin (P1), an
absent one (P2), two of one name (P3), a slip of the pen (P4), another version of the plugin API (P6). P5, worker processes, has
no message: they use what the parent resolved and look for no plugins.
"""
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


def of_plugins() -> Iterator[tuple[str, str, str]]:
    """P1 to P6 of the situations that plugins bring about."""
    for plugin in BROKEN:
        with installed(plugin, GOOD) as site:
            text = said([*SMALL, "scheduler=healthy", "--cfg", "job"], site)
            if text:
                yield plugin.case, f"`{plugin.name}` is installed, not chosen", text
        with installed(plugin, GOOD) as site:
            yield plugin.case, f"`scheduler={plugin.name}`", errors([*SMALL, f"scheduler={plugin.name}"], site)
    with installed(BROKEN[0]) as site:
        yield "P2", "`scheduler=absent`", errors([*SMALL, "scheduler=absent"], site)
    with installed(*TWINS[1:]) as site:
        yield "P3", TWIN["other"], errors([*SMALL], site)
    with installed(TWINS[0]) as site:
        yield "P3", TWIN["second_fcfs"], errors([*SMALL, "scheduler=fcfs"], site)
    with installed(BROKEN[0]) as site:
        yield "", "`plugins.strict=true`", errors([*SMALL, "plugins.strict=true"], site)


def of_clashes() -> Iterator[tuple[str, str, str]]:
    """Each pair of choices that can clash."""
    for pair, (declaration, given, _) in PAIRS.items():
        with installed() as site:
            lines = ["@hookimpl", "def inferlab_components():", f'    yield Component({declaration}, target="m:X")']
            site.add("acme", "\n".join(lines))
            yield pair, f"`{' '.join(given)}`", errors([*SMALL, *given], site)


def of_wrappers() -> Iterator[tuple[str, str]]:
    """A plugin's wrapper around what is built."""
    for what, body in WRAPPERS.items():
        with installed() as site:
            site.add("acme", f"@hookimpl(wrapper=True)\ndef inferlab_build(kind):\n{body}")
            yield what, errors([*SMALL, "prompts=[a]", "sampling.max_tokens=1"], site)


def of_check() -> Iterator[tuple[str]]:
    """All findings of a plugin that is broken in one way."""
    for source, files, text in test_check_finds.pytestmark[0].args[1]:
        with installed() as site:
            site.add("acme", source, files=files)
            found = json.loads(said(["plugins", "check", "acme", "--json"], site))["plugins"][0]["findings"]
            texts = [f["text"] for f in found if f["level"] == "error"]
            assert any(text in t for t in texts), (text, texts)
            yield from ((t,) for t in texts)


def of_words() -> Iterator[tuple[str, str, str]]:
    """What is typed wrongly."""
    for what, words in WORDS.items():
        with installed() as site:
            yield what, f"`{' '.join(words)}`", errors([*SMALL, *words], site)


def of_commands() -> Iterator[tuple[str, str]]:
    """`inferlab plugins ...`, typed wrongly."""
    for arguments, *_ in test_typing_errors.pytestmark[0].args[1]:
        with installed() as site:
            yield f"`{' '.join(['plugins', *arguments])}`", errors(["plugins", *arguments], site)
    for name, kind, _ in test_names_that_cannot_work.pytestmark[0].args[1]:
        with installed() as site:
            site.add("acme", '@hookimpl\ndef inferlab_components():\n    yield Component("scheduler", "theirs", "m:X")')
            words = ["plugins", "new", name, "--kind", kind]
            yield f"`{' '.join(words)}`", errors(words, site)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; each line of a message on its own."""
    lines = [head, ["---"] * len(head), *dict.fromkeys(tuple(row) for row in rows)]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    text = text.replace("|", "\\|")
    if not text.startswith(("`", "-")):
        text = re.sub(r"([<>*_])", r"\\\1", text)
    return "<br>".join(text.splitlines())


def page() -> str:
    """The whole document."""
    parts = [
        ("Plugins", table(("case", "situation", "message"), of_plugins())),
        ("Wrappers of `inferlab_build`", table(("the wrapper", "message"), of_wrappers())),
        ("Choices that clash", table(("pair", "given", "message"), of_clashes())),
        ("Errors that `plugins check` reports", table(("error",), of_check())),
        ("Settings and options", table(("mistake", "given", "message"), of_words())),
        ("Commands", table(("given", "message"), of_commands())),
    ]
    return "\n".join([HEAD, *(f"## {title}\n\n{text}\n" for title, text in parts)])


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
