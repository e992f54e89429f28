"""What a lever is: something outside the workers that makes the chip cooler, or faster again.

The batch, the duty and admission are Limits, not levers. Standard library only, for the root
helper (root.py) imports this too; find.py says which levers a board has.
"""

from __future__ import annotations

from typing import Literal, Protocol

from edged.errors import EdgedError

Kind = Literal["frequency", "fan"]


class LeverError(EdgedError):
    """Refused, timed out, or not proven by what was read back; the message says which."""


class Lever(Protocol):
    """values: of a frequency, its gears in MHz, ascending; of a fan, (lowest, highest) ratio."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def values(self) -> tuple[float, ...]: ...

    async def set(self, value: float) -> float:
        """Move to value, clamped to values (a frequency to the gear below); returns what was read
        back. Repeating it does no harm. Raises LeverError."""

    async def restore(self) -> None:
        """Back to where it was before the first set. Raises LeverError."""

    async def stop(self) -> None:
        """Restore and let go; never raises LeverError. The lever is not used again."""
