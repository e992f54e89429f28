"""Guard: sensors -> policy -> Limits and levers, once per period. Open this first of guard/.

It emits Limits and moves levers; which engine serves is not its business. Decisions are pure
(policy_model.py, base_rule.py); a sensor or a lever that fails is told and never stops the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import structlog

from edged import settings
from edged.core import Limits
from edged.guard import base_rule, policy_model
from edged.guard.control import at_rest, levers_of, settings_of
from edged.guard.levers.find import Found
from edged.guard.mover import Mover
from edged.guard.policy import (
    CPU,
    DUTY_FLOOR,
    NPU,
    Decision,
    Levers,
    Load,
    Seen,
    Settings,
)
from edged.guard.sensors.hub import Hub, SensorState
from edged.guard.view import View
from edged.guard.work import Account, Executed

log = structlog.get_logger("edged.guard")


@dataclass(frozen=True)
class Engines:
    """chain: names in order; the first is the one whose heat is ruled, the others add to it.

    batches: widths of the first that are worth running, the widest last.
    """

    chain: tuple[str, ...]
    batches: tuple[int, ...]
    prefill_chunk: int

    def names(self, role: str) -> tuple[str, ...]:
        return self.chain[:1] if role == NPU else self.chain[1:]


@dataclass(frozen=True)
class Hooks:
    """What the guard asks of the rest. streams: by engine; waiting: in the queue.

    end_streams: it stayed above the critical point for too long.
    """

    streams: Callable[[], Mapping[str, int]]
    waiting: Callable[[], int]
    set_limits: Callable[[str, Limits], None]
    end_streams: Callable[[], None]
    quiet: Callable[[], bool] = lambda: False


class Guard:
    """Call on_step for every step of an engine; view() at any time."""

    def __init__(
        self,
        config: settings.Guard,
        engines: Engines,
        hub: Hub,
        find: Callable[[], Awaitable[Found]],
        hooks: Hooks,
    ) -> None:
        self._config, self._engines, self._hub, self._find = config, engines, hub, find
        self._hooks = hooks
        self._accounts = {name: Account() for name in engines.chain}
        self._limits: dict[str, Limits] = {}
        self._mover = Mover()
        self._levers = levers_of(engines.batches, engines.prefill_chunk)
        self._state: policy_model.ModelState | base_rule.BaseState | None = None
        self._critical_s: float | None = None  # since when, or since streams were ended last
        self._view = View()
        self.looked_s: float | None = None  # loop time at which the last round began
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._take_levers())]

    async def stop(self) -> None:
        """Levers go back to where they were found."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._mover.stop()
        await self._hub.stop()

    def on_step(self, engine: str, step: Executed) -> None:
        self._accounts[engine].add(step, asyncio.get_running_loop().time())

    def view(self) -> View:
        return self._view

    # --- the loop --------------------------------------------------------------------------------

    async def _take_levers(self) -> None:
        """Beside the loop: a dead driver may take half a minute to say so."""
        try:
            self._mover.take(await self._find())
        except Exception:  # a bug of ours: batch and duty hold the limit without levers
            log.exception("levers_not_found")
            why = "no lever is used: looking for them failed; see the log"
            self._mover.take(Found(notes=(why,)))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            self.looked_s = loop.time()
            try:
                await self._hub.sample(self._view.load.busy_ratio)
                self._tick(loop.time())
            except Exception:  # a bug of ours must not leave the chip without a guard
                log.exception("guard_crashed")
                self._fail_safe()
            next_s = max(next_s + self._config.period_s, loop.time())
            await asyncio.sleep(next_s - loop.time())

    def _fail_safe(self) -> None:
        """As slow as it goes, until a later round succeeds; learning begins anew. What was closed
        for heat stays closed."""
        self._state = None
        slow = Limits(1, DUTY_FLOOR, self._engines.prefill_chunk)
        for role in (NPU, CPU):
            for name in self._engines.names(role):
                last = self._limits.get(name, slow)
                self._set(name, slow if last.admit else last)
        self._view = replace(self._view, mode="throttled", reason="guard error; see the log")

    def _tick(self, now_s: float) -> None:
        device, sensors = self._hub.device(), self._hub.describe()
        rules = settings_of(self._config, device)
        seen = Seen(
            now_s,
            self._hub.latest(now_s),
            self._load(NPU, now_s),
            self._load(CPU, now_s),
            self._hooks.quiet(),
        )
        decision = self._decide(rules, seen)
        decision = at_rest(rules, self._levers, decision, seen.npu, seen.temperature_c)
        self._obey(decision)
        critical = self._watch_critical(rules, decision, now_s)
        memory = (device.memory_used_bytes, device.memory_total_bytes) if device else (None, None)
        before, self._view = (
            self._view,
            View(
                mode=decision.mode,
                reason=decision.reason,
                limit_c=rules.limit_c,
                critical_c=rules.critical_c,
                critical=critical,
                reading=seen.reading,
                limits=dict(self._limits),
                frequency_mhz=self._mover.frequency_mhz,
                fan_ratio=self._mover.fan_ratio,
                forecast=decision.forecast,
                load=seen.npu,
                memory_bytes=memory,
                health=device.health if device else None,
                notes=(*self._mover.notes, *_without(sensors)),
                sensors=sensors,
            ),
        )
        if before.mode != decision.mode:
            log.info("guard_mode", mode=decision.mode, reason=decision.reason)

    def _load(self, role: str, now_s: float) -> Load:
        """Of the engine with this role; a guard rules two at most, the NPU and the CPU."""
        streams = self._hooks.streams()
        waiting = self._hooks.waiting() if role == NPU else 0
        loads = [
            self._accounts[name].take(now_s, streams.get(name, 0), waiting, self._duty(name))
            for name in self._engines.names(role)
        ]
        return loads[0] if loads else Load()

    def _duty(self, name: str) -> float:
        return self._limits[name].duty if name in self._limits else 1.0

    def _decide(self, rules: Settings, seen: Seen) -> Decision:
        levers = self._present_levers()
        if self._config.policy == "base":
            state = self._state
            if not isinstance(state, base_rule.BaseState):
                state = base_rule.start(levers, seen.now_s)
            self._state, decision = base_rule.step(rules, levers, state, seen)
            return decision
        learned = self._state
        if not isinstance(learned, policy_model.ModelState):
            learned = policy_model.start(rules, levers, seen.now_s)
        self._state, decision = policy_model.step(rules, levers, learned, seen)
        return decision

    def _present_levers(self) -> Levers:
        """A lever that appears or breaks changes what can be chosen: learning begins anew."""
        found = levers_of(
            self._engines.batches,
            self._engines.prefill_chunk,
            self._mover.frequencies_mhz,
            self._mover.has_fan,
        )
        if found != self._levers:
            self._levers, self._state = found, None
        return found

    # --- what comes of it ------------------------------------------------------------------------

    def _obey(self, decision: Decision) -> None:
        for role, limits in decision.limits.items():
            for name in self._engines.names(role):
                self._set(name, limits)
        self._mover.aim(decision.frequency_mhz, decision.fan_ratio)

    def _set(self, name: str, limits: Limits) -> None:
        if self._limits.get(name) != limits:
            self._limits[name] = limits
            self._hooks.set_limits(name, limits)

    def _watch_critical(self, rules: Settings, decision: Decision, now_s: float) -> bool:
        """Nothing runs above the critical point; what waits in its slots too long is ended."""
        critical = any(not limits.admit for limits in decision.limits.values())
        if critical != (self._critical_s is not None):
            log.warning("guard_critical", critical=critical, critical_c=rules.critical_c)
            self._critical_s = now_s if critical else None
        waited_s = now_s - self._critical_s if self._critical_s is not None else 0.0
        if critical and waited_s >= self._config.critical_wait_s:
            self._critical_s = now_s  # who comes to wait later, from another engine, waits as long
            self._hooks.end_streams()
        return critical


def _without(sensors: tuple[SensorState, ...]) -> tuple[str, ...]:
    """What to do on a machine where nothing tells a temperature: it counts as hot for ever."""
    if sensors:
        return ()
    return ("no temperature sensor here, so the chip counts as hot; see `edged check`, [sensors]",)
