"""Files of a Hugging Face folder: JSON objects, and safetensors whole or in shards.

The safetensors header is JSON with offsets; rows are read straight from the file, never mapped.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edged.export import ExportError

_FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_WORDS: dict[str, np.dtype[Any]] = {"I32": np.dtype("<u4")}
_MAX_HEADER_BYTES = 100 << 20


class Entry(NamedTuple):
    """A tensor in a file; offset in bytes."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_floats(entry: Entry, start: int, stop: int) -> np.ndarray:
    """Rows start..stop of a tensor of any float type as float32."""
    raw = _read(entry, _FLOATS, start, stop)
    if entry.dtype == "BF16":
        wide: np.ndarray = raw.astype(np.uint32) << 16
        return wide.view(np.float32)
    return np.asarray(raw, dtype=np.float32)


def read_words(entry: Entry) -> np.ndarray:
    """A whole tensor of 32-bit integers as uint32."""
    return _read(entry, _WORDS, 0, math.prod(entry.shape[:1]))


def _read(entry: Entry, known: dict[str, np.dtype[Any]], start: int, stop: int) -> np.ndarray:
    dtype = known.get(entry.dtype)
    if dtype is None:
        raise ExportError(
            f"unsupported quantisation {entry.dtype} of {entry.name} in {entry.path.name}; "
            "take a bf16, fp16 or fp32 checkpoint"
        )
    width = math.prod(entry.shape[1:])
    return np.fromfile(
        entry.path,
        dtype=dtype,
        count=(stop - start) * width,
        offset=entry.offset + start * width * dtype.itemsize,
    ).reshape(stop - start, *entry.shape[1:])


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file. Raises ExportError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ExportError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ExportError(f"{path} does not hold a JSON object")
    return data


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        paths = [folder / Path(name).name for name in names]
    else:
        paths = [folder / "model.safetensors"]
    for path in paths:
        if not path.is_file():
            raise ExportError(f"{path} is missing; download the model's safetensors files")
    return paths


def read_header(path: Path) -> dict[str, Entry]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        total = path.stat().st_size
        if not 2 <= size <= min(_MAX_HEADER_BYTES, total - 8):
            raise ExportError(f"{path} is not a safetensors file, or is cut off")
        try:
            header = json.loads(file.read(size))
        except ValueError:
            raise ExportError(f"{path} is not a safetensors file, or is cut off") from None
    try:
        tensors = {name: item for name, item in header.items() if name != "__metadata__"}
        return {name: _entry(name, path, item, 8 + size, total) for name, item in tensors.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ExportError(f"{path} is damaged: {error}; download it again") from None


def _entry(name: str, path: Path, item: dict[str, Any], base: int, total: int) -> Entry:
    """Raises ValueError when the sizes contradict each other or the file."""
    start, end = (base + int(offset) for offset in item["data_offsets"])
    shape = tuple(int(size) for size in item["shape"])
    dtype = (_FLOATS | _WORDS).get(item["dtype"])
    if not base <= start <= end <= total or min(shape, default=0) < 0:
        raise ValueError("a tensor lies beyond its end")
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError("a tensor is not as long as its shape")
    return Entry(name, path, str(item["dtype"]), shape, start)
