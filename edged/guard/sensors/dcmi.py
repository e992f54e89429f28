"""DCMI through ctypes: what the driver's library tells of one chip. Runs in a child process only.

Every call may hang for half a minute or crash; the process around it is disposable. Names, numbers
and layouts are those of dcmi_interface_api.h (CANN 8.1.RC1) unless a comment names another source.
Standard library only.
"""

from __future__ import annotations

import ctypes
from typing import Any

from edged.guard.sensors import Raw, SensorError

_OK = 0
_NO_SYMBOL = -99998  # npu-exporter's number for it (Ascend/mind-cluster, dcmi.go)
_UNSUPPORTED = (-8255, _NO_SYMBOL)
_CODES = {
    -8001: "invalid parameter",
    -8002: "not permitted; add this user to the group HwHiAiUser",
    -8003: "memory error",
    -8005: "inner error",
    -8006: "the driver timed out",
    -8007: "no such device id",
    -8008: "no such device",
    -8009: "ioctl failed",
    -8010: "cannot send to the device",
    -8011: "no answer from the device",
    -8012: "the device is not ready",
    -8013: "not allowed in a container",
    -8015: "reset failed",
    -8017: "the device is being upgraded",
    -8020: "resource occupied",
    -8255: "not supported by this device",
    _NO_SYMBOL: "not in this version of the library",
}
_MOST_CARDS = 64
_FREQ_AICORE_CURRENT = 7  # enum dcmi_freq_type; MHz
_RATE_AICORE = 2  # DCMI_UTILIZATION_RATE_AICORE; percent
_THERMAL_THRESHOLD = 9  # enum dcmi_manager_sensor_id; temp[0] throttles, temp[1] resets (°C)
# dcmi_get_device_health
_HEALTH = {0: "OK", 1: "Warning", 2: "Alarm", 3: "Critical", 0xFFFFFFFF: "Absent"}
_MIB = 1 << 20


class _SensorInfo(ctypes.Union):
    """union dcmi_sensor_info: temp[2] (signed char), ntc_tmp[4], data[16]."""

    _fields_ = [("temp", ctypes.c_byte * 2), ("data", ctypes.c_uint * 16)]


class _MemoryInfo(ctypes.Structure):
    """struct dcmi_get_memory_info_stru: sizes in MB, hugepagesize in KB, utiliza in percent."""

    _fields_ = [
        ("memory_size", ctypes.c_ulonglong),
        ("memory_available", ctypes.c_ulonglong),
        ("freq", ctypes.c_uint),
        ("hugepagesize", ctypes.c_ulong),
        ("hugepages_total", ctypes.c_ulong),
        ("hugepages_free", ctypes.c_ulong),
        ("utiliza", ctypes.c_uint),
        ("reserve", ctypes.c_ubyte * 60),
    ]


class Dcmi:
    """One chip, counted from 0 over all cards. Every method raises SensorError."""

    def __init__(self, library: str, chip: int) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise SensorError(
                f"cannot load {library}: {error}; LD_LIBRARY_PATH must name the driver's lib64"
            ) from None
        self._missing: set[str] = set()  # what this device does not tell; not asked again
        self._must("dcmi_init")
        self._card, self._device = self._find(chip)
        self._throttle_c, self._reset_c = self._thresholds()

    def read(self) -> Raw:
        """The temperature must come; anything else may be None."""
        celsius = ctypes.c_int()
        self._must("dcmi_get_device_temperature", self._card, self._device, ctypes.byref(celsius))
        tenths_w = self._ask("dcmi_get_device_power_info", ctypes.c_int())
        mhz = self._ask("dcmi_get_device_frequency", ctypes.c_uint(), _FREQ_AICORE_CURRENT)
        percent = self._ask("dcmi_get_device_utilization_rate", ctypes.c_uint(), _RATE_AICORE)
        health = self._ask("dcmi_get_device_health", ctypes.c_uint())
        memory = self._ask("dcmi_get_device_memory_info_v3", _MemoryInfo())
        if self._throttle_c is None:  # it never changes, so one answer is enough
            self._throttle_c, self._reset_c = self._thresholds()
        used, total = (None, None) if memory is None else _memory_bytes(memory)
        return Raw(
            temperature_c=float(celsius.value),
            frequency_mhz=None if mhz is None else float(mhz.value),
            power_w=None if tenths_w is None else tenths_w.value / 10,
            utilization_ratio=None if percent is None else percent.value / 100,
            memory_used_bytes=used,
            memory_total_bytes=total,
            throttle_c=self._throttle_c,
            reset_c=self._reset_c,
            health=None if health is None else _HEALTH.get(health.value, f"code {health.value}"),
        )

    def _find(self, chip: int) -> tuple[int, int]:
        """(card, device) of the chip-th one."""
        count, cards = ctypes.c_int(), (ctypes.c_int * _MOST_CARDS)()
        self._must("dcmi_get_card_list", ctypes.byref(count), cards, _MOST_CARDS)
        found = []
        for card in cards[: max(0, min(count.value, _MOST_CARDS))]:
            devices = ctypes.c_int()
            self._must("dcmi_get_device_num_in_card", card, ctypes.byref(devices))
            found += [(card, device) for device in range(max(0, min(devices.value, 8)))]
        if chip >= len(found):
            raise SensorError(f"DCMI lists {len(found)} chips, no chip {chip}; see sensors.chip")
        return found[chip]

    def _thresholds(self) -> tuple[float | None, float | None]:
        info = self._ask("dcmi_get_device_sensor_info", _SensorInfo(), _THERMAL_THRESHOLD)
        return (None, None) if info is None else (float(info.temp[0]), float(info.temp[1]))

    def _ask(self, name: str, out: Any, *arguments: int) -> Any:
        """`out` filled in, or None where the device does not tell."""
        if name in self._missing:
            return None
        code = self._call(name, self._card, self._device, *arguments, ctypes.byref(out))
        if code in _UNSUPPORTED:
            self._missing.add(name)
        return out if code == _OK else None

    def _must(self, name: str, *arguments: Any) -> None:
        code = self._call(name, *arguments)
        if code != _OK:
            raise SensorError(f"{name}: {_CODES.get(code, 'unknown error')} ({code})")

    def _call(self, name: str, *arguments: Any) -> int:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return _NO_SYMBOL
        return int(function(*arguments))


def _memory_bytes(memory: Any) -> tuple[int | None, int | None]:
    """(used, total). Some platforms give memory_available in another unit: then used is None."""
    total, available = int(memory.memory_size), int(memory.memory_available)
    used = (total - available) * _MIB if available <= total else None
    return used, total * _MIB
