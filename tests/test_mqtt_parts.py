"""What the pure parts of the MQTT ingress promise for any input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes_mqtt import NODE, BytesText, FakeScheduler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub

from edged.core import Finish, Usage
from edged.errors import ConfigError, RequestError
from edged.ingress.mqtt import replies
from edged.ingress.mqtt.chunks import Chunks
from edged.ingress.mqtt.dedupe import Recent
from edged.ingress.mqtt.jobs import Jobs, client_of
from edged.ingress.mqtt.messages import Address, Incoming, Outgoing
from edged.ingress.mqtt.outbox import MAX_ATTEMPTS, WINDOW, Outbox
from edged.ingress.mqtt.protocol import Call, Order, Refusal, Rules, read
from edged.ingress.mqtt.reconnect import STABLE_S, Attempt, delay_s
from edged.ingress.mqtt.topics import Topics, check_names, matches, reply_problem
from edged.ingress.prepare import Catalog, Draft
from edged.metrics import Metrics
from edged.settings import Mqtt

TOPICS = Topics("edged/v1", NODE)
RULES = Rules(TOPICS, ("edged/v1/reply/#",), 1000)
quick = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])


def run(work: Callable[[], Awaitable[None]]) -> None:
    """One property example in a loop of its own."""

    async def main() -> None:
        await work()

    asyncio.run(main())


# --- topics --------------------------------------------------------------------------------------

levels = st.sampled_from(["edged", "v1", NODE, "n2", "state", "req", "reply", "res", "", "x"])
topics = st.lists(levels, min_size=1, max_size=6).map("/".join)
wild = st.lists(st.one_of(levels, st.just("+")), min_size=1, max_size=5)
filters = st.tuples(wild, st.booleans()).map(lambda f: "/".join(f[0] + ["#"] * f[1]))


@quick
@given(filters, topics)
def test_topic_filters_match_as_in_the_reference_client(pattern: str, topic: str) -> None:
    """Our matching is paho's, for every filter and topic."""
    assert matches(pattern, topic) == topic_matches_sub(pattern, topic)


@quick
@given(st.one_of(topics, st.text(max_size=40), st.text(alphabet="+#$/\0 a", max_size=10)))
def test_a_reply_topic_that_passes_is_plain_and_carries_no_state(topic: str) -> None:
    """Even with everything allowed, wildcards, $ and the trees of state and commands are not."""
    if reply_problem(topic, TOPICS, ("#",)) is None:
        assert topic
        assert not set(topic) & set("+#\0")
        assert not topic.startswith(("$", "homeassistant/"))
        for tree in ("state", "req", "cmd", "event"):
            assert not topic.startswith(f"{TOPICS.root}/{tree}")
    assert reply_problem(f"{TOPICS.root}/res/a.b:c-1", TOPICS, ()) is None


@pytest.mark.parametrize(
    ("base", "allow"),
    [("", ()), ("/a", ()), ("a/+", ()), ("$a", ()), ("a", ("",)), ("a", ("#/a",)), ("a", ("a+",))],
)
def test_unusable_names_are_config_errors(base: str, allow: tuple[str, ...]) -> None:
    """A base or a filter that no broker would take is refused at start."""
    with pytest.raises(ConfigError, match=r"mqtt\.(base|reply_allow)"):
        check_names(base, allow)


# --- protocol ------------------------------------------------------------------------------------

scraps = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=40).map(str.encode),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["id", "prompt", "messages", "reply_to", "stream", "v", "stop", "meta", "odd"]
                ),
                inner,
                max_size=5,
            )
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)


@quick
@given(
    st.sampled_from(["generate", "chat", "cancel", "status", "odd", ""]),
    scraps,
    st.booleans(),
    st.none() | topics | st.text(max_size=10),
    st.none() | st.binary(max_size=4),
)
def test_any_message_is_read_and_answered_on_a_safe_topic(
    verb: str, payload: bytes, retain: bool, response: str | None, correlation: bytes | None
) -> None:
    """Reading never raises; the address is allowed and echoes the correlation data."""
    message = Incoming(f"{TOPICS.root}/req/{verb}", payload, retain, response, correlation)
    asked = read(message, RULES, "fresh")
    assert isinstance(asked, Call | Order | Refusal)
    assert reply_problem(asked.address.topic, TOPICS, RULES.reply_allow) is None
    assert asked.address.correlation == correlation
    if isinstance(asked, Refusal):
        reply = replies.error(NODE, asked.address, 0, asked.error)
        assert len(reply.payload) < 2000
    if isinstance(asked, Call):
        assert not retain
        assert (asked.draft.prompt is None) != (asked.draft.messages is None)


def asked(payload: bytes | str, verb: str = "generate", **more: Any) -> Call | Order | Refusal:
    data = payload.encode() if isinstance(payload, str) else payload
    return read(Incoming(f"{TOPICS.root}/req/{verb}", data, **more), RULES, "fresh")


def test_plain_text_is_a_prompt_raw_on_generate_and_a_message_on_chat() -> None:
    """The same words: text to continue on `generate`, something said by the user on `chat`."""
    raw, chat = asked("[1] hello"), asked("[1] hello", "chat")
    assert isinstance(raw, Call)
    assert isinstance(chat, Call)
    assert (raw.draft.prompt, raw.draft.messages) == ("[1] hello", None)
    assert chat.draft.prompt is None
    assert chat.draft.messages is not None
    assert [(m.role, m.content) for m in chat.draft.messages] == [("user", "[1] hello")]


def test_plain_text_can_be_switched_off_and_json_can_be_insisted_on() -> None:
    """mqtt.plain_text = false and content type application/json both refuse plain text."""
    rules = Rules(TOPICS, (), 1000, plain_text=False)
    refused = read(Incoming(f"{TOPICS.root}/req/chat", b"hello"), rules, "fresh")
    insisted = asked("hello", content_type="application/json")
    assert isinstance(refused, Refusal)
    assert isinstance(insisted, Refusal)
    assert (refused.error.code, insisted.error.code) == ("invalid_request", "invalid_json")


def test_a_byte_order_mark_is_no_obstacle() -> None:
    """Files written on Windows are sent as they are."""
    found = asked(b'\xef\xbb\xbf{"id": "a", "prompt": "p"}')
    assert isinstance(found, Call)
    assert (found.address.id, found.draft.prompt) == ("a", "p")


def test_an_id_ending_in_a_newline_is_no_id() -> None:
    """An id is a topic level: nothing but the listed characters passes."""
    for name in ("a\n", "a/b", "+", "", "x" * 65, "ä"):
        found = asked(json.dumps({"id": name, "prompt": "p"}))
        assert isinstance(found, Refusal)
        assert found.error.param == "id"
        assert found.address.id == "fresh"


def test_the_nearer_deadline_counts() -> None:
    """Of deadline_ms and message expiry the earlier one is the lifetime."""
    body = '{"prompt": "p", "deadline_ms": 1500}'
    lifetimes = [asked(body, expiry_s=expiry) for expiry in (None, 1, 5)]
    assert [call.lifetime_s for call in lifetimes if isinstance(call, Call)] == [1.5, 1, 1.5]


def test_an_error_never_repeats_more_than_a_few_words_of_the_request() -> None:
    """A refusal quotes the key, not the payload."""
    refusal = asked(json.dumps({"id": "a", "x" * 900: 1}))
    assert isinstance(refusal, Refusal)
    assert len(replies.error(NODE, refusal.address, 0, refusal.error).payload) < 700


# --- chunks, recent answers, back-off ------------------------------------------------------------


async def test_chunks_lose_nothing_and_the_first_goes_at_once() -> None:
    """Text is only gathered, never dropped or reordered; the first piece does not wait."""
    sent: list[str] = []
    chunks = Chunks(0.02, sent.append)
    chunks.add("a")
    assert sent == ["a"]
    chunks.add("b")
    chunks.add("")
    chunks.add("c")
    assert sent == ["a"]
    await asyncio.sleep(0.1)
    assert sent == ["a", "bc"]
    chunks.add("d")
    chunks.add("e")
    chunks.flush()
    chunks.flush()
    assert "".join(sent) == "abcde"


def reply(name: str, size: int = 10) -> Outgoing:
    return Outgoing(f"t/{name}", b"x" * size)


@quick
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400), st.integers(0, 20))))
def test_recent_answers_stay_within_their_bounds(steps: list[tuple[int, int, int]]) -> None:
    """Count, bytes and age are bounded; the newest answer is always there."""
    recent = Recent(ttl_s=50, max_entries=5, max_bytes=1500)
    now_s, born = 0.0, {}
    for name, size, wait_s in steps:
        now_s += wait_s
        answer = reply(str(name), size)
        recent.keep(("t", str(name)), b"d", answer, now_s)
        born[name] = now_s
        assert recent.find(("t", str(name)), now_s) is not None
        assert len(recent) <= 5
        assert recent.size_bytes <= 1500
        for other, at_s in born.items():
            if now_s - at_s >= 50:
                assert recent.find(("t", str(other)), now_s) is None


@quick
@given(st.integers(0, 10_000), st.floats(0.01, 600), st.floats(0, 1))
def test_back_off_grows_to_its_cap_and_is_spread(failures: int, cap_s: float, roll: float) -> None:
    """Never above the cap, never below half of the full delay."""
    full_s = min(cap_s, 0.5 * 2.0 ** min(failures, 16))
    assert full_s / 2 <= delay_s(failures, cap_s, roll) <= full_s <= cap_s


def test_the_protocol_version_is_learnt_again_after_every_lost_connection() -> None:
    """3.1.1 is for this connection only: the broker that returns may be a newer one."""
    first = Attempt()
    old = first.refused()
    assert (first.v5, old.v5) == (True, False)
    assert old.failures == first.failures
    assert first.closed_early().v5
    assert not first.closed_early().closed_early().v5
    assert first.closed_early().closed_early().closed_early().closed_early().v5
    assert old.lost(STABLE_S) == Attempt()
    assert old.lost(1.0) == Attempt(failures=1, flaps=1)
    assert old.lost(1.0).lost(1.0).lost(1.0).flapping
    assert not first.failed().failed().failed().failed().flapping


# --- outbox --------------------------------------------------------------------------------------


class Line:
    """A connection whose sends wait for the test; sent: every message it took, in order."""

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []
        self.pending: dict[str, asyncio.Future[None]] = {}
        self.most = 0

    async def send(self, message: Outgoing) -> None:
        self.sent.append(message)
        done = asyncio.get_running_loop().create_future()
        self.pending[message.topic] = done
        self.most = max(self.most, len(self.pending))
        await done

    def acknowledge(self, topic: str | None = None) -> None:
        if self.pending:
            done = self.pending.pop(topic or next(iter(self.pending)))
            if not done.done():
                done.set_result(None)


@settings(quick, max_examples=150)
@given(
    st.lists(st.sampled_from(["put", "put", "ack", "ack", "cut", "attach", "tick"]), max_size=60)
)
def test_answers_arrive_in_order_at_least_once_over_any_cuts(steps: list[str]) -> None:
    """Whatever the connection does, no answer is lost and first arrivals keep their order."""

    async def work() -> None:
        drops: list[str] = []
        outbox, line, taken, count = Outbox(drops.append), None, [], 0
        for step in [*steps, "attach"]:
            if step == "put":
                outbox.put(reply(str(count)))
                count += 1
            elif step == "tick":
                await asyncio.sleep(0)
            elif step == "ack" and line is not None:
                line.acknowledge()
            elif step == "cut" and line is not None:
                outbox.detach()
                line = None
            elif step == "attach" and line is None:
                line = Line()
                outbox.attach(line.send)
                taken.append(line)
        assert line is not None
        for _ in range(4 * count + 8):
            line.acknowledge()
            await asyncio.sleep(0)
        firsts = list(dict.fromkeys(m.topic for each in taken for m in each.sent))
        if "undeliverable" not in drops:
            assert firsts == [f"t/{n}" for n in range(count)]
            assert await outbox.drained(1)
        assert max(each.most for each in taken) <= WINDOW

    run(work)


async def test_a_message_that_breaks_every_connection_is_given_up_alone() -> None:
    """After a cut suspects fly alone, so the innocent get through and the culprit is dropped."""
    drops: list[str] = []
    outbox = Outbox(drops.append)
    names = ["a", "poison", "b", "c"]
    for name in names:
        outbox.put(reply(name))
    delivered: list[str] = []

    async def send(message: Outgoing) -> None:
        if message.topic == "t/poison":
            raise ConnectionError("cut")
        if len(flying) > 1:
            await asyncio.get_running_loop().create_future()  # never acknowledged: the cut comes
        delivered.append(message.topic)

    for _ in range(2 * MAX_ATTEMPTS):
        flying = outbox._flying
        broken = outbox.attach(send)
        await asyncio.wait({broken}, timeout=0.1)
        outbox.detach()
    assert delivered == ["t/a", "t/b", "t/c"]
    assert drops == ["undeliverable"]
    assert await outbox.drained(1)


async def test_the_outbox_is_bounded_and_drops_its_oldest() -> None:
    """A broker that stays away cannot fill the memory."""
    drops: list[str] = []
    outbox = Outbox(drops.append, max_messages=3)
    for name in "abcde":
        outbox.put(reply(name))
    outbox.put(Outgoing("t/chunk", b"", qos=0, transient=True))
    assert (len(outbox), drops) == (3, ["outbox_full", "outbox_full", "chunk_offline"])
    line = Line()
    outbox.attach(line.send)
    await asyncio.sleep(0)
    assert [m.topic for m in line.sent] == ["t/c", "t/d", "t/e"]
    outbox.detach()


# --- jobs ----------------------------------------------------------------------------------------


def jobs_of(scheduler: FakeScheduler, send: Callable[[Outgoing], None]) -> Jobs:
    return Jobs(
        node=NODE,
        scheduler=scheduler,  # type: ignore[arg-type]
        catalog=Catalog([BytesText()]),  # type: ignore[list-item]
        metrics=Metrics(NODE, "fake"),
        max_inflight=4,
        chunk_interval_s=0.01,
        send=send,
    )


acts = st.lists(
    st.tuples(
        st.sampled_from(
            ["start", "start", "say", "end", "fail", "crash", "cancel", "refuse", "admit", "tick"]
        ),
        st.integers(0, 5),
    ),
    max_size=40,
)


@settings(quick, max_examples=150)
@given(acts, st.booleans())
def test_every_started_request_is_answered_exactly_once(
    steps: list[tuple[str, int]], drain: bool
) -> None:
    """In any order of starts, deltas, ends, failures, crashes, cancels and a stop."""

    async def work() -> None:
        sent: list[Outgoing] = []
        scheduler = FakeScheduler()
        jobs = jobs_of(scheduler, sent.append)
        started = 0
        for act, number in steps:
            streams = scheduler.streams
            stream = streams[number % len(streams)] if streams else None
            if act == "start":
                address = Address(TOPICS.answer(str(started)), str(started))
                draft = Draft(prompt="p")
                jobs.start(Call("generate", address, draft, stream=number % 2 == 0))
                started += 1
            elif act == "cancel":
                jobs.cancel(str(number))
            elif act == "refuse":
                scheduler.refusal = RequestError("queue_full", "full", retry_after_s=1)
            elif act == "admit":
                scheduler.refusal = None
            elif act == "tick":
                for _ in range(number):
                    await asyncio.sleep(0)
            elif stream is not None and act == "say":
                stream.say("x")
            elif stream is not None and act == "crash":
                stream.crash()
            elif stream is not None:
                stream.end("stop" if act == "end" else "failed")
        if drain:
            jobs.drain()
        await jobs.stop()
        bodies = [json.loads(message.payload) for message in sent]
        ends = [body["id"] for body in bodies if body["type"] in ("final", "error")]
        assert sorted(ends, key=int) == [str(number) for number in range(started)]
        assert len(jobs) == 0
        for name in ends:
            seqs = [body["seq"] for body in bodies if body["id"] == name]
            assert seqs == list(range(len(seqs)))

    run(work)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_repetition_in_the_very_moment_of_the_answer_is_answered_too(fails: bool) -> None:
    """After a final it is sent the same again; after an error the request runs anew."""
    sent: list[Outgoing] = []

    def send(message: Outgoing) -> None:
        sent.append(message)
        if len(sent) == 1:
            jobs.start(call)

    scheduler = FakeScheduler()
    jobs = jobs_of(scheduler, send)
    address = Address(TOPICS.answer("a"), "a", named=True)
    call = Call("generate", address, Draft(prompt="p"), digest=b"d")
    jobs.start(call)
    (await scheduler.stream()).end("failed" if fails else "stop")
    if fails:
        (await scheduler.stream(1)).end()
    while len(sent) < 2:
        await asyncio.sleep(0)
    jobs.start(call)
    kinds = [dict(message.user)["edged-type"] for message in sent]
    assert kinds == (["error", "final", "final"] if fails else ["final"] * 3)
    assert len(scheduler.streams) == (2 if fails else 1)
    await jobs.stop()


def test_who_shares_a_reply_tree_shares_a_place_in_fair_share() -> None:
    """The sender of an MQTT message is unknown; its reply topic without the id stands for it."""
    first = client_of(Address("edged/v1/reply/kiosk/1", "1"))
    assert first == client_of(Address("edged/v1/reply/kiosk/2", "2"))
    assert first != client_of(Address("edged/v1/reply/ha/1", "1"))


def test_an_answer_that_cannot_be_shrunk_below_the_limit_is_not_sent() -> None:
    """Nothing is ever published that the broker would hang up on."""
    address = Address("edged/v1/reply/a", "a")
    answer = replies.final(NODE, address, 0, "m", "x" * 5000, Finish("stop", Usage(1, 1)))
    assert replies.fitting(answer, NODE, None) is answer
    assert replies.fitting(answer, NODE, 10_000) is answer
    small = replies.fitting(answer, NODE, 2000)
    assert small is not None
    assert json.loads(small.payload)["error"]["code"] == "payload_too_large"
    assert replies.fitting(answer, NODE, 50) is None


def test_the_default_reply_filter_is_the_configurations() -> None:
    """What docs and tests call allowed is what a default configuration allows."""
    assert Mqtt().reply_allow == RULES.reply_allow
