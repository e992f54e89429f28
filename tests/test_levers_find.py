"""Finding levers: what counts was moved and read back; what does not is told and never fatal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fakes_levers import Board, clock_tool, libdcmi, npu_smi, until
from fakes_twin import make_board

from edged import config
from edged.errors import ConfigError
from edged.guard.levers import Kind, LeverError
from edged.guard.levers.check import check, lines
from edged.guard.levers.client import HelperLever
from edged.guard.levers.find import Found, find_levers
from edged.settings import Levers
from edged.twin.lever import twin_levers
from edged.twin.state import TwinState

HOLDING = "frequency: not controllable here, holding the limit with batch and duty"


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


@contextlib.asynccontextmanager
async def found(board: Board, **more: Any) -> AsyncIterator[Found]:
    """As the daemon would, with what it does at its end."""
    wanted = Levers(helper_socket=str(board.socket), timeout_s=1.0, **more)
    levers = await find_levers(wanted, state_dir=board.folder / "state")
    try:
        yield levers
    finally:
        for lever in (levers.frequency, levers.fan):
            if lever is not None:
                await lever.stop()


def pair(tool: Path) -> dict[str, Any]:
    return {
        "frequency_get": (str(tool), "get"),
        "frequency_set": (str(tool), "set", "{mhz}"),
        "frequencies_mhz": (400.0, 600.0, 800.0),
    }


# --- without anything ----------------------------------------------------------------------------


async def test_without_a_helper_the_operator_is_told(board: Board) -> None:
    """No lever, no error: the notes say what is missing and what to start."""
    async with found(board) as levers:
        assert (levers.frequency, levers.fan) == (None, None)
        assert levers.notes[0].startswith(HOLDING)
        assert "edged-levers.socket" in levers.notes[0]
        assert levers.notes[1].startswith("fan: not controllable here")


async def test_a_socket_that_is_none_of_ours_degrades(board: Board) -> None:
    """A file in the helper's place is told like a missing helper."""
    board.socket.write_text("")
    async with found(board) as levers:
        assert levers.frequency is None
        assert "Connection refused" in levers.notes[0]


# --- through the helper --------------------------------------------------------------------------


async def test_a_fan_that_follows_is_live(board: Board) -> None:
    """The fan is tried, put back, moved on demand, and back as it was after stop."""
    with board.helper():
        async with found(board) as levers:
            assert board.fan() == (102, 2)
            assert levers.fan is not None
            assert (levers.fan.kind, levers.fan.values) == ("fan", (0.4, 1.0))
            assert await levers.fan.set(0.6) == pytest.approx(0.6, abs=0.01)
            assert board.fan() == (153, 1)
            await levers.fan.restore()
            assert board.fan() == (102, 2)
            await levers.fan.set(1.0)
            assert levers.notes[0].startswith(HOLDING)
        assert board.fan() == (102, 2)


async def test_a_fan_that_refuses_writes_does_not_count(board: Board) -> None:
    """A file the kernel will not let even root write: no lever, and the kernel's word why."""
    (board.hwmon / "pwm1").unlink()
    (board.hwmon / "pwm1").symlink_to("/proc/sys/kernel/cap_last_cap")
    with board.helper():
        async with found(board) as levers:
            assert levers.fan is None
            assert "cannot write" in levers.notes[1]
        until(lambda: (board.hwmon / "pwm1_enable").read_text() == "2\n")


async def test_a_helper_that_dies_is_found_again_and_nothing_is_forgotten(board: Board) -> None:
    """After its restart the next set works, and the other lever is where it was told to be."""
    tool = clock_tool(board.folder)
    board.configure(**{key: list(words) for key, words in pair(tool).items()})
    with board.helper() as helper:
        async with found(board) as levers:
            assert levers.fan is not None and levers.frequency is not None
            await levers.fan.set(1.0)
            helper.send_signal(signal.SIGKILL)
            helper.wait(10)
            with pytest.raises(LeverError, match="helper"):
                await levers.frequency.set(400)
            with board.helper():
                assert board.fan() == (102, 2)
                assert await levers.frequency.set(400) == 400
                assert board.fan() == (255, 1)


async def test_one_that_is_taken_is_told(board: Board) -> None:
    """While another program holds the helper, its words reach the notes."""
    with board.helper():
        async with found(board), found(board) as second:
            assert second.fan is None
            assert "another program" in second.notes[0]


async def test_npu_smis_fan_goes_back_to_automatic(board: Board) -> None:
    """Where the kernel has no fan file, npu-smi's duty moves, and automatic mode comes back."""
    (board.hwmon / "pwm1").unlink()
    board.configure(npu_smi=str(npu_smi(board.folder)))
    with board.helper():
        async with found(board) as levers:
            assert isinstance(levers.fan, HelperLever)
            assert levers.fan.name == "npu-smi/pwm"
            assert await levers.fan.set(0.8) == 0.8
            assert (board.folder / "mode").read_text() == "manual\n"
        assert (board.folder / "mode").read_text() == "auto\n"


@pytest.mark.parametrize(
    ("mode", "why"),
    [("live", ""), ("reboot", "still reads 500: not live"), ("denied", "root is needed")],
)
async def test_a_work_power_gear_counts_only_if_the_clock_follows(
    board: Board, mode: str, why: str
) -> None:
    """A level that waits for a reboot is no lever and is put back; flash is never written."""
    library = libdcmi(board.folder, mode)
    if library is None:
        pytest.skip("no C compiler to make a DCMI library with")
    board.configure(work_power_gears=True, dcmi_library=str(library))
    with board.helper():
        async with found(board) as levers:
            assert (levers.frequency is not None) == (mode == "live")
            if levers.frequency is not None:
                assert levers.frequency.values == (250, 500)
                assert await levers.frequency.set(300) == 250
                # of two levels with this clock, the one that keeps the CPU faster
                assert (board.folder / "dcmi").read_text() == "1 250 0 live\n"
            else:
                assert why in levers.notes[0]
    assert (board.folder / "dcmi").read_text() == f"0 500 0 {mode}\n"


# --- a command pair of the daemon's own user -----------------------------------------------------


async def test_a_command_pair_moves_the_clock_and_back(board: Board) -> None:
    """Tried at start, set to the gear at or below, restored at the end."""
    tool = clock_tool(board.folder)
    async with found(board, **pair(tool)) as levers:
        assert levers.frequency is not None
        assert (board.folder / "mhz").read_text() == "800\n"
        assert await levers.frequency.set(799) == 600
        assert not any(note.startswith("frequency") for note in levers.notes)
    assert (board.folder / "mhz").read_text() == "800\n"


async def test_a_clock_between_the_gears_is_restored_as_it_was(board: Board) -> None:
    """The board's own clock need not be one of the configured ones."""
    tool = clock_tool(board.folder, mhz=1000)
    async with found(board, **pair(tool)) as levers:
        assert levers.frequency is not None
        await levers.frequency.set(400)
    assert (board.folder / "mhz").read_text() == "1000\n"


class Liar:
    """A lever that says it obeyed."""

    name: str = "liar"
    kind: Kind = "frequency"

    def __init__(self, values: tuple[float, ...], reads: float) -> None:
        self.values, self.reads, self.stopped = values, reads, False

    async def set(self, value: float) -> float:
        return self.reads

    async def restore(self) -> None:
        pass

    async def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize("reads", [800.0, 400.0, float("nan"), 0.0])
@pytest.mark.parametrize("values", [(400.0, 800.0), (800.0,)])
async def test_a_reading_that_does_not_follow_is_no_proof(
    values: tuple[float, ...], reads: float
) -> None:
    """One that always reads the same, reads nothing real or has one place only does not count."""
    liar = Liar(values, reads)
    levers = await find_levers(Levers(helper_socket=""), [liar])
    assert levers.frequency is None
    assert liar.stopped
    assert levers.notes[0].startswith(HOLDING + " (liar: ")


async def test_a_search_that_is_cancelled_puts_back_what_it_tried(board: Board) -> None:
    """The daemon is stopped while a lever is on trial: the clock is as it was."""
    tool = clock_tool(
        board.folder, mhz=600, on_set='echo "$2" > "$clock"; [ $2 != 400 ] || sleep 60'
    )

    async def search() -> None:
        async with found(board, **pair(tool)):
            pytest.fail("it was not on trial any more")

    searching = asyncio.create_task(search())
    while (board.folder / "mhz").read_text() != "400\n":
        await asyncio.sleep(0.01)
    searching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await searching
    assert (board.folder / "mhz").read_text() == "600\n"
    assert not (board.folder / "state" / "levers.json").exists()


async def test_a_second_daemon_leaves_the_firsts_clock_alone(board: Board) -> None:
    """Two daemons with one state folder: the second is told, and moves nothing at its end."""
    tool = clock_tool(board.folder)
    async with found(board, **pair(tool)) as first:
        assert first.frequency is not None
        await first.frequency.set(400)
        async with found(board, **pair(tool)) as second:
            assert second.frequency is None
            assert "another process" in second.notes[0]
        assert (board.folder / "mhz").read_text() == "400\n"


def lower_and_die(board: Board, tool: Path) -> None:
    """A process that lowers the clock as the daemon does and is killed."""
    code = (
        "import asyncio, sys, pathlib\n"
        "from edged.guard.levers.find import find_levers\n"
        "from edged.settings import Levers\n"
        "async def main(place):\n"
        f"    wanted = Levers(helper_socket='', **{pair(tool)!r})\n"
        "    found = await find_levers(wanted, state_dir=pathlib.Path(place))\n"
        "    print(await found.frequency.set(400), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main(sys.argv[1]))\n"
    )
    words = [sys.executable, "-c", code, str(board.folder / "state")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"400.0\n"
        daemon.kill()


async def test_a_killed_daemons_clock_is_restored_at_its_next_start(board: Board) -> None:
    """kill -9 with the clock lowered: the next start puts it back first."""
    tool = clock_tool(board.folder)
    lower_and_die(board, tool)
    assert (board.folder / "mhz").read_text() == "400\n"
    async with found(board, **pair(tool)) as levers:
        assert levers.frequency is not None
        assert (board.folder / "mhz").read_text() == "800\n"


@pytest.mark.parametrize(
    ("on_set", "why"),
    [
        ("sleep 60", "did not end within 1 s"),
        ("exit 3", "failed with 3"),
        ("true", "not live"),
        ('echo "ok. Reboot to apply."', "asks for a reboot"),
        ('echo nonsense > "$clock"', "not a number of MHz"),
    ],
)
async def test_a_command_that_does_not_work_is_no_lever(
    board: Board, on_set: str, why: str
) -> None:
    """Hanging, failing, ignoring, asking for a reboot: told in the notes, never raised."""
    tool = clock_tool(board.folder, mhz=600, on_set=on_set)
    async with found(board, **pair(tool)) as levers:
        assert levers.frequency is None
        assert levers.notes[0].startswith(HOLDING)
        assert why in levers.notes[0]


async def test_a_command_that_is_missing_is_no_lever(board: Board) -> None:
    """A wrong path is told with its name."""
    async with found(board, **pair(board.folder / "nowhere")) as levers:
        assert levers.frequency is None
        assert "nowhere: No such file" in levers.notes[0]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (('levers.frequency_get=["a"]',), "levers.frequency_get"),
        (('levers.frequency_set=["a", "{mhz}"]', "levers.frequencies_mhz=[1, 2]"), "set all"),
        (("levers.frequencies_mhz=[0, 2]",), "levers.frequencies_mhz"),
    ],
)
def test_half_a_command_pair_is_a_config_error(overrides: tuple[str, ...], key: str) -> None:
    """The error names the key; a whole pair is taken."""
    with pytest.raises(ConfigError, match=key):
        config.load(overrides=overrides)
    whole = ('levers.frequency_get=["a"]', 'levers.frequency_set=["a", "{mhz}"]')
    loaded = config.load(overrides=(*whole, "levers.frequencies_mhz=[400, 800]"))
    assert loaded.levers.frequencies_mhz == (400.0, 800.0)
    with pytest.raises(ConfigError, match="ascending"):
        config.load(overrides=(*whole, "levers.frequencies_mhz=[800, 400]"))
    with pytest.raises(ConfigError, match="mhz"):
        config.load(
            overrides=(
                whole[0],
                whole[0].replace("get", "set"),
                "levers.frequencies_mhz=[400, 800]",
            )
        )


# --- the simulated board, and what is told -------------------------------------------------------


async def test_the_twins_levers_cool_its_chip(tmp_path: Path) -> None:
    """Clock and fan of the simulated board are found, move what its sensors see, and go back."""
    twin = TwinState(make_board(tmp_path, "field"))
    with contextlib.closing(twin):
        levers = await find_levers(Levers(helper_socket=""), twin_levers(twin))
        assert levers.frequency is not None
        assert levers.frequency.values == twin.board.clock.gears_mhz
        before = twin.fields()
        lowest = levers.frequency.values[0]
        assert await levers.frequency.set(lowest - 1) == lowest
        assert twin.sample(time.monotonic()).clock_mhz == lowest
        if levers.fan is not None:
            assert await levers.fan.set(1.0) == twin.get("fan_ratio")
            await levers.fan.stop()
        await levers.frequency.stop()
        assert twin.fields() == before


@pytest.mark.parametrize(
    ("name", "kinds"), [("310p3", []), ("310b4", ["fan"]), ("field", ["frequency", "fan"])]
)
def test_a_twin_offers_what_its_board_has(tmp_path: Path, name: str, kinds: list[str]) -> None:
    """No setter in the parameter file, no lever."""
    with contextlib.closing(TwinState(make_board(tmp_path, name))) as twin:
        assert [lever.kind for lever in twin_levers(twin)] == kinds


async def test_check_tells_each_candidate_and_leaves_nothing_moved(board: Board) -> None:
    """Which levers this board really has, which not and why; afterwards all is as before."""
    tool = clock_tool(board.folder, mhz=600, on_set="true")
    with board.helper():
        wanted = Levers(helper_socket=str(board.socket), **pair(tool))
        said = await check(wanted, state_dir=board.folder / "state")
        assert board.fan() == (102, 2)
    assert "fan: pwmfan/pwm1: live, proven by reading back" in said
    assert "fan: pwmfan/pwm1 is used, 40% to 100%" in said
    assert any(line.startswith("frequency: command/clock: not counted: ") for line in said)
    assert any(line.startswith(HOLDING) for line in said)
    assert lines(Found())[-1] == "batch, duty, admission: always"
