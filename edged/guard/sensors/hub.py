"""Hub: reads all sources side by side and says which temperature counts.

A source that hangs delays neither the others nor the caller. Which figures may be believed is
plausible.py's and stuck.py's; what a missing one means is the policy's.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import structlog

from edged.core import Reading
from edged.guard.plausible import Filter, believed
from edged.guard.sensors import Raw, Sensor, SensorError, tidied
from edged.guard.sensors.stuck import Still, over, watched
from edged.settings import Sensors

log = structlog.get_logger("edged.guard")

Word = Literal["starting", "working", "standby", "failing", "stale", "stuck"]

_PATIENCE_S = 0.3  # of sample(); slower sources are picked up when they answer
_LEAVE_S = 5.0  # for readings under way, when stopped
_EARLY = 0.9  # share of an interval after which a source is due: callers' clocks jitter
_FORGET_S = 60.0  # without a believed reading; then a jump is no longer one
_FAILURES = 3  # in a row, before a source is asked less and less often
_MOST_RATIOS = 64  # busy ratios kept between two readings of a source
_MOST_KINDS = 16  # of problems logged until a source has recovered


@dataclass(frozen=True)
class SensorState:
    """For status. problem: in words, "" = none. age_s: of the last believed reading. good: how
    many of the last `of` readings were plausible. in_use: its readings are those that count."""

    name: str
    word: Word
    problem: str
    age_s: float | None
    good: int
    of: int
    in_use: bool = False


class _Source:
    """One sensor with what is remembered of it."""

    def __init__(self, sensor: Sensor, settings: Sensors) -> None:
        self.sensor = sensor
        self._settings = settings
        self.task: asyncio.Task[None] | None = None
        self.began_s = float("-inf")  # of the last attempt
        self.read_s: float | None = None  # when the last believed reading was asked for
        self.raw: Raw | None = None  # the last believed one
        self.thresholds = Raw()
        self.problem = ""
        self.busy: deque[float | None] = deque(maxlen=_MOST_RATIOS)  # since the last reading
        self._failures = 0
        self._history: deque[bool] = deque(maxlen=settings.of_reads)
        self._filter = Filter()
        self._still = Still()
        self._logged: set[str] = set()

    def due(self, now_s: float, interval_s: float) -> bool:
        if self.task is not None:
            return False
        exponent = min(max(0, self._failures - _FAILURES + 1), 16)
        longest_s = max(interval_s, self._settings.standby_interval_s)
        return now_s - self.began_s >= _EARLY * min(interval_s * 2.0**exponent, longest_s)

    async def read(self) -> None:
        self.began_s = began_s = asyncio.get_running_loop().time()
        try:
            raw = tidied(await self.sensor.read())
        except SensorError as error:
            self.failed(str(error))
            return
        self._failures = 0
        if raw.throttle_c is not None or raw.reset_c is not None:
            self.thresholds = Raw(throttle_c=raw.throttle_c, reset_c=raw.reset_c)
        if self.read_s is None or began_s - self.read_s > _FORGET_S:
            self._filter = Filter()
        self._filter, value_c, problem = believed(self._filter, raw.temperature_c)
        if value_c is not None:
            self._still = watched(self._still, value_c, over(self.busy), began_s)
            self.busy.clear()
            self.raw, self.read_s = raw, began_s
            if self._still.stuck:
                problem = f"stuck at {value_c:g} °C while the load changed"
        self._judged(problem, plausible=value_c is not None)

    def failed(self, problem: str) -> None:
        self._failures += 1
        self._judged(problem)

    def _judged(self, problem: str, plausible: bool = False) -> None:
        """Count it, and log each kind of problem once until the source has recovered."""
        self._history.append(plausible)
        self.problem = problem
        if problem:
            kind = re.sub(r"[\d.]+", "#", problem)
            if kind not in self._logged and len(self._logged) < _MOST_KINDS:
                self._logged.add(kind)
                log.warning("sensor_problem", sensor=self.sensor.name, problem=problem)
        elif self._logged and all(self._history):
            self._logged.clear()
            log.info("sensor_recovered", sensor=self.sensor.name)

    def word(self, now_s: float) -> Word:
        if self._still.stuck:
            return "stuck"
        if self.good < self._settings.good_reads:
            young = len(self._history) < self._settings.good_reads and all(self._history)
            return "starting" if young else "failing"
        if self.read_s is None or now_s - self.read_s > self._settings.stale_s:
            return "stale"
        return "working"

    @property
    def good(self) -> int:
        return sum(self._history)

    def state(self, now_s: float, in_use: bool) -> SensorState:
        word, problem = self.word(now_s), self.problem
        age_s = None if self.read_s is None else now_s - self.read_s
        if word == "stale" and not problem:
            asked_again_s = 2 * self._settings.standby_interval_s
            if self.task is None and age_s is not None and age_s <= asked_again_s:
                word = "standby"
            else:
                problem = "does not answer"
        of = len(self._history)
        return SensorState(self.sensor.name, word, problem, age_s, self.good, of, in_use)


class Hub:
    """sensors: the most trusted first. Call sample() about once per settings.interval_s."""

    def __init__(self, sensors: Sequence[Sensor], settings: Sensors) -> None:
        self._settings = settings
        self._sources = [_Source(sensor, settings) for sensor in sensors]

    async def sample(self, busy_ratio: float | None = None) -> None:
        """Start what is due and wait a moment for it. busy_ratio: share of the time since the
        last call that the NPU executed, 0..1; None = not known."""
        now_s = asyncio.get_running_loop().time()
        started = []
        for source in self._sources:
            source.busy.append(busy_ratio)
        better = False  # a more trusted source works: this one stands by
        for source in self._sources:
            interval_s = self._settings.standby_interval_s if better else self._settings.interval_s
            if source.due(now_s, interval_s):
                source.task = asyncio.ensure_future(source.read())
                source.task.add_done_callback(partial(_done, source))
                started.append(source.task)
            better = better or source.word(now_s) == "working"
        if started:
            await asyncio.wait(started, timeout=_PATIENCE_S)

    def latest(self, now_s: float) -> Reading | None:
        """The reading of the most trusted source that works; None = nothing plausible.

        at_s is when it was asked for, so that a slow answer is not taken for a fresh one.
        """
        source = self._chosen(now_s)
        if source is None or source.raw is None or source.read_s is None:
            return None
        raw = source.raw
        return Reading(
            source=source.sensor.name,
            at_s=source.read_s,
            temperature_c=raw.temperature_c,
            frequency_mhz=raw.frequency_mhz,
            power_w=raw.power_w,
            utilization_ratio=raw.utilization_ratio,
            memory_used_bytes=raw.memory_used_bytes,
        )

    def device(self) -> Raw | None:
        """All that the source in use tells. The device's own limits come from any source."""
        source = self._chosen(asyncio.get_running_loop().time())
        if source is None or source.raw is None:
            return None
        known = [s.thresholds for s in (source, *self._sources)]
        return replace(
            source.raw,
            throttle_c=next((t.throttle_c for t in known if t.throttle_c is not None), None),
            reset_c=next((t.reset_c for t in known if t.reset_c is not None), None),
        )

    def describe(self) -> tuple[SensorState, ...]:
        """For status; empty = there is no sensor here."""
        now_s = asyncio.get_running_loop().time()
        chosen = self._chosen(now_s)
        return tuple(source.state(now_s, source is chosen) for source in self._sources)

    async def stop(self) -> None:
        """Ends all readings and processes, in bounded time."""
        tasks = [source.task for source in self._sources if source.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LEAVE_S)
        stops = (source.sensor.stop() for source in self._sources)
        for failure in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(failure, BaseException):
                log.error("sensor_stop_failed", error=repr(failure))

    def _chosen(self, now_s: float) -> _Source | None:
        return next((s for s in self._sources if s.word(now_s) == "working"), None)


def _done(source: _Source, task: asyncio.Task[None]) -> None:
    source.task = None
    if not task.cancelled() and (error := task.exception()) is not None:
        # A defect of ours: the source is lost, which is safe, and the log has the trace.
        source.failed(f"{type(error).__name__}: {error}")
        log.error("sensor_defect", sensor=source.sensor.name, exc_info=error)
