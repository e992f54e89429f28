"""Watch: audits the daemon each second and feeds systemd's watchdog while that is earned.

Withheld only when the audit itself did not run in time, or when something was begun that nobody
is to end. A worker that hangs is the ladder's business; figures that do not add up turn
readiness off, no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog

from edged import census
from edged.audit import KINDS, Descriptors, Patience, Violation, violations
from edged.audit_facts import Sources, accounted_files, collect
from edged.metrics import Metrics
from edged.status import Status
from edged.systemd import Notifier

log = structlog.get_logger("edged.watch")

EVERY_S = 1.0
AUDIT_WITHIN_S = 5.0  # between two audits; more, and the event loop was blocked
_BLOCKED_S = 2.0  # worth a line in the log
_FEED_S = 5.0  # at most between two messages
_LOAD_S = 30.0  # of more time asked for at each message while an engine is not there


def why_withheld(now_s: float, audited_s: float, missed: Sequence[str]) -> str:
    """Why systemd must not be told that all is well; "" = it is. missed: in words."""
    late_s = now_s - audited_s
    if late_s > AUDIT_WITHIN_S:
        return f"the audit has not run for {late_s:.1f} s"
    return missed[0] if missed else ""


class Watch:
    """found: what does not add up, in words."""

    def __init__(self, sources: Sources, metrics: Metrics) -> None:
        self.found: tuple[str, ...] = ()
        self._sources = sources
        self._metrics = metrics
        self._patience = Patience()
        self._descriptors = Descriptors()
        self._missed: tuple[str, ...] = ()
        self._audited_s: float | None = None
        self._told = ""  # why it was withheld last
        for kind in KINDS:
            metrics.audit_violations.add(kind, by=0)

    async def run(self) -> None:
        self._audited_s = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(EVERY_S)
            self.look()

    def look(self) -> None:
        """One audit."""
        now_s = asyncio.get_running_loop().time()
        self._measure_lag(now_s)
        try:
            found = self._look(now_s)
        except Exception:  # a bug of ours must not restart the daemon: it is told, as a violation
            log.exception("audit_failed")
            found = [Violation("audit", "", "the audit itself failed; see the log")]
        counts, new = self._patience.feed(found)
        for one in new:
            log.error("audit_violation", kind=one.kind, difference=one.words)
            self._metrics.audit_violations.add(one.kind)
        if self.found and not counts:
            log.info("audit_adds_up_again")
        self.found = tuple(one.words for one in counts)
        self._missed = tuple(one.words for one in counts if one.kind == "obligation")
        self._audited_s = now_s

    def withheld(self) -> str:
        """Why the watchdog is not fed; "" = it is."""
        if self._audited_s is None:
            return ""
        now_s = asyncio.get_running_loop().time()
        return why_withheld(now_s, self._audited_s, self._missed)

    def feed(self, notifier: Notifier) -> None:
        """Tell systemd that all is well, if it is; why not is logged once."""
        why = self.withheld()
        if not why:
            notifier.watchdog()
        if bool(why) != bool(self._told):
            if why:
                log.error("watchdog_withheld", why=why)
            else:
                log.warning("watchdog_fed_again", after=self._told)
        self._told = why

    def _look(self, now_s: float) -> list[Violation]:
        facts = collect(self._sources, now_s)
        found = violations(facts)
        files = census.open_files()
        if files is not None:
            accounted = accounted_files(facts, self._sources.upstream)
            found += self._descriptors.feed(files, accounted)
        return found

    def _measure_lag(self, now_s: float) -> None:
        if self._audited_s is None:
            return
        self._metrics.loop_lag_s = max(0.0, now_s - self._audited_s - EVERY_S)
        if self._metrics.loop_lag_s > _BLOCKED_S:
            log.warning("loop_blocked", seconds=round(self._metrics.loop_lag_s, 1))


@asynccontextmanager
async def watching(
    watch: Watch, notifier: Notifier, status: Callable[[], Status]
) -> AsyncIterator[None]:
    """Audit, and tell systemd how we are, from the loop itself: a blocked one tells nothing."""

    async def tell() -> None:
        while True:
            now = status()
            notifier.status(
                f"{now.mode}: {now.reason}; {now.running} running, {now.waiting} waiting"
            )
            watch.feed(notifier)
            if now.mode != "normal":
                notifier.extend(_LOAD_S)  # loading a large model outlasts TimeoutStartSec
            await asyncio.sleep(min(notifier.watchdog_interval_s or _FEED_S, _FEED_S))

    tasks = [asyncio.create_task(watch.run()), asyncio.create_task(tell())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
