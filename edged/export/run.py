"""One export from start to end: read, check the room, build beside the target, rename.

A directory appears under its final name only when it is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from edged.export import ExportError
from edged.export.emit import Emitter
from edged.export.gguf_source import GgufSource
from edged.export.hf_source import HfSource
from edged.export.manifest import manifest
from edged.export.plain import PlainGraph
from edged.export.weights import CONTRIB, Weights
from edged.models import MANIFEST_FILE

_DTYPES = ("int8", "fp32", "fp16")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 the source or the arguments cannot be used."""
    parser = argparse.ArgumentParser(
        prog="edged export",
        description="turn a GGUF file or a Hugging Face folder into a model directory",
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="GGUF file or Hugging Face folder"
    )
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--dtype", choices=_DTYPES, default="int8", help="weights (default int8)")
    parser.add_argument("--progress", choices=("auto", "on", "off"), default="auto")
    args = parser.parse_args(argv)
    hide_bar = {"auto": None, "on": False, "off": True}[args.progress]
    try:
        export(args.model, args.out, args.dtype, hide_bar)
    except ExportError as error:
        print(f"edged export: {error}", file=sys.stderr)
        return 2
    return 0


def export(model: Path, out: Path, dtype: str = "int8", hide_bar: bool | None = None) -> None:
    """Write model.onnx, model.onnx.data, tokenizer.json and model.json into `out`.

    hide_bar: None = show the progress bar on a terminal only. Raises ExportError; `out` is
    then untouched.
    """
    source = open_source(model)
    with _beside(out) as folder:
        _check_room(source, folder, dtype)
        described = manifest(source, model, folder, dtype)  # first: it may refuse the tokenizer
        _graph(source, folder, dtype, hide_bar)
        text = json.dumps(described, indent=1, ensure_ascii=False) + "\n"
        (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def open_source(model: Path) -> GgufSource | HfSource:
    """The reader for what lies at `model`."""
    if model.is_dir():
        return HfSource(model)
    if model.is_file():
        return GgufSource(model)
    raise ExportError(f"{model} does not exist; give a GGUF file or a Hugging Face folder")


def _graph(source: GgufSource | HfSource, folder: Path, dtype: str, hide_bar: bool | None) -> None:
    total = _data_bytes(source, dtype)
    with tqdm(total=total, unit="B", unit_scale=True, desc="export", disable=hide_bar) as bar:
        emit = Emitter(folder, bar.update)
        weights = Weights(source, emit, bits=8 if dtype == "int8" else 0)
        float_type = np.dtype(np.float16 if dtype == "fp16" else np.float32)
        PlainGraph(emit, weights, float_type).build()
        emit.close([CONTRIB] if dtype == "int8" else [])


def _data_bytes(source: GgufSource | HfSource, dtype: str) -> int:
    """Size of model.onnx.data, near enough for the progress bar and the check of room."""
    h = source.hyper
    item = {"int8": 1.125, "fp16": 2, "fp32": 4}[dtype]
    layer = h.hidden * (2 * h.q_rows + 2 * h.kv_rows + 3 * h.ffn)
    table = h.vocab * h.hidden
    tables = table * (4 if dtype == "int8" else item)
    if dtype == "int8" or not h.tied:
        tables += table * item
    return int(h.layers * layer * item + tables + 4 * h.context_tokens * h.head_dim)


def _check_room(source: GgufSource | HfSource, folder: Path, dtype: str) -> None:
    needed = int(_data_bytes(source, dtype) * 1.02) + (64 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ExportError(
            f"not enough disk: {needed >> 20} MiB needed in {folder.parent}, {free >> 20} MiB "
            "free; free some or choose another --out"
        )


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A temporary directory next to `out` that takes its place when the block succeeds."""
    if out.exists() and not (out / MANIFEST_FILE).is_file():
        raise ExportError(f"{out} exists and is not a model directory; choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ExportError(f"cannot write to {out.parent}: {error.strerror}") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
            out.rename(old / "old")
            temporary.rename(out)
            shutil.rmtree(old)
        else:
            temporary.rename(out)
    except OSError as error:
        raise ExportError(f"cannot write {out}: {error.strerror}; free some disk") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
