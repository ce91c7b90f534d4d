"""The README's promises are executed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The plugin of the README, laid out as pip would install it."""
    blocks = dict(re.findall(r"<!-- plugin: (\S+) -->\n```\w+\n(.*?)```", README, re.S))
    assert blocks.keys() == {"inferlab_shortest.py", "pyproject.toml"}
    source = blocks["inferlab_shortest.py"]
    assert len(source.splitlines()) <= 40
    project = tomllib.loads(blocks["pyproject.toml"])["project"]
    site = tmp_path / "site"
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (site / "inferlab_shortest.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["inferlab.plugins"]
    (info / "entry_points.txt").write_text("[inferlab.plugins]\n" + "\n".join(f"{k} = {v}" for k, v in points.items()))
    return site


def run(site: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    return subprocess.run([sys.executable, "-m", *arguments], cwd=where, env=env, capture_output=True, text=True, timeout=120)


def test_the_plugin_runs(plugin: Path, tmp_path: Path) -> None:
    """Found, listed, chosen by one word, typed: its setting works and a wrong one is refused."""
    listed = run(plugin, tmp_path, "core.plugins", "list")
    assert listed.returncode == 0 and re.search(r"shortest\s+inferlab-shortest 0\.1 .*ok", listed.stdout), listed
    base = (
        "core.run",
        "model=tiny-llama",
        "scheduler=shortest",
        "sampling.max_tokens=4",
        "prompts=[abc,a]",
        "hydra.run.dir=out",
    )
    done = run(plugin, tmp_path, *base, "scheduler.longest_first=true")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["plugins"]["scheduler"]["name"] == "shortest"
    assert [len(o["token_ids"]) for o in result["outputs"]] == [4, 4]
    wrong = run(plugin, tmp_path, *base, "scheduler.longest_fist=true")
    assert wrong.returncode != 0 and "longest_first" in wrong.stderr and "Traceback" not in wrong.stderr


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The Python block of the README, on a tiny model instead of the default one."""
    code = re.search(r"From Python:\n\n```python\n(.*?)```", README, re.S)
    assert code and code.group(1).count('LLM("smollm2"') == 1
    exec(compile(code.group(1).replace('LLM("smollm2"', 'LLM("tiny-llama", num_kv_blocks=9'), "README", "exec"), {})
    assert "RequestMetrics" in capsys.readouterr().out


def test_named_files_exist() -> None:
    """Paths that the README names are there; make targets too."""
    for path in re.findall(r"`((?:core|conf|examples|plugins|benchmarks)/[\w/.]*)`", README):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", README)) - {"make"}:
        assert re.search(rf"^{target}:", makefile, re.M), target
