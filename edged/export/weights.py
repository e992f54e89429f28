"""Puts a source's matrices into a graph: fused, scaled, quantised, streamed, one at a time.

Both graphs ask for `3.qkv` or `3.gate_up`; how its numbers are stored is decided here only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from edged.export import ExportError
from edged.export.blocks import BLOCK, Affine, Packed, pack4, quantise8
from edged.export.emit import Emitter
from edged.export.form import Recipe
from edged.export.hyper import Hyper
from edged.export.precision import Precision

CONTRIB = "com.microsoft"
_PIECE_BYTES = 16 << 20  # of float32 rows in memory while streaming a large matrix
_PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "o": ("o",), "down": ("down",)}


class Source(Protocol):
    """A model on disk; names as in gguf_source.py."""

    hyper: Hyper

    def matrix(self, name: str) -> np.ndarray:
        """float32 [N, K] or [N]."""

    def rows(self, name: str, start: int, stop: int) -> np.ndarray: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def label(self, name: str) -> str:
        """The tensor's name in the source."""

    def affine(self, name: str) -> Affine | None:
        """The matrix's own 4-bit blocks of 32, if it is stored so."""


def check_tensors(source: Source) -> None:
    """Every tensor is there, readable and of its size. Raises ExportError before the long work."""
    for name, wanted in source.hyper.tensor_shapes():
        found = source.shape(name)
        if found != wanted:
            raise ExportError(
                f"tensor {source.label(name)} is {list(found)}, the header wants {list(wanted)}; "
                "the model is damaged"
            )
        source.rows(name, 0, 1)


class Weights:
    """One model's matrices on their way into one graph; recipe: see form.py."""

    def __init__(self, source: Source, emit: Emitter, recipe: Recipe) -> None:
        self._source = source
        self._emit = emit
        self._recipe = recipe
        self.precision = Precision()
        self.hyper = source.hyper

    def rope_tables(self, dtype: np.dtype) -> tuple[str, str]:
        """cos and sin [context + 1, D/2]; the last row is where padding points."""
        h = self.hyper
        cos, sin = h.rope.tables(h.context_tokens + 1, h.head_dim)
        return (
            self._emit.weight("rope_cos", cos.astype(dtype)),
            self._emit.weight("rope_sin", sin.astype(dtype)),
        )

    def vector(self, name: str, dtype: np.dtype) -> str:
        values = self._source.matrix(name)
        if name.endswith(".q_norm"):  # carries the 1/sqrt(D) that `_float` cannot fold into q
            values = values * self._score_scale()
        return self._emit.weight(name, self._cast(name, values, dtype))

    def embed(self, ids: str, dtype: np.dtype) -> str:
        """[B,T] ids -> [B,T,E]. Beside quantised matrices float16 rows are exact enough."""
        stored = dtype if self._recipe == "float" else np.dtype(np.float16)
        shape = (self.hyper.vocab, self.hyper.hidden)
        table = self._emit.stream("embed", stored, shape, self._pieces("embed", stored))
        rows = self._emit.op("Gather", table, ids)
        return rows if stored == dtype else self._emit.op("Cast", rows, to=1)

    def linear(self, x: str, name: str, dtype: np.dtype) -> str:
        """x [B,T,K] times a (fused) matrix, plus its bias where the family has one."""
        own = self._affine(name) if self._recipe == "auto" else None
        if own is not None:
            y = self._blocks4(x, name, pack4(own))
        elif self._recipe == "float":
            y = self._emit.op("MatMul", x, self._emit.weight(name, self._float(name, dtype).T))
        else:
            matrix = self._float(name, np.dtype(np.float32))
            y = self._blocks8(x, name, matrix.shape, _runs(matrix))
        if name.endswith(".qkv") and self.hyper.family.qkv_bias:
            y = self._emit.op("Add", y, self._emit.weight(f"{name}_bias", self._bias(name, dtype)))
        return y

    def head(self, x: str, dtype: np.dtype) -> str:
        """x [B,E] -> logits float32 [B,V]. A tied float head is the embedding itself."""
        name = "embed" if self.hyper.tied else "head"
        shape = (self.hyper.vocab, self.hyper.hidden)
        if self._recipe != "float":
            return self._blocks8(
                x, "head", shape, self._pieces(name, np.dtype(np.float32)), output="logits"
            )
        if not self.hyper.tied:
            self._emit.stream("head", dtype, shape, self._pieces("head", dtype))
        if dtype == np.float32:
            return self._emit.op("Gemm", x, name, transB=1, name="logits")
        return self._emit.op("Cast", self._emit.op("Gemm", x, name, transB=1), to=1, name="logits")

    def _cast(self, name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return self.precision.cast(self._source.label(name), values, dtype)

    def _pieces(self, name: str, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Runs of rows of a large matrix."""
        step = max(1, _PIECE_BYTES // (4 * self.hyper.hidden))
        for start in range(0, self.hyper.vocab, step):
            rows = self._source.rows(name, start, min(start + step, self.hyper.vocab))
            yield self._cast(name, rows, dtype)

    def _float(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The parts of a fused matrix below each other, 1/sqrt(D) folded into q."""
        layer, _, fused = name.partition(".")
        parts = []
        for part in _PARTS[fused]:
            values = self._source.matrix(f"{layer}.{part}")
            if self._folds(part):
                values = values * self._score_scale()
            parts.append(self._cast(f"{layer}.{part}", values, dtype))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _affine(self, name: str) -> Affine | None:
        """As `_float`, in the source's own 4-bit blocks; None unless all parts have them."""
        layer, _, fused = name.partition(".")
        parts = []
        for part in _PARTS[fused]:
            own = self._source.affine(f"{layer}.{part}")
            if own is None:
                return None
            fold = self._score_scale() if self._folds(part) else np.float32(1)
            parts.append(Affine(own.q, own.scale * fold, own.offset * fold))
        return Affine(*(np.concatenate(values) for values in zip(*parts, strict=True)))

    def _folds(self, part: str) -> bool:
        return part == "q" and not self.hyper.family.qk_norm

    def _bias(self, name: str, dtype: np.dtype) -> np.ndarray:
        layer = name.partition(".")[0]
        parts = []
        for part in ("q_bias", "k_bias", "v_bias"):
            values = self._source.matrix(f"{layer}.{part}")
            if part == "q_bias":
                values = values * self._score_scale()
            parts.append(self._cast(f"{layer}.{part}", values, dtype))
        return np.concatenate(parts)

    def _score_scale(self) -> np.float32:
        scale: np.float32 = np.float32(1 / math.sqrt(self.hyper.head_dim))
        return scale

    def _blocks4(self, x: str, name: str, packed: Packed) -> str:
        """4-bit MatMulNBits; x gets the means of its blocks appended where they are needed."""
        if packed.means:
            means = self._emit.op("AveragePool", x, kernel_shape=[BLOCK], strides=[BLOCK])
            x = self._emit.op("Concat", x, means, axis=-1)
        return self._nbits(
            x, len(packed.data), packed.columns, 4,
            self._emit.weight(f"{name}.q4", packed.data),
            self._emit.weight(f"{name}.scale", packed.scales),
            self._emit.weight(f"{name}.zero", packed.zero_points),
        )  # fmt: skip

    def _blocks8(
        self,
        x: str,
        name: str,
        shape: tuple[int, ...],
        pieces: Iterable[np.ndarray],
        output: str = "",
    ) -> str:
        """8-bit MatMulNBits; scales are small and wait in memory while the bytes are streamed."""
        rows, columns = shape
        scales = []

        def packed() -> Iterator[np.ndarray]:
            for piece in pieces:
                values, scale = quantise8(piece)
                scales.append(scale)
                yield values

        blocks = (rows, -(-columns // BLOCK), BLOCK)
        data = self._emit.stream(f"{name}.q8", np.uint8, blocks, packed())
        scale = self._emit.weight(f"{name}.scale", np.concatenate(scales).reshape(-1))
        return self._nbits(x, rows, columns, 8, data, scale, output=output)

    def _nbits(
        self, x: str, rows: int, columns: int, bits: int, *inputs: str, output: str = ""
    ) -> str:
        # accuracy_level 4: the input is rounded to 8-bit blocks too, integers are multiplied.
        return self._emit.op(
            "MatMulNBits", x, *inputs, name=output, domain=CONTRIB,
            K=columns, N=rows, bits=bits, block_size=BLOCK, accuracy_level=4,
        )  # fmt: skip


def _runs(matrix: np.ndarray) -> Iterator[np.ndarray]:
    """Views of a matrix in runs of rows, to bound the memory of what is made from each."""
    step = max(1, _PIECE_BYTES // (4 * matrix.shape[1]))
    for start in range(0, len(matrix), step):
        yield matrix[start : start + step]
