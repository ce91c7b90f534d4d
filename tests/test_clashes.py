"""Every kind of component against every key of a capability: refused with the way out, or accepted; never passed over."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.capabilities import FACTS, SLOTS
from core.cli import main
from core.plugins.checks import KINDS
from tests.clashes import GIVEN, KEYS, OPEN, composed, pairs, reasons, resolved
from tests.plugins_fixtures import Site

ROOT = Path(__file__).parent.parent
BARE = ("device=cpu", "attention=sdpa")  # block size, graphs and overlap stay open


def test_every_key_is_here() -> None:
    """A new key of a capability, or a new slot, needs a line in the matrix."""
    assert {*FACTS, *SLOTS} <= KEYS.keys() and set(SLOTS) == set(KINDS)
    assert {key.partition(".")[0] for key in KEYS if "." in key} == {"load", "model", "sampling", *SLOTS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_against_every_key(kind: str) -> None:
    """One reason, with want, got and the way out; an option that is offered as the way out removes it."""
    base = composed(*GIVEN)
    for key in (key for k, key in pairs() if k == kind):
        no, yes = ({kind: {key: constraint}} for constraint in KEYS[key])
        assert reasons(base, yes) == [], key
        refused = [text for text in reasons(base, no) if text.startswith(f"{kind}=acme needs ")]
        assert len(refused) == 1 and ", got " in refused[0] and "; way out: " in refused[0], (key, refused)
        for way in refused[0].rpartition("; way out: ")[2].split(" or "):
            slot, _, option = way.partition("=")
            if slot in KINDS:
                left = reasons(base, no, **{slot: option})
                assert refused[0] not in left and not [r for r in left if r.startswith(f"{kind}=acme needs ")], (key, way)


@pytest.mark.parametrize("key", OPEN)
def test_every_two_kinds_over_a_value_that_is_open(key: str) -> None:
    """One that asks gets it, two that agree get it, two that do not are both named."""
    base, (one, other) = composed(*BARE), OPEN[key]
    easy = {"attention": {}}  # ours say no to graphs on a CPU
    for first, second in itertools.combinations(KINDS, 2):
        for want in (one, other):
            value = want.values[0]
            assert getattr(resolved(base, {**easy, first: {key: want}}), key) == value
            assert getattr(resolved(base, {**easy, first: {key: want}, second: {key: want}}), key) == value
        texts = [t for t in reasons(base, {**easy, first: {key: one}, second: {key: other}}) if t.startswith("no value of ")]
        assert len(texts) == 1 and f"{first}=acme needs" in texts[0] and f"{second}=acme needs" in texts[0]


def test_before_torch_and_before_weights() -> None:
    """The whole matrix in a fresh interpreter: nothing heavy is imported, and no weight is asked for."""
    code = (
        "import json, sys; from tests.clashes import refusals\n"
        "told = [(kind, key, len(no), len(yes)) for kind, key, no, yes in refusals()]\n"
        "print(json.dumps([told, [m for m in ('torch', 'triton', 'transformers', 'safetensors') if m in sys.modules]]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told, heavy = json.loads(done.stdout)
    assert [(kind, key) for kind, key, *_ in told] == list(pairs()) and heavy == []
    assert all(no and not yes for _, _, no, yes in told)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_every_clash_by_command(site: Site, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same from an installed plugin through the whole command: an error, exit 1, nothing written."""
    settings = ", settings=KVSettings" if kind == "kv_allocator" else ""
    keys = [key for k, key in pairs() if k == kind]
    lines = ["@hookimpl", "def inferlab_components():"]
    for i, key in enumerate(keys):
        values = getattr(KEYS[key][0], "values", None) or (KEYS[key][0].n,)  # type: ignore[union-attr]
        want = f"{type(KEYS[key][0]).__name__}(*{values!r})"
        lines.append(f'    yield Component("{kind}", "no{i}", "m:X"{settings}, capabilities={{"{key}": {want}}})')
    site.add("acme", "\n".join(lines))
    given = [g for g in GIVEN if not g.startswith(f"{kind}=")]
    for i, key in enumerate(keys):
        out = tmp_path / f"out{i}"
        code = main(["model=tiny-llama", *given, f"{kind}=no{i}", f"hydra.run.dir={out}"])
        text = capsys.readouterr().err
        assert code == 1 and f"{kind}=no{i} needs " in text and "way out: " in text and "Traceback" not in text, (key, text)
        assert not (out / "result.json").exists()
