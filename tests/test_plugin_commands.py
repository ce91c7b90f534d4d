"""`plugins list | describe | check | hooks`: what they say, for people and for programs, and how they answer typing errors."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import pytest

from core.cli import main as cli
from core.config import compose
from core.plugins import discover
from core.plugins.commands import main
from core.plugins.tables import table
from tests.plugins_fixtures import SCHEDULER, Site

GOOD = SCHEDULER.format(name="good")
WHOLE = """
class Target(Scheduler):
    def add(self, request): pass
    def remove(self, request): pass
    def schedule(self, step): pass
"""


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], site: Site, monkeypatch: pytest.MonkeyPatch):
    """Runs a command -> exit code, stdout (parsed with --json), stderr; in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, Any, str]:
        discover.cache_clear()  # type: ignore[attr-defined]
        code = main(arguments)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, json.loads(out) if "--json" in arguments else out, err

    return run


def narrow(text: str) -> bool:
    """No line is wider than the terminal, except for words that are not cut."""
    return all(
        len(line) <= 80 or "python -m core.run" in line or max(map(len, line.split())) > 50 for line in text.splitlines()
    )


def test_list(say, site: Site) -> None:
    """ok, blocked and failed with the reason and its place; the origin; what a component lacks."""
    site.add("good", GOOD.replace('Target")', 'Target", requires=["nowhere>=2"], install="pip install x")'), editable=True)
    site.add("bad", "import nowhere")
    site.add("hidden", GOOD)
    code, entries, _ = say("list", "--json", "--block", "hidden")
    by = {e["plugin"]: e for e in entries}
    assert code == 1
    assert [by[n]["state"] for n in ("good", "bad", "hidden", "schedulers")] == ["ok", "failed", "blocked", "ok"]
    assert [by[n]["origin"] for n in ("good", "bad", "schedulers")] == ["editable", "wheel", "built-in"]
    assert (by["good"]["distribution"], by["good"]["version"], by["good"]["api"]) == ("good", "1.0", ["1.0"])
    assert by["good"]["components"][0]["needs"] == ["nowhere>=2 (not installed)"]
    assert by["bad"]["reason"].startswith("bad 1.0: ModuleNotFoundError") and ".py:3)" in by["bad"]["reason"]
    code, text, _ = say("list", "--block", "bad", "--block", "hidden")
    assert code == 0 and narrow(text)
    assert "scheduler: good*" in text and "* scheduler=good cannot be chosen here: it needs nowhere>=2" in text


def test_describe_knows_everything(say, site: Site) -> None:
    """Nothing of the component is imported for it: its source is read."""
    source = """
    @dataclass
    class Settings:
        depth: int = setting(3, "how far it looks", "requests")
        words: list[str] = setting(["a"], "which ones")
    @hookimpl
    def inferlab_components():
        yield Component("scheduler", "good", "MODULE_target:Target", Settings, "one line", requires=["pluggy>=1"],
                        capabilities={"block_size": MultipleOf(16), "graphs": OneOf(False)})
    @hookimpl
    def inferlab_presets():
        return ["MODULE_conf"]
    """
    preset = "defaults:\n  - override /scheduler: good\n"
    files = {"MODULE_target.py": WHOLE, "MODULE_conf/__init__.py": "", "MODULE_conf/experiment/deep.yaml": preset}
    module = site.add("acme", source, files=files)
    code, entry, _ = say("describe", "scheduler", "good", "--json")
    assert code == 0 and f"{module}_target" not in sys.modules
    assert entry["settings"] == [
        {"name": "scheduler.depth", "type": "int", "default": "3", "unit": "requests", "doc": "how far it looks"},
        {"name": "scheduler.words", "type": "list[str]", "default": "[...]", "unit": "", "doc": "which ones"},
    ]
    assert entry["file"].endswith(f"{module}_target.py") and entry["line"] == 4
    assert entry["capabilities"] == {"kv_allocator.block_size": "a multiple of 16", "graphs": "off"}
    assert entry["requirements"][0]["ok"] and entry["requirements"][0]["found"][0].startswith("pluggy 1.")
    assert entry["presets"] == ["experiment/deep"]
    code, text, _ = say("describe", "scheduler", "good")
    assert code == 0 and narrow(text)
    for part in ("one line", "scheduler.depth", "requests", "how far it looks", "a multiple of 16", "experiment/deep"):
        assert part in text


def test_every_example_can_be_typed(say) -> None:
    """Of every built-in option; those that say more than the option are composed."""
    components = discover().components
    for kind, name in components:
        _, entry, _ = say("describe", kind, name, "--json")
        assert entry["examples"] and entry["line"] > 0 and entry["summary"]
        assert all(s["doc"] for s in entry["settings"] + entry["request_settings"]), f"{kind}={name}"
        for line in entry["examples"]:
            words = shlex.split(line)[3:]
            names = words[1].partition("=")[2].split(",") if words[0] == "-m" else [name]
            assert all((kind, option) in components for option in names)
            assert f"{kind}={','.join(names)}" in words
            if len(words) > 1 and words[0] != "-m":
                assert compose(words).choices[kind] == name


def test_the_built_in_plugins_have_no_error(say) -> None:
    """What cannot be used on this machine is a warning, as long as something of its plugin can."""
    code, data, _ = say("check", "--all", "--json")
    assert (code, data["errors"]) == (0, 0), data
    code, text, _ = say("check")
    assert code == 0 and narrow(text) and "0 errors" in text.splitlines()[-1]


FORGOTTEN = "def inferlab_components():\n    return []"
PRESETS = '\n@hookimpl\ndef inferlab_presets():\n    return ["MODULE_conf"]\n'


@pytest.mark.parametrize(
    ("source", "files", "text"),
    [
        ("import nowhere", {}, "ModuleNotFoundError: No module named 'nowhere'"),
        (f"import torch\n{GOOD}", {}, "imports torch; import them in the target's module"),
        ("@hookimpl\ndef inferlab_component():\n    return []", {}, "no hook inferlab_component; did you mean inferlab_comp"),
        (FORGOTTEN, {}, "inferlab_components lacks the decorator: @hookimpl"),
        (f"@hookimpl\ndef inferlab_metric():\n    pass\n{FORGOTTEN}", {}, "did you mean inferlab_metrics"),
        (GOOD.replace('Target")', 'Target", api=(1, 99))'), {}, "is written for plugin API 1.99, this inferlab has 1."),
        (GOOD.replace('"good"', '"fcfs"'), {}, "scheduler=fcfs is offered by inferlab"),
        (GOOD, {}, "cannot import"),
        (GOOD, {"MODULE_target.py": WHOLE.replace("schedule(", "shedule(")}, "lacks schedule() (is shedule a misspelling?)"),
        (GOOD, {"MODULE_target.py": "Target = 3"}, "has no class Target"),
        (GOOD, {"MODULE_target.py": "raise RuntimeError('no card')"}, "cannot be imported: RuntimeError: no card"),
        (GOOD.replace('Target")', 'Target", requires=["nowhere>=2"])'), {}, "needs nowhere>=2 (not installed)"),
        (GOOD.replace('Target")', 'Target", requires=["a b"])'), {}, "requires 'a b', which is no requirement"),
        (GOOD.replace('Target")', 'Target", probe="MODULE:look")'), {"MODULE_target.py": WHOLE}, "there is no function"),
        (PRESETS, {}, "which does not exist"),
        (PRESETS, {"MODULE_conf/model/x.yaml": "defaults: [base_model]\nwieghts: random"}, "the preset model/x"),
        (PRESETS, {"MODULE_conf/model/x.yaml": "a: [1"}, "the preset model/x"),
        (PRESETS, {"MODULE_conf/model/tiny-llama.yaml": "weights: random"}, "is offered by inferlab and by"),
        (PRESETS, {"MODULE_conf/scheduler/x.yaml": "a: 1"}, "declared as components, not as YAML"),
    ],
)
def test_check_finds(say, site: Site, source: str, files: dict[str, str], text: str) -> None:
    """Each defect is an error that names it, and the exit code says so."""
    site.add("acme", source, files=files)
    code, data, _ = say("check", "acme", "--json")
    assert code == 1 and [p["plugin"] for p in data["plugins"]] == ["acme"]
    errors = [f["text"] for f in data["plugins"][0]["findings"] if f["level"] == "error"]
    assert [e for e in errors if text in e], errors


def test_check_tells_all_problems_at_once(say, site: Site) -> None:
    """At start-up a broken plugin is one line; here nothing is held back."""
    site.add("acme", f"@hookimpl\ndef inferlab_metric():\n    pass\n{FORGOTTEN}")
    _, data, _ = say("check", "acme", "--json")
    assert data["errors"] == 2
    _, entries, _ = say("list", "--json")
    assert "(and 1 more: see `inferlab plugins check acme`)" in entries[-1]["reason"]


def test_check_warns(say, site: Site) -> None:
    """What works but is poor: no dependency on inferlab, no summary, no documentation, a slow import."""
    source = "import time\ntime.sleep(0.21)\n@dataclass\nclass S:\n    x: int = 1\n" + GOOD.replace('Target")', 'Target", S)')
    site.add("acme", source, files={"MODULE_target.py": WHOLE})
    code, data, _ = say("check", "acme", "--json")
    text = "\n".join(f["text"] for f in data["plugins"][0]["findings"])
    assert code == 0 and data["warnings"] == 4, text
    for part in ("took 0.2", "does not depend on inferlab", "has no summary", "x of S undocumented"):
        assert part in text


def test_check_sees_the_environment(say, site: Site) -> None:
    """A second owner of `core`, requirements of the metadata that are not met, and a group that is nearly ours."""
    site.add("acme", GOOD, files={"MODULE_target.py": WHOLE})
    info = "acme-1.0.dist-info"
    site.write(f"{info}/METADATA", "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\nRequires-Dist: nowhere>=3\n")
    site.write(f"{info}/top_level.txt", "core\n")
    site.write("other-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    site.write("other-1.0.dist-info/entry_points.txt", "[inferlab.plugin]\nx = x\n")
    code, data, _ = say("check", "--json")
    own = [f["text"] for p in data["plugins"] if p["plugin"] == "acme" for f in p["findings"]]
    assert code == 1
    assert any("the package core is owned by inferlab and by acme" in text for text in own)
    assert any("acme depends on nowhere>=3, which is not installed" in text for text in own)
    assert ["other has the entry-point group inferlab.plugin" in f["text"] for f in data["environment"]] == [True]


def test_two_providers_do_not_hide_the_rest(say, site: Site) -> None:
    """No run starts then, but `list` and `check` still answer."""
    site.add("acme", GOOD.replace('"good"', '"fcfs"'))
    site.add("bolt", GOOD, files={"MODULE_target.py": WHOLE})
    code, entries, _ = say("list", "--json")
    assert code == 1 and {e["plugin"]: e["state"] for e in entries}["bolt"] == "ok"
    assert [e["plugin"] for e in entries if e["state"] == "failed"] == ["acme"]
    assert say("check", "acme")[0] == 1 and say("check", "bolt")[0] == 0


def test_hooks(say, site: Site) -> None:
    """The specification in a sentence, and who implements it."""
    site.add("acme", "@hookimpl\ndef inferlab_step(record):\n    pass")
    _, entries, _ = say("hooks", "--json")
    by = {e["hook"]: e for e in entries}
    assert len(by) >= 6 and all(e["doc"] for e in entries)
    assert [i["distribution"] for i in by["inferlab_step"]["implemented_by"]] == ["acme 1.0"]
    assert by["inferlab_build"]["first_result_only"]
    code, text, _ = say("hooks")
    assert code == 0 and narrow(text) and "implemented by acme (acme 1.0)" in text


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "a command is missing: list, describe, check, hooks"),
        (["lst"], 2, "no such command; did you mean list?"),
        (["list", "--jsn"], 2, "did you mean --json?"),
        (["--jsno"], 2, "a command is missing: list, describe, check, hooks"),
        (["describe", "scheduler"], 2, "usage: python -m core.plugins describe"),
        (["describe", "schedular", "fcfs"], 1, "no such kind; did you mean scheduler?"),
        (["describe", "scheduler", "fcf"], 1, "did you mean fcfs?"),
        (["check", "schedulr"], 1, "no such plugin; did you mean schedulers?"),
        (["check", "--all", "fcfs"], 2, "usage: python -m core.plugins check"),
    ],
)
def test_typing_errors(say, arguments: list[str], code: int, text: str) -> None:
    """One message on stderr with the nearest name, nothing on stdout."""
    got, out, err = say(*arguments)
    assert (got, out) == (code, "") and text in err and err.startswith("error: ")


def test_the_console_script_has_the_same_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """`inferlab plugins ...`"""
    assert cli(["plugins", "check", "fcfs"]) == 0
    assert "schedulers  inferlab" in capsys.readouterr().out
    assert cli(["plugins", "lst"]) == 2
    assert "did you mean list?" in capsys.readouterr().err


def test_a_plugin_that_prints_does_not_spoil_the_answer(say, site: Site) -> None:
    """stdout is for the answer: it may be read by a program."""
    site.add("acme", f"print('hello')\n{GOOD}")
    code, entries, err = say("list", "--json")
    assert code == 0 and len(entries) > 1 and err == "hello\n"


def test_a_table_in_a_narrow_terminal() -> None:
    """The last column wraps; where nothing is left for it, it goes below."""
    rows = [("a", "one two three four five six seven eight nine ten")]
    assert table(("k", "text"), rows, width=30).splitlines() == [
        "K  TEXT",
        "a  one two three four five six",
        "   seven eight nine ten",
    ]
    wide = table(("k", "text"), [("a" * 20, "one two")], width=30).splitlines()
    assert wide == ["K", "    TEXT", "a" * 20, "    one two"]


def test_a_slow_plugin_is_named_at_every_start(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody waits for it each time, so it is said who it is."""
    site.add("acme", f"import time\ntime.sleep(0.21)\n{GOOD}")
    assert cli(["--help"]) == 0
    assert "note: plugin acme took 0.2" in capsys.readouterr().err
