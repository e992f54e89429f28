"""The guard on the running twin: real load, real tokens, real time; a small board that heats fast.

The field board's parameters with a heat sink that answers within two seconds, and executes that
last twenty times what the board would take, so that the clock matters on any machine.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon import Daemon, daemon

from edged.twin import boards

pytestmark = pytest.mark.model

PACE = 20
GUARD = (
    *("guard.policy=base", "guard.period_s=0.5", "sensors.interval_s=0.5"),
    *("guard.dwell_s=1", "guard.recover_s=1.5", "guard.critical_wait_s=2"),
)
WITHIN_S = 90.0


@pytest.fixture(scope="module")
def heated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon on such a board, with eight clients that never stop asking."""
    text = (Path(boards.__file__).parents[2] / "configs/boards/field.toml").read_text("utf-8")
    board = tmp_path_factory.mktemp("board") / "fast.toml"
    board.write_text(text.replace("terms = [[6.0, 4.0]]", "terms = [[6.0, 0.1]]"), "utf-8")
    chain = ("engines.chain=['npu']", f"npu.twin={board}", f"npu.twin_pace={PACE}")
    with daemon(*chain, "npu.context_gears=[512]", *GUARD) as running, load(running):
        yield running


@contextlib.contextmanager
def load(running: Daemon) -> Iterator[None]:
    stop = threading.Event()

    def client() -> None:
        with openai.OpenAI(
            base_url=f"{running.url}/v1", api_key="k", max_retries=0, timeout=60
        ) as api:
            while not stop.is_set():
                with contextlib.suppress(openai.APIError):
                    endless = {"ignore_eos": True}
                    api.completions.create(
                        model="", prompt="Once", max_tokens=16, extra_body=endless
                    )
                stop.wait(0.2)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30.0)


def order(running: Daemon, *words: str) -> None:
    command = [
        sys.executable,
        "-m",
        "edged",
        "twin",
        "--twin",
        str(running.folder / "state/twin"),
        *words,
    ]
    subprocess.run(command, check=True, timeout=60)


def seen(running: Daemon, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status that is as wanted."""
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        status: dict[str, Any] = running.get("/edged/v1/status")
        if wanted(status):
            return status
        time.sleep(0.2)
    raise AssertionError(f"not within {WITHIN_S:g} s; now {status}\n{running.log[-2000:]}")


def at_full_speed(status: dict[str, Any]) -> bool:
    limits = status["guard"]["limits"].get("npu", {})
    return (
        status["mode"] == "normal"
        and status["guard"]["levers"]["frequency_mhz"] == 800
        and (limits.get("max_batch"), limits.get("duty")) == (8, 1.0)
    )


def test_heat_lowers_the_clock_and_the_batch_and_a_cool_room_brings_them_back(
    heated: Daemon,
) -> None:
    """In a hot room mode, clock and batch say throttled and the chip stays under its limit; when
    the room is cool again all three recover by themselves."""
    order(heated, "ambient", "20")
    seen(heated, at_full_speed)

    order(heated, "ambient", "36")
    hot = seen(
        heated,
        lambda s: (
            s["mode"] == "throttled"
            and s["guard"]["levers"]["frequency_mhz"] < 800
            and s["guard"]["limits"]["npu"]["max_batch"] < 8
        ),
    )
    assert "°C, limit 80 °C" in hot["reason"]
    seen(heated, lambda s: s["guard"]["temperature_c"] <= 80)
    metrics = heated.get("/metrics")
    assert 'edged_mode{mode="throttled"} 1.0' in metrics
    assert "edged_guard_max_batch" in metrics

    order(heated, "ambient", "20")
    seen(heated, at_full_speed)


def test_above_critical_requests_are_refused_until_it_cools(heated: Daemon) -> None:
    """A die at 91 °C serves nobody: requests get 503 thermal_shutdown, then service comes back."""
    order(heated, "ambient", "55")  # an idle chip then has 91 °C, its reset point is 100
    seen(heated, lambda s: s["guard"]["limits"]["npu"]["admit"] is False)
    with (
        openai.OpenAI(base_url=f"{heated.url}/v1", api_key="k", max_retries=0, timeout=60) as api,
        pytest.raises(openai.APIStatusError) as refused,
    ):
        api.completions.create(model="", prompt="Hi", max_tokens=2)
    assert (refused.value.status_code, refused.value.code) == (503, "thermal_shutdown")
    assert not heated.get("/edged/v1/status")["ready"]
    seen(heated, lambda s: s["running"] == 0)  # what waited too long in its slot has ended

    order(heated, "ambient", "20")
    seen(heated, at_full_speed)
    with openai.OpenAI(base_url=f"{heated.url}/v1", api_key="k", max_retries=0, timeout=60) as api:
        answer = api.completions.create(model="", prompt="Hi", max_tokens=2)
    assert answer.usage is not None
