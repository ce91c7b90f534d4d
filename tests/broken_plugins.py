"""Plugins that are broken in the ways of P1 to P6, written as wheels: what pip would get from somebody who did not look."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

HEAD = "from core.interfaces import Component, Scheduler, hookimpl\n\n"
ONE = """
@hookimpl
def inferlab_components():
    yield Component("scheduler", "{option}", "{target}", summary="for a test"{more})
"""
WHOLE = """
from core.interfaces import Scheduler

class Policy(Scheduler):
    def add(self, request): pass
    def remove(self, request): pass
    def schedule(self, step): pass
"""


@dataclass(frozen=True)
class Broken:
    """A distribution with one plugin, and what is to be read of it."""

    case: str
    name: str  # of the distribution; of the plugin too unless `plugin` says another
    source: str  # of its entry module
    says: str  # a regular expression
    plugin: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def wheel(self, folder: Path) -> Path:
        """Written by hand, as a build would: modules, metadata, entry points, RECORD."""
        info = f"{self.name}-1.0.dist-info"
        contents = {
            f"{self.name}.py": HEAD + dedent(self.source),
            **{path: dedent(text) for path, text in self.files.items()},
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {self.name}\nVersion: 1.0\nRequires-Dist: inferlab\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": f"[inferlab.plugins]\n{self.plugin or self.name} = {self.name}\n",
        }
        digests = {p: base64.urlsafe_b64encode(hashlib.sha256(t.encode()).digest()).rstrip(b"=") for p, t in contents.items()}
        lines = [f"{p},sha256={digests[p].decode()},{len(t.encode())}" for p, t in contents.items()]
        contents[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
        path = folder / f"{self.name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in contents.items():
                archive.writestr(name, text)
        return path


def one(option: str, target: str, more: str = "") -> str:
    return ONE.format(option=option, target=target, more=more)


BROKEN = [
    Broken(
        "P1", "gone", "import nowhere_to_be_found", r"gone 1\.0: ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    ),
    Broken(
        "P2",
        "lacking",
        one("lacking", "lacking_target:Policy", ', requires=["nothing_there>=2"], install="pip install lacking[all]"'),
        r"scheduler=lacking .*needs nothing_there>=2 \(not installed\); pip install lacking\[all\]",
        files={"lacking_target.py": "import nothing_there\n"},
    ),
    Broken(
        "P4",
        "misspelt",
        "@hookimpl\ndef inferlab_component():\n    return []",
        r"no hook inferlab_component; did you mean inferlab_components",
    ),
    Broken("P4", "bare", "def inferlab_components():\n    return []", r"inferlab_components lacks the decorator: @hookimpl"),
    Broken(
        "P4",
        "abstract",
        one("abstract", "abstract_target:Policy"),
        r"scheduler=abstract: abstract_target:Policy lacks schedule\(\) \(is shedule a misspelling\?\)",
        files={"abstract_target.py": WHOLE.replace("def schedule", "def shedule")},
    ),
    Broken(
        "P6",
        "future",
        one("future", "future:Policy", ", api=(2, 0)"),
        r"scheduler=future is written for plugin API 2\.0, this inferlab has \d\.\d+",
    ),
]
"""One by one these leave everything else as it is."""

TWINS = [
    Broken(
        "P3",
        "second_fcfs",
        one("fcfs", "second_fcfs:Policy"),
        r"scheduler=fcfs is offered by inferlab \S+ .*and by second_fcfs 1\.0",
    ),
    Broken("P3", "one", one("one", "one:Policy"), "", plugin="shared"),
    Broken(
        "P3",
        "other",
        one("other", "other:Policy"),
        r"two distributions have a plugin named shared: (one|other) 1\.0 and (one|other) 1\.0",
        plugin="shared",
    ),
]
"""Nothing can be chosen until one of each pair is blocked."""

GOOD = Broken("", "healthy", one("healthy", "healthy_target:Policy"), "", files={"healthy_target.py": WHOLE})
