"""GPTQ and AWQ checkpoints export as the numbers they mean; other packings are refused by name."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Driver
from safetensors.numpy import load_file, save_file
from tiny import Tiny

from edged.export import ExportError
from edged.export.run import main, open_source
from edged.export.weights import check_tensors

MODEL = Tiny("qwen2", tied=False, seed=11)
PROMPT = [1, 40, 77, 120, 31, 9, 200]
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each field of a word, the lowest bits first
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}


def pack(values: np.ndarray, bits: int, order: tuple[int, ...]) -> np.ndarray:
    """Integers [R, C] -> int32 [R, C * bits / 32], field i of a word being column order[i]."""
    fields = 32 // bits
    words = np.zeros((values.shape[0], values.shape[1] // fields), np.uint32)
    for column in range(words.shape[1]):
        for i in range(fields):
            field = values[:, column * fields + order[i]].astype(np.uint32)
            words[:, column] |= field << np.uint32(bits * i)
    return words.view(np.int32)


def quantise(weight: np.ndarray, bits: int, groups: np.ndarray) -> tuple[np.ndarray, ...]:
    """[N, K] -> integers [K, N], zero points and scales [groups, N], and what they mean [N, K]."""
    count, top = int(groups.max()) + 1, (1 << bits) - 1
    across = weight.T
    low = np.stack([across[groups == g].min(axis=0) for g in range(count)])
    high = np.stack([across[groups == g].max(axis=0) for g in range(count)])
    scales = ((high - low) / top).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales), 1, top)
    wide = scales.astype(np.float32)
    q = np.clip(np.rint(across / wide[groups] + zeros[groups]), 0, top)
    meant = ((q - zeros[groups]) * wide[groups]).T
    return q, zeros, scales, np.ascontiguousarray(meant, dtype=np.float32)


def packed_matrix(
    weight: np.ndarray, config: dict[str, Any], rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors a matrix becomes, and the matrix they mean."""
    bits, plain = config["bits"], tuple(range(8))
    groups = np.arange(weight.shape[1]) // GROUP
    if config.get("desc_act"):
        groups = rng.permutation(groups)
    q, zeros, scales, meant = quantise(weight, bits, groups)
    if config["quant_method"] == "awq":
        packed = {"qweight": pack(q, 4, AWQ_ORDER), "qzeros": pack(zeros, 4, AWQ_ORDER)}
    else:
        offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        words = np.ascontiguousarray(pack(q.T, bits, plain).T)
        packed = {"qweight": words, "qzeros": pack(zeros - offset, bits, plain)}
        packed["g_idx"] = groups.astype(np.int32)
    return {**packed, "scales": scales}, meant


def write(tmp: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    """A packed folder, and a float32 one of what it means."""
    packed = MODEL.write_hf(tmp / "packed", quantization_config=config)
    meant = MODEL.write_hf(tmp / "meant")
    tensors = load_file(meant / "model.safetensors")
    rng = np.random.default_rng(0)
    stored = {}
    for name in list(tensors):
        if name.endswith("_proj.weight"):
            parts, tensors[name] = packed_matrix(tensors[name], config, rng)
            stored |= {name.replace("weight", part): values for part, values in parts.items()}
        else:
            stored[name] = tensors[name]
    save_file(stored, packed / "model.safetensors")
    save_file(tensors, meant / "model.safetensors")
    return packed, meant


def export(source: Path, out: Path) -> dict[str, Any]:
    arguments = ["--model", str(source), "--out", str(out), "--progress", "off", "--no-golden"]
    assert main([*arguments, "--dtype", "fp32"]) == 0
    about: dict[str, Any] = json.loads((out / "model.json").read_text())
    return about


@pytest.mark.parametrize(
    "config",
    [
        GPTQ,
        GPTQ | {"bits": 8},
        GPTQ | {"desc_act": True},
        GPTQ | {"checkpoint_format": "gptq_v2"},
        AWQ,
    ],
    ids=["gptq", "gptq, 8 bits", "gptq, groups in any order", "gptq_v2", "awq"],
)
def test_a_packed_checkpoint_is_the_float_one_it_means(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """The logits of the unpacked weights to the last bit; model.json tells where they come from."""
    packed, meant = write(tmp_path, config)
    about = export(packed, tmp_path / "a")
    assert about["source"]["stored_as"] == f"{config['quant_method']} {config['bits']} bits"
    assert export(meant, tmp_path / "b")["source"]["stored_as"] == "F32"
    said = Driver(tmp_path / "a", threads=1).feed(PROMPT)
    np.testing.assert_array_equal(said, Driver(tmp_path / "b", threads=1).feed(PROMPT))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quantization bitsandbytes is not",
        ),
        ({"quant_method": "fp8"}, "quantization fp8 is not"),
        ({"quant_method": "compressed-tensors"}, "quantization compressed-tensors is not"),
        (GPTQ | {"bits": 3}, "quantization gptq, 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq, 4 bits, marlin, is not"),
        (AWQ | {"version": "gemv"}, "awq, 4 bits, gemv, is not"),
        ("awq", "quantization_config in config.json is not an object"),
    ],
)
def test_other_packings_are_refused_by_name(
    config: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the method and what to take instead."""
    source = MODEL.write_hf(tmp_path / "hf", quantization_config=config)
    assert main(["--model", str(source), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "unquantised folder or a GGUF file" in said or config == "awq"


@pytest.mark.parametrize("missing", ["scales", "qzeros", "qweight"])
def test_a_part_that_is_missing_is_named(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A packed matrix lacks one of its tensors: exit code 2 and the tensor's name."""
    packed, _ = write(tmp_path, GPTQ)
    tensors = load_file(packed / "model.safetensors")
    del tensors[f"model.layers.1.mlp.up_proj.{missing}"]
    save_file(tensors, packed / "model.safetensors")
    assert main(["--model", str(packed), "--out", str(tmp_path / "out")]) == 2
    name = "weight" if missing == "qweight" else missing
    assert f"tensor model.layers.1.mlp.up_proj.{name} is missing" in capsys.readouterr().err


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("packed"), GPTQ)[0]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_damage_is_never_a_trace(good: Path, data: st.DataObject) -> None:
    """Whatever the header, the sizes or the group numbers say, it opens or it is refused."""
    damaged = good.with_name("damaged")
    shutil.copytree(good, damaged, dirs_exist_ok=True)
    tensors = load_file(good / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(n for n in tensors if not n.endswith("weight"))))
    found = tensors[name]
    change = data.draw(st.sampled_from(["cut", "flat", "one", "empty", "huge", "floats"]))
    tensors[name] = {
        "cut": found[:-1],
        "flat": found.reshape(-1),
        "one": found[..., None],
        "empty": found[:0],
        "huge": np.full_like(found, 30_000),
        "floats": found.astype(np.float32),
    }[change]
    save_file(
        {n: np.ascontiguousarray(v) for n, v in tensors.items()}, damaged / "model.safetensors"
    )
    with contextlib.suppress(ExportError):
        check_tensors(open_source(damaged))
