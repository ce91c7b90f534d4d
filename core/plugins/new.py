"""`plugins new NAME --kind KIND`: a complete package that works when installed as it is, made from `core.plugins.templates`."""

from __future__ import annotations

import ast
import keyword
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from core.errors import did_you_mean
from core.interfaces import PROJECT
from core.plugins import PluginError, Registry
from core.plugins.checks import KINDS
from core.plugins.loading import find

TEMPLATES = Path(__file__).parent / "templates"
NAME, MODULE, CLASS = "my-plugin", "my_plugin", "MyPlugin"  # what the templates say in the place of the name
# Words that mean something else on the command line (KIND=auto, KIND=null), and folders of this project.
RESERVED = (*("auto", "null", "none", "true", "false", "on", "off", "yes", "no", "inf", "nan"), PROJECT, "conf", "tests")
USE = {
    "scheduler": ("scheduler={0}", "-m scheduler=mixed,{0}"),
    "kv_allocator": ("kv_allocator={0}", "-m kv_allocator=block_hash,{0}"),
    "attention": ("attention={0}", "-m attention=sdpa,{0}"),
    "arch": ("arch={0}", "-m arch=llama,{0}"),
    "sampler": ("sampler={0} sampling.temperature=0.8 sampling.n_sigma=1", "-m sampler={0} sampling.n_sigma=0,1,2"),
}


@dataclass(frozen=True)
class Names:
    """One word in the spellings that its places need."""

    name: str  # distribution, entry point, component: my-plugin

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def prefix(self) -> str:
        """Of the class."""
        return "".join(part.capitalize() for part in re.split("[-_]", self.name))

    def fill(self, text: str, kind: str) -> str:
        """A template in this name."""
        text = text.replace(f"core.plugins.templates.{kind}", self.module)
        for word, value in ((NAME, self.name), (MODULE, self.module), (CLASS, self.prefix)):
            text = text.replace(word, value)
        return text


def create(registry: Registry, name: str, kind: str, parent: Path) -> dict[str, Any]:
    """Write the package `parent`/`name`; what was written and how to go on. Raises PluginError, and then writes nothing."""
    kinds = sorted(USE)
    if kind not in USE:
        raise PluginError(f"--kind {kind}: there is no template for it{did_you_mean(kind, kinds)} Kinds: {', '.join(kinds)}")
    _check_name(name)
    folder = parent.expanduser() / name
    if folder.exists():  # asked first: from its parent a folder of this name can be imported, which says less
        raise PluginError(f"{folder} exists already: choose another name, another --dir, or remove it")
    _check_free(registry, name, kind)
    files = _files(Names(name), kind)
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PluginError(f"{folder} cannot be written ({error.strerror}): choose another --dir") from error
    return {"name": name, "kind": kind, "path": str(folder), "files": list(files), "next": _next(name, kind, folder)}


def _check_name(name: str) -> None:
    rule = "lower-case letters and digits, with single - or _ between them, a letter first (my-scheduler)"
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        better = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()).strip("-0123456789")
        raise PluginError(f"{name!r} is no name for a plugin: {rule}" + (f"; did you mean {better}?" if better else ""))
    module = Names(name).module
    if name in RESERVED or keyword.iskeyword(module) or keyword.issoftkeyword(module):
        raise PluginError(f"{name} is a word with a meaning of its own: choose another name")


def _check_free(registry: Registry, name: str, kind: str) -> None:
    module = Names(name).module
    if spec := find(module):
        place = f" ({spec.origin})" if spec.origin else ""
        raise PluginError(f"{name}: there is a Python module {module} already{place}; yours would hide it, or be hidden by it")
    if found := registry.components.get((kind, name)):
        raise PluginError(f"{kind}={name} is offered by {found} already: choose another name")
    for plugin in registry.plugins:
        if canonicalize_name(plugin.name) == canonicalize_name(name):
            raise PluginError(f"{plugin} has a plugin named {plugin.name} already: choose another name")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return
    raise PluginError(f"a distribution {name} {version} is installed already: choose another name")


def _files(names: Names, kind: str) -> dict[str, str]:
    module = (TEMPLATES / f"{kind}.py").read_text(encoding="utf-8")
    doc = (ast.get_docstring(ast.parse(module)) or "").partition("This module is imported")[0]
    release = ".".join(metadata.version(PROJECT).split(".")[:2])
    commands = "\n".join(f"{PROJECT} {line.format(names.name)}" for line in USE[kind])
    words = {
        "ABOUT": names.fill("\n\n".join(doc.strip().split("\n\n")[:2]), kind),
        "COMMAND": commands,
        "CONTRACT": KINDS[kind].__name__,
        "SUMMARY": _summary(module),
        "RELEASE": release,
        "KIND": kind,
    }
    texts = {path: (TEMPLATES / f"{path}.txt").read_text(encoding="utf-8") for path in ("pyproject.toml", "README.md")}
    for word, value in words.items():
        texts = {path: re.sub(rf"\b{word}\b", lambda _, value=value: value, text) for path, text in texts.items()}
    texts |= {f"{MODULE}.py": module, f"tests/test_{MODULE}.py": (TEMPLATES / f"tests_{kind}.py").read_text(encoding="utf-8")}
    return {names.fill(path, kind): names.fill(text, kind) for path, text in texts.items()}


def _summary(module: str) -> str:
    """The component's line, read from the source."""
    found = re.search(r'summary="([^"]+)"', module)
    assert found
    return found[1]


def _next(name: str, kind: str, folder: Path) -> list[str]:
    where = (
        folder if folder.is_absolute() or folder.parent.name else f"./{folder}"
    )  # pip takes a bare word for a package's name
    return [
        f"pip install {where}",
        f"{PROJECT} {USE[kind][0].format(name)}",
        f"pip install '{PROJECT}[testing]'",
        f"python -m pytest {folder / 'tests'}",
        f"python -m pytest -p core.testing.plugin --pyargs core.testing --{PROJECT}-plugin {name}",
    ]


def created_text(data: dict[str, Any]) -> str:
    """What was made, and the commands that come next."""
    made = [f"created {data['path']}", *(f"    {path}" for path in data["files"])]
    return "\n".join([*made, "", "It works as it is. Next:", *(f"    {line}" for line in data["next"])])
