"""A simulated board in a temporary folder, and small containers to run on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edged.twin import om, state
from edged.twin.acl import Library

H2D, D2H, D2D = 1, 2, 3
HUGE_FIRST, HUGE_ONLY, NORMAL_ONLY = 0, 1, 2
GEARS = ({"B": 1}, {"B": 4}, {"B": 2})
WIDTH = 8
ROW_BYTES = WIDTH * 4


def make_board(folder: Path, board: str = "310b4", **command: float) -> Path:
    """A rested board; returns the folder EDGED_TWIN names."""
    state.create(folder, board, command).close()
    return folder


def doubler(folder: Path, gears: Sequence[om.Gear] = GEARS, soc: str = "Ascend310B4") -> Path:
    """`y = 2 x` for float32 x [B, WIDTH]; without gears B is 4."""
    batch: int | str = "B" if gears else 4
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, WIDTH])
    two = helper.make_tensor("two", TensorProto.FLOAT, [1], [2.0])
    node = helper.make_node("Mul", ["x", "two"], ["y"], name="Twice")
    graph = helper.make_graph([node], "doubler", [x], [y], [two])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    onnx.save(model, str(folder / "doubler.onnx"))
    out = folder / "doubler.om"
    om.pack(folder / "doubler.onnx", out, gears, soc=soc, work_bytes=4096)
    return out


class Session:
    """A process that has done everything right so far: context, stream, perhaps a model."""

    def __init__(self, folder: Path) -> None:
        self.acl = Library(folder)
        assert self.acl.init() == 0
        assert self.acl.rt.set_device(0) == 0
        self.context = done(self.acl.rt.create_context(0))
        self.stream = done(self.acl.rt.create_stream())

    def malloc(self, size: int, policy: int = HUGE_FIRST) -> int:
        return int(done(self.acl.rt.malloc(size, policy)))

    def put(self, address: int, values: np.ndarray) -> None:
        data = values.tobytes()
        assert self.acl.rt.memcpy(address, len(data), pointer(self, data), len(data), H2D) == 0

    def get(self, address: int, like: np.ndarray) -> np.ndarray:
        out = np.empty_like(like)
        size = out.nbytes
        assert self.acl.rt.memcpy(out.ctypes.data, size, address, size, D2H) == 0
        return out

    def dataset(self, *buffers: tuple[int, int]) -> int:
        made = self.acl.mdl.create_dataset()
        for address, size in buffers:
            buffer = self.acl.create_data_buffer(address, size)
            assert self.acl.mdl.add_dataset_buffer(made, buffer) == (made, 0)
        return int(made)

    def close(self) -> None:
        self.acl.rt.destroy_stream_force(self.stream)
        self.acl.rt.reset_device(0)
        self.acl.finalize()


class Doubler:
    """The doubler loaded on a session, with buffers for its largest gear."""

    def __init__(self, session: Session, path: Path) -> None:
        self.s, self.mdl = session, session.acl.mdl
        self.id = done(self.mdl.load_from_file(str(path)))
        self.desc = self.mdl.create_desc()
        assert self.mdl.get_desc(self.desc, self.id) == 0
        self.x = session.malloc(4 * ROW_BYTES)
        self.y = session.malloc(4 * ROW_BYTES)
        buffers = [(self.x, 4 * ROW_BYTES)]
        if self.mdl.get_num_inputs(self.desc) == 2:
            self.setter = done(
                self.mdl.get_input_index_by_name(self.desc, "ascend_mbatch_shape_data")
            )
            size = self.mdl.get_input_size_by_index(self.desc, self.setter)
            self.shape = session.malloc(size)
            buffers.append((self.shape, size))
        self.inputs = session.dataset(*buffers)
        self.outputs = session.dataset((self.y, 4 * ROW_BYTES))

    def gear(self, batch: int) -> int:
        dims = {"name": "", "dimCount": 2, "dims": [batch, WIDTH]}
        return int(self.mdl.set_input_dynamic_dims(self.id, self.inputs, self.setter, dims))

    def rows(self) -> np.ndarray:
        """The output buffer, all of it."""
        return self.s.get(self.y, np.empty((4, WIDTH), np.float32))

    def run(self, batch: int = 4) -> np.ndarray:
        """One synchronous execute at a gear."""
        assert self.gear(batch) == 0
        assert self.mdl.execute(self.id, self.inputs, self.outputs) == 0
        return self.rows()[:batch]


def done(result: tuple[Any, ...]) -> Any:
    """The value of (value, ret), ret being 0."""
    *values, ret = result
    assert ret == 0, f"ret {ret}"
    return values[0] if len(values) == 1 else tuple(values)


def pointer(session: Session, data: bytes) -> int:
    return int(session.acl.util.bytes_to_ptr(data))


@contextlib.contextmanager
def session(folder: Path) -> Iterator[Session]:
    made = Session(folder)
    try:
        yield made
    finally:
        made.close()
