"""Properties: MQTT 5 properties between our plain messages and paho's objects.

The only file that knows paho's property names.
"""

from __future__ import annotations

import aiomqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from edged.ingress.mqtt.messages import Incoming, Outgoing

WILL_DELAY_S = 5  # hides short reconnects from subscribers of the availability
SESSION_EXPIRY_S = 10  # a will is never delayed beyond its session
UTF8 = 1  # Payload Format Indicator: the payload is UTF-8 text


def _of(packet_type: int) -> Properties:
    return Properties(packet_type)  # type: ignore[no-untyped-call]


def incoming(message: aiomqtt.Message) -> Incoming:
    """A library message; absent properties become None."""
    payload = message.payload
    found = message.properties
    correlation = getattr(found, "CorrelationData", None)
    return Incoming(
        topic=str(message.topic),
        payload=payload if isinstance(payload, bytes) else bytes(payload),
        retain=message.retain,
        response_topic=getattr(found, "ResponseTopic", None),
        correlation=None if correlation is None else bytes(correlation),
        content_type=getattr(found, "ContentType", None),
        expiry_s=getattr(found, "MessageExpiryInterval", None),
    )


def publish(message: Outgoing) -> Properties:
    """The properties of one PUBLISH."""
    made = _of(PacketTypes.PUBLISH)
    if message.correlation is not None:
        made.CorrelationData = message.correlation
    if message.user:
        made.UserProperty = list(message.user)
    if message.content_type is not None:
        made.ContentType = message.content_type
        made.PayloadFormatIndicator = UTF8
    if message.expiry_s is not None:
        made.MessageExpiryInterval = message.expiry_s
    return made


def connect(max_packet_bytes: int) -> Properties:
    """max_packet_bytes: the broker discards for us what is larger (memory is bounded)."""
    made = _of(PacketTypes.CONNECT)
    made.SessionExpiryInterval = SESSION_EXPIRY_S
    made.MaximumPacketSize = max_packet_bytes
    return made


def will() -> Properties:
    made = _of(PacketTypes.WILLMESSAGE)
    made.WillDelayInterval = WILL_DELAY_S
    return made


def maximum_packet_bytes(connack: Properties | None) -> int | None:
    """The largest packet the broker takes from us; None = it did not say."""
    found: int | None = getattr(connack, "MaximumPacketSize", None)
    return found
