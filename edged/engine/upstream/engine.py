"""UpstreamEngine: any OpenAI-compatible server as a link of the chain.

Ready only on proof, renewed all the time; a server that asks for a pause gets it, one that fails
in mid-answer is asked again after growing pauses. Never logs a prompt, an answer or the key.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal

import structlog

from edged.core import Health, Limits, Request
from edged.engine import Run
from edged.engine.upstream.asking import ask, unsuited
from edged.engine.upstream.client import Client, Proof
from edged.engine.upstream.dial import Dial
from edged.engine.upstream.refusal import Busy
from edged.engine.upstream.run import UpstreamRun
from edged.errors import EdgedError, EngineBusy, EngineFault
from edged.settings import Upstream

log = structlog.get_logger("edged.engine")

_PROVE_AGAIN_S = 10.0  # while it serves
_TRY_AGAIN_S, _TRY_AGAIN_MAX_S = 0.5, 10.0  # while it does not, doubling
_GIVE_UP_AFTER_S = 60.0  # without proof: streams no longer wait for it
_PAUSE_S, _PAUSE_MAX_S = 1.0, 60.0  # after a fault or an unexplained 429, doubling
_SHORT_PAUSE_S = 30.0  # of a server that is alive: its busy moments are nobody's alarm
_LEAST_PAUSE_S = 0.25  # where it names less; one that names 0 has named none

State = Literal["off", "starting", "ready", "failed"]


class UpstreamEngine:
    """See edged.engine.TextEngine. on_change: called when capacity or state may have grown.

    on_board: it runs on this board and heats it, so Limits apply to it.
    """

    def __init__(
        self,
        settings: Upstream,
        dial: Dial,
        on_change: Callable[[], None] = lambda: None,
        name: str = "openai",
    ) -> None:
        self.name = name
        self.model = settings.model or "unknown"
        self.on_board = settings.on_board
        self.on_change = on_change
        self._settings = settings
        self._client = Client(settings, dial)
        self._limits: Limits | None = None
        self._state: State = "off"
        self._detail = "not started"
        self._kind = "openai"
        self._runs: set[UpstreamRun] = set()
        self._failures = 0  # in a row, of streams
        self._pause: asyncio.TimerHandle | None = None
        self._pause_state: Literal["starting", "failed"] = "failed"
        self._pause_detail = ""
        self._short_pause = False  # asked for by a server that is alive
        self._last_progress_s: float | None = None
        self._unproven_since_s = 0.0
        self._ask_now = asyncio.Event()
        self._stopping = False
        self._keeper: asyncio.Task[None] | None = None

    # --- TextEngine ------------------------------------------------------------------------------

    def capacity(self) -> int:
        if self._state != "ready" or self._pause is not None:
            return 0
        return max(0, self._most() - len(self._runs))

    def _most(self) -> int:
        limits = self._limits if self.on_board else None
        if limits is None:
            return self._settings.max_concurrent
        return min(self._settings.max_concurrent, limits.max_batch) if limits.admit else 0

    def health(self) -> Health:
        state, detail, pauses = self._state, self._detail, False
        if state == "ready" and self._pause is not None:
            state, detail, pauses = self._pause_state, self._pause_detail, self._short_pause
        return Health(
            state=state,
            detail=detail,
            running=len(self._runs),
            slots=self._settings.max_concurrent,
            last_progress_s=self._last_progress_s,
            pauses=pauses,
            admits=not (self.on_board and self._limits is not None and not self._limits.admit),
        )

    def unsuited(self, request: Request, begun: bool) -> str:
        return unsuited(request, begun, self._kind)

    def run_text(self, request: Request, written: str) -> Run:
        if self.health().state != "ready":
            raise EngineFault(f"engine {self.name} is not ready: {self.health().detail}")
        if self.capacity() <= 0:
            raise EngineBusy(f"engine {self.name} serves as many streams as it may")
        asked = ask(request, written, self._kind, self.model)
        run = UpstreamRun(self._client, asked, lambda fault: self._on_ended(run, fault))
        self._runs.add(run)
        return run

    def set_limits(self, limits: Limits) -> None:
        self._limits = limits
        self.on_change()

    async def start(self) -> None:
        """Return at the first proof; raise EngineFault if there is none at the first try.

        Either way the engine keeps asking until stop().
        """
        self._client.open()
        self._unproven_since_s = asyncio.get_running_loop().time()
        self._set_state("starting", "asking for proof")
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep_proving(first))
        await first

    async def stop(self) -> None:
        self._stopping = True
        self._ask_now.set()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._resume()
        self._set_state("off", "stopped")
        for run in tuple(self._runs):
            run.close()
        await self._client.close()

    # --- for the self-audit ----------------------------------------------------------------------

    def held(self) -> dict[int, UpstreamRun]:
        """Every run whose slot is not free yet."""
        return {id(run): run for run in self._runs}

    @property
    def lost(self) -> bool:
        """Whoever was to ask for proof is gone."""
        return self._keeper is not None and self._keeper.done()

    # --- proof -----------------------------------------------------------------------------------

    async def _keep_proving(self, first: asyncio.Future[None]) -> None:
        wait_s = _TRY_AGAIN_S
        while not self._stopping:  # wait_for may swallow a cancellation (Python < 3.12)
            self._ask_now.clear()
            try:
                self._on_proof(await self._client.proof())
                wait_s = _TRY_AGAIN_S
                if not first.done():
                    first.set_result(None)
            except EngineFault as fault:
                self._on_no_proof(str(fault))
                wait_s = min(_TRY_AGAIN_MAX_S, 2 * wait_s)
                if not first.done():
                    first.set_exception(EngineFault(f"engine {self.name}: {fault}"))
            pause_s = _PROVE_AGAIN_S if self._state == "ready" else wait_s
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ask_now.wait(), pause_s)

    def _on_proof(self, proof: Proof) -> None:
        if self._stopping:
            return
        self.model, self._kind = proof.model, proof.kind
        self._set_state("ready", f"serves {proof.model} ({proof.kind})")

    def _on_no_proof(self, why: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._state == "ready":
            self._unproven_since_s = now_s
        lost = now_s - self._unproven_since_s > _GIVE_UP_AFTER_S
        self._set_state("off" if lost else "failed", why)

    # --- streams ---------------------------------------------------------------------------------

    def _on_ended(self, run: UpstreamRun, fault: EdgedError | None) -> None:
        self._runs.discard(run)
        loop = asyncio.get_running_loop()
        if isinstance(fault, Busy):
            self._failures += 1
            named_s = fault.after_s
            after_s = max(_LEAST_PAUSE_S, named_s) if named_s else self._growing_s()
            self._pause_for(after_s, "starting", f"it asked for a pause of {after_s:.1f} s")
        elif isinstance(fault, EngineFault):
            self._failures += 1
            log.warning("engine_fault", engine=self.name, why=str(fault))
            self._pause_for(self._growing_s(), "failed", str(fault))
            self._ask_now.set()
        elif run.served:
            self._failures = 0
            self._last_progress_s = loop.time()
        loop.call_soon(self._changed)  # not within the call that closed it

    def _changed(self) -> None:
        self.on_change()

    def _growing_s(self) -> float:
        return float(min(_PAUSE_MAX_S, _PAUSE_S * 2 ** (min(self._failures, 10) - 1)))

    def _pause_for(self, seconds: float, state: Literal["starting", "failed"], why: str) -> None:
        """A longer pause that already runs stays."""
        loop = asyncio.get_running_loop()
        if self._pause is not None:
            if self._pause.when() >= loop.time() + seconds:
                return
            self._pause.cancel()
        self._pause_state, self._pause_detail = state, why
        self._short_pause = state == "starting" and seconds <= _SHORT_PAUSE_S
        self._pause = loop.call_later(seconds, self._on_pause_over)
        log.info("engine_pauses", engine=self.name, seconds=round(seconds, 2), why=why)

    def _on_pause_over(self) -> None:
        self._pause = None
        self.on_change()

    def _resume(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _set_state(self, state: State, detail: str) -> None:
        if (state, detail) != (self._state, self._detail):
            write = log.warning if state == "failed" else log.info
            write("engine_state", engine=self.name, state=state, detail=detail)
            self._state, self._detail = state, detail
            self.on_change()
