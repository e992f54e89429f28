"""HTTP: OpenAI's API, health and metrics on aiohttp. Open server.py first."""

from edged.ingress.http.listen import ListenError
from edged.ingress.http.server import HttpServer

__all__ = ["HttpServer", "ListenError"]
