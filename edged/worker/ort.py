"""Executor on onnxruntime (CPU), for both flavours of edged-graph v2: plain and in place.

The only file that imports onnxruntime. Every array a step needs is bound in place and reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from edged.errors import EdgedError
from edged.worker.contract import (
    ContractError,
    ModelSpec,
    Tensor,
    cache_names,
    check_graph,
    is_in_place,
)
from edged.worker.executor import Batch, Floats, StepError
from edged.worker.ort_cache import Array, CacheBlock
from edged.worker.plan import Gears

_TYPES = {"tensor(int32)": "int32", "tensor(float)": "fp32", "tensor(float16)": "fp16"}
# onnxruntime's own kinds have no common base but Exception.
_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)
_RESERVED_ROWS = 64  # the usual prefill chunk; larger shapes reserve more
_BOUND_SHAPES = 64  # prepared bindings kept; about half a millisecond to prepare one


@dataclass(frozen=True)
class _Bound:
    """A prepared call for one window and shape; the arrays are what it reads and writes."""

    binding: Any
    input_ids: npt.NDArray[np.int32]
    position_ids: npt.NDArray[np.int32]
    past_len: npt.NDArray[np.int32]
    logit_idx: npt.NDArray[np.int32]
    new: Array  # [2L, B, Hk, T, D]; unused by an in-place graph
    logits: Floats


class OrtExecutor:
    """See edged.worker.executor.Executor."""

    def __init__(self, spec: ModelSpec, slots: int, threads: int) -> None:
        self._spec = spec
        self._slots = slots
        self._session = _open(spec, threads)
        self._in_place = is_in_place(_tensors(self._session.get_outputs()))
        self._names = cache_names(spec.layers, self._in_place)
        self.gears = Gears(
            batch=tuple(range(1, slots + 1)), tokens=(), context=context_gears(spec.context_tokens)
        )
        self._cache = CacheBlock(spec, slots, self.gears.context[0])
        self._scratch: dict[str, Array] = {}
        self._bound: dict[tuple[int, int, int], _Bound] = {}
        self._reserve(max(slots, _RESERVED_ROWS))
        self._positions = np.arange(self.context, dtype=np.int32)

    @property
    def context(self) -> int:
        return self._cache.context

    def run(self, batch: Batch) -> Floats:
        bound = self._prepared(batch.lo, *batch.shape)
        bound.input_ids[:] = batch.input_ids
        bound.position_ids[:] = batch.position_ids
        bound.past_len[:] = batch.past_len
        bound.logit_idx[:] = batch.logit_idx
        if self._in_place:
            with self._cache.spared(batch):
                self._execute(bound)
        else:
            self._execute(bound)
            self._cache.append(batch, bound.new)
        return bound.logits

    def repack(self, context: int, rows: Sequence[int]) -> None:
        self._bound.clear()  # they point into the old block
        self._cache.repack(context, rows)
        self._positions = np.arange(context, dtype=np.int32)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self._cache.copy_rows(source, target, rows)

    def zero_slot(self, slot: int) -> None:
        self._cache.zero_slot(slot)

    def close(self) -> None:
        self._bound.clear()
        del self._session

    def _execute(self, bound: _Bound) -> None:
        try:
            self._session.run_with_iobinding(bound.binding)
        except _ERRORS as error:
            raise _memory_or(StepError, error, "") from None

    def _reserve(self, rows: int) -> None:
        """Memory for the small inputs and all outputs, shared by every shape up to B*T = rows."""
        spec = self._spec
        per_row = 0 if self._in_place else 2 * spec.layers * spec.kv_heads * spec.head_dim
        self._bound.clear()
        self._scratch = {
            "input_ids": np.zeros(rows, np.int32),
            "position_ids": np.zeros(rows, np.int32),
            "past_len": np.zeros(self._slots, np.int32),
            "logit_idx": np.zeros(self._slots, np.int32),
            "new": np.zeros(rows * per_row, self._cache.dtype),
            "logits": np.zeros(self._slots * spec.vocab, np.float32),
        }

    def _prepared(self, lo: int, batch: int, tokens: int) -> _Bound:
        key = (lo, batch, tokens)
        if key not in self._bound:
            if batch * tokens > len(self._scratch["input_ids"]):
                self._reserve(batch * tokens)
            if len(self._bound) >= _BOUND_SHAPES:
                self._bound.pop(next(iter(self._bound)))
            self._bound[key] = self._prepare(lo, batch, tokens)
        return self._bound[key]

    def _prepare(self, lo: int, batch: int, tokens: int) -> _Bound:
        spec = self._spec
        heads = 0 if self._in_place else spec.kv_heads
        bound = _Bound(
            self._session.io_binding(),
            self._carve("input_ids", batch, tokens),
            self._carve("position_ids", batch, tokens),
            self._carve("past_len", batch, 1),
            self._carve("logit_idx", batch),
            self._carve("new", 2 * spec.layers, batch, heads, tokens, spec.head_dim),
            self._carve("logits", batch, spec.vocab),
        )
        binding = bound.binding
        for name in ("input_ids", "position_ids", "past_len", "logit_idx"):
            _bind(binding.bind_input, name, getattr(bound, name))
        _bind(binding.bind_input, "kv_pos", self._positions)
        for i, (past, new) in enumerate(self._names):
            window = self._cache.array[i, lo : lo + batch]
            _bind(binding.bind_input, past, window if self._in_place else window.reshape(-1))
            _bind(binding.bind_output, new, window if self._in_place else bound.new[i])
        _bind(binding.bind_output, "logits", bound.logits)
        return bound

    def _carve(self, name: str, *shape: int) -> Array:
        return self._scratch[name][: int(np.prod(shape))].reshape(shape)


def library_version() -> str:
    return f"onnxruntime {ort.__version__}"


def context_gears(context_tokens: int) -> tuple[int, ...]:
    """Powers of two from 256 on, the last one the context itself."""
    gears = []
    size = 256
    while size < context_tokens:
        gears.append(size)
        size *= 2
    return (*gears, context_tokens)


def _bind(method: Any, name: str, array: Array) -> None:
    """Bind memory in place; it must outlive the binding."""
    method(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _open(spec: ModelSpec, threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Spinning threads take the cores from the daemon (2 x slower steps on a busy machine), heat
    # the chip and make an idle worker cost CPU.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors only: the daemon logs what we print
    try:
        session = ort.InferenceSession(
            str(spec.graph_path), options, providers=["CPUExecutionProvider"]
        )
    except _ERRORS as error:
        raise _memory_or(ContractError, error, f"cannot load {spec.graph_path}: ") from None
    check_graph(spec, _tensors(session.get_inputs()), _tensors(session.get_outputs()))
    return session


def _tensors(arguments: Sequence[Any]) -> dict[str, Tensor]:
    return {a.name: (_TYPES.get(a.type, a.type), tuple(a.shape)) for a in arguments}


def _memory_or(kind: type[EdgedError], error: Exception, prefix: str) -> Exception:
    """onnxruntime tells a failed allocation from other failures only in its text."""
    text = prefix + str(error)[:400]
    return MemoryError(text) if "alloc" in text.lower() else kind(text)
