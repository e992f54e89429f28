"""Pace: how long to wait between steps (duty) and what to promise for the next frame.

Pure arithmetic on times it is told. A promise is generous: the daemon kills who breaks it.
"""

from __future__ import annotations

_FLOOR_S = 10.0  # a busy machine, a page-in or a re-pack of a large cache
_MARGIN = 20.0  # times the slowest recent step: a longer context or chunk may come next
_FORGET = 0.98  # per step


class Pace:
    def __init__(self, slowest_s: float) -> None:
        self._slowest_s = slowest_s
        self._took_s = 0.0
        self._ended_s = 0.0

    def record(self, started_s: float, ended_s: float) -> None:
        """One step was executed."""
        self._took_s, self._ended_s = ended_s - started_s, ended_s
        self._slowest_s = max(self._took_s, self._slowest_s * _FORGET)

    def wait_s(self, now_s: float, duty: float) -> float:
        """Until the next step may begin, so that steps fill `duty` (> 0) of the time."""
        return self._ended_s + self._pause_s(duty) - now_s

    def deadline_s(self, duty: float) -> float:
        """Time allowed until the next frame while there is work."""
        return _FLOOR_S + _MARGIN * self._slowest_s + self._pause_s(duty)

    def _pause_s(self, duty: float) -> float:
        return self._took_s * (1 / min(duty, 1.0) - 1)
