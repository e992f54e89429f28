"""What an execute costs on the simulated board: time, heat and counters follow its model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fakes_twin import GEARS, Doubler, Session, doubler, make_board, session

from edged.twin import boards, om, physics
from edged.twin.state import TwinState

LOAD = om.Workload("heavy", kv_bytes_per_token=2e6, flop_per_token=5e9)
WAIT_MS = 60_000


def heavy(folder: Path, soc: str) -> Path:
    """The doubler, pretending to be a large decoder at context 1 (it has no S)."""
    doubler(folder)
    out = folder / "heavy.om"
    om.pack(folder / "doubler.onnx", out, GEARS, soc=soc, workload=LOAD)
    return out


def modelled_s(board: physics.Board, batch: int, clock_mhz: float, weight_bytes: int) -> float:
    """By the board's own model, with the container's workload on it."""
    model = physics.Model("heavy", weight_bytes, LOAD.kv_bytes_per_token, LOAD.flop_per_token, 1)
    board = msgspec.structs.replace(board, model=model)
    return physics.step_time_s(board, batch, 1, 1, clock_mhz)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[TwinState]:
    made = TwinState(make_board(tmp_path / "twin", "field"))
    yield made
    made.close()


@pytest.fixture
def ready(state: TwinState) -> Iterator[Session]:
    with session(state.folder) as made:
        yield made


@pytest.fixture
def model(ready: Session, tmp_path: Path) -> Doubler:
    return Doubler(ready, heavy(tmp_path, "Ascend310B4"))


def run(model: Doubler, batch: int) -> None:
    assert model.gear(batch) == 0
    acl, stream = model.s.acl, model.s.stream
    assert acl.mdl.execute_async(model.id, model.inputs, model.outputs, stream) == 0
    assert acl.rt.synchronize_stream_with_timeout(stream, WAIT_MS) == 0


@pytest.mark.parametrize("name", boards.names())
def test_device_time_follows_the_board(name: str, tmp_path: Path) -> None:
    """On every board, batch by batch: device_time_s grows by the modelled step time."""
    board = boards.load(name)
    state = TwinState(make_board(tmp_path / "twin", name))
    with session(state.folder) as made:
        path = heavy(tmp_path, board.soc)
        model = Doubler(made, path)
        weights = om.read_file(path).header.weight_bytes
        for batch in (1, 2, 4):
            before = state.get("device_time_s")
            run(model, batch)
            took = state.get("device_time_s") - before
            assert took == pytest.approx(modelled_s(board, batch, board.max_mhz, weights))
    state.close()


def test_a_lower_clock_costs_time(state: TwinState, model: Doubler) -> None:
    """At half the clock a step of the field board takes twice as long."""
    run(model, 4)
    fast = state.get("device_time_s")
    state.command(time.monotonic(), {"frequency_mhz": 400.0})
    run(model, 4)
    assert state.get("device_time_s") - fast == pytest.approx(2 * fast)


def test_a_busy_cpu_costs_time(state: TwinState, model: Doubler) -> None:
    """A CPU engine on the same die slows the step by the board's share."""
    run(model, 1)
    alone = state.get("device_time_s")
    state.command(time.monotonic(), {"cpu_busy_ratio": 1.0})
    run(model, 1)
    assert state.get("device_time_s") - alone == pytest.approx(1.1 * alone)


def test_firmware_throttle_costs_time(state: TwinState, model: Doubler) -> None:
    """Over the throttle point the step runs at the firmware's clock."""
    run(model, 1)
    cool = state.get("device_time_s")
    state.set_temperature(time.monotonic(), 90.0)
    run(model, 1)
    assert state.get("device_time_s") - cool == pytest.approx(2 * cool)


def test_native_pace_adds_no_waiting(state: TwinState, model: Doubler) -> None:
    """Without time_scale a step takes what onnxruntime takes, however slow the board is."""
    run(model, 1)
    started_s = time.monotonic()
    for _ in range(20):
        run(model, 4)
    assert state.get("device_time_s") > 0.02
    assert state.get("busy_s") <= time.monotonic() - started_s + 1
    assert state.get("overruns_total") == 0


def test_time_scale_stretches_a_step(state: TwinState, model: Doubler) -> None:
    """With a scale a step lasts at least modelled x scale, and the stretch is no overrun."""
    run(model, 4)
    modelled = state.get("device_time_s")
    scale = 0.2 / modelled
    state.command(time.monotonic(), {"time_scale": scale})
    started_s = time.monotonic()
    run(model, 4)
    assert time.monotonic() - started_s >= 0.2
    assert state.get("overruns_total") == 0


def test_too_fast_a_scale_is_counted(state: TwinState, model: Doubler) -> None:
    """A scale the host cannot keep up with: each such step is an overrun."""
    state.command(time.monotonic(), {"time_scale": 1e-9})
    for _ in range(3):
        run(model, 4)
    assert state.get("overruns_total") == 3


def test_work_heats_the_board(state: TwinState, model: Doubler) -> None:
    """While a long step runs, sensors see the busy board; its energy is counted afterwards."""
    run(model, 4)
    state.command(time.monotonic(), {"time_scale": 0.5 / state.get("device_time_s")})
    joules = state.get("busy_joules")
    assert model.gear(4) == 0
    acl, stream = model.s.acl, model.s.stream
    assert acl.mdl.execute_async(model.id, model.inputs, model.outputs, stream) == 0
    deadline = time.monotonic() + 10
    while not state.sample(time.monotonic()).busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    during = state.sample(time.monotonic())
    assert during.power_w > state.board.power.idle_w
    assert acl.rt.get_device_utilization_rate(0)[0]["cube_utilization"] == 100
    assert acl.rt.synchronize_stream_with_timeout(stream, WAIT_MS) == 0
    assert not state.sample(time.monotonic()).busy
    assert state.get("busy_joules") - joules > 0
    assert state.get("steps_total") == 2


def test_counters_survive_the_process(state: TwinState, tmp_path: Path) -> None:
    """A second process goes on counting where the first one stopped."""
    for expected in (1, 2):
        with session(state.folder) as made:
            model = Doubler(made, heavy(tmp_path, "Ascend310B4"))
            run(model, 1)
        assert state.get("steps_total") == state.get("loads_total") == expected
        assert state.fields()["memory_used_bytes"] == 0
        assert state.get("memory_peak_bytes") > 0
