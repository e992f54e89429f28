"""What has to be whole after every case, whatever was broken in it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Sequence

import psutil

from chaos.clients import Ask, Told
from chaos.lab import Lab
from edged.errors import TABLE

GONE_S = 15.0  # for what is being closed
REASONS = {"first", *TABLE, "engine_moved"}
BUGS = ("stream_crashed", "request_crashed", "Traceback", "overseer_failed", "never retrieved")


async def expect_whole(
    lab: Lab, tolds: Sequence[Told], may_fail: Collection[str] = (), repeats: bool = False
) -> None:
    """may_fail: codes of the error table that an answer may end with in this case. repeats: an
    MQTT answer may come twice (the same one), for a broker or a daemon was killed."""
    for told in tolds:
        expect_ended(lab, told, may_fail)
    if not repeats:
        assert not lab.mqtt.repeats, lab.mqtt.repeats
    lab.mqtt.repeats.clear()
    await lab.normal()
    lab.note()
    await nothing_held(lab)
    await nothing_left(lab)
    after = await lab.ask(Ask("The sky is", 8, way="sse"))
    assert (after.finish, after.wrote) == ("length", ["npu"]), (after, lab.tail())
    assert await lab.metric("edged_audit_violations_total") == 0, lab.tail()
    for bug in BUGS:
        assert bug not in lab.daemon.log, lab.daemon.log[lab.daemon.log.index(bug) - 2000 :][:6000]


def expect_ended(lab: Lab, told: Told, may_fail: Collection[str]) -> None:
    """Exactly one end, nothing behind it, the right engines, and not one character lost."""
    assert told.ends == 1, (f"ended {told.ends} times", told, lab.tail())
    assert not told.late, told
    truth = lab.home.truth(told.ask)
    if told.code:
        assert told.code in may_fail, (told, lab.tail())
        assert truth is None or truth.startswith(told.text), told
        return
    assert told.finish == "length", told
    assert told.tokens == told.ask.tokens, told
    expect_spans(told)
    if truth is not None:
        assert told.text == truth, (difference(told.text, truth), told.engines)


def difference(text: str, truth: str) -> str:
    """Where and how two texts part, for people."""
    at = next(
        (i for i, (a, b) in enumerate(zip(text, truth, strict=False)) if a != b),
        min(len(text), len(truth)),
    )
    return f"at {at} of {len(truth)}: {text[at : at + 20]!r} in place of {truth[at : at + 20]!r}"


def expect_spans(told: Told) -> None:
    """The spans cover the answer without gap or overlap, and say why each began."""
    spans = told.engines
    assert spans, told
    assert spans[0]["from_token"] == 0
    assert spans[0]["reason"] == "first"
    for before, after in itertools.pairwise(spans):
        assert before["to_token"] == after["from_token"], spans
        assert after["reason"] != "first", spans
    assert spans[-1]["to_token"] == told.tokens, spans
    for span in spans:
        assert span["name"] in ("npu", "cpu"), spans
        assert span["reason"] in REASONS, spans
        assert not span["approximate"], spans


async def nothing_held(lab: Lab) -> None:
    """No slot, no place in the queue, no open file beyond what the idle daemon has."""
    end_s = time.monotonic() + GONE_S
    while True:
        status = await lab.status()
        held = [status["running"], status["queue"]["waiting"]]
        held += [engine["running"] for engine in status["engines"]]
        free = await lab.metric("edged_engine_free_slots")
        fds = lab.process.num_fds()
        if not any(held) and free == 16 and fds <= lab.fds:
            return
        files = [(one.path, one.fd) for one in lab.process.open_files()]
        assert time.monotonic() < end_s, (
            f"held {held}, {free} slots free, {fds} files open of {lab.fds}: {files}, "
            f"{lab.process.net_connections()}",
            lab.tail(),
        )
        await asyncio.sleep(0.1)


async def nothing_left(lab: Lab) -> None:
    """Of each engine one worker; those before it are gone; one socket file."""
    current = set(lab.daemon.workers())
    old = [worker for worker in lab.seen if worker not in current]
    _, left = await asyncio.to_thread(psutil.wait_procs, old, GONE_S)
    assert not [worker for worker in left if worker.status() != psutil.STATUS_ZOMBIE], left
    lab.seen = current
    names = sorted(w.cmdline()[w.cmdline().index("--engine") + 1] for w in current)
    assert names == ["cpu", "npu"], names
    zombies = [c for c in lab.process.children() if c.status() == psutil.STATUS_ZOMBIE]
    assert not zombies, zombies
    sockets = [path.name for path in lab.daemon.folder.iterdir() if path.is_socket()]
    assert sockets == ["api.sock"], sockets
