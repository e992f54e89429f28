"""The whole NPU path in the daemon, on the twin, with the real model and real tokens."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from broker import Broker, broker, tool
from daemon import Daemon, daemon

pytestmark = pytest.mark.model

TWIN = ("engines.chain=['npu','cpu']", "npu.twin=310b4", "npu.context_gears=[512]")


@pytest.fixture(scope="module")
def mosquitto() -> Iterator[Broker]:
    with broker() as running:
        yield running


@pytest.fixture(scope="module")
def served(mosquitto: Broker) -> Iterator[Daemon]:
    with daemon(*TWIN, "npu.dtype=fp32", f"mqtt.url={mosquitto.url}") as running:
        wait_for_npu(running)
        yield running


def wait_for_npu(running: Daemon, within_s: float = 120.0) -> None:
    """READY comes with the first engine of the chain that can serve; here the NPU is wanted."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if running.get("/edged/v1/status")["engines"][0]["state"] == "ready":
            return
        time.sleep(0.2)
    raise AssertionError(running.log)


def metric(running: Daemon, name: str) -> float:
    lines = running.get("/metrics").splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(name + " ")))


def test_the_npu_path_answers_over_http_and_counts_on_the_twin(served: Daemon) -> None:
    """Export, .om, pyACL worker, batching: the NPU writes, its twin tells heat, time and memory."""
    device_s = metric(served, "edged_npu_device_time_seconds_total")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0) as api:
        answer = api.completions.create(model="", prompt="The sky is", max_tokens=8, temperature=0)

    assert [e["name"] for e in answer.model_extra["edged"]["engines"]] == ["npu"]
    assert metric(served, "edged_npu_device_time_seconds_total") > device_s
    assert metric(served, "edged_npu_allocations_total") >= 1
    assert 20 < metric(served, "edged_npu_temperature_celsius") < 110


def test_requests_allocate_nothing_on_the_device(served: Daemon) -> None:
    """After warm-up the twin counts no allocation, whatever the prompts' lengths."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0) as api:
        api.completions.create(model="", prompt="Hi", max_tokens=2)
        before = metric(served, "edged_npu_allocations_total")
        for words in (1, 90, 300):
            api.completions.create(model="", prompt="word " * words, max_tokens=3)

    assert metric(served, "edged_npu_allocations_total") == before


async def test_mqtt_is_answered_by_the_npu(served: Daemon, mosquitto: Broker) -> None:
    """A v5 request through the broker comes back with the NPU named."""
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 4})
    answer = json.loads(
        await tool(
            *("mosquitto_rr", "-p", str(mosquitto.port), "-V", "5", "-q", "1", "-W", "60"),
            *("-t", "edged/v1/test/req/generate", "-e", "edged/v1/reply/me/1", "-m", body),
            within_s=70,
        )
    )
    assert (answer["type"], answer["engines"][0]["name"]) == ("final", "npu")


def test_a_stream_goes_on_with_the_cpu_when_the_npus_worker_dies(served: Daemon) -> None:
    """kill -9 of the NPU worker in mid-stream: the CPU writes the rest and the reply says so."""
    npu = next(w for w in served.workers() if "npu" in w.cmdline())
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0) as api:
        stream = api.completions.create(
            model="", prompt="Once", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(iter(stream))]
        npu.send_signal(signal.SIGKILL)
        chunks += list(stream)

    engines = chunks[-1].model_extra["edged"]["engines"]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert [e["name"] for e in engines] == ["npu", "cpu"]
    assert engines[0]["to_token"] == engines[1]["from_token"] > 0
    assert engines[1]["to_token"] == 60
    assert served.get("/edged/v1/status")["moved_streams_total"] == 1
    assert 'edged_stream_moves_total{from="npu",reason="engine_fault",to="cpu"} 1.0' in served.get(
        "/metrics"
    )
    wait_for_npu(served)


def test_an_ep_card_serves_too() -> None:
    """On a board whose memory the host cannot see the same model answers the same."""
    ep = ("engines.chain=['npu']", "npu.twin=310p3", "npu.context_gears=[512]")
    with (
        daemon(*ep, "npu.dtype=fp32") as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0) as api,
    ):
        answer = api.completions.create(model="", prompt="The sky is", max_tokens=8, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8


def test_the_twin_survives_the_daemon(tmp_path: Path) -> None:
    """A board is as hot after a restart as it was left: its state is a file."""
    from edged.twin.figures import board_at

    first = board_at(tmp_path, "field")
    first.set_temperature(time.monotonic(), 77.0)
    first.close()
    again = board_at(tmp_path, "field")
    assert again.sample(time.monotonic()).temperature_c > 60
    again.close()
    other = board_at(tmp_path, "310b4")
    assert other.board.name != again.board.name
    other.close()
