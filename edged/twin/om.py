"""The twin's `.om`: magic, JSON header, ONNX graph and weights in one file.

Stands in for what ATC makes of the same graph: fixed shape gears, one extra input, rewritten
output names. Never runs it (acl/model.py does), never opens an `.om` of a real board.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edged.errors import EdgedError

SUFFIX = ".om"
PLAIN_GRAPH = "edged-graph-v2"
_MAGIC = b"edged-twin-om-1\n"
_LENGTHS = struct.Struct("<QQQ")  # header, graph, weights
_ALIGNMENT_BYTES = 4096  # a page: onnxruntime maps the weights
_MAX_HEADER_BYTES = 1 << 24
_WEIGHTS_NAME = "weights"
MAX_GEARS = 100
MAX_DIMS = 128

Gear = dict[str, int]  # symbol -> size, for every symbolic axis of the graph


class OmError(EdgedError):
    """Not a twin's .om, or a graph that cannot become one."""


class Tensor(msgspec.Struct, frozen=True):
    """dims: sizes and symbols, as in the graph. dtype: NumPy's name."""

    name: str
    dtype: str
    dims: list[int | str]

    def shape(self, gear: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(gear[d] if isinstance(d, str) else d for d in self.dims)


class Workload(msgspec.Struct, frozen=True):
    """What the board's time model needs to know. batch, tokens, context: symbols of the gears."""

    name: str = "graph"
    kv_bytes_per_token: float = 0.0
    flop_per_token: float = 0.0
    batch: str = "B"
    tokens: str = "T"
    context: str = "S"


class Header(msgspec.Struct, frozen=True):
    """gears: empty = static shapes. producers: nodes of the outputs, empty = names are kept."""

    soc: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    gears: list[Gear]
    producers: list[str]
    weight_bytes: int
    work_bytes: int
    workload: Workload

    def output_name(self, index: int) -> str:
        """As a loaded model shows it."""
        name = self.outputs[index].name
        return f"/{self.producers[index]}:0:{name}" if self.producers else name


@dataclass(frozen=True)
class OmFile:
    """The header and where the parts lie in the file."""

    header: Header
    graph_at: int
    graph_bytes: int
    weights_at: int
    weights_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_at + self.weights_bytes


def read(data: bytes | memoryview, available: int) -> OmFile:
    """Parse the start of a container; `available`: size of the whole. Raises OmError."""
    start = len(_MAGIC) + _LENGTHS.size
    if len(data) < start or bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise OmError("not a twin's .om: the magic is missing; run `edged export --target twin`")
    header_bytes, graph_bytes, weights_bytes = _LENGTHS.unpack_from(data, len(_MAGIC))
    if header_bytes > _MAX_HEADER_BYTES or len(data) < start + header_bytes:
        raise OmError("the .om's header is cut off; run `edged export --target twin` again")
    try:
        header = msgspec.json.decode(bytes(data[start : start + header_bytes]), type=Header)
    except msgspec.DecodeError as error:
        raise OmError(f"the .om's header is damaged: {error}; export it again") from None
    graph_at = start + header_bytes
    weights_at = _aligned(graph_at + graph_bytes)
    found = OmFile(header, graph_at, graph_bytes, weights_at, weights_bytes)
    if available < found.total_bytes:
        raise OmError(
            f"the .om holds {available} of {found.total_bytes} bytes; copy or export it again"
        )
    return found


def read_file(path: Path) -> OmFile:
    """Raises OmError, OSError."""
    with path.open("rb") as file:
        head = file.read(len(_MAGIC) + _LENGTHS.size + _MAX_HEADER_BYTES)
        return read(head, os.fstat(file.fileno()).st_size)


def located_graph(path: Path, om: OmFile) -> bytes:
    """The ONNX model with its external weights pointing into `path` itself."""
    import onnx

    with path.open("rb") as file:
        file.seek(om.graph_at)
        model = onnx.load_model_from_string(file.read(om.graph_bytes))
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = path.name
            elif entry.key == "offset":
                entry.value = str(int(entry.value) + om.weights_at)
    return bytes(model.SerializeToString())


# --- building ------------------------------------------------------------------------------------


def pack(
    graph: Path,
    out: Path,
    gears: Sequence[Gear],
    *,
    soc: str = "Ascend310B4",
    work_bytes: int = 1 << 20,
    workload: Workload | None = None,
    atc_names: bool = True,
) -> Header:
    """Write any ONNX file (and its one external data file, if it has one) as a container.

    atc_names: outputs are called "<producer>:0:<name>" as after ATC. Raises OmError where ATC
    would refuse the gears.
    """
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    source = _external_file(model, graph)
    inputs = [_tensor(v) for v in model.graph.input]
    outputs = [_tensor(v) for v in model.graph.output]
    _check_gears(inputs, outputs, gears)
    made_by = {name: node.name for node in model.graph.node for name in node.output}
    inline = sum(len(t.raw_data) for t in model.graph.initializer)
    weights_bytes = source.stat().st_size if source else 0
    header = Header(
        soc=soc,
        inputs=inputs,
        outputs=outputs,
        gears=list(gears),
        producers=[made_by.get(t.name, "") for t in outputs] if atc_names else [],
        weight_bytes=inline + weights_bytes,
        work_bytes=work_bytes,
        workload=workload or Workload(),
    )
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        _write(temporary, header, model.SerializeToString(), source)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return header


def pack_decoder(
    folder: Path, out: Path, shapes: Sequence[tuple[int, int, int]], *, soc: str = "Ascend310B4"
) -> Header:
    """An exported model directory (edged-graph v2, plain operators) -> .om.

    shapes: the (batch, tokens, context) gears. Raises OmError, OSError.
    """
    about: dict[str, Any] = msgspec.json.decode((folder / "model.json").read_bytes())
    if about.get("graph") != PLAIN_GRAPH or about.get("weights_dtype") not in ("fp16", "fp32"):
        raise OmError(
            f"{folder} is {about.get('graph')} with {about.get('weights_dtype')} weights; an .om "
            "is made of plain operators: export with --target onnx --dtype fp16 (or fp32)"
        )
    heads, size = about["kv_heads"], about["head_dim"]
    gears = [{"B": b, "T": t, "S": s, "N": b * heads * s * size} for b, t, s in shapes]
    item = 2 if about["cache_dtype"] == "fp16" else 4
    kv_bytes = 2 * about["layers"] * heads * size * item
    graph = folder / "model.onnx"
    data = folder / "model.onnx.data"
    parameters = (data.stat().st_size if data.exists() else graph.stat().st_size) / item
    workload = Workload(about["name"], float(kv_bytes), 2.0 * parameters)
    work = max(_activation_bytes(about, *shape) for shape in shapes)
    return pack(graph, out, gears, soc=soc, work_bytes=work, workload=workload)


def _activation_bytes(about: Mapping[str, Any], batch: int, tokens: int, context: int) -> int:
    """Of one layer at this shape, twice over, plus the logits (assumed: ATC reuses the rest)."""
    rows = batch * tokens
    wide = 16 * about["hidden"]  # residual, norm, q/k/v, gate and up, in 4-byte elements
    scores = about["heads"] * (context + tokens)
    return int(8 * rows * (wide + 2 * scores) + 4 * batch * about["vocab"])


def _check_gears(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], gears: Sequence[Gear]
) -> None:
    symbols = {d for t in inputs for d in t.dims if isinstance(d, str)}
    if not gears:
        if symbols:
            raise OmError(f"the graph has open sizes {sorted(symbols)}; give at least two gears")
        return
    if not 2 <= len(gears) <= MAX_GEARS:
        raise OmError(f"{len(gears)} gears; an .om takes 2 to {MAX_GEARS}")
    needed = symbols | {d for t in outputs for d in t.dims if isinstance(d, str)}
    for gear in gears:
        if needed - gear.keys():
            raise OmError(f"gear {gear} says nothing of {sorted(needed - gear.keys())}")
    if len({tuple(sorted(g.items())) for g in gears}) < len(gears):
        raise OmError("two gears are the same; name each once")
    dims = sum(len(t.dims) for t in inputs)
    if dims > MAX_DIMS:
        raise OmError(
            f"the inputs have {dims} dims in all, the library takes {MAX_DIMS}; "
            "a model of more than 60 layers does not fit this graph"
        )


def _external_file(model: Any, graph: Path) -> Path | None:
    places = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    if len(places) > 1:
        raise OmError(f"{graph} keeps its weights in {len(places)} files; save them as one")
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = _WEIGHTS_NAME
    return graph.with_name(places.pop()) if places else None


def _tensor(value: Any) -> Tensor:
    import onnx

    kind = value.type.tensor_type
    dims = [d.dim_param or int(d.dim_value) for d in kind.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return Tensor(value.name, str(dtype), dims)


def _write(out: Path, header: Header, graph: bytes, weights: Path | None) -> None:
    text = msgspec.json.encode(header)
    size = weights.stat().st_size if weights else 0
    with out.open("wb") as file:
        file.write(_MAGIC + _LENGTHS.pack(len(text), len(graph), size) + text + graph)
        file.write(bytes(_aligned(file.tell()) - file.tell()))
        if weights:
            with weights.open("rb") as data:
                shutil.copyfileobj(data, file, 1 << 20)


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
