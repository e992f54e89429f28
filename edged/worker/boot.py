"""From the first frame to the step loop: hello, launch, load, warm up, self test, ready, serve.

Every way a worker can end leaves through here as one Fault frame and an exit code.
"""

from __future__ import annotations

import gc
import os
import time
from functools import partial
from pathlib import Path

from edged import wire
from edged.core import Limits
from edged.errors import EdgedError, WireError
from edged.worker.contract import GRAPH_FILE, ContractError, ModelSpec, read_spec
from edged.worker.executor import DeviceFault, Executor, StepError, empty_batch
from edged.worker.faults import located
from edged.worker.link import Link, LinkClosed
from edged.worker.loop import StepLoop
from edged.worker.pace import Pace
from edged.worker.plan import gear
from edged.worker.probe import deadline_s
from edged.worker.rules import log
from edged.worker.selftest import SelfTester, SelfTestError, prove
from edged.worker.submit import MAX_SLOTS

_GRAPH_FILES = {"cpu": GRAPH_FILE, "npu": "model.om"}
_LOAD_FLOOR_S = 60.0  # imports and graph optimisation on a slow board (assumed)
_LOAD_BYTES_PER_S = 10e6  # a slow SD card (assumed)


def run(link: Link, engine: str) -> int:
    """The life of a worker; the exit code: 0 = asked to go or orphaned, 1 = after a Fault."""
    try:
        link.send(wire.Hello(wire.VERSION, os.getpid()))
        launch = _wait_for_launch(link)
        _serve(link, engine, launch)
    except LinkClosed:
        return 0
    except MemoryError as error:
        return _fault(link, "memory", str(error))
    except SelfTestError as error:
        return _fault(link, "self_test", str(error))
    except ContractError as error:
        return _fault(link, "load", str(error))
    except (StepError, DeviceFault) as error:
        return _fault(link, "fatal", str(error))
    except ImportError as error:
        return _fault(link, "load", f"{error}; install edged with all its dependencies")
    except EdgedError as error:
        return _fault(link, "internal", str(error))
    return 0


def _wait_for_launch(link: Link) -> wire.Launch:
    while True:
        for message in link.receive(None):
            if isinstance(message, wire.Launch):
                return message
            if isinstance(message, wire.Shutdown):
                raise LinkClosed
            raise WireError(f"expected launch, got {type(message).__name__}")


def _serve(link: Link, engine: str, launch: wire.Launch) -> None:
    started_s = time.monotonic()
    if not 1 <= launch.slots <= MAX_SLOTS:
        raise ContractError(f"slots: {launch.slots} is not within 1..{MAX_SLOTS}")
    graph_file = _GRAPH_FILES[engine]
    spec = read_spec(Path(launch.model_dir), launch.context_tokens, graph_file)
    link.send(wire.Phase("loading", load_deadline_s(spec.weight_bytes())))
    with located("load"):
        executor = open_executor(engine, spec, launch)
        slowest_s = warm_up(executor, launch)
        load_s = time.monotonic() - started_s
        log(f"loaded {spec.name} in {load_s:.1f} s, slowest warm-up step {slowest_s * 1e3:.0f} ms")
        tester = _self_test(link, engine, executor, spec, launch, slowest_s)
    load_s = time.monotonic() - started_s
    link.send(wire.Ready(spec.name, spec.vocab_tokens, spec.context_tokens, launch.slots, load_s))
    gc.freeze()  # what is loaded stays: collections need not look at it again
    limits = Limits(launch.slots, prefill_chunk=launch.prefill_chunk)
    with located("decode"):  # what a step does not tell better itself
        StepLoop(link, executor, spec, limits, launch.slots, slowest_s, tester=tester).serve()
    executor.close()


def _self_test(
    link: Link,
    engine: str,
    executor: Executor,
    spec: ModelSpec,
    launch: wire.Launch,
    slowest_s: float,
) -> SelfTester:
    """Raises SelfTestError where the output is wrong."""
    started_s = time.monotonic()
    step_deadline_s = Pace(slowest_s).deadline_s(started_s, 1.0)
    link.send(wire.Phase("self_test", deadline_s(step_deadline_s)))
    tester = prove(executor, spec, launch, partial(library_version, engine))
    log(f"self test passed in {time.monotonic() - started_s:.2f} s")
    return tester


def library_version(engine: str) -> str:
    """The runtime that executes the graph, and its version."""
    if engine == "cpu":
        from edged.worker import ort

        return ort.library_version()
    from edged.worker import om

    return om.library_version()


def load_deadline_s(weight_bytes: int) -> float:
    return _LOAD_FLOOR_S + weight_bytes / _LOAD_BYTES_PER_S


def open_executor(engine: str, spec: ModelSpec, launch: wire.Launch) -> Executor:
    """Load the graph. Raises ContractError, MemoryError, EngineFault."""
    if engine == "cpu":
        # Here, not above: importing onnxruntime takes a second, and only this engine needs it.
        from edged.worker.ort import OrtExecutor

        threads = launch.threads or len(os.sched_getaffinity(0))
        return OrtExecutor(spec, launch.slots, threads)
    from edged.worker.om import open_om

    return open_om(spec, launch)


def warm_up(executor: Executor, launch: wire.Launch) -> float:
    """Run one chunk and the widest decode step; seconds of the slower one when warm."""
    gears = executor.gears
    slowest_s = 0.0
    chunk = max(1, min(launch.prefill_chunk, executor.context))
    for batch, tokens in ((1, chunk), (gears.batch[-1], 1)):
        for _ in range(2):
            started_s = time.monotonic()
            executor.run(empty_batch(0, batch, gear(tokens, gears.tokens)))
            took_s = time.monotonic() - started_s
        slowest_s = max(slowest_s, took_s)
    return slowest_s


def _fault(link: Link, kind: str, detail: str) -> int:
    log(f"{kind} fault: {detail}")
    try:
        link.send(wire.Fault(kind, detail[:1000]))
    except LinkClosed:
        return 0
    return 1
