"""Hand-written fakes that remember: an engine with scripted steps and a text model of letters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from edged.core import Health, Limits, Request, Sampling, Step
from edged.errors import EngineFault, RowFault


def request(name: str = "r", prompt: int = 3, max_tokens: int = 4, **more: object) -> Request:
    return Request(
        id=name,
        model="fake",
        prompt_ids=tuple(range(1, prompt + 1)),
        max_tokens=max_tokens,
        sampling=Sampling(),
        **more,  # type: ignore[arg-type]
    )


class LetterDetokenizer:
    """Token id n is the letter chr(97 + n % 26)."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def flush(self) -> str:
        return ""


class LetterText:
    name = "fake"
    context_tokens = 1024

    def detokenizer(self, prompt_ids: Sequence[int]) -> LetterDetokenizer:
        return LetterDetokenizer()


class FakeRun:
    def __init__(self, engine: FakeEngine, request: Request, prefix: Sequence[int]) -> None:
        self.engine = engine
        self.request = request
        self.index = len(prefix)
        self.closed = False
        self.steps: asyncio.Queue[Step | Exception] = asyncio.Queue()

    def __aiter__(self) -> FakeRun:
        return self

    async def __anext__(self) -> Step:
        item = await self.steps.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.engine.release(self)


class FakeEngine:
    """`slots` runs at once; each takes one step of `step_s` per token of its request.

    A closed run frees its slot at the next step, as a worker does.
    """

    def __init__(self, slots: int = 2, step_s: float = 0.1, name: str = "fake") -> None:
        self.name = name
        self.model = "fake"
        self.slots = slots
        self.step_s = step_s
        self.state = "ready"
        self.admits = True
        self.runs: list[FakeRun] = []
        self.started: list[str] = []
        self.closed: list[str] = []
        self.most_running = 0
        self.on_change = lambda: None

    def capacity(self) -> int:
        serves = self.state == "ready" and self.admits
        return self.slots - len(self.runs) if serves else 0

    def run(self, request: Request, prefix: Sequence[int]) -> FakeRun:
        if self.capacity() <= 0:
            raise EngineFault("no slot")
        run = FakeRun(self, request, prefix)
        self.runs.append(run)
        self.started.append(request.id)
        self.most_running = max(self.most_running, len(self.runs))
        asyncio.get_running_loop().call_later(self.step_s, self._step, run)
        return run

    def _step(self, run: FakeRun) -> None:
        if run not in self.runs:
            return
        if run.closed:
            self._free(run)
            return
        run.index += 1
        done = run.index >= run.request.max_tokens
        run.steps.put_nowait(Step((run.index,), finish="length" if done else None))
        if done:
            self._free(run)
        else:
            asyncio.get_running_loop().call_later(self.step_s, self._step, run)

    def _free(self, run: FakeRun) -> None:
        self.runs.remove(run)
        self.on_change()

    def release(self, run: FakeRun) -> None:
        self.closed.append(run.request.id)

    def row_fault(self, index: int) -> None:
        """The run at `index` gets NaN; nothing when none runs."""
        if not self.runs:
            return
        run = self.runs[index % len(self.runs)]
        run.steps.put_nowait(RowFault("NaN"))
        self._free(run)

    def die(self, down_s: float = 1.0) -> None:
        runs, self.runs = self.runs, []
        self.state = "starting"
        for run in runs:
            run.steps.put_nowait(EngineFault("died"))
        asyncio.get_running_loop().call_later(down_s, self.revive)

    def revive(self) -> None:
        self.state = "ready"
        self.on_change()

    def set_limits(self, limits: Limits) -> None:
        raise NotImplementedError

    def health(self) -> Health:
        return Health(
            self.state,  # type: ignore[arg-type]
            slots=self.slots,
            running=len(self.runs),
            admits=self.admits,
        )

    async def start(self) -> None:
        self.state = "ready"

    async def stop(self) -> None:
        self.state = "off"
