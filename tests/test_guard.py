"""The guard's loop: what it reads, what it orders, and what it does when something breaks.

In virtual time, with scripted sensors and levers; decisions have tests of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import time

import pytest
from fakes_sensors import ScriptedSensor, lost
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.config import load
from edged.core import Health, Limits
from edged.errors import ConfigError
from edged.guard.control import quiet_at, settings_of
from edged.guard.levers import Kind, LeverError
from edged.guard.levers.find import Found
from edged.guard.loop import Engines, Guard, Hooks
from edged.guard.policy import DUTY_FLOOR
from edged.guard.sensors import Raw
from edged.guard.sensors.hub import Hub, SensorState
from edged.guard.view import View, view_figures
from edged.guard.work import Account, Executed
from edged.ingress.mqtt.state import EVERY_S, Told
from edged.scheduler import Load
from edged.settings import Guard as GuardSettings
from edged.settings import Sensors
from edged.status import status_json, status_of
from edged.twin.virtual_loop import run_virtual


class FakeLever:
    """Remembers where it was put; `refuses` is what it says instead."""

    def __init__(self, kind: Kind, values: tuple[float, ...]) -> None:
        self.name, self.kind, self.values = f"fake/{kind}", kind, values
        self.places: list[float] = []
        self.asked = 0
        self.refuses = ""
        self.restored = False

    async def set(self, value: float) -> float:
        self.asked += 1
        if self.refuses:
            raise LeverError(self.refuses)
        self.places.append(value)
        return value

    async def restore(self) -> None:
        self.restored = True

    async def stop(self) -> None:
        await self.restore()


@dataclass
class Orders:
    """Everything the guard asked for."""

    limits: list[tuple[str, Limits]] = field(default_factory=list)
    ended: int = 0

    def last(self, name: str) -> Limits:
        return next(limits for engine, limits in reversed(self.limits) if engine == name)


class Rig:
    """A guard over a chain of npu and cpu. demand: sequences that want to run."""

    def __init__(
        self,
        *script: float | Raw | Exception | str | None,
        lever: FakeLever | None = None,
        config: GuardSettings | None = None,
        demand: Callable[[], int] = lambda: 8,
        find_s: float = 0.0,
    ) -> None:
        self.orders = Orders()
        self.sensor = ScriptedSensor("scripted", *script)
        self.lever = lever
        orders = self.orders

        def end_streams() -> None:
            orders.ended += 1

        async def find() -> Found:
            await asyncio.sleep(find_s)
            return Found(frequency=lever, notes=() if lever else ("frequency: none here",))

        self.guard = Guard(
            config or GuardSettings(policy="base"),
            Engines(("npu", "cpu"), (1, 4, 8), 64),
            Hub([self.sensor], Sensors(good_reads=1, of_reads=1)),
            find,
            Hooks(
                streams=lambda: {"npu": demand()},
                waiting=lambda: 0,
                set_limits=lambda name, limits: orders.limits.append((name, limits)),
                end_streams=end_streams,
            ),
        )

    def run(self, seconds: float) -> Rig:
        async def live() -> None:
            await self.guard.start()
            await asyncio.sleep(seconds)
            self.view = self.guard.view()
            await self.guard.stop()

        run_virtual(live())
        return self


def test_above_the_limit_the_clock_and_the_batch_go_down() -> None:
    """A chip at 82 °C gets a lower clock and a smaller batch, and the mode says throttled."""
    lever = FakeLever("frequency", (400.0, 600.0, 800.0))
    rig = Rig(70.0, 82.0, lever=lever).run(8.0)

    assert lever.places[0] == 800.0
    assert lever.places[-1] == 600.0
    assert rig.orders.last("npu").max_batch == 4
    assert rig.view.mode == "throttled"
    assert "82" in rig.view.reason


def test_levers_go_back_when_the_guard_stops() -> None:
    """Whatever it moved is restored at the end."""
    lever = FakeLever("frequency", (400.0, 800.0))
    Rig(82.0, lever=lever).run(3.0)
    assert lever.restored


def test_a_lever_that_refuses_rests_and_is_named() -> None:
    """After some refusals the board is held with batch and duty alone, status says which lever
    does not obey, and later it is tried again."""
    lever = FakeLever("frequency", (400.0, 800.0))
    lever.refuses = "permission denied"
    rig = Rig(81.0, lever=lever).run(30.0)

    assert any("permission denied" in note for note in rig.view.notes)
    assert rig.view.frequency_mhz is None
    assert rig.orders.last("npu").max_batch == 1
    lever = FakeLever("frequency", (400.0, 800.0))
    lever.refuses = "held down by the firmware"

    def obeys_again() -> int:
        if lever.asked >= 3:
            lever.refuses = ""
        return 8

    rig = Rig(81.0, lever=lever, demand=obeys_again).run(400.0)
    assert not rig.view.notes
    assert rig.view.frequency_mhz == 400.0


def test_a_lever_that_fails_in_its_own_way_rests_too() -> None:
    """A helper of another version that answers nonsense is a lever that does not obey."""

    class Odd(FakeLever):
        async def set(self, value: float) -> float:
            self.asked += 1
            raise KeyError("value")

    lever = Odd("frequency", (400.0, 800.0))
    rig = Rig(81.0, lever=lever).run(60.0)
    assert lever.asked == 3
    assert any("KeyError" in note for note in rig.view.notes)


def test_a_lever_that_cannot_be_let_go_does_not_hold_up_the_end() -> None:
    """The other levers and the sensors are stopped all the same."""

    class Odd(FakeLever):
        async def stop(self) -> None:
            raise RuntimeError("bug")

    rig = Rig(81.0, lever=Odd("frequency", (400.0, 800.0)))
    stopped: list[bool] = []

    async def stop() -> None:
        stopped.append(True)

    rig.guard._hub.stop = stop  # type: ignore[method-assign]
    rig.run(3.0)
    assert stopped


def test_a_search_for_levers_that_crashes_is_told() -> None:
    """The limit is held without levers, and status says why there are none."""
    rig = Rig(82.0)

    async def find() -> Found:
        raise RuntimeError("bug")

    rig.guard._find = find
    rig.run(12.0)
    assert rig.orders.last("npu").max_batch < 8
    assert any("looking for them failed" in note for note in rig.view.notes)


def test_a_lever_somebody_put_back_is_moved_again() -> None:
    """A helper that is started anew restores the originals: the target is sent now and then."""
    lever = FakeLever("frequency", (400.0, 800.0))
    Rig(70.0, lever=lever).run(100.0)
    assert lever.places == [800.0] * 4


def test_the_chip_is_guarded_while_levers_are_looked_for() -> None:
    """A driver that takes half a minute to answer does not keep the guard from its batch."""
    rig = Rig(90.0, find_s=30.0).run(10.0)
    assert rig.orders.last("npu").max_batch == 0


def test_a_machine_without_any_sensor_says_what_to_do() -> None:
    """It is slow for good, which nobody should have to guess."""
    rig = Rig(60.0)
    rig.guard._hub = Hub([], Sensors())
    rig.run(20.0)
    assert rig.orders.last("npu") == Limits(1, DUTY_FLOOR, 64)
    assert any("edged check" in note for note in rig.view.notes)


def test_a_sensor_in_reserve_counts_as_good() -> None:
    """The figure of good sensors does not fall because a more trusted one works."""
    view = View(
        sensors=tuple(
            SensorState(n, w, "", 0.1, 2, 3) for n, w in (("a", "working"), ("b", "standby"))
        )
    )
    assert view_figures(view, "npu")["edged_guard_sensors_working"] == 2.0


def test_what_a_board_cannot_do_is_said() -> None:
    """Notes of the levers that were not found reach the view."""
    assert Rig(60.0).run(2.0).view.notes == ("frequency: none here",)


def test_a_lost_sensor_counts_as_hot_after_its_grace() -> None:
    """No reading: at first everything stays, then the chip runs at its slowest."""
    rig = Rig(60.0, 60.0, lost())
    rig.run(4.0)
    assert rig.orders.last("npu").max_batch == 8
    rig = Rig(60.0, 60.0, lost())
    rig.run(30.0)
    assert rig.orders.last("npu") == Limits(1, DUTY_FLOOR, 64)
    assert rig.view.mode == "throttled"
    assert rig.view.sensors[0].problem


def test_above_critical_nothing_runs_and_streams_end_once() -> None:
    """At 90 °C batch 0 and no admission on every engine; after the wait streams are ended, and
    after another one those that came to wait since."""
    rig = Rig(60.0, 90.0).run(25.0)
    assert not rig.orders.last("npu").admit
    assert not rig.orders.last("cpu").admit
    assert rig.orders.last("npu").max_batch == 0
    assert rig.orders.ended == 0
    assert Rig(60.0, 90.0).run(50.0).orders.ended == 1
    assert Rig(60.0, 90.0).run(80.0).orders.ended == 2


def test_a_chip_that_cooled_down_in_time_loses_nothing() -> None:
    """Paused streams go on when the temperature falls within the wait."""
    rig = Rig(60.0, *[90.0] * 10, 70.0).run(80.0)
    assert rig.orders.ended == 0
    assert rig.orders.last("npu").admit
    assert rig.orders.last("npu").max_batch >= 1


def test_a_guard_that_fails_leaves_a_slow_chip() -> None:
    """A bug in the loop is no reason to run unguarded: lowest batch and duty until it works."""

    def broken() -> int:
        raise RuntimeError("bug")

    rig = Rig(60.0, demand=broken).run(5.0)
    assert rig.orders.last("npu") == Limits(1, DUTY_FLOOR, 64)
    assert rig.orders.last("cpu") == Limits(1, DUTY_FLOOR, 64)
    assert rig.view.mode == "throttled"


def test_a_guard_that_fails_in_the_heat_opens_nothing() -> None:
    """What was closed above the critical temperature stays closed until a round succeeds."""
    calls = 0

    def breaks_later() -> int:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise RuntimeError("bug")
        return 8

    rig = Rig(90.0, demand=breaks_later).run(60.0)
    assert calls > 20
    assert not rig.orders.last("npu").admit


def test_an_idle_cool_board_is_not_called_throttled() -> None:
    """The learning policy begins with a careful duty; without work that is nobody's business."""
    config = GuardSettings()
    rig = Rig(50.0, config=config, demand=lambda: 0).run(20.0)
    assert rig.view.mode == "normal"
    assert rig.orders.last("npu").max_batch == 8  # the first that come need not wait for it


def test_equal_orders_are_given_once() -> None:
    """A steady temperature does not send the workers the same Limits every second."""
    rig = Rig(60.0).run(30.0)
    assert len(rig.orders.limits) == 2


@pytest.mark.parametrize(
    ("device", "limit_c", "critical_c"),
    [
        (None, 80.0, 88.0),
        (Raw(throttle_c=95.0), 80.0, 88.0),
        (Raw(throttle_c=75.0), 73.0, 81.0),
        (Raw(reset_c=85.0), 80.0, 83.0),
    ],
)
def test_the_devices_own_limits_come_first(
    device: Raw | None, limit_c: float, critical_c: float
) -> None:
    """The limit stays a margin below the device's throttle point, critical below its reset."""
    rules = settings_of(GuardSettings(), device)
    assert (rules.limit_c, rules.critical_c) == (limit_c, critical_c)


@pytest.mark.parametrize(
    ("hours", "now", "quiet"),
    [
        ("", time(3), False),
        ("22:00-06:00", time(3), True),
        ("22:00-06:00", time(22), True),
        ("22:00-06:00", time(6), False),
        ("22:00-06:00", time(12), False),
        ("12:00-13:30", time(13), True),
        ("12:00-13:30", time(14), False),
    ],
)
def test_quiet_hours_may_pass_midnight(hours: str, now: time, quiet: bool) -> None:
    """The fan is kept down within the configured local hours only."""
    assert quiet_at(hours, now) is quiet


# --- what an engine did ---------------------------------------------------------------------------


def test_work_is_summed_between_two_looks() -> None:
    """Steps, rows, tokens and prompt tokens add up, and begin anew after a look."""
    account = Account()
    account.take(0.0, 0, 0, 1.0)
    account.add(Executed("prefill", 0.2, prompt_tokens=64), 0.2)
    account.add(Executed("decode", 0.1, drawn=(1, 2), tokens=2), 0.3)
    account.add(Executed("decode", 0.1, drawn=(1, 2), tokens=2, ended=(2,)), 0.4)
    load = account.take(1.0, 1, 3, 1.0)

    assert (load.decode_steps, load.decode_rows, load.tokens) == (2, 4, 4)
    assert (load.prefill_steps, load.prefill_tokens) == (1, 64)
    assert load.decode_busy_s == pytest.approx(0.2)
    assert (load.streams, load.filling, load.waiting) == (1, 0, 3)
    assert account.take(2.0, 1, 0, 1.0).decode_steps == 0


def test_a_slow_engine_does_not_look_idle_between_two_reports() -> None:
    """Steps of 3 s, looked at every second: it is busy in each of them."""
    account = Account()
    account.take(0.0, 1, 0, 1.0)
    ratios = []
    for second in range(1, 13):
        if second % 3 == 0:
            account.add(Executed("decode", 3.0, drawn=(1,), tokens=1), float(second))
        ratios.append(account.take(float(second), 1, 0, 1.0).busy_ratio)
    assert min(ratios[3:]) > 0.95


def test_a_new_stream_counts_as_filling_until_its_first_token() -> None:
    """Streams in slots that have drawn nothing yet are still reading their prompt."""
    account = Account()
    account.add(Executed("decode", 0.1, drawn=(7,), tokens=1), 0.1)
    assert account.take(1.0, 3, 0, 1.0).filling == 2


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0.01, 2.0), st.floats(0.0, 2.0), st.floats(0.05, 1.0)),
        min_size=1,
        max_size=40,
    )
)
def test_busy_shares_are_shares(steps: list[tuple[float, float, float]]) -> None:
    """Whatever comes when, the busy share is within 0 and 1 and never counts a second twice."""
    account, now_s, told_s, worked_s = Account(), 0.0, 0.0, 0.0
    account.take(now_s, 1, 0, 1.0)
    for busy_s, pause_s, duty in steps:
        now_s += busy_s + pause_s
        worked_s += busy_s
        account.add(Executed("decode", busy_s, drawn=(1,), tokens=1), now_s)
        before_s = now_s
        load = account.take(now_s, 1, 0, duty)
        assert 0.0 <= load.busy_ratio <= 1.0
        told_s += load.busy_ratio * (busy_s + pause_s)
        assert before_s == now_s
    assert told_s <= worked_s + 1e-6


# --- what is told ---------------------------------------------------------------------------------


def test_status_says_throttled_only_while_all_engines_serve() -> None:
    """A missing engine is degraded, with the heat in the reason; drained beats both."""
    view = Rig(82.0).run(15.0).view
    ready, off = ("npu", Health("ready")), ("cpu", Health("starting", "loading"))
    quiet = Load(waiting=0, running=0, oldest_wait_s=0.0, draining=False)
    hot = status_of("n", quiet, [ready], 1.0, view)
    assert (hot.mode, hot.reason) == ("throttled", view.reason)
    degraded = status_of("n", quiet, [ready, off], 1.0, view)
    assert degraded.mode == "degraded"
    assert view.reason in degraded.reason
    told = status_json(hot)["guard"]
    assert told["temperature_c"] == 82.0
    assert told["limit_c"] == 80.0
    assert told["sensors"][0]["in_use"] is True


def test_an_engine_on_a_lower_rung_says_so() -> None:
    """The node is normal, and the reason names what the engine had to give up and why."""
    quiet = Load(waiting=0, running=0, oldest_wait_s=0.0, draining=False)
    small = Health("ready", rung="4 slots", rung_number=1, reason="out of memory")
    told = status_of("n", quiet, [("npu", small)], 1.0)
    assert (told.mode, told.ready) == ("normal", True)
    assert told.reason == "all engines are ready; npu runs with 4 slots (out of memory)"


def test_a_node_that_is_too_hot_is_not_ready() -> None:
    """Readiness goes off while no engine admits anything."""
    quiet = Load(waiting=0, running=0, oldest_wait_s=0.0, draining=False)
    assert not status_of("n", quiet, [("npu", Health("ready", admits=False))], 1.0).ready


def test_states_are_published_when_they_matter() -> None:
    """On a degree, a mode, a queue that changed, and now and then all the same."""
    told = Told()
    assert told.worth({"temperature_c": 60.0, "mode": "normal"}, 0.0)
    assert not told.worth({"temperature_c": 60.9, "mode": "normal"}, 1.0)
    assert told.worth({"temperature_c": 61.0, "mode": "normal"}, 2.0)
    assert told.worth({"temperature_c": 61.0, "mode": "throttled"}, 3.0)
    assert told.worth({"temperature_c": None, "mode": "throttled"}, 4.0)
    assert told.worth({"temperature_c": None, "mode": "throttled"}, 4.0 + EVERY_S)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ('guard.quiet_hours="10pm-6am"', "guard.quiet_hours"),
        ('guard.quiet_hours="25:00-06:00"', "guard.quiet_hours"),
        ("guard.critical_c=70", "guard.critical_c"),
        ("guard.limit_c=nan", "guard.limit_c"),
        ("guard.period_s=0", "guard.period_s"),
        ("guard.period_s=10", "guard.period_s"),  # a slow source's readings would all be stale
        ("guard.policy=fast", "guard.policy"),
    ],
)
def test_a_bad_guard_setting_names_its_key(setting: str, key: str) -> None:
    """What cannot be obeyed is refused before anything runs."""
    with pytest.raises(ConfigError, match=key):
        load(None, (setting,))
