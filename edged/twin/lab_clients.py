"""The lab's clients: they ask the real scheduler, read their streams and note when tokens came.

Closed loop, rounds or bursts. Figures of one request are kept as a `Record`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edged.core import Delta, Request, Sampling
from edged.errors import RequestError
from edged.scheduler import Scheduler
from edged.twin.lab_scenario import Load

MODEL = "lab"
_REFUSED_WAIT_S = 1.0


@dataclass
class Record:
    """One request as its client saw it. gaps_s: between tokens, as the bare model would have
    them (step jitter left out)."""

    asked_s: float
    ended_s: float = 0.0
    ok: bool = False
    first_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class LabDetokenizer:
    def push(self, ids: Sequence[int]) -> str:
        return "x" * len(ids)

    def flush(self) -> str:
        return ""


class LabText:
    """The least a TextModel must be for streams of made-up ids."""

    name = MODEL

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> LabDetokenizer:
        return LabDetokenizer()


class Clients:
    """jitter_s: how much later than the bare model things happen by now (SimEngine.work)."""

    def __init__(
        self, scheduler: Scheduler, load: Load, seed: int, jitter_s: Callable[[], float]
    ) -> None:
        self.records: list[Record] = []
        self._scheduler = scheduler
        self._load = load
        self._random = random.Random(seed)
        self._jitter_s = jitter_s
        self._prompt = tuple(range(1, load.prompt_tokens + 1))
        self._wanted = 0
        self._loops: dict[int, asyncio.Task[None]] = {}
        self._asked = 0

    def set_count(self, wanted: int) -> None:
        """How many closed-loop clients should be asking; a surplus one leaves after its answer."""
        self._wanted = wanted
        if self._load.rounds:
            if wanted and 0 not in self._loops:
                self._loops[0] = asyncio.create_task(self._rounds())
            return
        for index in range(wanted):
            task = self._loops.get(index)
            if task is None or task.done():
                self._loops[index] = asyncio.create_task(self._ask_on(index))

    def burst(self, count: int) -> list[asyncio.Task[Record]]:
        return [asyncio.create_task(self._ask(f"burst-{n}")) for n in range(count)]

    async def stop(self) -> None:
        for task in self._loops.values():
            task.cancel()
        await asyncio.gather(*self._loops.values(), return_exceptions=True)

    async def _ask_on(self, index: int) -> None:
        while index < self._wanted:
            record = await self._ask(f"client-{index}")
            if not record.ok:
                await asyncio.sleep(_REFUSED_WAIT_S)

    async def _rounds(self) -> None:
        while self._wanted:
            await asyncio.gather(*(self._ask(f"client-{n}") for n in range(self._wanted)))

    async def _ask(self, client: str) -> Record:
        loop = asyncio.get_running_loop()
        record = Record(asked_s=loop.time())
        self.records.append(record)
        try:
            stream = self._scheduler.submit(self._request(client))
        except RequestError:
            record.ended_s = loop.time()
            return record
        before_s: float | None = None
        async for event in stream:
            now_s = loop.time()
            if isinstance(event, Delta):
                bare_s = now_s - self._jitter_s()
                record.token_times_s += [now_s] * event.tokens
                if before_s is not None:
                    record.gaps_s.append(bare_s - before_s)
                else:
                    record.first_s = now_s
                before_s = bare_s
            else:
                record.ok = event.reason in ("stop", "length")
        record.ended_s = loop.time()
        return record

    def _request(self, client: str) -> Request:
        self._asked += 1
        load = self._load
        spread = load.answer_spread_tokens
        answer = load.answer_tokens + (self._random.randint(-spread, spread) if spread else 0)
        return Request(
            id=f"lab-{self._asked}",
            model=MODEL,
            prompt_ids=self._prompt,
            max_tokens=max(1, answer),
            sampling=Sampling(ignore_eos=True),
            client=client,
        )
