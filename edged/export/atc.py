"""From the plain graph to an .om by ATC, Ascend's compiler: its command, its run, its script.

The command is a pure function of sizes; where `atc` is not installed, a script for another
machine is left instead. Never reads the graph.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from edged.export import ExportError
from edged.export.emit import GRAPH_FILE
from edged.export.form import Form, Gear
from edged.export.hyper import Hyper
from edged.export.plain import graph_inputs

SCRIPT_FILE = "build_om.sh"
MAX_GEARS = 100
MAX_DIMS = 128  # of all inputs together: what the library's gear setter takes
# ATC compiles on every core at once by default and dies on small machines; set ones stay.
_GENTLE = {"TE_PARALLEL_COMPILER": "1", "MAX_COMPILE_CORE_NUMBER": "1"}
_ONNX_FRAMEWORK = 5


def check_gears(hyper: Hyper, gears: Sequence[Gear]) -> None:
    """Raises ExportError for what no .om takes, before the long work."""
    if not 2 <= len(gears) <= MAX_GEARS:
        raise ExportError(
            f"{len(gears)} shape gears; an .om takes 2 to {MAX_GEARS} (3 or 4 are best): change "
            "--batch-gears, --context-gears or --prefill-chunk"
        )
    dims = sum(len(shape) for _, shape in graph_inputs(hyper.layers))
    if dims > MAX_DIMS:
        raise ExportError(
            f"the graph's inputs have {dims} dims in all, an .om with gears takes {MAX_DIMS}; a "
            f"model of {hyper.layers} layers does not fit, take one of at most "
            f"{hyper.layers - (dims - MAX_DIMS + 1) // 2}"
        )


def command(folder: Path, hyper: Hyper, form: Form) -> list[str]:
    """The words that make folder/model.om of folder/model.onnx. Raises ExportError (gears)."""
    check_gears(hyper, form.gears)
    inputs = graph_inputs(hyper.layers)
    shapes = [
        f"{name}:{','.join('-1' if isinstance(dim, str) else str(dim) for dim in dims)}"
        for name, dims in inputs
    ]
    symbols = [dim for _, dims in inputs for dim in dims if isinstance(dim, str)]
    groups = []
    for batch, tokens, context in form.gears:
        cache = batch * hyper.kv_rows * context
        sizes = {"B": batch, "T": tokens, "S": context, "N": cache}
        groups.append(",".join(str(sizes[symbol]) for symbol in symbols))
    return [
        "atc",
        f"--framework={_ONNX_FRAMEWORK}",
        f"--model={folder / GRAPH_FILE}",
        f"--output={folder / 'model'}",  # atc adds .om
        "--input_format=ND",
        f"--input_shape={';'.join(shapes)}",
        f"--dynamic_dims={';'.join(groups)}",
        f"--soc_version={form.soc}",
        "--precision_mode_v2=origin",  # as in the graph: its norms stay in float32
    ]


def compile_om(folder: Path, out: Path, hyper: Hyper, form: Form) -> None:
    """Print the command, with `out` for the folder, and run it or leave a script in `folder`.

    Raises ExportError with ATC's last line when it fails.
    """
    print(shell_line(command(out, hyper, form)), flush=True)
    if shutil.which("atc") is None:
        _write_script(folder / SCRIPT_FILE, command(Path(), hyper, form))
        _say(
            f"atc is not installed here: copy {out} to a build host with CANN >= 8.0, run "
            f"{SCRIPT_FILE} there and copy model.om back"
        )
        return
    _say("running atc; this takes minutes")
    _run(command(folder.resolve(), hyper, form))
    if not (folder / "model.om").is_file():
        raise ExportError("atc ended well but wrote no model.om; run the command above by hand")


def shell_line(words: Sequence[str]) -> str:
    """One line to paste into a shell."""
    gentle = [f"{name}={value}" for name, value in _GENTLE.items()]
    return shlex.join([*gentle, *words])


def _run(words: Sequence[str]) -> None:
    """No time-out: big models take hours. What atc says goes to stderr as it says it."""
    last: deque[str] = deque(maxlen=1)
    with (
        tempfile.TemporaryDirectory(prefix="edged-atc-") as scratch,  # it litters where it runs
        subprocess.Popen(
            words,
            cwd=scratch,
            env=_GENTLE | os.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as child,
    ):
        try:
            for line in child.stdout or ():
                print(line, end="", file=sys.stderr, flush=True)
                if line.strip():
                    last.append(line.strip())
        except BaseException:  # interrupted: the compiler must not go on without us
            child.kill()
            raise
    if child.returncode:
        said = last[0] if last else "it said nothing"
        raise ExportError(f"atc failed with code {child.returncode}: {said}")


def _write_script(path: Path, words: Sequence[str]) -> None:
    gentle = [f'export {name}="${{{name}:-{value}}}"' for name, value in _GENTLE.items()]
    lines = [
        "#!/bin/sh",
        "# Makes model.om of model.onnx beside this script. Needs CANN >= 8.0, its set_env.sh",
        "# sourced. On a large machine set TE_PARALLEL_COMPILER=8 or so to be faster.",
        "set -e",
        'cd "$(dirname "$0")"',
        *gentle,
        f"exec {shlex.join(words)}",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o755)


def _say(line: str) -> None:
    print(f"edged export: {line}", file=sys.stderr, flush=True)
