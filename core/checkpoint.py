"""A checkpoint: configuration, tokenizer and tensors of one model, wherever they come from.

Light to import (no torch). A `Checkpoint` can be pickled to workers, which open the files again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.files import read_object
from core.gguf_config import config_from_gguf
from core.locate import locate, locate_package
from core.model_settings import ModelSettings
from core.sources import WHOLE, GGUFSource, LazyWeight, RandomSource, SafetensorsSource, Shapes, Share, Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from core.interfaces import Weight
    from core.text import Tokenizer


@dataclass(eq=False)
class Checkpoint:
    """What is known of a model before it is built; tensors and tokenizer are read when asked for."""

    config: dict[str, Any]  # config.json's words
    architecture: str  # config["architectures"][0]; general.architecture of a GGUF file
    is_gguf: bool
    name: str  # for display
    source: Source
    folder: Path | None = None  # Hugging Face directory, where there is one
    tokenizer_kind: str = "auto"
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_tokenizer", "stop_token_ids")}

    @property
    def dtype(self) -> str:
        """The dtype that the checkpoint names, without "torch."; bfloat16 where it names none."""
        given = self.config.get("dtype") or self.config.get("torch_dtype")
        return "bfloat16" if self.is_gguf or not given else str(given).removeprefix("torch.")

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Every end-of-sequence token that tokenizer, config.json or generation_config.json names."""
        tokenizer = self.tokenizer()
        ids = set(tokenizer.eos_token_ids) if tokenizer else set()
        for given in (self.config.get("eos_token_id"), self.generation.get("eos_token_id")):
            ids |= set(given if isinstance(given, list) else [] if given is None else [given])
        return frozenset(ids)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None for a model that takes token ids only. Built once per process."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        from core import text

        if self.tokenizer_kind == "byte":
            return text.byte_tokenizer(self.config.get("vocab_size", 0))
        if self.tokenizer_kind == "none":
            return None
        if isinstance(self.source, GGUFSource):
            return text.gguf_tokenizer(self.source.file)
        return text.folder_tokenizer(self.folder) if self.folder else None

    def shapes(self, wanted: Shapes, share: Share = WHOLE) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Shapes of the wanted tensors that it holds, and the names of those that nobody wants. share: see `Source`."""
        return self.source.shapes(wanted, share)

    def tensors(
        self, wanted: Shapes, *, undo: Callable[[str, Tensor], Tensor], dtype: torch.dtype, shapes: Shapes | None = None
    ) -> Iterator[tuple[str, Weight]]:
        """The wanted tensors, each read when it is indexed; `undo` is the architecture's from_gguf, used for GGUF only.

        shapes: what `shapes` found, if it was asked before.
        """
        shapes = self.shapes(wanted)[0] if shapes is None else shapes
        for name in wanted:
            yield name, LazyWeight(shapes[name], self.source.reader(name, shapes[name], undo), dtype)


def open_checkpoint(settings: ModelSettings, *, seed: int = 0) -> Checkpoint:
    """Find the model and read its configuration; ValueError says what is missing and what to give instead."""
    for word, value, allowed in (
        ("weights", settings.weights, ("auto", "random")),
        ("tokenizer", settings.tokenizer, ("auto", "byte", "none")),
    ):
        if value not in allowed:
            raise ValueError(f"model.{word} must be one of {', '.join(allowed)}, got {value!r}")
    path = _find(settings)
    if path is not None and path.is_file():
        return _open_gguf(path, settings)
    config = read_object(path / "config.json") if path else dict(settings.config or {})
    if path and not config:
        raise ValueError(
            f"{path} is no Hugging Face model directory: it has no config.json; a .gguf file is given by its own path"
        )
    return _open_config(path, config, settings, seed)


def _find(settings: ModelSettings) -> Path | None:
    if settings.path is not None:
        return locate(settings.path)
    if settings.package is not None:
        return locate_package(settings.package, settings.install)
    if settings.weights == "random":
        if not settings.config:
            raise ValueError("model.weights=random needs model.config, or a model.path with a config.json")
        return None
    raise ValueError(
        "this model has no files yet: give model.path=DIR, model.path=ORG/NAME or a .gguf file"
        + (", or model.weights=random" if settings.config else "")
    )


def _open_gguf(path: Path, settings: ModelSettings) -> Checkpoint:
    if settings.weights == "random":
        raise ValueError(
            f"model.weights=random needs a config.json, and {path} is a GGUF file; give a directory or model.config"
        )
    source = GGUFSource(path)
    config = config_from_gguf(source.file)
    return Checkpoint(config, config["model_type"], True, path.stem, source, tokenizer_kind=settings.tokenizer)


def _open_config(folder: Path | None, config: dict[str, Any], settings: ModelSettings, seed: int) -> Checkpoint:
    architectures = config.get("architectures") or []
    if not architectures:
        raise ValueError(f"{f'{folder}/config.json' if folder else 'model.config'} names no `architectures`")
    if settings.weights == "auto" and "quantization_config" in config:
        raise ValueError(
            f"{folder} holds quantised weights (quantization_config), which are not supported; use the original model"
        )
    source: Source
    if settings.weights == "random":
        source = RandomSource(seed)
    else:
        assert folder is not None
        source = SafetensorsSource(folder, tied=bool(config.get("tie_word_embeddings", False)))
    name = settings.path.rstrip("/").rsplit("/", 1)[-1] if settings.path else f"random {architectures[0]}"
    generation = read_object(folder / "generation_config.json") if folder else {}
    return Checkpoint(config, architectures[0], False, name, source, folder, settings.tokenizer, generation)
