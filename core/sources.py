"""Where tensors come from: safetensors files, a GGUF file, or random numbers. Each gives names, shapes and lazy reads.

Sources are picklable: files are opened when first needed, once per process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from core.files import read_object
from core.gguf_config import gguf_names, unused_in_gguf
from core.gguf_file import GGUFFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Undo = Callable[[str, "Tensor"], "Tensor"]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NOT_WEIGHTS = (".rotary_emb.inv_freq",)  # tables that old transformers versions saved; every engine computes them anew
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(eq=False)
class LazyWeight:
    """A tensor that is read only when indexed, in the dtype that was asked for."""

    shape: tuple[int, ...]
    read: Callable[[Any], Tensor]
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.read(index).to(self.dtype)


class Source(Protocol):
    """A set of named tensors."""

    @property
    def files(self) -> list[str]:
        """What was looked at, for messages."""
        ...

    def shapes(self, wanted: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Shapes of the wanted tensors that exist, and the names of those that nobody wants."""
        ...

    def reader(self, name: str, shape: tuple[int, ...], undo: Undo) -> Callable[[Any], Tensor]:
        """Reads a part of one tensor: index -> Tensor."""
        ...


class SafetensorsSource:
    """A Hugging Face directory: model.safetensors, or the shards that its index names."""

    def __init__(self, folder: Path, *, tied: bool = False) -> None:
        self.folder, self.tied = folder, tied
        self.paths = _weight_files(folder)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "tied": self.tied, "paths": self.paths}

    @property
    def files(self) -> list[str]:
        return [str(path) for path in self.paths]

    @cached_property
    def _where(self) -> dict[str, Any]:
        """Name: the open file that holds it."""
        from safetensors import safe_open

        found: dict[str, Any] = {}
        origin: dict[str, Path] = {}
        for path in self.paths:
            try:
                file = safe_open(str(path), framework="pt")
            except Exception as error:
                raise ValueError(f"{path} cannot be read as safetensors: {error}; download or convert it again") from None
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name in found:
                    raise ValueError(f"the tensor {name} is in {origin[name]} and in {path}: keep one")
                found[name], origin[name] = file, path
        return found

    def shapes(self, wanted: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        found = {name: tuple(self._where[name].get_slice(name).get_shape()) for name in wanted if name in self._where}
        unused = {name for name in self._where if name not in wanted and not name.endswith(_NOT_WEIGHTS)}
        if self.tied and _HEAD in unused and _EMBEDDING in found and self._head_is_embedding():
            unused.remove(_HEAD)
        return found, unused

    def _head_is_embedding(self) -> bool:
        import torch

        head, embedding = self._where[_HEAD].get_slice(_HEAD), self._where[_EMBEDDING].get_slice(_EMBEDDING)
        if head.get_shape() != embedding.get_shape():
            return False
        starts = range(0, head.get_shape()[0], 8192)
        return all(torch.equal(head[at : at + 8192], embedding[at : at + 8192]) for at in starts)

    def reader(self, name: str, shape: tuple[int, ...], undo: Undo) -> Callable[[Any], Tensor]:
        file = self._where[name]

        def read(index: Any) -> Tensor:
            parts = index if isinstance(index, tuple) else (index,)
            if all(isinstance(part, slice) and part.step in (None, 1) for part in parts):
                return file.get_slice(name)[index]  # only these bytes are read
            return file.get_tensor(name)[index]

        return read


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        index = read_object(folder / INDEX)
        if not isinstance(index.get("weight_map"), dict):
            raise ValueError(f"{folder / INDEX} has no weight_map; download it again")
        names = sorted(set(index["weight_map"].values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ValueError(f"{folder / INDEX} names files that are not there: {', '.join(absent)}; download them again")
        return [folder / name for name in names]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} holds weights only as {', '.join(pickled)}, which may run code when loaded and are refused;"
            " convert them: model.save_pretrained(DIR, safe_serialization=True) in transformers"
        )
    raise ValueError(f"no weights in {folder}: looked for {SINGLE} and {INDEX}; or give model.weights=random")


class GGUFSource:
    """A GGUF file, read under Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    @cached_property
    def file(self) -> GGUFFile:
        """The parsed file; once per process."""
        return GGUFFile(self.path)

    @property
    def files(self) -> list[str]:
        return [str(self.path)]

    def shapes(self, wanted: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        self.file.check_types()
        self._names = gguf_names(self.file, wanted)
        found = {name: self.file.tensors[theirs].shape for name, theirs in self._names.items()}
        return found, unused_in_gguf(self.file, self._names.values())

    def reader(self, name: str, shape: tuple[int, ...], undo: Undo) -> Callable[[Any], Tensor]:
        # `undo` may mix rows and must see float32, so the whole tensor is dequantised whatever part is wanted.
        return lambda index: undo(name, self.file.read(self._names[name]))[index]


class RandomSource:
    """N(0, 0.02), norm weights 1; each tensor depends on seed and name only, so slices on several ranks agree."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.files = ["random numbers (model.weights=random)"]

    def shapes(self, wanted: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        return dict(wanted), set()

    def reader(self, name: str, shape: tuple[int, ...], undo: Undo) -> Callable[[Any], Tensor]:
        return lambda index: self._draw(name, shape)[index]

    def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        import torch

        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape)
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        return torch.empty(shape).normal_(0.0, 0.02, generator=generator)
