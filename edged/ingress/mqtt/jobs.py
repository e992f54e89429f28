"""Jobs: the requests that run, one task each, and the answers of the last minutes.

Decides start, repetition, conflict, cancel and end in plain `def`; every request that reaches
start() is answered by exactly one final or error, whatever becomes of its task. Never knows
connections: answers go to `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import structlog

from edged.core import Delta, Finish, Request, Timings, Usage
from edged.errors import RequestError
from edged.ingress.mqtt import replies
from edged.ingress.mqtt.chunks import Chunks
from edged.ingress.mqtt.dedupe import Key, Recent
from edged.ingress.mqtt.job import Job, client_of, key_of
from edged.ingress.mqtt.messages import Address, Outgoing
from edged.ingress.mqtt.protocol import Call
from edged.ingress.prepare import Catalog, prepare
from edged.metrics import Metrics
from edged.scheduler import Scheduler

log = structlog.get_logger("edged.mqtt")

SHUTTING_DOWN = "the node is shutting down; ask again"


class Jobs:
    def __init__(
        self,
        *,
        node: str,
        scheduler: Scheduler,
        catalog: Catalog,
        metrics: Metrics,
        max_inflight: int,
        chunk_interval_s: float,
        send: Callable[[Outgoing], None],
    ) -> None:
        self._node = node
        self._scheduler = scheduler
        self._catalog = catalog
        self._metrics = metrics
        self._max_inflight = max_inflight
        self._chunk_interval_s = chunk_interval_s
        self._send = send
        self._running: set[Job] = set()
        self._by_key: dict[Key, Job] = {}  # of requests that brought an id
        self._recent = Recent()
        self._draining = False
        self._typical_s = 1.0  # moving mean of how long a request takes, for retry_after_ms

    def __len__(self) -> int:
        return len(self._running)

    # --- what can be asked ----------------------------------------------------------------------

    def start(self, call: Call) -> None:
        """1. repeated: no second generation  2. draining or full: refused  3. started."""
        now_s = asyncio.get_running_loop().time()
        if call.address.named and self._repeated(call, now_s):  # 1
            return
        refusal = self._refusal()
        if refusal is not None:  # 2
            self.refuse(call.verb, call.address, refusal)
            return
        deadline_s = None if call.lifetime_s is None else now_s + call.lifetime_s
        job = Job(call, call.address, now_s, deadline_s)  # 3
        self._running.add(job)
        if call.address.named:
            self._by_key[key_of(call.address)] = job
        job.task = asyncio.create_task(self._run(job))
        job.task.add_done_callback(lambda task: self._ended(job, task))

    def cancel(self, request_id: str) -> bool:
        """Cancel every running request of that id; False when there is none."""
        found = [job for job in self._running if job.address.id == request_id]
        for job in found:
            self._metrics.cancelled.add("request")
            job.end("cancelled")
        return bool(found)

    def refuse(self, verb: str, address: Address, error: RequestError) -> None:
        """Answer a request that is not started."""
        self._metrics.answered("mqtt", verb, error.spec.status)
        self._send(replies.error(self._node, address, 0, error))

    def drain(self) -> None:
        self._draining = True

    async def stop(self) -> None:
        """End what still runs as shutting_down; returns when all is answered."""
        self._draining = True
        tasks = [job.task for job in self._running if job.task is not None]
        for job in self._running:
            job.end("shutting_down")
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- decisions ------------------------------------------------------------------------------

    def _repeated(self, call: Call, now_s: float) -> bool:
        """Answer a request whose id is running or was answered lately; False = it is new."""
        key = key_of(call.address)
        job, recent = self._by_key.get(key), self._recent.find(key, now_s)
        if job is not None and not job.answered:
            known = job.call.digest
        elif recent is not None:
            known, job = recent.digest, None
        else:
            return False
        if known != call.digest:
            why = f"id: {call.address.id} is already used by another request; choose a new id"
            self.refuse(call.verb, call.address, RequestError("id_conflict", why, "id"))
            return True
        self._metrics.dedupe_hits.add()
        if recent is not None and job is None:
            self._send(replies.readdressed(recent.answer, call.address))
        elif job is not None:
            job.address = call.address  # whoever asks again waits on the newest correlation
            if job.loud and job.request is not None:
                self._send(replies.accepted(self._node, call.address, job.request.model))
        return True

    def _refusal(self) -> RequestError | None:
        if self._draining:
            return RequestError("shutting_down", SHUTTING_DOWN, retry_after_s=5)
        if len(self._running) >= self._max_inflight:
            why = f"{len(self._running)} MQTT requests are in flight; ask again later"
            return RequestError(
                "queue_full", why, retry_after_s=min(60.0, max(1.0, self._typical_s))
            )
        return None

    # --- one job --------------------------------------------------------------------------------

    async def _run(self, job: Job) -> None:
        try:
            request = job.request = await self._prepare(job)
            stream = job.stream = self._scheduler.submit(request)
        except RequestError as error:
            self._answer_error(job, error)
            return
        if job.loud:
            self._send(replies.accepted(self._node, job.address, request.model))
            job.next_seq = 1
        chunks = job.chunks = Chunks(self._chunk_interval_s, lambda text: self._chunk(job, text))
        pace = self._metrics.pace()
        async with aclosing(stream):
            async for event in stream:
                if isinstance(event, Delta):
                    pace.tick(asyncio.get_running_loop().time(), event.tokens)
                    job.pieces.append(event.text)
                    if job.call.stream:
                        chunks.add(event.text)
                else:
                    self._finish(job, event)

    async def _prepare(self, job: Job) -> Request:
        return await prepare(
            job.call.draft,
            self._catalog,
            request_id=job.address.id,
            client=client_of(job.address),
            ingress="mqtt",
            now_s=job.started_s,
            deadline_s=job.deadline_s,
            priority=job.call.priority,
        )

    def _chunk(self, job: Job, text: str) -> None:
        self._send(replies.chunk(self._node, job.address, job.next_seq, text))
        job.next_seq += 1

    def _finish(self, job: Job, finish: Finish) -> None:
        if job.chunks is not None:
            job.chunks.flush()
        if finish.reason == "cancelled" and job.ending == "shutting_down":
            self._answer_error(job, RequestError("shutting_down", SHUTTING_DOWN, retry_after_s=5))
        elif finish.reason in ("shed", "failed"):
            self._answer_error(job, replies.failure(finish))
        else:
            self._answer_final(job, finish)

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        """The task is over: forget it, and answer for it if it did not."""
        self._running.discard(job)
        if self._by_key.get(key_of(job.address)) is job:
            del self._by_key[key_of(job.address)]
        if task.cancelled():
            self._finish(job, Finish("cancelled", Usage(0, 0)))
        elif not job.answered:  # a bug of ours: this request ends, the daemon lives
            log.error("mqtt_request_crashed", request_id=job.address.id, exc_info=task.exception())
            why = "internal error; see the node's log"
            self._finish(job, Finish("failed", Usage(0, 0), (), Timings(), "internal_error", why))

    def _answer_final(self, job: Job, finish: Finish) -> None:
        if job.answered:
            return
        model = job.request.model if job.request is not None else ""
        text = "".join(job.pieces)
        reply = replies.final(self._node, job.address, job.next_seq, model, text, finish)
        now_s = asyncio.get_running_loop().time()
        if job.address.named:
            self._recent.keep(key_of(job.address), job.call.digest, reply, now_s)
        if finish.reason != "cancelled":
            self._typical_s += 0.2 * (now_s - job.started_s - self._typical_s)
        self._answer(job, reply, finish.reason)

    def _answer_error(self, job: Job, error: RequestError) -> None:
        if not job.answered:
            reply = replies.error(self._node, job.address, job.next_seq, error)
            self._answer(job, reply, error.code)

    def _answer(self, job: Job, reply: Outgoing, outcome: str) -> None:
        job.answered = True
        self._send(reply)
        status = replies.status_of(reply)
        self._metrics.answered("mqtt", job.call.verb, status)
        took_s = asyncio.get_running_loop().time() - job.started_s
        log.info(
            "mqtt_request",
            request_id=job.address.id,
            verb=job.call.verb,
            outcome=outcome,
            status=status,
            took_s=round(took_s, 3),
        )
