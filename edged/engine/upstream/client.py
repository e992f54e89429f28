"""Client: the HTTP side of the upstream server: one POST per stream, and the proof that it serves.

Bounded and never following redirects, for the API key goes to the configured server only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
import msgspec

from edged import __version__
from edged.engine.upstream.asking import KINDS, Ask
from edged.engine.upstream.dial import Dial
from edged.engine.upstream.refusal import MAX_ERROR_BYTES, fault_of
from edged.errors import EngineFault
from edged.settings import Upstream

_MAX_LIST_BYTES = 4 << 20
_SHOWN_NAMES = 5


@dataclass(frozen=True)
class Proof:
    """What a server that serves has shown: the name of the model to ask for, and its kind."""

    model: str
    kind: str


class _Model(msgspec.Struct, frozen=True):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class Client:
    """Use after open(); close() cuts all that still runs."""

    def __init__(self, settings: Upstream, dial: Dial) -> None:
        self.settings = settings
        self._dial = dial
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self.settings.max_concurrent + 2,
                ssl=self._dial.tls or True,
                # A kept connection may be closed by the server just as a POST goes out on it.
                force_close=True,
            ),
            headers={
                "User-Agent": f"edged/{__version__}",
                "Accept-Encoding": "identity",
                "X-Edged-Forwarded": "1",  # two nodes that fall back on each other: once is enough
                **self._dial.headers,
            },
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, ask: Ask) -> aiohttp.ClientResponse:
        """The open answer. Raises Busy, RowFault, EngineFault; aiohttp's errors pass."""
        response = await self._opened.post(
            self._dial.base + ask.path,
            data=msgspec.json.encode(ask.body),
            headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
            allow_redirects=False,
        )
        try:
            if response.status != 200:
                body = await _read(response, MAX_ERROR_BYTES)
                raise fault_of(response.status, response.headers, body)
            if response.content_type != "text/event-stream":
                raise EngineFault("it does not stream its answer")
        except BaseException:  # cancelled, too: the connection must not stay open
            response.close()
            raise
        return response

    async def proof(self) -> Proof:
        """Raises EngineFault saying why it does not serve."""
        try:
            within_s = 2 * self.settings.connect_timeout_s
            return await asyncio.wait_for(self._proof(), within_s)
        except aiohttp.ClientError as error:  # first: its connect time-out is a TimeoutError too
            raise EngineFault(in_words(error)) from None
        except asyncio.TimeoutError:
            raise EngineFault("it does not answer in time") from None
        except OSError as error:
            raise EngineFault(in_words(error)) from None

    async def _proof(self) -> Proof:
        async with self._opened.get(self._dial.base + "/models", allow_redirects=False) as response:
            body = await _read(response, _MAX_LIST_BYTES)
            if response.status != 200:
                fault = fault_of(response.status, response.headers, body[:MAX_ERROR_BYTES])
                raise EngineFault(str(fault))
        proof = _chosen(body, self.settings)
        # llama.cpp lists its model while it still loads; only /health tells. Where that route
        # does not exist or means something else, the list is what there is.
        async with self._opened.get(
            self._dial.origin + "/health", allow_redirects=False
        ) as response:
            if response.status >= 500:
                raise EngineFault(f"its /health says {response.status}")
        return proof

    @property
    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineFault("it is not started")
        return self._session


def in_words(error: Exception) -> str:
    """Why there is no connection."""
    kind = type(error).__name__
    if isinstance(error, aiohttp.ClientSSLError):
        return f"its certificate is not accepted ({kind}); see upstream.ca_file"
    return f"it cannot be reached ({kind})"


def _chosen(body: bytes, settings: Upstream) -> Proof:
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EngineFault("its /models is no list of models") from None
    if not models:
        raise EngineFault("it lists no model")
    named = next((m for m in models if m.id == settings.model), None)
    model = named or models[0]
    kind = KINDS.get(model.owned_by, "openai") if settings.kind == "auto" else settings.kind
    # llama.cpp serves its one model under any name.
    if settings.model and named is None and kind != "llama.cpp":
        shown = ", ".join(m.id[:64] for m in models[:_SHOWN_NAMES])
        raise EngineFault(f"it does not have the model of upstream.model; it has {shown}")
    return Proof(settings.model or model.id, kind)


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """At most that much of a body."""
    data = b""
    while len(data) < most_bytes and (more := await response.content.readany()):
        data += more
    return data[:most_bytes]
