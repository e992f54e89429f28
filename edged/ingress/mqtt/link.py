"""Link: one connection to the broker, from CONNECT to its end; never used twice.

The only file that knows aiomqtt's inside: a connection closed before CONNACK, the broker's
packet limit, refused publishes and discarded messages show up nowhere in its public face.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiomqtt
import structlog
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from edged.ingress.mqtt import properties
from edged.ingress.mqtt.dial import Dial
from edged.ingress.mqtt.messages import Incoming, Outgoing

log = structlog.get_logger("edged.mqtt")

V5 = aiomqtt.ProtocolVersion.V5
V311 = aiomqtt.ProtocolVersion.V311
MAX_INCOMING = 1024  # messages received but not yet routed; routing never waits, so few are
UNSUPPORTED_VERSION = (1, 132)  # CONNACK codes of MQTT 3.1.1 and 5
REFUSED = 128  # reason codes from here on are failures
CALL_TIMEOUT_S = 10.0


class VersionRefused(Exception):
    """The broker says that it does not speak this protocol version."""


class ClosedEarly(Exception):
    """The broker closed the connection before it answered CONNECT."""


class Link:
    """on_drop(reason): the library discarded something without telling its caller."""

    def __init__(
        self, dial: Dial, version: aiomqtt.ProtocolVersion, on_drop: Callable[[str], None]
    ) -> None:
        self.version = version
        self.max_packet_bytes: int | None = None
        self._on_drop = on_drop
        self._client = _client(dial, version)
        self._closed = asyncio.Event()
        self._hook()

    async def open(self) -> None:
        """Connect. Raises VersionRefused, ClosedEarly or aiomqtt.MqttError."""
        entering = asyncio.ensure_future(self._client.__aenter__())
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({entering, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not entering.done() and not self._client._connected.done():
                raise ClosedEarly("the broker closed the connection before it answered CONNECT")
            await entering
        except aiomqtt.MqttCodeError as error:
            if _code(error.rc) in UNSUPPORTED_VERSION:
                raise VersionRefused(str(error)) from None
            raise
        finally:
            if not entering.done():
                self._unhook()  # the connecting thread cannot be stopped, only disowned
            entering.cancel()
            closing.cancel()
            await asyncio.gather(entering, closing, return_exceptions=True)

    async def subscribe(self, topic_filter: str) -> None:
        """QoS 1. On MQTT 5 with the retain flag as published, so that it can be refused."""
        if self.version is V5:
            options = SubscribeOptions(qos=1, retainAsPublished=True)
            codes = await self._client.subscribe(topic_filter, options=options)
        else:
            codes = await self._client.subscribe(topic_filter, qos=1)
        if any(_code(code) >= REFUSED for code in codes):
            raise aiomqtt.MqttError(f"the broker refuses the subscription to {topic_filter}")

    async def messages(self) -> AsyncIterator[Incoming]:
        """What arrives, until the connection ends: then raises aiomqtt.MqttError."""
        async for message in self._client.messages:
            yield properties.incoming(message)

    async def publish(self, message: Outgoing) -> None:
        """Returns when written (QoS 0) or acknowledged (QoS 1).

        No time-out of its own: the library could not withdraw the message; keepalive ends a
        connection that is dead.
        """
        await self._client.publish(
            message.topic,
            message.payload,
            qos=message.qos,
            retain=message.retain,
            properties=properties.publish(message) if self.version is V5 else None,
            timeout=math.inf,
        )

    async def close(self) -> None:
        """Disconnect properly: the broker then does not publish the will. Bounded."""
        with contextlib.suppress(aiomqtt.MqttError, asyncio.TimeoutError):
            await asyncio.wait_for(self._client.__aexit__(None, None, None), CALL_TIMEOUT_S)
        self.abandon()

    def abandon(self) -> None:
        """Cut the connection if it still stands, without DISCONNECT.

        The library leaves the socket open (and its messages acknowledged, into a queue nobody
        reads) after a failed connect and after a packet it cannot decode.
        """
        ended = self._client._disconnected
        if ended.done() and not ended.cancelled():
            ended.exception()  # seen: asyncio would report it as forgotten
        self._client._client._sock_close()

    def _hook(self) -> None:
        paho = self._client._client
        on_connect, on_disconnect = self._client._on_connect, self._client._on_disconnect
        on_message, on_publish = self._client._on_message, self._client._on_publish

        def connected(c: Any, u: Any, flags: Any, code: ReasonCode, props: Properties) -> None:
            self.max_packet_bytes = properties.maximum_packet_bytes(props)
            on_connect(c, u, flags, code, props)

        def disconnected(c: Any, u: Any, flags: Any, code: ReasonCode, props: Properties) -> None:
            on_disconnect(c, u, flags, code, props)
            self._closed.set()

        def received(c: Any, u: Any, message: Any) -> None:
            if self._client._queue.full():
                self._on_drop("incoming_full")
            on_message(c, u, message)

        def published(c: Any, u: Any, mid: int, code: ReasonCode, props: Properties) -> None:
            if code.is_failure:
                self._on_drop("refused_by_broker")
                log.warning("mqtt_publish_refused", reason=str(code))
            on_publish(c, u, mid, code, props)

        paho.on_connect, paho.on_disconnect = connected, disconnected  # type: ignore[assignment]
        paho.on_message, paho.on_publish = received, published

    def _unhook(self) -> None:
        paho = self._client._client
        paho.on_socket_open = paho.on_socket_register_write = None


def _client(dial: Dial, version: aiomqtt.ProtocolVersion) -> aiomqtt.Client:
    v5 = version is V5
    will = aiomqtt.Will(dial.availability, "offline", 1, True, properties.will() if v5 else None)
    return aiomqtt.Client(
        dial.host,
        dial.port,
        identifier=dial.client_id,
        username=dial.username,
        password=dial.password,
        protocol=version,
        will=will,
        # A clean session each time (both spellings); a durable one is a choice of its own.
        clean_session=None if v5 else True,
        clean_start=True if v5 else MQTT_CLEAN_START_FIRST_ONLY,
        properties=properties.connect(dial.max_packet_bytes) if v5 else None,
        keepalive=dial.keepalive_s,
        timeout=CALL_TIMEOUT_S,
        tls_context=dial.tls,
        max_queued_incoming_messages=MAX_INCOMING,
        # Small packets follow each other: Nagle's algorithm costs 40 ms per answer.
        socket_options=((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),),
    )


def _code(rc: object) -> int:
    """The number of a reason code, whichever type the library used."""
    return int(rc.value) if isinstance(rc, ReasonCode) else int(rc or 0)  # type: ignore[call-overload]
