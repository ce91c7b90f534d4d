"""Where tensors come from: safetensors files, a GGUF file, or random numbers. Each gives names, shapes and lazy reads.

Sources are picklable: files are opened when first needed, once per process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from core.files import read_object
from core.gguf_config import gguf_names, unused_in_gguf
from core.gguf_file import GGUFFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
Share = tuple[int, int]  # rank, number of ranks: what has to be compared is shared out
WHOLE: Share = (0, 1)
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

    @property
    def bytes_read(self) -> int:
        """Of tensors, by this process, so far."""
        ...

    def shapes(self, wanted: Shapes, share: Share = WHOLE) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Shapes of the wanted tensors that exist, and the names of those that nobody wants."""
        ...

    def reader(self, name: str, shape: tuple[int, ...], undo: Undo) -> Callable[[Any], Tensor]:
        """Reads a part of one tensor: index -> Tensor."""
        ...


class SafetensorsSource:
    """A Hugging Face directory: model.safetensors, or the shards that its index names."""

    def __init__(self, folder: Path, *, tied: bool = False) -> None:
        self.folder, self.tied, self.bytes_read = folder, tied, 0
        self.paths = _weight_files(folder)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "tied": self.tied, "paths": self.paths, "bytes_read": 0}

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

    def shapes(self, wanted: Shapes, share: Share = WHOLE) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        found = {name: tuple(self._where[name].get_slice(name).get_shape()) for name in wanted if name in self._where}
        unused = {name for name in self._where if name not in wanted and not name.endswith(_NOT_WEIGHTS)}
        if self.tied and _HEAD in unused and _EMBEDDING in found and self._head_is_embedding(share):
            unused.remove(_HEAD)
        return found, unused

    def _head_is_embedding(self, share: Share) -> bool:
        """In this rank's share of the rows; all ranks together see the whole."""
        import torch

        head, embedding = self._where[_HEAD].get_slice(_HEAD), self._where[_EMBEDDING].get_slice(_EMBEDDING)
        if head.get_shape() != embedding.get_shape():
            return False
        begin, end = (head.get_shape()[0] * n // share[1] for n in (share[0], share[0] + 1))
        pieces = (slice(at, min(at + 8192, end)) for at in range(begin, end, 8192))
        return all(torch.equal(self._counted(head[piece]), self._counted(embedding[piece])) for piece in pieces)

    def _counted(self, tensor: Tensor) -> Tensor:
        self.bytes_read += tensor.nbytes
        return tensor

    def reader(self, name: str, shape: tuple[int, ...], undo: Undo) -> Callable[[Any], Tensor]:
        file = self._where[name]

        def read(index: Any) -> Tensor:
            if _slices(index, shape):
                return self._counted(file.get_slice(name)[index])  # only these bytes are read
            return self._counted(file.get_tensor(name))[index]

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

    def shapes(self, wanted: Shapes, share: Share = WHOLE) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        self.file.check_types()
        self._names = gguf_names(self.file, wanted)
        found = {name: self.file.tensors[theirs].shape for name, theirs in self._names.items()}
        return found, unused_in_gguf(self.file, self._names.values())

    @property
    def bytes_read(self) -> int:
        return self.file.bytes_read

    def reader(self, name: str, shape: tuple[int, ...], undo: Undo) -> Callable[[Any], Tensor]:
        theirs = self._names[name]

        def read(index: Any) -> Tensor:
            """`undo` sees whole tensors in float32. A part is read by itself where undoing means no more than moving rows."""
            parts = _slices(index, shape)
            if not parts or parts == tuple(slice(0, size) for size in shape):
                return undo(name, self.file.read(theirs))[index]
            moved = rows_moved(undo, name, shape)
            if moved is None:
                return undo(name, self.file.read(theirs))[index]
            rows = moved[parts[0]]
            begin, end = parts[0].start, parts[0].stop
            in_order = bool((rows == np.arange(begin, end)).all())
            own = self.file.read(theirs, slice(begin, end) if in_order else rows, parts[-1] if len(parts) > 1 else slice(None))
            return own[(slice(None), *parts[1:-1])]

        return read


def _slices(index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """One slice(begin, end) for each dimension; none where the index is anything but plain slices."""
    given = index if isinstance(index, tuple) else (index,)
    if len(given) > len(shape) or not all(isinstance(part, slice) and part.step in (None, 1) for part in given):
        return ()
    padded = (*given, *[slice(None)] * (len(shape) - len(given)))
    found = (part.indices(size)[:2] for part, size in zip(padded, shape, strict=True))
    return tuple(slice(begin, max(begin, end)) for begin, end in found)


def rows_moved(undo: Undo, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """The stored row that becomes each row, where `undo` only moves whole rows; None where it does anything else.

    Found with numbered elements in the same number of rows, which are few columns wide.
    """
    import torch

    width = max(min(31, math.prod(shape[1:]), (1 << 24) // shape[0]), 1)  # float32 counts up to 2**24
    probe = torch.arange(shape[0] * width, dtype=torch.float32).view(shape[0], *[width] * (len(shape) > 1))
    try:
        seen = undo(name, probe)
    except Exception:  # it knows tensors of the real size only
        return None
    if seen.shape != probe.shape:
        return None
    seen = seen.reshape(shape[0], width).double()
    rows = (seen[:, 0] / width).round().long()
    fits = torch.equal(seen, (rows * width).double()[:, None] + torch.arange(width))
    return rows.numpy() if fits and int(rows.min()) >= 0 and int(rows.max()) < shape[0] else None


class RandomSource:
    """N(0, 0.02), norm weights 1; each tensor depends on seed and name only, so slices on several ranks agree."""

    def __init__(self, seed: int) -> None:
        self.seed, self.bytes_read = seed, 0
        self.files = ["random numbers (model.weights=random)"]

    def shapes(self, wanted: Shapes, share: Share = WHOLE) -> tuple[dict[str, tuple[int, ...]], set[str]]:
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
