"""First light: the real daemon, the real model, real clients, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from broker import Broker, broker, tool
from daemon import Daemon, daemon
from reference import exported

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def mosquitto() -> Iterator[Broker]:
    with broker() as running:
        yield running


@pytest.fixture(scope="module")
def served(mosquitto: Broker) -> Iterator[Daemon]:
    """One daemon for the tests that leave it alive."""
    with daemon(f"mqtt.url={mosquitto.url}") as running:
        yield running


@pytest.fixture
def client(served: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert condition()


def test_the_openai_client_streams_a_chat(client: openai.OpenAI) -> None:
    """A chat streams in pieces through the official client, with usage and a finish reason."""
    stream = client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=QUESTION,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=24,
        temperature=0,
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    assert len(text) > 20
    assert len(chunks) > 10
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_a_plain_answer_equals_the_streamed_one(client: openai.OpenAI) -> None:
    """Streaming or not, the same greedy request gives the same text."""
    asked = {"model": "", "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    plain = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    chunks = client.chat.completions.create(stream=True, **asked)  # type: ignore[call-overload]
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks)

    assert plain.choices[0].message.content == streamed
    assert plain.model_extra["edged"]["engines"][0]["name"] == "cpu"


def test_the_same_seed_gives_the_same_text(client: openai.OpenAI) -> None:
    """Sampling is reproducible by seed and differs between seeds."""
    texts = [
        client.completions.create(
            model="", prompt="Once upon a time", max_tokens=24, temperature=1.0, seed=seed
        )
        .choices[0]
        .text
        for seed in (1, 1, 2)
    ]

    assert texts[0] == texts[1] != texts[2]


def test_the_unix_socket_serves_too(served: Daemon) -> None:
    """The API answers on its Unix socket, which others cannot open."""
    assert served.socket.stat().st_mode & 0o007 == 0
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(served.socket))
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b"SmolLM2-135M-Instruct" in answer


async def test_mqtt_3_clients_get_their_answer(served: Daemon, mosquitto: Broker) -> None:
    """mosquitto_pub and mosquitto_sub (3.1.1): a JSON request is answered on the default topic."""
    sub = asyncio.create_task(
        tool(
            *("mosquitto_sub", "-p", str(mosquitto.port), "-V", "mqttv311"),
            *("-t", "edged/v1/test/res/q1", "-C", "1", "-W", "60"),
            within_s=70,
        )
    )
    await asyncio.sleep(1)
    body = json.dumps({"id": "q1", "prompt": "Paris is", "max_tokens": 8, "ignore_eos": True})
    await tool(
        *("mosquitto_pub", "-p", str(mosquitto.port), "-V", "mqttv311", "-q", "1"),
        *("-t", "edged/v1/test/req/generate", "-m", body),
    )
    answer = json.loads(await sub)

    assert (answer["type"], answer["id"]) == ("final", "q1")
    assert answer["usage"]["completion_tokens"] == 8


async def test_mqtt_5_request_response(served: Daemon, mosquitto: Broker) -> None:
    """mosquitto_rr, which reads exactly one reply, gets the whole answer."""
    body = json.dumps({"messages": QUESTION, "max_tokens": 8})
    answer = json.loads(
        await tool(
            *("mosquitto_rr", "-p", str(mosquitto.port), "-V", "5", "-q", "1", "-W", "60"),
            *("-t", "edged/v1/test/req/chat", "-e", "edged/v1/reply/me/1", "-m", body),
            within_s=70,
        )
    )
    assert answer["type"] == "final"
    assert answer["text"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(served: Daemon, stream: bool) -> None:
    """Closing the connection in mid-answer ends the work, streaming or not."""
    body = {"messages": QUESTION, "max_tokens": 5000, "ignore_eos": True, "stream": stream}
    sock = post(served, body)
    until(lambda: served.slots_busy() == 1)
    sock.close()
    until(lambda: served.running() == served.slots_busy() == 0, within_s=5)
    steps = served.steps("decode")
    time.sleep(0.5)
    assert served.steps("decode") == steps


def test_a_client_that_leaves_in_a_long_prefill_frees_its_slot(served: Daemon) -> None:
    """Leaving in the middle of a 6,000-token prefill costs at most the chunk under way."""
    before = served.steps("prefill")
    sock = post(served, {"prompt": "word " * 6000, "max_tokens": 5}, "/v1/completions")
    until(lambda: served.steps("prefill") > before)
    sock.close()
    until(lambda: served.running() == 0, within_s=5)
    left = served.steps("prefill")
    until(lambda: served.slots_busy() == 0)
    assert served.steps("prefill") <= left + 1
    assert left - before < 15  # of 24 chunks: it was in the middle
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as after:
        assert after.completions.create(model="", prompt="Hi", max_tokens=2, timeout=60)


def post(served: Daemon, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
    payload = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    return sock


def test_killing_the_worker_ends_the_stream_and_the_next_request_succeeds(served: Daemon) -> None:
    """kill -9 of the worker in mid-stream: that stream ends `failed`, the next one is served."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as api:
        stream = api.completions.create(
            model="", prompt="Once", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        served.workers()[0].send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIError) as failed:
            list(stream)
        assert failed.value.code == "engine_fault"

        answer = api.completions.create(
            model="", prompt="Once", max_tokens=4, timeout=120, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
    assert served.get("/edged/v1/status")["engines"][0]["restarts"] == 1


def test_sigterm_lets_a_running_answer_end_and_leaves_nothing() -> None:
    """SIGTERM drains: the answer under way completes, exit 0, no worker and no socket file."""
    with daemon() as running:
        workers = running.workers()
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as api:
            stream = iter(
                api.completions.create(
                    model="",
                    prompt="Once",
                    max_tokens=60,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
            )
            next(stream)
            running.process.send_signal(signal.SIGTERM)
            chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert running.process.wait(30) == 0
        assert not running.socket.exists()
        assert not any(worker.is_running() for worker in workers)


def test_a_second_signal_forces_the_end() -> None:
    """While draining, a second SIGINT ends what runs at once; the stream hears shutting_down."""
    with daemon("drain_timeout_s=300") as running:
        heard: list[str] = []

        def listen() -> None:
            with openai.OpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0) as api:
                try:
                    for _ in api.completions.create(
                        model="",
                        prompt="Once",
                        max_tokens=7000,
                        stream=True,
                        extra_body={"ignore_eos": True},
                    ):
                        pass
                except openai.APIError as error:
                    heard.append(str(error.code))

        listener = threading.Thread(target=listen)
        listener.start()
        until(lambda: running.running() == 1)
        running.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert running.process.poll() is None
        assert running.stop(signal.SIGINT, within_s=20) == 0
        listener.join(10)
        assert heard == ["shutting_down"]


def test_a_stop_during_the_start_is_a_clean_stop() -> None:
    """SIGTERM while the worker loads: exit 0 at once, and nobody is told that it is ready."""
    starting = Daemon()
    try:
        until(lambda: bool(starting.workers()))
        assert starting.stop(within_s=20) == 0
        assert "edged is ready" not in starting.log
        assert '"event": "ready"' not in starting.log
        assert not starting.workers()
    finally:
        starting.close()


def test_output_that_nobody_takes_does_not_stop_the_daemon() -> None:
    """A full disk behind stdout and a closed stderr: it starts, answers and ends with 0."""
    with daemon(redirect=">/dev/full 2>&- <&-") as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as api:
            assert api.completions.create(model="", prompt="Hi", max_tokens=2)
        assert running.stop() == 0


def test_modules_where_it_is_started_are_not_imported(tmp_path: Path) -> None:
    """A numpy.py in the folder somebody starts it from is not the worker's NumPy."""
    (tmp_path / "numpy.py").write_text("raise SystemExit(9)", encoding="utf-8")
    made = Daemon("state_dir=state", f"model.path={exported('auto')}", cwd=tmp_path)
    try:
        made.wait_ready()
    finally:
        made.close()


def test_two_daemons_do_not_take_each_others_socket() -> None:
    """A second daemon on the Unix socket of a living one is refused; the first goes on."""
    with daemon() as first:
        second = Daemon(f"http.unix_socket={first.socket}")
        try:
            assert second.process.wait(60) == 1
            assert str(first.socket) in second.log.splitlines()[-1]
        finally:
            second.close()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(first.socket))
        assert first.stop() == 0


def test_a_killed_daemon_leaves_no_worker() -> None:
    """kill -9 of the daemon takes its worker along."""
    with daemon() as running:
        workers = running.workers()
        assert workers
        running.process.kill()
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive


def test_systemd_hears_ready_watchdog_and_stopping(tmp_path: Path) -> None:
    """READY comes once requests are served, WATCHDOG keeps coming, STOPPING comes on SIGTERM."""
    address = tmp_path / "notify"
    said: list[str] = []
    served_then: list[Any] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(address))

        def listen() -> None:
            for message in iter(lambda: notify.recv(4096), b"end"):
                said.append(message.decode())
                if message == b"READY=1":
                    served_then.append(running.get("/readyz"))

        reader = threading.Thread(target=listen)
        environ = {"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "1000000"}
        running = Daemon(environ=environ)
        reader.start()
        try:
            running.wait_ready()
            time.sleep(1.5)
            assert running.stop() == 0
        finally:
            running.close()
        notify.sendto(b"end", str(address))
        reader.join(10)
    order = [line for line in said if line.split("=")[0] in ("READY", "STOPPING")]
    assert order == ["READY=1", "STOPPING=1"]
    assert len(served_then) == 1  # /readyz said 200 at that moment, or get() had raised
    assert sum("WATCHDOG=1" in line for line in said) >= 2
    assert any(line.startswith("STATUS=normal") for line in said)


@pytest.mark.parametrize(
    ("sets", "code", "words"),
    [
        (("http.prot=1",), 78, "http.port"),
        (("model.path=/nowhere.gguf",), 78, "/nowhere.gguf"),
        (("engines.chain=['npu']",), 78, "npu.model"),
        (("engines.chain=['npu']", "npu.model=NO_OM"), 75, "model.om"),
        (("engines.chain=['cpu','npu']", "npu.model=NO_OM", "npu.required=true"), 75, "npu.req"),
    ],
)
def test_exit_codes_tell_configuration_from_engines(
    sets: tuple[str, ...], code: int, words: str
) -> None:
    """78 for a bad configuration, 75 when no engine can start; the message names the cause."""
    command = [sys.executable, "-m", "edged", "run", "--set", "http.port=0"]
    for item in (*sets, "http.unix_socket="):
        command += ["--set", item.replace("NO_OM", str(exported("auto")))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)

    assert done.returncode == code, done.stderr
    assert words in done.stderr.splitlines()[-1]


def test_an_engine_that_cannot_start_leaves_the_node_degraded() -> None:
    """With a second engine in the chain the node serves, says degraded, and keeps trying."""
    with daemon("engines.chain=['npu','cpu']", f"npu.model={exported('auto')}") as running:
        until(lambda: running.get("/edged/v1/status")["engines"][0]["restarts"] >= 1)
        status = running.get("/edged/v1/status")
        assert status["mode"] == "degraded"
        assert "npu" in status["reason"]
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0) as api:
            assert api.completions.create(model="", prompt="Hi", max_tokens=2)
