"""Reads the header of a GGUF file: keys and values, and where each tensor lies. No numpy.

The vocabulary is hundreds of thousands of small strings; the gguf package maps each one by
itself and takes ten seconds for what takes a fraction of one here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from edged.export import ExportError

_T = TypeVar("_T")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 100_000
_MAX_AXES = 4
_ALIGNMENT_BYTES = 32  # unless general.alignment says otherwise
_STRING, _ARRAY = 8, 9
# Type number -> struct format, little endian (GGUF specification, gguf_metadata_value_type).
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))


class TensorEntry(NamedTuple):
    """shape: outermost size first (GGUF stores it reversed); kind: number of the ggml type.

    offset_bytes: from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset_bytes: int


def read_metadata(path: Path) -> dict[str, Any]:
    """All keys and values; arrays are lists. Raises ExportError if it is not a GGUF file."""
    return _read(path, lambda reader: reader.pairs())


def read_header(path: Path) -> tuple[dict[str, Any], list[TensorEntry]]:
    """The same, and all tensors. Raises ExportError."""
    return _read(path, lambda reader: (found := reader.pairs(), reader.tensors(found)))


def _read(path: Path, read: Callable[[_Reader], _T]) -> _T:
    try:
        with path.open("rb") as file:
            return read(_Reader(file, path.stat().st_size))
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, struct.error) as error:
        raise ExportError(f"cannot read {path} as GGUF: {error}; fetch it again") from None


class _Reader:
    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._tensors = 0

    def pairs(self) -> dict[str, Any]:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS} (or big endian)")
        self._tensors, keys = self._unpack("QQ")
        if max(self._tensors, keys) > _MAX_KEYS:
            raise ValueError(f"{self._tensors} tensors and {keys} keys cannot be")
        found = {}
        for _ in range(keys):
            key = self._string()
            found[key] = self._value(*self._unpack("I"))
        return found

    def tensors(self, pairs: dict[str, Any]) -> list[TensorEntry]:
        """Where the tensors lie; to be called after `pairs`, with what it found."""
        found = []
        for _ in range(self._tensors):
            name = self._string()
            (axes,) = self._unpack("I")
            if not 1 <= axes <= _MAX_AXES:
                raise ValueError(f"{name} with {axes} axes cannot be")
            shape = self._unpack(f"{axes}Q")[::-1]
            found.append(TensorEntry(name, shape, *self._unpack("IQ")))
        alignment = int(pairs.get("general.alignment", _ALIGNMENT_BYTES))
        if alignment < 1:
            raise ValueError(f"an alignment of {alignment} cannot be")
        start = -(-self._file.tell() // alignment) * alignment
        return [entry._replace(offset_bytes=start + entry.offset_bytes) for entry in found]

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._unpack("IQ")
            return self._array(item, count)
        return self._unpack(_format(kind))[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in _SCALARS:
            return list(self._unpack(f"{count}{_format(kind)}"))
        if count > self._size_bytes:
            raise ValueError(f"an array of {count} items cannot be")
        read: Callable[[], Any] = self._string if kind == _STRING else lambda: self._value(kind)
        return [read() for _ in range(count)]

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        return self._take(length).decode("utf-8")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))

    def _take(self, count: int) -> bytes:
        if count > self._size_bytes:
            raise ValueError(f"a value of {count} bytes cannot be")
        data = self._file.read(count)
        if len(data) != count:
            raise ValueError("it is cut short")
        return data


def _format(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"value type {kind} is unknown")
    return _SCALARS[kind]
