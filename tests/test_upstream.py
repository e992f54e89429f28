"""The upstream engine against a server on a real socket that fails as real ones do."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes_http import tiny_model
from fakes_upstream import (
    REFERENCE,
    Answer,
    FakeUpstream,
    fake_upstream,
    hang,
    pings,
    refuse,
    say,
    send,
)
from structlog.testing import capture_logs

from edged.core import Chat, ChatMessage, Delta, Finish, Limits, Prompt, Request, Sampling
from edged.engine.upstream import UpstreamEngine
from edged.engine.upstream.dial import dial_of
from edged.errors import EngineFault
from edged.ingress.http.info import readiness
from edged.queue import Queue
from edged.scheduler import Scheduler, Stream
from edged.settings import Upstream
from edged.status import status_of
from edged.text.model import TextModel

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
HELLO = Chat((ChatMessage("user", "hello"),))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return tiny_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
async def fake() -> AsyncIterator[FakeUpstream]:
    async with fake_upstream() as running:
        yield running


@asynccontextmanager
async def engine_on(fake: FakeUpstream, **more: Any) -> AsyncIterator[UpstreamEngine]:
    """A started engine."""
    given = {"first_token_timeout_s": 5.0, "idle_timeout_s": 5.0, "connect_timeout_s": 2.0} | more
    upstream = Upstream(url=fake.url, **given)
    engine = UpstreamEngine(upstream, dial_of(upstream, {}))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


def scheduler_on(text: TextModel, *engines: UpstreamEngine) -> Scheduler:
    scheduler = Scheduler(engines, {"tiny": text}, Queue(8, 10_000, 10.0))
    for engine in engines:
        engine.on_change = scheduler.dispatch
    return scheduler


def asked(**more: Any) -> Request:
    given = {"id": "r", "model": "tiny", "prompt_ids": (5,), "max_tokens": 200, "source": HELLO}
    return Request(**(given | more))


async def read(stream: Stream) -> tuple[str, Finish]:
    shown = ""
    async for event in stream:
        if isinstance(event, Delta):
            shown += event.text
        else:
            finish = event
    return shown, finish


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), 10)


# --- proof -----------------------------------------------------------------------------------


async def test_it_is_ready_on_proof_only_and_by_itself(fake: FakeUpstream) -> None:
    """A server that lists its model but still loads is not ready; it becomes so without help."""
    fake.health_status = 503
    upstream = Upstream(url=fake.url)
    engine = UpstreamEngine(upstream, dial_of(upstream, {}))
    with pytest.raises(EngineFault, match="/health says 503"):
        await engine.start()
    assert (engine.health().state, engine.capacity()) == ("failed", 0)
    with pytest.raises(EngineFault, match="not ready"):
        engine.run_text(asked(), "")

    fake.health_status = 404  # a server without that route
    await until(lambda: engine.health().state == "ready")
    assert engine.capacity() == 8
    assert engine.model == "ref-1"
    await engine.stop()
    assert engine.health().state == "off"


@pytest.mark.parametrize(
    ("models", "status", "wanted", "why"),
    [
        ([], 200, "", "lists no model"),
        ([{"id": "a"}, {"id": "b"}], 200, "c", "it has a, b"),
        ([{"id": "a"}], 401, "", "upstream.api_key_file"),
        ([{"id": "a"}], 404, "", "upstream.url"),
        ([{"id": "a"}], 302, "", "redirects"),
        ([{"id": "a"}], 500, "", "answers 500"),
        ([{"id": 7}], 200, "", "no list of models"),
    ],
)
async def test_what_is_missing_is_told_in_words(
    fake: FakeUpstream, models: list[Any], status: int, wanted: str, why: str
) -> None:
    """Whoever reads the status knows which key to look at."""
    fake.models, fake.models_status = models, status
    with pytest.raises(EngineFault, match=why):
        async with engine_on(fake, model=wanted):
            pass


async def test_a_list_nested_without_end_is_a_fault_and_it_is_asked_again(
    fake: FakeUpstream,
) -> None:
    """Whatever stands in place of the server for a while, it is found again by itself."""
    fake.models_body = b'{"data":[{"id":"a","x":' + b"[" * 100_000
    upstream = Upstream(url=fake.url)
    engine = UpstreamEngine(upstream, dial_of(upstream, {}))
    with pytest.raises(EngineFault, match="no list of models"):
        await asyncio.wait_for(engine.start(), 10)
    fake.models_body = b""
    await until(lambda: engine.health().state == "ready")
    await engine.stop()


async def test_nobody_there_is_a_fault_not_a_crash(fake: FakeUpstream) -> None:
    """A port that nobody listens on."""
    upstream = Upstream(url="http://127.0.0.1:9", connect_timeout_s=1.0)
    engine = UpstreamEngine(upstream, dial_of(upstream, {}))
    with pytest.raises(EngineFault, match="cannot be reached"):
        await engine.start()
    await engine.stop()


async def test_nobody_waits_for_ever_for_a_server_that_is_gone(
    text: TextModel, fake: FakeUpstream
) -> None:
    """A minute without proof ends the waiting streams; the server may come back later."""
    async with engine_on(fake) as engine:
        fake.models_status = 500
        engine._ask_now.set()
        await until(lambda: engine.health().state == "failed")
        assert engine.health().detail == "it answers 500"
        reading = asyncio.ensure_future(read(scheduler_on(text, engine).submit(asked())))
        await asyncio.sleep(0.05)
        assert not reading.done()
        engine._unproven_since_s -= 61  # as if it had been a minute ago
        engine._ask_now.set()
        _, finish = await asyncio.wait_for(reading, 10)
        assert (finish.reason, finish.error_code) == ("failed", "engine_unavailable")
        assert engine.health().state == "off"
        fake.models_status = 200
        engine._ask_now.set()
        await until(lambda: engine.capacity() == 8)


# --- an answer -------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [HELLO, Prompt("P:")])
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_an_answer_streams_with_its_usage_and_its_name(
    text: TextModel, fake: FakeUpstream, source: Chat | Prompt, size: int
) -> None:
    """Chat and raw prompts: the text arrives whole; the finish names engine, model and tokens."""
    fake.script.append(say(size=size))
    async with engine_on(fake) as engine:
        shown, finish = await read(scheduler_on(text, engine).submit(asked(source=source)))

    assert (shown, finish.reason) == (REFERENCE, "stop")
    assert finish.usage.completion_tokens == 17
    span = finish.engines[0]
    assert (span.name, span.model, span.from_token, span.to_token) == ("openai", "ref-1", 0, 17)
    assert not span.approximate and finish.timings.first_token_s is not None


async def test_stop_strings_are_ours_whoever_watches(text: TextModel, fake: FakeUpstream) -> None:
    """A stop string that the server lets pass ends the answer, and the connection."""
    fake.script.append(say(size=2, pause_s=0.005))
    async with engine_on(fake) as engine:
        stream = scheduler_on(text, engine).submit(asked(stop=("🙂 full",)))
        shown, finish = await read(stream)
        await asyncio.wait_for(fake.left.wait(), 5)

    assert (shown, finish.reason) == (REFERENCE[: REFERENCE.index("🙂")], "stop")
    assert fake.asked[0]["stop"] == ["🙂 full"]
    assert finish.usage.completion_tokens >= len(shown)


async def test_leaving_closes_the_connection_and_frees_the_slot(
    text: TextModel, fake: FakeUpstream
) -> None:
    """A client that goes away costs the other server nothing more."""
    fake.script.append(say(size=1, pause_s=0.05))
    async with engine_on(fake, max_concurrent=1) as engine:
        scheduler = scheduler_on(text, engine)
        stream = scheduler.submit(asked())
        await stream.__anext__()
        assert engine.capacity() == 0
        await stream.aclose()
        await asyncio.wait_for(fake.left.wait(), 5)
        assert engine.capacity() == 1
        shown, _ = await read(scheduler.submit(asked()))
    assert shown == REFERENCE


async def test_leaving_before_the_first_token_closes_it_too(
    text: TextModel, fake: FakeUpstream
) -> None:
    """Also while the server thinks."""
    fake.script.append(hang())
    async with engine_on(fake) as engine:
        stream = scheduler_on(text, engine).submit(asked())
        await until(lambda: fake.busy == 1)
        await stream.aclose()
        await asyncio.wait_for(fake.left.wait(), 5)
        assert engine.health().running == 0


async def test_no_more_than_max_concurrent_run_there(text: TextModel, fake: FakeUpstream) -> None:
    """The others wait here; all are answered."""
    for _ in range(5):
        fake.script.append(say(size=20, pause_s=0.02))
    most = 0
    async with engine_on(fake, max_concurrent=2) as engine:
        scheduler = scheduler_on(text, engine)
        streams = [scheduler.submit(asked(id=str(i))) for i in range(5)]
        reading = asyncio.gather(*(read(s) for s in streams))
        while not reading.done():
            most = max(most, fake.busy)
            await asyncio.sleep(0.005)
    assert {shown for shown, _ in await reading} == {REFERENCE}
    assert most == 2


async def test_a_split_surrogate_pair_becomes_one_character(
    text: TextModel, fake: FakeUpstream
) -> None:
    """Some servers cut an emoji between two events."""
    halves = (
        b'data: {"choices":[{"delta":{"content":"a\\ud83d"}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"\\ude42b"}}]}\r\n\r\n'
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    fake.script.append(send(HEAD + halves))
    async with engine_on(fake) as engine:
        shown, finish = await read(scheduler_on(text, engine).submit(asked()))
    assert (shown, finish.reason) == ("a🙂b", "stop")


async def test_usage_that_never_comes_is_counted_here(text: TextModel, fake: FakeUpstream) -> None:
    """Servers without stream_options: our tokenizer counts."""
    fake.script.append(say(usage=False, finish="length"))
    async with engine_on(fake) as engine:
        _, finish = await read(scheduler_on(text, engine).submit(asked()))
    assert finish.reason == "length"
    assert finish.usage.completion_tokens == len(REFERENCE.encode())


async def test_a_server_that_ignores_max_tokens_is_cut_off(
    text: TextModel, fake: FakeUpstream
) -> None:
    """An endless answer ends as `length`, in bounded memory."""

    async def endless(fake: FakeUpstream, writer: asyncio.StreamWriter, body: Any) -> None:
        writer.write(HEAD)
        while True:
            writer.write(b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % (b"x" * 500))
            await writer.drain()

    fake.script.append(endless)
    async with engine_on(fake) as engine:
        shown, finish = await read(scheduler_on(text, engine).submit(asked(max_tokens=10)))
    assert finish.reason == "length"
    assert len(shown) < 200_000


# --- faults ----------------------------------------------------------------------------------

BIG = b"data: " + b"x" * (1 << 20) + b"y"
FAULTS: list[tuple[str, Answer, str]] = [
    ("cut", say(most=10), "cut the answer"),
    ("cut before the first byte", send(b""), "cannot be reached"),
    ("no http", send(b"hello\r\n\r\n"), "cannot be reached"),
    ("garbage", send(HEAD + b"data: {]\n\n", hang=True), "no chunk of an answer"),
    ("a list", send(HEAD + b"data: [1]\n\n", hang=True), "no chunk of an answer"),
    ("deep", send(HEAD + b"data: " + b"[" * 90_000 + b"\n\n", hang=True), "no chunk"),
    ("too much", send(HEAD + BIG, hang=True), "event of more than"),
    ("done too early", send(HEAD + b"data: [DONE]\n\n"), "without a reason"),
    (
        "error event",
        send(HEAD + b'data: {"error":{"message":"secret prompt","code":"out_of_memory"}}\n\n'),
        r"gave up in mid-answer \(out_of_memory\)",
    ),
    (
        "own reason",
        send(HEAD + b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n'),
        "reason of its own",
    ),
    ("no stream", refuse(200), "does not stream"),
    ("error 500", refuse(500, {"message": "secret prompt", "type": "server_error"}), "500"),
    ("redirect", refuse(307, location="http://127.0.0.1:1/"), "redirects"),
    ("key", refuse(401), "upstream.api_key_file"),
    ("never", hang(), "first token in time"),
    ("pings only", pings(), "cannot be reached"),
    ("only pings", send(HEAD + b": ping\n\n: ping\n\n", hang=True), "first token in time"),
    ("stalls", say(most=10, then=hang()), "next token in time"),
]


@pytest.mark.parametrize(("answer", "why"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
async def test_every_way_to_fail_has_a_name_and_another_engine_goes_on(
    text: TextModel, fake: FakeUpstream, answer: Answer, why: str
) -> None:
    """The stream continues elsewhere without losing or repeating a character; the log tells
    what happened and quotes neither prompt nor key."""
    fake.script.append(answer)
    async with fake_upstream() as spare, engine_on(fake, idle_timeout_s=0.4) as engine:
        engine._settings = engine._client.settings = Upstream(  # only now: starting may be slow
            url=fake.url, first_token_timeout_s=0.4, idle_timeout_s=0.4
        )
        async with engine_on(spare) as second:
            second.name = "spare"
            with capture_logs() as logs:
                stream = scheduler_on(text, engine, second).submit(asked())
                shown, finish = await read(stream)

    assert (shown, finish.reason) == (REFERENCE, "stop")
    assert [s.name for s in finish.engines] == ["openai", "spare"]
    assert finish.engines[1].reason == "engine_fault"
    begun = finish.engines[0].to_token > 0
    assert finish.engines[1].approximate == begun
    told = [str(line) for line in logs]
    assert any(_found(why, line) for line in told), told
    assert not any("secret prompt" in line for line in told)


def _found(why: str, line: str) -> bool:
    import re

    return re.search(why, line) is not None


async def test_log_probabilities_that_do_not_come_are_no_silent_loss(
    text: TextModel, fake: FakeUpstream
) -> None:
    """A server that ignores the wish does not serve it: the stream fails or moves on."""
    async with engine_on(fake) as engine:
        stream = scheduler_on(text, engine).submit(asked(sampling=Sampling(logprobs=1)))
        shown, finish = await read(stream)
        assert (shown, finish.error_code) == ("", "row_fault")
        assert "no log probabilities" in (finish.error_message or "")
        assert engine.health().state == "ready"


async def test_a_failing_server_is_not_asked_again_at_once(
    text: TextModel, fake: FakeUpstream
) -> None:
    """After a fault it pauses, though its proof is good; then it serves again by itself."""
    fake.script.append(refuse(500))
    async with engine_on(fake) as engine:
        scheduler = scheduler_on(text, engine)
        _, finish = await read(scheduler.submit(asked()))
        assert (finish.reason, finish.error_code) == ("failed", "engine_fault")
        assert (engine.health().state, engine.capacity()) == ("failed", 0)
        shown, _ = await read(scheduler.submit(asked()))  # waits for the end of the pause
        assert shown == REFERENCE
        assert engine.health().state == "ready"


async def test_a_refused_request_is_that_requests_trouble(
    text: TextModel, fake: FakeUpstream
) -> None:
    """400 is a row fault: the engine stays, the neighbours too."""
    fake.script.append(refuse(400, {"message": "secret prompt", "code": "bad_word"}))
    async with engine_on(fake) as engine:
        scheduler = scheduler_on(text, engine)
        _, finish = await read(scheduler.submit(asked()))
        assert finish.error_code == "row_fault"
        assert "400 (bad_word)" in (finish.error_message or "")
        assert "secret" not in (finish.error_message or "")
        assert (await read(scheduler.submit(asked())))[0] == REFERENCE


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_gets_its_pause_and_the_stream_waits(
    text: TextModel, fake: FakeUpstream, status: int
) -> None:
    """Retry-After is kept: nobody asks before, the waiting stream is served after it."""
    fake.script.append(refuse(status, retry_after="0.4"))
    async with engine_on(fake) as engine:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        stream = scheduler_on(text, engine).submit(asked())
        await until(lambda: engine.capacity() == 0 and fake.busy == 0 and len(fake.asked) == 1)
        assert engine.health().state == "starting"
        shown, finish = await read(stream)

    assert shown == REFERENCE
    assert loop.time() - begun_s >= 0.4
    assert [(s.name, s.reason) for s in finish.engines] == [("openai", "first")]


@pytest.mark.parametrize(("retry_after", "short"), [("5", True), ("300", False)])
async def test_a_short_pause_of_a_living_server_is_no_outage(
    text: TextModel, fake: FakeUpstream, retry_after: str, short: bool
) -> None:
    """A node whose server is busy for a moment stays normal and ready, whatever else it has; a
    long pause is degraded, and says why."""
    fake.script.append(refuse(429, retry_after=retry_after))
    async with engine_on(fake) as engine:
        scheduler = scheduler_on(text, engine)
        stream = scheduler.submit(asked())
        await until(lambda: engine.health().state == "starting")
        health, load = engine.health(), scheduler.load()
        status = status_of("n", load, [("openai", health)], asyncio.get_running_loop().time())
        assert (status.mode, status.ready) == (("normal", True) if short else ("degraded", False))
        assert "asked for a pause" in health.detail
        assert ("asked for a pause" in status.reason) != short
        assert all(passed for _, passed, _ in readiness(status, False)) == short
        await stream.aclose()


async def test_a_failing_server_is_no_pause(text: TextModel, fake: FakeUpstream) -> None:
    """What it did not ask for is an outage, however short."""
    fake.script.append(refuse(500))
    async with engine_on(fake) as engine:
        await read(scheduler_on(text, engine).submit(asked()))
        assert (engine.health().state, engine.health().pauses) == ("failed", False)


async def test_a_server_that_names_no_pause_is_not_asked_without_end(
    text: TextModel, fake: FakeUpstream
) -> None:
    """Retry-After: 0 is no invitation to ask a hundred times a second until the stream is lost."""
    fake.script += [refuse(429, retry_after="0")] * 40
    async with engine_on(fake) as engine:
        stream = scheduler_on(text, engine).submit(asked())
        await until(lambda: len(fake.asked) == 1)
        await asyncio.sleep(0.3)
        assert len(fake.asked) <= 2
        assert stream.finish is None
        await stream.aclose()


async def test_a_stream_goes_elsewhere_rather_than_wait_for_a_busy_server(
    text: TextModel, fake: FakeUpstream
) -> None:
    """With another engine at hand a 429 costs no time and leaves no trace."""
    fake.script.append(refuse(429, retry_after="300"))
    async with fake_upstream() as spare, engine_on(fake) as engine, engine_on(spare) as second:
        second.name = "spare"
        scheduler = scheduler_on(text, engine, second)
        results = [await read(scheduler.submit(asked())) for _ in range(2)]

    assert [f.engines[0].name for _, f in results] == ["spare", "spare"]
    assert len(fake.asked) == 1


async def test_stopping_ends_what_still_runs(text: TextModel, fake: FakeUpstream) -> None:
    """No connection outlives the engine."""
    fake.script.append(say(size=1, pause_s=0.05))
    async with engine_on(fake) as engine:
        stream = scheduler_on(text, engine).submit(asked())
        await stream.__anext__()
    await asyncio.wait_for(fake.left.wait(), 5)
    assert engine.health().running == 0
    await stream.aclose()


async def test_limits_hold_for_a_server_on_the_same_board_only(fake: FakeUpstream) -> None:
    """It heats the chip too; one elsewhere does not."""
    async with engine_on(fake, on_board=True) as here, engine_on(fake) as there:
        for engine in (here, there):
            engine.set_limits(Limits(max_batch=2))
        assert (here.capacity(), there.capacity()) == (2, 8)
        for engine in (here, there):
            engine.set_limits(Limits(max_batch=2, admit=False))
        assert (here.capacity(), there.capacity()) == (0, 8)
        assert (here.health().admits, there.health().admits) == (False, True)


# --- TLS ---


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl tool")
async def test_https_is_trusted_by_its_certificate_only(text: TextModel, tmp_path: Path) -> None:
    """An unknown certificate is a fault that names the key; ca_file or verify_tls mend it."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(cert)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    async with fake_upstream(tls) as fake:
        with pytest.raises(EngineFault, match=r"certificate.*upstream\.ca_file"):
            async with engine_on(fake):
                pass
        for trust in ({"ca_file": str(cert)}, {"verify_tls": False}):
            async with engine_on(fake, **trust) as engine:
                shown, _ = await read(scheduler_on(text, engine).submit(asked()))
                assert shown == REFERENCE


# --- the key ---------------------------------------------------------------------------------


async def test_the_key_goes_to_the_server_and_nowhere_else(
    text: TextModel, fake: FakeUpstream, tmp_path: Path
) -> None:
    """Sent with every request; in no log line, repr or message."""
    (tmp_path / "upstream-key").write_text("s3cr3t-key\n")
    fake.script.append(refuse(500))
    with capture_logs() as logs:
        upstream = Upstream(url=fake.url, api_key_file="upstream-key")
        dial = dial_of(upstream, {"CREDENTIALS_DIRECTORY": str(tmp_path)})
        engine = UpstreamEngine(upstream, dial)
        await engine.start()
        _, finish = await read(scheduler_on(text, engine).submit(asked(sampling=Sampling())))
        await engine.stop()

    assert all(h["authorization"] == "Bearer s3cr3t-key" for h in fake.headers)
    assert all(h["x-edged-forwarded"] == "1" for h in fake.headers)
    assert fake.headers
    shown = f"{logs} {dial!r} {engine.health()} {finish}"
    assert "s3cr3t" not in shown


async def test_a_stream_taken_off_is_moved_once(text: TextModel, fake: FakeUpstream) -> None:
    """Evicted in mid-answer it goes on elsewhere; its old reader does nothing more to it."""
    for _ in range(8):
        fake.script.append(say(size=1, pause_s=0.005))
    async with fake_upstream() as spare, engine_on(fake) as engine, engine_on(spare) as second:
        second.name = "spare"
        scheduler = scheduler_on(text, engine, second)
        streams = [scheduler.submit(asked(id=str(i))) for i in range(8)]
        reading = asyncio.gather(*(read(s) for s in streams))
        await asyncio.sleep(0.1)
        scheduler.evict({"openai"}, EngineFault("too hot"))
        results = await reading
        assert engine.health().running == 0

    assert {(shown, f.reason) for shown, f in results} == {(REFERENCE, "stop")}
    assert all([s.name for s in f.engines] == ["openai", "spare"] for _, f in results)


async def test_nothing_leaks_when_clients_come_and_go(text: TextModel, fake: FakeUpstream) -> None:
    """A hundred streams left at any moment: no slot, task or connection stays behind."""
    for number in range(100):
        fake.script.append(say(size=1 + number % 7, pause_s=0.002 * (number % 3)))
    async with engine_on(fake, max_concurrent=4) as engine:
        scheduler = Scheduler((engine,), {"tiny": text}, Queue(200, 10**6, 10.0))
        engine.on_change = scheduler.dispatch
        streams = [scheduler.submit(asked(id=str(i))) for i in range(100)]
        for number, stream in enumerate(streams):
            if number % 3 == 0:
                await asyncio.sleep(0.004)
                await stream.aclose()
        results = [await read(stream) for stream in streams]
        await until(lambda: engine.capacity() == 4)
        assert scheduler.load().running == scheduler.load().waiting == 0
        await until(lambda: fake.busy == 0)
    kept = [f.reason for number, (_, f) in enumerate(results) if number % 3]
    assert set(kept) == {"stop"}
