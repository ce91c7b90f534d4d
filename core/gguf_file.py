"""A GGUF file: its metadata, and its tensors as float32.

The package `gguf` supplies the format's constants, names and dequantisation. Its GGUFReader is not used: it makes two numpy
views of every token and merge (2 s for 98,000 strings of the default model, 0.06 s here). Knows no architecture.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # GGUFValueType
_STRING, _ARRAY = 8, 9
_PIECE = 1 << 16  # values dequantised at once
_ALL = slice(None)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies, and how it is encoded."""

    shape: tuple[int, ...]  # numpy's order
    type: Any  # gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    size: int  # bytes


class _Header:
    """A cursor over the metadata."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, code: str, count: int = 1) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{code}")
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, at, result = self.data, self.at, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            end = at + 8 + length_at(data, at)[0]
            if end > len(data):
                raise struct.error("string beyond the end")
            result.append(data[at + 8 : end].decode("utf-8"))
            at = end
        self.at = at
        return result

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])[0]
        (item,), (count,) = self.take("I"), self.take("Q")
        if item == _STRING:
            return self.strings(count)
        return list(self.take(_SCALARS[item], count)) if item in _SCALARS else [self.value(item) for _ in range(count)]


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ValueError("reading a GGUF file needs the package gguf: pip install 'inferlab[gguf]'") from None
    return gguf


class GGUFFile:
    """Metadata (`fields`) and tensors of one file, which stays mapped; parsed once, when built."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.bytes_read = Path(path), 0
        with self.path.open("rb") as file:
            if self.path.stat().st_size < 24 or file.read(4) != b"GGUF":
                raise ValueError(f"{self.path} is not a GGUF file: it does not begin with the letters GGUF")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._parse(_Header(self._data))
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path} is damaged or cut short: its header cannot be read ({error})") from None

    def _parse(self, header: _Header) -> None:
        header.at = 4
        (version,) = header.take("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path} is GGUF version {version}; versions 2 and 3 (little-endian) can be read")
        count, fields = header.take("Q", 2)
        self.fields: dict[str, Any] = {}
        for _ in range(fields):
            key, (kind,) = header.string(), header.take("I")
            self.fields[key] = header.value(kind)
        if self.fields.get("split.count", 1) > 1:
            raise ValueError(f"{self.path} is one of {self.fields['split.count']} parts: join them (llama-gguf-split --merge)")
        self.tensors = self._directory(header, count)

    def _directory(self, header: _Header, count: int) -> dict[str, TensorInfo]:
        gguf, entries = _gguf(), []
        for _ in range(count):
            name, (dims,) = header.string(), header.take("I")
            entries.append((name, header.take("Q", dims)[::-1], *header.take("I"), *header.take("Q")))
        step = self.fields.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        start = -(-header.at // step) * step
        found: dict[str, TensorInfo] = {}
        for name, shape, code, offset in entries:
            if name in found:
                raise ValueError(f"{self.path} holds the tensor {name} twice")
            found[name] = self._info(gguf, name, shape, code, start + offset)
        return found

    def _info(self, gguf: Any, name: str, shape: tuple[int, ...], code: int, offset: int) -> TensorInfo:
        try:
            kind = gguf.GGMLQuantizationType(code)
        except ValueError:
            raise ValueError(f"{self.path}: tensor {name} has type {code}, unknown to the installed gguf package") from None
        block, size = gguf.GGML_QUANT_SIZES[kind]
        size = math.prod(shape) // block * size
        if offset + size > len(self._data):
            raise ValueError(f"{self.path} is cut short: tensor {name} ends at byte {offset + size} of {len(self._data)}")
        return TensorInfo(shape, kind, offset, size)

    def check_types(self) -> None:
        """Refuse encodings that `gguf` cannot dequantise, by name and before anything is loaded."""
        gguf = _gguf()
        for kind, name in {info.type: name for name, info in self.tensors.items()}.items():
            size = gguf.GGML_QUANT_SIZES[kind][1]
            try:
                gguf.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
            except NotImplementedError:
                raise ValueError(
                    f"{self.path}: tensor {name} is stored as {kind.name}, which the gguf package cannot dequantise;"
                    " use a file of another type, such as Q8_0, Q4_1 or F16"
                ) from None

    def read(self, name: str, rows: slice | np.ndarray = _ALL, columns: slice = _ALL) -> Tensor:
        """Float32. Only blocks that hold these rows (of the first dimension) and columns (of the last) are touched."""
        import torch

        gguf, info = _gguf(), self.tensors[name]
        block, size = gguf.GGML_QUANT_SIZES[info.type]
        shape = list(info.shape) if len(info.shape) > 1 or block > 1 else [*info.shape, 1]
        data = np.frombuffer(self._data, dtype=np.uint8, count=info.size, offset=info.offset)
        data = data.reshape(*shape[:-1], shape[-1] // block, size)
        begin, end, _ = columns.indices(shape[-1])
        data = (data[rows] if len(shape) > 1 else data)[..., begin // block : -(-end // block), :]
        self.bytes_read += data.nbytes
        values = _dequantised(data, info.type, block).reshape(*data.shape[:-2], data.shape[-2] * block)
        values = values[..., begin - begin // block * block :][..., : end - begin]
        values = values.reshape(values.shape[: len(info.shape)]) if len(shape) > len(info.shape) else values
        return torch.from_numpy(values if len(shape) > 1 else values[rows])


def _dequantised(data: np.ndarray, kind: Any, block: int) -> np.ndarray:
    """[..., blocks, bytes of a block] -> [all blocks, values of a block] in pieces that fit the cache, one `gguf` call each.

    0.3 s for the default model; whole tensors take 1 s.
    """
    gguf, size = _gguf(), data.shape[-1]
    data = data.reshape(-1, size)
    values, step = np.empty((len(data), block), dtype=np.float32), _PIECE // block
    for start in range(0, len(data), step):
        piece = data[start : start + step]
        values[start : start + step] = gguf.dequantize(piece.reshape(1, -1), kind).reshape(len(piece), block)
    return values
