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
from tests.test_plugin_findings import CASES
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
BENCH = ["task=bench"]
RUNS: dict[str, tuple[str, list[str]]] = {  # mistake: of what, what is given
    "a temperature below 0": ("sampling", ["sampling.temperature=-1"]),
    "a top_p of 0": ("sampling", ["sampling.top_p=0"]),
    "no token wanted": ("sampling", ["sampling.max_tokens=0"]),
    "a parameter that the sampler does not have": ("sampling", ["sampling.topp=0.9"]),
    "an empty stop string": ("sampling", ['sampling.stop=[""]']),
    "a stop token that is none": ("sampling", ["sampling.stop_token_ids=[-1]"]),
    "more than the model was made for": ("engine", ["max_model_len=99999"]),
    "a device that does not exist": ("engine", ["device=gpu"]),
    "two names of one setting": ("engine", ["num_kv_blocks=8", "num_kvcache_blocks=9"]),
    "two sizes of the KV cache": ("engine", ["num_kv_blocks=8", "kv_memory=1GiB"]),
    "a size without a unit": ("engine", ["kv_memory=lots"]),
    "a share above 1": ("engine", ["gpu_memory_utilization=1.5"]),
    "prompts twice": ("prompts", ["prompts=[a]", "prompts_file=a.txt"]),
    "a file of prompts that is not there": ("prompts", ["prompts_file=a.txt"]),
    "a folder that holds no model": ("checkpoint", ["model=custom", "model.path=."]),
    "a model without a file": ("checkpoint", ["model=./a.gguf"]),
    "random weights without sizes": ("checkpoint", ["model=custom", "model.weights=random"]),
    "a kind of weights that does not exist": ("checkpoint", ["model.weights=rnd"]),
    "an architecture that no plugin has": ("checkpoint", ["model.config.architectures=[Mamba]"]),
    "no run": ("bench", [*BENCH, "bench.repeats=0"]),
    "an engine to compare with that is not known": ("bench", [*BENCH, "bench.peer=sglang"]),
    "a profile without a benchmark": ("bench", ["profile=true"]),
    "the ends of a range in the wrong order": ("bench", [*BENCH, "load.input_min=9", "load.input_max=4"]),
    "a trace without a file": ("bench", [*BENCH, "load.arrival=trace"]),
    "a label that does not exist": ("bench", [*BENCH, "load.labels=[age]"]),
    "no time for a job": ("sweep", ["-m", "sweep.timeout_s=0"]),
    "no job at a time": ("sweep", ["-m", "sweep.parallel=0"]),
    "an option that does not exist, in a sweep": ("sweep", ["-m", "scheduler=fcfs,fcf"]),
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
    """All findings of a plugin that is broken in one way; of the further cases the one that each is about."""
    for source, files, text in test_check_finds.pytestmark[0].args[1]:
        yield Row(("error",), partial(_findings, "error", text, lambda site, s=source, f=files: site.add("acme", s, files=f)))
    for case in CASES:
        yield Row((case.level,), partial(_findings, case.level, case.text, case.install, only=True))


def _findings(level: str, text: str, install: Callable[[Site], object], only: bool = False) -> list[str]:
    with installed() as site:
        install(site)
        found = json.loads(said(["plugins", "check", "acme", "--json"], site))["plugins"][0]["findings"]
    texts = [f["text"] for f in found if f["level"] == level]
    about = [t for t in texts if text in t]
    assert about, (text, texts)
    return about if only else texts


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


def of_runs() -> Iterator[Row]:
    """What a run, a benchmark or a sweep refuses."""
    for what, (group, words) in RUNS.items():
        yield Row((group, what, f"`{' '.join(words)}`"), partial(given, [*SMALL, *words]))
