"""Writes an ONNX graph piece by piece: nodes in memory, weights streamed to one data file.

Knows nothing of transformers; the graphs (plain.py, cpu.py) say what to emit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
OPSET = 13
_IR_VERSION = 8
_ALIGNMENT_BYTES = 4096  # a page: the runtime maps the file
_INLINE_BYTES = 1024
_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.uint8): TensorProto.UINT8,
}


class Emitter(contextlib.AbstractContextManager["Emitter"]):
    """One graph under construction in `folder`; `finish` writes model.onnx."""

    def __init__(self, folder: Path, progress: Callable[[int], None]) -> None:
        self._folder = folder
        self._progress = progress
        self._data = (folder / DATA_FILE).open("wb")
        self._nodes: list[Any] = []
        self._initialisers: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._small: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def __exit__(self, *_: object) -> None:
        self._data.close()

    def input(self, name: str, dtype: Any, shape: Sequence[int | str]) -> str:
        self._inputs.append(_value(name, dtype, shape))
        return name

    def output(self, name: str, dtype: Any, shape: Sequence[int | str]) -> None:
        self._outputs.append(_value(name, dtype, shape))

    def op(
        self, kind: str, *inputs: str, name: str = "", domain: str = "", **attributes: Any
    ) -> str:
        """Emit a node with one output; `name` names that output."""
        return self.ops(
            kind, *inputs, names=(name or self._fresh(kind),), domain=domain, **attributes
        )[0]

    def ops(
        self, kind: str, *inputs: str, names: Sequence[str], domain: str = "", **attributes: Any
    ) -> Sequence[str]:
        """Emit a node with the outputs `names`."""
        label = next(name for name in names if name)
        node = helper.make_node(
            kind, list(inputs), list(names), name=f"{label}/{kind}", domain=domain, **attributes
        )
        self._nodes.append(node)
        return names

    def names(self, kind: str, count: int) -> list[str]:
        """Fresh names for the outputs of one node."""
        return [self._fresh(kind) for _ in range(count)]

    def const(self, values: Any, dtype: Any) -> str:
        """A small constant; equal ones are shared."""
        array = np.asarray(values, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._small:
            self._small[key] = self.weight(self._fresh("const"), array)
        return self._small[key]

    def weight(self, name: str, array: np.ndarray) -> str:
        """An initialiser; its bytes are on disk when this returns, unless it is tiny."""
        if array.nbytes >= _INLINE_BYTES:
            return self.stream(name, array.dtype, array.shape, [array])
        tensor = helper.make_tensor(
            name, _TYPES[array.dtype], array.shape, array.tobytes(), raw=True
        )
        self._initialisers.append(tensor)
        return name

    def stream(
        self, name: str, dtype: Any, shape: Sequence[int], pieces: Iterable[np.ndarray]
    ) -> str:
        """An initialiser of which only one piece at a time is in memory."""
        self._data.write(bytes(-self._data.tell() % _ALIGNMENT_BYTES))
        start = self._data.tell()
        for piece in pieces:
            self._data.write(np.ascontiguousarray(piece, dtype=dtype).data)
            self._progress(piece.nbytes)
        tensor = TensorProto(
            name=name,
            data_type=_TYPES[np.dtype(dtype)],
            dims=list(shape),
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", DATA_FILE),
            ("offset", str(start)),
            ("length", str(self._data.tell() - start)),
        ):
            tensor.external_data.add(key=key, value=value)
        self._initialisers.append(tensor)
        return name

    def finish(self, domains: Sequence[str] = ()) -> None:
        """Write and check the graph. domains: operator sets used besides ONNX's own."""
        self._data.close()
        graph = helper.make_graph(
            self._nodes, "edged", self._inputs, self._outputs, self._initialisers
        )
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(d, 1) for d in domains)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="edged")
        model.ir_version = _IR_VERSION
        path = self._folder / GRAPH_FILE
        path.write_bytes(model.SerializeToString())
        if not domains:  # the checker does not know the runtime's own operators
            onnx.checker.check_model(str(path))

    def _fresh(self, kind: str) -> str:
        self._count += 1
        return f"{kind.lower()}_{self._count}"


def _value(name: str, dtype: Any, shape: Sequence[int | str]) -> Any:
    return helper.make_tensor_value_info(name, _TYPES[np.dtype(dtype)], list(shape))
