"""Pace: how long to wait before a step (duty) and what to promise for the next frame.

Pure arithmetic on times it is told. A promise is generous: the daemon kills who breaks it.
"""

from __future__ import annotations

from edged.worker.even_pace import EvenPace

_FLOOR_S = 10.0  # a busy machine, a page-in or a re-pack of a large cache
_MARGIN = 20.0  # times the slowest recent step: a longer context or chunk may come next
_FORGET = 0.98  # per step


class Pace:
    """closes: see EvenPace; true of every step but a prefill chunk that a decode step follows."""

    def __init__(self, slowest_s: float) -> None:
        self._slowest_s = slowest_s
        self._even = EvenPace()

    def record(self, started_s: float, ended_s: float, closes: bool, duty: float) -> None:
        """One step was executed."""
        self._slowest_s = max(ended_s - started_s, self._slowest_s * _FORGET)
        self._even.record(started_s, ended_s, closes, duty)

    def wait_s(self, now_s: float, duty: float, closes: bool) -> float:
        """Until the next step may begin (<= 0: now), so that steps fill `duty` > 0 of the time."""
        return self._even.wait_s(now_s, duty, closes)

    def deadline_s(self, now_s: float, duty: float) -> float:
        """Time allowed until the next frame while there is work."""
        pause_s = max(0.0, self._even.wait_s(now_s, duty, closes=True))
        return _FLOOR_S + _MARGIN * self._slowest_s + pause_s
