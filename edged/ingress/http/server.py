"""HttpServer: builds the HTTP side from its parts, starts and stops it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from edged.ingress.catalog import Catalog
from edged.ingress.http.connection import Connection
from edged.ingress.http.generate import Generation
from edged.ingress.http.guard import Guard
from edged.ingress.http.info import Info
from edged.ingress.http.keys import ApiKeys
from edged.ingress.http.listen import SocketFile, listen_tcp, listen_unix
from edged.ingress.http.middleware import Gate
from edged.ingress.http.reading import expect_later
from edged.metrics import Metrics
from edged.scheduler import Scheduler
from edged.settings import Http
from edged.status import Status

# Twice this is the limit of stop() for what is still being answered; draining came before.
STOP_TIMEOUT_S = 1.0


class HttpServer:
    """OpenAI's API, health and metrics over TCP and a Unix socket.

    port: the real one after start(). Raises ConfigError for an unusable key file.
    """

    def __init__(
        self,
        config: Http,
        node: str,
        scheduler: Scheduler,
        catalog: Catalog,
        metrics: Metrics,
        status: Callable[[], Status],
    ) -> None:
        self._config = config
        self._node = node
        self._metrics = metrics
        self._generation = Generation(config, scheduler, catalog, metrics)
        self._info = Info(catalog, metrics, status)
        keys = ApiKeys.load(config.api_keys_file) if config.api_keys_file else None
        gate = Gate(node, Guard(config, node), keys, metrics)
        app = web.Application(middlewares=[gate.serve])
        app.on_response_prepare.append(gate.on_prepare)
        app.add_routes(self._info.routes())
        for path, handler in self._generation.routes().items():
            app.router.add_post(path, handler, expect_handler=expect_later)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that leaves must free its slot
            shutdown_timeout=STOP_TIMEOUT_S,
            access_log=None,
        )
        self._servers: list[asyncio.Server] = []
        self._socket_file: SocketFile | None = None
        self.port = config.port

    async def start(self) -> None:
        """Listen. Raises ListenError when an address is taken or not allowed."""
        await self._runner.setup()
        try:
            tcp = await listen_tcp(self._connection, self._config.host, self._config.port)
            self._servers.append(tcp)
            self.port = tcp.sockets[0].getsockname()[1]
            if self._config.unix_socket:
                path = Path(self._config.unix_socket)
                self._servers.append(await listen_unix(self._connection, path))
                self._socket_file = SocketFile(path)
        except BaseException:
            await self.stop()
            raise

    def drain(self) -> None:
        """Refuse new generation and report not ready; answers under way go on."""
        self._generation.draining = True
        self._info.draining = True

    async def stop(self) -> None:
        """Close the sockets, end what is left, remove the socket file. Idempotent."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        if self._socket_file is not None:
            self._socket_file.remove()
            self._socket_file = None
        await self._runner.cleanup()

    @property
    def connections(self) -> int:
        """Open ones."""
        server = self._runner.server
        return 0 if server is None else len(server.connections)

    def _connection(self) -> Connection:
        server = self._runner.server
        if server is None:
            raise RuntimeError("a connection came in before the start or after the stop")
        return Connection(server, asyncio.get_running_loop(), self._node, self._metrics.answered)
