"""Puts a source's matrices into a graph: fused, scaled, quantised, streamed, one at a time.

Both graphs ask for `3.qkv` or `3.gate_up`; how its numbers are stored is decided here only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from edged.export.blocks import BLOCK, quantise8
from edged.export.emit import Emitter
from edged.export.hyper import Hyper

CONTRIB = "com.microsoft"
_PIECE_BYTES = 16 << 20  # of float32 rows in memory while streaming a large matrix
_PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "o": ("o",), "down": ("down",)}


class Source(Protocol):
    """A model on disk; names as in gguf_source.py."""

    hyper: Hyper

    def matrix(self, name: str) -> np.ndarray: ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


class Weights:
    """bits: 8 = blocks for MatMulNBits, 0 = the graph's own float type."""

    def __init__(self, source: Source, emit: Emitter, bits: int) -> None:
        self._source = source
        self._emit = emit
        self._bits = bits
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
        if name.endswith(".q_norm"):  # carries the 1/sqrt(D) that `_matrix` cannot fold into q
            values = values * self._score_scale()
        return self._emit.weight(name, values.astype(dtype))

    def embed(self, ids: str, dtype: np.dtype) -> str:
        """[B,T] ids -> [B,T,E]."""
        shape = (self.hyper.vocab, self.hyper.hidden)
        table = self._emit.stream("embed", dtype, shape, self._pieces("embed", dtype))
        return self._emit.op("Gather", table, ids)

    def linear(self, x: str, name: str, dtype: np.dtype) -> str:
        """x [.., K] times a (fused) matrix, plus its bias where the family has one."""
        matrix = self._matrix(name)
        if self._bits:
            y = self._blocks(x, name, matrix.shape, [matrix])
        else:
            y = self._emit.op("MatMul", x, self._emit.weight(name, matrix.T.astype(dtype)))
        if name.endswith(".qkv") and self.hyper.family.qkv_bias:
            y = self._emit.op("Add", y, self._emit.weight(f"{name}_bias", self._bias(name, dtype)))
        return y

    def head(self, x: str, dtype: np.dtype) -> str:
        """x [B,E] -> logits float32 [B,V]. A tied float head is the embedding itself."""
        name = "embed" if self.hyper.tied else "head"
        shape = (self.hyper.vocab, self.hyper.hidden)
        if self._bits:
            return self._blocks(x, "head", shape, self._pieces(name, dtype), output="logits")
        if not self.hyper.tied:
            self._emit.stream("head", dtype, shape, self._pieces("head", dtype))
        if dtype == np.float32:
            return self._emit.op("Gemm", x, name, transB=1, name="logits")
        return self._emit.op("Cast", self._emit.op("Gemm", x, name, transB=1), to=1, name="logits")

    def _pieces(self, name: str, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Runs of rows of a large matrix."""
        step = max(1, _PIECE_BYTES // (4 * self.hyper.hidden))
        for start in range(0, self.hyper.vocab, step):
            stop = min(start + step, self.hyper.vocab)
            yield self._source.rows(name, start, stop).astype(dtype, copy=False)

    def _matrix(self, name: str) -> np.ndarray:
        """The parts of a fused matrix below each other, 1/sqrt(D) folded into q."""
        layer, _, fused = name.partition(".")
        parts = []
        for part in _PARTS[fused]:
            values = self._source.matrix(f"{layer}.{part}")
            if part == "q" and not self.hyper.family.qk_norm:
                values = values * self._score_scale()
            parts.append(values)
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _bias(self, name: str, dtype: np.dtype) -> np.ndarray:
        layer = name.partition(".")[0]
        q, k, v = (self._source.matrix(f"{layer}.{part}_bias") for part in "qkv")
        return np.concatenate([q * self._score_scale(), k, v]).astype(dtype)

    def _score_scale(self) -> np.float32:
        scale: np.float32 = np.float32(1 / math.sqrt(self.hyper.head_dim))
        return scale

    def _blocks(
        self,
        x: str,
        name: str,
        shape: tuple[int, ...],
        pieces: Iterator[np.ndarray] | list[np.ndarray],
        output: str = "",
    ) -> str:
        """MatMulNBits; scales are small and wait in memory while the bytes are streamed."""
        rows, columns = shape
        count = -(-columns // BLOCK)
        scales = []

        def packed() -> Iterator[np.ndarray]:
            for piece in pieces:
                values, scale = quantise8(piece)
                scales.append(scale)
                yield values

        b = self._emit.stream(f"{name}.q8", np.uint8, (rows, count, BLOCK), packed())
        s = self._emit.weight(f"{name}.scale", np.concatenate(scales).reshape(-1))
        return self._emit.op(
            "MatMulNBits", x, b, s, name=output, domain=CONTRIB,
            K=columns, N=rows, bits=8, block_size=BLOCK, accuracy_level=4,
        )  # fmt: skip
