"""WorkerEngine: an Engine whose work is done by a child process that may die at any time.

Owns the child's life (start, phase deadlines, restart with budget and back-off) and the table
of streams in it. A stream leaves the table when the worker says so, hence `capacity` is the
worker's own truth. It never touches text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import structlog

from edged import wire
from edged.core import Health, Limits, Request
from edged.engine.child import WORKER, Child
from edged.engine.restarts import RestartPolicy
from edged.engine.run import WorkerRun
from edged.errors import EngineFault

log = structlog.get_logger("edged.engine")

State = Literal["off", "starting", "ready", "failed"]
_HELLO_WITHIN_S = 60.0  # interpreter start and imports on a slow board (assumed)
_ANSWER_WITHIN_S = 20.0  # from a submit to the first frame of an idle worker
_LATE_FACTOR = 1.5  # of an announced deadline: the machine may be busy, the worker not hung


class WorkerEngine:
    """See edged.engine.Engine. on_change is called whenever capacity or state may have grown."""

    def __init__(
        self,
        name: str,
        model: str,
        launch: wire.Launch,
        restarts: RestartPolicy,
        on_change: Callable[[], None] = lambda: None,
        on_report: Callable[[wire.Report], None] = lambda report: None,
        command: tuple[str, ...] = WORKER,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.on_change = on_change
        self.on_report = on_report
        self._launch = launch
        self._command = command
        self._environ = dict(environ or {})
        self._policy = restarts
        self._limits: Limits | None = None
        self._child: Child | None = None
        self._runs: dict[int, WorkerRun] = {}
        self._next_stream = 0
        self._state: State = "off"
        self._detail = "not started"
        self._slots = 0
        self._starts = 0
        self._deaths_s: tuple[float, ...] = ()
        self._last_progress_s: float | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._ready: asyncio.Future[None] | None = None
        self._gone: asyncio.Event | None = None
        self._cause = ""  # why the worker is about to die, where it or we know better than its exit
        self._stopping = False
        self._keeper: asyncio.Task[None] | None = None

    # --- Engine --------------------------------------------------------------------------------

    def capacity(self) -> int:
        if self._state != "ready" or (self._limits is not None and not self._limits.admit):
            return 0
        return max(0, self._slots - len(self._runs))

    def run(self, request: Request, prefix: Sequence[int]) -> WorkerRun:
        if self._state != "ready" or self._child is None:
            raise EngineFault(f"engine {self.name} is not ready: {self._detail}")
        stream = self._next_stream = self._next_stream + 1
        child = self._child
        run = WorkerRun(cancel=lambda: child.send(wire.Cancel(stream)))
        child.send(_submit(stream, request, prefix))  # first: a refused frame takes no slot
        self._runs[stream] = run
        if self._deadline is None and not self._paused():  # an idle worker has promised nothing
            self._expect(_ANSWER_WITHIN_S, "begin a step")
        return run

    def set_limits(self, limits: Limits) -> None:
        self._limits = limits
        if self._child is not None and self._state == "ready":
            self._child.send(_limits_frame(limits))
            self.on_change()

    def _paused(self) -> bool:
        """A worker told to run nothing answers nothing."""
        return self._limits is not None and min(self._limits.max_batch, self._limits.duty) <= 0

    def health(self) -> Health:
        return Health(
            state=self._state,
            detail=self._detail,
            running=len(self._runs),
            slots=self._slots,
            restarts=max(0, self._starts - 1),
            last_progress_s=self._last_progress_s,
            admits=self._limits is None or self._limits.admit,
        )

    async def start(self) -> None:
        """Return at the first READY; raise EngineFault at the first failure.

        Either way the engine keeps trying until stop().
        """
        self._ready = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep_running())
        await self._ready

    async def stop(self) -> None:
        self._stopping = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._child is not None:  # while it loads it hears nothing, and has nothing to lose
            await (self._child.stop() if self._state == "ready" else self._child.stop(grace_s=0))
        self._cancel_deadline()
        self._set_state("off", "stopped")

    @property
    def pid(self) -> int | None:
        """Process id of the living worker, for status and tests."""
        return self._child.pid if self._child else None

    # --- the child's life ------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping:
            await self._wait_before_start()
            self._gone = asyncio.Event()
            self._cause = ""
            self._starts += 1
            self._set_state("starting", "starting its worker")
            self._child = Child(self._on_message, self._on_gone, self._command, self._environ)
            self._expect(_HELLO_WITHIN_S, "say hello")
            try:
                await self._child.start(self.name)
            except EngineFault as fault:
                self._on_gone(str(fault))
            await self._gone.wait()
            self._deaths_s = (*self._policy.recent(self._deaths_s, loop.time()), loop.time())
            await self._child.stop()  # reap it, and drain its last words into the log

    async def _wait_before_start(self) -> None:
        now_s = asyncio.get_running_loop().time()
        delay_s = self._policy.delay_s(self._deaths_s, now_s)
        if delay_s > 0:
            state: State = "off" if self._policy.exhausted(self._deaths_s, now_s) else "starting"
            self._set_state(state, f"{self._detail}; next start in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)

    def _on_message(self, message: wire.ToDaemon) -> None:
        self._last_progress_s = asyncio.get_running_loop().time()
        if isinstance(message, wire.Report):
            self._on_report(message)
        elif isinstance(message, wire.Phase):
            self._expect(message.deadline_s, message.name)
        elif isinstance(message, wire.Hello):
            self._on_hello(message)
        elif isinstance(message, wire.Ready):
            self._on_ready(message)
        elif isinstance(message, wire.SelfTested):
            log.info("self_test", engine=self.name, ok=message.ok, detail=message.detail)
        else:
            self._cause = f"{message.kind}: {message.detail}"
            log.error("engine_fault", engine=self.name, kind=message.kind, detail=message.detail)

    def _on_hello(self, hello: wire.Hello) -> None:
        if hello.version != wire.VERSION:
            self._fault(f"worker speaks wire version {hello.version}, not {wire.VERSION}")
        elif self._child is not None:
            self._child.send(self._launch)

    def _on_ready(self, ready: wire.Ready) -> None:
        self._slots = ready.slots
        self._expect(0.0, "")
        if self._limits is not None and self._child is not None:
            self._child.send(_limits_frame(self._limits))  # before the first stream
        self._set_state("ready", f"loaded {ready.model} in {ready.load_s:.1f} s")
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _on_report(self, report: wire.Report) -> None:
        for row in report.rows:
            run = self._runs.get(row.stream)
            if run is None:
                continue
            if row.finish:
                del self._runs[row.stream]
            run.feed(row)
        self._expect(report.deadline_s, "step")
        self.on_report(report)
        if any(row.finish for row in report.rows):
            self.on_change()

    def _on_gone(self, cause: str) -> None:
        """The child is dead: every stream in it ends here, whatever the cause."""
        self._cancel_deadline()
        detail = f"{self._cause} ({cause})" if self._cause else cause
        if self._stopping:
            self._set_state("off", "stopped")
        else:
            log.error("engine_died", engine=self.name, cause=detail, streams=len(self._runs))
            self._set_state("failed", detail)
        fault = EngineFault(f"engine {self.name} died: {detail}")
        runs, self._runs = self._runs, {}
        for run in runs.values():
            run.fail(fault)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(fault)
        if self._gone is not None:
            self._gone.set()

    # --- judged by deadline ----------------------------------------------------------------------

    def _expect(self, within_s: float, what: str) -> None:
        """The next frame must follow within `within_s` (0 = no promise)."""
        self._cancel_deadline()
        if within_s > 0:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(within_s * _LATE_FACTOR, self._missed, within_s, what)

    def _missed(self, within_s: float, what: str) -> None:
        self._fault(f"worker hung: {what} did not end within {within_s * _LATE_FACTOR:.1f} s")

    def _fault(self, detail: str) -> None:
        if self._child is not None:
            self._child.fail(detail)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _set_state(self, state: State, detail: str) -> None:
        if (state, detail) != (self._state, self._detail):
            log.info("engine_state", engine=self.name, state=state, detail=detail)
        self._state, self._detail = state, detail
        self.on_change()


def _submit(stream: int, request: Request, prefix: Sequence[int]) -> wire.Submit:
    sampling = request.sampling
    return wire.Submit(
        stream=stream,
        tokens=[*request.prompt_ids, *prefix],
        prompt_tokens=len(request.prompt_ids),
        max_tokens=request.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        ignore_eos=sampling.ignore_eos,
    )


def _limits_frame(limits: Limits) -> wire.SetLimits:
    return wire.SetLimits(limits.max_batch, limits.duty, limits.prefill_chunk, limits.admit)
