"""Listening sockets: TCP with limits the connections inherit, and the Unix socket's file."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from edged.errors import EdgedError

BACKLOG = 1024
UNIX_MODE = 0o660
# Linux hands all of these on to accepted connections.
_TCP_OPTIONS = (
    # The kernel must not hoard an answer its client does not read.
    (socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024),
    # A client that vanished without a word (Wi-Fi) is gone after this many milliseconds.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
)


class ListenError(EdgedError):
    """An address cannot be listened on; the message tells the next step."""


async def listen_tcp(
    factory: Callable[[], asyncio.Protocol], host: str, port: int
) -> asyncio.Server:
    """port 0 = any free one. Raises ListenError."""
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(
            factory, host, port, backlog=BACKLOG, reuse_address=True, start_serving=False
        )
    except OSError as error:
        raise ListenError(_tcp_problem(host, port, error)) from None
    for sock in server.sockets:
        for level, option, value in _TCP_OPTIONS:
            sock.setsockopt(level, option, value)
    await server.start_serving()
    return server


def _tcp_problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use; stop the other program (ss -ltnp shows it) or "
            "choose another http.port"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose an http.port above 1023"
    return f"cannot listen on {host} port {port}: {error.strerror or error}; check http.host"


async def listen_unix(factory: Callable[[], asyncio.Protocol], path: Path) -> asyncio.Server:
    """A stale socket file is replaced, a live one is not. Raises ListenError."""
    loop = asyncio.get_running_loop()
    try:
        sock = _bound(path)
        return await loop.create_unix_server(factory, sock=sock, backlog=BACKLOG)
    except OSError as error:  # also a path of more than 107 bytes
        why = error.strerror or error
        raise ListenError(f"cannot listen on {path}: {why}; check http.unix_socket") from None


def _bound(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(UNIX_MODE)  # before anyone can connect: it does not listen yet
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    """Raises ListenError when the path is no socket or a live server answers on it."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{path} exists and is no socket; move it or change http.unix_socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ListenError(f"cannot tell who owns {path}: {error}") from None
    raise ListenError(f"another server answers on {path}; stop it or change http.unix_socket")


class SocketFile:
    """Removes the socket's file at the end, unless another process has replaced it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        made = path.stat()
        self._identity = (made.st_dev, made.st_ino)

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            now = self._path.lstat()
            if (now.st_dev, now.st_ino) == self._identity:
                self._path.unlink()
