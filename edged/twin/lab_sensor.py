"""The lab's temperature sensor: rounds, and fails in every way real ones do, on schedule."""

from __future__ import annotations

from edged.twin.lab_scenario import Sensor

_WRONG = {"minus_274": -274.0, "zero": 0.0, "255": 255.0}


class LabSensor:
    def __init__(self, sensor: Sensor) -> None:
        self._sensor = sensor
        self._last_c: float | None = None

    def read(self, now_s: float, true_c: float) -> float | None:
        """What a driver would report now; None = it did not answer."""
        quantum = self._sensor.quantum_c
        good_c = round(true_c / quantum) * quantum
        fault = next((f for f in self._sensor.faults if f.at_s <= now_s < f.at_s + f.for_s), None)
        if fault is None:
            self._last_c = good_c
            return good_c
        if fault.kind == "missing":
            return None
        if fault.kind == "stuck":
            return self._last_c
        if fault.kind == "milli_degrees":
            return good_c * 1000.0
        if fault.kind == "jump":
            return good_c - 45.0
        return _WRONG[fault.kind]
