"""`edged export --target om`: ATC's command fits the graph, and its run ends in words."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Tiny

from edged.export import ExportError, atc, traffic
from edged.export.form import Form, shape_gears
from edged.export.hyper import Hyper, Rope
from edged.export.run import main

GEARS = ("--batch-gears", "1,2", "--context-gears", "64,128", "--prefill-chunk", "16")
SHAPES = shape_gears((1, 2), (64, 128), 16)

# Records where and how it was run, talks as ATC does, then makes the file or fails.
FAKE_ATC = """#!/usr/bin/env python3
import json, os, sys
about = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "cores": os.environ["MAX_COMPILE_CORE_NUMBER"]}}
json.dump(about, open({record!r}, "w"))
print("ATC start working now, please wait for a moment.")
open("kernel_meta.json", "w").close()
if {fails}:
    print("E10001: Value [Ascend310B9] for parameter [--soc_version] is invalid.", file=sys.stderr)
    sys.exit(255)
output = next(a for a in sys.argv if a.startswith("--output=")).removeprefix("--output=")
open(output + ".om", "wb").write(b"om")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Tiny().write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def no_atc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def fake_atc(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> Path:
    """Puts the fake on PATH; the file it writes its arguments to."""
    (folder / "bin").mkdir()
    path, record = folder / "bin" / "atc", folder / "record.json"
    path.write_text(FAKE_ATC.format(record=str(record), fails=fails))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("MAX_COMPILE_CORE_NUMBER", raising=False)
    return record


def run(source: Path, out: Path, *more: str) -> int:
    arguments = ["--model", str(source), "--out", str(out), "--progress", "off", *GEARS]
    return main([*arguments, "--target", "om", *more])


def hyper(layers: int = 2, kv_heads: int = 2, head_dim: int = 16) -> Hyper:
    sizes = {"hidden": 64, "heads": 4, "ffn": 96, "vocab": 261, "context_tokens": 256}
    return Hyper(
        "llama", "tiny", layers, kv_heads=kv_heads, head_dim=head_dim, norm_eps=1e-5,
        rope=Rope(10_000.0), tied=True, **sizes,
    )  # fmt: skip


def options(words: list[str]) -> dict[str, str]:
    """--name=value words as a mapping."""
    return dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_command_fits_the_written_graph(
    dtype: str, source: Path, tmp_path: Path, no_atc: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names, order and open sizes are the graph's; each gear has a value for every -1."""
    assert run(source, tmp_path / "out", "--dtype", dtype) == 0
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    found = [
        (v.name, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim])
        for v in graph.input
    ]
    said = options(atc.command(tmp_path, hyper(), Form(dtype, "om", SHAPES)))
    assert said["input_shape"] == ";".join(
        name + ":" + ",".join(str(d) if isinstance(d, int) else "-1" for d in dims)
        for name, dims in found
    )
    open_dims = [d for _, dims in found for d in dims if isinstance(d, str)]
    groups = said["dynamic_dims"].split(";")
    assert len(groups) == len(SHAPES) == 6
    for (batch, tokens, context), group in zip(SHAPES, groups, strict=True):
        values = {"B": batch, "T": tokens, "S": context, "N": batch * 2 * context * 16}
        assert group == ",".join(str(values[d]) for d in open_dims)
        assert group.count(",") + 1 == said["input_shape"].count("-1")


def test_the_command_keeps_the_graphs_precision() -> None:
    """ONNX in, ND layout, origin precision, the asked chip, no .om ending on the output."""
    words = atc.command(Path("/m"), hyper(), Form("fp16", "om", SHAPES, "Ascend310P3"))
    said = options(words)
    assert words[0] == "atc"
    assert (said["framework"], said["input_format"]) == ("5", "ND")
    assert (said["model"], said["output"]) == ("/m/model.onnx", "/m/model")
    assert (said["soc_version"], said["precision_mode_v2"]) == ("Ascend310P3", "origin")


def test_atc_is_run_where_it_is_installed(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The real child gets the printed arguments, its words pass through, its litter is gone."""
    record = fake_atc(tmp_path, monkeypatch)
    out = tmp_path / "out"
    assert run(source, out, "--soc", "Ascend310B1", "--name", "pump") == 0
    said = capsys.readouterr()
    about = json.loads(record.read_text())
    got, printed = options(about["argv"]), options(said.out.replace("'", "").split())
    assert printed["model"] == str(out / "model.onnx")
    for name in printed.keys() - {"model", "output"}:
        assert printed[name] == got[name]
    assert got["soc_version"] == "Ascend310B1"
    assert about["cores"] == "1"
    assert "ATC start working now" in said.err
    assert not Path(about["cwd"]).exists()
    assert {path.name for path in out.iterdir()} == {
        *("model.json", "model.om", "model.onnx", "model.onnx.data", "tokenizer.json")
    }
    described = json.loads((out / "model.json").read_text())
    assert (described["soc"], described["name"]) == ("Ascend310B1", "pump")
    assert described["gears"] == [list(shape) for shape in SHAPES]
    assert (described["weights_dtype"], described["graph"]) == ("fp16", "edged-graph-v2")


def test_a_failed_atc_ends_with_its_last_line(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, the reason in ATC's own words, no half-made folder."""
    fake_atc(tmp_path, monkeypatch, fails=True)
    assert run(source, tmp_path / "out", "--no-golden") == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("edged export: atc failed with code 255: E10001: Value [Ascend310B9]")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_without_atc_a_script_does_it_elsewhere(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """build_om.sh, moved with its folder to a machine with ATC, makes model.om there."""
    with monkeypatch.context() as here:
        here.setenv("PATH", str(tmp_path / "nothing"))
        assert run(source, tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert "build host with CANN >= 8.0" in said
    assert "build_om.sh" in said
    assert not (tmp_path / "out" / "model.om").exists()
    moved = (tmp_path / "out").rename(tmp_path / "build host")
    record = fake_atc(tmp_path, monkeypatch)
    subprocess.run([moved / "build_om.sh"], check=True, timeout=60, capture_output=True, cwd="/")
    assert (moved / "model.om").read_bytes() == b"om"
    about = json.loads(record.read_text())
    assert about["argv"] == atc.command(Path(), hyper(), Form("fp16", "om", SHAPES))[1:]
    assert about["cores"] == "1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch-gears", "1", "--context-gears", "64", "--prefill-chunk", "1"), "1 shape gears"),
        (("--batch-gears", ",".join(map(str, range(1, 60)))), "120 shape gears; an .om takes 2"),
        (("--soc", "auto"), "names no chip"),
        (("--soc", "310B4; rm"), "names no chip"),
        (("--dtype", "int8"), "use --dtype fp16 or fp32"),
    ],
)
def test_what_no_om_takes_is_refused_beforehand(
    arguments: tuple[str, ...],
    words: str,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line that names the option, before any weight is written."""
    assert run(source, tmp_path / "out", *arguments) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert words in said[0]
    assert not (tmp_path / "out").exists()


def test_the_librarys_limit_of_dims_is_named() -> None:
    """60 layers fill the 128 dims exactly; one more is refused with the largest that fits."""
    atc.check_gears(hyper(layers=60), SHAPES)
    with pytest.raises(ExportError, match=r"130 dims in all.*61 layers.*at most 60"):
        atc.check_gears(hyper(layers=61), SHAPES)


@settings(deadline=None, max_examples=50)
@given(
    weights=st.integers(1, 1 << 34),
    row=st.integers(1, 1 << 20),
    batch=st.integers(2, 64),
    context=st.integers(1, 1 << 15),
)
def test_batching_gains_but_never_more_than_the_batch(
    weights: int, row: int, batch: int, context: int
) -> None:
    """Reading the weights once for all is all there is to gain."""
    assert traffic.batch_gain(weights, row, 1, context) == 1
    assert 1 < traffic.batch_gain(weights, row, batch, context) <= batch


def test_predicted_traffic_is_weights_and_cache() -> None:
    """SmolLM2-135M in fp16: 22.5 KiB per token and layer set, as published for its sizes."""
    smol = hyper(layers=30, kv_heads=3, head_dim=64)
    form = Form("fp16", "om", ((1, 1, 512), (8, 1, 512)))
    row = traffic.cache_row_bytes(smol, form)
    assert row == 22.5 * 1024
    assert traffic.step_bytes(269_000_000, row, 8, 512) == 269_000_000 + 8 * 512 * 23_040
    lines = traffic.table(269_000_000, row, form)
    assert len(lines) == 3
    assert lines[1].split() == ["1", "1", "512", "267.8", "1.00"]
    assert lines[2].split() == ["8", "1", "512", "346.5", "6.18"]


@pytest.mark.parametrize("target", ["om", "twin"])
def test_the_table_is_shown(
    target: str, source: Path, tmp_path: Path, no_atc: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line per gear on stderr, for the compiler's and the twin's .om alike."""
    assert run(source, tmp_path / "out", "--target", target) == 0
    lines = capsys.readouterr().err.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == ["batch"])
    shown = [tuple(int(x) for x in line.split()[:3]) for line in lines[start + 1 : start + 7]]
    assert tuple(shown) == SHAPES
