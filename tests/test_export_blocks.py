"""Quantised blocks: what is stored stands for what was there, checked by onnxruntime itself."""

from __future__ import annotations

import gguf
import hypothesis.extra.numpy as hnp
import numpy as np
import onnxruntime as ort
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edged.export.blocks import BLOCK, Affine, Packed, pack4, quantise8
from edged.export.gguf_blocks import decoder

FOUR_BITS = [Kind.Q4_0, Kind.Q4_1, Kind.Q4_K]


def dequantised8(matrix: np.ndarray) -> np.ndarray:
    data, scales = quantise8(matrix)
    values = (data.astype(np.float32) - 128) * scales[:, :, None]
    return values.reshape(len(matrix), -1)[:, : matrix.shape[1]]


def value(blocks: Affine) -> np.ndarray:
    weights = blocks.scale[:, :, None] * blocks.q + blocks.offset[:, :, None]
    return weights.reshape(len(blocks.q), -1)


def multiply(x: np.ndarray, packed: Packed) -> np.ndarray:
    """x [M, K] through onnxruntime's operator, computing in float32."""
    if packed.means:
        means = x.reshape(len(x), -1, BLOCK).mean(axis=2)
        x = np.concatenate([x, means], axis=1, dtype=np.float32)
    weights = {"b": packed.data, "s": packed.scales, "z": packed.zero_points}
    node = helper.make_node(
        "MatMulNBits", ["x", "b", "s", "z"], ["y"], domain="com.microsoft",
        K=packed.columns, N=len(packed.data), bits=4, block_size=BLOCK, accuracy_level=1,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    result: np.ndarray = session.run(None, {"x": x})[0]
    return result


def raw_rows(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Random bytes of a 4-bit type with sensible scales."""
    rng = np.random.default_rng(3)
    size, type_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, columns // size, type_bytes), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.02, (rows, columns // size, 1)).astype(np.float16)
    raw[:, :, :2] = scales.view(np.uint8)
    if kind == Kind.Q4_1:
        raw[:, :, 2:4] = (-7.3 * scales).astype(np.float16).view(np.uint8)
    if kind == Kind.Q4_K:
        raw[:, :, 2:4] = (7.3 * scales).astype(np.float16).view(np.uint8)
        raw[:, :, 8:12] = raw[:, :, 4:8]  # each block's 6-bit minimum equals its 6-bit scale
        raw[:, :, 12:16] = (raw[:, :, 12:16] & 15) * 17
    return raw.reshape(rows, -1)


@settings(deadline=None, max_examples=50)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 80)),
        elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False),
    )
)
def test_eight_bits_are_the_nearest_of_their_block(matrix: np.ndarray) -> None:
    """No weight is off by more than half a step of its block; any K is taken."""
    blocks = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % BLOCK))).reshape(len(matrix), -1, BLOCK)
    half_step = np.abs(blocks).max(axis=2, keepdims=True) / 127 / 2
    denormal = np.finfo(np.float32).tiny
    allowed = np.broadcast_to(half_step * 1.001 + denormal, blocks.shape).reshape(len(matrix), -1)
    error = np.abs(dequantised8(matrix) - matrix)
    assert (error <= allowed[:, : matrix.shape[1]]).all()


def test_q8_0_keeps_its_integers() -> None:
    """8-bit blocks of a GGUF file come out with the integers they had."""
    rng = np.random.default_rng(1)
    stored = gguf.quants.quantize(rng.normal(size=(8, 128)).astype(np.float32), Kind.Q8_0)
    integers = stored.reshape(8, -1, 34)[:, :, 2:].view(np.int8)
    data, _ = quantise8(gguf.quants.dequantize(stored, Kind.Q8_0))
    np.testing.assert_array_equal(data.astype(int) - 128, integers)


@pytest.mark.parametrize("kind", FOUR_BITS, ids=lambda kind: kind.name)
def test_four_bit_formats_are_taken_apart_exactly(kind: Kind) -> None:
    """Integers, scales and offsets of a block give the weights of the gguf package."""
    raw = raw_rows(kind, 6, 512)
    decode = decoder(kind)
    assert decode is not None
    blocks = decode(raw)
    assert blocks.q.max() == 15
    np.testing.assert_allclose(
        value(blocks), gguf.quants.dequantize(raw, kind), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", FOUR_BITS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("columns", [256, 1024, 1280])
def test_onnxruntime_multiplies_what_the_file_holds(kind: Kind, columns: int) -> None:
    """The product with packed 4-bit blocks is as near to the file's as one in 8 bits."""
    decode = decoder(kind)
    assert decode is not None
    raw = raw_rows(kind, 16, columns)
    exact = gguf.quants.dequantize(raw, kind)
    x = np.random.default_rng(2).normal(0, 1, (64, columns)).astype(np.float32)
    wanted = x @ exact.T
    four = multiply(x, pack4(decode(raw))) - wanted
    eight = x @ dequantised8(exact).T - wanted
    assert four.std() <= 1.5 * eight.std() < 0.02 * wanted.std()


def test_symmetric_blocks_need_no_means() -> None:
    """Q4_0 fits the operator's own zero points: nothing is added to it."""
    decode = decoder(Kind.Q4_0)
    assert decode is not None
    packed = pack4(decode(raw_rows(Kind.Q4_0, 4, 256)))
    assert not packed.means
    assert packed.columns == 256


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_what_is_left_over_is_small(blocks: int, seed: int) -> None:
    """Whatever the scales and offsets, the packed weights are within 1/28 of a step."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.5, 1, (2, blocks)).astype(np.float32)
    offset = (-scale * rng.uniform(0, 15, (2, blocks))).astype(np.float32)
    source = Affine(rng.integers(0, 16, (2, blocks, BLOCK), dtype=np.uint8), scale, offset)
    packed = pack4(source)
    stored = packed.data.shape[1]
    nibbles = np.stack([packed.data & 15, packed.data >> 4], axis=-1).reshape(2, stored, BLOCK)
    zero = np.stack([packed.zero_points & 15, packed.zero_points >> 4], axis=-1)
    zero = zero.reshape(2, -1)[:, :stored, None].astype(np.float32)
    weights = (nibbles - zero) * packed.scales.reshape(2, stored, 1)
    rest = weights[:, blocks:].reshape(2, -1)[:, :blocks] / BLOCK if packed.means else 0.0
    total = weights[:, :blocks] + np.asarray(rest).reshape(2, blocks, 1)
    assert np.abs(total.reshape(2, -1) - value(source)).max() <= 1 / 28 * 1.01
