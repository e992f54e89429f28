"""HelpedSensor: a source read by the long-lived child of helper.py, such as DCMI or sysfs."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from edged.guard.sensors import Raw, SensorError, places, printable
from edged.guard.sensors.process import Disposable, kill_group

HELPER = (sys.executable, "-m", "edged.guard.sensors.helper")


class _Answer(msgspec.Struct):
    error: str = ""


class HelpedSensor:
    """arguments: those of helper.py."""

    def __init__(
        self,
        name: str,
        arguments: tuple[str, ...],
        timeout_s: float,
        kill: Callable[[int], None] = kill_group,
    ) -> None:
        self.name = name
        self._timeout_s = timeout_s
        environ = {"LD_LIBRARY_PATH": places.loader_path()}
        self.process = Disposable(f"the {name} reader", (*HELPER, *arguments), environ, kill)

    async def read(self) -> Raw:
        line = await self.process.ask(self._timeout_s)
        try:
            error = msgspec.json.decode(line, type=_Answer).error
            raw = msgspec.json.decode(line, type=Raw)
        except msgspec.DecodeError:
            raise SensorError(f"the {self.name} reader answered in no form of ours") from None
        if error:
            raise SensorError(printable(error, 300))
        return raw

    async def stop(self) -> None:
        await self.process.stop()
