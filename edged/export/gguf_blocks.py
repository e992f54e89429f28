"""4-bit block formats of GGUF as integers and scales, unrounded: Q4_0, Q4_1 and Q4_K. Pure."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np

from edged.export.blocks import BLOCK, Affine

_SUPER = 256  # weights of a Q4_K super-block


def decoder(kind: gguf.GGMLQuantizationType) -> Callable[[np.ndarray], Affine] | None:
    """The function that takes raw rows uint8 [N, bytes] of this type apart; None = no 4-bit."""
    types = gguf.GGMLQuantizationType
    return {types.Q4_0: _q4_0, types.Q4_1: _q4_1, types.Q4_K: _q4_k}.get(kind)


def _q4_0(raw: np.ndarray) -> Affine:
    blocks = raw.reshape(len(raw), -1, 2 + BLOCK // 2)
    scale = _halves(blocks, 0)
    return Affine(_low_then_high(blocks[:, :, 2:]), scale, -8 * scale)


def _q4_1(raw: np.ndarray) -> Affine:
    blocks = raw.reshape(len(raw), -1, 4 + BLOCK // 2)
    return Affine(_low_then_high(blocks[:, :, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q4_k(raw: np.ndarray) -> Affine:
    """Eight blocks share two halves; each has its own 6-bit scale and minimum."""
    rows = len(raw)
    supers = raw.reshape(rows, -1, 4 + 12 + _SUPER // 2)
    scale, minimum = _six_bits(supers[:, :, 4:16])
    nibbles = supers[:, :, 16:].reshape(rows, -1, BLOCK)
    return Affine(
        _low_then_high(nibbles).reshape(rows, -1, BLOCK),
        (_halves(supers, 0)[:, :, None] * scale).reshape(rows, -1),
        (-_halves(supers, 2)[:, :, None] * minimum).reshape(rows, -1),
    )


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes -> 8 scales and 8 minima as float32, each 0..63 [.., 8]."""
    first, second, third = np.split(packed, 3, axis=-1)
    scale = [first & 63, (third & 15) | ((first >> 6) << 4)]
    minimum = [second & 63, (third >> 4) | ((second >> 6) << 4)]
    return (
        np.concatenate(scale, axis=-1).astype(np.float32),
        np.concatenate(minimum, axis=-1).astype(np.float32),
    )


def _low_then_high(nibbles: np.ndarray) -> np.ndarray:
    """[.., n] bytes -> [.., 2n] integers: all low halves, then all high ones."""
    return np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte offset of each block, as float32."""
    raw = np.ascontiguousarray(blocks[:, :, at : at + 2])
    return raw.view(np.float16)[:, :, 0].astype(np.float32)
