"""What a cell is called: a hash of its configuration and of the versions of the plugins that it uses.

Its configuration alone where it was not checked before the sweep began (see `core.sweep.plan`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from core.sweep.plan import plan_of
from core.vocabulary import plain

NOT_WHAT_IS_RUN = ("hydra", "sweep", "log_level")  # settings that leave a cell's result as it is
VERSION = ("name", "distribution", "version", "provider", "provider_version")


def digest(root: DictConfig) -> str:
    """Of a configuration: equal for equal ones, however they were spelt."""
    return _hash({str(key): plain(value) for key, value in root.items() if key not in NOT_WHAT_IS_RUN})


def name_of(configuration: str, plugins: Mapping[str, Mapping[str, Any]]) -> str:
    """configuration: its digest. plugins: slot -> what fills it, as in result.json."""
    return _hash([configuration, {kind: [found.get(key) for key in VERSION] for kind, found in plugins.items()}])


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _name(root: DictConfig) -> str:
    overrides: Sequence[str] = [str(o) for o in root.hydra.overrides.task]
    return plan_of(str(root.hydra.sweep.dir)).of(overrides).get("hash") or digest(root)


def register() -> None:
    """`${inferlab.cell:}` in the folder of a cell."""
    OmegaConf.register_new_resolver("inferlab.cell", lambda _root_: _name(_root_), replace=True)
