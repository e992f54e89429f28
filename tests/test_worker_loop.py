"""The step loop against a fake device: what a stream is promised whatever its neighbours do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from fakes_worker import EOS, VOCAB, FakeExecutor, Rig, ask, fake_spec, solo_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from edged import wire
from edged.core import Limits
from edged.errors import WireError
from edged.worker.executor import StepError
from edged.worker.link import LinkClosed
from edged.worker.plan import Gears
from edged.worker.submit import MAX_LOGPROBS, MAX_SLOTS


@contextmanager
def rig(slots: int = 4, context: int = 64, **more: object) -> Iterator[Rig]:
    made = Rig(
        FakeExecutor(slots, **more),  # type: ignore[arg-type]
        fake_spec(context),
        Limits(max_batch=slots, prefill_chunk=4),
    )
    with closing(made):
        yield made


def test_a_stream_says_what_the_model_says() -> None:
    """Prompt in, the model's tokens out, one finish, and the slot is free again."""
    with rig() as r:
        r.say(ask(1, [3, 1, 4], 6))
        r.drain()
        assert r.ids[1] == solo_tokens([3, 1, 4], 6)
        assert r.ends[1] in (["length"], ["stop"])
        assert r.reports[-1].free_slots == 4
        assert r.reports[-1].deadline_s == 0


def test_neighbours_change_nothing() -> None:
    """Streams of mixed lengths batched together say what each says alone."""
    prompts = {i: [(i * 7 + k) % VOCAB for k in range(3 + 9 * i)] for i in range(4)}
    with rig() as r:
        for i, prompt in prompts.items():
            r.say(ask(i, prompt, 12))
        r.drain()
        for i, prompt in prompts.items():
            assert r.ids.get(i, []) == solo_tokens(prompt, 12)


def test_context_grows_with_the_longest_stream_and_shrinks_after_a_while() -> None:
    """Slots are re-packed on growth at once and on shrink later; tokens never notice."""
    long, short = list(range(40)), [5, 6]
    with rig() as r:
        r.say(ask(1, long, 4, ignore_eos=True))
        r.drain()
        assert r.executor.repacks == [16, 32, 64]
        for i in range(2, 5):
            r.say(ask(i, short, 30, ignore_eos=True))
            r.drain()
        assert r.executor.repacks[3:] == [32]
        assert {tuple(r.ids[i]) for i in range(2, 5)} == {tuple(r.ids[2])}
        assert len(r.ids[2]) == 30


def test_a_follow_up_computes_only_what_is_new() -> None:
    """The rows of an earlier conversation are reused, and the answer is the same."""
    first = list(range(10, 22))
    with rig() as r:
        r.say(ask(1, first, 4, ignore_eos=True))
        r.drain()
        follow = [*first, *r.ids[1], 9, 8]
        ran = len(r.executor.runs)
        r.say(ask(2, follow, 5))
        r.drain()
        assert r.ids.get(2, []) == solo_tokens(follow, 5)
        told = next(row for row in r.rows if row.stream == 2)
        # The last token said was never computed, and the last prompt token always is.
        assert told.cached_tokens == len(first) + 3
        assert r.executor.runs[ran][1] == 3


def test_a_shared_prefix_is_copied_from_a_busy_slot() -> None:
    """Two streams with one long prompt compute it once, even while the first still runs."""
    prompt = [(k * 13) % VOCAB for k in range(40)]
    with rig() as r:
        r.say(ask(1, prompt, 20, ignore_eos=True), ask(2, [*prompt, 1], 6, ignore_eos=True))
        r.drain()
        assert r.ids[2] == solo_tokens_ignoring_eos([*prompt, 1], 6)
        assert any(rows == 40 for _, _, rows in r.executor.copies)
        assert next(row for row in r.rows if row.stream == 2).cached_tokens >= 30


def solo_tokens_ignoring_eos(prompt: list[int], count: int) -> list[int]:
    with rig() as r:
        r.say(ask(1, prompt, count, ignore_eos=True))
        r.drain()
        return r.ids[1]


def test_a_continued_stream_goes_on_where_it_stopped() -> None:
    """Prompt ids + generated ids draw the same rest as the uninterrupted stream."""
    seeded = {"temperature": 1.5, "seed": 11, "ignore_eos": True}
    with rig() as r:
        r.say(ask(1, [4, 5, 6], 12, **seeded))
        r.drain()
        whole = r.ids[1]
        r.say(ask(2, [4, 5, 6, *whole[:5]], 12, prompt_tokens=3, **seeded))
        r.drain()
        assert r.ids[2] == whole[5:]


def test_a_cancel_frees_the_slot_in_the_middle_of_a_prefill() -> None:
    """A client that leaves costs at most the chunk that was running."""
    with rig(context=64) as r:
        r.say(ask(1, list(range(60)), 4))
        r.turn(2)
        assert r.executor.runs == [(1, 4, 1), (1, 4, 1)]
        r.say(wire.Cancel(1))
        (report,) = r.turn()
        assert isinstance(report, wire.Report)
        assert [(row.stream, row.finish) for row in report.rows] == [(1, "cancelled")]
        assert (report.free_slots, report.deadline_s, len(r.executor.runs)) == (4, 0, 2)


def test_a_long_prompt_stalls_the_others_for_one_chunk_only() -> None:
    """Chunks and decode steps alternate while both are wanted."""
    with rig() as r:
        r.say(ask(1, [1, 2], 20, ignore_eos=True))
        r.turn(2)
        r.say(ask(2, list(range(40)), 2))
        r.turn(18)
        kinds = [report.kind for report in r.reports][2:18]
        assert kinds == ["prefill", "decode"] * 8


def test_a_poisoned_row_ends_one_stream_only() -> None:
    """A row that is not finite is a fault of its stream; the slot is clean for the next one."""
    with rig() as r:
        r.say(ask(1, [1, 2], 10, ignore_eos=True), ask(2, [8, 9], 10))
        r.turn(3)
        r.executor.poisoned.add(0)
        r.drain()
        assert r.ends[1] == ["row_fault"]
        assert r.ids[2] == solo_tokens([8, 9], 10)
        r.say(ask(3, [1, 2], 10))
        r.drain()
        assert r.ids[3] == solo_tokens([1, 2], 10)


def test_a_row_poisoned_in_mid_prompt_never_reaches_another_stream() -> None:
    """The fault is found in the chunk where it happens, not when the first token is drawn."""
    with rig() as r:
        r.say(ask(1, list(range(20, 40)), 4))
        r.turn()
        r.executor.poisoned.add(0)
        r.turn()
        assert r.ends[1] == ["row_fault"]
        r.say(ask(2, list(range(20, 40)), 4))
        r.drain()
        assert r.ids[2] == solo_tokens(list(range(20, 40)), 4)


def test_a_failed_step_is_repeated_and_a_lasting_failure_is_fatal() -> None:
    """past_len counts only what succeeded, so one failure changes nothing."""
    with rig() as r:
        r.say(ask(1, [1, 2, 3], 6))
        r.turn(2)
        r.executor.failures = 2
        r.drain()
        assert r.ids[1] == solo_tokens([1, 2, 3], 6)
        r.say(ask(2, [1, 2, 3], 6))
        r.executor.failures = 99
        with pytest.raises(StepError):
            r.turn(10)


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"tokens": [], "prompt_tokens": 0}, "empty"),
        ({"tokens": [VOCAB]}, "outside"),
        ({"tokens": [-1]}, "outside"),
        ({"tokens": [1] * 65, "prompt_tokens": 65}, "context"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": 9}, "prompt_tokens"),
        ({"logprobs": 1000}, "logprobs"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_a_bad_submit_is_a_row_fault_in_words(bad: dict[str, object], word: str) -> None:
    """Bad ids or sampling end that stream with a reason; the next one is served."""
    with rig() as r:
        r.say(ask(1, **({"tokens": [1]} | bad)))  # type: ignore[arg-type]
        (report,) = r.turn()
        assert isinstance(report, wire.Report)
        (row,) = report.rows
        assert (row.finish, row.ids) == ("row_fault", [])
        assert word in row.detail
        r.say(ask(2, [1, 2], 3))
        r.drain()
        assert r.ids[2] == solo_tokens([1, 2], 3)


def test_a_submit_beyond_the_slots_is_a_row_fault() -> None:
    """The worker never queues."""
    with rig(slots=2) as r:
        r.say(*(ask(i, [i, 1], 5) for i in (1, 2, 3)))
        r.turn()
        assert r.ends[3] == ["row_fault"]
        assert r.rows[0].detail.startswith("all 2 slots are busy")
        r.drain()
        assert r.ids[1] == solo_tokens([1, 1], 5)


def test_odd_messages_change_nothing() -> None:
    """Unknown streams in Cancel and repeated Submits are ignored."""
    with rig() as r:
        r.say(wire.Cancel(77), ask(1, [1, 2], 5), ask(1, [3, 3], 5), wire.Cancel(78))
        r.drain()
        assert r.ids == {1: solo_tokens([1, 2], 5)}
        assert len(r.ends[1]) == 1


def test_a_stream_ends_at_the_context() -> None:
    """Nothing is computed beyond the context; the end is `length`."""
    with rig(context=20) as r:
        r.say(ask(1, list(range(20, 35)), 100, ignore_eos=True))
        r.drain()
        assert (len(r.ids[1]), r.ends[1]) == (5, ["length"])
        r.say(ask(2, list(range(20)), 100), ask(3, [1, 2, 3], 2, prompt_tokens=1))
        r.drain()
        assert (r.ids[2], r.ends[2]) == ([], ["length"])
        assert (r.ids[3], r.ends[3]) == ([], ["length"])


def test_the_end_of_sequence_is_not_a_token() -> None:
    """`stop` carries no id, unless the stream asked to ignore it."""
    prompt = next([k, 1] for k in range(VOCAB) if len(solo_tokens([k, 1], 40)) < 40)
    with rig() as r:
        r.say(ask(1, prompt, 40))
        r.say(ask(2, prompt, 40, ignore_eos=True))
        r.drain()
        assert r.ends == {1: ["stop"], 2: ["length"]}
        assert r.ids[1] == solo_tokens(prompt, 40)
        assert r.ids[2][: len(r.ids[1]) + 1] == [*r.ids[1], EOS]


def test_duty_paces_steps_and_cancels_cut_through() -> None:
    """At duty 0.25 a step of 1 s is followed by 3 s of rest, during which the socket is heard."""
    with rig(step_s=1.0) as r:
        r.say(wire.SetLimits(4, 0.25, 4, True), ask(1, [1, 2], 9, ignore_eos=True))
        r.turn(2)
        assert len(r.executor.runs) == 1
        r.executor.now_s += 2.9
        r.turn()
        assert len(r.executor.runs) == 1
        r.executor.now_s += 0.2
        r.turn()
        assert len(r.executor.runs) == 2
        assert r.reports[-1].deadline_s > 3
        r.say(wire.Cancel(1))
        r.turn()
        assert (r.ends[1], r.reports[-1].kind) == (["cancelled"], "none")


@pytest.mark.parametrize("duty", [0.1, 0.5, 0.9])
def test_the_busy_share_of_time_is_the_duty(duty: float) -> None:
    """Over many steps, prompts among them, the pauses add up to what the duty asks."""
    with rig(step_s=0.1, context=64) as r:
        r.say(wire.SetLimits(4, duty, 4, True))
        stream = 0
        while len(r.executor.runs) < 600:
            if not r.busy:
                stream += 1
                r.say(ask(stream, [stream % VOCAB] * 20, 40, ignore_eos=True))
                r.turn()
            r.executor.now_s += max(r.loop._wait_s() or 0.0, 0.0)
            r.turn()
        assert len(r.executor.runs) * 0.1 / r.executor.now_s == pytest.approx(duty, rel=0.05)


def test_limits_of_zero_pause_the_streams_in_their_slots() -> None:
    """Nothing runs and nothing is promised until the limits rise again."""
    with rig() as r:
        r.say(ask(1, [1, 2], 9, ignore_eos=True))
        r.turn(3)
        ran = len(r.executor.runs)
        r.say(wire.SetLimits(0, 1.0, 4, True))
        assert r.turn(3) == [wire.Phase("step", 0.0)]
        assert (len(r.executor.runs), r.loop._wait_s()) == (ran, None)
        r.say(wire.SetLimits(4, 1.0, 4, True))
        r.drain()
        assert len(r.ids[1]) == 9


def test_a_step_is_announced_after_idleness() -> None:
    """The first frame of new work is a promise with a deadline, then each report renews it."""
    with rig() as r:
        r.say(ask(1, [1, 2], 3, ignore_eos=True))
        heard = r.turn()
        assert isinstance(heard[0], wire.Phase)
        assert heard[0].deadline_s >= 10
        assert all(report.deadline_s >= 10 for report in r.reports[:-1])
        r.drain()
        assert r.reports[-1].deadline_s == 0


def test_a_lowered_batch_rotates_the_streams() -> None:
    """With max_batch 1 every stream moves on every 32 tokens per rival."""
    with rig(slots=3, context=256, gears=Gears((1, 2, 3), (), (256,))) as r:
        r.say(wire.SetLimits(1, 1.0, 4, True))
        r.say(*(ask(i, [i, 2], 100, ignore_eos=True) for i in (1, 2, 3)))
        r.turn(3 * 32)
        assert all(run[2] == 1 for run in r.executor.runs)
        assert [len(r.ids[i]) for i in (1, 2, 3)] == [32, 32, 32]
        r.drain()
        assert all(len(r.ids[i]) == 100 for i in (1, 2, 3))


def test_holes_are_closed_when_they_last() -> None:
    """A wide window with few streams is compacted, and the moved stream goes on unchanged."""
    with rig(context=64) as r:
        r.say(*(ask(i, [i, 3], 60 if i in (1, 4) else 2, ignore_eos=True) for i in (1, 2, 3, 4)))
        r.drain()
        sizes = [size for size, tokens, _ in r.executor.runs if tokens == 1]
        assert sizes.count(2) > 25
        assert sizes.count(4) < 24
        for i in (1, 4):
            assert r.ids[i] == solo_tokens_ignoring_eos([i, 3], 60)


def test_the_end_of_the_socket_ends_the_loop() -> None:
    """The daemon's death is an exception of its own; frames it may not send are WireErrors."""
    with rig() as r:
        r.say(wire.Launch("cpu", "x", 1, 0, 1, 1))
        with pytest.raises(WireError):
            r.turn()
    with rig() as r:
        r.say(wire.Shutdown())
        assert r.loop.turn() is False
        r._ours.close()
        with pytest.raises(LinkClosed):
            r.loop.turn()


def test_the_largest_report_fits_a_frame() -> None:
    """By construction: the most slots with the most logprobs stay far below the limit."""
    rivals = [(2**31 - 1, -1e300)] * MAX_LOGPROBS
    row = wire.Row(2**62, [2**31 - 1], [(-1e300, rivals)], "length", "", 2**31)
    report = wire.Report([row] * MAX_SLOTS, "decode", 256, 256, 2**20, 1e9, 256, 1e9)
    assert len(wire.encode(report)) < wire.MAX_FRAME_BYTES * 0.7


# --- any order of events -------------------------------------------------------------------------

PROMPTS = [
    [1, 2, 3],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 30, 31],
    [50],
    [(k * 29) % VOCAB for k in range(45)],
]
EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 30)),
    st.tuples(st.just("follow"), st.integers(0, 30), st.integers(1, 10)),
    st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("turn"), st.integers(1, 40), st.just(0)),
    st.tuples(st.just("fail"), st.integers(1, 2), st.just(0)),
    st.tuples(st.just("poison"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("limits"), st.integers(0, 4), st.integers(1, 20)),
)
SHAPES = st.sampled_from(
    [
        Gears((1, 2, 3, 4), (), (8, 16, 32, 64)),
        Gears((1, 2, 4), (4, 16), (16, 64)),
        Gears((1, 4), (8,), (64,)),
    ]
)


@settings(max_examples=150, deadline=None)
@given(gears=SHAPES, events=st.lists(EVENTS, max_size=40))
def test_any_order_of_events_keeps_every_promise(
    gears: Gears, events: list[tuple[str, int, int]]
) -> None:
    """Each stream ends exactly once, says what it says alone, and no slot is ever lost."""
    with rig(gears=gears) as r:
        story = _play(r, events)
        r.say(wire.SetLimits(4, 1.0, 4, True))
        r.executor.failures = 0
        r.drain()
        for stream, (prompt, count) in story.items():
            (end,) = r.ends[stream]
            said, alone = r.ids.get(stream, []), solo_tokens(prompt, count)
            assert said == alone[: len(said)]
            if end in ("stop", "length"):
                assert said == alone
        faults = [row for row in r.rows if "not finite" in row.detail]
        assert len(faults) == r.executor.poisonings
        assert all(not slot.busy for slot in r.loop._table.slots)
        assert r.reports == [] or r.reports[-1].free_slots == 4


def _play(r: Rig, events: list[tuple[str, int, int]]) -> dict[int, tuple[list[int], int]]:
    """Act the events out; what was asked of each stream."""
    story: dict[int, tuple[list[int], int]] = {}
    for kind, a, b in events:
        if kind in ("submit", "follow"):
            prompt = PROMPTS[a] if kind == "submit" else _follow_up(r, story, a)
            stream = len(story)
            story[stream] = (prompt, min(b, 64 - len(prompt)))
            r.say(ask(stream, prompt, story[stream][1]))
        elif kind == "cancel":
            r.say(wire.Cancel(a))
        elif kind == "turn":
            for _ in range(a):
                heard = [m for m in r.turn() if isinstance(m, wire.Report)]
                assert sum(m.kind != "none" for m in heard) <= 1
        elif kind == "fail":
            r.executor.failures = a
        elif kind == "poison":
            r.executor.poisoned.add(a)
        else:
            r.say(wire.SetLimits(a, 1.0, b, True))
    return story


def _follow_up(r: Rig, story: dict[int, tuple[list[int], int]], index: int) -> list[int]:
    """The next turn of an earlier conversation."""
    if not story:
        return [3, 2, 1]
    stream = index % len(story)
    return [*story[stream][0], *r.ids.get(stream, []), 88][:60]
