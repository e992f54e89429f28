"""Where a worker ran out of memory, told in words the daemon's ladder reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

STEP_ATTEMPTS = 3  # of a step that fails, before the fault counts as lasting


class MemoryFault(MemoryError):
    """Its text begins with "load:", "prefill:" or "decode:"."""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Turns a MemoryError of the block into a MemoryFault; the innermost place is told."""
    try:
        yield
    except MemoryFault:
        raise
    except MemoryError as error:
        raise MemoryFault(f"{where}: {str(error) or 'out of memory'}") from error
