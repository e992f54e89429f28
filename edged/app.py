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
from typing import Any

import structlog

from edged import thermal, wire
from edged.audit_facts import Sources
from edged.core import Limits
from edged.engine.factory import make_engines, make_overseer
from edged.engine.links import make_links, make_upstream
from edged.engine.overseer import Overseer
from edged.engine.rungs import small_model_dir
from edged.engine.upstream import UpstreamEngine
from edged.engine.worker_engine import WorkerEngine
from edged.errors import EngineFault, EngineUnavailable, Overheated
from edged.guard.loop import Guard
from edged.guard.view import view_figures
from edged.ingress.http import HttpServer
from edged.ingress.mqtt import MqttIngress
from edged.ingress.prepare import Catalog
from edged.manifest import check_small_model, foreign_models, shared_context_tokens
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
    engines: tuple[WorkerEngine | UpstreamEngine, ...]
    scheduler: Scheduler
    metrics: Metrics
    http: HttpServer
    mqtt: MqttIngress | None
    guard: Guard | None
    overseer: Overseer
    watch: Watch
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
        stack.push_async_callback(_stop_engines, parts.engines)
        await stack.enter_async_context(watching(parts.watch, notifier, parts.status))
        await stack.enter_async_context(_overseen(parts.overseer))
        await _start_engines(config, parts.engines, stop)
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
    if config.npu.small_model and "npu" in model_dirs:
        check_small_model(model_dirs["npu"], small_model_dir(config))
    foreign = foreign_models(model_dirs, config.model.context_tokens)
    catalog = Catalog([text], config.generation, context_tokens)
    twin = (
        running_board(twin_folder(config), config.npu.twin, config.npu.twin_pace)
        if config.npu.twin
        else None
    )
    workers = make_engines(
        config,
        text.name,
        model_dirs,
        context_tokens,
        twin_folder(config),
        functools.partial(free_bytes, twin) if twin is not None else lambda: None,
        foreign,
    )
    overseer = make_overseer(config, workers)
    upstream = make_upstream(config)
    links = make_links(config, workers, upstream, foreign, model_dirs)
    named: dict[str, WorkerEngine | UpstreamEngine] = {engine.name: engine for engine in workers}
    on_board = {*named, *({upstream.name} if upstream and upstream.on_board else ())}
    if upstream is not None:
        named[upstream.name] = upstream
    engines = tuple(named[name] for name in config.engines.chain if name in named)

    def set_limits(name: str, limits: Limits) -> None:
        named[name].set_limits(limits)
        if upstream is not None and name == workers[-1].name:  # the nearest to it of those ruled
            upstream.set_limits(limits)

    def end_streams() -> None:
        scheduler.evict(on_board, Overheated("the chip stayed above its critical temperature"))

    guard = None
    if thermal.wanted(config):
        guard = thermal.make_guard(
            config,
            model_dirs,
            twin,
            streams=lambda: {name: engine.health().running for name, engine in named.items()},
            waiting=lambda: scheduler.load().waiting,
            set_limits=set_limits,
            end_streams=end_streams,
        )
    metrics = Metrics(config.node, text.name, _board_figures(config, twin, guard))
    scheduler = Scheduler(
        links,
        {text.name: text},
        Queue[Stream](config.queue.max_requests, config.queue.max_tokens, config.queue.aging_s),
        on_finish=metrics.on_finish,
        on_refuse=metrics.on_refuse,
        on_leave=overseer.need,
        on_move=metrics.stream_moves.add,
    )

    rebooter = Rebooter(config.recover, Path(config.state_dir), lambda: scheduler.load().running)
    overseer.on_wedged = rebooter.look

    def on_change() -> None:
        overseer.review()  # first: an engine that it wakes is worth waiting for
        scheduler.dispatch()

    for engine in engines:
        engine.on_change = on_change
    for worker in workers:
        worker.on_move = functools.partial(metrics.ladder_moves.add, worker.name)
        worker.on_report = functools.partial(_on_report, metrics, guard, worker.name)

    def status() -> Status:
        return status_of(
            config.node,
            scheduler.load(),
            tuple((engine.name, engine.health()) for engine in engines),
            asyncio.get_running_loop().time(),
            guard.view() if guard is not None else None,
            watch.found,
            watch.withheld(),
        )

    http = HttpServer(config.http, config.node, scheduler, catalog, metrics, status)
    mqtt = None
    if config.mqtt.url:
        mqtt = MqttIngress(config.mqtt, config.node, scheduler, catalog, metrics, status)
    sources = Sources(
        scheduler=scheduler,
        links=links,
        workers=workers,
        upstream=upstream,
        overseer=overseer,
        connections=lambda: http.connections,
        jobs=lambda: mqtt.inflight if mqtt is not None else 0,
    )
    watch = Watch(sources, metrics)
    return Parts(text, engines, scheduler, metrics, http, mqtt, guard, overseer, watch, status)


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


@asynccontextmanager
async def _overseen(overseer: Overseer) -> AsyncIterator[None]:
    task = asyncio.create_task(overseer.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _stop_engines(engines: tuple[WorkerEngine | UpstreamEngine, ...]) -> None:
    await asyncio.gather(*(engine.stop() for engine in engines))


async def _start_engines(
    config: Config, engines: tuple[WorkerEngine | UpstreamEngine, ...], stop: StopSignal
) -> None:
    """Return when a stop is asked or enough is ready: one engine, the NPU where it is required.

    The others keep trying behind it (mode degraded). Raises EngineUnavailable when none can
    start, or the required one cannot.
    """
    required = {"npu"} if config.npu.required else set()
    starts = {asyncio.create_task(engine.start()): engine.name for engine in engines}
    stopping = asyncio.create_task(stop.asked.wait())
    pending: set[asyncio.Task[Any]] = {*starts, stopping}
    ready: set[str] = set()
    failed: dict[str, EngineFault] = {}
    try:
        while not stop.asked.is_set() and not (ready and required <= ready):
            done, pending = await asyncio.wait(
                pending, timeout=config.engines.start_timeout_s, return_when="FIRST_COMPLETED"
            )
            if not done:
                raise EngineUnavailable("no engine became ready in time; see the worker's log")
            for task in done - {stopping}:
                try:
                    task.result()
                    ready.add(starts[task])
                except EngineFault as fault:
                    failed[starts[task]] = fault
            for name in required & failed.keys():
                raise EngineUnavailable(f"{name}.required is set and {failed[name]}")
            if len(failed) == len(engines):
                raise EngineUnavailable("; ".join(map(str, failed.values())))
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


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
