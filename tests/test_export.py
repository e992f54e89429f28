"""The exporter's graphs say what llama.cpp says, and the two flavours agree."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType as Kind
from reference import Driver, LlamaCpp
from tiny import Tiny

from edged.export.form import Form
from edged.export.run import export

MODELS = {
    "llama": Tiny(),
    "llama, own head, llama3 scaling": Tiny(
        tied=False, llama3_factors=(1, 1, 1, 1.7, 3.1, 6.5, 8, 8), seed=1
    ),
    "qwen2, biases": Tiny("qwen2", seed=2),
    "qwen3, norms of heads, wide heads": Tiny("qwen3", head_dim=32, tied=False, seed=3),
    "llama, one query head per kv head": Tiny(kv_heads=4, seed=4),
}
PROMPT = [1, 40, 77, 120, 31, 9, 200, 201, 55, 260, 14, 3, 99, 98, 97, 42]
# Places of plain.py's operators in the lists of the NPU's ONNX front end, opset 13.
COMPILABLE = {
    *("Add", "Cast", "Concat", "Div", "Gather", "Gemm", "Less", "MatMul", "Mul", "Pow"),
    *("ReduceMean", "Reshape", "Shape", "Sigmoid", "Slice", "Softmax", "Split", "Sqrt", "Sub"),
    *("Transpose", "Unsqueeze", "Where"),
}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def made(source: Path, folder: Path, dtype: str = "fp32", target: str = "cpu") -> Driver:
    export(source, folder, Form(dtype, target), hide_bar=True)
    return Driver(folder, threads=1)


@pytest.mark.parametrize("target", ["cpu", "onnx"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_probabilities_are_llama_cpps(model: Tiny, target: str, tmp_path: Path) -> None:
    """Every token's probability after a prompt is that of llama.cpp on the same weights."""
    source = model.write_gguf(tmp_path / "tiny.gguf")
    ours = log_softmax(made(source, tmp_path / "out", target=target).feed(PROMPT))
    theirs = LlamaCpp(source, context=256, threads=1).logprobs(PROMPT, len(model.vocabulary()))
    assert len(theirs) > 200
    for token, logprob in theirs.items():
        assert ours[token] == pytest.approx(logprob, abs=5e-4)


@pytest.mark.parametrize("target", ["cpu", "onnx"])
def test_chunks_and_padding_change_nothing(target: str, tmp_path: Path) -> None:
    """A prompt in padded chunks gives the logits of the prompt in one piece."""
    driver = made(MODELS["llama"].write_gguf(tmp_path / "a.gguf"), tmp_path / "a", target=target)
    whole = driver.feed(PROMPT)
    driver.reset()
    driver.feed(PROMPT[:7], pad_to=8)
    driver.feed(PROMPT[7:9], pad_to=8)
    chunked = driver.feed(PROMPT[9:], pad_to=8)
    np.testing.assert_allclose(chunked, whole, atol=1e-4)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_both_flavours_agree(model: Tiny, tmp_path: Path) -> None:
    """The graph for onnxruntime and the one for the NPU's compiler compute the same."""
    source = model.write_gguf(tmp_path / "tiny.gguf")
    cpu = made(source, tmp_path / "cpu")
    plain = made(source, tmp_path / "plain", target="onnx")
    for ids in (PROMPT, [5], [6]):
        np.testing.assert_allclose(cpu.feed(ids), plain.feed(ids), atol=1e-4)


def test_fp16_follows_fp32(tmp_path: Path) -> None:
    """The half-precision graph for the NPU prefers the same tokens."""
    source = MODELS["qwen3, norms of heads, wide heads"].write_gguf(tmp_path / "tiny.gguf")
    half = made(source, tmp_path / "half", "fp16", "onnx").feed(PROMPT)
    full = made(source, tmp_path / "full", "fp32", "onnx").feed(PROMPT)
    np.testing.assert_allclose(half, full, atol=0.05)


@pytest.mark.parametrize(
    ("dtype", "shards"), [(np.float32, 1), (ml_dtypes.bfloat16, 3), (np.float16, 1)]
)
@pytest.mark.parametrize("name", ["llama", "qwen2, biases", "qwen3, norms of heads, wide heads"])
def test_a_folder_and_a_file_give_the_same_graph(
    name: str, dtype: type, shards: int, tmp_path: Path
) -> None:
    """Safetensors of any float type, whole or in shards, export as the GGUF of the same model."""
    model = MODELS[name]
    folder = made(model.write_hf(tmp_path / "hf", dtype, shards), tmp_path / "a")
    file = made(model.write_gguf(tmp_path / "tiny.gguf"), tmp_path / "b")
    tolerance = 5e-3 if dtype is np.float16 else 0  # float16 has no room for tiny bfloat16 values
    np.testing.assert_allclose(folder.feed(PROMPT), file.feed(PROMPT), atol=tolerance)


def test_llama3_scaling_of_a_folder_is_that_of_a_file(tmp_path: Path) -> None:
    """rope_scaling of config.json becomes the divisors a GGUF file carries ready-made."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    # From the definition: waves shorter than 64 / 4 stay, longer than 64 / 1 are stretched by 8.
    factors = []
    for i in range(8):
        wave = 2 * np.pi * 10_000.0 ** (2 * i / 16)
        part = (64 / wave - 1) / 3
        factors.append(1 / min(1, max(1 / 8, (1 - part) / 8 + part)))
    plain = Tiny(seed=5)
    scaled = Tiny(seed=5, llama3_factors=tuple(factors))
    folder = made(plain.write_hf(tmp_path / "hf", rope_scaling=scaling), tmp_path / "a")
    file = made(scaled.write_gguf(tmp_path / "tiny.gguf"), tmp_path / "b")
    unscaled = made(plain.write_gguf(tmp_path / "plain.gguf"), tmp_path / "c")
    said = folder.feed(PROMPT)
    np.testing.assert_allclose(said, file.feed(PROMPT), atol=1e-5)
    assert np.abs(said - unscaled.feed(PROMPT)).max() > 1e-2


@pytest.mark.parametrize("target", ["cpu", "onnx"])
def test_eight_bits_stay_close(target: str, tmp_path: Path) -> None:
    """8-bit blocks move the logits by little against their spread."""
    source = MODELS["llama, own head, llama3 scaling"].write_gguf(tmp_path / "tiny.gguf")
    exact = made(source, tmp_path / "a").feed(PROMPT)
    blocks = made(source, tmp_path / "b", "int8", target).feed(PROMPT)
    assert (blocks - exact).std() < 0.06 * exact.std()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=["Q4_0", "Q4_1"])
def test_own_four_bit_blocks_are_as_good_as_eight_bits(kind: Kind, tmp_path: Path) -> None:
    """Keeping a file's 4-bit blocks costs no more accuracy than 8 bits do, at half the size."""
    model = Tiny(hidden=256, heads=8, head_dim=32, ffn=512, seed=6)
    source = model.write_gguf(tmp_path / "tiny.gguf", kind)
    exact = made(source, tmp_path / "a").feed(PROMPT)
    eight = made(source, tmp_path / "b", "int8").feed(PROMPT)
    own = made(source, tmp_path / "c", "auto").feed(PROMPT)
    assert (own - exact).std() < 1.3 * (eight - exact).std()
    sizes = [(tmp_path / name / "model.onnx.data").stat().st_size for name in "bc"]
    assert sizes[1] < 0.75 * sizes[0]


def test_a_model_without_four_bit_blocks_gets_eight_bits(tmp_path: Path) -> None:
    """`auto` never rounds anything to 4 bits by itself."""
    source = Tiny(seed=7).write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)
    eight = made(source, tmp_path / "a", "int8").feed(PROMPT)
    auto = made(source, tmp_path / "b", "auto").feed(PROMPT)
    np.testing.assert_array_equal(auto, eight)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_plain_graph_holds_only_operators_the_npus_compiler_takes(
    model: Tiny, dtype: str, tmp_path: Path
) -> None:
    """Opset 13, no operator outside the list, none of another domain, B, T and S symbolic."""
    source = model.write_gguf(tmp_path / "tiny.gguf")
    export(source, tmp_path / "out", Form(dtype, "onnx"), hide_bar=True)
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    assert [(o.domain, o.version) for o in graph.opset_import] == [("", 13)]
    assert {node.op_type for node in graph.graph.node} <= COMPILABLE
    assert {node.domain for node in graph.graph.node} == {""}
    shapes = {
        item.name: [d.dim_param or d.dim_value for d in item.type.tensor_type.shape.dim]
        for item in (*graph.graph.input, *graph.graph.output)
    }
    assert shapes["input_ids"] == shapes["position_ids"] == ["B", "T"]
    assert shapes["kv_pos"] == ["S"]
    assert shapes["new_v.1"] == ["B", model.kv_heads, "T", model.head_dim]
