"""The scheduler's promises, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fakes import FakeEngine, LetterText, request
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.core import Delta, Finish, Request
from edged.errors import Overheated, RequestError
from edged.queue import Queue
from edged.scheduler import Scheduler, Stream
from edged.twin.virtual_loop import run_virtual


class Bench:
    """A scheduler on fake engines. engine: the first of the chain; spare: the second, if any."""

    def __init__(
        self, slots: int = 2, max_requests: int = 8, max_tokens: int = 10_000, spares: int = 0
    ) -> None:
        self.engine = FakeEngine(slots)
        self.engines = [self.engine, *(FakeEngine(slots, 0.3, f"spare{i}") for i in range(spares))]
        self.spare = self.engines[-1]
        self.finishes: list[tuple[str, Finish]] = []
        self.refused: list[str] = []
        self.scheduler = Scheduler(
            self.engines,
            {"fake": LetterText()},  # type: ignore[dict-item]
            Queue(max_requests, max_tokens, aging_s=10.0),
            on_finish=lambda r, f: self.finishes.append((r.id, f)),
            on_refuse=lambda r, code: self.refused.append(code),
        )
        for engine in self.engines:
            engine.on_change = self.scheduler.dispatch


async def read(stream: Stream) -> tuple[str, Finish]:
    text = ""
    async for event in stream:
        if isinstance(event, Delta):
            text += event.text
        else:
            finish = event
    return text, finish


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtual
async def test_a_request_streams_its_text_and_ends_once() -> None:
    """A stream yields its deltas, then one Finish with usage, engine and timings, then nothing."""
    bench = Bench()
    text, finish = await read(bench.scheduler.submit(request(max_tokens=4)))

    assert text == "bcde"
    assert finish.reason == "length"
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 4)
    assert [(s.name, s.from_token, s.to_token) for s in finish.engines] == [("fake", 0, 4)]
    assert finish.timings.queue_s == 0
    assert finish.timings.first_token_s == pytest.approx(0.1)
    assert finish.timings.total_s == pytest.approx(0.4)


@virtual
async def test_only_free_slots_are_filled() -> None:
    """Never more streams run than the engine has slots; the others wait and all are answered."""
    bench = Bench(slots=2)
    streams = [bench.scheduler.submit(request(str(i))) for i in range(6)]
    assert bench.scheduler.load().waiting == 4

    results = await asyncio.gather(*(read(s) for s in streams))

    assert {f.reason for _, f in results} == {"length"}
    assert bench.engine.most_running == 2


@virtual
async def test_a_full_queue_refuses_before_the_first_byte() -> None:
    """Beyond the queue's bound a request is refused at once, with an honest Retry-After."""
    bench = Bench(slots=1, max_requests=2)
    streams = [bench.scheduler.submit(request(str(i))) for i in range(3)]
    with pytest.raises(RequestError) as refused:
        bench.scheduler.submit(request("x"))

    assert refused.value.code == "queue_full"
    assert 1 <= (refused.value.retry_after_s or 0) <= 60
    assert bench.refused == ["queue_full"]
    await asyncio.gather(*(read(s) for s in streams))
    assert (await read(bench.scheduler.submit(request("y"))))[1].reason == "length"


@virtual
async def test_the_queue_is_bounded_by_tokens_too() -> None:
    """A few huge requests fill the queue as many small ones do."""
    bench = Bench(slots=1, max_requests=100, max_tokens=50)
    for name in "abc":
        bench.scheduler.submit(request(name, prompt=10, max_tokens=10))
    with pytest.raises(RequestError):
        bench.scheduler.submit(request("d", prompt=10, max_tokens=10))


@virtual
async def test_priority_goes_first_and_waiting_counts() -> None:
    """A higher priority overtakes; a request that waited long enough overtakes that in turn."""
    bench = Bench(slots=1)
    bench.scheduler.submit(request("first", max_tokens=800))  # 80 s
    bench.scheduler.submit(request("low", priority=3))
    await asyncio.sleep(55)
    bench.scheduler.submit(request("high", priority=9))
    last = bench.scheduler.submit(request("newer", priority=3))
    await asyncio.sleep(20)
    bench.scheduler.submit(request("late high", priority=9))
    await read(last)

    assert bench.engine.started == ["first", "high", "low", "late high", "newer"]


@virtual
async def test_one_client_does_not_starve_another() -> None:
    """Of equal requests the client with fewer running streams is served first."""
    bench = Bench(slots=2)
    streams = [bench.scheduler.submit(request(f"a{i}", client="a")) for i in range(4)]
    streams.append(bench.scheduler.submit(request("b", client="b")))
    await asyncio.gather(*(read(s) for s in streams))

    assert bench.engine.started.index("b") == 2


@virtual
async def test_cancelling_a_running_stream_frees_its_slot_within_one_step() -> None:
    """After aclose the engine is told at once and the slot serves the next request a step later."""
    bench = Bench(slots=1)
    running = bench.scheduler.submit(request("running", max_tokens=100))
    waiting = bench.scheduler.submit(request("waiting"))
    await asyncio.sleep(0.35)
    await running.aclose()

    assert bench.engine.closed == ["running"]
    await asyncio.sleep(0.11)
    assert bench.engine.started == ["running", "waiting"]
    assert (await read(running))[1].reason == "cancelled"
    assert (await read(waiting))[1].reason == "length"


@virtual
async def test_cancelling_a_waiting_stream_never_reaches_the_engine() -> None:
    """A stream closed in the queue leaves it and is never dispatched."""
    bench = Bench(slots=1)
    first = bench.scheduler.submit(request("first"))
    second = bench.scheduler.submit(request("second"))
    await second.aclose()
    await read(first)
    await asyncio.sleep(1)

    assert bench.engine.started == ["first"]
    assert bench.scheduler.load().waiting == 0


@virtual
async def test_a_stream_closed_before_its_task_ran_still_frees_the_slot() -> None:
    """Closing in the same tick as submit leaks nothing."""
    bench = Bench(slots=1)
    await bench.scheduler.submit(request("gone")).aclose()

    assert bench.engine.closed == ["gone"]
    assert (await read(bench.scheduler.submit(request("next"))))[1].reason == "length"


@virtual
async def test_engine_death_ends_its_streams_as_failed_and_the_next_request_succeeds() -> None:
    """Engine death is told to each of its streams; requests queued meanwhile are answered."""
    bench = Bench(slots=2)
    streams = [bench.scheduler.submit(request(str(i), max_tokens=50)) for i in range(2)]
    await asyncio.sleep(0.25)
    bench.engine.die(down_s=1.0)
    results = await asyncio.gather(*(read(s) for s in streams))
    after = await read(bench.scheduler.submit(request("after")))

    assert [(t, f.reason, f.error_code) for t, f in results] == [
        ("bc", "failed", "engine_fault")
    ] * 2
    assert after[1].reason == "length"


@virtual
async def test_a_row_fault_ends_only_its_own_stream() -> None:
    """The neighbour of a faulty row is untouched."""
    bench = Bench(slots=2)
    streams = [bench.scheduler.submit(request(str(i), max_tokens=6)) for i in range(2)]
    await asyncio.sleep(0.25)
    bench.engine.row_fault(0)
    (_, bad), (text, good) = await asyncio.gather(*(read(s) for s in streams))

    assert (bad.reason, bad.error_code) == ("failed", "row_fault")
    assert (text, good.reason) == ("bcdefg", "length")


@virtual
async def test_a_stream_continues_on_the_next_engine_without_losing_a_letter() -> None:
    """When its engine dies in mid-stream, the next one goes on; the finish tells who wrote what."""
    bench = Bench(slots=2, spares=1)
    stream = bench.scheduler.submit(request(max_tokens=6))
    await asyncio.sleep(0.25)
    bench.engine.die()
    text, finish = await read(stream)

    assert (text, finish.reason) == ("bcdefg", "length")
    assert [(s.name, s.from_token, s.to_token, s.reason) for s in finish.engines] == [
        ("fake", 0, 2, "first"),
        ("spare0", 2, 6, "engine_fault"),
    ]


@virtual
async def test_a_row_fault_moves_only_its_own_stream() -> None:
    """With another engine in the chain a faulty row moves there; its neighbour stays."""
    bench = Bench(slots=2, spares=1)
    streams = [bench.scheduler.submit(request(str(i), max_tokens=6)) for i in range(2)]
    await asyncio.sleep(0.25)
    bench.engine.row_fault(0)
    (moved, first), (stayed, second) = await asyncio.gather(*(read(s) for s in streams))

    assert moved == stayed == "bcdefg"
    assert [s.name for s in first.engines] == ["fake", "spare0"]
    assert [s.name for s in second.engines] == ["fake"]


@virtual
async def test_new_streams_wait_for_the_first_ready_engine() -> None:
    """A full first engine does not spill onto the next one; a dead one does."""
    bench = Bench(slots=1, spares=1)
    streams = [bench.scheduler.submit(request(str(i))) for i in range(2)]
    await asyncio.gather(*(read(s) for s in streams))
    assert bench.spare.started == []

    bench.engine.die(down_s=10)
    assert (await read(bench.scheduler.submit(request("x"))))[1].engines[0].name == "spare0"


@virtual
async def test_a_moved_stream_goes_before_all_that_wait() -> None:
    """What has begun is continued first, whatever its priority."""
    bench = Bench(slots=1, spares=1)
    begun = bench.scheduler.submit(request("begun", max_tokens=9, priority=0))
    await asyncio.sleep(0.25)
    others = [bench.scheduler.submit(request(str(i), priority=9)) for i in range(2)]
    bench.engine.die(down_s=100)
    await asyncio.gather(*(read(s) for s in (begun, *others)))

    assert bench.spare.started == ["begun", "0", "1"]


@virtual
async def test_with_no_engine_left_a_stream_fails_with_what_was_written() -> None:
    """When the last engine dies too, the stream ends failed and keeps its text."""
    bench = Bench(slots=1, spares=1)
    stream = bench.scheduler.submit(request(max_tokens=9))
    await asyncio.sleep(0.25)
    bench.engine.die()
    await asyncio.sleep(0.65)
    bench.spare.die()
    text, finish = await read(stream)

    assert (text, finish.reason, finish.error_code) == ("bcde", "failed", "engine_fault")
    assert [(s.name, s.to_token) for s in finish.engines] == [("fake", 2), ("spare0", 4)]


@virtual
async def test_a_deadline_sheds_waiting_and_running_streams() -> None:
    """After its deadline a request costs nothing more, wherever it is."""
    bench = Bench(slots=1)
    running = bench.scheduler.submit(request("r", max_tokens=100, deadline_s=2.0))
    waiting = bench.scheduler.submit(request("w", deadline_s=1.0))
    results = await asyncio.gather(read(running), read(waiting))

    assert [(f.reason, f.error_code) for _, f in results] == [("shed", "deadline_exceeded")] * 2
    assert asyncio.get_running_loop().time() == pytest.approx(2.0)


@virtual
async def test_draining_sheds_the_queue_and_lets_running_streams_end() -> None:
    """On drain new and waiting requests hear shutting_down; running ones finish."""
    bench = Bench(slots=1)
    running = bench.scheduler.submit(request("running"))
    waiting = bench.scheduler.submit(request("waiting"))
    bench.scheduler.drain()
    with pytest.raises(RequestError) as refused:
        bench.scheduler.submit(request("late"))

    assert refused.value.code == "shutting_down"
    assert (await read(waiting))[1].error_code == "shutting_down"
    assert (await read(running))[1].reason == "length"
    assert await bench.scheduler.idle(1.0)


@virtual
async def test_a_model_that_never_loaded_is_a_clear_refusal() -> None:
    """While the first load lasts, and when no engine can start, the refusal says so."""
    bench = Bench()
    for state, code in (("starting", "model_loading"), ("off", "engine_unavailable")):
        bench.engine.state = state
        with pytest.raises(RequestError) as refused:
            bench.scheduler.submit(request())
        assert refused.value.code == code
        assert refused.value.retry_after_s


@virtual
async def test_waiting_streams_end_when_the_last_engine_is_off() -> None:
    """Nobody waits for an engine that is out of restarts."""
    bench = Bench(slots=1)
    streams = [bench.scheduler.submit(request(str(i), max_tokens=50)) for i in range(2)]
    bench.engine.die(down_s=1000)
    bench.engine.state = "off"
    bench.engine.on_change()
    results = await asyncio.gather(*(read(s) for s in streams))

    assert [f.error_code for _, f in results] == ["engine_fault", "engine_unavailable"]


@virtual
async def test_a_slow_reader_gets_everything_coalesced() -> None:
    """A reader that comes late gets one big delta and the finish; the slot was free long before."""
    bench = Bench(slots=1)
    stream = bench.scheduler.submit(request(max_tokens=20))
    await asyncio.sleep(10)
    assert bench.engine.capacity() == 1
    events = [event async for event in stream]

    assert len(events) == 2
    assert isinstance(events[0], Delta)
    assert len(events[0].text) == 20


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 9), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("die"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("row_fault"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 9), st.just(0)),
        st.tuples(st.just("drain"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=200)
@given(actions=ACTIONS, slots=st.integers(1, 3), spares=st.integers(0, 2))
def test_every_stream_ends_exactly_once(
    actions: list[tuple[str, int, int]], slots: int, spares: int
) -> None:
    """Whatever is submitted, cancelled or dies, in any order: one Finish each and no slot leaks."""
    run_virtual(_random_life(actions, slots, spares))


async def _random_life(actions: list[tuple[str, int, int]], slots: int, spares: int) -> None:
    bench = Bench(slots, max_requests=4, spares=spares)
    readers: list[asyncio.Task[tuple[str, list[Finish]]]] = []
    streams: list[Stream] = []
    drained = False
    for action, a, b in actions:
        if action == "submit":
            try:
                streams.append(
                    bench.scheduler.submit(request(str(len(streams)), max_tokens=b, priority=a))
                )
            except RequestError:
                continue
            readers.append(asyncio.create_task(_finishes(streams[-1])))
        elif action == "cancel" and streams:
            await streams[a % len(streams)].aclose()
        elif action == "die":
            bench.engines[a % len(bench.engines)].die(down_s=a / 2)
        elif action == "row_fault":
            bench.engines[a % len(bench.engines)].row_fault(a)
        elif action == "wait":
            await asyncio.sleep(a / 20)
        elif action == "drain" and not drained:
            drained = True
            bench.scheduler.drain()
    assert await bench.scheduler.idle(60)
    await asyncio.sleep(3)

    for reader, stream in zip(readers, streams, strict=True):
        text, finishes = await reader
        assert len(finishes) == 1
        written = finishes[0].usage.completion_tokens
        assert text == "bcdefghijk"[:written]  # no letter twice, none lost
        if finishes[0].reason == "length":
            assert written == stream.request.max_tokens
    assert len(bench.finishes) == len(streams)
    for engine in bench.engines:
        assert engine.most_running <= slots
        assert engine.capacity() == slots
    assert bench.scheduler.load().waiting == 0


async def _finishes(stream: Stream) -> tuple[str, list[Finish]]:
    events = [event async for event in stream]
    text = "".join(event.text for event in events if isinstance(event, Delta))
    return text, [event for event in events if isinstance(event, Finish)]


def test_requests_are_never_mutated_by_the_scheduler() -> None:
    """A Request is frozen: nothing between ingress and engine can change it."""
    with pytest.raises(AttributeError):
        request().max_tokens = 5  # type: ignore[misc]
    assert isinstance(request(), Request)


# --- too hot --------------------------------------------------------------------------------------


@virtual
async def test_a_chain_that_admits_nothing_refuses_as_thermal_shutdown() -> None:
    """Above the critical temperature a request is refused at once, and served when it is over."""
    bench = Bench()
    bench.engine.admits = False
    with pytest.raises(RequestError) as refused:
        bench.scheduler.submit(request("hot"))
    assert refused.value.code == "thermal_shutdown"

    bench.engine.admits = True
    assert (await read(bench.scheduler.submit(request("cool"))))[1].reason == "length"


@virtual
async def test_newcomers_go_to_the_next_engine_while_the_first_admits_nothing() -> None:
    """An engine the guard has closed does not stand in front of one that is open."""
    bench = Bench(spares=1)
    bench.engine.admits = False
    _, finish = await read(bench.scheduler.submit(request("a")))
    assert [span.name for span in finish.engines] == ["spare0"]


@virtual
async def test_evicted_streams_end_once_with_what_was_written() -> None:
    """Streams taken off every engine of an overheated board end failed, and the slots are free."""
    bench = Bench(slots=2, spares=1)
    reading = [asyncio.create_task(read(bench.scheduler.submit(request(n)))) for n in "ab"]
    await asyncio.sleep(0.35)
    bench.scheduler.evict(["fake", "spare0"], Overheated("too hot"))
    results = await asyncio.gather(*reading)

    assert [(f.reason, f.error_code) for _, f in results] == [("failed", "thermal_shutdown")] * 2
    assert [text for text, _ in results] == ["bcd", "bcd"]
    assert len(bench.finishes) == 2
    await asyncio.sleep(1.0)
    assert not bench.engine.runs


@virtual
async def test_evicted_streams_go_on_where_it_is_cool() -> None:
    """An engine that is not on the hot board takes the streams over where they were."""
    bench = Bench(slots=2, spares=1)
    reading = asyncio.create_task(read(bench.scheduler.submit(request("a", max_tokens=8))))
    await asyncio.sleep(0.35)
    bench.scheduler.evict(["fake"], Overheated("too hot"))
    text, finish = await reading

    assert text == "bcdefghi"
    assert [(s.name, s.reason) for s in finish.engines] == [
        ("fake", "first"),
        ("spare0", "thermal_shutdown"),
    ]


@virtual
async def test_what_waits_for_a_hot_board_ends_with_what_runs_there() -> None:
    """Whoever still waits when streams are taken off is told then, not when it cools down."""
    bench = Bench(slots=1, spares=1)
    reading = [asyncio.create_task(read(bench.scheduler.submit(request(n)))) for n in "ab"]
    await asyncio.sleep(0.15)
    bench.engine.admits = bench.spare.admits = False
    bench.scheduler.evict(["fake", "spare0"], Overheated("too hot"))
    results = await asyncio.wait_for(asyncio.gather(*reading), 10)

    assert [(f.reason, f.error_code) for _, f in results] == [("failed", "thermal_shutdown")] * 2
    assert not bench.scheduler.streams
    assert bench.scheduler.load().waiting == 0


@virtual
async def test_a_stream_on_its_way_between_engines_is_taken_off_too() -> None:
    """The first engine dies in the heat, the next is closed: the stream ends, once."""
    bench = Bench(slots=1, spares=1)
    reading = asyncio.create_task(read(bench.scheduler.submit(request("a", max_tokens=8))))
    await asyncio.sleep(0.35)
    bench.engine.admits = bench.spare.admits = False
    bench.engine.die()
    await asyncio.sleep(2.0)
    assert bench.scheduler.load().waiting == 1
    bench.scheduler.evict(["fake", "spare0"], Overheated("too hot"))
    text, finish = await asyncio.wait_for(reading, 10)

    assert (text, finish.reason, finish.error_code) == ("bcd", "failed", "thermal_shutdown")
    assert len(bench.finishes) == 1


@virtual
async def test_what_waits_goes_on_where_it_is_cool() -> None:
    """An engine elsewhere that is busy is waited for; what has not begun tells no move."""
    bench = Bench(slots=1, spares=1)
    bench.engine.admits = False
    first = asyncio.create_task(read(bench.scheduler.submit(request("a"))))
    second = asyncio.create_task(read(bench.scheduler.submit(request("b"))))
    await asyncio.sleep(0.15)
    bench.scheduler.evict(["fake"], Overheated("too hot"))
    results = await asyncio.wait_for(asyncio.gather(first, second), 10)
    assert [f.reason for _, f in results] == ["length", "length"]
    assert [[(s.name, s.reason) for s in f.engines] for _, f in results] == [
        [("spare0", "first")]
    ] * 2


@virtual
async def test_a_hot_engine_that_restarts_promises_nothing() -> None:
    """While the only engine restarts above the critical temperature a request is refused, for it
    would wait until the chip has cooled down."""
    bench = Bench()
    await read(bench.scheduler.submit(request("before")))
    bench.engine.admits = False
    bench.engine.die()
    with pytest.raises(RequestError) as refused:
        bench.scheduler.submit(request("hot"))
    assert refused.value.code == "thermal_shutdown"
