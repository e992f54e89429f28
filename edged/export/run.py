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

from tqdm import tqdm

from edged.export import ExportError
from edged.export.blocks import BLOCK
from edged.export.cpu import CpuGraph
from edged.export.emit import Emitter
from edged.export.form import DTYPES, TARGETS, Form, shape_gears
from edged.export.gguf_source import GgufSource
from edged.export.hf_source import HfSource
from edged.export.manifest import manifest
from edged.export.plain import PlainGraph
from edged.export.weights import CONTRIB, Weights, check_tensors
from edged.models import MANIFEST_FILE


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
    parser.add_argument(
        "--dtype", choices=DTYPES, help="weights (default: auto for cpu, fp16 for the others)"
    )
    parser.add_argument(
        *("--target",),
        choices=TARGETS,
        default="cpu",
        help="cpu: onnxruntime's own operators; onnx: plain ones; twin: .om of a simulated board",
    )
    gears = parser.add_argument_group("shape gears of an .om")
    gears.add_argument("--batch-gears", type=_sizes, default=(1, 4, 8), metavar="1,4,8")
    gears.add_argument("--context-gears", type=_sizes, default=(512, 2048), metavar="512,2048")
    gears.add_argument("--prefill-chunk", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--progress", choices=("auto", "on", "off"), default="auto")
    args = parser.parse_args(argv)
    hide_bar = {"auto": None, "on": False, "off": True}[args.progress]
    try:
        shapes = shape_gears(args.batch_gears, args.context_gears, args.prefill_chunk)
        dtype = args.dtype or ("auto" if args.target == "cpu" else "fp16")
        form = Form(dtype, args.target, shapes if args.target == "twin" else ())
        export(args.model, args.out, form, hide_bar)
    except ExportError as error:
        print(f"edged export: {error}", file=sys.stderr)
        return 2
    return 0


def export(model: Path, out: Path, form: Form, hide_bar: bool | None = None) -> None:
    """Write model.onnx, model.onnx.data, tokenizer.json and model.json into `out`.

    hide_bar: None = show the progress bar on a terminal only. Raises ExportError; `out` is
    then untouched.
    """
    form.check()
    source = open_source(model)
    check_tensors(source)
    with _beside(out) as folder:
        _check_room(source, folder, form)
        described = manifest(source, model, folder, form)  # first: it may refuse the tokenizer
        _graph(source, folder, form, hide_bar)
        text = json.dumps(described, indent=1, ensure_ascii=False) + "\n"
        (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
        if form.target == "twin":
            _pack(folder, form)


def _pack(folder: Path, form: Form) -> None:
    """The graph and its weights become one .om; the parts go."""
    from edged.twin import om

    try:
        om.pack_decoder(folder, folder / "model.om", form.gears)
    except om.OmError as error:
        raise ExportError(str(error)) from None
    for path in folder.glob("model.onnx*"):
        path.unlink()


def _sizes(text: str) -> tuple[int, ...]:
    """ "1,4,8" -> (1, 4, 8)."""
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError("sizes are whole numbers above 0, with commas between")
    return sizes


def open_source(model: Path) -> GgufSource | HfSource:
    """The reader for what lies at `model`."""
    if model.is_dir():
        return HfSource(model)
    if model.is_file():
        return GgufSource(model)
    raise ExportError(f"{model} does not exist; give a GGUF file or a Hugging Face folder")


def _graph(source: GgufSource | HfSource, folder: Path, form: Form, hide_bar: bool | None) -> None:
    total = _data_bytes(source, form)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="export", disable=hide_bar) as bar,
        Emitter(folder, bar.update) as emit,
    ):
        weights = Weights(source, emit, form.recipe)
        if form.target == "cpu":
            CpuGraph(emit, weights).build()
        else:
            PlainGraph(emit, weights, form.float_type).build()
        emit.finish([CONTRIB] if form.target == "cpu" or form.recipe != "float" else [])
        bar.total = bar.n  # the estimate does not know which matrices have blocks of their own


def _data_bytes(source: GgufSource | HfSource, form: Form) -> int:
    """Size of model.onnx.data, or a little more: for the progress bar and the check of room."""
    h = source.hyper
    layer = h.hidden * (2 * h.q_rows + 2 * h.kv_rows + 3 * h.ffn)
    table = h.vocab * h.hidden
    item: float = form.float_type.itemsize
    if form.recipe == "float":
        tables = table * item * (1 if h.tied else 2)
    else:
        item = 1 + 4 / BLOCK
        tables = table * (2 + item)
    return int(h.layers * layer * item + tables + 4 * h.context_tokens * h.head_dim)


def _check_room(source: GgufSource | HfSource, folder: Path, form: Form) -> None:
    copies = 2 if form.target == "twin" else 1  # the graph's files and the .om made of them
    needed = int(copies * _data_bytes(source, form) * 1.02) + (64 << 20)
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
