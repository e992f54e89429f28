"""Who may ask at all: Host and Origin checks, cross-origin headers, media type. Pure.

Keeps a web page of somebody else from using the node through the user's browser (DNS
rebinding, cross-site posts). Knows nothing of keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from edged.errors import RequestError
from edged.settings import Http

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]@/\s]+)(?::\d{1,5})?", re.IGNORECASE)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,1024}")
MAX_AGE_S = 600


class Guard:
    """The allow-lists of one server."""

    def __init__(self, config: Http, node: str) -> None:
        hosts = ("localhost", "127.0.0.1", "[::1]", node, config.host, *config.allowed_hosts)
        self._hosts = {_bracketed(host) for host in hosts if host}
        self._origins = set(config.allowed_origins)

    def check_host(self, hosts: list[str], own_address: str) -> None:
        """hosts: all Host headers. own_address: what the client has connected to, which no
        foreign name can stand for."""
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            raise RequestError("forbidden", "send exactly one valid Host header")
        if (name := match[1].lower()) not in self._hosts and name != _bracketed(own_address):
            message = f"Host {name[:64]} is not served here; add it to http.allowed_hosts"
            raise RequestError("forbidden", message)

    def check_origin(self, headers: Mapping[str, str], method: str) -> None:
        """Refuse what a browser sends on behalf of a page that is neither ours nor allowed."""
        origin = headers.get("Origin")
        if origin is None:
            foreign = headers.get("Sec-Fetch-Site") == "cross-site"
            if foreign and not _navigates(headers, method):
                raise RequestError("forbidden", "cross-site requests are not served")
            return
        if (
            origin not in self._origins
            and origin.lower() != f"http://{headers.get('Host')}".lower()
        ):
            message = f"Origin {origin[:64]} is not allowed; add it to http.allowed_origins"
            raise RequestError("forbidden", message)

    def cors_headers(self, origin: str | None) -> dict[str, str]:
        """For every answer to an allowed foreign page. Never a wildcard, never an echo."""
        if origin not in self._origins or origin is None:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "x-request-id, retry-after, edged-node",
            "Vary": "Origin",
        }

    def preflight_headers(self, headers: Mapping[str, str]) -> dict[str, str] | None:
        """The answer to a CORS preflight, None when the request is none. Call after
        check_origin."""
        if "Origin" not in headers or "Access-Control-Request-Method" not in headers:
            return None
        answer = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }
        wanted = headers.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(wanted):
            answer["Access-Control-Allow-Headers"] = wanted
        return answer


def check_media_type(content_type: str) -> None:
    """A body must say that it is JSON: browsers cannot send that across sites unasked."""
    media, _, parameters = content_type.partition(";")
    if media.strip().lower() != "application/json":
        message = "send the body with Content-Type: application/json"
        raise RequestError("unsupported_media_type", message)
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", parameters, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8"):
        raise RequestError("unsupported_media_type", "send the body in UTF-8")


def request_id(given: str | None, otherwise: str) -> str:
    """The client's own id when it is harmless to repeat."""
    return given if given and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", given) else otherwise


def _navigates(headers: Mapping[str, str], method: str) -> bool:
    """A user follows a link: the page that had the link cannot read the answer."""
    return (
        method in ("GET", "HEAD")
        and headers.get("Sec-Fetch-Mode") == "navigate"
        and headers.get("Sec-Fetch-Dest") == "document"
    )


def _bracketed(host: str) -> str:
    host = host.lower()
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_local(address: str) -> bool:
    """True for a peer on this machine: loopback, or "" as on a Unix socket."""
    return address == "" or address == "::1" or address.startswith(("127.", "::ffff:127."))
