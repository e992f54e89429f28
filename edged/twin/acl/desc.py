"""`acl.mdl.*`: model descriptions (names, dims, types, gears)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edged.twin.acl import codes, loading
from edged.twin.acl.call import CONTEXT, NOTHING, action, bare, producer
from edged.twin.acl.codes import Failure
from edged.twin.acl.model import Interface, Model, Port
from edged.twin.acl.models import DatasetCalls, ModelCalls

_ACL_TYPES = {
    "float32": 0,
    "float16": 1,
    "int8": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 6,
    "uint16": 7,
    "uint32": 8,
    "int64": 9,
    "uint64": 10,
    "float64": 11,
    "bool": 12,
}


@dataclass(eq=False)
class Desc:
    about: Interface | None = None


class Mdl(ModelCalls, DatasetCalls):
    @bare("", 0)
    def create_desc(self) -> int:
        return self._process.handles.add(Desc())

    @action("k", NOTHING)
    def destroy_desc(self, desc: int) -> None:
        self._process.handles.remove(desc, Desc, codes.INVALID_PARAM)

    @action("kk", CONTEXT)
    def get_desc(self, desc: int, model_id: int) -> None:
        self._desc(desc).about = self._model(model_id)

    @action("ks", CONTEXT)
    def get_desc_from_file(self, desc: int, path: str) -> None:
        self._desc(desc).about = Interface(loading.query_file(path).header)

    @bare("k", 0)
    def get_num_inputs(self, desc: int) -> int:
        return len(self._about(desc).inputs)

    @bare("k", 0)
    def get_num_outputs(self, desc: int) -> int:
        return len(self._about(desc).outputs)

    @bare("kk", 0)
    def get_input_size_by_index(self, desc: int, index: int) -> int:
        """Bytes at the largest gear."""
        return _at(self._about(desc).inputs, index).largest_bytes

    @bare("kk", 0)
    def get_output_size_by_index(self, desc: int, index: int) -> int:
        return _at(self._about(desc).outputs, index).largest_bytes

    @bare("kk", "")
    def get_input_name_by_index(self, desc: int, index: int) -> str:
        return _at(self._about(desc).inputs, index).name

    @bare("kk", "")
    def get_output_name_by_index(self, desc: int, index: int) -> str:
        return _at(self._about(desc).outputs, index).name

    @producer("ks", 0, needs=NOTHING)
    def get_input_index_by_name(self, desc: int, name: str) -> int:
        return _index(self._about(desc).inputs, name)

    @producer("ks", 0, needs=NOTHING)
    def get_output_index_by_name(self, desc: int, name: str) -> int:
        return _index(self._about(desc).outputs, name)

    @producer("kk", {}, needs=NOTHING)
    def get_input_dims(self, desc: int, index: int) -> dict[str, Any]:
        """Open sizes show as -1."""
        return _dims(_at(self._about(desc).inputs, index))

    @producer("kk", {}, needs=NOTHING)
    def get_input_dims_v2(self, desc: int, index: int) -> dict[str, Any]:
        return _dims(_at(self._about(desc).inputs, index))

    @producer("kk", {}, needs=NOTHING)
    def get_output_dims(self, desc: int, index: int) -> dict[str, Any]:
        """With gears: of the largest."""
        about = self._about(desc)
        port = _at(about.outputs, index)
        return _described(port.name, port.tensor.shape(about.largest))

    @producer("kk", {}, needs=NOTHING)
    def get_cur_output_dims(self, desc: int, index: int) -> dict[str, Any]:
        """At the gear set last."""
        about = self._about(desc)
        port = _at(about.outputs, index)
        gear = about.current if isinstance(about, Model) else about.largest
        return _described(port.name, port.tensor.shape(gear))

    @bare("kk", -1)
    def get_input_data_type(self, desc: int, index: int) -> int:
        return _ACL_TYPES[_at(self._about(desc).inputs, index).dtype.name]

    @bare("kk", -1)
    def get_output_data_type(self, desc: int, index: int) -> int:
        return _ACL_TYPES[_at(self._about(desc).outputs, index).dtype.name]

    @bare("kk", -1)
    def get_input_format(self, desc: int, index: int) -> int:
        _at(self._about(desc).inputs, index)
        return codes.FORMAT_ND

    @bare("kk", -1)
    def get_output_format(self, desc: int, index: int) -> int:
        _at(self._about(desc).outputs, index)
        return codes.FORMAT_ND

    @producer("k", {}, needs=NOTHING)
    def get_dynamic_batch(self, desc: int) -> dict[str, Any]:
        about = self._about(desc)
        symbol = about.header.workload.batch
        only = about.dynamic and set(about.open_dims) == {symbol}
        sizes = [gear[symbol] for gear in about.gears] if only else []
        return {"batchCount": len(sizes), "batch": sizes}

    @producer("ki", 0, needs=NOTHING)
    def get_input_dynamic_gear_count(self, desc: int, index: int) -> int:
        """index is -1 by convention."""
        about = self._about(desc)
        return len(about.gears) if about.dynamic else 0

    @producer("kik", None, needs=NOTHING)
    def get_input_dynamic_dims(self, desc: int, index: int, count: int) -> list[dict[str, Any]]:
        """One entry per gear: all dims of all inputs."""
        about = self._about(desc)
        if count > codes.MAX_GEARS or count < len(about.gears):
            raise Failure(codes.INVALID_PARAM, f"gear count {count}")
        tensors = about.header.inputs
        return [_described("", [d for t in tensors for d in t.shape(gear)]) for gear in about.gears]

    def _desc(self, handle: int) -> Desc:
        return self._process.handles.get(handle, Desc, codes.INVALID_PARAM)

    def _about(self, handle: int) -> Interface:
        about = self._desc(handle).about
        if about is None:
            raise Failure(codes.INVALID_PARAM, "the description is empty: get_desc first")
        return about


def _at(ports: Sequence[Port], index: int) -> Port:
    if index >= len(ports):
        raise Failure(codes.INVALID_PARAM, f"there is no tensor {index}")
    return ports[index]


def _index(ports: Sequence[Port], name: str) -> int:
    found = next((i for i, port in enumerate(ports) if port.name == name), None)
    if found is None:
        raise Failure(codes.INVALID_PARAM, f"there is no tensor {name!r}")
    return found


def _dims(port: Port) -> dict[str, Any]:
    return _described(port.name, [-1 if isinstance(d, str) else d for d in port.tensor.dims])


def _described(name: str, dims: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "dimCount": len(dims), "dims": list(dims)}
