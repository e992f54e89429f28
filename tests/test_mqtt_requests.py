"""What a requester is promised, through a real mosquitto."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiomqtt
import msgspec
import pytest
from broker import Broker, broker, tool
from fakes_mqtt import (
    NODE,
    ROOT,
    FakeScheduler,
    Requester,
    requester,
    serving,
)
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from structlog.testing import capture_logs

from edged.errors import RequestError
from edged.ingress.mqtt import MqttIngress
from edged.metrics import Metrics

V5 = aiomqtt.ProtocolVersion.V5


@pytest.fixture(scope="module")
def mosquitto() -> Iterator[Broker]:
    with broker() as running:
        yield running


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(NODE, "fake")


@pytest.fixture
async def served(
    mosquitto: Broker, scheduler: FakeScheduler, metrics: Metrics
) -> AsyncIterator[MqttIngress]:
    async with serving(mosquitto.url, scheduler, metrics, max_request_bytes=4096) as made:
        yield made


@pytest.fixture
async def client(mosquitto: Broker, served: MqttIngress) -> AsyncIterator[Requester]:
    async with requester(mosquitto.port) as made:
        yield made


@pytest.fixture
async def client5(mosquitto: Broker, served: MqttIngress) -> AsyncIterator[Requester]:
    async with requester(mosquitto.port, version=V5) as made:
        yield made


def properties(**values: Any) -> Properties:
    made = Properties(PacketTypes.PUBLISH)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def dropped(metrics: Metrics, reason: str) -> float:
    family = metrics.mqtt_dropped.family()
    return sum(s.value for s in family.samples if s.labels == {"reason": reason})


# --- the answer ----------------------------------------------------------------------------------


async def test_a_3_1_1_json_request_gets_one_final_with_text_usage_and_engines(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """A quiet request is answered by exactly one message, and that message says it all."""
    await client.ask("generate", {"id": "a1", "prompt": "2 + 2 =", "max_tokens": 5})
    stream = await scheduler.stream()
    stream.say(" four", "!")
    stream.end("stop")
    got = await client.next()
    assert got.topic == f"{ROOT}/res/a1"
    assert (got.qos, got.retain) == (1, False)
    assert got.body["type"] == "final"
    assert (got.body["v"], got.body["id"], got.body["node"]) == (1, "a1", NODE)
    assert (got.body["text"], got.body["finish_reason"], got.body["model"]) == (
        " four!",
        "stop",
        "fake",
    )
    assert got.body["usage"]["prompt_tokens"] == 7
    assert got.body["usage"]["total_tokens"] == 9
    assert got.body["engines"][0]["name"] == "cpu"
    assert got.body["timings"]["total_ms"] == 3.0
    assert (got.body["seq"], got.body["last_seq"]) == (0, 0)
    assert stream.request.max_tokens == 5
    assert stream.request.ingress == "mqtt"
    await client.nothing()


async def test_mosquitto_rr_gets_its_one_answer(
    mosquitto: Broker, served: MqttIngress, scheduler: FakeScheduler
) -> None:
    """MQTT 5 request/response works with a client that reads exactly one reply."""
    scheduler.answer = "four"
    out = await tool(
        *("mosquitto_rr", "-V", "5", "-p", str(mosquitto.port), "-q", "1", "-W", "10"),
        *("-t", f"{ROOT}/req/chat", "-e", "edged/v1/reply/rr/1"),
        *("-m", '{"prompt": "2 + 2?"}', "-D", "publish", "correlation-data", "xyz"),
        *("-F", "%p"),
    )
    body = json.loads(out)
    assert (body["type"], body["text"]) == ("final", "four")


async def test_mosquitto_pub_and_sub_get_a_plain_text_answer(
    mosquitto: Broker, served: MqttIngress, scheduler: FakeScheduler
) -> None:
    """A sensor that can only send text is answered below res/, under an invented id."""
    scheduler.answer = "hello"
    port = str(mosquitto.port)
    listening = asyncio.ensure_future(
        tool("mosquitto_sub", "-V", "311", "-p", port, "-t", f"{ROOT}/res/#", "-C", "1", "-W", "15")
    )
    for _ in range(50):  # until the subscriber listens: its start cannot be seen from here
        await tool("mosquitto_pub", "-V", "311", "-p", port, "-t", f"{ROOT}/req/chat", "-m", "Hi")
        done, _ = await asyncio.wait({listening}, timeout=0.2)
        if done:
            break
    body = json.loads(await listening)
    assert (body["type"], body["text"]) == ("final", "hello")
    assert scheduler.streams[0].prompt == "Hi"


async def test_v5_correlation_data_returns_byte_exact(
    client5: Requester, scheduler: FakeScheduler
) -> None:
    """The Response Topic wins over reply_to; correlation data comes back untouched; user
    properties tell what the reply is."""
    scheduler.answer = "yes"
    correlation = bytes(range(256))
    await client5.ask(
        "generate",
        {"id": "c1", "prompt": "p", "reply_to": "edged/v1/reply/other"},
        properties=properties(ResponseTopic="edged/v1/reply/u/1", CorrelationData=correlation),
    )
    got = await client5.next()
    assert got.topic == "edged/v1/reply/u/1"
    assert got.correlation == correlation
    assert got.user == {
        "edged-type": "final",
        "edged-seq": "0",
        "request-id": "c1",
        "status": "200",
    }


async def test_reply_to_in_the_body_is_where_the_answer_goes(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """A 3.1.1 requester chooses its reply topic in the body."""
    scheduler.answer = "yes"
    await client.ask("generate", {"id": "r", "prompt": "p", "reply_to": "edged/v1/reply/ha/x"})
    assert (await client.next()).topic == "edged/v1/reply/ha/x"


async def test_a_stream_numbers_its_chunks_and_the_final_repeats_the_whole(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """accepted is 0, chunks count from 1, together they are the final's text."""
    await client.ask("generate", {"id": "s", "prompt": "p", "stream": True})
    stream = await scheduler.stream()
    first = await client.next()
    assert (first.body["type"], first.body["seq"], first.body["model"]) == ("accepted", 0, "fake")
    chunks = []
    for word in ("one ", "two ", "three"):
        stream.say(word)
        got = await client.next()
        chunks.append(got)
    stream.say(" four")
    stream.end("length")
    *more, final = await client.last()
    chunks += more
    assert [c.body["type"] for c in chunks] == ["chunk"] * len(chunks)
    assert [c.body["seq"] for c in chunks] == list(range(1, len(chunks) + 1))
    assert {c.qos for c in chunks} == {0}
    assert "".join(c.body["delta"] for c in chunks) == final.body["text"] == "one two three four"
    assert final.body["last_seq"] == len(chunks)
    assert final.body["seq"] == len(chunks) + 1
    assert final.body["finish_reason"] == "length"


async def test_many_deltas_become_few_chunks(mosquitto: Broker, scheduler: FakeScheduler) -> None:
    """Tokens that come faster than chunk_interval_s share a message."""
    async with (
        serving(mosquitto.url, scheduler, chunk_interval_s=0.1),
        requester(mosquitto.port) as client,
    ):
        await client.ask("generate", {"id": "s", "prompt": "p", "stream": True})
        stream = await scheduler.stream()
        for _ in range(100):
            stream.say("x")
            await asyncio.sleep(0.001)
        stream.end()
        got = await client.last()
        assert 1 <= len(got) - 2 <= 20
        assert "".join(g.body["delta"] for g in got[1:-1]) == "x" * 100


async def test_ack_alone_brings_accepted_but_no_chunks(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """Who only wants to know that the request was taken is not sent pieces of it."""
    await client.ask("generate", {"id": "k", "prompt": "p", "ack": True})
    stream = await scheduler.stream()
    stream.say("a", "b")
    stream.end()
    got = await client.last()
    assert [(g.body["type"], g.body["seq"]) for g in got] == [("accepted", 0), ("final", 1)]


async def test_a_chat_reaches_the_scheduler_with_its_fields(
    client5: Requester, scheduler: FakeScheduler
) -> None:
    """Sampling, priority and the nearer of both deadlines arrive at the scheduler."""
    before_s = asyncio.get_running_loop().time()
    await client5.ask(
        "chat",
        {
            "id": "f",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            "temperature": 0,
            "top_k": 3,
            "seed": 7,
            "stop": ["x"],
            "priority": 9,
            "deadline_ms": 60_000,
            "meta": {"free": ["area"]},
        },
        properties=properties(MessageExpiryInterval=20),
    )
    stream = await scheduler.stream()
    request = stream.request
    assert stream.prompt == "s\nu"
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (
        0,
        3,
        7,
    )
    assert (request.stop, request.priority, request.id) == (("x",), 9, "f")
    assert request.deadline_s is not None
    assert 10 < request.deadline_s - before_s <= 30
    stream.end()
    await client5.next()


async def test_a_status_request_is_answered_with_the_nodes_status(client: Requester) -> None:
    """req/status tells mode, engines and queue without a generation."""
    await client.ask("status", {"id": "st"})
    got = await client.next()
    assert (got.body["type"], got.body["id"]) == ("status", "st")
    assert got.body["status"]["mode"] == "normal"


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "code", "word"),
    [
        (b'{"id": "x", "prompt": "p", "temprature": 1}', "invalid_request", "temprature"),
        (b'{"id": "x", "prompt": "p", "priority": 10}', "invalid_request", "priority"),
        (b'{"id": "x", "prompt": "p", "max_tokens": "5"}', "invalid_request", "max_tokens"),
        (b'{"id": "x", "prompt": "p", "temperature": 9}', "invalid_request", "temperature"),
        (b'{"id": "x", "prompt": "p", "messages": []}', "invalid_request", "messages"),
        (b'{"id": "x", "messages": [{"role": "boss"}]}', "invalid_request", "messages[0].role"),
        (b'{"id": "x"}', "invalid_request", "prompt"),
        (b'{"id": "x", "prompt": ""}', "invalid_request", "prompt"),
        (b'{"id": "x", "prompt": "p", "v": 2}', "invalid_request", "version"),
        (b'{"id": "x", "prompt": "p", "model": "gpt-9"}', "model_not_found", "gpt-9"),
        (b'{"id": "x", "prompt": "' + b"a" * 4090 + b'"}', "payload_too_large", "4096"),
        (
            b'{"id": "x", "prompt": "p", "response_format": {"type": "json_object"}}',
            "unsupported_parameter",
            "response_format",
        ),
    ],
)
async def test_a_bad_request_is_refused_by_name_on_its_own_topic(
    client: Requester, scheduler: FakeScheduler, payload: bytes, code: str, word: str
) -> None:
    """Every refusal reaches the requester once, names the field, and the next request works."""
    await client.ask("generate", payload)
    got = await client.next()
    assert got.topic == f"{ROOT}/res/x"
    assert (got.body["type"], got.body["seq"], got.body["error"]["code"]) == ("error", 0, code)
    assert word in got.body["error"]["message"]
    assert got.body["error"]["retryable"] is False
    scheduler.answer = "ok"
    await client.ask("generate", {"id": "next", "prompt": "p"})
    assert (await client.next()).body["text"] == "ok"
    await client.nothing()


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"\xff\xfe\x00bad", "invalid_request"),
        (b'{"id": "x", "prompt": ', "invalid_json"),
        (b'{"prompt": "p", "id": 5}', "invalid_request"),
        (b'{"prompt": "p", "id": "a/b"}', "invalid_request"),
        (b"{" * 4000, "invalid_json"),
        (b'{"meta":' * 500, "invalid_json"),
        (b"", "invalid_request"),
        (b"   ", "invalid_request"),
    ],
)
async def test_a_request_without_a_usable_id_is_refused_below_res(
    client: Requester, scheduler: FakeScheduler, payload: bytes, code: str
) -> None:
    """Whatever the bytes, there is one error on a safe topic and nothing is generated."""
    await client.ask("generate", payload)
    got = await client.next()
    assert got.topic == f"{ROOT}/res/{got.body['id']}"
    assert got.body["error"]["code"] == code
    assert not scheduler.streams
    await client.nothing()


@pytest.mark.parametrize(
    "topic",
    [
        "edged/v1/reply/+/x",
        "edged/v1/reply/#",
        "$SYS/x",
        "homeassistant/light/x/config",
        f"{ROOT}/state/availability",
        f"{ROOT}/req/generate",
        "edged/v1/other/state/info",
        "somewhere/else",
        "edged/v1/reply/" + "x" * 300,
    ],
)
async def test_an_unsafe_reply_topic_is_never_published_on(
    mosquitto: Broker, client: Requester, scheduler: FakeScheduler, metrics: Metrics, topic: str
) -> None:
    """The daemon does not lend its rights: it answers the error on the default topic instead."""
    async with requester(mosquitto.port, "#") as everything:
        await client.client.publish("begin", "1", qos=1)
        while (await everything.next()).topic != "begin":
            pass  # the retained state
        await client.ask("generate", {"id": "x", "prompt": "p", "reply_to": topic})
        got = await client.next()
        assert (got.topic, got.body["error"]["param"]) == (f"{ROOT}/res/x", "reply_to")
        await client.client.publish("end", "1", qos=1)
        seen = []
        while (one := await everything.next()).topic != "end":
            seen.append(one.topic)
        assert seen == [f"{ROOT}/req/generate", f"{ROOT}/res/x"]
    assert not scheduler.streams
    assert dropped(metrics, "reply_topic") == 1


@pytest.mark.parametrize("topic", [f"{ROOT}/state/npu", "edged/v1/reply/+/x", "edged/v1/reply/#"])
async def test_an_unsafe_v5_response_topic_is_refused_likewise(
    client5: Requester, scheduler: FakeScheduler, topic: str
) -> None:
    """The same rule holds for the Response Topic (mosquitto lets wildcards in it pass)."""
    await client5.ask(
        "generate",
        {"id": "x", "prompt": "p"},
        properties=properties(ResponseTopic=topic, CorrelationData=b"c"),
    )
    got = await client5.next()
    assert (got.topic, got.correlation) == (f"{ROOT}/res/x", b"c")
    assert got.body["error"]["code"] == "invalid_request"
    assert not scheduler.streams


async def test_an_oversize_v5_request_is_refused_on_its_response_topic(
    client5: Requester, scheduler: FakeScheduler
) -> None:
    """Too large is told, not dropped."""
    await client5.ask(
        "generate", b"x" * 5000, properties=properties(ResponseTopic="edged/v1/reply/big")
    )
    got = await client5.next()
    assert (got.topic, got.body["error"]["code"]) == ("edged/v1/reply/big", "payload_too_large")
    assert got.user["status"] == "413"


async def test_a_retained_request_is_refused_live_and_on_every_subscription(
    mosquitto: Broker, metrics: Metrics
) -> None:
    """A request kept by the broker would be repeated at every reconnect: it never runs."""
    scheduler = FakeScheduler("never")
    payload = msgspec.json.encode({"id": "ret", "prompt": "p"})
    async with requester(mosquitto.port) as client:
        await client.client.publish(f"{ROOT}/req/generate", payload, qos=1, retain=True)
        try:
            async with serving(mosquitto.url, scheduler, metrics):
                got = await client.next()
                assert "retained" in got.body["error"]["message"]
                await client.client.publish(f"{ROOT}/req/generate", payload, qos=1, retain=True)
                got = await client.next()
                assert "retained" in got.body["error"]["message"]
                assert dropped(metrics, "retained") == 2
                assert not scheduler.streams
        finally:
            await client.client.publish(f"{ROOT}/req/generate", b"", qos=1, retain=True)


async def test_an_unknown_request_topic_is_named_with_the_known_ones(client: Requester) -> None:
    """A typo in the topic is answered, not swallowed."""
    await client.ask("generte", {"id": "t", "prompt": "p"})
    got = await client.next()
    assert got.body["error"]["code"] == "not_found"
    assert "generate" in got.body["error"]["message"]


async def test_a_failed_stream_ends_with_its_error(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """A fault in mid-stream is the request's one error, with the code of the table and the
    engines of what was written."""
    await client.ask("generate", {"id": "e", "prompt": "p", "stream": True})
    stream = await scheduler.stream()
    stream.say("half")
    stream.end("failed", "engine_fault", "the engine died")
    *_, error = await client.last()
    assert error.body["error"] == {
        "code": "engine_fault",
        "message": "the engine died",
        "retryable": True,
    }
    assert [e["name"] for e in error.body["engines"]] == ["cpu"]
    assert error.body["seq"] == 2
    await client.nothing()


async def test_a_refusal_of_the_scheduler_is_passed_on_with_its_retry_time(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """Who may try again is told when, in milliseconds."""
    scheduler.refusal = RequestError("queue_full", "the queue is full", retry_after_s=7)
    await client.ask("generate", {"id": "q", "prompt": "p", "stream": True})
    got = await client.next()
    assert got.body["error"]["code"] == "queue_full"
    assert (got.body["error"]["retryable"], got.body["error"]["retry_after_ms"]) == (True, 7000)
    await client.nothing()


async def test_more_than_max_inflight_requests_are_refused_at_once(
    mosquitto: Broker, scheduler: FakeScheduler
) -> None:
    """The number of requests in flight is bounded; the refused ones are told when to retry."""
    async with (
        serving(mosquitto.url, scheduler, max_inflight=2),
        requester(mosquitto.port) as client,
    ):
        for name in ("a", "b", "c"):
            await client.ask("generate", {"id": name, "prompt": "p"})
        got = await client.next()
        assert (got.body["id"], got.body["error"]["code"]) == ("c", "queue_full")
        assert 1000 <= got.body["error"]["retry_after_ms"] <= 60_000
        for index in (0, 1):
            (await scheduler.stream(index)).end()
        assert {(await client.next()).body["type"] for _ in range(2)} == {"final"}
        await client.ask("generate", {"id": "c", "prompt": "p"})
        (await scheduler.stream(2)).end()
        assert (await client.next()).body["type"] == "final"


async def test_a_bug_in_a_stream_costs_that_request_only(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """A stream that ends without a Finish is still answered once."""
    await client.ask("generate", {"id": "bug", "prompt": "p"})
    (await scheduler.stream()).crash()
    assert (await client.next()).body["error"]["code"] == "internal_error"
    scheduler.answer = "ok"
    await client.ask("generate", {"id": "fine", "prompt": "p"})
    assert (await client.next()).body["text"] == "ok"


# --- cancel and repetition -----------------------------------------------------------------------


async def test_a_cancelled_request_ends_once_with_what_it_had(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """Cancel by id: one final `cancelled` with the text so far; the stream is given up."""
    await client.ask("generate", {"id": "c", "prompt": "p", "stream": True})
    stream = await scheduler.stream()
    stream.say("some")
    while (await client.next()).body["type"] != "chunk":
        pass
    await client.ask("cancel", {"id": "c"})
    got = await client.next()
    assert (got.body["type"], got.body["finish_reason"]) == ("final", "cancelled")
    assert got.body["text"] == "some"
    assert got.body["usage"]["completion_tokens"] == 1
    await client.ask("cancel", {"id": "c"})
    await client.nothing()


async def test_cancelling_an_unknown_id_is_an_error_where_one_is_asked_for(
    client: Requester,
) -> None:
    """With a reply topic the error is told; without one nobody is disturbed."""
    await client.ask("cancel", {"id": "nope", "reply_to": "edged/v1/reply/u/1"})
    got = await client.next()
    assert (got.topic, got.body["error"]["code"]) == ("edged/v1/reply/u/1", "not_found")
    await client.ask("cancel", {"id": "nope"})
    await client.nothing()


async def test_a_repeated_request_is_generated_once_while_it_runs(
    client: Requester, scheduler: FakeScheduler, metrics: Metrics
) -> None:
    """Same id, same payload: accepted again, one generation, one final, one hit counted."""
    body = {"id": "d", "prompt": "p", "ack": True}
    await client.ask("generate", body)
    stream = await scheduler.stream()
    assert (await client.next()).body["type"] == "accepted"
    await client.ask("generate", body)
    assert (await client.next()).body["type"] == "accepted"
    stream.say("once")
    stream.end()
    assert (await client.next()).body["text"] == "once"
    await client.nothing()
    assert len(scheduler.streams) == 1
    assert metrics.dedupe_hits.total() == 1


async def test_a_quiet_repetition_is_still_answered_by_one_message(
    client5: Requester, scheduler: FakeScheduler
) -> None:
    """Who asked for one message gets one, addressed to the newest correlation."""
    for correlation in (b"1", b"2"):
        await client5.ask(
            "generate",
            b'{"id": "d", "prompt": "p"}',
            properties=properties(ResponseTopic="edged/v1/reply/u/1", CorrelationData=correlation),
        )
    await client5.nothing()
    (await scheduler.stream()).end()
    got = await client5.next()
    assert (got.body["type"], got.correlation) == ("final", b"2")
    await client5.nothing()


async def test_a_request_repeated_after_its_end_gets_the_same_answer_again(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """A final that was lost on its way can be asked for again, without a second generation."""
    scheduler.answer = "kept"
    await client.ask("generate", {"id": "d", "prompt": "p"})
    first = await client.next()
    await client.ask("generate", {"id": "d", "prompt": "p"})
    assert (await client.next()).body == first.body
    assert len(scheduler.streams) == 1


async def test_another_request_under_a_used_id_is_a_conflict(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """Neither running nor finished requests are mistaken for another one."""
    await client.ask("generate", {"id": "d", "prompt": "p"})
    stream = await scheduler.stream()
    await client.ask("generate", {"id": "d", "prompt": "other"})
    assert (await client.next()).body["error"]["code"] == "id_conflict"
    stream.end()
    assert (await client.next()).body["type"] == "final"
    await client.ask("chat", {"id": "d", "prompt": "p"})
    assert (await client.next()).body["error"]["code"] == "id_conflict"


async def test_a_failed_request_may_be_repeated(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """An error is not kept: the same request under the same id runs again."""
    await client.ask("generate", {"id": "d", "prompt": "p"})
    (await scheduler.stream()).end("failed", "engine_fault", "died")
    assert (await client.next()).body["type"] == "error"
    scheduler.answer = "now"
    await client.ask("generate", {"id": "d", "prompt": "p"})
    assert (await client.next()).body["text"] == "now"


# --- privacy -------------------------------------------------------------------------------------


async def test_what_is_asked_and_answered_never_reaches_the_log(
    client: Requester, scheduler: FakeScheduler
) -> None:
    """Good, bad and failing requests are logged by id, never by content."""
    secret = "zebra-7351"
    with capture_logs() as lines:
        for name, body in {
            "good": {"id": "good", "prompt": secret},
            "bad": {"id": "bad", "prompt": "p", secret: 1},
            "role": {"id": "role", "messages": [{"role": secret, "content": "x"}]},
            "model": {"id": "model", "prompt": secret, "model": secret},
        }.items():
            await client.ask("chat", body)
            if name == "good":
                stream = await scheduler.stream()
                stream.say(secret)
                stream.end()
            await client.last()
        await client.ask("chat", b'{"id": "json", "prompt": "' + secret.encode())
        await client.last()
    assert {line.get("request_id") for line in lines} >= {"good", "bad", "role", "model"}
    assert secret not in repr(lines)
