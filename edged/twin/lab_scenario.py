"""A lab scenario: one TOML file -> typed load, surroundings, levers and sensor.

Profiles are lists of [seconds, value]: clients, resistance and CPU load change in steps, the
ambient temperature in straight lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from edged.errors import ConfigError
from edged.twin import boards, tables
from edged.twin.physics import Board, fan_resistance

Profile = tuple[tuple[float, float], ...]
Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
FaultKind = Literal["missing", "stuck", "minus_274", "zero", "255", "milli_degrees", "jump"]

SCENARIOS_DIR = Path(__file__).parents[2] / "configs" / "scenarios"


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """clients: how many closed-loop clients ask, over time. rounds: they ask together and a
    refused one waits for the next round. burst_requests arrive at once every burst_every_s.

    prompt_tokens 129: 128 are prefilled, the last goes with the first decode step.
    """

    clients: Profile = ((0.0, 8.0),)
    rounds: bool = False
    burst_every_s: NotNegative = 0.0
    burst_requests: Annotated[int, msgspec.Meta(ge=0)] = 0
    prompt_tokens: PositiveInt = 129
    answer_tokens: PositiveInt = 64
    answer_spread_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class Surroundings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ambient_c empty = the board's own. resistance: factor on every R (a failing fan).
    cpu_ratio: how busy a CPU engine wants to be. extra_terms: more (C/W, s) stages, such as the
    air of a sealed case."""

    ambient_c: Profile = ()
    resistance: Profile = ((0.0, 1.0),)
    cpu_ratio: Profile = ((0.0, 0.0),)
    extra_terms: tuple[tuple[float, float], ...] = ()


class Levers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which levers software has. fan_ratio: the duty without (or before) our control."""

    frequency: bool = True
    fan: bool = False
    fan_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


class SensorFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    at_s: NotNegative
    for_s: Positive
    kind: FaultKind


class Sensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Readings are rounded to quantum_c and come every interval_s."""

    quantum_c: Positive = 1.0
    interval_s: Positive = 1.0
    faults: tuple[SensorFault, ...] = ()


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """warmup_s: left out of the figures; at least five of the longest time constant.

    weights: factor on the model's weight bytes (2.0 = 8-bit instead of 4-bit). slots: KV slots
    the arena has room for. jitter: sigma of the log-normal factor on step times.
    """

    description: str
    duration_s: Positive
    board: str = "field"
    warmup_s: NotNegative = 60.0
    seed: int = 1
    limit_c: float = 80.0
    itl_slo_s: Positive = 1.0
    jitter: NotNegative = 0.03
    allocator: Literal["arena", "direct"] = "arena"
    slots: PositiveInt = 8
    weights: Positive = 1.0
    load: Load = Load()
    surroundings: Surroundings = Surroundings()
    levers: Levers = Levers()
    sensor: Sensor = Sensor()
    name: str = ""


def load(path: Path) -> Scenario:
    """Raises ConfigError naming the file and the key."""
    scenario = tables.read(path, Scenario)
    where = str(path)
    if scenario.warmup_s >= scenario.duration_s:
        raise ConfigError(f"{where}: warmup_s: must be less than duration_s")
    profiles = {
        "load.clients": scenario.load.clients,
        "surroundings.ambient_c": scenario.surroundings.ambient_c,
        "surroundings.resistance": scenario.surroundings.resistance,
        "surroundings.cpu_ratio": scenario.surroundings.cpu_ratio,
    }
    for key, profile in profiles.items():
        times = [at_s for at_s, _ in profile]
        if times != sorted(times) or (times and times[0] != 0):
            raise ConfigError(f"{where}: {key}: pairs of [seconds, value] from 0, ascending")
    if any(r <= 0 or tau <= 0 for r, tau in scenario.surroundings.extra_terms):
        raise ConfigError(f"{where}: surroundings.extra_terms: positive pairs of (C/W, s)")
    boards.load(scenario.board)  # an unknown board is named now, not in the middle of a run
    return msgspec.structs.replace(scenario, name=path.stem)


def board_of(scenario: Scenario) -> Board:
    """The scenario's board with its levers, its model and its surroundings' thermal terms."""
    board = boards.load(scenario.board)
    thermal, model = board.thermal, board.model
    return msgspec.structs.replace(
        board,
        clock=msgspec.structs.replace(board.clock, settable=scenario.levers.frequency),
        thermal=msgspec.structs.replace(
            thermal, terms=thermal.terms + scenario.surroundings.extra_terms
        ),
        model=msgspec.structs.replace(model, weight_bytes=model.weight_bytes * scenario.weights),
    )


def step_at(profile: Profile, now_s: float) -> float:
    """The value a profile of steps has now."""
    value = profile[0][1]
    for at_s, next_value in profile:
        if at_s > now_s:
            break
        value = next_value
    return value


def line_at(profile: Profile, now_s: float) -> float:
    """The value on the straight lines through a profile."""
    before_s, before = profile[0]
    for at_s, value in profile[1:]:
        if now_s < at_s:
            return before + (value - before) * (now_s - before_s) / (at_s - before_s)
        before_s, before = at_s, value
    return before


def ambient_at(scenario: Scenario, board: Board, now_s: float) -> float:
    profile = scenario.surroundings.ambient_c
    return line_at(profile, now_s) if profile else board.thermal.ambient_c


def fan_ratio_of(scenario: Scenario, board: Board) -> float:
    """The fan's duty before anybody moves it."""
    given = scenario.levers.fan_ratio
    return board.fan.default_ratio if given is None else given


def feasible(scenario: Scenario) -> bool:
    """Idle power alone, with the fan at its best where it can be moved, keeps the chip at least
    3 °C below the limit at every moment."""
    board = board_of(scenario)
    duty = 1.0 if scenario.levers.fan else fan_ratio_of(scenario, board)
    total_r = sum(r for r, _ in board.thermal.terms) * fan_resistance(board, duty)
    around = scenario.surroundings
    moments = {0.0, scenario.duration_s}
    moments |= {at_s for at_s, _ in (*around.ambient_c, *around.resistance)}
    return all(
        ambient_at(scenario, board, at_s)
        + total_r * step_at(around.resistance, at_s) * board.power.idle_w
        <= scenario.limit_c - 3.0
        for at_s in moments
        if at_s <= scenario.duration_s
    )
