"""Lab: a real daemon with a simulated NPU and a CPU engine, a real broker, and what to do to them.

One Home per session: a random model, small enough to be back within seconds, exported once with
the same fp32 weights for both engines, so that the same seed gives the same text on either.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from broker import Broker, broker
from daemon import Daemon
from tiny import Tiny

from chaos.clients import Ask, Told, ask_http, ask_openai
from chaos.mqtt import BROKER, Requester, requester
from chaos.truth import Known, known
from edged.models import ensure_exported
from edged.twin import faults

READY_S = 60.0
SETS = (
    *("engines.chain=['npu','cpu']", "npu.twin=310b4", "npu.context_gears=[1024]"),
    *("npu.dtype=fp32", "cpu.dtype=fp32", "engines.fallback=warm", "guard.enabled=off"),
    # Faults come thicker here than a board's: the pauses are short, the budgets wide.
    *("engines.restart_budget=1000", "engines.restart_backoff_s=0.1"),
    *("engines.restart_backoff_max_s=1", "recover.climb_after_s=2", "recover.climb_max_s=4"),
    *("mqtt.reconnect_max_s=1", "queue.max_requests=64"),
)
PROMPTS = (
    *("Once upon a time", "The sky is", "A rung below", "Nothing is lost 4"),
    *("Where the ids end", "Ten thousand 1", "One after another", "It goes on"),
)
WAYS = ("sse", "json", "mqtt", "openai-sse", "sse", "mqtt", "openai", "sse")


@dataclass
class Home:
    """The model, its exports, and requests whose answers are known."""

    folder: Path
    model: Path
    known: list[Known]
    states: Iterator[int] = field(default_factory=itertools.count)

    def state_dir(self, made: Path | None = None) -> Path:
        """A folder for one daemon at a time; models are exported once for all."""
        if made is None:
            made = self.folder / f"state{next(self.states)}"
            made.mkdir()
        (made / "models").symlink_to(self.folder / "models")
        return made

    def crowd(self, tokens: int = 200) -> list[Ask]:
        """Eight mixed requests, greedy ones and drawn ones."""
        return [
            Ask(one.prompt, tokens, one.temperature, one.seed, way)
            for one, way in zip(self.known, WAYS, strict=True)
        ]

    def truth(self, ask: Ask) -> str | None:
        """What an undisturbed answer reads; None for a request that is not of the crowd."""
        found = [one for one in self.known if (one.prompt, one.seed) == (ask.prompt, ask.seed)]
        return found[0].text(ask.tokens) if found else None


@contextlib.contextmanager
def home() -> Iterator[Home]:
    folder = Path(tempfile.mkdtemp(prefix="edged-chaos-"))
    try:
        (folder / "models").mkdir()
        tiny = Tiny(layers=6, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=512, context=1024)
        model = tiny.write_gguf(folder / "chaos.gguf")
        yield Home(folder, model, known(ensure_exported(model, folder, "fp32"), PROMPTS))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Lab:
    """daemon: the one that serves now; it is another after a restart. fds, threads: of the idle
    daemon, all connections made."""

    home: Home
    daemon: Daemon
    broker: Broker
    mqtt: Requester
    state_dir: Path
    sets: tuple[str, ...]
    fds: int = 0
    seen: set[psutil.Process] = field(default_factory=set)  # workers, at any time
    ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.daemon.process.pid)

    # --- what it says ----------------------------------------------------------------------------

    async def get(self, path: str, timeout_s: float = 10.0) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(self.daemon.url, timeout=timeout) as session,
            session.get(path) as reply,
        ):
            return await (reply.json() if "json" in reply.content_type else reply.text())

    async def status(self) -> Any:
        return await self.get("/edged/v1/status")

    async def metric(self, name: str) -> float:
        """The sum over its labels; 0 when there is none."""
        lines = (await self.get("/metrics")).splitlines()
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((name + " ", name + "{"))
        ]
        return sum(values)

    async def engine(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(
            one for one in (await self.status())["engines"] if one["name"] == name
        )
        return found

    async def normal(self, within_s: float = READY_S) -> None:
        """By itself: all engines ready at their full rung."""
        end_s = time.monotonic() + within_s
        while True:
            status = None
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                status = await self.status()
            if status is not None and status["mode"] == "normal":
                rungs = [one["rung"] for one in status["engines"]]
                if rungs == ["8 slots"] * len(rungs):
                    return
            assert self.daemon.process.poll() is None, f"the daemon ended: {self.tail()}"
            assert time.monotonic() < end_s, f"not normal: {status}\n{self.tail()}"
            await asyncio.sleep(0.1)

    def tail(self, chars: int = 4000) -> str:
        return self.daemon.log[-chars:]

    # --- what is done to it ----------------------------------------------------------------------

    def order(self, *words: str) -> None:
        """As `edged twin` on the command line."""
        assert faults.main(["--twin", str(self.state_dir / "twin"), *words]) == 0

    def worker(self, engine: str) -> psutil.Process:
        self.note()
        return next(w for w in self.daemon.workers() if engine in w.cmdline())

    def note(self) -> None:
        """Remember the workers there are: none of them may be left when it is replaced."""
        self.seen.update(self.daemon.workers())

    # --- asking ----------------------------------------------------------------------------------

    async def ask(self, ask: Ask, told: Told | None = None) -> Told:
        """Ask, and wait for the end of the answer."""
        if ask.way == "mqtt":
            heard = await self.mqtt.ask(f"r{next(self.ids)}", ask)
            if told is not None:
                told.begun.set()
            return await heard_out(heard)
        heard = told or Told(ask)
        client = ask_openai if ask.way.startswith("openai") else ask_http
        await client(self.daemon.url, heard)
        return heard

    @contextlib.asynccontextmanager
    async def crowd(
        self, asks: Sequence[Ask] | None = None
    ) -> AsyncIterator[asyncio.Future[list[Told]]]:
        """Eight mixed streams, or `asks`; await what is given for all their answers."""
        asks = self.home.crowd() if asks is None else asks
        tasks = [asyncio.create_task(self.ask(ask)) for ask in asks]
        answers = asyncio.gather(*tasks)
        try:
            yield answers
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(answers, *tasks, return_exceptions=True)

    async def begun(self, running: int, within_s: float = 20.0) -> None:
        """So many streams run in engines."""
        end_s = time.monotonic() + within_s
        while (await self.status())["running"] < running:
            assert time.monotonic() < end_s, self.tail()
            await asyncio.sleep(0.02)

    async def stepped(self, steps: int, within_s: float = 20.0) -> None:
        """So many decode steps of the NPU from now, however fast this machine is."""
        name = 'edged_engine_step_seconds_count{engine="npu",kind="decode"}'
        wanted, end_s = await self.metric(name) + steps, time.monotonic() + within_s
        while await self.metric(name) < wanted:
            assert time.monotonic() < end_s, self.tail()
            await asyncio.sleep(0.01)

    async def gone(self, engine: str, within_s: float = 20.0) -> None:
        """The daemon has noticed that the engine does not serve."""
        end_s = time.monotonic() + within_s
        while (await self.engine(engine))["state"] == "ready":
            assert time.monotonic() < end_s, self.tail()
            await asyncio.sleep(0.01)

    # --- the daemon's own life -------------------------------------------------------------------

    async def restart(self) -> None:
        """Another daemon on the same state folder, once the first is gone."""
        old, self.daemon = (
            self.daemon,
            make_daemon(self.home, self.broker, self.state_dir, self.sets),
        )
        await asyncio.to_thread(old.close)
        await asyncio.to_thread(self.daemon.wait_ready)
        await self.settle()

    async def settle(self) -> None:
        """What the idle daemon holds, to be compared with afterwards."""
        await self.normal()
        for way in sorted(set(WAYS)):
            told = await self.ask(Ask("Hello", 4, way=way))
            assert told.finish == "length", (told, self.tail())
        self.note()
        self.fds = await steady_fds(self.process)


async def steady_fds(process: psutil.Process) -> int:
    """Open files once they no longer change."""
    last, since_s = process.num_fds(), time.monotonic()
    while time.monotonic() - since_s < 1.0:
        await asyncio.sleep(0.1)
        if (now := process.num_fds()) != last:
            last, since_s = now, time.monotonic()
    return int(last)


async def heard_out(told: Told, within_s: float = 100.0) -> Told:
    """An MQTT answer comes, or it does not; a while longer, for one that comes twice."""
    end_s = time.monotonic() + within_s
    while not told.ends and time.monotonic() < end_s:
        await asyncio.sleep(0.05)
    return told


def make_daemon(
    home: Home, broker: Broker, state_dir: Path, sets: Sequence[str], redirect: str = ""
) -> Daemon:
    own = (f"state_dir={state_dir}", f"model.path={home.model}", f"mqtt.url={broker.url}")
    return Daemon(*SETS, *own, *sets, redirect=redirect)


@contextlib.asynccontextmanager
async def lab(
    home: Home, *sets: str, redirect: str = "", state_dir: Path | None = None
) -> AsyncIterator[Lab]:
    """Everything up and idle; gone afterwards with all processes, whatever happened."""
    state_dir = home.state_dir(state_dir)
    with broker(BROKER) as mosquitto:
        made: Lab | None = None
        daemon = make_daemon(home, mosquitto, state_dir, sets, redirect)
        try:
            async with requester(mosquitto.port) as mqtt:
                made = Lab(home, daemon, mosquitto, mqtt, state_dir, sets)
                await asyncio.to_thread(daemon.wait_ready)
                await made.settle()
                yield made
        finally:
            for process in made.seen if made is not None else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()  # psutil knows a number that was given to another process
            (made.daemon if made is not None else daemon).close()
