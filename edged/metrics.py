"""Metrics: what the daemon counts, in one Prometheus registry of its own.

Counted in plain `def` on the event loop, without locks, cheap enough for every token; rendered
only when asked. Labels are from small closed sets: never a request id, a key or a client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from edged import __version__
from edged.core import MODES, Finish, Request
from edged.status import Status
from edged.wire import Report

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_STATES = ("off", "starting", "ready", "failed")

# The bounds of vLLM's histograms, so that its dashboards can be re-used.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


_JOULES_PER_TOKEN = "edged_guard_energy_joules_per_token"


class Counter:
    """Counts by label values, given in the order of `labels`."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._about = (name, text, None, tuple(labels))
        self._counts: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, by: float = 1.0) -> None:
        self._counts[labels] = self._counts.get(labels, 0.0) + by

    def total(self) -> float:
        """Over all labels."""
        return sum(self._counts.values())

    def family(self) -> Metric:
        name, text, _, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        return family


class Histogram:
    """Counts seconds by bounds and label values; one observation costs a bisection."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = tuple(bounds)
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not labels:
            self.observe(0.0, count=0)  # the series exists before its first observation

    def observe(self, value_s: float, *labels: str, count: int = 1) -> None:
        """count: how many observations of this one value."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, value_s)] += count
        self._sums[labels] += value_s * count

    def family(self) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [str(bound) for bound in self._bounds] + ["+Inf"]
        for values, counts in self._counts.items():
            total, buckets = 0, []
            for bound, count in zip(bounds, counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            family.add_metric(values, buckets, self._sums[values])
        return family


class Pace:
    """The time between the tokens of one stream, as its reader sees it."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._last_s: float | None = None

    def tick(self, now_s: float, tokens: int) -> None:
        """tokens arrived together: each is charged an equal share of the gap before them."""
        if tokens and self._last_s is not None:
            self._histogram.observe((now_s - self._last_s) / tokens, count=tokens)
        if tokens:
            self._last_s = now_s


class Metrics(Collector):
    """One per daemon; the methods named on_* are hooks for the scheduler and the engines."""

    def __init__(self, node: str, model: str) -> None:
        # Figures of the accelerator by metric name; counters end in _total.
        self.npu: Callable[[], Mapping[str, float]] = dict
        self._build = {"version": __version__, "node": node, "model": model}
        self._status: Status | None = None
        self.requests = Counter(
            "edged_requests", "Requests answered, by status code.", ("ingress", "route", "code")
        )
        self.rejected = Counter(
            "edged_rejected", "Requests refused at admission, by error code.", ("reason",)
        )
        self.cancelled = Counter(
            "edged_cancelled", "Requests given up by their client, by how.", ("reason",)
        )
        self.finish_reasons = Counter(
            "edged_finished", "Admitted requests ended, by finish reason.", ("reason",)
        )
        self.prompt_tokens = Counter("edged_prompt_tokens", "Prompt tokens of ended requests.")
        self.cached_tokens = Counter(
            "edged_cached_tokens", "Prompt tokens taken from a slot's cache."
        )
        self.generation_tokens = Counter("edged_generation_tokens", "Tokens generated.")
        self.ladder_moves = Counter(
            "edged_ladder_moves", "Launch configurations left, by why.", ("engine", "reason")
        )
        self.stream_moves = Counter(
            "edged_stream_moves", "Streams that went on elsewhere.", ("from", "to", "reason")
        )
        self.mqtt_reconnects = Counter("edged_mqtt_reconnects", "Connections to the broker lost.")
        self.mqtt_dropped = Counter(
            "edged_mqtt_dropped", "MQTT messages not served or not sent.", ("reason",)
        )
        self.dedupe_hits = Counter(
            "edged_dedupe_hits", "MQTT requests asked again and answered without a generation."
        )
        self.first_token = Histogram(
            "edged_time_to_first_token_seconds", "Admission to first token.", _FIRST_TOKEN_S
        )
        self.inter_token = Histogram(
            "edged_inter_token_latency_seconds", "Time between tokens.", _INTER_TOKEN_S
        )
        self.request_latency = Histogram(
            "edged_e2e_request_latency_seconds", "Admission to end.", _REQUEST_S
        )
        self.queue_time = Histogram(
            "edged_request_queue_time_seconds", "Admission to dispatch.", _REQUEST_S
        )
        self.steps = Histogram(
            "edged_engine_step_seconds", "One step of an engine.", _STEP_S, ("engine", "kind")
        )
        self.audit_violations = Counter(
            "edged_audit_violations", "What did not add up, by what it is about.", ("kind",)
        )
        self.loop_lag_s = 0.0  # of the last audit
        self.mqtt_connected = False
        self._kept = [v for v in vars(self).values() if isinstance(v, Counter | Histogram)]
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # --- hooks ----------------------------------------------------------------------------------

    def on_finish(self, request: Request, finish: Finish) -> None:
        """An admitted request has ended."""
        self.finish_reasons.add(finish.reason)
        self.prompt_tokens.add(by=finish.usage.prompt_tokens)
        self.cached_tokens.add(by=finish.usage.cached_tokens)
        self.generation_tokens.add(by=finish.usage.completion_tokens)
        self.request_latency.observe(finish.timings.total_s)
        if finish.timings.queue_s is not None:
            self.queue_time.observe(finish.timings.queue_s)
        if finish.timings.first_token_s is not None:
            self.first_token.observe(finish.timings.first_token_s)

    def on_refuse(self, request: Request, code: str) -> None:
        """A request was refused at admission, for a code of the error table."""
        self.rejected.add(code)

    def on_report(self, engine: str, report: Report) -> None:
        """An engine has done one step; reports of mere ends (kind "none") are not steps."""
        if report.kind != "none":
            self.steps.observe(report.step_s, engine, report.kind)

    # --- told by an ingress ---------------------------------------------------------------------

    def answered(self, ingress: str, route: str, code: int) -> None:
        self.requests.add(ingress, route, str(code))

    def pace(self) -> Pace:
        """For one stream: tick it at every Delta."""
        return Pace(self.inter_token)

    def tokens_per_request(self) -> float | None:
        """Generated, on average; None before the first request ended."""
        ended = self.finish_reasons.total()
        return self.generation_tokens.total() / ended if ended else None

    # --- asked by /metrics ----------------------------------------------------------------------

    def exposition(self, status: Status) -> bytes:
        """Prometheus text format 0.0.4 (CONTENT_TYPE). status: of this moment."""
        self._status = status
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        for kept in self._kept:
            yield kept.family()
        yield InfoMetricFamily("edged_build", "What runs here.", self._build)
        yield _gauge("edged_mqtt_connected", "1 while the broker is there.", self.mqtt_connected)
        yield _gauge("edged_loop_lag_seconds", "How late the last audit ran.", self.loop_lag_s)
        board = dict(self.npu())
        tokens, joules = self.tokens_per_request(), board.get(_JOULES_PER_TOKEN)
        if tokens is not None and joules is not None:
            board["edged_guard_energy_joules_per_request"] = joules * tokens
        for name, value in board.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            guard = name.startswith("edged_guard_")
            text = "Of the thermal guard." if guard else "Of the NPU, or of its twin."
            yield kind(name, text, value=value)
        if self._status is not None:
            yield from _states(self._status)


def _states(status: Status) -> Iterator[Metric]:
    """What is a state rather than a count."""
    yield _gauge("edged_requests_running", "Requests in an engine.", status.running)
    yield _gauge("edged_requests_waiting", "Requests in the queue.", status.waiting)
    yield _gauge("edged_ready", "1 while requests are admitted.", status.ready)
    mode = GaugeMetricFamily("edged_mode", "1 for the mode the node is in.", labels=("mode",))
    for name in MODES:
        mode.add_metric((name,), float(name == status.mode))
    yield mode
    yield from _engines(status)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _engines(status: Status) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "edged_engine_state", "1 for the state the engine is in.", labels=("engine", "state")
    )
    slots = GaugeMetricFamily("edged_engine_slots", "Slots of the engine.", labels=("engine",))
    free = GaugeMetricFamily("edged_engine_free_slots", "Slots free now.", labels=("engine",))
    restarts = CounterMetricFamily(
        "edged_engine_restarts", "Restarts of the engine's worker.", labels=("engine",)
    )
    rung = GaugeMetricFamily(
        "edged_engine_rung", "Launch configuration; 0 is the full one.", labels=("engine",)
    )
    for name, health in status.engines:
        rung.add_metric((name,), float(health.rung_number))
        for one in ENGINE_STATES:
            state.add_metric((name, one), float(one == health.state))
        slots.add_metric((name,), float(health.slots))
        free.add_metric((name,), float(max(0, health.slots - health.running)))
        restarts.add_metric((name,), float(health.restarts))
    yield from (state, slots, free, restarts, rung)
