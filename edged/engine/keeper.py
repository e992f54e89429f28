"""Keeper: keeps one engine alive: worker after worker, each at the rung the ladder says.

Starts none before the sum of memory allows it. Knows nothing of streams; whoever owns them
hears of frames, of the end, and of every change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog

from edged import ladder, wire
from edged.engine.due import Due
from edged.engine.gate import Gate
from edged.engine.life import Hears, Life, Means
from edged.engine.rungs import Rung
from edged.errors import EngineFault, EngineMoved

log = structlog.get_logger("edged.engine")

State = Literal["off", "starting", "ready", "failed"]
_DRAIN_S = 60.0  # before a climb, for the streams that run
_NEXT = "; next start"
_PURPOSEFUL = ("climb", "admission", "pressure")


@dataclass(frozen=True)
class Owner:
    """Who holds the streams. busy: some run. on_move: a rung was left; gets the reason's label."""

    on_report: Callable[[wire.Report], None]
    on_ready: Callable[[wire.Ready], None]
    on_idle: Callable[[], None]
    on_gone: Callable[[EngineFault], None]
    on_change: Callable[[], None]
    on_move: Callable[[str], None]
    busy: Callable[[], bool]


class Keeper:
    def __init__(
        self,
        name: str,
        rungs: Sequence[Rung],
        rules: ladder.Rules,
        means: Means,
        gate: Gate,
        owner: Owner,
    ) -> None:
        self.name = name
        self.rungs = tuple(rungs)
        self.life: Life | None = None  # the latest
        self.state: State = "off"
        self.detail = "not started"
        self.reason = ""  # of the last move
        self.wedged = ""  # why only a reboot may help; empty while one need not
        self.starts = 0
        self.start_s: float | None = None  # how long the last start took, from exec to ready
        self.ladder = ladder.State()
        self.means, self.gate, self.rules, self._owner = means, gate, rules, owner
        self._hears = Hears(
            owner.on_report, self._on_ready, self._on_tested, owner.on_idle, self._on_end
        )
        self._first: asyncio.Future[None] | None = None  # what start() waits for
        self._due = Due()
        self._began_s = 0.0
        self._off = False
        self._faulted = False
        self._lives = False  # a process is there, wanted or not
        self._alive = False  # and it is wanted
        self._drain_until_s: float | None = None  # a climb waits for its streams
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def rung(self) -> Rung:
        return self.rungs[self.ladder.rung]

    @property
    def alive(self) -> bool:
        """A worker has been started and has not ended."""
        return self._lives

    @property
    def faulted(self) -> bool:
        """It has failed, or has no memory to start, and does not serve again yet."""
        return self.state in ("failed", "starting", "off") and self._faulted

    @property
    def kept(self) -> bool:
        """Somebody is to start the next worker."""
        return self._task is not None and not self._task.done()

    @property
    def lost(self) -> bool:
        """Whoever was to start the next worker is gone."""
        return self._task is not None and self._task.done()

    @property
    def wanted(self) -> bool:
        """There is a worker, and it is not about to go."""
        return self._alive

    @property
    def due_s(self) -> float:
        """Loop time of the next start, when there is no worker."""
        return self._due.at_s

    @property
    def parked(self) -> bool:
        """No worker until `wake`."""
        return self._due.parked

    @property
    def serves(self) -> bool:
        """A loaded worker is there for its streams, be it only until they end."""
        return self.state == "ready" or self._drain_until_s is not None

    @property
    def drain_until_s(self) -> float | None:
        """Loop time at which a climb no longer waits for its streams."""
        return self._drain_until_s

    @property
    def next_climb_s(self) -> float | None:
        return self.ladder.next_climb_s(self.rules)

    # --- commands --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return at the first READY; raise EngineFault at the first failure. It goes on trying."""
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep())
        await self._first

    async def stop(self) -> None:
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        fault = EngineFault(f"engine {self.name} is stopped")
        self._owner.on_gone(fault)
        self._fail_start(fault)
        if self.life is not None:
            await self.life.stop()
        self._set_state("off", "stopped")

    def send(self, message: wire.ToWorker) -> None:
        if self.life is not None:
            self.life.send(message)

    def tell(self, event: ladder.Event, why: str = "") -> None:
        """Something happened; the ladder says what follows, `why` says it to people."""
        now_s = asyncio.get_running_loop().time()
        before = self.ladder.rung
        self.ladder, action = ladder.advance(self.rules, self.ladder, event, now_s)
        if action.kind == "none":
            return
        words = f"{action.reason}: {why}" if why else action.reason
        if action.kind == "probe":
            log.warning("self_test_asked", engine=self.name, why=words)
            self.probe()
            return
        off = action.kind == "off"
        if action.rung != before or (off and not self._off):
            self.reason = words
            log.warning("rung_left", engine=self.name, off=off, next=self.rung.words, why=words)
            self._owner.on_move(action.reason)
        self.wedged = words if action.wedged else self.wedged
        self._off = off
        self._due.after(action.delay_s)
        # Not for a restart on purpose, nor while a smaller launch may fit: nobody needs to step in.
        self._faulted = self._faulted or off or action.reason not in _PURPOSEFUL
        if action.kind == "climb" and self._owner.busy():
            self._drain_until_s = now_s + _DRAIN_S
            self._set_state("starting", f"restarts with {self.rung.words} when its streams end")
        elif self._alive:
            self._let_go(words)

    def tick(self, calm: bool) -> None:
        """Once a second or so. calm: the machine is not short of memory."""
        if self._drain_until_s is not None:
            if not self._owner.busy() or asyncio.get_running_loop().time() > self._drain_until_s:
                self._let_go(self.reason)
        elif self.state == "ready":
            above = self.rungs[max(0, self.ladder.rung - 1)]
            room = calm and self.gate.room(self.rung.needs, above.needs)
            self.tell(ladder.Tick(room))

    def probe(self) -> None:
        """Run the golden self test between two steps; the ladder hears how it ended."""
        if self.state == "ready" and self.life is not None:
            self.life.send(wire.SelfTest())
            if not self.life.deadline.pending:
                self.life.deadline.expect(wire.SELF_TEST_WAIT_S, "answer the self test")

    def park(self, why: str) -> None:
        """No worker until `wake`: a fallback that waits to be needed."""
        self._due.park()
        if self._alive:
            self._let_go(why)
        self._set_state("off", why)

    def wake(self, why: str) -> None:
        if self.parked and not self._stopping:
            self._due.unpark()
            self.gate.reserve(self.rung.needs)
            self._set_state("starting", why)

    def expect_memory(self, within_s: float, why: str) -> None:
        """What it waits for is being given back: it is about to start, and worth waiting for."""
        self._off = False
        self._due.after(within_s)
        self._set_state("starting", why)
        self._due.nudge()

    def hurry(self) -> None:
        """Memory was given back: ask for it now."""
        if self.gate.refused:
            self._due.at_s = 0.0
            self._due.nudge()

    def would_fit(self, more_bytes: int) -> bool:
        """It is off for lack of memory, and would start if there were `more_bytes`."""
        return self._off and self.gate.would_open(self.rung.needs, more_bytes)

    def spares(self) -> bool:
        """A worker would fit, with memory to spare."""
        return self.gate.spares(self.rung.needs)

    # --- worker after worker ---------------------------------------------------------------------

    async def _keep(self) -> None:
        while not self._stopping:  # wait_for may swallow a cancellation (Python < 3.12)
            await self._due.wait(self._on_wait)
            if not self._admitted():
                continue
            self.starts += 1
            self._lives, self._alive, self._drain_until_s = True, True, None
            self._set_state("starting", f"starting its worker with {self.rung.words}")
            self._began_s = asyncio.get_running_loop().time()
            self.life = life = Life(self.name, self.rung.launch, self.means, self._hears)
            await life.run()
            self._lives = self._alive = False
            self.gate.settle()
            if life.undead:
                self.tell(ladder.Failed("wedged"), f"worker {life.pid} cannot be killed")

    def _on_wait(self, left_s: float) -> None:
        detail = f"{self.detail.partition(_NEXT)[0]}{_NEXT} in {left_s:.1f} s"
        self._set_state("off" if self._off else "starting", detail)

    def _admitted(self) -> bool:
        """The sum of memory allows this rung; else the ladder knows, and says what is next."""
        rung, gate = self.rung, self.gate
        if gate.opens(rung.needs):
            return True
        self.detail = f"not enough memory for {rung.words}: {gate.words}"
        self.tell(ladder.Refused(), gate.words)
        if self._off:
            gate.settle()
            self._fail_start(EngineFault(f"engine {self.name} is off: {self.detail}"))
        return False

    def _let_go(self, why: str) -> None:
        """End a worker that could go on: its streams are not failed, they move."""
        self._alive, self._drain_until_s = False, None
        self._set_state("starting", f"restarts with {self.rung.words} ({why})")
        if self.life is not None:
            self.life.let_go()
        self._owner.on_gone(EngineMoved(f"engine {self.name} restarts ({why})"))

    # --- what is heard of a worker ---------------------------------------------------------------

    def _on_ready(self, ready: wire.Ready) -> None:
        self.gate.settle()
        self.wedged, self._faulted = "", False
        self.start_s = asyncio.get_running_loop().time() - self._began_s
        self.tell(ladder.Serving())
        self._owner.on_ready(ready)  # before anybody may submit
        self._set_state("ready", f"loaded {ready.model} in {ready.load_s:.1f} s")
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _on_tested(self, result: wire.SelfTested) -> None:
        log.info("self_test", engine=self.name, ok=result.ok, detail=result.detail)
        if result.ok:
            self.tell(ladder.Passed())
        elif self.life is not None:
            self.life.fail("self_test", f"self test failed: {result.detail}")

    def _on_end(self, cause: ladder.Cause, words: str) -> None:
        """The worker died: every stream in it ends here, whatever the cause."""
        self._alive, self._drain_until_s = False, None
        log.error("engine_died", engine=self.name, cause=cause, detail=words)
        self._set_state("failed", words)
        self.tell(ladder.Failed(cause), words)
        fault = EngineFault(f"engine {self.name} died: {words}")
        self._owner.on_gone(fault)
        self._fail_start(fault)

    # --- small ends ------------------------------------------------------------------------------

    def _fail_start(self, fault: EngineFault) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(fault)

    def _set_state(self, state: State, detail: str) -> None:
        same = detail.partition(":")[0] == self.detail.partition(":")[0]  # but for its figures
        if state != self.state or not same:
            log.info("engine_state", engine=self.name, state=state, detail=detail)
        self.state, self.detail = state, detail
        self._owner.on_change()
