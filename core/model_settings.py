"""Settings of the group `model`. Apart from `core.checkpoint`, which brings numpy, since every configuration needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ModelSettings:
    """The group `model`: which model, and where its files are. Checked by `core.checkpoint.open_checkpoint`."""

    path: str | None = None  # Hugging Face directory, .gguf file or hub id ORG/NAME; null: `package`
    weights: str = "auto"  # auto: those at `path`; random: N(0, 0.02), norm weights 1, fixed by `seed`
    config: dict[str, Any] | None = None  # in config.json's words; used where weights=random and no path gives one
    package: str | None = None  # PACKAGE/FILE: a file inside an installed Python package; used where path is null
    install: str = ""  # the command that provides `package`, for the error message
    tokenizer: str = "auto"  # auto: the checkpoint's, if it has one; byte: one token per byte; none: token ids only
