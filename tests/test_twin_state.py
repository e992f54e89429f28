"""The twin's state file: counters, commands and heat shared by processes that may die."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes_twin import make_board

from edged.errors import ConfigError
from edged.twin import state
from edged.twin.fields import StateError
from edged.twin.state import TwinState


@pytest.fixture
def twin(tmp_path: Path) -> Iterator[TwinState]:
    """The field report's board: 6 W idle, 6 °C/W, time constant 4 s, 30 °C ambient."""
    made = TwinState(make_board(tmp_path, "field"))
    yield made
    made.close()


def test_a_new_board_is_at_rest(twin: TwinState) -> None:
    """Idle temperature, top clock, no work done, nobody on the device."""
    sample = twin.sample(time.monotonic())
    assert sample.temperature_c == pytest.approx(66.0)
    assert (sample.clock_mhz, sample.throttled, sample.busy) == (800.0, False, False)
    assert twin.fields()["steps_total"] == 0
    assert not twin.device_open()


def test_work_heats_and_rest_cools(twin: TwinState) -> None:
    """A step at 8 W for 4 s rises by 12 °C x (1 - 1/e); idle afterwards falls back the same way."""
    start_s = time.monotonic()
    twin.set("pid", os.getpid())
    twin.step_begins(start_s, 8.0, 3.5)
    during = twin.sample(start_s + 4.0)
    assert during.temperature_c == pytest.approx(66 + 12 * (1 - math.exp(-1)), abs=0.01)
    assert (during.busy, during.power_w) == (True, 8.0)
    after = twin.step_ends(start_s + 4.0, device_s=3.5)
    assert after.temperature_c == pytest.approx(during.temperature_c)
    rested = twin.sample(start_s + 8.0)
    assert rested.temperature_c == pytest.approx(
        66 + 12 * (1 - math.exp(-1)) * math.exp(-1), abs=0.01
    )
    found = twin.fields()
    assert (found["steps_total"], found["device_time_s"]) == (1, 3.5)
    assert found["busy_s"] == pytest.approx(4.0)
    assert found["busy_joules"] == pytest.approx(32.0)


def test_reading_writes_nothing(twin: TwinState, tmp_path: Path) -> None:
    """However often sensors read, the file stays as it is."""
    before = (tmp_path / "state.bin").read_bytes()
    for later in range(100):
        twin.sample(time.monotonic() + later)
        twin.fields()
    assert (tmp_path / "state.bin").read_bytes() == before


def test_how_often_one_looks_does_not_matter(twin: TwinState) -> None:
    """Many short steps end at the same temperature as one long step."""
    start_s = time.monotonic()
    twin.set("pid", os.getpid())
    for i in range(100):
        twin.step_begins(start_s + i * 0.1, 9.0, 0.1)
        twin.step_ends(start_s + (i + 1) * 0.1, 0.1)
    expected = 66 + 18 * (1 - math.exp(-10 / 4))
    assert twin.sample(start_s + 10).temperature_c == pytest.approx(expected, abs=0.01)


def test_firmware_throttles_with_hysteresis(twin: TwinState) -> None:
    """At 86 °C the clock drops to 400 MHz, and only at 76 °C it comes back."""
    now_s = time.monotonic()
    twin.set_temperature(now_s, 85.9)
    assert twin.clock_mhz(now_s) == 800.0
    twin.set_temperature(now_s, 86.0)
    assert twin.clock_mhz(now_s) == 400.0
    cooled = 4 * math.log((86 - 66) / (76.5 - 66))
    assert twin.sample(now_s + cooled).clock_mhz == 400.0
    assert twin.clock_mhz(now_s + cooled) == 400.0
    assert twin.sample(now_s + cooled + 0.5).clock_mhz == 800.0
    assert twin.clock_mhz(now_s + cooled + 0.5) == 800.0


def test_levers_count_from_when_they_move(twin: TwinState) -> None:
    """A faster fan changes what comes, not what was; the clock asked for is the clock shown."""
    now_s = time.monotonic()
    twin.command(now_s, {"fan_ratio": 1.0, "frequency_mhz": 500.0})
    assert twin.sample(now_s).temperature_c == pytest.approx(66.0, abs=0.05)
    assert twin.sample(now_s).clock_mhz == 500.0
    assert twin.sample(now_s + 60).temperature_c == pytest.approx(30 + 6 * 4.5, abs=0.01)
    twin.set_ambient(now_s + 60, 40.0)
    assert twin.sample(now_s + 60).temperature_c == pytest.approx(40 + 6 * 4.5, abs=0.01)
    twin.command(now_s + 60, {"cpu_busy_ratio": 1.0})
    assert twin.sample(now_s + 120).temperature_c == pytest.approx(40 + 8.5 * 4.5, abs=0.01)


def test_a_stretched_pace_takes_the_heat_along(tmp_path: Path) -> None:
    """At time_scale 0.1 the board lives ten times as fast: 0.4 s are its time constant."""
    twin = TwinState(make_board(tmp_path, "field", time_scale=0.1))
    now_s = time.monotonic()
    twin.set_temperature(now_s, 80.0)
    expected = 66 + 14 * math.exp(-1)
    assert twin.sample(now_s + 0.4).temperature_c == pytest.approx(expected, abs=0.05)
    twin.close()


def test_a_host_slower_than_the_board_does_not_heat_it(tmp_path: Path) -> None:
    """A step whose modelled time is over draws no power, however long the host still computes."""
    twin = TwinState(make_board(tmp_path, "field", time_scale=1.0))
    start_s = time.monotonic()
    twin.set("pid", os.getpid())
    twin.step_begins(start_s, 16.0, 1.0)
    peak = twin.sample(start_s + 1.0).temperature_c
    assert peak == pytest.approx(66 + 60 * (1 - math.exp(-0.25)), abs=0.01)
    late = twin.step_ends(start_s + 5.0, 1.0)
    assert late.temperature_c == pytest.approx(66 + (peak - 66) * math.exp(-1), abs=0.01)
    assert twin.get("busy_joules") == pytest.approx(16.0)
    twin.close()


def test_unknown_commands_are_named(twin: TwinState, tmp_path: Path) -> None:
    """A field that is not a command is refused, at creation and later."""
    with pytest.raises(StateError, match="steps_total"):
        twin.command(0.0, {"steps_total": 5.0})
    with pytest.raises(StateError, match="tiem_scale"):
        make_board(tmp_path / "other", tiem_scale=1.0)


def test_foreign_files_and_boards_are_named(tmp_path: Path) -> None:
    """No twin, a file of another kind and an unknown board each say what to do."""
    with pytest.raises(StateError, match="edged run --twin"):
        TwinState(tmp_path)
    (tmp_path / "state.bin").write_bytes(b"x" * 4096)
    with pytest.raises(StateError, match="remove it"):
        TwinState(tmp_path)
    with pytest.raises(ConfigError, match="310b4"):
        state.create(tmp_path, "310b5")


_WORKER = """
import os, sys, time
from pathlib import Path
from edged.twin.state import TwinState
twin = TwinState(Path({folder!r}))
twin.set("pid", os.getpid())
print("ready", flush=True)
while True:
    twin.step_begins(time.monotonic(), 9.0, 0.001)
    twin.step_ends(time.monotonic(), 0.001)
    twin.step_begins(time.monotonic(), 9.0, 0.001)
"""


def test_kill_9_at_any_moment_leaves_a_sound_state(twin: TwinState, tmp_path: Path) -> None:
    """A writer killed in mid-write: counters stay, temperature stays plausible, locks are free,
    and the dead process no longer heats or holds anything."""
    total = 0.0
    for _ in range(5):
        command = [sys.executable, "-c", _WORKER.format(folder=str(tmp_path))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            deadline = time.monotonic() + 30
            while twin.get("steps_total") < total + 50 and time.monotonic() < deadline:
                sample = twin.sample(time.monotonic())
                assert 60 < sample.temperature_c < 86
            child.send_signal(signal.SIGKILL)
            # Not reaped yet: a zombie does not hold the device.
            while child.poll() is None:
                time.sleep(0.001)
        assert twin.get("steps_total") > total
        total = twin.get("steps_total")
        assert not twin.device_open()
        assert not twin.sample(time.monotonic()).busy
        assert twin.fields()["pid"] == 0
        twin.command(time.monotonic(), {"fan_ratio": 0.4})


def test_a_zombie_does_not_hold_the_device(twin: TwinState) -> None:
    """A killed worker whose parent has not reaped it yet counts as gone."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        twin.set("pid", child.pid)
        assert twin.device_open()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not twin.device_open()
