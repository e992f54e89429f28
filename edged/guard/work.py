"""Account: what one engine did since the guard last looked, from the steps it reports. Pure.

Reports come when a step ends; the step under way is counted as busy from when it should have
begun, so that a slow engine does not look idle between two of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edged.guard.policy import Load


@dataclass(frozen=True)
class Executed:
    """One step. rows: sequences in it; prompt_tokens: of a prefill chunk; drawn, ended: streams
    that got tokens and that ended (both by the engine's own numbers)."""

    kind: str  # "prefill", "decode", or "none" when streams only ended
    seconds: float
    prompt_tokens: int = 0
    drawn: tuple[int, ...] = ()
    tokens: int = 0
    ended: tuple[int, ...] = ()


class Account:
    """Sums since the last `take`. Times are the event loop's."""

    def __init__(self) -> None:
        self._sums = Load()
        self._done_s = 0.0  # busy seconds of ended steps, ever
        self._told_s = 0.0  # of these and of the running step, as told last
        self._taken_s: float | None = None
        self._ended_s = 0.0
        self._last_s = 0.0  # seconds of the last step
        self._decoding: set[int] = set()

    def add(self, step: Executed, now_s: float) -> None:
        sums = self._sums
        self._decoding |= set(step.drawn)
        self._decoding -= set(step.ended)
        if step.kind == "none":
            return
        self._done_s += step.seconds
        self._ended_s, self._last_s = now_s, step.seconds
        if step.kind == "prefill":
            self._sums = replace(
                sums,
                prefill_steps=sums.prefill_steps + 1,
                prefill_tokens=sums.prefill_tokens + step.prompt_tokens,
                prefill_busy_s=sums.prefill_busy_s + step.seconds,
                tokens=sums.tokens + step.tokens,
            )
        else:
            self._sums = replace(
                sums,
                decode_steps=sums.decode_steps + 1,
                decode_rows=sums.decode_rows + len(step.drawn),
                decode_busy_s=sums.decode_busy_s + step.seconds,
                tokens=sums.tokens + step.tokens,
            )

    def take(self, now_s: float, streams: int, waiting: int, duty: float) -> Load:
        """The sums, begun anew. streams: in the engine's slots now; duty: as it was allowed."""
        busy_s = max(self._told_s, self._done_s + self._running_s(now_s, streams, duty))
        passed_s = now_s - self._taken_s if self._taken_s is not None else 0.0
        ratio = (busy_s - self._told_s) / passed_s if passed_s > 0 else 0.0
        if not streams:
            self._decoding.clear()
        load = replace(
            self._sums,
            streams=streams,
            filling=max(0, streams - len(self._decoding)),
            waiting=waiting,
            busy_ratio=min(1.0, max(0.0, ratio)),
        )
        self._sums, self._told_s, self._taken_s = Load(), busy_s, now_s
        return load

    def _running_s(self, now_s: float, streams: int, duty: float) -> float:
        """Of the step under way, which began after the pause that the duty asks for."""
        if not streams or duty <= 0 or not self._ended_s:
            return 0.0
        began_s = self._ended_s + self._last_s * (1.0 / duty - 1.0)
        return max(0.0, min(now_s - began_s, 2.0 * self._last_s))
