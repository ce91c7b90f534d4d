"""Policy as a test: who imports whom, one file says "cuda", the contracts stay short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE, PLUGINS = sorted(ROOT.glob("core/**/*.py")), sorted(ROOT.glob("plugins/**/*.py"))


def imports(path: Path) -> set[str]:
    """Absolute names of everything that a file imports, wherever it does so."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_imports_no_plugin(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] == "plugins"}


@pytest.mark.parametrize("path", PLUGINS, ids=lambda p: str(p.relative_to(ROOT)))
def test_plugins_import_only_the_contracts(path: Path) -> None:
    """An executor wraps the core's runner; everything else sees interfaces, common code of plugins, and its own folder."""
    own = ".".join(path.relative_to(ROOT).parts[:2])
    allowed = {"core.interfaces"} | ({"core.runner", "core.parallel"} if own == "plugins.executors" else set())
    for name in imports(path):
        if name.split(".")[0] == "core":
            assert name in allowed, f"imports {name}"
        if name.split(".")[0] == "plugins":
            assert name.startswith(own) or ".common" in name, f"imports {name}"


def test_one_file_of_the_core_says_cuda() -> None:
    says = [p.name for p in CORE if re.search(r"torch\.cuda|[\"']cuda", p.read_text())]
    assert says == ["device.py"]


def test_the_contracts_stay_short() -> None:
    assert len((ROOT / "core/interfaces.py").read_text().splitlines()) < 450


def test_light_modules_stay_light() -> None:
    """Entry modules and contracts load in a process that has neither torch nor transformers nor numpy."""
    modules = ["core.interfaces", "core.hooks", *(f"plugins.{p.parent.name}.entry" for p in ROOT.glob("plugins/*/entry.py"))]
    code = (
        f"import sys\nfor m in {modules!r}: __import__(m)\n"
        "print([m for m in ('torch', 'numpy', 'triton', 'transformers', 'flash_attn') if m in sys.modules])"
    )
    assert len(modules) >= 8
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_hook_has_a_caller() -> None:
    """A hook that nobody calls is a promise that nobody keeps."""
    hooks = re.findall(r"^def (inferlab_\w+)", (ROOT / "core/hooks.py").read_text(), re.M)
    code = "\n".join(p.read_text() for p in CORE if p.name != "hooks.py")
    assert len(hooks) >= 6 and all(hook in code for hook in hooks)


@pytest.mark.parametrize("path", [*CORE, *PLUGINS], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert path.name == "interfaces.py" or len(text.splitlines()) <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)  # a kernel cannot be cut at will
            assert (node.end_lineno or 0) - node.lineno <= (120 if kernel else 60), f"{node.name} is too long"
