"""The ladder's promises, over any sequence of events."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from edged import ladder
from edged.ladder import (
    Action,
    Failed,
    Passed,
    Pressed,
    Refused,
    Repeats,
    RowFaulted,
    Rules,
    Serving,
    State,
    Tick,
    advance,
)

RULES = Rules(rungs=3)
CAUSES = (
    *("memory", "death", "hang", "fatal", "lost"),
    *("held", "load", "self_test", "internal", "wedged"),
)


@dataclass
class World:
    """A keeper without a worker: carries out actions in virtual time and remembers them."""

    rules: Rules = RULES
    state: State = field(default_factory=State)
    now_s: float = 0.0
    due_s: float | None = 0.0  # when the next start is to happen; None: a worker lives
    loaded: bool = False
    starts_s: list[float] = field(default_factory=list)
    rungs: list[int] = field(default_factory=list)
    actions: list[tuple[float, Action, State]] = field(default_factory=list)  # state: before it

    def tell(self, event: ladder.Event) -> Action:
        before = self.state
        self.state, action = advance(self.rules, before, event, self.now_s)
        if action.kind != "none":
            self.actions.append((self.now_s, action, before))
        if action.kind in ("start", "off", "climb"):
            self.due_s, self.loaded = self.now_s + action.delay_s, False
        return action

    def start(self) -> None:
        """At the time the ladder asked for."""
        assert self.due_s is not None
        self.now_s = max(self.now_s, self.due_s)
        self.due_s = None
        self.starts_s.append(self.now_s)
        self.rungs.append(self.state.rung)

    def serve(self) -> None:
        self.loaded = True
        self.tell(Serving())

    def most_starts_in(self, seconds: float) -> int:
        return max(
            (sum(1 for at in self.starts_s if a <= at < a + seconds) for a in self.starts_s),
            default=0,
        )


EVENTS: dict[str, ladder.Event] = {
    "pressure": Pressed(),
    "row": RowFaulted(),
    "repeat": Repeats(),
    "pass": Passed(),
    "no room": Tick(room=False),
}
steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["fail", "serve", "pressure", "row", "repeat", "pass", "tick", "no room", "refuse"]
        ),
        st.sampled_from(CAUSES),
        st.sampled_from([0.0, 0.1, 1.0, 29.0, 60.0, 299.0, 301.0, 2000.0]),
    ),
    max_size=80,
)


def play(script: list[tuple[str, str, float]]) -> World:
    world = World()
    for word, cause, pause_s in script:
        if world.due_s is not None:
            if word == "refuse":
                world.now_s = max(world.now_s, world.due_s)
                world.tell(Refused())
                continue
            world.start()
        world.now_s += pause_s
        if word == "fail":
            world.tell(Failed(cause))  # type: ignore[arg-type]
        elif word == "serve":
            world.serve()
        elif world.loaded:
            world.tell(EVENTS.get(word, Tick()))
    return world


@settings(deadline=None, max_examples=120)
@given(steps)
def test_restarts_are_bounded_whatever_happens(script: list[tuple[str, str, float]]) -> None:
    """No sequence of faults makes over a hundred starts in an hour, nor twenty in 5 minutes."""
    world = play(script)
    assert world.most_starts_in(3600) <= 100
    assert world.most_starts_in(300) <= 20


@settings(deadline=None, max_examples=120)
@given(steps)
def test_it_never_climbs_sooner_than_the_stable_time(script: list[tuple[str, str, float]]) -> None:
    """Each climb is one rung, after at least the stable time at the rung below."""
    for at_s, action, before in play(script).actions:
        if action.kind == "climb":
            assert action.rung == before.rung - 1
            assert before.serving_s is not None
            assert at_s - before.serving_s >= max(RULES.climb_after_s, before.climb_wait_s)


@settings(deadline=None, max_examples=120)
@given(steps)
def test_it_is_off_only_when_the_last_rung_failed(script: list[tuple[str, str, float]]) -> None:
    """`off` follows a failure or a refusal of the last rung alone, and always ends."""
    for _, action, before in play(script).actions:
        if action.kind == "off":
            assert before.rung == action.rung == RULES.rungs - 1
        assert 0 <= action.rung < RULES.rungs
        assert 0 <= action.delay_s <= RULES.off_max_s


@settings(deadline=None, max_examples=120)
@given(steps)
def test_waits_only_grow_while_nothing_works(script: list[tuple[str, str, float]]) -> None:
    """After any past, a row of failures makes the off times and the climbs' waits no shorter."""
    world = play(script)
    world.actions.clear()
    for _ in range(40):
        if world.due_s is not None:
            world.start()
        world.tell(Failed("fatal"))
    off_s = [a.delay_s for _, a, before in world.actions if a.kind == "off"]
    assert len(off_s) >= 2
    assert off_s == sorted(off_s)
    waits_s = [before.climb_wait_s for _, _, before in world.actions]
    assert waits_s == sorted(waits_s)


@settings(deadline=None, max_examples=25)
@given(
    good=st.integers(0, 2),
    cause=st.sampled_from(CAUSES),
    seed=st.integers(0, 1000),
    fails_after_s=st.sampled_from([0.0, 5.0, 250.0, 2000.0]),
)
def test_it_comes_to_rest_at_a_rung_that_works(
    good: int, cause: str, seed: int, fails_after_s: float
) -> None:
    """Whatever the higher rungs suffer from: after two days it serves nearly all the time, from a
    rung that works for most of it, and tries the others a few times a day."""
    world, draw = World(), random.Random(seed)
    served_s, well_s, day_s = 0.0, 0.0, 86400.0
    while world.now_s < 3 * day_s:
        world.start()
        world.serve()
        rung, began_s = world.state.rung, world.now_s
        life_s = fails_after_s * draw.uniform(0.5, 1.5) if rung < good else float("inf")
        while world.due_s is None:
            if world.now_s - began_s >= life_s:
                world.tell(Failed(cause))  # type: ignore[arg-type]
            else:
                world.now_s += min(300.0, max(0.1, life_s - (world.now_s - began_s)))
                if world.now_s >= 3 * day_s:
                    break
                world.tell(Tick())
        last_day_s = max(0.0, world.now_s - max(began_s, 2 * day_s))
        served_s += last_day_s
        well_s += last_day_s if rung >= good else 0.0
    assert served_s >= 0.99 * day_s
    if fails_after_s < 1000:  # an engine that dies every half hour is simply started again
        assert well_s >= 0.8 * day_s
    assert sum(1 for at in world.starts_s if at >= 2 * day_s) <= 60


def test_lack_of_memory_goes_down_a_rung_at_once() -> None:
    """Out of memory, at load or in a step, is never answered by the same launch again."""
    world = World()
    world.start()
    assert world.tell(Failed("memory")).rung == 1
    world.start()
    world.serve()
    assert world.tell(Failed("memory")).rung == 2
    world.start()
    action = world.tell(Failed("memory"))
    assert (action.kind, action.rung, action.delay_s) == ("off", 2, RULES.window_s)


def test_other_deaths_use_up_the_budget_first() -> None:
    """A killed worker returns at its rung; more deaths than the budget cost the rung."""
    world = World()
    rungs = []
    for _ in range(RULES.budget + 1):
        world.start()
        rungs.append(world.tell(Failed("death")).rung)
    assert rungs == [0] * RULES.budget + [1]


def test_pressure_steps_down_once_and_waits_for_the_effect() -> None:
    """The machine's averages lag: a second step down needs 30 s; the last rung is kept."""
    world = World()
    world.start()
    world.serve()
    assert world.tell(Pressed()).reason == "pressure"
    world.start()
    world.serve()
    world.now_s += 5
    assert world.tell(Pressed()).kind == "none"
    world.now_s += 30
    assert world.tell(Pressed()).rung == 2
    world.start()
    world.serve()
    world.now_s += 100
    assert world.tell(Pressed()).kind == "none"


def test_refused_memory_is_no_death() -> None:
    """A launch that does not fit is asked for once more, for memory is given back with a delay;
    then the next rung is tried at once, and behind the last one every 10 s."""
    world = World()
    actions = [world.tell(Refused()) for _ in range(6)]
    starts = [("start", 0), ("start", 1), ("start", 2)]
    assert [(a.kind, a.rung) for a in actions] == starts + [("off", 2)] * 3
    assert [a.delay_s for a in actions] == [3.0, 0.0, 0.0] + [RULES.memory_retry_s] * 3
    assert world.state.deaths_s == ()


def test_a_failed_climb_doubles_the_wait_for_the_next() -> None:
    """A rung that fails soon after it was climbed is left at once, and tried half as often."""
    world = World(state=State(rung=1))
    waits_s = []
    for _ in range(4):
        world.start()
        world.serve()
        began_s = world.now_s
        while world.tell(Tick()).kind == "none":
            world.now_s += 10
        waits_s.append(world.now_s - began_s)
        world.start()
        assert world.state.rung == 0
        world.tell(Failed("fatal"))
        assert world.state.rung == 1
    assert waits_s == [300, 600, 1200, 2400]


def test_it_does_not_climb_into_a_full_memory() -> None:
    """However stable: without room for the next rung up it stays."""
    world = World(state=State(rung=1))
    world.start()
    world.serve()
    world.now_s += 10_000
    assert world.tell(Tick(room=False)).kind == "none"
    assert world.tell(Tick()).kind == "climb"


def test_row_faults_ask_the_self_test_first() -> None:
    """Two row faults within a minute make a self test; two more within the window a new worker."""
    world = World()
    world.start()
    world.serve()
    assert world.tell(RowFaulted()).kind == "none"
    world.now_s += 61
    assert world.tell(RowFaulted()).kind == "none"
    world.now_s += 1
    assert world.tell(RowFaulted()).kind == "probe"
    world.tell(Passed())
    world.now_s += 30
    assert world.tell(RowFaulted()).kind == "none"
    action = world.tell(RowFaulted())
    assert (action.kind, action.reason, action.rung) == ("start", "row_faults", 0)


def test_repetition_probes_at_most_once_a_minute() -> None:
    """An engine that repeats itself is tested, but not all the time."""
    world = World()
    world.start()
    world.serve()
    kinds = []
    for pause_s in (0, 30, 31):
        world.now_s += pause_s
        kinds.append(world.tell(Repeats()).kind)
    assert kinds == ["probe", "none", "probe"]


def test_a_device_that_stays_lost_is_called_wedged() -> None:
    """Three starts in a row without a device, or a worker that cannot be killed, ask for more."""
    world = World()
    wedged = []
    for _ in range(3):
        world.start()
        wedged.append(world.tell(Failed("lost")).wedged)
    assert wedged == [False, False, True]
    world.start()
    world.serve()
    assert not world.tell(Failed("lost")).wedged
    assert world.tell(Failed("wedged")).wedged


def test_a_device_that_somebody_else_holds_is_never_called_wedged() -> None:
    """However often it is found held: a reboot would end who holds it, and who did not ask."""
    world = World()
    for _ in range(20):
        world.start()
        assert not world.tell(Failed("held")).wedged
