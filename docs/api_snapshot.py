"""Writes docs/api.txt, the plugin API as it is: `python docs/api_snapshot.py [--check | --unreleased]`.

One line per fact that a plugin may depend on: names, fields and their order, defaults, signatures, which methods must be
written, the arguments of hooks. Docstrings and bodies are left out. A change is written only once `API_VERSION` in
core/interfaces.py has been raised as docs/stability.md says; --unreleased: also while no release has that version.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).parent / "api.txt"
SOURCES = (
    *("core/interfaces.py", "core/hooks.py", "core/records.py", "core/params.py", "core/capabilities.py"),
    *("core/settings.py", "core/testing/__init__.py"),
)
COMMAND = "python docs/api_snapshot.py"
SPECIAL = ("__init__", "__getitem__")  # of the methods with underscores, those that are called from outside


def read() -> dict[str, str]:
    """The sources, by path."""
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in SOURCES}


def version_of(sources: Mapping[str, str]) -> tuple[int, ...]:
    """API_VERSION as the source says it."""
    found = re.search(r"^API_VERSION = \((\d+), (\d+)\)", sources["core/interfaces.py"], re.M)
    assert found, "core/interfaces.py has no line API_VERSION = (MAJOR, MINOR)"
    return int(found[1]), int(found[2])


def snapshot(sources: Mapping[str, str]) -> list[str]:
    """The lines that docs/api.txt should hold."""
    lines = [f"plugin API {'.'.join(map(str, version_of(sources)))}; written by {COMMAND}"]
    for path, text in sources.items():
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        facts = _hooks(ast.parse(text)) if module == "core.hooks" else _module(ast.parse(text))
        kit = module == "core.testing"  # of which the names are promised, not how they are found
        lines += ["", *(f"{module} {fact}" for fact in facts if not kit or fact.startswith("__all__"))]
    return lines


def _module(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _class(node)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield f"def {_signature(node)}"
        elif isinstance(node, ast.Assign):
            yield from _constant(ast.unparse(node.targets[0]), node.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("core."):
            yield from (f"{alias.name} is {node.module}.{alias.name}" for alias in node.names)


def _constant(name: str, value: ast.expr) -> Iterator[str]:
    """A collection of words has a line for each: one more breaks nobody."""
    if name == "API_VERSION" or (name.startswith("_") and name != "__all__"):
        return
    words = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
    if isinstance(value, ast.Tuple | ast.List) and name.isidentifier():
        yield from (f"{name} has {word!r}" for word in words)
    else:
        yield f"{name} = {ast.unparse(value)}"


def _class(node: ast.ClassDef) -> Iterator[str]:
    marks = "".join(f" @{ast.unparse(d)}" for d in node.decorator_list)
    yield f"class {node.name}({', '.join(map(ast.unparse, node.bases))}){marks}"
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            default = f" = {_default(item.value)}" if item.value else ""
            yield f"{node.name}.{ast.unparse(item.target)}: {ast.unparse(item.annotation)}{default}"
        elif isinstance(item, ast.FunctionDef) and (not item.name.startswith("_") or item.name in SPECIAL):
            marks = "".join(f"@{ast.unparse(d)} " for d in item.decorator_list)
            yield f"{node.name}.{marks}{_signature(item)}"


def _default(value: ast.expr) -> str:
    """Without what `setting` says of it."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "setting":
        value = value.args[0]
    return ast.unparse(value)


def _hooks(tree: ast.Module) -> Iterator[str]:
    """A line per argument: an implementation may take fewer, so one more breaks nobody."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            marks = " ".join(f"@{ast.unparse(d)}" for d in node.decorator_list)
            yield f"{marks} {node.name} -> {ast.unparse(node.returns) if node.returns else 'None'}"
            yield from (f"{node.name} takes {ast.unparse(argument)}" for argument in node.args.args)


def _signature(node: ast.FunctionDef) -> str:
    return f"{node.name}({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


@dataclass(frozen=True)
class Change:
    """What became of the API between two snapshots."""

    removed: list[str]
    added: list[str]
    breaking: list[str]  # why plugins must change; empty: they go on working

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.breaking)

    def __str__(self) -> str:
        return "\n".join([*(f"- {line}" for line in self.removed), *(f"+ {line}" for line in self.added)])


def compare(before: Sequence[str], now: Sequence[str]) -> Change:
    """Adding is compatible, except where authors must then write something or positional arguments move."""
    before, now = [line for line in before[1:] if line], [line for line in now[1:] if line]
    removed, added = [line for line in before if line not in now], [line for line in now if line not in before]
    breaking = [f"gone or changed: {line}" for line in removed]
    new_classes = {_owner(line) for line in added if " class " in line}
    for line in (line for line in added if _owner(line) not in new_classes):
        later = now[now.index(line) + 1 :]
        if "@abstractmethod" in line:
            breaking.append(f"must be written by every plugin: {line}")
        elif _field(line) and "=" not in line:
            breaking.append(f"a field without a default: {line}")
        elif _field(line) and any(_field(other) and _owner(other) == _owner(line) and other in before for other in later):
            breaking.append(f"moves the fields after it: {line}")
    if [line for line in before if line in now] != [line for line in now if line in before]:
        breaking.append("the order of what was there is another")
    return Change(removed, added, breaking)


def _owner(line: str) -> str:
    """Module and class of a line."""
    module, _, rest = line.partition(" ")
    return f"{module} {re.split('[.(:= ]', rest.removeprefix('class '))[0]}"


def _field(line: str) -> bool:
    return re.match(r"[\w.]+ \w+\.\w+: ", line) is not None


def needed(old: tuple[int, ...], change: Change) -> tuple[int, ...]:
    """The lowest version that may carry the change."""
    return (old[0] + 1, 0) if change.breaking else (old[0], old[1] + 1)


def main(arguments: list[str]) -> int:
    """Write the file, or say what is wrong; exit code 1 then."""
    sources, before = read(), FILE.read_text(encoding="utf-8").splitlines() if FILE.is_file() else []
    now, change = snapshot(sources), compare(before, snapshot(sources))
    if "--check" in arguments:
        print(f"{change}\nnot current: run {COMMAND}" if before != now else f"{FILE.name} is current", file=sys.stderr)
        return int(before != now)
    if before and change and "--unreleased" not in arguments:
        found = re.search(r"(\d+)\.(\d+)", before[0])
        assert found, f"{FILE} does not start with the version"
        want, have = needed((int(found[1]), int(found[2])), change), version_of(sources)
        if have < want:
            print("\n".join([str(change), *change.breaking]), file=sys.stderr)
            print(f"error: this needs API_VERSION = {want} in core/interfaces.py, it is {have}; raise it", file=sys.stderr)
            print(f"(while no release has {have}: {COMMAND} --unreleased)", file=sys.stderr)
            return 1
    FILE.write_text("\n".join([*now, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
