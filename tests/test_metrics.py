"""What is counted, and that it reads as Prometheus text."""

from __future__ import annotations

import dataclasses
import math

import pytest
from fakes_http import READY
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from edged.core import Finish, Health, Request, Timings, Usage
from edged.metrics import Histogram, Metrics
from edged.scheduler import Load
from edged.status import Status, status_json, status_of
from edged.wire import Report

REQUEST = Request("r", "tiny", (1, 2, 3), 5)


def samples(metrics: Metrics, status: Status = READY) -> dict[tuple[str, ...], float]:
    """(name, label values sorted by label ...) -> value, read back by Prometheus' own parser."""
    text = metrics.exposition(status).decode()
    return {
        (s.name, *(v for _, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def finish(reason: str = "stop", first_token_s: float | None = 0.03) -> Finish:
    timings = Timings(0.4, first_token_s, 1.7)
    return Finish(reason, Usage(3, 10, 2), (), timings)  # type: ignore[arg-type]


def test_a_finish_is_counted_once_everywhere() -> None:
    """Tokens, reasons and the four latencies come from one event."""
    metrics = Metrics("node-1", "tiny")
    metrics.on_finish(REQUEST, finish())
    metrics.on_finish(REQUEST, finish("failed", first_token_s=None))
    seen = samples(metrics)

    assert seen["edged_finished_total", "stop"] == seen["edged_finished_total", "failed"] == 1
    assert seen["edged_prompt_tokens_total",] == 6
    assert seen["edged_generation_tokens_total",] == 20
    assert seen["edged_cached_tokens_total",] == 4
    assert seen["edged_time_to_first_token_seconds_count",] == 1
    assert seen["edged_time_to_first_token_seconds_bucket", "0.04"] == 1
    assert seen["edged_time_to_first_token_seconds_bucket", "0.02"] == 0
    assert seen["edged_e2e_request_latency_seconds_sum",] == pytest.approx(3.4)
    assert seen["edged_request_queue_time_seconds_count",] == 2


def test_refusals_and_answers_are_counted_by_their_code() -> None:
    """rejected counts admission's refusals, requests what clients were answered."""
    metrics = Metrics("node-1", "tiny")
    metrics.on_refuse(REQUEST, "queue_full")
    metrics.answered("http", "/v1/models", 200)
    metrics.cancelled.add("disconnect")
    metrics.mqtt_dropped.add("retained")
    seen = samples(metrics)

    assert seen["edged_rejected_total", "queue_full"] == 1
    assert seen["edged_requests_total", "200", "http", "/v1/models"] == 1
    assert seen["edged_cancelled_total", "disconnect"] == 1
    assert seen["edged_mqtt_dropped_total", "retained"] == 1


def test_steps_are_timed_by_engine_and_kind() -> None:
    """A report of mere ends is no step."""
    metrics = Metrics("node-1", "tiny")
    for kind, step_s in (("prefill", 0.2), ("decode", 0.03), ("decode", 0.04), ("none", 9.0)):
        metrics.on_report("cpu", Report([], kind, 1, 1, 256, step_s, 7, 0.0))
    seen = samples(metrics)

    assert seen["edged_engine_step_seconds_count", "cpu", "decode"] == 2
    assert seen["edged_engine_step_seconds_sum", "cpu", "prefill"] == pytest.approx(0.2)
    assert ("edged_engine_step_seconds_count", "cpu", "none") not in seen


def test_the_pace_of_a_stream_is_per_token() -> None:
    """Tokens that arrive together share the gap before them; the first has none."""
    metrics = Metrics("node-1", "tiny")
    pace = metrics.pace()
    for now_s, tokens in ((10.0, 1), (10.4, 4), (10.45, 0), (10.6, 1)):
        pace.tick(now_s, tokens)
    seen = samples(metrics)

    assert seen["edged_inter_token_latency_seconds_count",] == 5
    assert seen["edged_inter_token_latency_seconds_sum",] == pytest.approx(0.6)
    assert seen["edged_inter_token_latency_seconds_bucket", "0.15"] == 4


def test_states_are_those_of_the_moment() -> None:
    """Mode, engines and queue are read when asked, each as one series of ones and zeros."""
    metrics = Metrics("node-1", "tiny")
    metrics.mqtt_connected = True
    engines = (("npu", Health("failed", restarts=3)), ("cpu", Health("ready", running=3, slots=8)))
    status = dataclasses.replace(READY, mode="degraded", engines=engines, running=3, waiting=2)
    seen = samples(metrics, status)

    assert seen["edged_mode", "degraded"] == 1 and seen["edged_mode", "normal"] == 0
    assert seen["edged_engine_state", "npu", "failed"] == 1
    assert seen["edged_engine_state", "npu", "ready"] == 0
    assert seen["edged_engine_restarts_total", "npu"] == 3
    assert seen["edged_engine_free_slots", "cpu"] == 5
    assert seen["edged_requests_running",] == 3 and seen["edged_requests_waiting",] == 2
    assert seen["edged_mqtt_connected",] == 1
    assert any(key[0] == "edged_build_info" and "node-1" in key for key in seen)


def test_every_promised_name_is_there_from_the_start() -> None:
    """Dashboards find their series before the first request."""
    names = {key[0] for key in samples(Metrics("node-1", "tiny"))}

    assert {
        "edged_requests_running",
        "edged_requests_waiting",
        "edged_time_to_first_token_seconds_count",
        "edged_inter_token_latency_seconds_count",
        "edged_e2e_request_latency_seconds_count",
        "edged_request_queue_time_seconds_count",
        "edged_prompt_tokens_total",
        "edged_generation_tokens_total",
        "edged_mode",
        "edged_mqtt_connected",
        "edged_mqtt_reconnects_total",
        "edged_build_info",
    } <= names


@settings(deadline=None, max_examples=100)
@given(
    values=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=30),
    bounds=st.lists(st.floats(0.001, 50), min_size=1, max_size=8, unique=True).map(sorted),
)
def test_a_histogram_counts_every_observation_once(
    values: list[tuple[float, int]], bounds: list[float]
) -> None:
    """Buckets are cumulative: each holds the observations not above its bound."""
    histogram = Histogram("h", "text", bounds)
    for value, count in values:
        histogram.observe(value, count=count)
    shown = {s.labels.get("le"): s.value for s in histogram.family().samples if "bucket" in s.name}

    for bound in [*bounds, math.inf]:
        label = "+Inf" if bound == math.inf else str(bound)
        assert shown[label] == sum(count for value, count in values if value <= bound)


# --- status -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draining", "states", "mode", "ready", "word"),
    [
        (False, ("ready",), "normal", True, "ready"),
        (False, ("ready", "ready"), "normal", True, "ready"),
        (False, ("failed", "ready"), "degraded", True, "e0 is failed"),
        (False, ("starting",), "degraded", False, "e0 is starting"),
        (False, ("failed", "off"), "fault", False, "e1 is off"),
        (True, ("ready",), "draining", False, "shutting down"),
    ],
)
def test_the_mode_follows_from_engines_and_draining(
    draining: bool, states: tuple[str, ...], mode: str, ready: bool, word: str
) -> None:
    """Ready needs one engine; normal needs all of them; draining overrides."""
    engines = tuple((f"e{i}", Health(state)) for i, state in enumerate(states))  # type: ignore[arg-type]
    status = status_of("n", Load(1, 2, 3.0, draining), engines, 100.0)

    assert (status.mode, status.ready) == (mode, ready) and word in status.reason
    assert (status.waiting, status.running, status.oldest_wait_s) == (1, 2, 3.0)


def test_progress_is_the_age_of_the_latest_step() -> None:
    """The most recent step of any engine counts; none yet is null, not zero."""
    engines = (("a", Health("ready", last_progress_s=90.0)), ("b", Health("ready")))
    status = status_of("n", Load(0, 0, 0.0, False), engines, 100.0)

    assert status.last_progress_s == 10.0 and status.oldest_wait_s is None
    assert status_json(status)["last_progress_s"] == 10.0
    assert status_of("n", Load(0, 0, 0.0, False), (), 1.0).last_progress_s is None
