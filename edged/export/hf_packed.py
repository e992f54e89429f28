"""4- and 8-bit matrices of GPTQ and AWQ checkpoints back to float32, some rows at a time. Pure.

Both store integers in 32-bit words, transposed ([K,N] of a [N,K] matrix), with a scale and a
zero point per group of K: weight = scale * (integer - zero).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from edged.export import ExportError

_WORD_BITS = 32
_ROWS = 256  # of the matrix, unpacked at a time
# AWQ shuffles the eight 4-bit fields of a word: where columns 0 to 7 lie.
_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)


class Parts(NamedTuple):
    """A matrix as stored: words uint32, scales float32 [groups, N], group of each k int64 [K]."""

    qweight: np.ndarray
    qzeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray


@dataclass(frozen=True)
class Packing:
    """method: "gptq" (words along K) or "awq" (words along N, fields shuffled).

    zero_offset: what was subtracted from the zero points before they were stored.
    """

    method: str
    bits: int
    zero_offset: int

    @property
    def fields(self) -> int:
        """Values per word."""
        return _WORD_BITS // self.bits

    def shape(self, qweight: tuple[int, ...]) -> tuple[int, ...]:
        """[N, K] of a matrix from the shape of its words."""
        if len(qweight) != 2:
            return qweight
        first, second = qweight
        if self.method == "gptq":
            return (second, first * self.fields)
        return (second * self.fields, first)

    def rows(self, parts: Parts, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of the matrix, float32 [stop - start, K]."""
        out = np.empty((stop - start, len(parts.groups)), np.float32)
        for at in range(start, stop, _ROWS):
            end = min(at + _ROWS, stop)
            zeros = self._columns(parts.qzeros, at, end).T + np.uint8(self.zero_offset)
            zeros &= (1 << self.bits) - 1
            piece = out[at - start : end - start]
            piece[:] = self._weights(parts.qweight, at, end)
            piece -= zeros[:, parts.groups]
            piece *= parts.scales[:, at:end].T[:, parts.groups]
        return out

    def _weights(self, words: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Integers [stop - start, K]."""
        if self.method == "awq":
            return np.transpose(self._columns(words, start, stop))
        fields = self._unpack(words[:, start:stop]).transpose(1, 0, 2)  # [N, K / fields, fields]
        integers: np.ndarray = fields.reshape(stop - start, -1)
        return integers

    def _columns(self, words: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Integers [.., stop - start] of values packed along the last axis."""
        first = start // self.fields
        values = self._unpack(words[:, first : -(-stop // self.fields)])
        if self.method == "awq":
            values = values[..., list(_AWQ_FIELDS)]
        flat: np.ndarray = values.reshape(len(words), -1)
        return flat[:, start - first * self.fields : stop - first * self.fields]

    def _unpack(self, words: np.ndarray) -> np.ndarray:
        """uint8 [.., fields], the lowest bits first."""
        shifts = np.arange(0, _WORD_BITS, self.bits, dtype=np.uint32)
        values: np.ndarray = (words[..., None] >> shifts) & np.uint32((1 << self.bits) - 1)
        return values.astype(np.uint8)


def packing(config: Any) -> Packing | None:
    """From quantization_config of a config.json; None = the checkpoint is not quantised.

    Raises ExportError naming what is not supported.
    """
    if not config:
        return None
    if not isinstance(config, dict):
        raise ExportError("quantization_config in config.json is not an object")
    method, bits = str(config.get("quant_method")), config.get("bits", 4)
    layout = str(config.get("checkpoint_format") or config.get("version") or "").lower()
    if method == "gptq" and bits in (4, 8) and layout in ("", "gptq", "gptq_v2"):
        return Packing(method, bits, 0 if layout == "gptq_v2" else 1)
    if method == "awq" and bits == 4 and layout in ("", "gemm"):
        return Packing(method, bits, 0)
    name = method if method not in ("gptq", "awq") else f"{method}, {bits} bits, {layout or '?'},"
    raise ExportError(
        f"quantization {name} is not supported; use an unquantised folder or a GGUF file "
        "(or GPTQ with 4 or 8 bits, or AWQ gemm with 4)"
    )


def check_parts(parts: Parts, packed: Packing, label: str) -> Parts:
    """Itself, or ExportError when the sizes contradict each other."""
    rows, width = packed.shape(parts.qweight.shape)
    count = len(parts.scales)
    sizes_fit = parts.scales.shape == (count, rows) and parts.groups.shape == (width,)
    zeros_fit = parts.qzeros.shape == (count, -(-rows // packed.fields))
    if (
        not (count and sizes_fit and zeros_fit)
        or not 0 <= parts.groups.min() <= parts.groups.max() < count
    ):
        raise ExportError(f"the scales or zero points of {label} do not fit it; it is damaged")
    return parts
