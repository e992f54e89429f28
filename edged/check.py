"""Check: what this board really has, in lines for a person: library, memory, sensors, levers.

Moves each lever and puts it back; starts no engine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import psutil

from edged import thermal
from edged.engine.links import make_upstream
from edged.guard.levers.check import check as check_levers
from edged.guard.sensors.check import lines as sensor_lines
from edged.ingress.http.keys import ApiKeys
from edged.ingress.mqtt.dial import dial_of
from edged.ingress.mqtt.topics import check_names
from edged.settings import Config
from edged.twin.figures import board_at
from edged.twin.lever import twin_levers
from edged.twin.sensor import TwinSensor

_GIB = 1 << 30


def files(config: Config) -> None:
    """Read every file the configuration names, models apart. Raises ConfigError with the key."""
    if config.http.api_keys_file:
        ApiKeys.load(config.http.api_keys_file)
    check_names(config.mqtt.base, config.mqtt.reply_allow)
    if config.mqtt.url:
        dial_of(config.mqtt, config.node, "")
    make_upstream(config)


async def lines(config: Config) -> list[str]:
    """Never raises for what the board lacks; that is what the lines are for."""
    twin = board_at(Path(config.state_dir) / "twin", config.npu.twin) if config.npu.twin else None
    sensors, levers = thermal.sensors_of(config, twin), thermal.levers_of(config, twin)
    own_sensors = (TwinSensor(twin),) if twin is not None else ()
    own_levers = twin_levers(twin) if twin is not None else ()
    said = [_board(config), _memory(), "sensors:"]
    said += _indented(await sensor_lines(sensors, own_sensors))
    said.append("levers:")
    said += _indented(await check_levers(levers, own_levers, Path(config.state_dir)))
    said.append(_guard(config))
    if twin is not None:
        twin.close()
    return said


def _board(config: Config) -> str:
    if config.npu.twin:
        return f"board: simulated ({config.npu.twin})"
    try:
        found = importlib.util.find_spec("acl") is not None
    except (ImportError, ValueError):  # a broken installation is none
        found = False
    if not found:
        return "board: no pyACL here (source CANN's set_env.sh, see systemd/ascend.env.example)"
    return "board: pyACL is installed"


def _memory() -> str:
    memory = psutil.virtual_memory()
    return f"memory: {memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available"


def _guard(config: Config) -> str:
    if not thermal.wanted(config):
        return "guard: off (guard.enabled; auto needs npu in engines.chain)"
    rules = msgspec.structs.asdict(config.guard)
    return f"guard: on, policy {rules['policy']}, limit {rules['limit_c']:g} °C"


def _indented(found: list[str]) -> list[str]:
    return [f"  {line}" for line in found]
