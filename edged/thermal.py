"""Thermal: from configuration to a Guard with the sensors and levers this machine has.

On a simulated board these are the board's own, and nothing of the host is read or moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

import msgspec

from edged import manifest, wire
from edged.core import Limits
from edged.guard.control import quiet_at
from edged.guard.levers.find import Found, find_levers
from edged.guard.loop import Engines, Guard, Hooks
from edged.guard.sensors.factory import make_hub
from edged.guard.work import Executed
from edged.settings import Config, Levers, Sensors
from edged.twin.lever import twin_levers
from edged.twin.sensor import TwinSensor
from edged.twin.state import TwinState


def executed(report: wire.Report) -> Executed:
    """The guard's words for a step."""
    return Executed(
        kind=report.kind,
        seconds=report.step_s,
        prompt_tokens=report.tokens if report.kind == "prefill" else 0,
        drawn=tuple(row.stream for row in report.rows if row.ids),
        tokens=sum(len(row.ids) for row in report.rows),
        ended=tuple(row.stream for row in report.rows if row.finish),
    )


def wanted(config: Config) -> bool:
    """Whether this configuration has a guard."""
    if config.guard.enabled == "auto":
        return "npu" in config.engines.chain
    return config.guard.enabled == "on"


def make_guard(
    config: Config,
    model_dirs: Mapping[str, Path],
    twin: TwinState | None,
    streams: Callable[[], Mapping[str, int]],
    waiting: Callable[[], int],
    set_limits: Callable[[str, Limits], None],
    end_streams: Callable[[], None],
) -> Guard:
    """Nothing runs yet. The engine that is ruled is the NPU, or the first of the chain."""
    chain = tuple(model_dirs)
    if "npu" in chain:
        chain = ("npu", *(name for name in chain if name != "npu"))
    section = config.npu if chain[0] == "npu" else config.cpu
    engines = Engines(chain, _batches(model_dirs[chain[0]], section.slots), section.prefill_chunk)
    hub = make_hub(sensors_of(config, twin), (TwinSensor(twin),) if twin else ())
    hooks = Hooks(
        streams=streams,
        waiting=waiting,
        set_limits=set_limits,
        end_streams=end_streams,
        quiet=lambda: quiet_at(config.guard.quiet_hours, datetime.now().time()),
    )
    return Guard(config.guard, engines, hub, lambda: _find(config, twin), hooks)


def sensors_of(config: Config, twin: TwinState | None) -> Sensors:
    """Nothing of the host counts beside a simulated board, unless it is named."""
    if twin is not None and config.sensors.sources == ("auto",):
        return msgspec.structs.replace(config.sensors, sources=())
    return config.sensors


async def _find(config: Config, twin: TwinState | None) -> Found:
    extra = twin_levers(twin) if twin is not None else ()
    return await find_levers(levers_of(config, twin), extra, Path(config.state_dir))


def levers_of(config: Config, twin: TwinState | None) -> Levers:
    """Nothing of the host is moved for a simulated board."""
    if twin is None:
        return config.levers
    return msgspec.structs.replace(config.levers, helper_socket="", frequency_get=())


def _batches(model_dir: Path, slots: int) -> tuple[int, ...]:
    """Widths worth running: a step costs as much as its gear, and any width has one where the
    graph has open shapes."""
    gears = {batch for batch, tokens, _ in manifest.read(model_dir).gears if tokens == 1}
    fitting = {batch for batch in gears if batch <= slots}
    return tuple(sorted(fitting | {slots})) if gears else tuple(range(1, slots + 1))
