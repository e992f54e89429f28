"""Reconnect: which protocol version to offer next, and how long to wait before. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
STABLE_S = 5.0  # a connection that lived this long was a good one
EARLY_CLOSES = 2  # so many in a row on one version look like a refusal of it
FLAPS = 3


@dataclass(frozen=True)
class Attempt:
    """One attempt to connect. v5: offer MQTT 5, else 3.1.1.

    All counts are of events in a row. failures: attempts that failed and connections that did
    not last. early_closes: connections closed before CONNACK, on this version. flaps:
    connections that did not last.
    """

    v5: bool = True
    failures: int = 0
    early_closes: int = 0
    flaps: int = 0

    def refused(self) -> Attempt:
        """The broker does not speak this version. After MQTT 5, 3.1.1 is tried at once."""
        return Attempt(not self.v5, self.failures if self.v5 else self.failures + 1)

    def closed_early(self) -> Attempt:
        """Old brokers hang up on a version they do not know, but so do restarting ones."""
        if self.early_closes + 1 >= EARLY_CLOSES:
            return Attempt(not self.v5, self.failures + 1)
        return Attempt(self.v5, self.failures + 1, self.early_closes + 1)

    def failed(self) -> Attempt:
        return Attempt(self.v5, self.failures + 1)

    def lost(self, lived_s: float) -> Attempt:
        """A connection that stood has ended; the broker that returns may be a newer one."""
        if lived_s >= STABLE_S:
            return Attempt()
        return Attempt(failures=self.failures + 1, flaps=self.flaps + 1)

    @property
    def flapping(self) -> bool:
        return self.flaps >= FLAPS


def delay_s(failures: int, cap_s: float, roll: float) -> float:
    """Seconds to wait after so many failures; roll: 0..1, spreads a fleet over half the delay."""
    full = min(cap_s, FIRST_DELAY_S * 2.0 ** min(failures, 16))
    return full * (0.5 + roll / 2)
