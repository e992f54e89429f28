"""Reboot: the last resort for an accelerator that nothing else cures; off unless configured.

Bounded by a budget that is on disk before the command runs: without that record it does nothing,
for a board that reboots for ever serves nobody.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from edged.settings import Recover

log = structlog.get_logger("edged")

_COMMAND_S = 60.0


def allowed(past_s: Sequence[float], now_s: float, budget: int, window_s: float) -> bool:
    """Wall-clock times. A board without a clock of its own may be before its own past: what lies
    in the future counts."""
    return sum(1 for at_s in past_s if at_s > now_s - window_s) < budget


class Rebooter:
    """running: requests that have not ended, those included that wait or move between engines."""

    def __init__(
        self,
        recover: Recover,
        state_dir: Path,
        running: Callable[[], int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._recover, self._running, self._clock = recover, running, clock
        self._path = state_dir / "reboots.json"
        self._told = ""
        self._task: asyncio.Task[None] | None = None

    def look(self, wedged: str) -> None:
        """Called while an engine is wedged, with its words; reboots when that is allowed."""
        if self._task is not None:
            return
        now_s = self._clock()
        refusal = self._refusal(now_s)
        if refusal:
            self._tell(refusal, wedged)
            return
        try:
            self._remember(now_s)
        except OSError as error:
            self._tell(f"cannot write {self._path}: {error.strerror}", wedged)
            return
        log.error("reboot", why=wedged, command=self._recover.reboot_command)
        self._task = asyncio.create_task(self._run())

    def _tell(self, why: str, wedged: str) -> None:
        """Once, though it is asked each second."""
        if why != self._told:
            log.warning("no_reboot", why=why, wedged=wedged)
        self._told = why

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _refusal(self, now_s: float) -> str:
        recover = self._recover
        if recover.reboot == "never":
            return "recover.reboot is never"
        if not allowed(self._past(), now_s, recover.reboot_budget, recover.reboot_window_s):
            return "the budget of reboots is used up"
        if recover.reboot == "idle" and self._running():
            return "requests are running"
        return ""

    def _past(self) -> list[float]:
        """A damaged record counts as a reboot just now."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[float])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError):
            return [float("inf")] * self._recover.reboot_budget

    def _remember(self, now_s: float) -> None:
        kept = [at_s for at_s in self._past() if at_s > now_s - self._recover.reboot_window_s]
        temporary = self._path.with_suffix(".new")
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode([*kept, now_s]))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    async def _run(self) -> None:
        command = self._recover.reboot_command
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL
            )
            code = await asyncio.wait_for(process.wait(), _COMMAND_S)
        except (OSError, asyncio.TimeoutError) as error:
            log.error("reboot_failed", command=command, why=str(error) or "it did not end")
        else:
            if code:
                log.error("reboot_failed", command=command, code=code)
        finally:
            self._task = None
