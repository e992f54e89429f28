"""The twin's .om container: what goes in comes out, and what ATC would refuse is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from fakes_twin import GEARS, ROW_BYTES, WIDTH, doubler
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edged.twin import om


def with_external_weights(folder: Path) -> Path:
    """`y = x W` with W in a file of its own."""
    weights = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", WIDTH])
    w = helper.make_tensor("w", TensorProto.FLOAT, weights.shape, weights.tobytes(), raw=True)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="Product")
    graph = helper.make_graph([node], "g", [x], [y], [w])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    path = folder / "model.onnx"
    onnx.save(
        model, str(path), save_as_external_data=True, location="model.onnx.data", size_threshold=0
    )
    return path


def test_header_tells_ports_gears_and_sizes(tmp_path: Path) -> None:
    """Reading a container gives the ports with their symbols, the gears and the byte counts."""
    found = om.read_file(doubler(tmp_path))
    header = found.header
    assert header.inputs == [om.Tensor("x", "float32", ["B", WIDTH])]
    assert header.outputs[0].shape({"B": 4}) == (4, WIDTH)
    assert header.gears == list(GEARS)
    assert header.output_name(0) == "/Twice:0:y"
    assert found.total_bytes == (tmp_path / "doubler.om").stat().st_size


def test_external_weights_are_inside(tmp_path: Path) -> None:
    """The container alone is enough to run the graph: its weights need no second file."""
    source = with_external_weights(tmp_path)
    out = tmp_path / "elsewhere" / "model.om"
    out.parent.mkdir()
    header = om.pack(source, out, GEARS)
    assert header.weight_bytes == WIDTH * ROW_BYTES
    (tmp_path / "model.onnx.data").unlink()
    options = ort.SessionOptions()
    key = "session.model_external_initializers_file_folder_path"
    options.add_session_config_entry(key, str(out.parent))
    graph = om.located_graph(out, om.read_file(out))
    ran = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    (y,) = ran.run(None, {"x": np.ones((2, WIDTH), np.float32)})
    assert (y == np.arange(64, dtype=np.float32).reshape(WIDTH, WIDTH).sum(0)).all()


def test_names_can_be_kept(tmp_path: Path) -> None:
    """Without ATC's rewriting the outputs keep their ONNX names."""
    doubler(tmp_path)
    out = tmp_path / "plain.om"
    om.pack(tmp_path / "doubler.onnx", out, GEARS, atc_names=False)
    assert om.read_file(out).header.output_name(0) == "y"


@pytest.mark.parametrize(
    ("gears", "says"),
    [
        ([], "open sizes"),
        ([{"B": 1}], "2 to 100"),
        ([{"B": n} for n in range(1, 102)], "2 to 100"),
        ([{"B": 1}, {"B": 1}], "the same"),
        ([{"B": 1}, {"T": 2}], "says nothing"),
    ],
)
def test_gears_atc_would_refuse(tmp_path: Path, gears: list[om.Gear], says: str) -> None:
    """None where sizes are open, one, over a hundred, twice the same, or incomplete ones."""
    doubler(tmp_path)
    with pytest.raises(om.OmError, match=says):
        om.pack(tmp_path / "doubler.onnx", tmp_path / "bad.om", gears)
    assert not (tmp_path / "bad.om").exists()


def test_more_than_128_dims_are_refused(tmp_path: Path) -> None:
    """The library takes 128 dims over all inputs, so a graph with more cannot have gears."""
    inputs = [helper.make_tensor_value_info(f"i{n}", TensorProto.FLOAT, ["B"]) for n in range(129)]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B"])
    node = helper.make_node("Add", ["i0", "i1"], ["y"])
    graph = helper.make_graph([node], "g", inputs, [y])
    onnx.save(helper.make_model(graph), str(tmp_path / "wide.onnx"))
    with pytest.raises(om.OmError, match="129 dims"):
        om.pack(tmp_path / "wide.onnx", tmp_path / "wide.om", GEARS)


@pytest.mark.parametrize(
    "about",
    [
        '{"graph": "edged-graph-v2", "weights_dtype": "int8"}',
        '{"graph": "edged-graph-v2-inplace", "weights_dtype": "fp32"}',
    ],
)
def test_exports_for_the_cpu_are_refused(tmp_path: Path, about: str) -> None:
    """A model directory with blocks of weights or onnxruntime's own operators says which export
    makes an .om."""
    (tmp_path / "model.json").write_text(about)
    with pytest.raises(om.OmError, match="--target onnx --dtype fp16"):
        om.pack_decoder(tmp_path, tmp_path / "x.om", [(1, 1, 64), (2, 1, 64)])


def test_foreign_and_damaged_files_are_named(tmp_path: Path) -> None:
    """No magic, a cut header, a damaged header and a cut file each say what to do."""
    whole = doubler(tmp_path).read_bytes()
    lengths = struct.unpack_from("<QQQ", whole, 16)
    header_at = 16 + 24
    damaged = whole[:header_at] + b"#" * lengths[0] + whole[header_at + lengths[0] :]
    for data, says in (
        (b"\x00" * 100, "magic"),
        (whole[: header_at + 10], "cut off"),
        (damaged, "damaged"),
        (whole[:-1], "of [0-9]+ bytes"),
    ):
        (tmp_path / "bad.om").write_bytes(data)
        with pytest.raises(om.OmError, match=says):
            om.read_file(tmp_path / "bad.om")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_noise_never_crashes_the_reader(data: bytes, available: int) -> None:
    """Any bytes, with or without the right magic, give OmError and nothing else."""
    for prefix in (b"", b"edged-twin-om-1\n"):
        with pytest.raises(om.OmError):
            om.read(prefix + data, available)
