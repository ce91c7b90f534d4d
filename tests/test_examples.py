"""examples/: packages that anybody could have written, built into wheels and installed beside ours in a clean environment."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import pytest

from tests.clean_env import EXAMPLES, ROOT, CleanEnvironment

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


def test_the_wheels_are_what_is_used(clean: CleanEnvironment, tmp_path: Path) -> None:
    """Not the checkout, not an editable install; and each example is found under its name."""
    code = "import core, longest_prefix, json; from importlib import metadata as m; print(json.dumps([core.__file__, "
    code += "longest_prefix.__file__, sorted(d.metadata['Name'] for d in m.distributions(path=__import__('site').getsitepackages()))]))"
    done = clean.run("python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours, theirs, installed = json.loads(done.stdout)
    assert Path(ours).is_relative_to(clean.path) and Path(theirs).is_relative_to(clean.path)
    assert installed == sorted(["inferlab", *NAMES])
    listed = clean.run("python", "-m", "core.plugins", "list", "--json", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
