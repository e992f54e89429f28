"""Dial: how the broker is reached, from the configuration; reads the secrets' files once."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from edged.errors import ConfigError
from edged.ingress.mqtt.protocol import LOOK_FACTOR
from edged.settings import Mqtt

PORTS = {"mqtt": 1883, "mqtts": 8883}
MAX_KEEPALIVE_S = 65535  # two bytes on the wire
ROOM_BYTES = 64 * 1024  # of a packet for topic and properties


@dataclass(frozen=True)
class Dial:
    """What every connection has in common. availability: topic of the last will.

    max_packet_bytes: what a broker of MQTT 5 may send us at most.
    """

    host: str
    port: int
    client_id: str
    availability: str
    max_packet_bytes: int
    keepalive_s: int = 30
    username: str | None = None
    password: str | None = None
    tls: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"Dial({self.host}:{self.port}, {self.client_id})"  # never the password


def dial_of(config: Mqtt, node: str, availability: str) -> Dial:
    """Raises ConfigError naming the key."""
    url = urlsplit(config.url)
    if url.scheme not in PORTS or not url.hostname:
        raise ConfigError("mqtt.url: use mqtt://host[:port] or mqtts://host[:port]")
    if config.keepalive_s > MAX_KEEPALIVE_S:
        raise ConfigError(f"mqtt.keepalive_s: at most {MAX_KEEPALIVE_S} seconds")
    if config.password_file and not config.username:
        raise ConfigError("mqtt.username: is missing, but mqtt.password_file is set")
    return Dial(
        host=url.hostname,
        port=url.port or PORTS[url.scheme],
        client_id=config.client_id or f"edged-{node}",
        availability=availability,
        max_packet_bytes=LOOK_FACTOR * config.max_request_bytes + ROOM_BYTES,
        keepalive_s=config.keepalive_s,
        username=config.username or None,
        password=_password(config.password_file),
        tls=_tls(config.ca_file) if url.scheme == "mqtts" else None,
    )


def _password(path: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"mqtt.password_file: cannot read {path}: {error}") from None


def _tls(ca_file: str) -> ssl.SSLContext:
    """The system's authorities, or only those of ca_file."""
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"mqtt.ca_file: cannot use {ca_file}: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
