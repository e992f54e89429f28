"""The hub: which of several sources counts, in hours of virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from fakes_sensors import ScriptedSensor, lost
from hypothesis import given
from hypothesis import settings as trying
from hypothesis import strategies as st
from structlog.testing import capture_logs

from edged.guard.sensors import Raw, tidied
from edged.guard.sensors.hub import Hub, SensorState
from edged.guard.sensors.stuck import BUSY_RATIO, IDLE_RATIO, STRETCH_S, Still, over, watched
from edged.settings import Sensors
from edged.twin.virtual_loop import run_virtual

DEFAULT = Sensors()


async def seconds(hub: Hub, count: float, busy: float | None = None) -> None:
    """Sample once per second, as the guard does."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + count
    while loop.time() < end_s:
        due_s = loop.time() + 1.0
        await hub.sample(busy)
        await asyncio.sleep(due_s - loop.time())


def temperature(hub: Hub) -> tuple[str, float | None] | None:
    reading = hub.latest(asyncio.get_running_loop().time())
    return None if reading is None else (reading.source, reading.temperature_c)


def states(hub: Hub) -> dict[str, SensorState]:
    return {state.name: state for state in hub.describe()}


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs the test on a loop whose time jumps."""

    def run() -> None:
        run_virtual(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtual
async def test_the_most_trusted_source_that_works_counts() -> None:
    """Of two good sources the first one speaks, with all its figures."""
    full = Raw(65, 500, 9.1, 0.5, 100, 200, 95, 105, "Alarm")
    hub = Hub([ScriptedSensor("dcmi", full), ScriptedSensor("npu-smi", 64)], DEFAULT)
    assert hub.latest(0.0) is None
    assert hub.device() is None
    await seconds(hub, 3)
    reading = hub.latest(asyncio.get_running_loop().time())
    assert reading is not None
    assert (reading.source, reading.temperature_c, reading.power_w) == ("dcmi", 65, 9.1)
    assert reading.at_s <= asyncio.get_running_loop().time()
    assert hub.device() == full
    assert [state.in_use for state in hub.describe()] == [True, False]
    await hub.stop()


@virtual
async def test_a_source_that_works_again_takes_over() -> None:
    """The next source steps in while the first is lost, and hands back."""
    script = [65.0] * 5 + [lost()] * 5 + [66.0]
    hub = Hub([ScriptedSensor("dcmi", *script), ScriptedSensor("npu-smi", 60)], DEFAULT)
    await seconds(hub, 5)
    assert temperature(hub) == ("dcmi", 65)
    await seconds(hub, 6)
    assert temperature(hub) == ("npu-smi", 60)
    await seconds(hub, 60)
    assert temperature(hub) == ("dcmi", 66)


@virtual
async def test_sources_in_reserve_are_asked_seldom() -> None:
    """While a better one works, a source costs one reading per standby interval."""
    first, second = ScriptedSensor("dcmi", 65), ScriptedSensor("npu-smi", 60)
    hub = Hub([first, second], DEFAULT)
    await seconds(hub, 300)
    assert first.reads == 300
    assert 15 <= second.reads <= 25
    seen = set()
    for _ in range(30):
        await seconds(hub, 1)
        seen.add((states(hub)["npu-smi"].word, states(hub)["npu-smi"].problem))
    assert seen == {("working", ""), ("standby", "")}, "rested, not lost"


@virtual
async def test_one_bad_reading_does_not_lose_a_source() -> None:
    """N of M: a single implausible answer is bridged by the last good one."""
    hub = Hub([ScriptedSensor("dcmi", 65, 65, 65, 0.0, 65, 65, 255.0, 66)], DEFAULT)
    await seconds(hub, 2)
    for _ in range(8):
        assert temperature(hub) is not None
        await seconds(hub, 1)


@pytest.mark.parametrize("value", [0.0, 255.0, -274.0, 65000.0, float("nan"), None])
def test_values_that_mean_not_measured_never_count(value: float | None) -> None:
    """What a broken driver answers is no temperature, and the state says what came."""

    async def main() -> None:
        hub = Hub([ScriptedSensor("dcmi", value)], DEFAULT)
        await seconds(hub, 20)
        assert temperature(hub) is None
        state = states(hub)["dcmi"]
        assert state.word == "failing"
        assert state.problem
        assert (state.good, state.of, state.age_s) == (0, 3, None)

    run_virtual(main())


@virtual
async def test_a_hanging_source_delays_nobody() -> None:
    """A source that never answers costs its callers a moment once; the other stays fresh."""
    hung = ScriptedSensor("dcmi", "hang")
    hub = Hub([hung, ScriptedSensor("npu-smi", 60)], DEFAULT)
    loop = asyncio.get_running_loop()
    await hub.sample()
    assert loop.time() < 0.5
    await seconds(hub, 100)
    began_s = loop.time()
    await hub.sample()
    assert loop.time() == began_s, "no second wait for the same hang"
    assert temperature(hub) == ("npu-smi", 60)
    assert hung.reads == 1
    await hub.stop()
    assert hung.stopped


@virtual
async def test_a_source_that_falls_silent_goes_stale() -> None:
    """A last reading counts for stale_s, however good it was."""
    hub = Hub([ScriptedSensor("dcmi", 65, 65, 65, "hang")], DEFAULT)
    await seconds(hub, 4)
    assert temperature(hub) == ("dcmi", 65)
    await seconds(hub, 4)
    assert temperature(hub) is None
    state = states(hub)["dcmi"]
    assert (state.word, state.problem) == ("stale", "does not answer")
    assert state.age_s is not None
    assert state.age_s > DEFAULT.stale_s
    await hub.stop()


@virtual
async def test_a_lost_source_is_asked_less_and_less() -> None:
    """A tool that always fails is not started every second, but found within a standby interval
    when it works again."""
    sensor = ScriptedSensor("npu-smi", lost())
    hub = Hub([sensor], DEFAULT)
    await seconds(hub, 600)
    assert sensor.reads < 60
    sensor.script = [65.0]
    await seconds(hub, DEFAULT.standby_interval_s + 4)
    assert temperature(hub) == ("npu-smi", 65)


@virtual
async def test_each_problem_is_logged_once() -> None:
    """Hours of the same failures are one line each, also where they alternate or carry numbers;
    a recovery is told and starts anew."""
    script = [lost(f"no answer after {n % 7} s") if n % 2 else lost("hangs") for n in range(300)]
    sensor = ScriptedSensor("npu-smi", *script, 65)
    with capture_logs() as logs:
        hub = Hub([sensor], DEFAULT)
        await seconds(hub, 5000)
        assert sensor.script == [65]
        sensor.script = [lost("hangs")]
        await seconds(hub, 100)
    assert [(line["event"], line.get("problem")) for line in logs] == [
        ("sensor_problem", "hangs"),
        ("sensor_problem", "no answer after 1 s"),
        ("sensor_recovered", None),
        ("sensor_problem", "hangs"),
    ]


@virtual
async def test_a_source_that_comes_and_goes_is_logged_once() -> None:
    """Good and bad readings in turn are one line, not a line and a recovery per second."""
    with capture_logs() as logs:
        hub = Hub([ScriptedSensor("dcmi", *[65, 0.0] * 500)], DEFAULT)
        await seconds(hub, 900)
    assert [line["event"] for line in logs] == ["sensor_problem"]


@virtual
async def test_a_defect_in_a_source_is_a_lost_source() -> None:
    """An exception that is no SensorError neither reaches the guard nor counts as a reading."""
    hub = Hub([ScriptedSensor("dcmi", KeyError("x")), ScriptedSensor("npu-smi", 60)], DEFAULT)
    with capture_logs() as logs:
        await seconds(hub, 10)
    assert temperature(hub) == ("npu-smi", 60)
    assert states(hub)["dcmi"].word == "failing"
    assert sum(line["event"] == "sensor_problem" for line in logs) == 1


@virtual
async def test_the_devices_own_limits_are_kept() -> None:
    """The throttle point the driver told once counts while a source without one is in use."""
    first = ScriptedSensor("dcmi", Raw(65, throttle_c=95, reset_c=105), lost())
    hub = Hub([first, ScriptedSensor("npu-smi", Raw(64, health="OK"))], DEFAULT)
    await seconds(hub, 20)
    device = hub.device()
    assert device is not None
    assert (device.temperature_c, device.throttle_c, device.reset_c) == (64, 95, 105)


@virtual
async def test_alarm_and_zero_watts_are_no_faults() -> None:
    """A board that always says Alarm and 0.0 W works; its power is not known."""
    hub = Hub([ScriptedSensor("npu-smi", Raw(65, power_w=0.0, health="Alarm"))], DEFAULT)
    await seconds(hub, 3)
    reading, device = hub.latest(asyncio.get_running_loop().time()), hub.device()
    assert reading is not None
    assert reading.power_w is None
    assert device is not None
    assert device.health == "Alarm"
    assert states(hub)["npu-smi"].word == "working"
    assert states(hub)["npu-smi"].problem == ""


@virtual
async def test_a_source_that_never_moves_under_changing_load_is_stuck() -> None:
    """The same degree through idle and busy minutes is a dead sensor: the next source speaks,
    until the first one moves."""
    dead = ScriptedSensor("dcmi", 65)
    hub = Hub([dead, ScriptedSensor("npu-smi", *[80, 81] * 500)], DEFAULT)
    await seconds(hub, 90, busy=0.0)
    assert temperature(hub) == ("dcmi", 65)
    with capture_logs() as logs:
        await seconds(hub, 90, busy=0.9)
    assert temperature(hub) in (("npu-smi", 80), ("npu-smi", 81))
    assert states(hub)["dcmi"].word == "stuck"
    assert [line["problem"] for line in logs] == ["stuck at 65 °C while the load changed"]
    dead.script = [66]
    await seconds(hub, 16, busy=0.9)
    assert temperature(hub) == ("dcmi", 66)


@virtual
async def test_a_hub_without_sensors_is_empty() -> None:
    """No source here: no reading, nothing to describe, and no waiting."""
    hub = Hub([], DEFAULT)
    await hub.sample(1.0)
    assert (hub.latest(0.0), hub.device(), hub.describe()) == (None, None, ())
    await hub.stop()


_ANSWERS = st.one_of(
    st.none(),
    st.floats(),
    st.floats(40, 90),
    st.sampled_from([0.0, 255.0, -274.0, 65000.0]),
    st.builds(lost),
    st.just(KeyError("defect")),
    st.just("hang"),
)


@given(st.lists(st.lists(_ANSWERS, min_size=1, max_size=20), max_size=3))
@trying(deadline=None, max_examples=60)
def test_whatever_sources_answer_only_plausible_fresh_readings_count(
    scripts: list[list[float | Exception | str | None]],
) -> None:
    """Any mixture of wrong values, errors, defects and hangs: calls are short, and what comes out
    is a temperature of a working board, no older than allowed, of a source that is in use."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        hub = Hub([ScriptedSensor(f"s{i}", *script) for i, script in enumerate(scripts)], DEFAULT)
        for _ in range(60):
            began_s = loop.time()
            await hub.sample(0.5)
            assert loop.time() - began_s < 0.5
            await asyncio.sleep(began_s + 1.0 - loop.time())
            reading = hub.latest(loop.time())
            used = [state.name for state in hub.describe() if state.in_use]
            assert used == ([] if reading is None else [reading.source])
            if reading is not None:
                assert reading.temperature_c is not None
                assert -30 <= reading.temperature_c <= 125
                assert loop.time() - reading.at_s <= DEFAULT.stale_s
        await hub.stop()

    with capture_logs():
        run_virtual(main())


# stuck, the pure rule ----------------------------------------------------------------------------


def watch(*stretches: tuple[float, float, float | None]) -> Still:
    """stretches: seconds, °C, busy ratio."""
    state, now_s = Still(), 0.0
    for length_s, value_c, busy in stretches:
        for _ in range(int(length_s)):
            state = watched(state, value_c, busy, now_s)
            now_s += 1.0
    return state


@pytest.mark.parametrize(
    ("stretches", "stuck"),
    [
        (((70, 65, 0.0), (70, 65, 1.0)), True),
        (((70, 65, 1.0), (30, 65, 0.2), (70, 65, 0.0)), True),
        (((70, 65, 0.0), (70, 65.1, 1.0)), False),
        (((7000, 80, 1.0),), False),
        (((7000, 45, 0.0),), False),
        (((300, 80, 0.9), (300, 80, 0.4), (300, 80, 0.1)), False),
        (((70, 65, None), (70, 65, 1.0)), False),
        (((70, 65, 0.0), *(((50, 65, 1.0), (5, 65, 0.3)) * 10)), False),
        (((70, 65, 0.0), (70, 65, 1.0), (1, 66, 1.0)), False),
    ],
)
def test_only_idle_and_busy_minutes_at_one_value_are_stuck(
    stretches: tuple[tuple[float, float, float | None], ...], stuck: bool
) -> None:
    """A steady chip, a governed one and short bursts are never called stuck."""
    assert watch(*stretches).stuck is stuck


@given(st.lists(st.tuples(st.integers(1, 59), st.sampled_from([0.0, 1.0])), max_size=30))
@trying(deadline=None, max_examples=50)
def test_short_stretches_are_never_stuck(runs: list[tuple[int, float]]) -> None:
    """However long the temperature stays the same, only whole minutes of each load tell."""
    pauses = [((float(length), 65.0, busy), (1.0, 65.0, 0.2)) for length, busy in runs]
    assert STRETCH_S >= 60
    assert not watch(*(stretch for pair in pauses for stretch in pair)).stuck


@given(st.lists(st.none() | st.floats(0, 1), max_size=10))
@trying(deadline=None, max_examples=200)
def test_a_stretch_is_idle_or_busy_only_if_all_of_it_was(ratios: list[float | None]) -> None:
    """Bursts between two readings of a source in reserve make neither an idle nor a busy one."""
    one = over(ratios)
    if one is None:
        assert not ratios or None in ratios
        return
    known = [ratio for ratio in ratios if ratio is not None]
    assert (one <= IDLE_RATIO) == all(ratio <= IDLE_RATIO for ratio in known)
    assert (one >= BUSY_RATIO) == all(ratio >= BUSY_RATIO for ratio in known)


@virtual
async def test_bursts_are_no_stuck_sensor_in_reserve() -> None:
    """A source in reserve, read every 15 s under a bursty load, is not taken for dead."""
    reserve = ScriptedSensor("npu-smi", 65)
    hub = Hub([ScriptedSensor("dcmi", *[70, 71] * 2000), reserve], DEFAULT)
    rested_s = 0
    for second in range(600):  # read in idle moments of busy minutes, then the other way round
        busy = float((rested_s >= 13) != (second < 300))
        reads = reserve.reads
        await seconds(hub, 1, busy)
        rested_s = 0 if reserve.reads > reads else rested_s + 1
        assert states(hub)["npu-smi"].word != "stuck"


# tidied ------------------------------------------------------------------------------------------


@given(
    st.builds(
        Raw,
        *[st.none() | st.floats()] * 4,
        *[st.none() | st.integers(-(2**70), 2**70)] * 2,
        *[st.none() | st.floats()] * 2,
        st.none() | st.text(),
    )
)
@trying(deadline=None, max_examples=200)
def test_tidied_figures_are_possible_ones(raw: Raw) -> None:
    """Whatever a driver says: powers and clocks are positive, shares within 0 to 1, used memory
    within the whole, limits of a chip's kind, health a printable word; twice is as once."""
    tidy = tidied(raw)
    assert tidy.power_w is None or 0 < tidy.power_w <= 1e4
    assert tidy.frequency_mhz is None or 0 < tidy.frequency_mhz <= 1e5
    assert tidy.utilization_ratio is None or 0 <= tidy.utilization_ratio <= 1
    assert tidy.memory_total_bytes is None or tidy.memory_total_bytes > 0
    if tidy.memory_used_bytes is not None:
        assert 0 <= tidy.memory_used_bytes <= (tidy.memory_total_bytes or tidy.memory_used_bytes)
    for limit_c in (tidy.throttle_c, tidy.reset_c):
        assert limit_c is None or 40 <= limit_c <= 150
    assert tidy.health is None or (tidy.health.isprintable() and 0 < len(tidy.health) <= 32)
    assert tidied(replace(tidy, temperature_c=1.0)) == replace(tidy, temperature_c=1.0)
