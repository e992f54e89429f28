"""What an export says about its own numbers: the golden prompt, and weights fp16 cannot hold."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import Driver
from tiny import Tiny

from edged.export import golden
from edged.export.run import main

HUGE = "model.layers.0.mlp.down_proj.weight"
GEARS = ("--batch-gears", "1,2", "--context-gears", "128", "--prefill-chunk", "1")


class Loud(Tiny):
    """A tiny model with two weights fp16 has no number for, and some it takes for 0."""

    def tensors(self) -> dict[str, np.ndarray]:
        found = super().tensors()
        found[HUGE][3, 5] = 1e6
        found[HUGE][0, 0] = -7e4
        found["model.layers.1.mlp.up_proj.weight"][:2, :10] = 1e-9
        return found


def run(source: Path, out: Path, *more: str) -> dict[str, Any]:
    """The model.json of an export."""
    arguments = ["--model", str(source), "--out", str(out), "--progress", "off", *more]
    assert main(arguments) == 0
    about: dict[str, Any] = json.loads((out / "model.json").read_text())
    return about


@pytest.mark.parametrize(
    ("target", "dtype"), [("cpu", "auto"), ("cpu", "fp32"), ("onnx", "fp16"), ("onnx", "fp32")]
)
def test_the_golden_answer_is_the_graphs_own(target: str, dtype: str, tmp_path: Path) -> None:
    """Another driver of the exported graph, fed the prompt, says the same tokens as likely."""
    source = Tiny(seed=3).write_gguf(tmp_path / "tiny.gguf")
    about = run(source, tmp_path / "out", "--target", target, "--dtype", dtype)
    told = about["golden"]
    driver = Driver(tmp_path / "out", threads=1)
    logits = driver.feed(told["prompt_ids"])
    assert len(told["tokens"]) == len(told["top_logprobs"]) == 8
    for token, top in zip(told["tokens"], told["top_logprobs"], strict=True):
        logprobs = logits - logits.max()
        logprobs = logprobs - np.log(np.exp(logprobs.astype(np.float64)).sum())
        assert token == int(logits.argmax()) == top[0][0]
        assert [i for i, _ in top] == list(np.argsort(-logits, kind="stable")[:8])
        np.testing.assert_allclose([p for _, p in top], logprobs[[i for i, _ in top]], atol=1e-2)
        logits = driver.feed([token])


def test_the_golden_prompt_is_the_sentence_in_the_models_tokens(tmp_path: Path) -> None:
    """Decoded it is the text; a model that wants a beginning of sequence gets one."""
    plain = run(Tiny().write_hf(tmp_path / "hf"), tmp_path / "a")
    vocabulary = Tiny().vocabulary()
    text = "".join(vocabulary[i] for i in plain["golden"]["prompt_ids"]).replace("Ġ", " ")
    assert text == golden.TEXT
    config = tmp_path / "hf" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"add_bos_token": True}))
    begun = run(tmp_path / "hf", tmp_path / "b")
    assert begun["golden"]["prompt_ids"] == [1, *plain["golden"]["prompt_ids"]]


def test_a_twins_om_keeps_the_answer_of_the_graph_in_it(tmp_path: Path) -> None:
    """Computed before the graph is packed away, the same as that of the plain graph."""
    source = Tiny().write_gguf(tmp_path / "tiny.gguf")
    om = run(source, tmp_path / "om", "--target", "twin", "--dtype", "fp32", *GEARS)
    plain = run(source, tmp_path / "plain", "--target", "onnx", "--dtype", "fp32")
    assert not list((tmp_path / "om").glob("model.onnx*"))
    assert om["golden"]["tokens"] == plain["golden"]["tokens"]


def without_onnxruntime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refuse(name: str, *more: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)


def without_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4096 kB\nMemAvailable:   2048 kB\n")
    monkeypatch.setattr(golden, "_MEMINFO", meminfo)


def without_a_share_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group = tmp_path / "groups" / "system.slice" / "edged.service"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{3 << 20}\n")
    (tmp_path / "cgroup").write_text("0::/system.slice/edged.service\n")
    monkeypatch.setattr(golden, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(golden, "_CGROUPS", tmp_path / "groups")


def test_no_golden_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--no-golden leaves it out without a word."""
    source = Tiny().write_gguf(tmp_path / "tiny.gguf")
    assert run(source, tmp_path / "out", "--no-golden")["golden"] is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_onnxruntime, "onnxruntime is not installed"),
        (without_memory, "MiB of memory, 2 MiB are available"),
        (without_a_share_of_memory, "MiB of memory, 3 MiB are available"),
    ],
)
def test_where_the_graph_cannot_run_the_export_still_succeeds(
    spoil: Any,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line tells why there is no golden prompt."""
    source = Tiny().write_gguf(tmp_path / "tiny.gguf")
    spoil(monkeypatch, tmp_path)
    assert run(source, tmp_path / "out")["golden"] is None
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "no golden prompt" in said[0]
    assert words in said[0]


def test_a_context_too_short_for_the_prompt_has_no_golden_answer(tmp_path: Path) -> None:
    """A model of 32 tokens of context exports all the same."""
    assert run(Tiny(context=32).write_hf(tmp_path / "hf"), tmp_path / "out")["golden"] is None


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_weights_beyond_fp16_are_named(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One warning with the source's own tensor name, kept in model.json; the graph stays finite."""
    model = Loud()
    if kind == "file":
        source, name = model.write_gguf(tmp_path / "loud.gguf"), "blk.0.ffn_down.weight"
    else:
        source, name = model.write_hf(tmp_path / "hf"), HUGE
    about = run(source, tmp_path / "out", "--target", "onnx", "--dtype", "fp16", "--no-golden")
    assert about["fp16_overflow"] == [name]
    warnings, flushed = capsys.readouterr().err.strip().splitlines()
    assert f"{name} leaves the fp16 range: 2 values beyond 65504 (largest 1e+06)" in warnings
    assert "20 weights are too small for fp16 and became 0" in flushed
    stored = np.fromfile(tmp_path / "out" / "model.onnx.data", np.float16)
    assert np.isfinite(stored).all()
    assert (np.abs(stored) == 65504).sum() == 2


@pytest.mark.parametrize(
    "arguments", [("--dtype", "fp32"), ("--target", "onnx", "--dtype", "int8")]
)
def test_types_with_room_warn_of_nothing(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights in float32 or in blocks with float32 scales are no loss."""
    source = Loud().write_gguf(tmp_path / "loud.gguf")
    assert run(source, tmp_path / "out", "--no-golden", *arguments)["fp16_overflow"] == []
    assert capsys.readouterr().err == ""
