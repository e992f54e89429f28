"""Blocks of 32 weights sharing one scale, in the layout of onnxruntime's MatMulNBits. Pure.

8 bits: weight = scale * (byte - 128), nearest. 4 bits: only from a source that already has
4-bit blocks, whose integers are kept; nothing is rounded to 4 bits here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BLOCK = 32
_ZERO_POINT_8 = 128
_LARGEST_8 = 127
_LARGEST_4 = 7
_ZERO_POINT_4 = 8

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Affine(NamedTuple):
    """4-bit blocks of a source: weight = scale * q + offset.

    q: uint8 0..15 [N, K/32, 32]; scale, offset: float32 [N, K/32].
    """

    q: Bytes
    scale: Floats
    offset: Floats


class Packed(NamedTuple):
    """Inputs of a 4-bit MatMulNBits of `columns` columns.

    data: [N, blocks, 16]; scales: flat [N * blocks]; zero_points: two per byte, flat.
    means: the input needs the means of its blocks of 32 appended; columns counts them.
    """

    data: Bytes
    scales: Floats
    zero_points: Bytes
    columns: int
    means: bool


def quantise8(matrix: np.ndarray) -> tuple[Bytes, Floats]:
    """float32 [N, K] -> bytes [N, ceil(K/32), 32] and scales [N, ceil(K/32)].

    A matrix that came from 8-bit blocks of 32 (GGUF Q8_0) comes back with the same integers.
    """
    blocks = _padded(matrix).reshape(matrix.shape[0], -1, BLOCK)
    scales = np.maximum(blocks.max(axis=2), -blocks.min(axis=2)) / np.float32(_LARGEST_8)
    scaled = blocks / np.where(scales == 0, np.float32(1), scales)[:, :, None]
    np.rint(scaled, out=scaled)
    np.clip(scaled, -_LARGEST_8, _LARGEST_8, out=scaled)  # a denormal scale has few bits
    scaled += _ZERO_POINT_8
    return scaled.astype(np.uint8), scales.astype(np.float32)


def pack4(blocks: Affine) -> Packed:
    """A source's 4-bit blocks for MatMulNBits, which has integer zero points only.

    scale * q + offset = scale * (q - zero) + rest, zero the nearest integer. The rest is
    constant over a block, so its part of the product is rest * (sum of the block's inputs):
    it is stored as further 4-bit columns, to be multiplied with the means of the input's
    blocks. Weights are then off by at most 1/28 of the largest step among 32 blocks of a row,
    which is what 8-bit blocks cost too (measured: 0.6 % of the weights' size, both).
    """
    divisor = np.where(blocks.scale == 0, np.float32(1), blocks.scale)
    zero = np.clip(np.rint(-blocks.offset / divisor), 0, 15)
    rest = blocks.offset + blocks.scale * zero
    q, scale, columns = blocks.q, blocks.scale, blocks.q.shape[1] * BLOCK
    means = bool(np.any(rest))
    if means:
        columns += rest.shape[1]
        more_q, more_scale = _quantise_rest(rest)
        q = np.concatenate([q, more_q], axis=1)
        scale = np.concatenate([scale, more_scale * np.float32(BLOCK)], axis=1)
        more_zero = np.full(more_scale.shape, _ZERO_POINT_4, zero.dtype)
        zero = np.concatenate([zero, more_zero], axis=1)
    zero_points = _nibbles(zero.astype(np.uint8)).reshape(-1)
    return Packed(_nibbles(q), scale.reshape(-1), zero_points, columns, means)


def _quantise_rest(rest: Floats) -> tuple[Bytes, Floats]:
    """Symmetric 4 bits around 8, as blocks [N, ceil(blocks/32), 32]."""
    values = _padded(rest).reshape(rest.shape[0], -1, BLOCK)
    scale = np.abs(values).max(axis=2) / np.float32(_LARGEST_4)
    divisor = np.where(scale == 0, np.float32(1), scale)
    q = np.rint(values / divisor[:, :, None]) + _ZERO_POINT_4
    return q.astype(np.uint8), scale.astype(np.float32)


def _nibbles(values: Bytes) -> Bytes:
    """Two 4-bit values per byte along the last axis, the first in the low half."""
    values = _padded(values, 2)
    low, high = values[..., 0::2], values[..., 1::2]
    return np.bitwise_or(low, np.left_shift(high, 4), dtype=np.uint8)


def _padded(values: np.ndarray, multiple: int = BLOCK) -> np.ndarray:
    """Zeros after the last axis up to a multiple."""
    spare = -values.shape[-1] % multiple
    if not spare:
        return values
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, spare)])
