"""examples/: packages that anybody could have written, built into wheels and installed beside ours in a clean environment."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest

from tests.broken_plugins import BROKEN, GOOD, TWINS, Broken
from tests.clean_env import EXAMPLES, CleanEnvironment, copy

NAMES = [path.name for path in EXAMPLES]


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_what_a_package_holds(example: Path) -> None:
    """pyproject, README and tests; distribution, entry point and folder share a name; of ours only core.interfaces."""
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    assert project["name"] == example.name and list(project["entry-points"]["inferlab.plugins"]) == [example.name]
    assert project["dependencies"][0] == "inferlab"
    assert 10 < len((example / "README.md").read_text().splitlines()) < 60
    assert list(example.glob("tests/test_*.py"))
    for path in example.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
            for module in modules if isinstance(node, ast.Import | ast.ImportFrom) else []:
                assert module.split(".")[0] != "plugins", f"{path} imports {module}"
                allowed = ("core.interfaces", "core.testing") if "tests" in path.parts else ("core.interfaces",)
                assert module.split(".")[0] != "core" or module.startswith(allowed), f"{path} imports {module}"


WHERE = """
import core, json, longest_prefix, site
from importlib import metadata
installed = [d.metadata["Name"] for d in metadata.distributions(path=site.getsitepackages())]
print(json.dumps([core.__file__, longest_prefix.__file__, sorted(installed)]))
"""


def test_the_wheels_are_what_is_used(clean: CleanEnvironment, tmp_path: Path) -> None:
    """Not the checkout, not an editable install; and each example is found under its name."""
    done = clean.run("python", "-c", WHERE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours, theirs, installed = json.loads(done.stdout)
    assert Path(ours).is_relative_to(clean.path) and Path(theirs).is_relative_to(clean.path)
    assert installed == sorted(["inferlab", *NAMES])


def test_core_run_with_each(clean: CleanEnvironment, tmp_path: Path) -> None:
    """Scheduler, attention backend and sampler of the examples in one run; the sampler's own parameter is typed."""
    words = ["model=tiny-llama", "prompts=[abcabc,a]", "sampling.max_tokens=6", "hydra.run.dir=out"]
    parts = ["scheduler=longest_prefix", "scheduler.patience=3", "attention=window_sinks", "attention.window=8"]
    own = ["sampler=repetition", "sampling.repetition_penalty=1.5"]
    done = clean.run("python", "-m", "core.run", *words, *parts, *own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out/result.json").read_text())
    for kind, name in (("scheduler", "longest_prefix"), ("attention", "window_sinks"), ("sampler", "repetition")):
        chosen = result["plugins"][kind]
        assert (chosen["name"], chosen["distribution"], chosen["version"]) == (name, name, "0.1.0")
    assert result["plugins"]["attention"]["settings"] == {"window": 8, "sinks": 4}
    assert result["settings"]["sampling"]["theirs"] == {"repetition_penalty": 1.5}
    assert [len(output["token_ids"]) for output in result["outputs"]] == [6, 6]


def test_core_run_with_the_presets(clean: CleanEnvironment, tmp_path: Path) -> None:
    """An experiment that chooses a scheduler with its settings, and a load; words of one's own win."""
    words = ["model=tiny-llama", "task=bench", "load=short_chats", "+experiment=low_latency", "hydra.run.dir=out"]
    small = ["load.num_requests=3", "load.shared=40", "load.output_min=2", "load.output_max=4", "bench.repeats=1"]
    done = clean.run("inferlab", *words, *small, "bench.warmup=0", "max_num_seqs=8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert (result["plugins"]["scheduler"]["name"], result["plugins"]["scheduler"]["settings"]) == ("mixed", {"max_chunk": 256})
    assert result["settings"]["max_num_seqs"] == 8 and result["settings"]["load"]["input_max"] == 128


def test_their_own_tests_pass(clean: CleanEnvironment, tmp_path: Path) -> None:
    """As somebody would run them who has the packages and our wheel, no more."""
    folders = [copy(example / "tests", tmp_path / f"{example.name}_tests") for example in EXAMPLES]
    command = "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={tmp_path}"
    done = clean.run(*command, *folders, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def test_nothing_is_wrong_with_any_plugin(clean: CleanEnvironment, tmp_path: Path) -> None:
    """`check --all`: no error anywhere, and of the examples not even a warning."""
    done = clean.run("python", "-m", "core.plugins", "check", "--all", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == 0 and not found["environment"]
    assert {p["plugin"]: p["findings"] for p in found["plugins"] if p["plugin"] in NAMES} == {name: [] for name in NAMES}


@pytest.fixture(scope="module")
def broken(clean: CleanEnvironment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the broken plugins and with those that clash, installed by pip beside the environment of the others."""
    folder = tmp_path_factory.mktemp("broken")
    for name, plugins in (("broken", [*BROKEN, GOOD]), ("twins", TWINS)):
        wheels = [plugin.wheel(folder) for plugin in plugins]
        clean.install("--no-deps", "--no-compile", "--target", folder / name, *wheels)
    return {name: folder / name for name in ("broken", "twins")}


ASK = """
import contextlib, io, json, pickle, sys
from core.checkpoint import open_checkpoint
from core.cli import main
from core.config import compose
from core.plugins import survey
from core.plugins.commands import main as plugins
from core.resolve import resolve
answers = {}
for words in sys.argv[1:]:
    survey.cache_clear()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        first, *rest = words.split()
        if first == "plugins":
            code = plugins(rest)
        elif first == "resolve":
            composed, code = compose(["model=tiny-llama", *rest]), 0
            pickle.dump(resolve(composed, open_checkpoint(composed.config.model), composed.registry), open("resolved", "wb"))
        else:
            code = main(["model=tiny-llama", "hydra.run.dir=out", first, *rest])
    answers[words] = code, out.getvalue(), err.getvalue()
print(json.dumps(answers))
"""
CHECK, ABSENT, RESOLVE = "plugins check --all --json", "scheduler=absent", "resolve scheduler=healthy"
GOOD_WORDS = "scheduler=healthy --cfg job"  # composed, not run
Answers = dict[str, tuple[int, str, str]]  # words -> exit code, stdout, stderr


def ask(clean: CleanEnvironment, words: list[str], site: Path, where: Path) -> Answers:
    """What the commands answer, all in one process, since each would load torch."""
    done = clean.run("python", "-c", ASK, *words, cwd=where, env={"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    return {given: tuple(answer) for given, answer in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def told(clean: CleanEnvironment, broken: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Beside the broken plugins; the words "where" stand for the folder."""
    folder = tmp_path_factory.mktemp("told")
    words = [CHECK, ABSENT, *(f"scheduler={plugin.name}" for plugin in BROKEN), GOOD_WORDS, RESOLVE]
    return {**ask(clean, words, broken["broken"], folder), "where": (0, str(folder), "")}


def test_every_broken_plugin_is_named(told: Answers) -> None:
    """P1, P2, P4, P6: all at once, each with its own line; the others, theirs and ours, are fine."""
    code, out, _ = told[CHECK]
    assert code == 1
    found = {p["plugin"]: p["findings"] for p in json.loads(out)["plugins"]}
    for plugin in BROKEN:
        errors = [f["text"] for f in found[plugin.name] if f["level"] == "error"]
        assert len(errors) == 1, f"{plugin.name}: {errors}"
        assert "\n" not in errors[0] and re.search(plugin.says.removeprefix(r"gone 1\.0: "), errors[0]), errors[0]
    for name in ("healthy", *NAMES):
        assert not [f for f in found[name] if f["level"] == "error"]


@pytest.mark.parametrize("plugin", BROKEN, ids=lambda p: f"{p.case}-{p.name}")
def test_a_broken_plugin_is_an_error_when_chosen(plugin: Broken, told: Answers) -> None:
    """P1, P2, P4, P6: one message, no traceback, never another option in its place."""
    code, out, text = told[f"scheduler={plugin.name}"]
    assert code == 1 and not out and re.search(plugin.says, text), text
    assert "Traceback" not in text and text.count("error: ") == 1


def test_an_absent_option_says_what_there_is_and_what_failed(told: Answers) -> None:
    """P2."""
    code, _, text = told[ABSENT]
    assert code == 1 and "no such option" in text and "fcfs (inferlab" in text and "longest_prefix (longest_prefix" in text
    error = text[text.index("error: ") :]
    assert all((f"plugin {p.name} could not be loaded" in error) == (p.name not in ("abstract", "lacking")) for p in BROKEN)


def test_the_others_go_on(told: Answers) -> None:
    """P1: one named line each, and what is chosen works."""
    code, out, text = told[GOOD_WORDS]
    assert code == 0 and "scheduler: {}" in out
    lines = [line for line in text.splitlines() if "plugin gone could not be loaded: gone 1.0: ModuleNotFoundError" in line]
    assert len(lines) == 1 and lines[0].startswith("warning: ")


def test_two_of_one_name_are_an_error(clean: CleanEnvironment, broken: dict[str, Path], tmp_path: Path) -> None:
    """P3: both distributions are named, and blocking one decides."""
    block = "plugins.block=[second_fcfs,other] --cfg job"
    answers = ask(clean, ["scheduler=fcfs", block], broken["twins"], tmp_path)
    code, _, text = answers["scheduler=fcfs"]
    assert code == 1
    for plugin in TWINS:
        assert re.search(plugin.says, text), f"{plugin.name}: {text}"
    assert answers[block][0] == 0, answers


def test_workers_use_what_the_parent_resolved(clean: CleanEnvironment, broken: dict[str, Path], told: Answers) -> None:
    """P5: the resolved choice travels as it is. A process that gets it builds a third party's part and looks for no plugins."""
    assert told[RESOLVE][0] == 0
    child = """
    import pickle
    from importlib import metadata
    def refuse(*_, **__): raise AssertionError("a worker looks for plugins")
    metadata.entry_points = refuse
    resolved = pickle.load(open("resolved", "rb"))
    print(type(resolved.build("scheduler", None)).__module__)
    """
    env = {"PYTHONPATH": str(broken["broken"])}
    done = clean.run("python", "-c", dedent(child), cwd=Path(told["where"][1]), env=env)
    assert done.stdout.strip() == "healthy_target", done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("words", [f"scheduler={NAMES[0]}", "attention=window_sinks", "sampler=repetition", "load=short_chats"])
def test_core_run_with_one_alone(words: str, clean: CleanEnvironment, tmp_path: Path) -> None:
    done = clean.run("python", "-m", "core.run", "model=tiny-llama", "sampling.max_tokens=4", words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_sweep_over_ours_and_theirs(clean: CleanEnvironment, tmp_path: Path) -> None:
    """One process that leads and two cells, both ok; greedy tokens do not depend on the scheduler."""
    sweep(clean, tmp_path, ["scheduler=fcfs,longest_prefix", "attention=window_sinks", "sampler=repetition"], 2)


@pytest.mark.nightly
def test_a_grid_over_ours_and_theirs(clean: CleanEnvironment, tmp_path: Path) -> None:
    sweep(clean, tmp_path, ["scheduler=fcfs,longest_prefix", "attention=sdpa,window_sinks", "sampler=gumbel,repetition"], 8)


def sweep(clean: CleanEnvironment, where: Path, grid: list[str], cells: int) -> None:
    """All cells are run, are ok, use what was asked for, and draw the same tokens."""
    words = ["model=tiny-llama", "prompts=[abcabc,abcabd,x]", "sampling.max_tokens=4", "sampling.temperature=0"]
    done = clean.run("python", "-m", "core.run", "-m", *words, *grid, "hydra.sweep.dir=sweep", cwd=where)
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in (where / "sweep").glob("jobs/*/*/result.json")]
    assert len(results) == cells
    assert {result["plugins"]["scheduler"]["distribution"] for result in results} == {"inferlab", "longest_prefix"}
    assert len({str([output["token_ids"] for output in result["outputs"]]) for result in results}) == 1
