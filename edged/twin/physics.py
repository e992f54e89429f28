"""Physics of a simulated board: step time, power, heat, firmware throttle. Pure, no I/O.

The field board's numbers reproduce a published report (configs/boards/field.toml). Clocks are MHz,
x = highest gear / clock. Whoever simulates keeps the state and tells the time; see `ThermalState`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal

import msgspec


class Clock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """gears_mhz: ascending. settable: whether software may choose one (no public setter exists
    on 310B; the lab can take it away)."""

    gears_mhz: tuple[float, ...]
    settable: bool = True


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """total_bytes: of the device (shared with Linux in RC mode). free_after_load_bytes: what the
    default model leaves. clock_exponent: memory time grows with x**e; 0 = core clock is free."""

    total_bytes: float
    bandwidth_bytes_per_s: float
    efficiency: float
    free_after_load_bytes: float
    clock_exponent: float = 0.0


class Compute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """peak_flops: FP16 at the highest gear. overlap: "max" = memory and compute run side by side
    (twin.md's general form), "sum" = one after the other (the field board's fit)."""

    peak_flops: float
    decode_efficiency: float
    prefill_efficiency: float
    overlap: Literal["max", "sum"] = "max"
    host_s: float = 0.0


class Power(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """busy = idle_w + clock_w / x + dynamic_w / x**2 * (share of the step the cubes are busy).

    prefill_as_decode: a prefill chunk draws what a decode step of the streams in flight draws.
    """

    idle_w: float
    clock_w: float
    dynamic_w: float
    prefill_as_decode: bool = False


class Thermal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """terms: (resistance in °C/W, time constant in s) of each first-order stage, fast first."""

    ambient_c: float
    terms: tuple[tuple[float, float], ...]


class Fan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """points: (duty 0..1, factor on every resistance), ascending duty; linear in between.

    default_ratio: the duty at which the factor is 1. present: a software lever exists.
    """

    present: bool
    default_ratio: float
    points: tuple[tuple[float, float], ...]


class Firmware(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chip's own protection: at throttle_c the clock drops to throttle_mhz until release_c;
    at reset_c the board resets."""

    throttle_c: float
    throttle_mhz: float
    release_c: float
    reset_c: float


class Cpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The CPU shares die and DDR: a busy CPU engine adds heat_w and slows NPU steps by slowdown."""

    heat_w: float
    slowdown: float
    cores: int = 4


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What runs: weights read once per step, KV bytes per token of context, work per token.

    `msgspec.structs.replace(board, model=Model(...))` puts another model on a board.
    """

    name: str
    weight_bytes: float
    kv_bytes_per_token: float
    flop_per_token: float
    context_tokens: int


class Board(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One board's parameter file. run_mode: 0 = RC (memory shared with Linux), 1 = EP card."""

    name: str
    soc: str
    run_mode: Literal[0, 1]
    clock: Clock
    memory: Memory
    compute: Compute
    power: Power
    thermal: Thermal
    fan: Fan
    firmware: Firmware
    cpu: Cpu
    model: Model

    @property
    def max_mhz(self) -> float:
        return self.clock.gears_mhz[-1]


# --- time ----------------------------------------------------------------------------------------


def step_time_s(
    board: Board,
    batch: int,
    tokens: int,
    context: int,
    frequency_mhz: float,
    cpu_busy_ratio: float = 0.0,
) -> float:
    """Seconds of one execution of shape (batch, tokens, context): tokens 1 = decode, more = one
    prefill chunk. context: cache rows the graph reads per sequence (the whole gear)."""
    x = board.max_mhz / frequency_mhz
    memory_s = _memory_s(board, batch, context, x)
    compute_s = _compute_s(board, batch, tokens, x)
    if board.compute.overlap == "max":
        busy_s = max(memory_s, compute_s)
    elif tokens == 1:
        busy_s = memory_s + compute_s
    else:  # the fit: a prompt costs the same however it is cut
        busy_s = compute_s
    return (busy_s + board.compute.host_s) * (1.0 + board.cpu.slowdown * cpu_busy_ratio)


def _memory_s(board: Board, batch: int, context: int, x: float) -> float:
    memory, model = board.memory, board.model
    moved_bytes = model.weight_bytes + batch * context * model.kv_bytes_per_token
    rate = memory.bandwidth_bytes_per_s * memory.efficiency
    return float(moved_bytes / rate * x**memory.clock_exponent)


def _compute_s(board: Board, batch: int, tokens: int, x: float) -> float:
    compute = board.compute
    efficiency = compute.decode_efficiency if tokens == 1 else compute.prefill_efficiency
    return batch * tokens * board.model.flop_per_token / (compute.peak_flops * efficiency) * x


# --- power ---------------------------------------------------------------------------------------


def busy_power_w(
    board: Board,
    batch: int,
    tokens: int,
    context: int,
    frequency_mhz: float,
    streams: int | None = None,
) -> float:
    """Watts of the whole board while such a step executes (CPU engine not counted).

    streams: sequences in flight, of which a prefill chunk computes only one; default batch.
    """
    if tokens > 1 and board.power.prefill_as_decode:
        batch, tokens = max(batch, streams or batch), 1
    x = board.max_mhz / frequency_mhz
    whole_s = step_time_s(board, batch, tokens, context, frequency_mhz)
    share = min(1.0, _compute_s(board, batch, tokens, x) / whole_s)
    power = board.power
    return power.idle_w + power.clock_w / x + power.dynamic_w / (x * x) * share


def cpu_power_w(board: Board, busy_ratio: float) -> float:
    """Watts a CPU engine adds while busy for that share of the time."""
    return board.cpu.heat_w * busy_ratio


# --- heat ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ThermalState:
    """Temperature = ambient + the sum of first-order rises; integrated exactly between events.

    rises_c: of each term, now. resistance: factor on every R (fan, blocked fins).
    """

    terms: tuple[tuple[float, float], ...]
    ambient_c: float
    rises_c: tuple[float, ...]
    resistance: float = 1.0

    @classmethod
    def at_rest(cls, board: Board, ambient_c: float | None = None) -> ThermalState:
        """Settled at idle power."""
        ambient = board.thermal.ambient_c if ambient_c is None else ambient_c
        state = cls(board.thermal.terms, ambient, tuple(0.0 for _ in board.thermal.terms))
        return state.settled(board.power.idle_w)

    @property
    def temperature_c(self) -> float:
        return self.ambient_c + sum(self.rises_c)

    def settled(self, power_w: float) -> ThermalState:
        """Where this power leads after a long time."""
        rises = tuple(r * self.resistance * power_w for r, _ in self.terms)
        return replace(self, rises_c=rises)

    def advance(self, dt_s: float, power_w: float) -> ThermalState:
        """After dt_s of constant power, ambient and resistance."""
        rises = []
        for (r, tau_s), rise in zip(self.terms, self.rises_c, strict=True):
            end = r * self.resistance * power_w
            rises.append(end + (rise - end) * math.exp(-dt_s / tau_s))
        return ThermalState(self.terms, self.ambient_c, tuple(rises), self.resistance)

    def mean_c(self, dt_s: float, power_w: float) -> float:
        """Mean temperature over the next dt_s > 0 of constant power."""
        total = self.ambient_c
        for (r, tau_s), rise in zip(self.terms, self.rises_c, strict=True):
            end = r * self.resistance * power_w
            total += end + (rise - end) * -math.expm1(-dt_s / tau_s) * tau_s / dt_s
        return total

    def reaches_s(self, dt_s: float, power_w: float, target_c: float) -> float | None:
        """When, within dt_s of constant power, the temperature arrives at target_c from its
        present side; None = not at the end of dt_s."""
        rising = self.temperature_c < target_c
        if (self.advance(dt_s, power_w).temperature_c >= target_c) != rising:
            return None
        low, high = 0.0, dt_s
        while high - low > 1e-4:  # s; a tenth of a millisecond moves less than 0.001 °C
            middle = (low + high) / 2
            if (self.advance(middle, power_w).temperature_c >= target_c) == rising:
                high = middle
            else:
                low = middle
        return high


def fan_resistance(board: Board, duty_ratio: float) -> float:
    """Factor on every thermal resistance at this fan duty (0..1)."""
    points = board.fan.points
    if duty_ratio <= points[0][0]:
        return points[0][1]
    for (low, factor), (high, next_factor) in itertools.pairwise(points):
        if duty_ratio <= high:
            return factor + (next_factor - factor) * (duty_ratio - low) / (high - low)
    return points[-1][1]


# --- the chip's own protection -------------------------------------------------------------------


def firmware_throttles(board: Board, throttled: bool, temperature_c: float) -> bool:
    """Whether the firmware holds the clock down, with its hysteresis."""
    if temperature_c >= board.firmware.throttle_c:
        return True
    return throttled and temperature_c > board.firmware.release_c


def clock_mhz(board: Board, throttled: bool, wanted_mhz: float) -> float:
    """The clock the chip really runs at."""
    return min(wanted_mhz, board.firmware.throttle_mhz) if throttled else wanted_mhz
