"""Tiny random decoders as model directories with an .om, and the real step loop on the twin."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from fakes_twin import make_board
from fakes_worker import Rig
from tiny import Tiny

from edged.core import Limits
from edged.export.form import Form
from edged.export.run import export
from edged.twin import om
from edged.twin.acl import Library
from edged.twin.state import TwinState
from edged.worker.contract import ModelSpec, read_spec
from edged.worker.om import OM_FILE
from edged.worker.om.binding import Device
from edged.worker.om.codes import DeviceError
from edged.worker.om.executor import OmExecutor

SLOTS = 4
CONTEXTS = (64, 160)
CHUNK = 16
BATCHES = (1, 2, 4)
SHAPES = [(b, 1, s) for b in BATCHES for s in CONTEXTS] + [(1, CHUNK, s) for s in CONTEXTS]


def tiny_model(folder: Path, architecture: str = "llama", dtype: str = "fp32") -> Path:
    """A model directory with the plain graph and its .om, which never says an end of sequence."""
    source = Tiny(architecture, seed=5).write_gguf(folder.with_suffix(".gguf"))
    export(source, folder, Form(dtype, "onnx"), hide_bar=True)
    om.pack_decoder(folder, folder / OM_FILE, SHAPES)
    about = json.loads((folder / "model.json").read_text())
    about |= {"gears": SHAPES, "eos_ids": []}
    (folder / "model.json").write_text(json.dumps(about))
    return folder


def om_spec(folder: Path, context_tokens: int = 0) -> ModelSpec:
    return read_spec(folder, context_tokens, OM_FILE)


class TwinBoard:
    """A twin and the one process that uses it."""

    def __init__(self, folder: Path, run_mode: int, board: str = "310b4", **command: float) -> None:
        make_board(folder, board, run_mode=run_mode, **command)
        self.state = TwinState(folder)
        self.device = Device(Library(folder))

    @property
    def allocations(self) -> int:
        return int(self.state.get("allocations_total"))

    def close(self) -> None:
        self.device.close()
        self.state.close()


@contextlib.contextmanager
def twin_rig(board: TwinBoard, folder: Path, slots: int = SLOTS) -> Iterator[Rig]:
    """The real step loop over the om executor."""
    spec = om_spec(folder)
    executor = OmExecutor(spec, slots, board.device)
    rig = Rig(executor, spec, Limits(slots, prefill_chunk=CHUNK))  # type: ignore[arg-type]
    try:
        yield rig
    finally:
        rig.close()
        with contextlib.suppress(DeviceError):  # one that was broken on purpose refuses this too
            executor.close()


def prompts(count: int, lengths: Sequence[int], vocab: int = 250, seed: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, size=lengths[i % len(lengths)]).tolist() for i in range(count)]
