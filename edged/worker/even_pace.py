"""EvenPace: holds a duty by pausing where it makes the time between two tokens even.

A cycle is what happens from the end of one decode step to the end of the next: at most a prefill
chunk, a pause, a decode step. Cycles with a chunk get less pause, others more; over a few they
add up to what the duty asks. Pure arithmetic on times it is told.
"""

from __future__ import annotations

_MEMORY = 1 / 32  # weight of the newest cycle in the mean
_REPAY = 1 / 32  # share of what was paused too little (or too much) that the next pause repairs
_CREDIT = 1.0  # cycles that may be paused in advance; what they save, duty 1 at most spends
_DEBT = 1.0  # cycles that may be paused too late
_LESS = 0.98  # a duty lowered by more than this wants a cooler chip now
_IDLE = 2.0  # a pause this many times longer than wanted was want of work


class EvenPace:
    """Tell it of every execution, ask it before every execution."""

    def __init__(self) -> None:
        self._mean_s = 0.0  # busy seconds of a cycle
        self._closing_s = 0.0  # of the step that ended the last cycle: the next is as long
        self._chunks_s = 0.0  # busy seconds of the running cycle so far
        self._carry_s = 0.0  # pause owed from earlier cycles (negative: taken in advance)
        self._ended_s = 0.0  # when the last cycle ended
        self._duty = 1.0

    def record(self, started_s: float, ended_s: float, closes: bool, duty: float) -> None:
        """One step was executed. closes: it ends the cycle, as every step does but a prefill
        chunk that a decode step follows."""
        busy_s = ended_s - started_s
        if duty < _LESS * self._duty:  # a cooler chip is wanted now: pauses in advance do not count
            self._carry_s = max(self._carry_s, 0.0)
        self._duty = duty
        if not closes:
            self._chunks_s += busy_s
            return
        cycle_s = self._chunks_s + busy_s
        if self._mean_s:
            self._settle(cycle_s, ended_s - self._ended_s - cycle_s, max(duty, 0.01))
            self._mean_s += (cycle_s - self._mean_s) * _MEMORY
        else:
            self._mean_s = cycle_s
        self._closing_s, self._chunks_s, self._ended_s = busy_s, 0.0, ended_s

    def wait_s(self, now_s: float, duty: float, closes: bool) -> float:
        """Until the next step may begin (<= 0 = at once). duty: 0 < duty <= 1; closes: as for
        `record`, of the step to come."""
        if duty >= 1.0 or not closes or not self._mean_s:
            return 0.0
        return self._ended_s + self._chunks_s + self._pause_s(duty) - now_s

    def _pause_s(self, duty: float) -> float:
        """Of the running cycle, if it ends with a step as long as the last cycle did."""
        cycle_s = self._chunks_s + self._closing_s
        even_s = self._mean_s / duty - cycle_s + _REPAY * self._carry_s
        owed_s = self._carry_s + cycle_s * (1.0 / duty - 1.0)
        least_s = owed_s - _DEBT * self._mean_s
        return max(0.0, least_s, min(even_s, owed_s + _CREDIT * self._mean_s))

    def _settle(self, cycle_s: float, paused_s: float, duty: float) -> None:
        if paused_s > _IDLE * self._mean_s / duty:
            self._carry_s = 0.0
            return
        carry_s = self._carry_s + cycle_s * (1.0 / duty - 1.0) - paused_s
        self._carry_s = min(max(carry_s, -_CREDIT * self._mean_s), 2 * _DEBT * self._mean_s)
