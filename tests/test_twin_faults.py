"""Ordered faults: they fire when they should, as often as they should, whoever is restarted."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fakes_twin import HUGE_FIRST, WIDTH, Doubler, Session, done, doubler, make_board, session

from edged.twin import faults
from edged.twin.faults import Fault, Faults
from edged.twin.state import TwinState

X = np.ones((4, WIDTH), np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_board(tmp_path / "twin")


@pytest.fixture
def ordered(folder: Path) -> Iterator[Faults]:
    state = TwinState(folder)
    yield Faults(state)
    state.close()


@pytest.fixture
def ready(folder: Path) -> Iterator[Session]:
    with session(folder) as made:
        yield made


def twin(folder: Path, *arguments: str) -> int:
    """The command line."""
    return faults.main(["--twin", str(folder), *arguments])


def run(model: Doubler) -> int:
    """One execute and its synchronisation: the first code that is not 0."""
    acl = model.s.acl
    code = acl.mdl.execute_async(model.id, model.inputs, model.outputs, model.s.stream)
    return int(code or acl.rt.synchronize_stream_with_timeout(model.s.stream, 20000))


def test_a_fault_fires_on_its_event_and_is_gone(ordered: Faults) -> None:
    """The third allocation from now, twice; other events do not count."""
    ordered.add(Fault("oom", "allocation", after=3, times=2))
    fired = [len(ordered.due("allocation")) for _ in range(3)]
    assert ordered.due("step") == []
    assert fired == [0, 0, 1]
    assert [len(ordered.due("allocation")) for _ in range(3)] == [1, 0, 0]
    assert ordered.pending() == []


def test_a_fault_without_end_fires_until_cleared(ordered: Faults) -> None:
    """times 0 means every time."""
    ordered.add(Fault("nan", "step", times=0))
    assert [len(ordered.due("step")) for _ in range(4)] == [1] * 4
    ordered.clear()
    assert ordered.due("step") == []


def test_orders_from_other_processes_are_seen(folder: Path, ordered: Faults) -> None:
    """What the command line adds while a process runs fires there, and counting is shared."""
    assert twin(folder, "nan", "--after", "2") == 0
    other_state = TwinState(folder)
    other = Faults(other_state)
    assert ordered.due("step") == []
    assert [fault.kind for fault in other.due("step")] == ["nan"]
    assert ordered.due("step") == []
    other_state.close()


def test_concurrent_events_lose_nothing(folder: Path, ordered: Faults) -> None:
    """Four threads with a view each, one fault of 40 times: it fires 40 times in all."""
    ordered.add(Fault("nan", "step", times=40))
    fired: list[int] = []

    def consume() -> None:
        state = TwinState(folder)
        mine = Faults(state)
        fired.append(sum(len(mine.due("step")) for _ in range(20)))
        state.close()

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(fired) == 40


def test_oom_at_the_nth_allocation(folder: Path, ready: Session) -> None:
    """`edged twin oom --after 2`: one malloc works, the next finds no memory, later ones do."""
    assert twin(folder, "oom", "--after", "2") == 0
    assert ready.acl.rt.malloc(64, HUGE_FIRST)[1] == 0
    assert ready.acl.rt.malloc(64, HUGE_FIRST) == (0, 207001)
    assert ready.acl.rt.malloc(64, HUGE_FIRST)[1] == 0


def test_oom_at_a_step(folder: Path, ready: Session, tmp_path: Path) -> None:
    """`edged twin oom --at step`: the execute is refused with 245000, the next one runs."""
    model = Doubler(ready, doubler(tmp_path))
    assert twin(folder, "oom", "--at", "step") == 0
    assert [run(model), run(model)] == [245000, 0]


def test_nan_in_one_row(folder: Path, ready: Session, tmp_path: Path) -> None:
    """`edged twin nan --row 1`: only that row of the results is not finite, and only once."""
    model = Doubler(ready, doubler(tmp_path))
    ready.put(model.x, X)
    assert twin(folder, "nan", "--row", "1") == 0
    rows = model.run(4)
    assert np.isnan(rows[1]).all()
    assert np.isfinite(np.delete(rows, 1, axis=0)).all()
    assert np.isfinite(model.run(4)).all()


def test_a_short_hang_only_delays(folder: Path, ready: Session, tmp_path: Path) -> None:
    """`edged twin hang --seconds`: the execute ends late, but well."""
    model = Doubler(ready, doubler(tmp_path))
    assert twin(folder, "hang", "--seconds", "0.3") == 0
    started_s = time.monotonic()
    assert run(model) == 0
    assert time.monotonic() - started_s >= 0.3


def test_slow_load(folder: Path, ready: Session, tmp_path: Path) -> None:
    """`edged twin slow-load`: the next load takes at least as long."""
    path = str(doubler(tmp_path))
    assert twin(folder, "slow-load", "--seconds", "0.3") == 0
    started_s = time.monotonic()
    done(ready.acl.mdl.load_from_file(path))
    assert time.monotonic() - started_s >= 0.3


def test_reclaimed_buffers(folder: Path, ready: Session, tmp_path: Path) -> None:
    """`edged twin reclaim`: buffers nobody used for that long answer 507053 until a restart."""
    model = Doubler(ready, doubler(tmp_path))
    assert twin(folder, "reclaim", "--seconds", "0.2") == 0
    time.sleep(0.3)
    assert ready.acl.rt.memcpy(model.y, 64, model.x, 64, 3) == 507053
    assert run(model) == 507053
    assert twin(folder, "clear") == 0
    assert ready.acl.rt.free(model.x) == 0
    with session(folder) as other:
        assert run(Doubler(other, doubler(tmp_path))) == 0


def test_heat_and_ambient(folder: Path) -> None:
    """`edged twin heat 90` is what sensors read next; `ambient` moves the whole board."""
    assert twin(folder, "heat", "90") == 0
    state = TwinState(folder)
    assert state.sample(time.monotonic()).temperature_c == pytest.approx(90, abs=2)
    state.close()


def test_a_board_over_its_reset_point_is_lost(folder: Path, ready: Session, tmp_path: Path) -> None:
    """Beyond reset_c the board resets under the worker: 507010."""
    model = Doubler(ready, doubler(tmp_path))
    assert twin(folder, "heat", "150") == 0
    assert run(model) == 507010


def test_status_is_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`edged twin status` prints counters, temperature and orders."""
    assert twin(folder, "hang", "--after", "7") == 0
    assert twin(folder, "status") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["board"] == "310b4"
    assert about["temperature_c"] > 0
    assert about["faults"][0]["after"] == 7


def test_usage_errors(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No twin is exit 2 with the next step; a bad number or a missing one is argparse's exit 2."""
    assert faults.main(["--twin", str(tmp_path / "none"), "clear"]) == 2
    assert "edged run --twin" in capsys.readouterr().err
    for arguments in (["oom", "--after", "0"], ["reclaim"], ["heat", "hot"], ["slow-load"]):
        with pytest.raises(SystemExit) as stopped:
            twin(folder, *arguments)
        assert stopped.value.code == 2


def test_the_module_runs_as_a_program(folder: Path) -> None:
    """`python -m edged.twin.faults` is the same command line."""
    command = [sys.executable, "-m", "edged.twin.faults", "--twin", str(folder), "status"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert json.loads(ran.stdout)["steps_total"] == 0
