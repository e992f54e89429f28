"""Sensors for tests: a scripted one, a fake npu-smi program and a fake libdcmi.so in C."""

# ruff: noqa: E501  tables of npu-smi keep their width

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from edged.guard.sensors import Raw, SensorError

CELL = "| 0       310B4                 | Alarm           | 0.0          {}                15    / 15            |"
TABLE_310B4 = f"""\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 23.0.0                                   Version: 23.0.0                                       |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
{CELL.format(65)}
| 0       0                     | NA              | 0            3628 / 15609                            |
+===============================+=================+======================================================+
"""


class ScriptedSensor:
    """Gives the next item of its script at each read, the last one for ever: a temperature, a
    Raw, a SensorError to raise, or "hang"."""

    def __init__(self, name: str, *script: float | Raw | Exception | str | None) -> None:
        self.name = name
        self.script = list(script)
        self.reads = 0
        self.stopped = False

    async def read(self) -> Raw:
        self.reads += 1
        item = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if item == "hang":
            await asyncio.Event().wait()
        if isinstance(item, Exception):
            raise item
        if isinstance(item, Raw):
            return item
        assert item is None or isinstance(item, (int, float))
        return Raw(temperature_c=item)

    async def stop(self) -> None:
        self.stopped = True


def lost(words: str = "no answer") -> SensorError:
    return SensorError(words)


def program(folder: Path, body: str, name: str = "npu-smi") -> Path:
    """An executable shell script. It counts its starts in `<name>.starts`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho $$ >> {path}.starts\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def starts(path: Path) -> list[int]:
    """Process ids of all starts of a program()."""
    file = path.with_name(path.name + ".starts")
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def printing(folder: Path, text: str, code: int = 0, name: str = "npu-smi") -> Path:
    (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return program(folder, f"cat {folder}/{name}.txt\nexit {code}", name)


def thermal_root(folder: Path, zones: dict[str, str], hwmon: dict[str, str] | None = None) -> Path:
    """A sysfs with thermal zones (type -> temp) and hwmon chips (name -> temp1_input)."""
    for index, (kind, value) in enumerate(zones.items()):
        zone = folder / "class" / "thermal" / f"thermal_zone{index}"
        zone.mkdir(parents=True)
        (zone / "type").write_text(kind + "\n")
        (zone / "temp").write_text(value + "\n")
        (zone / "trip_point_0_type").write_text("critical\n")
        (zone / "trip_point_0_temp").write_text("110000\n")
    for index, (kind, value) in enumerate((hwmon or {}).items()):
        chip = folder / "class" / "hwmon" / f"hwmon{index}"
        chip.mkdir(parents=True)
        (chip / "name").write_text(kind + "\n")
        (chip / "temp1_input").write_text(value + "\n")
    return folder


def alive(pid: int) -> bool:
    """Neither dead nor a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline_s, "did not happen in time"
        await asyncio.sleep(0.01)


# What the driver's library does is read from the file that FAKE_DCMI names, at every call:
# temperature, 0.1 W, MHz, percent, health, and a mode (0 fine, 1 hang, 2 device not ready,
# 3 crash, 4 print a lot, 5 only the temperature is supported).
_FAKE_DCMI = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct memory { unsigned long long size, available; unsigned int freq;
                unsigned long page_kb, pages, pages_free; unsigned int percent;
                unsigned char reserve[60]; };

static int temperature, tenths, mhz, percent, health, mode;

static int now(void)
{
    FILE *file = fopen(getenv("FAKE_DCMI"), "r");
    if (!file) return -8009;
    int n = fscanf(file, "%d %d %d %d %d %d",
                   &temperature, &tenths, &mhz, &percent, &health, &mode);
    fclose(file);
    if (n != 6) return -8005;
    if (mode == 1) for (;;) pause();
    if (mode == 2) return -8012;
    if (mode == 3) abort();
    if (mode == 4) for (int i = 0; i < 1000; i++) puts("vendor chatter");
    fflush(stdout);
    return 0;
}
static int extra(void) { int code = now(); return code ? code : mode == 5 ? -8255 : 0; }

int dcmi_init(void) { return now(); }
int dcmi_get_card_list(int *count, int *list, int length)
{ if (length < 2) return -8001; *count = 2; list[0] = 0; list[1] = 3; return 0; }
int dcmi_get_device_num_in_card(int card, int *count)
{ *count = card == 3 ? 2 : 1; return 0; }
static int chip(int card, int device) { return card == 0 ? 0 : 1 + device; }
int dcmi_get_device_temperature(int card, int device, int *out)
{ int code = now(); *out = temperature + chip(card, device); return code; }
int dcmi_get_device_power_info(int card, int device, int *out)
{ int code = extra(); *out = tenths; return code; }
int dcmi_get_device_frequency(int card, int device, int type, unsigned int *out)
{ int code = extra(); *out = type == 7 ? mhz : 1; return code; }
int dcmi_get_device_utilization_rate(int card, int device, int type, unsigned int *out)
{ int code = extra(); *out = type == 2 ? percent : 99; return code; }
int dcmi_get_device_health(int card, int device, unsigned int *out)
{ int code = extra(); *out = (unsigned int)health; return code; }
int dcmi_get_device_memory_info_v3(int card, int device, struct memory *out)
{ int code = extra(); memset(out, 0, sizeof *out);
  out->size = 15609; out->available = 11981; return code; }
int dcmi_get_device_sensor_info(int card, int device, int id, unsigned int *data)
{ int code = extra(); if (code) return code; if (id != 9) return -8001;
  memset(data, 0, 64); ((signed char *)data)[0] = 95; ((signed char *)data)[1] = 105; return 0; }
"""


class FakeDcmi:
    """The compiled library and the file that says what it answers."""

    def __init__(self, library: Path, control: Path) -> None:
        self.library, self.control = library, control
        self.say(65)

    def say(
        self,
        temperature_c: int,
        tenths_w: int = 91,
        mhz: int = 500,
        percent: int = 68,
        health: int = 2,
        mode: int = 0,
    ) -> None:
        text = f"{temperature_c} {tenths_w} {mhz} {percent} {health} {mode}\n"
        fresh = self.control.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.control)


def build_dcmi(folder: Path) -> Path:
    """Needs a C compiler, as CI and boards with CANN have one; skips the test where there is
    none."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fake libdcmi.so")
    source, library = folder / "dcmi.c", folder / "libdcmi.so"
    source.write_text(_FAKE_DCMI)
    command = [compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return library
