"""The self test while streams run: asked for by the daemon, run whole between two steps.

It takes a free slot for that moment only, so no stream is refused for it and none is moved;
where no slot is free it runs as soon as one is, before the next stream can have it.
"""

from __future__ import annotations

from collections.abc import Callable

from edged import wire
from edged.worker.executor import Executor
from edged.worker.faults import located
from edged.worker.link import Link
from edged.worker.rules import log
from edged.worker.selftest import SelfTester
from edged.worker.slots import SlotTable

# The whole test within twice what is promised for one step: that is 10 s and 20 such steps.
_STEP_DEADLINES = 2.0


def deadline_s(step_deadline_s: float) -> float:
    return _STEP_DEADLINES * step_deadline_s


class Probe:
    """tester None: nothing can be tested, and that is what is answered."""

    def __init__(
        self,
        link: Link,
        executor: Executor,
        tester: SelfTester | None,
        clock: Callable[[], float],
    ) -> None:
        self._link, self._executor, self._tester, self._clock = link, executor, tester, clock
        self._asked_s: float | None = None

    def ask(self) -> None:
        """One answer follows; asked again before it, the same one."""
        if self._asked_s is None:
            self._asked_s = self._clock()

    def left_s(self) -> float | None:
        """Seconds until the answer is due without a test; None = nothing was asked."""
        if self._asked_s is None:
            return None
        return max(0.0, self._asked_s + wire.SELF_TEST_WAIT_S - self._clock())

    def answer(self, table: SlotTable, paused: bool, step_deadline_s: float) -> bool:
        """Test if one was asked for and can run now; True when the answer went out.

        Raises MemoryFault, StepError, LinkClosed.
        """
        left_s = self.left_s()
        if left_s is None:
            return False
        free = [slot for slot in table.slots if not slot.busy]
        if self._tester is None:
            self._send(True, "this worker has nothing to compare with", 0.0, ran=False)
        elif free and not paused:
            slot = min(free, key=lambda s: s.rows)  # the fewest rows somebody could have reused
            table.forget(slot)
            self._link.send(wire.Phase("self_test", deadline_s(step_deadline_s)))
            self._test(self._tester, slot.index)
        elif left_s <= 0:
            why = "its limits let nothing run" if paused else "no slot came free"
            detail = f"not tested: {why} within {wire.SELF_TEST_WAIT_S:.0f} s"
            self._send(True, detail, 0.0, ran=False)
        else:
            return False
        return True

    def _test(self, tester: SelfTester, slot: int) -> None:
        started_s = self._clock()
        with located("decode"):
            wrong = tester.run(slot)
        if wrong:
            self._executor.zero_slot(slot)  # it may hold NaN, and 0 x NaN is NaN
        self._send(not wrong, wrong, self._clock() - started_s, ran=True)

    def _send(self, ok: bool, detail: str, seconds: float, ran: bool) -> None:
        self._asked_s = None
        outcome = ("passed" if ok else "failed") if ran else "not run"
        log(f"self test {outcome} in {seconds:.2f} s{': ' if detail else ''}{detail}")
        self._link.send(wire.SelfTested(ok, detail[:1000], seconds, ran))
