"""What cannot be exported is refused in words, with exit code 2, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tiny import Tiny

from edged.export import ExportError
from edged.export.run import main, open_source
from edged.export.weights import check_tensors


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def run(source: Path, out: Path, *more: str) -> int:
    return main(["--model", str(source), "--out", str(out), "--progress", "off", *more])


def missing(tmp: Path) -> Path:
    return tmp / "nowhere.gguf"


def not_gguf(tmp: Path) -> Path:
    path = tmp / "text.gguf"
    path.write_text("hello, this is no model " * 10)
    return path


def empty_file(tmp: Path) -> Path:
    path = tmp / "empty.gguf"
    path.touch()
    return path


def cut_gguf(tmp: Path) -> Path:
    path = Tiny().write_gguf(tmp / "cut.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    return path


def unknown_gguf(tmp: Path) -> Path:
    return Tiny("gemma9").write_gguf(tmp / "gemma.gguf")


def lacking_gguf(tmp: Path) -> Path:
    return Tiny().write_gguf(tmp / "lacking.gguf", drop="blk.1.ffn_up.weight")


def unknown_hf(tmp: Path) -> Path:
    return Tiny().write_hf(tmp / "hf", model_type="mamba")


def lacking_hf(tmp: Path) -> Path:
    folder = Tiny().write_hf(tmp / "hf")
    tensors = Tiny().tensors()
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder


def no_weights(tmp: Path) -> Path:
    folder = Tiny().write_hf(tmp / "hf")
    (folder / "model.safetensors").unlink()
    return folder


def no_config(tmp: Path) -> Path:
    (tmp / "hf").mkdir()
    return tmp / "hf"


def cut_hf(tmp: Path) -> Path:
    folder = Tiny().write_hf(tmp / "hf")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    return folder


def eight_bit_floats(tmp: Path) -> Path:
    return Tiny().write_hf(tmp / "hf", ml_dtypes.float8_e4m3fn)


def packed_hf(tmp: Path) -> Path:
    return Tiny().write_hf(tmp / "hf", quantization_config={"quant_method": "bitsandbytes"})


def yarn(tmp: Path) -> Path:
    return Tiny().write_hf(tmp / "hf", rope_scaling={"rope_type": "yarn", "factor": 4.0})


def gelu(tmp: Path) -> Path:
    return Tiny().write_hf(tmp / "hf", hidden_act="gelu")


def impossible_sizes(tmp: Path) -> Path:
    return Tiny().write_hf(tmp / "hf", num_key_value_heads=3)


def wrong_sizes(tmp: Path) -> Path:
    return Tiny().write_hf(tmp / "hf", intermediate_size=128)


def other_rope_type(tmp: Path) -> Path:
    return Tiny().write_hf(tmp / "hf", rope_scaling="linear")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (missing, "does not exist"),
        (not_gguf, "as GGUF"),
        (empty_file, "as GGUF"),
        (cut_gguf, "as GGUF"),
        (unknown_gguf, "unknown architecture 'gemma9'; edged exports llama"),
        (lacking_gguf, "tensor blk.1.ffn_up.weight is missing"),
        (unknown_hf, "unknown architecture 'mamba'"),
        (lacking_hf, "tensor model.layers.0.mlp.down_proj.weight is missing"),
        (no_weights, "model.safetensors is missing"),
        (no_config, "config.json"),
        (cut_hf, "a tensor lies beyond its end; download it again"),
        (eight_bit_floats, "unsupported quantisation F8_E4M3"),
        (packed_hf, "quantization bitsandbytes is not supported"),
        (yarn, "rope scaling 'yarn' is not supported"),
        (gelu, "activation 'gelu' is not supported"),
        (impossible_sizes, "do not fit together"),
        (wrong_sizes, "model.layers.0.mlp.gate_proj.weight is [96, 64]"),
        (other_rope_type, "rope_scaling 'linear' in config.json is not an object"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_bad_sources_are_refused_in_words(
    source: Callable[[Path], Path],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, one line that names what is wrong, no directory, no leftovers."""
    out = tmp_path / "out" / "model"
    assert run(source(tmp_path), out) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("edged export: ")
    assert words in said[0]
    assert not out.exists()
    assert not out.parent.exists() or not list(out.parent.iterdir())


def test_a_full_disk_is_noticed_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says how much is needed, how much is there, and where."""
    source = Tiny().write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 << 20, 95 << 20, 5 << 20))
    assert run(source, tmp_path / "out" / "model") == 3
    assert "not enough disk" in (said := capsys.readouterr().err)
    assert "5 MiB free" in said
    assert not list((tmp_path / "out").iterdir())


def test_fp16_for_the_cpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the option that would do."""
    source = Tiny().write_gguf(tmp_path / "tiny.gguf")
    assert run(source, tmp_path / "out", "--dtype", "fp16") == 2
    assert "--target onnx" in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_never_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody's files at --out stay where they are."""
    source = Tiny().write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    assert run(source, tmp_path / "home") == 2
    assert "is not a model directory" in capsys.readouterr().err
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"


def test_an_older_export_is_replaced_whole(tmp_path: Path) -> None:
    """A second export takes the first one's place and leaves nothing beside it."""
    out = tmp_path / "models" / "tiny"
    assert run(Tiny().write_gguf(tmp_path / "a.gguf"), out) == 0
    (out / "stale").touch()
    assert run(Tiny(layers=1).write_gguf(tmp_path / "b.gguf"), out, "--dtype", "fp32") == 0
    assert {path.name for path in out.iterdir()} == {
        "model.json",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
    }
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]
    assert json.loads((out / "model.json").read_text())["layers"] == 1


def test_the_description_says_what_the_worker_and_the_daemon_need(tmp_path: Path) -> None:
    """model.json: sizes, ids, hashes and versions, from the file and the tokenizer."""
    source = Tiny("qwen3", head_dim=32).write_gguf(tmp_path / "Tiny-Model.Q4_K_M.gguf")
    assert run(source, tmp_path / "out") == 0
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert {key: about[key] for key in ("contract", "version", "graph", "name")} == {
        "contract": "edged-graph",
        "version": 2,
        "graph": "edged-graph-v2-inplace",
        "name": "Tiny-Model",
    }
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "context_tokens")
    assert [about[key] for key in sizes] == [2, 64, 4, 2, 32, 256]
    assert about["vocab"] == about["tokenizer_vocab"] == 261
    assert about["eos_ids"] == [0, 2]
    assert (about["bos_id"], about["add_bos"]) == (1, False)
    assert (about["weights_dtype"], about["cache_dtype"]) == ("auto", "fp32")
    assert about["rope"] == {"theta": 10_000.0, "scaling": "none"}
    assert len(about["source"]["sha256"]) == len(about["tokenizer_sha256"]) == 64


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Tiny("qwen2").write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def good_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Tiny("qwen3").write_hf(tmp_path_factory.mktemp("hf") / "tiny", rope_scaling=None)


def open_or_refuse(source: Path) -> None:
    """Up to where the long work would begin; anything but ExportError is a bug."""
    with contextlib.suppress(ExportError):
        check_tensors(open_source(source))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_gguf_header_is_never_a_trace(good_gguf: Path, data: st.DataObject) -> None:
    """Whatever bytes of a file are changed or missing, it opens or it is refused."""
    content = bytearray(good_gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 6000))
        content[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    damaged = good_gguf.with_name("damaged.gguf")
    damaged.write_bytes(content[:end])
    open_or_refuse(damaged)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_damaged_folder_is_never_a_trace(good_hf: Path, data: st.DataObject) -> None:
    """Whatever config.json or the header of the weights says, it opens or it is refused."""
    damaged = good_hf.with_name("damaged")
    shutil.copytree(good_hf, damaged, dirs_exist_ok=True)
    config = json.loads((good_hf / "config.json").read_text())
    key = data.draw(st.sampled_from([*config, "rope_parameters", "hidden_act"]))
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    config[key] = data.draw(scalars | st.lists(scalars, max_size=2) | st.just({"rope_type": 1}))
    (damaged / "config.json").write_text(json.dumps(config))
    content = bytearray((good_hf / "model.safetensors").read_bytes())
    content[data.draw(st.integers(0, 1500))] = data.draw(st.integers(0, 255))
    (damaged / "model.safetensors").write_bytes(content)
    open_or_refuse(damaged)
