"""A configured program whose output is the temperature, for boards whose vendor ships one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from edged.guard.sensors import Raw, SensorError, printable
from edged.guard.sensors.process import Disposable, kill_group

# Not the 1 of "temp1"; a sign or a bracket may stand before it.
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d{1,9}(?:\.\d{1,9})?", re.ASCII)


def parse(text: str) -> Raw:
    """A JSON object with Raw's names, or the first number in °C. Raises SensorError."""
    text = text.strip()
    if text.startswith("{"):
        try:
            raw = msgspec.json.decode(text.encode(errors="replace"), type=Raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise SensorError(f"sensors.command: {printable(str(error), 200)}") from None
        if raw.temperature_c is None:
            raise SensorError("sensors.command printed JSON without temperature_c")
        return raw
    match = _NUMBER.search(text[:4096])
    if match is None:
        raise SensorError(f"sensors.command printed no number: {printable(text, 80) or 'nothing'}")
    return Raw(temperature_c=float(match[0]))


class CommandSensor:
    name = "command"

    def __init__(
        self,
        command: Sequence[str],
        timeout_s: float,
        kill: Callable[[int], None] = kill_group,
    ) -> None:
        self._timeout_s = timeout_s
        self.process = Disposable("sensors.command", command, {"LC_ALL": "C"}, kill)

    async def read(self) -> Raw:
        ended = await self.process.run(self._timeout_s)
        if ended.code:
            words = printable(ended.err.decode(errors="replace"), 120)
            raise SensorError(f"sensors.command exited with code {ended.code}: {words}")
        return parse(ended.out.decode(errors="replace"))

    async def stop(self) -> None:
        await self.process.stop()
