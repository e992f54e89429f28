"""Logging: structlog and the standard library through one handler to standard error.

A console line on a terminal, one JSON object per line otherwise. Owns the promise that a log
can never stop the daemon: a closed pipe, a full disk or a reader that sleeps costs lines, and
the loss is counted. Never logs local variables (prompts live there).
"""

from __future__ import annotations

import logging
import os
import select
import time
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor

Format = Literal["auto", "console", "json"]

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
STDERR_FD = 2
NO_FILES = "socket.accept() out of system resource"  # how asyncio begins to say it
NO_FILES_EVERY_S = 10.0
PATIENCE_S = 0.05  # how long a line may wait for a slow reader; after a loss no line waits
PIECE_BYTES = select.PIPE_BUF  # what poll(2) promises to take without blocking


def configure(level: str, fmt: Format = "auto", fd: int = STDERR_FD) -> None:
    """Send structlog's and the standard library's records of `level` and up to `fd`.

    level: debug, info, warning or error. May be called again; the last call counts.
    """
    threshold = LEVELS[level]
    handler = Handler(fd)
    handler.setFormatter(_formatter(fmt == "console" or (fmt == "auto" and os.isatty(fd))))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(threshold)
    accepts = logging.getLogger("asyncio")
    for known in [f for f in accepts.filters if isinstance(f, NoFiles)]:
        accepts.removeFilter(known)
    accepts.addFilter(NoFiles())
    # One line per request is the ingress's own business; aiohttp's would be a second one.
    logging.getLogger("aiohttp.access").setLevel(max(threshold, logging.WARNING))
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def _shared() -> list[Processor]:
    """What every record gets where it is made, whoever makes it."""
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _formatter(console: bool) -> logging.Formatter:
    if console:
        render: list[Processor] = [
            structlog.dev.ConsoleRenderer(
                repr_native_str=True,  # values cannot send escape codes to the terminal
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    else:
        render = [
            structlog.processors.format_exc_info,
            structlog.processors.UnicodeDecoder(),
            _what_first,
            structlog.processors.JSONRenderer(),
        ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared(),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )


def _what_first(_: object, __: str, event: EventDict) -> EventDict:
    """When, how bad and what lead the line, for eyes that skim a journal."""
    first = {name: event[name] for name in ("timestamp", "level", "event") if name in event}
    return {**first, **event}


class NoFiles(logging.Filter):
    """asyncio tells that no connection can be accepted a hundred times a second, with a traceback
    each: one line in a while says it, and what to do."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith(NO_FILES):
            return True
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + NO_FILES_EVERY_S
        record.msg = "no file is left to open, connections wait; raise LimitNOFILE (ulimit -n)"
        record.args, record.exc_info = (), None
        return True


class Handler(logging.Handler):
    """Writes lines to a file descriptor it does not own; never raises, never blocks for long.

    lost: lines that could not be written since the last one that could.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd
        self.lost = 0
        self._torn = False  # the last line was cut off in its middle

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001  # a broken record must not stop its caller
            line = self._explain(record, f"a log record could not be rendered: {error!r}")
        if self.lost:
            note = f"{self.lost} log lines were lost: the log was closed, full or not read"
            line = f"{self._explain(record, note)}\n{line}"
        if self._write(line.encode("utf-8", "backslashreplace") + b"\n"):
            self.lost = 0
        else:
            self.lost += 1

    def _explain(self, record: logging.LogRecord, text: str) -> str:
        """A warning of our own, in the format of the others, with nothing in it that can fail."""
        plain = logging.LogRecord(
            __name__, logging.WARNING, record.pathname, record.lineno, "%s", (text,), None
        )
        return self.format(plain)

    def _write(self, data: bytes) -> bool:
        """True when all of it is written. poll() first, so that a full pipe cannot block us."""
        if self._torn:
            data = b"\n" + data
        until = time.monotonic() + (0 if self.lost else PATIENCE_S)
        written = 0
        try:
            poll = select.poll()
            poll.register(self.fd, select.POLLOUT)
            while written < len(data):
                if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                    break
                written += os.write(self.fd, data[written : written + PIECE_BYTES])
        except (OSError, ValueError):  # EPIPE, ENOSPC, EIO, EAGAIN, EBADF, a closed descriptor
            pass
        if written:
            self._torn = written < len(data)
        return written == len(data)
