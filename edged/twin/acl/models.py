"""`acl.mdl.*`: models, their description, datasets and execution."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edged.twin.acl import codes, execution, loading
from edged.twin.acl.call import CONTEXT, NOTHING, Surface, action, bare, producer
from edged.twin.acl.codes import Failure
from edged.twin.acl.model import Bound, Model
from edged.twin.acl.process import Context, Process
from edged.twin.acl.top import DataBuffer, TensorDesc

Buffers = list[DataBuffer]


@dataclass(eq=False)
class Dataset:
    """Buffers in order; owns none of them."""

    buffers: list[int] = field(default_factory=list)


class ModelCalls(Surface):
    """Loading, sizes, execution."""

    without_init = codes.UNINITIALIZE

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._models: dict[int, tuple[Model, Context]] = {}
        self._last_id = 0
        self._known = -1  # version of the handles these two were made from
        self._lists: dict[int, Buffers] = {}
        self._bound: dict[tuple[int, ...], tuple[Bound, Buffers, Buffers]] = {}

    @producer("s", 0)
    def load_from_file(self, path: str) -> int:
        found = loading.query_file(path)
        return self._keep(loading.load(self._process, Path(path), found))

    @producer("skkkk", 0)
    def load_from_file_with_mem(
        self, path: str, work: int, work_bytes: int, weight: int, weight_bytes: int
    ) -> int:
        found = loading.query_file(path)
        given = (work, work_bytes), (weight, weight_bytes)
        return self._keep(loading.load(self._process, Path(path), found, *given))

    @producer("kk", 0)
    def load_from_mem(self, address: int, size_bytes: int) -> int:
        return self._load_from_mem(address, size_bytes, loading.NONE, loading.NONE)

    @producer("kkkkkk", 0)
    def load_from_mem_with_mem(
        self,
        address: int,
        size_bytes: int,
        work: int,
        work_bytes: int,
        weight: int,
        weight_bytes: int,
    ) -> int:
        return self._load_from_mem(address, size_bytes, (work, work_bytes), (weight, weight_bytes))

    @producer("s", 0, 0, needs=CONTEXT)
    def query_size(self, path: str) -> tuple[int, int]:
        """(work, weights) bytes."""
        header = loading.query_file(path).header
        return header.work_bytes, header.weight_bytes

    @producer("kk", 0, 0, needs=CONTEXT)
    def query_size_from_mem(self, address: int, size_bytes: int) -> tuple[int, int]:
        header = loading.query_memory(self._process, address, size_bytes).header
        return header.work_bytes, header.weight_bytes

    @action("k")
    def unload(self, model_id: int) -> None:
        model = self._model(model_id)
        with model.busy:
            del self._models[model_id]
            self._bound.clear()
            for address in model.owned:
                self._process.release(address)
            model.close()

    @action("kkk")
    def execute(self, model_id: int, inputs: int, outputs: int) -> None:
        model = self._model(model_id)
        ins, outs = self._buffers(inputs), self._buffers(outputs)
        for buffer, port in zip(outs, model.outputs, strict=False):
            if buffer.address == 0 and buffer.size_bytes == 0:  # the library allocates, you free
                size = port.largest_bytes
                buffer.address = self._process.allocate(size, size + 32, codes.HUGE_FIRST)
                buffer.size_bytes = size
                self._process.handles.version += 1
        self._launch()
        self._bind(model, ins, outs)
        keeps_gil = bool(self._process.state.get("hold_gil"))
        self._process.task(lambda: self._run(model, ins, outs, keeps_gil))()

    @action("kkkk")
    def execute_async(self, model_id: int, inputs: int, outputs: int, stream: int) -> None:
        process, model = self._process, self._model(model_id)
        queue = process.stream(stream)
        ins, outs = self._buffers(inputs), self._buffers(outputs)
        self._bind(model, ins, outs)  # what cannot run is refused at once
        self._launch()

        queue.submit(process.task(lambda: self._run(model, ins, outs)))

    # --- gears -----------------------------------------------------------------------------------

    @action("kkkO")
    def set_input_dynamic_dims(
        self, model_id: int, inputs: int, index: int, dims: dict[str, Any]
    ) -> None:
        """dims: all dims of all inputs in order, fixed ones too; 'name' may be empty."""
        count, values = dims["dimCount"], list(dims["dims"])
        if count != len(values) or not 0 < count <= codes.MAX_DIMS:
            raise Failure(codes.INVALID_PARAM, f"dimCount {count}, {len(values)} dims given")
        model, buffer = self._gear_buffer(model_id, inputs, index)
        model.set_dims(values, buffer, self._process.locate)

    @action("kkkk")
    def set_dynamic_batch_size(self, model_id: int, inputs: int, index: int, batch: int) -> None:
        if batch == 0:
            raise Failure(codes.INVALID_PARAM, "batch size 0")
        model, buffer = self._gear_buffer(model_id, inputs, index)
        if set(model.open_dims) != {model.header.workload.batch}:
            raise Failure(codes.GE_DYNAMIC_BATCH_SIZE, "the gears are not of the batch size alone")
        model.set_values([batch] * len(model.open_dims), buffer, self._process.locate)

    @action("kkkkk")
    def set_dynamic_hw_size(
        self, model_id: int, inputs: int, index: int, height: int, width: int
    ) -> None:
        self._gear_buffer(model_id, inputs, index)
        raise Failure(codes.GE_DYNAMIC_BATCH_SIZE, "the model has no image gears")

    def _launch(self) -> None:
        if self._process.due("launch"):
            raise Failure(codes.GE_MEMORY_ALLOCATION, "ordered: no memory for this execute")

    # --- shared ----------------------------------------------------------------------------------

    def _gear_buffer(self, model_id: int, inputs: int, index: int) -> tuple[Model, DataBuffer]:
        model, buffers = self._model(model_id), self._buffers(inputs)
        if not model.dynamic or index != model.setter_index or index >= len(buffers):
            raise Failure(codes.INVALID_PARAM, f"input {index} does not choose the gear")
        return model, buffers[index]

    def _model(self, model_id: int) -> Model:
        if model_id not in self._models:
            raise Failure(codes.GE_MODEL_ID_INVALID, f"no model {model_id} is loaded")
        model, context = self._models[model_id]
        if context is not self._process.context():
            raise Failure(codes.MODEL_CONTEXT, "the model was loaded in another context")
        return model

    def _buffers(self, dataset: int) -> Buffers:
        """The same list again as long as no handle changed: looking up 128 takes its time."""
        handles = self._process.handles
        if self._known != handles.version:
            self._known = handles.version
            self._lists.clear()
            self._bound.clear()
        if dataset not in self._lists:
            found = handles.get(dataset, Dataset, codes.INVALID_PARAM)
            self._lists[dataset] = [
                handles.get(b, DataBuffer, codes.INVALID_PARAM) for b in found.buffers
            ]
        return self._lists[dataset]

    def _run(self, model: Model, ins: Buffers, outs: Buffers, keeps_gil: bool = False) -> None:
        bind = functools.partial(self._bind, model, ins, outs)
        execution.execute(self._process, model, bind, keeps_gil)

    def _bind(self, model: Model, ins: Buffers, outs: Buffers) -> Bound:
        """The call these lists make with the gear now in its buffer. Raises Failure."""
        process = self._process
        version, locate = process.memory.version, process.locate_on_device
        gear = model.gear_of(ins, locate)
        key = (id(model), id(gear), id(ins), id(outs), version)
        if key not in self._bound:
            bound = model.bind(ins, outs, gear, version, locate)
            self._bound[key] = bound, ins, outs  # kept, so that no other list gets their ids
        return self._bound[key][0]

    def _load_from_mem(
        self, address: int, size_bytes: int, work: loading.Given, weights: loading.Given
    ) -> int:
        process = self._process
        found = loading.query_memory(process, address, size_bytes)
        place = loading.model_place(process, address, size_bytes)
        with loading.as_file(place, size_bytes) as path:
            return self._keep(loading.load(process, path, found, work, weights))

    def _keep(self, model: Model) -> int:
        self._last_id += 1
        self._models[self._last_id] = (model, self._process.context())
        return self._last_id


class DatasetCalls(Surface):
    without_init = codes.UNINITIALIZE

    @bare("", 0)
    def create_dataset(self) -> int:
        return self._process.handles.add(Dataset())

    @action("k", NOTHING)
    def destroy_dataset(self, dataset: int) -> None:
        """The container only."""
        self._process.handles.remove(dataset, Dataset, codes.INVALID_PARAM)

    @producer("kk", 0, needs=NOTHING)
    def add_dataset_buffer(self, dataset: int, buffer: int) -> int:
        """-> (dataset, ret)"""
        self._process.handles.get(buffer, DataBuffer, codes.INVALID_PARAM)
        self._dataset(dataset).buffers.append(buffer)
        self._process.handles.version += 1
        return dataset

    @bare("k", 0)
    def get_dataset_num_buffers(self, dataset: int) -> int:
        return len(self._dataset(dataset).buffers)

    @bare("kk", 0)
    def get_dataset_buffer(self, dataset: int, index: int) -> int:
        buffers = self._dataset(dataset).buffers
        return buffers[index] if index < len(buffers) else 0

    @producer("kkk", 0, needs=NOTHING)
    def set_dataset_tensor_desc(self, dataset: int, desc: int, index: int) -> int:
        """For models of shape ranges, which the twin's are not: accepted, without effect."""
        self._process.handles.get(desc, TensorDesc, codes.INVALID_PARAM)
        if index >= len(self._dataset(dataset).buffers):
            raise Failure(codes.INVALID_PARAM, f"the dataset has no buffer {index}")
        return dataset

    def _dataset(self, handle: int) -> Dataset:
        return self._process.handles.get(handle, Dataset, codes.INVALID_PARAM)
