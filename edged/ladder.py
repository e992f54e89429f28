"""The ladder: which launch configuration (rung) an engine runs at, and when it is tried. Pure.

Rung 0 is the full configuration, higher ones need less; behind the last one the engine is off for
a while. Down goes at once, up slowly: after a stable time that doubles with each failed climb.
(state, event, now) -> (state, action); the engine's keeper carries actions out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Union

Cause = Literal[
    "memory",
    "death",
    "hang",
    "fatal",
    "lost",
    "held",
    "load",
    "self_test",
    "row_faults",
    "internal",
    "wedged",
]
HOUR_S = 3600.0


@dataclass(frozen=True)
class Rules:
    """budget: deaths at one rung within window_s before it is left; hour_budget: within an hour,
    where there is a rung below. A pause before each start doubles from backoff_s to
    backoff_max_s; off, when the last rung failed, from window_s to off_max_s; the stable time
    before a climb from climb_after_s to climb_max_s, with each climb in vain."""

    rungs: int = 1
    budget: int = 5
    hour_budget: int = 12
    window_s: float = 300.0
    backoff_s: float = 0.5
    backoff_max_s: float = 60.0
    climb_after_s: float = 300.0
    climb_max_s: float = 4 * HOUR_S
    trial_s: float = HOUR_S  # a rung that fails within it was climbed in vain
    off_max_s: float = 4 * HOUR_S
    memory_settle_s: float = 3.0  # a worker that just ended may not have given back all
    memory_retry_s: float = 10.0  # how often an engine without memory looks for it
    pressure_pause_s: float = 30.0  # a step down needs that long to show in the averages
    probe_pause_s: float = 60.0
    row_faults: int = 2  # within row_window_s
    row_window_s: float = 60.0
    lost_limit: int = 3  # starts in a row that found no device


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving:
    """The worker is loaded and has passed its self test."""


@dataclass(frozen=True)
class Failed:
    """The worker is dead, or as good as dead."""

    cause: Cause


@dataclass(frozen=True)
class Refused:
    """The sum of memory does not allow this rung; nothing was started."""


@dataclass(frozen=True)
class Pressed:
    """The machine runs out of memory."""


@dataclass(frozen=True)
class RowFaulted:
    """One sequence's output was not finite."""


@dataclass(frozen=True)
class Repeats:
    """The share of repeated n-grams in the output has jumped."""


@dataclass(frozen=True)
class Passed:
    """A probe's self test was passed."""


@dataclass(frozen=True)
class Tick:
    """Time goes by. room: the next rung up would fit into memory now."""

    room: bool = True


Event = Union[Serving, Failed, Refused, Pressed, RowFaulted, Repeats, Passed, Tick]  # noqa: UP007


@dataclass(frozen=True)
class Action:
    """start: a worker at `rung` after delay_s; one that lives is ended at once. off: the same, and
    nobody waits for it meanwhile. climb: start, but let the streams end first. probe: run the self
    test. wedged: only a reboot may help. reason: label of metrics."""

    kind: Literal["none", "start", "off", "climb", "probe"] = "none"
    rung: int = 0
    delay_s: float = 0.0
    reason: str = ""
    wedged: bool = False


NOTHING = Action()


@dataclass(frozen=True)
class State:
    """climb_wait_s, off_wait_s: 0 = as at first. trial: climbed here and not yet proven."""

    rung: int = 0
    serving_s: float | None = None  # since when
    deaths_s: tuple[float, ...] = ()  # within the window, at any rung
    here_s: tuple[float, ...] = ()  # within the hour, since this rung was reached
    trial: bool = False
    climb_wait_s: float = 0.0
    off_wait_s: float = 0.0
    row_faults_s: tuple[float, ...] = ()
    row_probe_s: float = float("-inf")  # the last self test that row faults asked for
    probe_s: float = float("-inf")
    pressed_s: float = float("-inf")
    lost: int = 0
    refusals: int = 0  # since it served or failed

    def next_climb_s(self, rules: Rules) -> float | None:
        """When the next rung up is tried at the earliest; None at the top or while down."""
        if self.rung == 0 or self.serving_s is None:
            return None
        return self.serving_s + (self.climb_wait_s or rules.climb_after_s)


def advance(rules: Rules, state: State, event: Event, now_s: float) -> tuple[State, Action]:
    """What an event makes of the state, and what is to be done."""
    if isinstance(event, Failed):
        return _failed(rules, state, event.cause, now_s)
    if isinstance(event, Refused):
        return _refused(rules, state)
    if isinstance(event, Serving):
        return replace(state, serving_s=now_s, lost=0, refusals=0), NOTHING
    if state.serving_s is None:
        return state, NOTHING
    if isinstance(event, Pressed):
        return _pressed(rules, state, now_s)
    if isinstance(event, RowFaulted):
        return _row_faulted(rules, state, now_s)
    if isinstance(event, Repeats):
        return _probe(rules, state, now_s, "repetition")
    if isinstance(event, Tick):
        return _tick(rules, state, event.room, now_s)
    return state, NOTHING


# --- down ----------------------------------------------------------------------------------------


def _failed(rules: Rules, state: State, cause: Cause, now_s: float) -> tuple[State, Action]:
    proven = state.serving_s is not None and now_s - state.serving_s >= max(
        rules.climb_after_s, state.off_wait_s
    )
    lost = state.lost + 1 if cause == "lost" else 0
    state = replace(
        state,
        serving_s=None,
        deaths_s=(*_recent(state.deaths_s, now_s - rules.window_s), now_s),
        here_s=(*_recent(state.here_s, now_s - HOUR_S), now_s),
        off_wait_s=0.0 if proven else state.off_wait_s,
        row_faults_s=(),
        lost=lost,
        refusals=0,
    )
    wedged = cause == "wedged" or lost >= rules.lost_limit
    delay_s = _backoff_s(rules, len(state.deaths_s))
    over = cause == "memory" or len(_recent(state.here_s, now_s - rules.window_s)) > rules.budget
    below = state.rung + 1 < rules.rungs
    if below and (over or state.trial or len(state.here_s) > rules.hour_budget):
        state = _down(rules, state)
    elif over:
        return _off(rules, state, delay_s, cause, wedged)
    return state, Action("start", state.rung, delay_s, cause, wedged)


def _off(
    rules: Rules, state: State, delay_s: float, cause: Cause, wedged: bool
) -> tuple[State, Action]:
    wait_s = max(state.off_wait_s or rules.window_s, delay_s)
    state = replace(state, here_s=(), off_wait_s=max(wait_s, min(rules.off_max_s, 2 * wait_s)))
    return state, Action("off", state.rung, wait_s, cause, wedged)


def _refused(rules: Rules, state: State) -> tuple[State, Action]:
    """Nothing died: it is asked once more, then the next rung may fit at once; behind the last
    one memory is waited for."""
    state = replace(state, serving_s=None, refusals=state.refusals + 1)
    if state.refusals == 1:
        return state, Action("start", state.rung, rules.memory_settle_s, "admission")
    if state.rung + 1 < rules.rungs:
        state = _down(rules, state)
        return state, Action("start", state.rung, 0.0, "admission")
    return state, Action("off", state.rung, rules.memory_retry_s, "admission")


def _pressed(rules: Rules, state: State, now_s: float) -> tuple[State, Action]:
    """On the last rung it stays: the kernel, should it come to that, takes this worker first."""
    if now_s - state.pressed_s < rules.pressure_pause_s or state.rung + 1 >= rules.rungs:
        return state, NOTHING
    state = replace(_down(rules, state), serving_s=None, pressed_s=now_s)
    return state, Action("start", state.rung, 0.0, "pressure")


def _down(rules: Rules, state: State) -> State:
    """One rung down; one that was climbed in vain is not tried again so soon."""
    wait_s = state.climb_wait_s or rules.climb_after_s
    if state.trial:
        wait_s = max(wait_s, min(rules.climb_max_s, 2 * wait_s))
    return replace(state, rung=state.rung + 1, here_s=(), trial=False, climb_wait_s=wait_s)


def _row_faulted(rules: Rules, state: State, now_s: float) -> tuple[State, Action]:
    """Some prompts do that to some models, so the self test is asked first; a second bout
    within the window costs the worker all the same."""
    faults = (*_recent(state.row_faults_s, now_s - rules.row_window_s), now_s)
    if len(faults) < rules.row_faults:
        return replace(state, row_faults_s=faults), NOTHING
    again = now_s - state.row_probe_s <= rules.window_s
    state = replace(state, row_faults_s=())
    if not again:
        state = replace(state, row_probe_s=now_s, probe_s=now_s)
        return state, Action("probe", state.rung, 0.0, "row_faults")
    state, action = _failed(rules, state, "row_faults", now_s)
    return replace(state, row_probe_s=float("-inf")), action


def _probe(rules: Rules, state: State, now_s: float, reason: str) -> tuple[State, Action]:
    if now_s - state.probe_s < rules.probe_pause_s:
        return state, NOTHING
    return replace(state, probe_s=now_s), Action("probe", state.rung, 0.0, reason)


# --- up ------------------------------------------------------------------------------------------


def _tick(rules: Rules, state: State, room: bool, now_s: float) -> tuple[State, Action]:
    assert state.serving_s is not None
    served_s = now_s - state.serving_s
    if state.trial and served_s >= rules.trial_s:
        state = _proven(rules, state)
    due_s = state.next_climb_s(rules)
    if due_s is None or now_s < due_s or not room:
        return state, NOTHING
    state = replace(state, rung=state.rung - 1, serving_s=None, here_s=(), trial=True)
    return state, Action("climb", state.rung, 0.0, "climb")


def _proven(rules: Rules, state: State) -> State:
    """The trial is over; what was learned of failed climbs is forgotten by halves."""
    if not state.trial:
        return state
    wait_s = max(rules.climb_after_s, state.climb_wait_s / 2)
    return replace(state, trial=False, climb_wait_s=wait_s)


# --- times ---------------------------------------------------------------------------------------


def _recent(at_s: tuple[float, ...], since_s: float) -> tuple[float, ...]:
    return tuple(at for at in at_s if at > since_s)


def _backoff_s(rules: Rules, deaths: int) -> float:
    exponent = min(deaths - 1, 60)  # beyond that every cap is reached, and floats end
    return float(min(rules.backoff_max_s, rules.backoff_s * 2.0**exponent))
