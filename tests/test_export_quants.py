"""Every way weights are stored exports as what it means, or is refused by its name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from reference import Driver, LlamaCpp
from tiny import Tiny

from edged.export import ExportError
from edged.export.form import Form
from edged.export.run import export, open_source

MODEL = Tiny(hidden=256, heads=4, head_dim=64, ffn=256, context=64, seed=9)
SEED = 5
PROMPT = [1, 40, 77, 120, 31, 9, 200, 201, 55, 260, 14, 3, 99]
# Where a block's float16 numbers lie: its scale and, as a multiple of that, its minimum.
HALVES: dict[Kind, tuple[tuple[int, float], ...]] = {
    Kind.Q4_0: ((0, 1),),
    Kind.Q4_1: ((0, 1), (2, -7.5)),
    Kind.Q5_0: ((0, 1),),
    Kind.Q5_1: ((0, 1), (2, -15.5)),
    Kind.Q8_0: ((0, 1),),
    Kind.Q2_K: ((80, 1), (82, 1.5)),
    Kind.Q3_K: ((108, 1),),
    Kind.Q4_K: ((0, 1), (2, 7.5)),
    Kind.Q5_K: ((0, 1), (2, 15.5)),
    Kind.Q6_K: ((208, 1),),
    Kind.IQ2_S: ((0, 1),),
    Kind.IQ3_XXS: ((0, 1),),
    Kind.IQ4_NL: ((0, 1),),
    Kind.IQ4_XS: ((0, 1),),
}
# Types of the format that hold no weights of a model, or that only the very newest programs read.
UNREADABLE = {Kind.Q8_1, Kind.Q8_K, Kind.I8, Kind.I16, Kind.I32, Kind.I64, Kind.F64, Kind.Q1_0}


def random_rows(kind: Kind, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Raw rows of a type, uint8 [N, bytes], that mean weights of about 0.08."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    top = 256 if kind in HALVES else 60  # so that no float among the bytes is huge
    raw = rng.integers(0, top, (shape[0], shape[1] // block, size), dtype=np.uint8)

    def scale(by: float) -> np.ndarray:
        for at, ratio in HALVES.get(kind, ()):
            raw[:, :, at : at + 2] = np.array([by * ratio], np.float16).view(np.uint8)
        return raw.reshape(shape[0], -1)

    if kind not in HALVES:
        return scale(1)
    spread = gguf.quants.dequantize(scale(1 / 64), kind).std() * 64
    return scale(0.08 / spread)


def write(path: Path, kind: Kind, only: str = "") -> Path:
    """MODEL with random matrices of a type (or just one tensor of it)."""
    plain = MODEL.write_gguf(path.with_suffix(".f32"))
    reader = gguf.GGUFReader(plain)
    writer = gguf.GGUFWriter(path, MODEL.architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for number, tensor in enumerate(reader.tensors):
        if tensor.data.ndim == 1 or (only and tensor.name != only):
            writer.add_tensor(tensor.name, np.asarray(tensor.data))
        else:
            seed = SEED if only else number
            raw = random_rows(kind, tensor.data.shape, seed)
            writer.add_tensor(tensor.name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_a_quantised_file_says_what_llama_cpp_reads_in_it(kind: Kind, tmp_path: Path) -> None:
    """llama.cpp on the same bytes; it rounds its activations to 8 bits, we do not."""
    source = write(tmp_path / "tiny.gguf", kind)
    export(source, tmp_path / "out", Form("fp32", "onnx"), hide_bar=True, with_golden=False)
    prompt, logits = an_answer(Driver(tmp_path / "out", context=64, threads=1))
    ours = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    theirs = LlamaCpp(source, context=64, threads=1).logprobs(prompt, 200)
    told = np.array(list(theirs.values()))
    assert len(told) == 200
    assert (ours[list(theirs)] - told).std() < 0.1 * told.std()


def an_answer(driver: Driver) -> tuple[list[int], np.ndarray]:
    """A prompt clearly answered with a letter: of an end or half a character llama.cpp tells
    no odds."""
    for last in range(3, 200):
        driver.reset()
        logits = driver.feed([*PROMPT, last]).astype(np.float64)
        second, first = np.argsort(logits)[-2:]
        letter = first > 2 and MODEL.vocabulary()[first].isascii()
        if letter and logits[first] > logits[second] + 0.3:
            return [*PROMPT, last], logits
    raise AssertionError("no prompt is answered with a letter")


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.F32}), ids=lambda kind: kind.name)
def test_every_type_is_read_or_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    """What the gguf package takes apart is its numbers exactly; the rest is named."""
    name = "blk.1.ffn_up.weight"
    source = open_source(write(tmp_path / "tiny.gguf", kind, only=name))
    if kind in UNREADABLE:
        with pytest.raises(ExportError, match=rf"unsupported quantisation {kind.name} of {name}"):
            source.rows("1.up", 0, 1)
        return
    raw = random_rows(kind, (256, 256), SEED)
    np.testing.assert_array_equal(source.matrix("1.up"), gguf.quants.dequantize(raw, kind))
