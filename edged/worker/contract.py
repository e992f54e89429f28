"""The graph contract: what model.json says, and whether a loaded graph keeps to it.

Errors name the file, the field and what to do; nothing here loads a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edged.errors import EdgedError

CONTRACT = "edged-graph"
VERSION = 2
MANIFEST_FILE = "model.json"
GRAPH_FILE = "model.onnx"
_AGAIN = "run `edged export` again"


class ContractError(EdgedError):
    """A model directory or graph this worker cannot run."""


class _Manifest(msgspec.Struct, frozen=True):
    """The part of model.json a worker needs; other fields are for the daemon."""

    contract: str
    version: int
    graph: str
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    tokenizer_vocab: int
    context_tokens: int
    eos_ids: list[int]
    cache_dtype: str
    gears: list[tuple[int, int, int]] = []


@dataclass(frozen=True)
class ModelSpec:
    """vocab: width of a row of logits; vocab_tokens: ids below it may be used and drawn.

    graph: the flavour ("edged-graph-v2" = plain operators). max_context_tokens: the model's
    own context; context_tokens: what this worker offers. gears: (B, T, S) compiled into an
    .om, which is then graph_file.
    """

    folder: Path
    name: str
    graph: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    vocab_tokens: int
    context_tokens: int
    max_context_tokens: int
    eos_ids: frozenset[int]
    cache_dtype: str
    gears: tuple[tuple[int, int, int], ...] = ()
    graph_file: str = GRAPH_FILE

    @property
    def graph_path(self) -> Path:
        return self.folder / self.graph_file

    def weight_bytes(self) -> int:
        """Size of the graph and its external data on disk."""
        return sum(path.stat().st_size for path in self.folder.glob(self.graph_file + "*"))


def read_spec(folder: Path, context_tokens: int = 0, graph_file: str = GRAPH_FILE) -> ModelSpec:
    """Read and check model.json; context_tokens > 0 caps the model's own. Raises ContractError.

    graph_file: what must lie beside it; an .om also caps the context at its longest gear.
    """
    path = folder / MANIFEST_FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Manifest)
    except OSError as error:
        raise ContractError(f"cannot read {path}: {error.strerror}; {_AGAIN}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ContractError(f"{path} is not a model description: {error}; {_AGAIN}") from None
    if (found.contract, found.version) != (CONTRACT, VERSION):
        raise ContractError(
            f"{path} speaks {found.contract} {found.version}, this worker {CONTRACT} {VERSION}; "
            f"{_AGAIN}"
        )
    for name in ("layers", "kv_heads", "head_dim", "vocab", "tokenizer_vocab", "context_tokens"):
        if getattr(found, name) < 1:
            raise ContractError(f"{path}: {name} must be at least 1; {_AGAIN}")
    if not (folder / graph_file).is_file():
        raise ContractError(f"{folder / graph_file} is missing; {_AGAIN}")
    own = found.context_tokens
    offered = min(own, context_tokens) if context_tokens > 0 else own
    if graph_file != GRAPH_FILE:
        offered = min([offered, *sorted({s for _, _, s in found.gears})[-1:]])
    return ModelSpec(
        folder=folder,
        name=found.name,
        graph=found.graph,
        layers=found.layers,
        kv_heads=found.kv_heads,
        head_dim=found.head_dim,
        vocab=found.vocab,
        vocab_tokens=min(found.vocab, found.tokenizer_vocab),
        context_tokens=offered,
        max_context_tokens=own,
        eos_ids=frozenset(found.eos_ids),
        cache_dtype=found.cache_dtype,
        gears=tuple(found.gears),
        graph_file=graph_file,
    )


# A tensor as a graph declares it: element type and sizes, a symbolic size is not an int.
Tensor = tuple[str, tuple[Any, ...]]


def check_graph(
    spec: ModelSpec, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> None:
    """Names, types and fixed sizes of edged-graph v2. Raises ContractError naming the tensor."""
    in_place = is_in_place(outputs)
    wanted_in: dict[str, Tensor] = {
        "input_ids": ("int32", (None, None)),
        "position_ids": ("int32", (None, None)),
        "past_len": ("int32", (None, 1)),
        "logit_idx": ("int32", (None,)),
        "kv_pos": ("int32", (None,)),
    }
    wanted_out: dict[str, Tensor] = {"logits": ("fp32", (None, spec.vocab))}
    rows = (None, spec.kv_heads, None, spec.head_dim)
    for past, new in cache_names(spec.layers, in_place):
        wanted_in[past] = (spec.cache_dtype, rows if in_place else (None,))
        wanted_out[new] = (spec.cache_dtype, rows)
    for found, wanted in ((inputs, wanted_in), (outputs, wanted_out)):
        for name, tensor in wanted.items():
            if name not in found:
                raise ContractError(f"{spec.graph_path} has no tensor {name}; {_AGAIN}")
            if not _fits(found[name], tensor):
                raise ContractError(
                    f"{spec.graph_path}: {name} is {found[name]}, model.json wants {tensor}; "
                    f"{_AGAIN}"
                )
        for name in found.keys() - wanted.keys():
            raise ContractError(f"{spec.graph_path} has an unknown tensor {name}; {_AGAIN}")


def is_in_place(outputs: Mapping[str, Tensor]) -> bool:
    """True for the flavour of onnxruntime's CPU: it writes new rows into the cache itself, so
    its outputs past ("present") are the memory of its inputs, shaped [B, Hk, S, D]."""
    return "present_k.0" in outputs


def cache_names(layers: int, in_place: bool = False) -> list[tuple[str, str]]:
    """(past, new) tensor names in the order of the cache block: k and v of each layer."""
    new = "present" if in_place else "new"
    return [(f"past_{kv}.{i}", f"{new}_{kv}.{i}") for i in range(layers) for kv in ("k", "v")]


def _fits(found: Tensor, wanted: Tensor) -> bool:
    """A wanted size of None, and a symbolic size found, match anything."""
    return (
        found[0] == wanted[0]
        and len(found[1]) == len(wanted[1])
        and all(
            w is None or not isinstance(f, int) or f == w
            for f, w in zip(found[1], wanted[1], strict=True)
        )
    )
