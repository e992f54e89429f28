"""One execute: ordered faults, the native run, the board's pace, heat and counters."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import msgspec

from edged.twin import physics
from edged.twin.acl import codes
from edged.twin.acl.codes import Failure
from edged.twin.acl.model import Bound, Model, poison
from edged.twin.acl.process import Process
from edged.twin.faults import Fault

_COSTS_KEPT = 1024
_NAP_S = 0.5  # usleep takes less than a second


def execute(
    process: Process, model: Model, bind: Callable[[], Bound], keeps_gil: bool = False
) -> None:
    """bind: reads gear and buffers when their turn has come. keeps_gil: as a synchronous call
    does, if the twin was asked to. Raises Failure."""
    faults = process.due("step")
    _before(process, faults, keeps_gil)
    with model.busy, process.executing():
        bound = bind()
        version = process.memory.version
        if process.reclaim():
            process.memory.touch(bound.addresses, time.monotonic())
        _paced(process, model, bound, keeps_gil)
        if process.memory.version != version:  # freed under a running kernel?
            process.memory.touch(bound.addresses, time.monotonic())
    for fault in faults:
        if fault.kind == "nan":
            poison(bound, fault.row)


def _before(process: Process, faults: list[Fault], keeps_gil: bool) -> None:
    for fault in faults:
        if fault.kind == "hang":
            limit_s = process.op_timeout_s
            rest(min(fault.seconds or limit_s, limit_s), keeps_gil)
            if not 0 < fault.seconds < limit_s:
                raise Failure(codes.AICORE_TIMEOUT, f"a kernel did not end within {limit_s:g} s")
        if fault.kind == "aicore-fault":
            raise Failure(codes.AICORE_EXCEPTION, "ordered: AI Core exception")


def _paced(process: Process, model: Model, bound: Bound, keeps_gil: bool) -> None:
    state = process.state
    started_s = time.monotonic()
    modelled_s, power_w = _modelled(process, model, bound, state.clock_mhz(started_s))
    state.step_begins(started_s, power_w, modelled_s)
    try:
        model.run(bound)
        native_s = time.monotonic() - started_s
        wanted_s = modelled_s * state.get("time_scale")
        if native_s < wanted_s:
            rest(wanted_s - native_s, keeps_gil)
        elif wanted_s > 0:
            state.add("overruns_total", 1)
    finally:
        after = state.step_ends(time.monotonic(), modelled_s)
    if after.temperature_c >= state.board.firmware.reset_c:
        raise Failure(codes.LOST_HEARTBEAT, f"the board reset at {after.temperature_c:.0f} degrees")


def _modelled(
    process: Process, model: Model, bound: Bound, clock_mhz: float
) -> tuple[float, float]:
    """(seconds, watts) of this gear on the board, with this model on it."""
    cpu_ratio = process.state.get("cpu_busy_ratio")
    key = (id(bound.gear), clock_mhz, cpu_ratio)
    if key not in model.costs:
        if len(model.costs) >= _COSTS_KEPT:
            model.costs.clear()
        model.costs[key] = _cost(process, model, bound, clock_mhz, cpu_ratio)
    return model.costs[key]


def _cost(
    process: Process, model: Model, bound: Bound, clock_mhz: float, cpu_ratio: float
) -> tuple[float, float]:
    load = model.header.workload
    board = msgspec.structs.replace(
        process.state.board,
        model=physics.Model(
            name=load.name,
            weight_bytes=float(model.header.weight_bytes),
            kv_bytes_per_token=load.kv_bytes_per_token,
            flop_per_token=load.flop_per_token,
            context_tokens=0,
        ),
    )
    batch, tokens, context = (
        bound.gear.get(symbol, 1) for symbol in (load.batch, load.tokens, load.context)
    )
    seconds = physics.step_time_s(board, batch, tokens, context, clock_mhz, cpu_ratio)
    return seconds, physics.busy_power_w(board, batch, tokens, context, clock_mhz)


def rest(seconds: float, keeps_gil: bool) -> None:
    """Wait as the library does: with the interpreter lock held, or without."""
    if not keeps_gil:
        time.sleep(seconds)
        return
    usleep = ctypes.PyDLL(None).usleep
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        usleep(ctypes.c_uint(int(min(left_s, _NAP_S) * 1e6)))
