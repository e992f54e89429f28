"""The routes that only tell: health, models, status, metrics, banner. None of them waits.

Live is not ready: /livez says that the loop turns and nothing is stuck, /readyz that a request
would be admitted. Both tell the oldest wait and the last progress.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from edged.ingress.catalog import Catalog, Entry
from edged.metrics import CONTENT_TYPE, Metrics
from edged.status import Status, progress_words, rounded, status_json

BANNER = """edged {version} on {node}: text generation ({mode})

POST /v1/chat/completions   POST /v1/completions   GET /v1/models
GET /livez   GET /readyz?verbose   GET /metrics   GET /edged/v1/status
"""


class Info:
    def __init__(self, catalog: Catalog, metrics: Metrics, status: Callable[[], Status]) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._status = status
        self.draining = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.banner),
            web.get("/livez", self.live),
            web.get("/healthz", self.live),
            web.get("/readyz", self.ready),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{id:.+}", self.model),
            web.get("/edged/v1/status", self.status),
        ]

    async def banner(self, http: web.Request) -> web.Response:
        now = self._status()
        return web.Response(text=BANNER.format(version=now.version, node=now.node, mode=now.mode))

    async def live(self, http: web.Request) -> web.Response:
        now = self._status()
        words = f"not live: {now.stuck}" if now.stuck else "ok"
        text = f"{words}; {progress_words(now)}\n"
        return web.Response(text=text, status=503 if now.stuck else 200)

    async def ready(self, http: web.Request) -> web.Response:
        now = self._status()
        checks = readiness(now, self.draining)
        good = all(passed for _, passed, _ in checks)
        failed = [f"{name}: {detail}" for name, passed, detail in checks if not passed]
        if "verbose" in http.query:
            lines = [f"[{'+' if ok else '-'}]{name}: {detail}" for name, ok, detail in checks]
            text = "\n".join([*lines, progress_words(now), "ready" if good else "not ready"])
        else:
            words = "ok" if good else "not ready; " + "; ".join(failed)
            text = f"{words}; {progress_words(now)}"
        return web.Response(text=text + "\n", status=200 if good else 503)

    async def health(self, http: web.Request) -> web.Response:
        """Readiness for clients of llama.cpp and vLLM."""
        now = self._status()
        good = all(passed for _, passed, _ in readiness(now, self.draining))
        told = {
            "status": "ok" if good else "unavailable",
            "oldest_wait_s": rounded(now.oldest_wait_s),
            "last_progress_s": rounded(now.last_progress_s),
        }
        return _json(told, 200 if good else 503)

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.exposition(self._status()), headers={"Content-Type": CONTENT_TYPE}
        )

    async def models(self, http: web.Request) -> web.Response:
        return _json({"object": "list", "data": [model_json(entry) for entry in self._catalog]})

    async def model(self, http: web.Request) -> web.Response:
        return _json(model_json(self._catalog.find(http.match_info["id"])))

    async def status(self, http: web.Request) -> web.Response:
        return _json(status_json(self._status()))


def readiness(status: Status, draining: bool) -> list[tuple[str, bool, str]]:
    """(check, passed, in words). Ready = an engine is there and new requests are admitted."""
    states = ", ".join(f"{name} is {health.state}" for name, health in status.engines)
    engine = any(health.serves for _, health in status.engines)
    staying = not draining and status.mode != "draining"
    admitting = staying and (status.ready or not engine or bool(status.audit))
    closed = f"{status.mode}, {status.reason}" if staying else "the node is shutting down"
    return [
        ("engine", engine, states or "there is none"),
        ("admission", admitting, "open" if admitting else closed),
        ("audit", not status.audit, "; ".join(status.audit) or "all adds up"),
    ]


def model_json(entry: Entry) -> dict[str, Any]:
    """max_model_len is vLLM's name for the context in tokens."""
    return {
        "id": entry.text.name,
        "object": "model",
        "created": entry.created_s,
        "owned_by": "edged",
        "max_model_len": entry.context_tokens,
    }


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )
