"""What every result records beside its own numbers: versions, machine, commit, and the metrics that plugins add."""

from __future__ import annotations

import logging
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from core.interfaces import PROJECT
from core.plugins import Registry

log = logging.getLogger(PROJECT)
PACKAGES = ("inferlab", "torch", "triton", "transformers", "hydra-core", "pluggy", "numpy", "flash-attn", "vllm")


def environment(name: str) -> dict[str, Any]:
    """`name`: the device, as torch calls it."""
    from core import device

    argv = [Path(sys.argv[0]).name, *sys.argv[1:]]  # where the script lies on this machine is nobody's business
    return {**software(), "argv": argv, **device.describe(name)}


def software() -> dict[str, Any]:
    """What can be said without torch."""
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "packages": {p: installed.get(p) for p in PACKAGES},
        "commit": _commit(Path(__file__).parent.parent),
    }


def _commit(folder: Path) -> str | None:
    """Of the checkout that runs; None where there is none (an installed wheel may lie inside somebody's repository)."""
    if not (folder / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def plugin_metrics(registry: Registry, result: dict[str, Any]) -> dict[str, Any]:
    """Numbers that plugins add; one that raises is named, counted in result["failed_observers"], and left out."""
    found: dict[str, Any] = {}
    failed = result.setdefault("failed_observers", {})
    for hook in registry.manager.hook.inferlab_metrics.get_hookimpls():
        try:
            metrics: Any = hook.function(result=result) if hook.argnames else hook.function()
            found |= {name: asdict(metric) for name, metric in metrics.items()}
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}"
            of_plugin = failed.setdefault(hook.plugin_name, {"failures": 0, "raised": {}})
            of_plugin["failures"] += 1
            of_plugin["raised"]["inferlab_metrics"] = what
            log.warning("plugin %s: inferlab_metrics raised %s", hook.plugin_name, what)
    return found
