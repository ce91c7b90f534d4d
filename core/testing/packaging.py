"""Contract suite for whole plugins: what `python -m core.plugins check` finds, and what only a fresh process can tell."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from importlib import metadata
from typing import ClassVar

from core.interfaces import PROJECT
from core.plugins import Plugin, discover
from core.plugins.checks import HEAVY
from core.plugins.diagnose import chosen, diagnose

RESERVED = ("core", "plugins", "conf", "tests", "docs", "examples", "benchmarks")  # names that every second project has


class PackagingSuite:
    """One plugin, that is one entry point of the group `inferlab.plugins`."""

    name: ClassVar[str] = ""  # of the entry point

    @classmethod
    def plugin(cls) -> Plugin:
        assert cls.name, f"{cls.__name__} must say which plugin it tests: name = ..."
        return next(plugin for plugin in chosen(discover(), cls.name) if plugin.name == cls.name)

    def test_check_finds_nothing(self) -> None:
        """Metadata, API range, hooks, decorators, settings, targets, presets. Warnings are shown and fail nothing."""
        findings = diagnose(discover(), [self.plugin()], everything=False)
        for finding in findings:
            if finding.level == "warning":
                warnings.warn(finding.text, stacklevel=2)
        errors = [finding.text for finding in findings if finding.level == "error"]
        assert not errors, "\n".join(errors)

    def test_the_entry_module_is_light(self) -> None:
        """Imported in a fresh process it brings in no torch: it is imported at every start, whether it is used or not."""
        code = f"import sys, {self.plugin().module}; print(*({{n.partition('.')[0] for n in sys.modules}} & {{*{HEAVY!r}}}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.plugin().module} cannot be imported on its own: {done.stderr}"
        found = done.stdout.split()
        assert not found, f"{self.plugin().module} imports {', '.join(found)}: import them in the module of the target"

    def test_declarations_travel_to_workers(self) -> None:
        """Workers get the resolved components pickled and discover nothing: settings classes are found by their names."""
        for component in self.plugin().components:
            label = f"{component.kind}={component.name}"
            for what, value in ((f"the declaration of {label}", component), (f"settings of {label}", component.settings())):
                try:
                    same = pickle.loads(pickle.dumps(value)) == value
                except Exception as error:
                    raise AssertionError(f"{what} cannot be sent to a worker: {type(error).__name__}: {error}") from error
                assert same, f"{what}: a pickled copy is not equal to it"

    def test_it_depends_on_inferlab_and_owns_its_names(self) -> None:
        """pip must know that it needs inferlab, and its top-level packages must be nobody else's."""
        if (name := self.plugin().distribution) == PROJECT:
            return
        distribution = metadata.distribution(name)
        wanted = [text.replace(" ", "") for text in distribution.requires or ()]
        assert any(text.startswith(PROJECT) for text in wanted), f'{name}: dependencies = ["{PROJECT}"] is missing'
        folders = {file.parts[0] for file in distribution.files or () if len(file.parts) > 1}
        taken = sorted(folders & set(RESERVED))
        assert not taken, (
            f"{name} installs a top-level package {', '.join(taken)}, as others do: put it below a name of your own"
        )
