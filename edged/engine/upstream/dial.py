"""Dial: how the upstream server is reached, from the configuration; reads the key's file once."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from edged.errors import ConfigError
from edged.settings import Upstream

_MAX_KEY_BYTES = 4096


@dataclass(frozen=True)
class Dial:
    """base: of the API, such as http://host:8000/v1; origin: what lies before the path."""

    base: str
    origin: str
    tls: ssl.SSLContext | None = None
    api_key: str = ""

    def __repr__(self) -> str:
        return f"Dial({self.base})"  # never the key

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def dial_of(settings: Upstream, environ: Mapping[str, str] = os.environ) -> Dial:
    """Raises ConfigError naming the key."""
    parts = urlsplit(settings.url)
    origin = f"{parts.scheme}://{parts.netloc}"
    path = parts.path.rstrip("/") or "/v1"
    return Dial(
        base=origin + path,
        origin=origin,
        tls=_tls(settings) if parts.scheme == "https" else None,
        api_key=_key(settings.api_key_file, environ) if settings.api_key_file else "",
    )


def _tls(settings: Upstream) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca_file or None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"upstream.ca_file: cannot use {settings.ca_file}: {error}") from None
    if not settings.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _key(given: str, environ: Mapping[str, str]) -> str:
    """A plain name is looked up among systemd's credentials, if there are any."""
    folder = environ.get("CREDENTIALS_DIRECTORY")
    path = Path(folder) / given if folder and "/" not in given else Path(given).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        why = f"upstream.api_key_file: cannot read {path}: {error.strerror}"
        raise ConfigError(why) from None
    except RuntimeError:  # a user without a home
        raise ConfigError("upstream.api_key_file: the home folder is unknown") from None
    try:
        key = data.decode("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    if not key or len(data) > _MAX_KEY_BYTES or not key.isprintable() or " " in key:
        raise ConfigError(f"upstream.api_key_file: {path} must hold the API key alone, on one line")
    return key
