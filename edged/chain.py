"""Chain: the engines of this node in order, who watches them, and how they start and stop.

One link per name of engines.chain: workers of this node, and perhaps an upstream server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edged import manifest
from edged.core import Health, Limits
from edged.engine import Link
from edged.engine.factory import make_engines, make_overseer
from edged.engine.links import make_links, make_upstream
from edged.engine.overseer import Overseer
from edged.engine.rungs import small_model_dir
from edged.engine.upstream import UpstreamEngine
from edged.engine.worker_engine import WorkerEngine
from edged.errors import EngineFault, EngineUnavailable
from edged.settings import Config


@dataclass(frozen=True)
class Chain:
    """links: as the scheduler sees the engines; an engine with another tokenizer differs there."""

    engines: tuple[WorkerEngine | UpstreamEngine, ...]
    workers: tuple[WorkerEngine, ...]
    upstream: UpstreamEngine | None
    links: tuple[Link, ...]
    overseer: Overseer

    @property
    def on_board(self) -> frozenset[str]:
        """Names of the engines that heat this board."""
        off = self.upstream is not None and not self.upstream.on_board
        return frozenset(e.name for e in self.engines if not (off and e is self.upstream))

    def running(self) -> dict[str, int]:
        """Streams in each engine."""
        return {engine.name: engine.health().running for engine in self.engines}

    def healths(self) -> tuple[tuple[str, Health], ...]:
        return tuple((engine.name, engine.health()) for engine in self.engines)

    def set_limits(self, name: str, limits: Limits) -> None:
        """Of a worker; the upstream server obeys those of the last one, the nearest to it."""
        for worker in self.workers:
            if worker.name == name:
                worker.set_limits(limits)
        if self.upstream is not None and name == self.workers[-1].name:
            self.upstream.set_limits(limits)

    def on_change(self, dispatch: Callable[[], None]) -> None:
        """dispatch is called whenever capacity or state of an engine may have changed."""

        def changed() -> None:
            self.overseer.review()  # first: an engine that it wakes is worth waiting for
            dispatch()

        for engine in self.engines:
            engine.on_change = changed


def make_chain(
    config: Config,
    model: str,
    model_dirs: Mapping[str, Path],
    context_tokens: int,
    twin_folder: Path,
    device_free_bytes: Callable[[], int | None],
) -> Chain:
    """Starts nothing. Raises ConfigError naming the key."""
    if config.npu.small_model and "npu" in model_dirs:
        manifest.check_small_model(model_dirs["npu"], small_model_dir(config))
    foreign = manifest.foreign_models(model_dirs, config.model.context_tokens)
    workers = make_engines(
        config, model, model_dirs, context_tokens, twin_folder, device_free_bytes, foreign
    )
    upstream = make_upstream(config)
    named: dict[str, WorkerEngine | UpstreamEngine] = {worker.name: worker for worker in workers}
    if upstream is not None:
        named[upstream.name] = upstream
    return Chain(
        engines=tuple(named[name] for name in config.engines.chain if name in named),
        workers=workers,
        upstream=upstream,
        links=make_links(config, workers, upstream, foreign, model_dirs),
        overseer=make_overseer(config, workers),
    )


@asynccontextmanager
async def overseen(overseer: Overseer) -> AsyncIterator[None]:
    task = asyncio.create_task(overseer.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def stop(chain: Chain) -> None:
    await asyncio.gather(*(engine.stop() for engine in chain.engines))


async def start(config: Config, chain: Chain, stop_asked: asyncio.Event) -> None:
    """Return when a stop is asked or enough is ready: one engine, the NPU where it is required.

    The others keep trying behind it (mode degraded). Raises EngineUnavailable when none can
    start, or the required one cannot.
    """
    required = {"npu"} if config.npu.required else set()
    starts = {asyncio.create_task(engine.start()): engine.name for engine in chain.engines}
    stopping = asyncio.create_task(stop_asked.wait())
    pending: set[asyncio.Task[Any]] = {*starts, stopping}
    ready: set[str] = set()
    failed: dict[str, EngineFault] = {}
    try:
        while not stop_asked.is_set() and not (ready and required <= ready):
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
            if len(failed) == len(chain.engines):
                raise EngineUnavailable("; ".join(map(str, failed.values())))
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
