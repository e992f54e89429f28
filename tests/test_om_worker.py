"""The NPU worker as a real process on the twin: it serves, it dies as it should, it comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes_om import CHUNK, SLOTS, prompts, tiny_model
from fakes_twin import make_board
from fakes_worker import ask
from test_worker_process import Daemon, daemon, finish_of

from edged import wire
from edged.twin.faults import Fault, Faults
from edged.twin.state import TwinState


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwinState]:
    """A board that workers of this test find through the environment."""
    monkeypatch.setenv("EDGED_TWIN", str(make_board(tmp_path / "twin")))
    state = TwinState(tmp_path / "twin")
    yield state
    state.close()


def launch(d: Daemon, folder: Path, slots: int = SLOTS) -> wire.Ready:
    return d.launch(folder, slots=slots, prefill_chunk=CHUNK)


def end_of(d: Daemon) -> tuple[wire.Fault, int]:
    """The fault a worker leaves with, and its exit code."""
    fault = d.until(lambda m: isinstance(m, wire.Fault))[-1]
    assert isinstance(fault, wire.Fault)
    return fault, d.exit_code()


def test_a_worker_on_the_twin_serves_and_leaves_nothing(twin: TwinState, tiny: Path) -> None:
    """Launch, ready, answers, shutdown: the device is closed and its memory free."""
    asked = prompts(3, (5, 20, 40))
    with daemon("npu") as d:
        ready = launch(d, tiny)
        assert (ready.slots, ready.context_tokens) == (SLOTS, 160)
        assert int(twin.get("pid")) == d.process.pid
        assert Path(f"/proc/{d.process.pid}/oom_score_adj").read_text().strip() == "700"
        before = twin.get("allocations_total")
        first = [d.answer(ask(i, prompt, 12)) for i, prompt in enumerate(asked)]
        again = [d.answer(ask(10 + i, prompt, 12)) for i, prompt in enumerate(asked)]
        assert first == again
        assert all(len(ids) == 12 for ids in first)
        assert twin.get("allocations_total") == before
        assert twin.get("device_time_s") > 0
        d.say(wire.Shutdown())
        assert d.exit_code() == 0
    assert twin.fields()["pid"] == 0
    assert twin.fields()["memory_used_bytes"] == 0


def test_a_killed_worker_frees_the_board(twin: TwinState, tiny: Path) -> None:
    """kill -9 in mid-stream: the board is free at once, counters go on, the next worker says the
    same."""
    with daemon("npu") as d:
        launch(d, tiny)
        said = d.answer(ask(1, [1, 2, 3], 8))
        d.say(ask(2, [1, 2, 3], 100))
        d.until(lambda m: isinstance(m, wire.Report))
        os.kill(d.process.pid, signal.SIGKILL)
        d.exit_code()
    assert not twin.device_open()
    steps = twin.get("steps_total")
    with daemon("npu") as d:
        launch(d, tiny)
        assert d.answer(ask(1, [1, 2, 3], 8)) == said
    assert twin.get("steps_total") > steps


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("aicore-fault", "step"), "fatal"),
        (Fault("lost", "call"), "fatal"),
        (Fault("oom", "launch", times=0), "memory"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_a_fault_is_told_before_the_worker_ends(
    twin: TwinState, tiny: Path, fault: Fault, kind: str
) -> None:
    """One Fault frame of the right kind, exit code 1; afterwards a new worker serves."""
    with daemon("npu") as d:
        launch(d, tiny)
        Faults(twin).add(fault)
        d.say(ask(1, [1, 2, 3], 8))
        found, code = end_of(d)
        assert (found.kind, code) == (kind, 1)
        assert "failed with" in found.detail
        assert found.detail.startswith("prefill: ") == (kind == "memory")
    Faults(twin).clear()
    with daemon("npu") as d:
        launch(d, tiny)
        assert len(d.answer(ask(1, [1, 2, 3], 8))) == 8


def test_a_model_that_does_not_fit_is_a_memory_fault(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A board with too little memory: the worker says the sum and ends before loading."""
    small = Path(__file__).parent.parent / "configs" / "boards" / "310b4.toml"
    text = small.read_text(encoding="utf-8")
    size = next(line for line in text.splitlines() if line.startswith("total_bytes"))
    (tmp_path / "small.toml").write_text(text.replace(size, "total_bytes = 268435456"))
    folder = make_board(tmp_path / "twin", str(tmp_path / "small.toml"))
    monkeypatch.setenv("EDGED_TWIN", str(folder))
    with daemon("npu") as d:
        assert isinstance(d.hear(), wire.Hello)
        d.say(wire.Launch("npu", str(tiny), SLOTS, 0, 0, CHUNK))
        found, code = end_of(d)
        assert (found.kind, code) == ("memory", 1)
        assert "MiB are available" in found.detail
        assert found.detail.startswith("load: ")


def test_memory_that_ends_while_tokens_are_drawn_is_told_as_decode(
    twin: TwinState, tiny: Path
) -> None:
    """The ladder learns that the prompt still fitted."""
    with daemon("npu") as d:
        launch(d, tiny)
        d.say(ask(1, [1, 2, 3], 100))
        d.until(lambda m: isinstance(m, wire.Report) and m.kind == "decode")
        Faults(twin).add(Fault("oom", "launch", times=0))
        found, code = end_of(d)
        assert (found.kind, code) == ("memory", 1)
        assert found.detail.startswith("decode: ")


def test_a_row_fault_ends_only_its_stream(twin: TwinState, tiny: Path) -> None:
    """NaN from the device: that stream is a row fault, the worker goes on."""
    with daemon("npu") as d:
        launch(d, tiny)
        said = d.answer(ask(1, [1, 2, 3], 8))
        Faults(twin).add(Fault("nan", "step"))
        d.say(ask(2, [5, 6, 7], 8))
        heard = d.until(lambda m: finish_of(m, 2) != "")
        assert finish_of(heard[-1], 2) == "row_fault"
        assert d.answer(ask(3, [1, 2, 3], 8)) == said


def test_without_board_or_twin_the_fault_says_what_to_do(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No vendor library: the daemon hears how to get one."""
    monkeypatch.delenv("EDGED_TWIN", raising=False)
    with daemon("npu") as d:
        assert isinstance(d.hear(), wire.Hello)
        d.say(wire.Launch("npu", str(tiny), SLOTS, 0, 0, CHUNK))
        found, code = end_of(d)
        assert code == 1
        assert "set_env.sh" in found.detail
