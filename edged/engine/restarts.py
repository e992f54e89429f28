"""When a dead worker may be started again: back-off within a budget. Pure: times are arguments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """budget deaths within window_s; delays double from backoff_s up to backoff_max_s."""

    budget: int
    window_s: float
    backoff_s: float
    backoff_max_s: float

    def recent(self, deaths_s: tuple[float, ...], now_s: float) -> tuple[float, ...]:
        return tuple(at for at in deaths_s if at > now_s - self.window_s)

    def exhausted(self, deaths_s: tuple[float, ...], now_s: float) -> bool:
        return len(self.recent(deaths_s, now_s)) > self.budget

    def delay_s(self, deaths_s: tuple[float, ...], now_s: float) -> float:
        """Seconds to wait before the next start.

        Over budget: until enough deaths have left the window. An appliance never gives up.
        """
        recent = self.recent(deaths_s, now_s)
        if not recent:
            return 0.0
        backoff = min(self.backoff_max_s, self.backoff_s * 2.0 ** (len(recent) - 1))
        if len(recent) <= self.budget:
            return backoff
        leaves_at = sorted(recent)[len(recent) - self.budget - 1] + self.window_s
        return max(backoff, leaves_at - now_s)
