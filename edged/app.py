"""Open this first: builds the parts, starts them in order, stops them in reverse.

Start: model, HTTP, engines (HTTP already answers health and `model_loading`), MQTT, READY.
Stop: refuse new requests, drain with a limit, MQTT offline, HTTP, engines, STOPPING told first.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from edged import chain as chains
from edged import thermal, wire
from edged.audit_facts import Sources
from edged.chain import Chain, make_chain
from edged.errors import Overheated
from edged.guard.loop import Guard
from edged.guard.view import view_figures
from edged.ingress.http import HttpServer
from edged.ingress.mqtt import MqttIngress
from edged.ingress.prepare import Catalog
from edged.manifest import shared_context_tokens
from edged.metrics import Metrics
from edged.queue import Queue
from edged.reboot import Rebooter
from edged.scheduler import Scheduler, Stream
from edged.settings import Config
from edged.status import Status, status_of
from edged.systemd import Notifier
from edged.text.model import TextModel
from edged.twin.figures import figures, free_bytes, running_board
from edged.twin.state import TwinState
from edged.watch import Watch, watching

log = structlog.get_logger("edged")


@dataclass
class StopSignal:
    """How a run is asked to end: asked once = drain with a limit, asked again = now."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    forced: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self) -> None:
        (self.forced if self.asked.is_set() else self.asked).set()


@dataclass(frozen=True)
class Parts:
    """What one daemon is made of."""

    text: TextModel
    chain: Chain
    scheduler: Scheduler
    metrics: Metrics
    http: HttpServer
    mqtt: MqttIngress | None
    guard: Guard | None
    watch: Watch
    rebooter: Rebooter
    status: Callable[[], Status]


async def run(
    config: Config,
    model_dirs: Mapping[str, Path],
    stop: StopSignal,
    notifier: Notifier,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until `stop` is asked. Raises EngineUnavailable when no engine can start.

    model_dirs: by engine name. on_ready: called once with the HTTP URL when requests are served.
    """
    async with AsyncExitStack() as stack:
        parts = build(config, model_dirs)
        await stack.enter_async_context(_running(parts.http))
        if parts.guard is not None:  # around the engines: no chip runs a moment without it
            await stack.enter_async_context(_running(parts.guard))
        stack.push_async_callback(parts.rebooter.stop)
        stack.push_async_callback(chains.stop, parts.chain)
        await stack.enter_async_context(watching(parts.watch, notifier, parts.status))
        await stack.enter_async_context(chains.overseen(parts.chain.overseer))
        await chains.start(config, parts.chain, stop.asked)
        if not stop.asked.is_set():
            if parts.mqtt is not None:
                await stack.enter_async_context(_running(parts.mqtt))
            notifier.ready()
            address = url(config.http.host, parts.http.port)
            log.info("ready", node=config.node, model=parts.text.name, url=address)
            on_ready(address)
        await stop.asked.wait()
        await _drain(config, parts, stop, notifier)
    log.info("stopped")


def build(config: Config, model_dirs: Mapping[str, Path]) -> Parts:
    """Make all parts; nothing runs yet. The wiring between them is all here."""
    text = TextModel.load(next(iter(model_dirs.values())), config.model.name)
    context_tokens = shared_context_tokens(model_dirs, config.model.context_tokens)
    catalog = Catalog([text], config.generation, context_tokens)
    twin = _twin(config)
    free = functools.partial(free_bytes, twin) if twin is not None else lambda: None
    chain = make_chain(config, text.name, model_dirs, context_tokens, twin_folder(config), free)
    metrics = Metrics(config.node, text.name)
    scheduler = _scheduler(config, text, chain, metrics)
    guard = _guard(config, model_dirs, twin, chain, scheduler)
    metrics.npu = _board_figures(config, twin, guard)
    chain.on_change(scheduler.dispatch)
    for worker in chain.workers:
        worker.on_move = functools.partial(metrics.ladder_moves.add, worker.name)
        worker.on_report = functools.partial(_on_report, metrics, guard, worker.name)
    rebooter = Rebooter(config.recover, Path(config.state_dir), lambda: scheduler.load().live)
    chain.overseer.covered = functools.partial(scheduler.covered, chain.workers[-1].name)
    chain.overseer.on_wedged = rebooter.look

    def status() -> Status:
        return status_of(
            config.node,
            scheduler.load(),
            chain.healths(),
            asyncio.get_running_loop().time(),
            guard.view() if guard is not None else None,
            watch.found,
            watch.withheld(),
        )

    http = HttpServer(config.http, config.node, scheduler, catalog, metrics, status)
    mqtt = None
    if config.mqtt.url:
        mqtt = MqttIngress(config.mqtt, config.node, scheduler, catalog, metrics, status)
    watch = Watch(_sources(scheduler, chain, http, mqtt, guard), metrics)
    return Parts(text, chain, scheduler, metrics, http, mqtt, guard, watch, rebooter, status)


def _scheduler(config: Config, text: TextModel, chain: Chain, metrics: Metrics) -> Scheduler:
    queue = config.queue
    return Scheduler(
        chain.links,
        {text.name: text},
        Queue[Stream](queue.max_requests, queue.max_tokens, queue.aging_s),
        on_finish=metrics.on_finish,
        on_refuse=metrics.on_refuse,
        on_leave=chain.overseer.need,
        on_move=metrics.stream_moves.add,
    )


def _guard(
    config: Config,
    model_dirs: Mapping[str, Path],
    twin: TwinState | None,
    chain: Chain,
    scheduler: Scheduler,
) -> Guard | None:
    """It never knows the scheduler: it gets what it may ask and what it may order."""
    if not thermal.wanted(config):
        return None
    too_hot = Overheated("the chip stayed above its critical temperature")
    return thermal.make_guard(
        config,
        model_dirs,
        twin,
        streams=chain.running,
        waiting=lambda: scheduler.load().waiting,
        set_limits=chain.set_limits,
        end_streams=lambda: scheduler.evict(chain.on_board, too_hot),
    )


def _sources(
    scheduler: Scheduler,
    chain: Chain,
    http: HttpServer,
    mqtt: MqttIngress | None,
    guard: Guard | None,
) -> Sources:
    """What the self-audit compares."""
    return Sources(
        scheduler=scheduler,
        links=chain.links,
        workers=chain.workers,
        upstream=chain.upstream,
        overseer=chain.overseer,
        connections=lambda: http.connections,
        jobs=lambda: mqtt.inflight if mqtt is not None else 0,
        guarded_s=lambda: guard.looked_s if guard is not None else None,
    )


def twin_folder(config: Config) -> Path:
    return Path(config.state_dir) / "twin"


def _twin(config: Config) -> TwinState | None:
    npu = config.npu
    return running_board(twin_folder(config), npu.twin, npu.twin_pace) if npu.twin else None


def _on_report(metrics: Metrics, guard: Guard | None, engine: str, report: wire.Report) -> None:
    metrics.on_report(engine, report)
    if guard is not None:
        guard.on_step(engine, thermal.executed(report))


def _board_figures(
    config: Config, twin: TwinState | None, guard: Guard | None
) -> Callable[[], dict[str, float]]:
    """What /metrics says of the chip: what the guard knows, and a twin's own account."""
    primary = "npu" if "npu" in config.engines.chain else "cpu"

    def found() -> dict[str, float]:
        own = figures(twin, asyncio.get_running_loop().time()) if twin is not None else {}
        return (view_figures(guard.view(), primary) if guard is not None else {}) | own

    return found


@asynccontextmanager
async def _running(part: HttpServer | MqttIngress | Guard) -> AsyncIterator[None]:
    await part.start()
    try:
        yield
    finally:
        await part.stop()


async def _drain(config: Config, parts: Parts, stop: StopSignal, notifier: Notifier) -> None:
    """Refuse new work, let running streams end within the limit, then shed the rest."""
    notifier.stopping()
    notifier.extend(config.drain_timeout_s + 30.0)
    log.info("draining", limit_s=config.drain_timeout_s, running=parts.scheduler.load().running)
    parts.http.drain()
    if parts.mqtt is not None:
        parts.mqtt.drain()
    parts.scheduler.drain()
    forced = asyncio.create_task(stop.forced.wait())
    idle = asyncio.create_task(parts.scheduler.idle(config.drain_timeout_s))
    await asyncio.wait({forced, idle}, return_when="FIRST_COMPLETED")
    for task in (forced, idle):
        task.cancel()
    await asyncio.gather(forced, idle, return_exceptions=True)
    parts.scheduler.shed_all()


def url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
