"""The last resort is rare, recorded, and off by default."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fakes import FakeEngine, LetterText, request

from edged.queue import Queue
from edged.reboot import Rebooter, allowed
from edged.scheduler import Scheduler
from edged.settings import Recover


def recover(folder: Path, mode: str = "always", **more: object) -> Recover:
    """A board whose reboot is a mark in a file."""
    command = ("sh", "-c", f"echo reboot >> {folder}/done")
    return Recover(reboot=mode, reboot_command=command, **more)  # type: ignore[arg-type]


def reboots(folder: Path) -> int:
    path = folder / "done"
    return len(path.read_text().splitlines()) if path.exists() else 0


async def settle(folder: Path, count: int) -> None:
    """The command is a real process."""
    for _ in range(200):
        if reboots(folder) >= count:
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert reboots(folder) == count


async def test_by_default_nothing_is_rebooted(tmp_path: Path) -> None:
    """Without configuration a wedged NPU is reported, no more."""
    assert Recover().reboot == "never"
    Rebooter(recover(tmp_path, "never"), tmp_path, lambda: 0).look("wedged")
    await settle(tmp_path, 0)
    assert not (tmp_path / "reboots.json").exists()


async def test_once_per_window_also_across_restarts(tmp_path: Path) -> None:
    """The record outlives the process: a second daemon does not reboot again within 6 hours."""
    now_s = 1_000_000.0
    for _ in range(3):
        rebooter = Rebooter(recover(tmp_path), tmp_path, lambda: 0, lambda: now_s)
        rebooter.look("wedged")
        rebooter.look("wedged")
        await settle(tmp_path, 1)
    later = Rebooter(recover(tmp_path), tmp_path, lambda: 0, lambda: now_s + 6 * 3600 + 1)
    later.look("wedged")
    await settle(tmp_path, 2)
    assert json.loads((tmp_path / "reboots.json").read_text()) == [now_s + 6 * 3600 + 1]


async def test_idle_waits_for_the_last_request(tmp_path: Path) -> None:
    """`idle` interrupts nobody."""
    running = [2]
    rebooter = Rebooter(recover(tmp_path, "idle"), tmp_path, lambda: running[0])
    rebooter.look("wedged")
    await settle(tmp_path, 0)
    running[0] = 0
    rebooter.look("wedged")
    await settle(tmp_path, 1)


async def test_idle_waits_for_streams_between_engines(tmp_path: Path) -> None:
    """One whose engine has failed, and whose next one still loads, is no reason to call it idle."""
    engine = FakeEngine()
    scheduler = Scheduler([engine], {"fake": LetterText()}, Queue(8, 10_000, 10.0))  # type: ignore[dict-item]
    engine.state = "starting"
    scheduler._ever_ready = True
    stream = scheduler.submit(request())
    assert (scheduler.load().running, scheduler.load().live) == (0, 1)
    rebooter = Rebooter(recover(tmp_path, "idle"), tmp_path, lambda: scheduler.load().live)
    rebooter.look("wedged")
    await settle(tmp_path, 0)
    await stream.aclose()
    rebooter.look("wedged")
    await settle(tmp_path, 1)


@pytest.mark.parametrize("damage", ["{", "[1e999]"])
async def test_a_damaged_record_means_no_reboot(tmp_path: Path, damage: str) -> None:
    """When the past is unknown, the board is not rebooted: it may be doing nothing else."""
    (tmp_path / "reboots.json").write_text(damage)
    Rebooter(recover(tmp_path), tmp_path, lambda: 0).look("wedged")
    await settle(tmp_path, 0)


async def test_what_cannot_be_recorded_is_not_done(tmp_path: Path) -> None:
    """No disk, no reboot."""
    Rebooter(recover(tmp_path), tmp_path / "missing", lambda: 0).look("wedged")
    await settle(tmp_path, 0)


async def test_a_command_that_fails_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing command or a refusal is in the log, and used up the budget."""
    config = Recover(reboot="always", reboot_command=("/nowhere/reboot",))
    rebooter = Rebooter(config, tmp_path, lambda: 0)
    rebooter.look("wedged")
    await asyncio.sleep(0.1)
    rebooter.look("wedged")
    await rebooter.stop()
    out = capsys.readouterr().out
    assert "reboot_failed" in out
    assert "budget" in out


def test_a_clock_behind_its_own_past_is_no_excuse() -> None:
    """Boards without a clock start in the past: records of the future count."""
    assert not allowed([5000.0], now_s=100.0, budget=1, window_s=3600)
    assert allowed([5000.0], now_s=100.0, budget=2, window_s=3600)
    assert allowed([5000.0], now_s=9000.0, budget=1, window_s=3600)
