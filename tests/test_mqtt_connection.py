"""What the connection to the broker promises, whatever becomes of the broker or of us."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiomqtt
import pytest
from broker import Broker, broker, free_port, tool
from fakes_mqtt import (
    NODE,
    ROOT,
    FakeScheduler,
    Proxy,
    idle_status,
    ingress,
    requester,
    serving,
    until,
    up,
)
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from edged.errors import ConfigError
from edged.ingress.mqtt.dial import dial_of
from edged.metrics import Metrics
from edged.settings import Mqtt
from edged.status import Status

V5 = aiomqtt.ProtocolVersion.V5
AVAILABILITY = f"{ROOT}/state/availability"


@pytest.fixture(scope="module")
def mosquitto() -> Iterator[Broker]:
    with broker() as running:
        yield running


def dropped(metrics: Metrics, reason: str) -> float:
    family = metrics.mqtt_dropped.family()
    return sum(s.value for s in family.samples if s.labels == {"reason": reason})


# --- start and stop ------------------------------------------------------------------------------


async def test_a_missing_broker_at_start_is_no_error_and_is_found_later() -> None:
    """start() returns without a broker; when one appears, requests are served."""
    made = Broker()
    served = ingress(made.url, FakeScheduler("late"))
    await asyncio.wait_for(served.start(), 5)
    try:
        await asyncio.sleep(0.3)
        assert not served.connected
        made.start()
        await until(lambda: served.connected)
        async with requester(made.port) as client:
            await client.ask("generate", {"id": "1", "prompt": "p"})
            assert (await client.next()).body["text"] == "late"
    finally:
        await served.stop()
        made.close()


async def test_stop_is_quick_without_a_broker() -> None:
    """Nobody waits for a broker that is not there."""
    served = ingress(f"mqtt://127.0.0.1:{free_port()}", FakeScheduler())
    await served.start()
    await asyncio.sleep(0.05)
    await asyncio.wait_for(served.stop(), 8)


async def test_stop_is_bounded_when_the_broker_hangs() -> None:
    """A broker that accepts and then says nothing delays the stop by seconds, not for ever."""
    with broker() as made:
        served = ingress(made.url, FakeScheduler())
        await served.start()
        await until(lambda: served.connected)
        made.signal(signal.SIGSTOP)
        try:
            await asyncio.wait_for(served.stop(), 20)
        finally:
            made.signal(signal.SIGCONT)


async def test_availability_and_info_are_retained_from_start_to_stop(mosquitto: Broker) -> None:
    """Who subscribes later sees `online` and what the node is; after stop() `offline`."""
    async with (
        serving(mosquitto.url, FakeScheduler()),
        requester(mosquitto.port, f"{ROOT}/state/+") as client,
    ):
        got = {one.topic: one for one in [await client.next() for _ in range(4)]}
        assert got[AVAILABILITY].body == "online"
        chip, queue = got[f"{ROOT}/state/npu"].body, got[f"{ROOT}/state/queue"].body
        assert (chip["temperature_c"], chip["mode"]) == (None, "normal")
        assert queue["waiting"] == 0
        assert {"running", "accepting", "generated_tokens_total", "ts"} <= set(queue)
        info = got[f"{ROOT}/state/info"].body
        assert info["models"] == [{"id": "fake", "context_tokens": 4096}]
        assert info["limits"]["max_request_bytes"] == 256 * 1024
        assert {"version", "boot_id", "node"} <= set(info)
        async with requester(mosquitto.port, AVAILABILITY) as late:
            got_late = await late.next()
            assert (got_late.body, got_late.retain) == ("online", True)
    async with requester(mosquitto.port, AVAILABILITY) as client:
        assert (await client.next()).body == "offline"


async def test_one_state_that_cannot_be_told_is_not_the_last(mosquitto: Broker) -> None:
    """A bug in what the node says of itself costs one message; the retained state does not stay
    what it was for good."""
    looks = 0

    def status() -> Status:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RuntimeError("bug")
        return dataclasses.replace(idle_status(), waiting=5)

    async with (
        serving(mosquitto.url, FakeScheduler()) as served,
        requester(mosquitto.port, f"{ROOT}/state/queue") as client,
    ):
        assert (await client.next()).body["waiting"] == 0
        served._status = status
        assert (await client.next()).body["waiting"] == 5


async def test_stop_answers_what_runs_before_it_says_offline(mosquitto: Broker) -> None:
    """Running requests end as shutting_down, retryable, and only then is the node offline."""
    scheduler = FakeScheduler()
    served = ingress(mosquitto.url, scheduler)
    await served.start()
    await up(served)
    async with requester(mosquitto.port, f"{ROOT}/res/#", AVAILABILITY) as client:
        assert (await client.next()).body == "online"
        for name in ("a", "b"):
            await client.ask("generate", {"id": name, "prompt": "p"})
        await scheduler.stream(1)
        await served.stop()
        got = [await client.next() for _ in range(3)]
        assert {one.body["error"]["code"] for one in got[:2]} == {"shutting_down"}
        assert all(one.body["error"]["retryable"] for one in got[:2])
        assert got[2].body == "offline"
    assert all(stream.closed for stream in scheduler.streams)


async def test_drain_refuses_the_new_and_lets_the_running_end(mosquitto: Broker) -> None:
    """After drain() a new request is told to come back, a running one gets its answer."""
    scheduler = FakeScheduler()
    async with serving(mosquitto.url, scheduler) as served, requester(mosquitto.port) as client:
        await client.ask("generate", {"id": "old", "prompt": "p"})
        stream = await scheduler.stream()
        served.drain()
        await client.ask("generate", {"id": "new", "prompt": "p"})
        got = await client.next()
        assert (got.body["id"], got.body["error"]["code"]) == ("new", "shutting_down")
        assert got.body["error"]["retry_after_ms"] > 0
        stream.say("done")
        stream.end()
        assert (await client.next()).body["text"] == "done"


CHILD = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from fakes_mqtt import FakeScheduler, serving
async def main():
    async with serving(sys.argv[1], FakeScheduler()):
        print("up", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_the_will_says_offline_after_kill_9(mosquitto: Broker) -> None:
    """A daemon that dies without a word is offline to all within seconds."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, mosquitto.url, str(Path(__file__).parent)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert child.stdout is not None
        while b"up" not in (line := await child.stdout.readline()):
            assert line, "the child did not come up"
        async with requester(mosquitto.port, AVAILABILITY) as client:
            assert (await client.next()).body == "online"
            child.kill()
            assert (await client.next(15)).body == "offline"
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


# --- outages -------------------------------------------------------------------------------------


async def test_an_answer_that_ends_while_the_broker_is_dead_arrives_afterwards() -> None:
    """Broker killed and restarted: the finished answer arrives, the node is online again and
    subscribed again."""
    scheduler, metrics = FakeScheduler(), Metrics(NODE, "fake")
    with broker() as made:
        async with Proxy(made.port) as proxy, serving(proxy.url, scheduler, metrics) as served:
            async with requester(made.port) as client:
                await client.ask("generate", {"id": "o", "prompt": "p", "stream": True})
                stream = await scheduler.stream()
                assert (await client.next()).body["type"] == "accepted"
                proxy.open = False
                made.kill()
            await until(lambda: not served.connected)
            stream.say("during ", "the outage")
            stream.end()
            made.start()
            async with requester(made.port, f"{ROOT}/res/#", AVAILABILITY) as client:
                proxy.open = True
                got = {one.topic: one for one in [await client.next(), await client.next()]}
                assert got[AVAILABILITY].body == "online"
                assert got[f"{ROOT}/res/o"].body["text"] == "during the outage"
                scheduler.answer = "again"
                await client.ask("generate", {"id": "p", "prompt": "p"})
                assert (await client.next()).body["text"] == "again"
                await client.nothing()
            assert metrics.mqtt_reconnects.family().samples[0].value == 1


async def test_a_running_stream_survives_a_cut_connection(mosquitto: Broker) -> None:
    """A stream goes on over a cut: later chunks arrive, the final carries the whole text."""
    scheduler = FakeScheduler()
    async with (
        Proxy(mosquitto.port) as proxy,
        serving(proxy.url, scheduler) as served,
        requester(mosquitto.port) as client,
    ):
        await client.ask("generate", {"id": "s", "prompt": "p", "stream": True})
        stream = await scheduler.stream()
        stream.say("a")
        assert [(await client.next()).body["type"] for _ in range(2)] == ["accepted", "chunk"]
        proxy.open = False
        proxy.cut()
        await until(lambda: not served.connected)
        stream.say("b")
        await asyncio.sleep(0.1)
        proxy.open = True
        await until(lambda: served.connected)
        stream.say("c")
        stream.end()
        *chunks, final = await client.last()
        assert final.body["text"] == "abc"
        assert [c.body["delta"] for c in chunks] == ["c"]
        assert final.body["last_seq"] == 3


async def test_a_message_the_library_cannot_decode_costs_one_reconnect(mosquitto: Broker) -> None:
    """paho breaks the connection over a byte order mark in a property; we come back."""
    scheduler, metrics = FakeScheduler("ok"), Metrics(NODE, "fake")
    async with (
        serving(mosquitto.url, scheduler, metrics),
        requester(mosquitto.port, version=V5) as client,
    ):
        poison = Properties(PacketTypes.PUBLISH)
        poison.UserProperty = ("k", "\ufeff")
        await client.ask("generate", {"id": "poison", "prompt": "p"}, properties=poison)
        await until(lambda: metrics.mqtt_reconnects.family().samples[0].value == 1)
        await until(lambda: metrics.mqtt_connected)
        await client.ask("generate", {"id": "fine", "prompt": "p"})
        assert (await client.next()).body["id"] == "fine"
        assert metrics.mqtt_reconnects.family().samples[0].value == 1


# --- older, stricter and closed brokers ----------------------------------------------------------


@pytest.mark.parametrize("how", ["connack", "hangup"])
async def test_a_broker_without_mqtt_5_is_served_over_3_1_1(mosquitto: Broker, how: str) -> None:
    """Whether it refuses MQTT 5 properly or hangs up, 3.1.1 is tried and works."""
    async with (
        Proxy(mosquitto.port, against_v5=how) as proxy,
        serving(proxy.url, FakeScheduler("old")),
        requester(mosquitto.port) as client,
    ):
        assert proxy.versions[0] == 5
        assert proxy.versions[-1] == 4
        await client.ask("generate", {"id": "1", "prompt": "p"})
        assert (await client.next()).body["text"] == "old"


async def test_an_answer_over_the_brokers_packet_limit_becomes_an_error() -> None:
    """MQTT 5 brokers announce their limit: what is over it is told, the connection stands."""
    scheduler, metrics = FakeScheduler("x" * 20_000), Metrics(NODE, "fake")
    with broker("max_packet_size 10000") as made:
        async with (
            serving(made.url, scheduler, metrics),
            requester(made.port) as client,
        ):
            await client.ask("generate", {"id": "big", "prompt": "p"})
            got = await client.next()
            assert got.body["error"]["code"] == "payload_too_large"
            assert "10000" in got.body["error"]["message"]
            assert metrics.mqtt_reconnects.family().samples[0].value == 0


async def test_an_answer_the_broker_never_takes_does_not_hold_up_the_others() -> None:
    """A 3.1.1 broker hangs up on a packet over its limit: it is given up, the rest arrives."""
    scheduler, metrics = FakeScheduler(), Metrics(NODE, "fake")
    with broker("max_packet_size 10000") as made:
        async with (
            Proxy(made.port, against_v5="connack") as proxy,
            serving(proxy.url, scheduler, metrics, reconnect_max_s=0.05),
            requester(made.port) as client,
        ):
            for name in ("big", "small"):
                await client.ask("generate", {"id": name, "prompt": "p"})
            big, small = await scheduler.stream(0), await scheduler.stream(1)
            big.say("x" * 20_000)
            small.say("fine")
            big.end()
            small.end()
            assert (await client.next(20)).body["text"] == "fine"
            assert dropped(metrics, "undeliverable") == 1


async def test_a_publish_the_broker_denies_is_counted() -> None:
    """The library swallows PUBACK codes; we do not."""
    acl = f"topic readwrite {ROOT}/req/#\ntopic readwrite {ROOT}/state/#\n"
    metrics = Metrics(NODE, "fake")
    with broker("acl_file {folder}/acl", files={"acl": acl}) as made:
        async with (
            serving(made.url, FakeScheduler("secret"), metrics),
            requester(made.port) as client,
        ):
            await client.ask("generate", {"id": "d", "prompt": "p"})
            await until(lambda: dropped(metrics, "refused_by_broker") == 1)


async def test_a_wrong_password_is_retried_quietly_and_a_right_one_works(tmp_path: Path) -> None:
    """A refused login is no crash; username and password file are what the broker sees."""
    hashed = tmp_path / "passwd"
    await tool("mosquitto_passwd", "-b", "-c", str(hashed), "edged", "right")
    secret = tmp_path / "secret"
    files = {"passwd": hashed.read_text()}
    with broker("allow_anonymous false\npassword_file {folder}/passwd", files=files) as made:
        secret.write_text("wrong\n")
        keys = {"username": "edged", "password_file": str(secret)}
        served = ingress(made.url, FakeScheduler(), None, **keys)
        await served.start()
        await asyncio.sleep(0.5)
        assert not served.connected
        await served.stop()
        secret.write_text("right\n")
        async with serving(made.url, FakeScheduler(), None, **keys) as served:
            assert served.connected


# paho leaves the socket of a failed handshake to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
async def test_mqtts_checks_the_brokers_certificate(tmp_path: Path) -> None:
    """With the right ca_file we connect over TLS; with the system's authorities we do not."""
    key, certificate = tmp_path / "key", tmp_path / "crt"
    await tool(
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", str(key)),
        *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", str(certificate)),
    )
    listener = "certfile {folder}/crt\nkeyfile {folder}/key"
    files = {"crt": certificate.read_text(), "key": key.read_text()}
    with broker(listener=listener, files=files) as made:
        url = f"mqtts://localhost:{made.port}"
        async with serving(url, FakeScheduler(), None, ca_file=str(certificate)) as served:
            assert served.connected
        stranger = ingress(url, FakeScheduler())
        await stranger.start()
        await asyncio.sleep(0.5)
        assert not stranger.connected
        await stranger.stop()
        gc.collect()


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"url": "mqtt://"}, "mqtt.url"),
        ({"password_file": "/nowhere", "username": "u"}, "mqtt.password_file"),
        ({"password_file": "/nowhere"}, "mqtt.username"),
        ({"keepalive_s": 70_000}, "mqtt.keepalive_s"),
        ({"url": "mqtts://h", "ca_file": "/nowhere"}, "mqtt.ca_file"),
    ],
)
def test_an_unusable_configuration_names_its_key(keys: dict[str, Any], word: str) -> None:
    """What cannot work is told before anything is connected."""
    with pytest.raises(ConfigError, match=word):
        dial_of(Mqtt(**{"url": "mqtt://h", **keys}), NODE, "a")


def test_a_dial_never_shows_its_password() -> None:
    """Logs and tracebacks show where we connect, not with what."""
    dial = dial_of(Mqtt(url="mqtt://h", username="u"), NODE, "a")
    assert repr(dial) == "Dial(h:1883, edged-n1)"
