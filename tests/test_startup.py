"""What a start costs: no numpy and no torch until the configuration is composed, and who is slow is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.startup_plugins import COMMANDS, complaints, lay_out

ROOT = Path(__file__).parent.parent
HEAVY = ("numpy", "torch", "triton", "transformers", "tokenizers", "safetensors", "gguf")
ASK = """
import sys
from {module} import main
sys.argv[1:] = {arguments!r}
code = main()
print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["list", "configuration"])
def test_nothing_heavy_before_the_configuration(command: str, tmp_path: Path) -> None:
    """Neither by listing plugins nor by composing: both are waited for at a keyboard."""
    module, *arguments = COMMANDS[command]
    arguments = ["scheduler=fcfs" if a.startswith("scheduler=") else a for a in arguments]
    module = {"core.run": "core.cli", "core.plugins": "core.plugins.commands"}[module]
    code = ASK.format(module=module, arguments=arguments, heavy=HEAVY)
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and done.stderr.splitlines()[-1] == "[]", done.stderr


def test_what_the_benchmark_lays_out(tmp_path: Path) -> None:
    """A silent command is a complaint: the benchmark cannot pass by measuring nothing."""
    lay_out(tmp_path / "site", 5, 0.0)
    assert len(list((tmp_path / "site").glob("*.dist-info"))) == 5
    assert len(complaints(dict.fromkeys(COMMANDS, ""))) == 4


@pytest.mark.nightly
def test_the_benchmark(tmp_path: Path) -> None:
    """30 plugins: the slow, the broken and the lacking one are named. The bound is the script's to judge, not this test's."""
    command = [sys.executable, "-m", "benchmarks.startup_plugins", "--repeats", "1", "--limit", "60", "--json"]
    done = subprocess.run([*command, tmp_path / "out.json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["plugins"] == 30 and result["complaints"] == [] and result["commands"].keys() == COMMANDS.keys()
