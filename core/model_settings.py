"""Settings of the group `model`. Apart from `core.checkpoint`, which brings numpy, since every configuration needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.settings import setting


@dataclass
class ModelSettings:
    """The group `model`: which model, and where its files are. Checked by `core.checkpoint.open_checkpoint`."""

    path: str | None = setting(None, "Hugging Face directory, .gguf file or hub id ORG/NAME; null: package")
    weights: str = setting("auto", "auto: those at path; random: N(0, 0.02), norm weights 1, fixed by seed")
    config: dict[str, Any] | None = setting(
        None, "in the words of config.json; used where weights=random and no path gives one"
    )
    package: str | None = setting(None, "PACKAGE/FILE: a file inside an installed Python package; used where path is null")
    install: str = setting("", "the command that provides package, for the error message")
    tokenizer: str = setting("auto", "auto: the checkpoint's, if it has one; byte: one token per byte; none: token ids only")
