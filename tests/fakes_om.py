"""Tiny random decoders as model directories with an .om, and the real step loop on the twin."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from fakes_twin import make_board
from fakes_worker import Rig

from edged.core import Limits
from edged.export.emit import Emitter
from edged.export.hyper import Hyper, Rope, family
from edged.export.plain import PlainGraph
from edged.export.weights import Weights
from edged.twin import om
from edged.twin.acl import Library
from edged.twin.state import TwinState
from edged.worker.contract import ModelSpec, read_spec
from edged.worker.om import OM_FILE
from edged.worker.om.binding import Device
from edged.worker.om.executor import OmExecutor

SLOTS = 4
CONTEXTS = (64, 160)
CHUNK = 16
BATCHES = (1, 2, 4)
SHAPES = [(b, 1, s) for b in BATCHES for s in CONTEXTS] + [(1, CHUNK, s) for s in CONTEXTS]


class RandomSource:
    """Weights drawn from a seed, named as the exporter asks for them."""

    def __init__(self, hyper: Hyper, seed: int) -> None:
        self.hyper = hyper
        self._seed = seed

    def shape(self, name: str) -> tuple[int, ...]:
        h = self.hyper
        part = name.rpartition(".")[2]
        return {
            "embed": (h.vocab, h.hidden),
            "head": (h.vocab, h.hidden),
            "norm": (h.hidden,),
            "attn_norm": (h.hidden,),
            "ffn_norm": (h.hidden,),
            "q_norm": (h.head_dim,),
            "k_norm": (h.head_dim,),
            "q": (h.q_rows, h.hidden),
            "k": (h.kv_rows, h.hidden),
            "v": (h.kv_rows, h.hidden),
            "q_bias": (h.q_rows,),
            "k_bias": (h.kv_rows,),
            "v_bias": (h.kv_rows,),
            "o": (h.hidden, h.q_rows),
            "gate": (h.ffn, h.hidden),
            "up": (h.ffn, h.hidden),
            "down": (h.hidden, h.ffn),
        }[part]

    def matrix(self, name: str) -> np.ndarray:
        rng = np.random.default_rng([self._seed, *name.encode()])
        shape = self.shape(name)
        if "norm" in name:
            return rng.uniform(0.5, 1.5, shape).astype(np.float32)
        return rng.normal(0, 2.0 / np.sqrt(shape[-1]), shape).astype(np.float32)

    def affine(self, name: str) -> None:
        """Nothing is stored in blocks here."""

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.matrix(name)[start:stop]


def tiny_model(folder: Path, architecture: str = "llama", dtype: str = "fp32") -> Path:
    """A model directory with model.onnx, model.om and model.json, without a tokenizer."""
    hyper = Hyper(
        architecture=architecture,
        name=f"tiny-{architecture}",
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=96,
        vocab=120,
        context_tokens=192,
        norm_eps=1e-5,
        rope=Rope(10000.0),
        tied=True,
        family=family(architecture),
    )
    folder.mkdir(parents=True)
    emit = Emitter(folder, lambda _: None)
    weights = Weights(RandomSource(hyper, 5), emit, "float")
    PlainGraph(emit, weights, np.dtype(np.float16 if dtype == "fp16" else np.float32)).build()
    emit.close()
    about = {
        "contract": "edged-graph",
        "version": 2,
        "graph": "edged-graph-v2",
        "tokenizer_vocab": hyper.vocab,
        "eos_ids": [],
        "weights_dtype": dtype,
        "cache_dtype": dtype,
        "gears": SHAPES,
    }
    fields = ("name", "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")
    about |= {name: getattr(hyper, name) for name in (*fields, "context_tokens")}
    (folder / "model.json").write_text(json.dumps(about))
    om.pack_decoder(folder, folder / OM_FILE, SHAPES)
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
        executor.close()


def prompts(count: int, lengths: Sequence[int], vocab: int = 120, seed: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, size=lengths[i % len(lengths)]).tolist() for i in range(count)]
