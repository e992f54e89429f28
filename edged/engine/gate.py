"""Gate: one engine's way to memory: asked before a load, settled after it. Remembers the answer."""

from __future__ import annotations

from collections.abc import Callable

from edged.memory import BESIDE_BYTES, SPARE_BYTES, Admission, Needs


class Gate:
    """device_free_bytes: by the device's own count, where it has one. words: the last sum;
    refused: it did not fit."""

    def __init__(
        self,
        engine: str,
        admission: Admission | None = None,
        device_free_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.words = ""
        self.refused = False
        self._engine, self._admission = engine, admission
        self._device_free_bytes = device_free_bytes

    def opens(self, needs: Needs | None) -> bool:
        """A load may begin. What is not known is not checked."""
        if needs is None or self._admission is None:
            return True
        verdict = self._admission.ask(self._engine, needs, self._device_free_bytes())
        self.words, self.refused = verdict.words, not verdict.fits
        return verdict.fits

    def reserve(self, needs: Needs | None) -> None:
        """Before others ask: this engine is about to load."""
        if self._admission is not None and needs is not None:
            self._admission.reserve(self._engine, needs)

    def settle(self) -> None:
        """The load is over, well or not, or is put off."""
        if self._admission is not None:
            self._admission.settle(self._engine)

    def room(self, now: Needs | None, wanted: Needs | None) -> bool:
        """`wanted` would fit in place of `now`, which is loaded."""
        if self._admission is None or now is None or wanted is None:
            return True
        return self._admission.room(self._engine, now, wanted, self._device_free_bytes())

    def spares(self, needs: Needs | None) -> bool:
        """It would fit and leave what a fallback that stays loaded has to leave."""
        if self._admission is None or needs is None:
            return True
        more_bytes = SPARE_BYTES - BESIDE_BYTES
        return self._admission.fits(self._engine, needs, more_bytes, self._device_free_bytes())

    def would_open(self, needs: Needs | None, more_bytes: int) -> bool:
        """It was refused, and would not be if the machine had `more_bytes` more."""
        if not self.refused or needs is None or self._admission is None:
            return False
        return self._admission.fits(self._engine, needs, more_bytes, self._device_free_bytes())
