"""`edged`: run, check, check-config, export, models, twin, simulate. Maps errors to exit codes.

0 ended well; 2 usage; 75 no engine can start (try again later); 78 bad configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from edged import __version__, config, logs
from edged.errors import ConfigError, EdgedError, EngineUnavailable
from edged.machine import default_state_dir
from edged.settings import Config
from edged.systemd import Notifier

EX_OK, EX_FAIL, EX_TEMPFAIL, EX_CONFIG = 0, 1, 75, 78


def main(argv: Sequence[str] | None = None) -> int:
    _open_standard_files()
    words = list(sys.argv[1:] if argv is None else argv)
    rest: list[str] = []
    if words[:1] and words[0] in ("export", "twin", "simulate"):
        words, rest = words[:1], words[1:]  # their own parsers read it, --help included
    arguments = _parser().parse_args(words)
    arguments.rest = rest
    try:
        return int(arguments.verb(arguments))
    except ConfigError as error:
        return _say(error, EX_CONFIG)
    except EngineUnavailable as error:
        return _say(error, EX_TEMPFAIL)
    except EdgedError as error:
        return _say(error, EX_FAIL)
    except KeyboardInterrupt:
        return 130


def _say(error: Exception, code: int) -> int:
    _write(sys.stderr, f"edged: {error}\n")
    return code


def _write(stream: TextIO | None, text: str) -> None:
    """Words for a person; a pipe that nobody reads or a full disk changes no exit code."""
    if stream is not None:
        with contextlib.suppress(OSError):
            os.write(stream.fileno(), text.encode("utf-8", "replace"))


def _open_standard_files() -> None:
    """Started with `2>&-`, the next socket would become file 2 and get the log written to it."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="edged", description=__doc__)
    parser.add_argument("--version", action="version", version=f"edged {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    run = verbs.add_parser("run", help="serve text generation over HTTP and MQTT")
    run.set_defaults(verb=_run)
    check = verbs.add_parser("check-config", help="read the configuration and say what is wrong")
    check.set_defaults(verb=_check_config)
    board = verbs.add_parser("check", help="say which sensors and levers this board really has")
    board.set_defaults(verb=_check)
    for verb in (run, check, board):
        verb.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
        verb.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    for verb in (run, board):
        verb.add_argument(
            "--twin",
            nargs="?",
            const="310b4",
            default="",
            metavar="BOARD",
            help="a simulated board as the NPU (310b4, 310b4-8gb, 310b1, 310p3, field, or TOML)",
        )
    twin = verbs.add_parser("twin", help="order faults and heat on the simulated board")
    twin.set_defaults(verb=_twin)
    lab = verbs.add_parser("simulate", help="compare thermal policies on scenarios, in the lab")
    lab.set_defaults(verb=_simulate)
    export = verbs.add_parser("export", help="turn a GGUF file or HF folder into a model folder")
    export.set_defaults(verb=_export)
    models = verbs.add_parser("models", help="fetch the demo model")
    models.add_argument("action", choices=["fetch"])
    models.add_argument("name", choices=["demo"])
    models.add_argument("--state-dir", type=Path, default=None)
    models.set_defaults(verb=_models)
    return parser


def _check_config(arguments: argparse.Namespace) -> int:
    from edged import check

    checked = config.load(arguments.config, tuple(arguments.sets))
    check.files(checked)
    print(f"configuration is good; node {checked.node}, state in {checked.state_dir}")
    return EX_OK


def _check(arguments: argparse.Namespace) -> int:
    from edged import check

    checked = config.load(arguments.config, (*_twin_settings(arguments.twin), *arguments.sets))
    logs.configure("error", checked.log.format)  # the lines say what failed
    for line in asyncio.run(check.lines(checked)):
        print(line)
    return EX_OK


def _twin(arguments: argparse.Namespace) -> int:
    from edged.twin import faults

    return faults.main(arguments.rest)


def _simulate(arguments: argparse.Namespace) -> int:
    from edged.twin import lab

    return lab.main(arguments.rest)


def _export(arguments: argparse.Namespace) -> int:
    """In a process of its own: it needs numpy, gguf and onnx, which this one never imports."""
    return subprocess.call([sys.executable, "-m", "edged.export", *arguments.rest])


def _models(arguments: argparse.Namespace) -> int:
    from edged import models

    state_dir = arguments.state_dir or default_state_dir()
    source = models.fetch_demo(state_dir, lambda line: print(f"edged: {line}", file=sys.stderr))
    print(models.ensure_exported(source, state_dir, "auto"))
    return EX_OK


def _run(arguments: argparse.Namespace) -> int:
    checked = config.load(arguments.config, (*_twin_settings(arguments.twin), *arguments.sets))
    logs.configure(checked.log.level, checked.log.format)
    from edged import app, systemd

    notifier = systemd.Notifier.from_environ(os.environ)
    systemd.forget(os.environ)  # children never see them
    try:
        model_dirs = _prepared(checked, notifier)
    except KeyboardInterrupt:  # or SIGTERM: nothing runs yet, so this is a stop like any other
        return EX_OK

    async def serve() -> None:
        stop = app.StopSignal()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.ask)
        await app.run(checked, model_dirs, stop, notifier, lambda url: _greet(checked, url))

    asyncio.run(serve())
    return EX_OK


def _twin_settings(board: str) -> tuple[str, ...]:
    """`--twin` is short for two keys; --set may say otherwise."""
    return (f"npu.twin={board}", 'engines.chain=["npu", "cpu"]') if board else ()


def _prepared(checked: Config, notifier: Notifier) -> dict[str, Path]:
    """As model_dirs.prepared; blocks for the time of an export.

    Raises KeyboardInterrupt on SIGTERM.
    """
    from edged.model_dirs import prepared

    notifier.status("preparing the model")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _more_time(notifier):
            return prepared(checked)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _more_time(notifier: Notifier) -> Iterator[None]:
    """Exporting a large model outlasts TimeoutStartSec, and a start that is cut off begins anew."""
    done = threading.Event()

    def ask() -> None:
        while notifier.extend(60.0) and not done.wait(20.0):
            pass

    thread = threading.Thread(target=ask, name="more-time", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _greet(checked: Config, url: str) -> None:
    """Lines to try, for a person at a terminal; under systemd the log has it all."""
    if "INVOCATION_ID" in os.environ:
        return
    base = f"{checked.mqtt.base}/{checked.node}"
    broker = "" if checked.mqtt.url else "  # needs --set mqtt.url=mqtt://127.0.0.1"
    _write(
        sys.stdout,
        f"""
edged is ready at {url} (OpenAI base URL {url}/v1), node {checked.node}. Try:

  curl -s {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'

  mosquitto_pub -t {base}/req/generate -m '{{"id": "1", "prompt": "The sky is"}}'{broker}
    (the answer: mosquitto_sub -t '{base}/res/+' -C 1)
""",
    )
