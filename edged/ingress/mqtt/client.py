"""Client: keeps a connection to the broker, for as long as the daemon lives.

Connect, subscribe, say what is to be said on connecting, pump messages; on any end back off and
start again with a new Link. Owns no requests: what arrives goes to a callback, what leaves
comes from the Outbox.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import aiomqtt
import structlog

from edged.ingress.mqtt.dial import Dial
from edged.ingress.mqtt.link import V5, V311, ClosedEarly, Link, VersionRefused
from edged.ingress.mqtt.messages import Incoming, Outgoing
from edged.ingress.mqtt.outbox import Outbox
from edged.ingress.mqtt.reconnect import Attempt, delay_s

log = structlog.get_logger("edged.mqtt")

GRACE_S = 5.0  # how long stop() lets a connection attempt or a DISCONNECT finish by itself


@dataclass(frozen=True)
class Hooks:
    """What a connection asks and tells its owner; all plain def.

    route: a message has arrived. birth: what to publish on every new connection. fit(message,
    max_packet_bytes): what is sent in its place, None = nothing. on_link(up): a connection
    stands, has ended. on_drop(reason): something was given up.
    """

    route: Callable[[Incoming], None]
    birth: Callable[[], Iterable[Outgoing]]
    fit: Callable[[Outgoing, int | None], Outgoing | None]
    on_link: Callable[[bool], None]
    on_drop: Callable[[str], None]


class Client:
    """One per daemon. filters: subscribed on every connection."""

    def __init__(
        self,
        dial: Dial,
        filters: tuple[str, ...],
        outbox: Outbox,
        hooks: Hooks,
        reconnect_max_s: float,
    ) -> None:
        self._dial = dial
        self._filters = filters
        self._outbox = outbox
        self._hooks = hooks
        self._reconnect_max_s = reconnect_max_s
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.connected = False

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Disconnect properly, in bounded time. Nothing more arrives or leaves."""
        self._stopping.set()
        if self._task is None:
            return
        await asyncio.wait({self._task}, timeout=GRACE_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Until stop(). Never ends by itself, whatever the broker does."""
        attempt = Attempt()
        while not self._stopping.is_set():
            before = attempt
            try:
                attempt = await self._once(before)
            except Exception:  # a bug, ours or the library's, must not end MQTT for good
                log.exception("mqtt_connection_crashed")
                attempt = before.failed()
            if attempt.failures == before.failures and attempt.v5 != before.v5:
                continue
            if attempt.flapping:
                log.warning("mqtt_flapping", hint="does another client use this client id?")
            await self._pause(delay_s(attempt.failures, self._reconnect_max_s, random.random()))

    async def _pause(self, seconds: float) -> None:
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({stopping}, timeout=seconds)
        stopping.cancel()

    async def _once(self, attempt: Attempt) -> Attempt:
        """One connection, from CONNECT to its end; says what to try next."""
        link = Link(self._dial, V5 if attempt.v5 else V311, self._hooks.on_drop)
        loop = asyncio.get_running_loop()
        opened_s: float | None = None
        try:
            await link.open()
            opened_s = loop.time()
            await self._serve(link)
            return attempt
        except VersionRefused as error:
            log.info("mqtt_version_refused", offered=link.version.name, error=str(error))
            return attempt.refused()
        except ClosedEarly as error:
            log.warning("mqtt_connect_failed", error=str(error), offered=link.version.name)
            return attempt.closed_early()
        except aiomqtt.MqttError as error:
            cause = repr(error.__cause__) if error.__cause__ else None
            if opened_s is None:
                log.warning("mqtt_connect_failed", error=str(error), cause=cause)
                return attempt.failed()
            log.warning("mqtt_disconnected", error=str(error), cause=cause)
            return attempt.lost(loop.time() - opened_s)
        finally:
            link.abandon()

    async def _serve(self, link: Link) -> None:
        """Until stop() (then disconnects) or the end of the connection (then raises)."""
        pump = asyncio.ensure_future(self._pump(link))
        work = asyncio.ensure_future(self._work(link))
        stopping = asyncio.ensure_future(self._stopping.wait())
        tasks = {pump, work, stopping}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._outbox.detach()
            if self.connected:
                self.connected = False
                self._hooks.on_link(False)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(pump, work, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        await link.close()

    async def _pump(self, link: Link) -> None:
        async for message in link.messages():
            try:
                self._hooks.route(message)
            except Exception:  # a bug of ours costs this message, not the connection
                log.exception("mqtt_message_crashed")
                self._hooks.on_drop("crashed")

    async def _work(self, link: Link) -> None:
        """Subscribe first, so that whoever sees us online can ask; then send, while it lasts."""
        for topic_filter in self._filters:
            await link.subscribe(topic_filter)

        async def send(message: Outgoing) -> None:
            fitted = self._hooks.fit(message, link.max_packet_bytes)
            if fitted is not message:
                self._hooks.on_drop("over_packet_limit")
            if fitted is not None:
                await link.publish(fitted)

        broken = self._outbox.attach(send, self._hooks.birth())
        self.connected = True
        self._hooks.on_link(True)
        log.info("mqtt_connected", host=self._dial.host, version=link.version.name)
        await broken
