"""Blocks of 32 weights sharing one scale, in the layout of onnxruntime's MatMulNBits.

Symmetric 8 bits: weight = scale * (byte - 128). A matrix that came from 8-bit blocks of 32
(GGUF Q8_0) comes back with the same integers.
"""

from __future__ import annotations

import numpy as np

BLOCK = 32
_ZERO_POINT = 128
_LARGEST = 127


def quantise8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [N, K] -> bytes uint8 [N, ceil(K/32), 32] and scales float32 [N, ceil(K/32)]."""
    rows, columns = matrix.shape
    spare = -columns % BLOCK
    if spare:
        matrix = np.pad(matrix, ((0, 0), (0, spare)))
    blocks = matrix.reshape(rows, -1, BLOCK)
    scales = np.maximum(blocks.max(axis=2), -blocks.min(axis=2)) / np.float32(_LARGEST)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    scaled = blocks * inverse[:, :, None]
    np.rint(scaled, out=scaled)
    scaled += _ZERO_POINT
    return scaled.astype(np.uint8), scales.astype(np.float32)
