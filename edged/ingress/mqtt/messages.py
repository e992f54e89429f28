"""Messages: what comes in and what goes out, free of any MQTT library.

Incoming and Outgoing carry MQTT 5 properties as plain fields; a 3.1.1 connection has none of
them and drops them. `properties` translates to and from the library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Incoming:
    """One PUBLISH received. expiry_s: what is left of its Message Expiry Interval."""

    topic: str
    payload: bytes
    retain: bool = False
    response_topic: str | None = None
    correlation: bytes | None = None
    content_type: str | None = None
    expiry_s: int | None = None


@dataclass(frozen=True)
class Address:
    """Where and to whom one request is answered.

    topic: safe to publish on. id: the requester's or invented. named: the requester chose the
    id. asked: the requester chose the topic (Response Topic or reply_to).
    """

    topic: str
    id: str
    correlation: bytes | None = None
    named: bool = False
    asked: bool = False


@dataclass(frozen=True)
class Outgoing:
    """One PUBLISH to send. transient: worthless on another connection, so dropped with it."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = False
    transient: bool = False
    correlation: bytes | None = None
    user: tuple[tuple[str, str], ...] = ()
    content_type: str | None = None
    expiry_s: int | None = None
    address: Address | None = None  # of an answer; None for state

    @property
    def size_bytes(self) -> int:
        """At least its size on the wire, fixed header and properties included."""
        user = sum(len(key) + len(value.encode()) + 5 for key, value in self.user)
        return (
            len(self.payload) + len(self.topic.encode()) + len(self.correlation or b"") + user + 64
        )
