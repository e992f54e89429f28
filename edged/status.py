"""Status: what the daemon says of itself, taken at one moment; pure.

The app builds one on demand; readiness, metrics, /edged/v1/status and MQTT read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edged import __version__
from edged.core import Health, Mode
from edged.guard.view import View, view_json

if TYPE_CHECKING:
    from edged.scheduler import Load


@dataclass(frozen=True)
class Status:
    """reason: why this mode, in words. oldest_wait_s: how long the first in the queue has
    waited. last_progress_s: seconds since any engine finished a step; None = never yet. audit: what
    does not add up; stuck: why the watchdog of systemd is not fed; both empty when all is well."""

    node: str
    version: str
    mode: Mode
    reason: str
    ready: bool
    engines: tuple[tuple[str, Health], ...] = field(default=())
    waiting: int = 0
    running: int = 0
    moved: int = 0  # times a stream went on with another engine
    oldest_wait_s: float | None = None
    last_progress_s: float | None = None
    guard: View | None = None
    at_s: float = 0.0
    audit: tuple[str, ...] = ()
    stuck: str = ""


def status_of(
    node: str,
    load: Load,
    engines: Sequence[tuple[str, Health]],
    now_s: float,
    guard: View | None = None,
    audit: tuple[str, ...] = (),
    stuck: str = "",
) -> Status:
    """engines: in the order of the chain. now_s: loop time, as in Health.last_progress_s."""
    mode, reason = _mode(load.draining, engines, guard)
    serves = any(h.serves and h.admits for _, h in engines)
    if audit and mode in ("normal", "throttled"):
        mode, reason = "degraded", f"the self-audit found: {audit[0]}"
    progress = [h.last_progress_s for _, h in engines if h.last_progress_s is not None]
    return Status(
        node=node,
        version=__version__,
        mode=mode,
        reason=reason,
        ready=serves and not load.draining and not audit,
        engines=tuple(engines),
        waiting=load.waiting,
        running=load.running,
        moved=load.moved,
        oldest_wait_s=load.oldest_wait_s if load.waiting else None,
        last_progress_s=now_s - max(progress) if progress else None,
        guard=guard,
        at_s=now_s,
        audit=audit,
        stuck=stuck,
    )


def _mode(
    draining: bool, engines: Sequence[tuple[str, Health]], guard: View | None
) -> tuple[Mode, str]:
    if draining:
        return "draining", "the node is shutting down"
    hot = guard.reason if guard is not None and guard.mode == "throttled" else ""
    missing = [(n, h) for n, h in engines if not h.serves and not h.standby]
    if not missing:
        return ("throttled", hot) if hot else ("normal", _smaller(engines))
    reason = "; ".join(f"{name} is {_state(health)}" for name, health in missing)
    alive = any(health.state in ("ready", "starting") for _, health in engines)
    return ("degraded" if alive else "fault"), f"{reason}; {hot}" if hot else reason


def _smaller(engines: Sequence[tuple[str, Health]]) -> str:
    """All serve; those that had to step down say so."""
    notes = [
        f"{name} runs with {health.rung} ({health.reason})"
        for name, health in engines
        if health.rung_number > 0
    ]
    return "; ".join(["all engines are ready", *notes])


def _state(health: Health) -> str:
    return f"{health.state} ({health.detail})" if health.detail else health.state


def status_json(status: Status) -> dict[str, Any]:
    """The body of /edged/v1/status; times in seconds."""
    return {
        "node": status.node,
        "version": status.version,
        "mode": status.mode,
        "reason": status.reason,
        "ready": status.ready,
        "engines": [_engine_json(name, health, status.at_s) for name, health in status.engines],
        "queue": {"waiting": status.waiting, "oldest_wait_s": rounded(status.oldest_wait_s)},
        "running": status.running,
        "moved_streams_total": status.moved,
        "last_progress_s": rounded(status.last_progress_s),
        "audit": list(status.audit),
        "guard": view_json(status.guard, status.at_s) if status.guard is not None else None,
    }


def _engine_json(name: str, health: Health, now_s: float) -> dict[str, Any]:
    climb_s = health.next_climb_s
    return {
        "name": name,
        "state": health.state,
        "detail": health.detail,
        "running": health.running,
        "slots": health.slots,
        "restarts": health.restarts,
        "standby": health.standby,
        "rung": health.rung,
        "rung_left": health.reason,
        "next_climb_s": None if climb_s is None else round(max(0.0, climb_s - now_s), 3),
        "memory": health.memory,
    }


def progress_words(status: Status) -> str:
    """For probes: how long the first in the queue has waited, and when a step last ended."""
    wait_s, step_s = status.oldest_wait_s, status.last_progress_s
    waits = "nobody waits" if wait_s is None else f"oldest wait {wait_s:.1f} s"
    steps = "no progress yet" if step_s is None else f"last progress {step_s:.1f} s ago"
    return f"{waits}, {steps}"


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
