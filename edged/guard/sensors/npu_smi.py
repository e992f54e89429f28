"""npu-smi: the text of the driver's tool -> Raw. `parse` is pure and knows every layout seen.

By patterns, never by columns: widths differ between versions and cells come glued. The tool is
started for each reading and may hang; process.py sees to that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from edged.guard.sensors import Raw, SensorError, places, printable
from edged.guard.sensors.process import Disposable, kill_group

_MIB = 1 << 20  # its "MB"
_MOST_CHARS = 256 * 1024
_WIDEST = 400  # characters; its tables have 106
_NUMBER = r"-?\d{1,9}(?:\.\d{1,6})?"
_NOTHING = r"NA|N/A|-+"


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.ASCII | re.IGNORECASE)


# Table of `npu-smi info`, 22.0.4 to 25.5.1: three cells per row, two rows per chip.
_NAMED = _pattern(r"\s*\d.*[A-Za-z].*")  # NPU id and name, such as 310P3
_STATE = re.compile(r"\s*(?!NA\b)[^\W\d]{2,20}\s*")  # health, in any language; no bus id
_PLACED = _pattern(r"\s*\d{1,9}(?:\s+\d{1,9})?\s*")  # chip and perhaps device
_POWER_TEMP = _pattern(rf"\s*({_NUMBER}|{_NOTHING})\s+({_NUMBER}|{_NOTHING})(?:\s.*)?")
_LOAD = _pattern(rf"\s*({_NUMBER}|{_NOTHING})\s+\d.*")
_PAIR = _pattern(r"(\d{1,9})\s*/\s*(\d{1,9})")  # "3628 / 15609", "19562/ 21527", "14541/15610"

# `npu-smi info -t KIND`: "Label : value" lines, known by unit, for labels are translated.
_CELSIUS = _pattern(rf".*\(C\)\s*[:：]\s*({_NUMBER}|{_NOTHING})\s*")
_WATTS = _pattern(rf".*real-time.*\(W\)\s*[:：]\s*({_NUMBER})\s*")
_AICORE = _pattern(rf".*ai\s?core\s+usage.*\(%\)\s*[:：]\s*({_NUMBER})\s*")
_CAPACITY = _pattern(rf"\s*(?:memory |ddr |total )?capacity\s?\(MB\)\s*[:：]\s*({_NUMBER})\s*")
_USED = _pattern(rf"\s*(?:memory|ddr) usage rate\s?\(%\)\s*[:：]\s*({_NUMBER})\s*")
_HEALTH = _pattern(r"\s*health(?: status)?\s*[:：]\s*([A-Za-z]{1,20})\s*")

# `npu-smi info watch`: a header with units, then rows of numbers.
_WATCH_HEADER = _pattern(r"\s*NpuID\S*\s+ChipId\S*\s+(.+)")
_COLUMN = _pattern(r"[A-Za-z][A-Za-z ]*\([^)\s]{1,8}\)")


def parse(text: str, chip: int = 0) -> Raw:
    """What the text tells of the chip-th chip in it, repeated ids or not. Raises SensorError."""
    lines = [line for line in text[:_MOST_CHARS].splitlines() if len(line) <= _WIDEST]
    found = _table(lines) or _watch(lines) or _labels(lines)
    if not found:
        first = next(
            (words for line in lines if (words := printable(line.strip("+-=| "), 120))), ""
        )
        raise SensorError(f"npu-smi shows no chip: {first or 'it printed nothing'}")
    if chip >= len(found):
        raise SensorError(f"npu-smi lists {len(found)} chips, no chip {chip}; see sensors.chip")
    return found[chip]


@dataclass(frozen=True)
class _First:
    """The first row of a chip."""

    health: str
    power: str
    temperature: str


def _table(lines: list[str]) -> list[Raw]:
    found, first = [], None
    for line in lines:
        cells = line.strip().strip("|").split("|")
        if len(cells) != 3 or not line.lstrip().startswith("|"):
            continue
        if _NAMED.fullmatch(cells[0]) or _STATE.fullmatch(cells[1]):
            match = _POWER_TEMP.fullmatch(cells[2])
            first = _First(cells[1].strip(), match[1], match[2]) if match else None
        elif first is not None and _PLACED.fullmatch(cells[0]):
            found.append(_chip(first, cells[2]))
            first = None
    return found


def _chip(first: _First, load: str) -> Raw:
    match = _LOAD.fullmatch(load)
    # Boards with HBM show two pairs; the one they do not have is 0 / 0.
    pairs = [(int(used), int(total)) for used, total in _PAIR.findall(load) if int(total)]
    used, total = pairs[-1] if pairs else (None, None)
    return Raw(
        temperature_c=_number(first.temperature),
        power_w=_number(first.power),
        utilization_ratio=_ratio(match[1] if match else None),
        memory_used_bytes=None if used is None else used * _MIB,
        memory_total_bytes=None if total is None else total * _MIB,
        health=first.health or None,
    )


def _watch(lines: list[str]) -> list[Raw]:
    """The last round of rows, one per chip."""
    columns: list[str] = []
    found: dict[tuple[str, str], Raw] = {}
    for line in lines:
        if header := _WATCH_HEADER.fullmatch(line):
            columns = [re.sub(r"\s", "", name).lower() for name in _COLUMN.findall(header[1])]
            continue
        words = line.split()
        if columns and len(words) == len(columns) + 2 and words[0].isdigit():
            row = dict(zip(columns, words[2:], strict=True))
            found[words[0], words[1]] = Raw(
                temperature_c=_number(row.get("temp(c)")),
                power_w=_number(row.get("pwr(w)")),
                utilization_ratio=_ratio(row.get("aicore(%)")),
            )
    return list(found.values())


def _labels(lines: list[str]) -> list[Raw]:
    """Each temperature is one chip; the other figures are those of the same place in order."""
    temperatures = _values(_CELSIUS, lines)
    watts, percents = _values(_WATTS, lines), _values(_AICORE, lines)
    capacities, rates = _values(_CAPACITY, lines), _values(_USED, lines)
    healths = _values(_HEALTH, lines)
    found = []
    for index in range(max(map(len, (temperatures, watts, percents, capacities, healths)))):
        total_mib = _number(_at(capacities, index))
        rate = _ratio(_at(rates, index))
        total = None if total_mib is None else int(total_mib) * _MIB
        found.append(
            Raw(
                temperature_c=_number(_at(temperatures, index)),
                power_w=_number(_at(watts, index)),
                utilization_ratio=_ratio(_at(percents, index)),
                memory_used_bytes=None if rate is None or total is None else int(rate * total),
                memory_total_bytes=total,
                health=_at(healths, index),
            )
        )
    return found


def _values(pattern: re.Pattern[str], lines: list[str]) -> list[str]:
    return [match[1] for line in lines if (match := pattern.fullmatch(line))]


def _at(values: list[str], index: int) -> str | None:
    return values[index] if index < len(values) else None


def _number(word: str | None) -> float | None:
    return float(word) if word and re.fullmatch(_NUMBER, word, re.ASCII) else None


def _ratio(percent: str | None) -> float | None:
    value = _number(percent)
    return None if value is None else value / 100


class NpuSmi:
    """path: of the tool."""

    name = "npu-smi"

    def __init__(
        self,
        path: str,
        chip: int,
        timeout_s: float,
        kill: Callable[[int], None] = kill_group,
    ) -> None:
        self._chip, self._timeout_s = chip, timeout_s
        environ = {"LC_ALL": "C", "LD_LIBRARY_PATH": places.loader_path()}
        self.process = Disposable("npu-smi", (path, "info"), environ, kill)

    async def read(self) -> Raw:
        ended = await self.process.run(self._timeout_s)
        text = ended.out.decode(errors="replace")
        if ended.code:  # not all of its errors have a code, so the text is looked at, too
            words = printable(text + " " + ended.err.decode(errors="replace"), 120)
            raise SensorError(f"npu-smi exited with code {ended.code}: {words or 'no words'}")
        return parse(text, self._chip)

    async def stop(self) -> None:
        await self.process.stop()
