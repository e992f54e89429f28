"""MqttIngress: requests from an MQTT broker; ties topics, protocol, jobs and connection together.

A missing or broken broker is never an error here: the connection task retries for ever. Every
request is answered by exactly one final or error (and more only if it asks for more).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import structlog

import edged
from edged.errors import RequestError
from edged.ingress.mqtt import replies, state
from edged.ingress.mqtt.body import VERSION
from edged.ingress.mqtt.client import Client, Hooks
from edged.ingress.mqtt.dial import dial_of
from edged.ingress.mqtt.jobs import Jobs
from edged.ingress.mqtt.messages import Address, Incoming, Outgoing
from edged.ingress.mqtt.outbox import Outbox
from edged.ingress.mqtt.protocol import Call, Refusal, Rules, read
from edged.ingress.mqtt.topics import VERBS, Topics, check_names
from edged.ingress.prepare import Catalog
from edged.metrics import Metrics
from edged.scheduler import Scheduler
from edged.settings import Mqtt
from edged.status import Status, status_json

log = structlog.get_logger("edged.mqtt")

STATE_EVERY_S = 1.0
FLUSH_S = 5.0  # how long stop() waits for the broker to take the last answers


class MqttIngress:
    """Raises ConfigError when the configuration cannot be used. Needs a running loop."""

    def __init__(
        self,
        config: Mqtt,
        node: str,
        scheduler: Scheduler,
        catalog: Catalog,
        metrics: Metrics,
        status: Callable[[], Status],
    ) -> None:
        check_names(config.base, config.reply_allow)
        self._config = config
        self._node = node
        self._catalog = catalog
        self._status = status
        self._metrics = metrics
        self._topics = Topics(config.base, node)
        self._rules = Rules(
            self._topics, config.reply_allow, config.max_request_bytes, config.plain_text
        )
        self._boot_id = uuid.uuid4().hex
        self._outbox = Outbox(self._dropped)
        self._jobs = Jobs(
            node=node,
            scheduler=scheduler,
            catalog=catalog,
            metrics=metrics,
            max_inflight=config.max_inflight,
            chunk_interval_s=config.chunk_interval_s,
            send=self._outbox.put,
        )
        self._client = Client(
            dial_of(config, node, self._topics.availability),
            (self._topics.requests,),
            self._outbox,
            Hooks(self.route, self._birth, self._fit, self._linked, self._dropped),
            config.reconnect_max_s,
        )

        self._telling: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._client.connected

    @property
    def inflight(self) -> int:
        """Requests that run or wait."""
        return len(self._jobs)

    async def start(self) -> None:
        """Returns at once; the connection comes up by itself, now or later."""
        self._client.start()
        self._telling = asyncio.create_task(self._tell_states())

    def drain(self) -> None:
        """From now on new requests are answered with shutting_down; running ones go on."""
        self._jobs.drain()

    async def stop(self) -> None:
        """Answer what still runs, say offline, disconnect; in bounded time."""
        await self._jobs.stop()
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        self._outbox.put(self._availability("offline"))
        if not (self._client.connected and await self._outbox.drained(FLUSH_S)):
            log.warning("mqtt_undelivered", messages=len(self._outbox))
        await self._client.stop()

    # --- requests ---------------------------------------------------------------------------------

    def route(self, message: Incoming) -> None:
        """Take one message, without waiting for anything."""
        asked = read(message, self._rules, str(uuid.uuid4()))
        if isinstance(asked, Call):
            self._jobs.start(asked)
        elif isinstance(asked, Refusal):
            self._refuse(asked, len(message.payload))
        elif asked.verb == "cancel":
            self._cancel(asked.address)
        else:
            facts = status_json(self._status())
            self._answer("status", replies.status(self._node, asked.address, facts))

    def _refuse(self, refusal: Refusal, payload_bytes: int) -> None:
        """Count, log (never what was sent) and answer."""
        verb = refusal.verb if refusal.verb in VERBS else "other"
        self._dropped(refusal.reason)
        log.warning(
            "mqtt_request_refused",
            request_id=refusal.address.id,
            verb=verb,
            reason=refusal.reason,
            payload_bytes=payload_bytes,
        )
        self._jobs.refuse(verb, refusal.address, refusal.error)

    def _cancel(self, address: Address) -> None:
        """The request itself ends with its own answer; who cancels is told only where it asks."""
        found = self._jobs.cancel(address.id)
        if not address.asked:
            return
        if found:
            self._answer("cancel", replies.accepted(self._node, address, ""))
        else:
            why = f"id: no request {address.id} is running"
            self._jobs.refuse("cancel", address, RequestError("not_found", why, "id"))

    def _answer(self, verb: str, reply: Outgoing) -> None:
        self._outbox.put(reply)
        self._metrics.answered("mqtt", verb, replies.status_of(reply))

    # --- state ------------------------------------------------------------------------------------

    def _birth(self) -> Iterable[Outgoing]:
        """On every connection, availability last: whoever sees it finds the rest in place."""
        now = self._status()
        states = (self._state_of(name, facts) for name, facts in self._states(now).items())
        return (self._info(), *states, self._availability("online"))

    def _states(self, now: Status) -> dict[str, dict[str, Any]]:
        tokens = int(self._metrics.generation_tokens.total())
        return {"npu": state.npu(now), "queue": state.queue(now, tokens)}

    def _state_of(self, name: str, facts: dict[str, Any]) -> Outgoing:
        payload = msgspec.json.encode(state.stamped(facts))
        return Outgoing(self._topics.state(name), payload, retain=True, transient=True)

    async def _tell_states(self) -> None:
        """At most once a second, when something changed or nothing was said for a while."""
        told = {name: state.Told() for name in ("npu", "queue")}
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(STATE_EVERY_S)
            if not self._client.connected:
                continue
            try:
                for name, facts in self._states(self._status()).items():
                    if told[name].worth(facts, loop.time()):
                        self._outbox.put(self._state_of(name, facts))
            except Exception:  # a bug of ours must not leave the last state retained for good
                log.exception("mqtt_state_failed")

    def _availability(self, word: str) -> Outgoing:
        """Not kept for another connection while `online`: each says it anew."""
        return Outgoing(
            self._topics.availability, word.encode(), retain=True, transient=word == "online"
        )

    def _info(self) -> Outgoing:
        facts = {
            "v": VERSION,
            "node": self._node,
            "version": edged.__version__,
            "boot_id": self._boot_id,
            "models": [
                {"id": entry.text.name, "context_tokens": entry.context_tokens}
                for entry in self._catalog
            ],
            "limits": {
                "max_request_bytes": self._config.max_request_bytes,
                "max_inflight": self._config.max_inflight,
            },
            "reply_allow": list(self._config.reply_allow),
        }
        payload = msgspec.json.encode(facts)
        return Outgoing(self._topics.state("info"), payload, retain=True, transient=True)

    # --- told by the connection -------------------------------------------------------------------

    def _fit(self, message: Outgoing, max_packet_bytes: int | None) -> Outgoing | None:
        return replies.fitting(message, self._node, max_packet_bytes)

    def _linked(self, up: bool) -> None:
        self._metrics.mqtt_connected = up
        if not up and not self._client.stopping:
            self._metrics.mqtt_reconnects.add()

    def _dropped(self, reason: str) -> None:
        self._metrics.mqtt_dropped.add(reason)
