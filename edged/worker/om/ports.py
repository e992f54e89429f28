"""Which of a compiled model's tensors is which of edged-graph v2's, and which gears it has. Pure.

ATC may rewrite names ("/Cast:0:logits"), and some bindings give none: then shape and order decide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from edged.worker.contract import ContractError, ModelSpec, cache_names
from edged.worker.om.binding import Port
from edged.worker.om.codes import DYNAMIC_TENSOR_NAME, MAX_DIMS
from edged.worker.plan import Gears

# Written by the host before each step, in this order side by side in the arena.
SMALL_INPUTS = ("input_ids", "position_ids", "past_len", "logit_idx")
_RANKS = {"input_ids": 2, "position_ids": 2, "past_len": 2}
_CACHE_DTYPES = {"fp32": "float32", "fp16": "float16"}
_AGAIN = "run `edged export --target om` again"

Shape = tuple[int, int, int]  # (B, T, S)


@dataclass(frozen=True)
class Ports:
    """Graph names in the model's order; shape_input: index of the input that takes the gear.

    dims: of each shape, all dims of all other inputs, as the setter wants them.
    """

    inputs: list[str]
    outputs: list[str]
    shape_input: int
    dims: dict[Shape, list[int]]


def usable_gears(shapes: Sequence[Shape], slots: int, context_tokens: int) -> Gears:
    """What the step loop may plan with `slots` slots, up to the context that is offered.

    shapes: compiled, as model.json lists them. Raises ContractError when the set has holes.
    """
    if not shapes:
        raise ContractError(f"model.json lists no gears; {_AGAIN}")
    contexts = sorted({s for _, _, s in shapes})
    enough = next((s for s in contexts if s >= context_tokens), contexts[-1])
    contexts = [s for s in contexts if s <= enough]
    batch = sorted({b for b, t, _ in shapes if t == 1 and b <= slots})
    tokens = sorted({t for b, t, _ in shapes if b == 1} | {1})
    wanted = [(b, 1, s) for b in [1, *batch] for s in contexts]
    wanted += [(1, t, s) for t in tokens for s in contexts]
    missing = sorted(set(wanted) - set(shapes))
    if missing:
        raise ContractError(f"model.json lacks the gears (B, T, S) {missing}; {_AGAIN}")
    return Gears(tuple(batch), tuple(tokens), tuple(contexts))


def match(
    spec: ModelSpec,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    gears: Sequence[tuple[int, ...]],
    wanted: Sequence[Shape],
) -> Ports:
    """gears: dims the library lists; wanted: shapes that must be among them.

    Raises ContractError naming what does not fit model.json.
    """
    pairs = cache_names(spec.layers)
    names_in = [*SMALL_INPUTS, "kv_pos", *(past for past, _ in pairs), DYNAMIC_TENSOR_NAME]
    names_out = [*(new for _, new in pairs), "logits"]
    if len(inputs) != len(names_in) or len(outputs) != len(names_out):
        raise ContractError(
            f"{spec.graph_path} has {len(inputs)} inputs and {len(outputs)} outputs, model.json "
            f"wants {len(names_in)} (with the gears') and {len(names_out)}; {_AGAIN}"
        )
    # Without names: ATC keeps the graph's order, and the gears' input is added last.
    found_in = _by_suffix(inputs, names_in) or names_in
    found_out = _by_suffix(outputs, names_out) or _outputs_by_shape(outputs, names_out)
    _check(spec, dict(zip(found_in, inputs, strict=True)))
    _check(spec, dict(zip(found_out, outputs, strict=True)))
    own = [p for p in zip(found_in, inputs, strict=True) if p[0] != DYNAMIC_TENSOR_NAME]
    dims = _shapes(spec, own, gears)
    missing = [shape for shape in wanted if shape not in dims]
    if missing:
        raise ContractError(f"{spec.graph_path} lacks the gears (B, T, S) {missing}; {_AGAIN}")
    return Ports(found_in, found_out, found_in.index(DYNAMIC_TENSOR_NAME), dims)


def _by_suffix(ports: Sequence[Port], wanted: Sequence[str]) -> list[str] | None:
    """The graph's name of each port, if every one can be told by the end of its name."""
    known = set(wanted)
    found = []
    for port in ports:
        tails = [port.name[m.end() :] for m in re.finditer(r"^|[:/]", port.name)]
        name = next((tail for tail in tails if tail in known), None)
        if name is None:
            return None
        found.append(name)
    return found if len(set(found)) == len(wanted) else None


def _outputs_by_shape(ports: Sequence[Port], wanted: Sequence[str]) -> list[str]:
    """Logits are the one output of two dims; the new rows keep their order."""
    rows = iter([name for name in wanted if name != "logits"])
    return ["logits" if len(port.dims) == 2 else next(rows, "") for port in ports]


def _check(spec: ModelSpec, ports: dict[str, Port]) -> None:
    """Types, ranks and fixed sizes of one side."""
    cache = _CACHE_DTYPES[spec.cache_dtype]
    for name, port in ports.items():
        if name == DYNAMIC_TENSOR_NAME:
            continue
        if name == "logits":
            fits = port.dtype == "float32" and port.dims[-1:] == (spec.vocab,)
        elif name.startswith("new_"):
            fits = port.dtype == cache and port.dims[-1:] == (spec.head_dim,)
        elif name.startswith(("past_k.", "past_v.")):
            fits = port.dtype == cache and len(port.dims) == 1
        else:
            fits = port.dtype == "int32" and len(port.dims) == _RANKS.get(name, 1)
        if not fits:
            raise ContractError(
                f"{spec.graph_path}: {name} ({port.name}) is {port.dtype} {list(port.dims)}, not "
                f"what model.json describes; {_AGAIN}"
            )


def _shapes(
    spec: ModelSpec, own: Sequence[tuple[str, Port]], gears: Sequence[tuple[int, ...]]
) -> dict[Shape, list[int]]:
    """(B, T, S) of each gear, read from the dims it lists for all inputs."""
    total = sum(len(port.dims) for _, port in own)
    if total > MAX_DIMS:
        raise ContractError(
            f"{spec.graph_path} has {total} input dims, the library takes {MAX_DIMS}"
        )
    found: dict[Shape, list[int]] = {}
    for dims in gears:
        if len(dims) != total:
            raise ContractError(
                f"{spec.graph_path}: a gear lists {len(dims)} dims, not {total}; {_AGAIN}"
            )
        at, by_name = 0, {}
        for name, port in own:
            by_name[name] = dims[at : at + len(port.dims)]
            at += len(port.dims)
        (batch, tokens), (context,) = by_name["input_ids"], by_name["kv_pos"]
        window = (batch * spec.kv_heads * context * spec.head_dim,)
        if by_name["past_k.0"] != window:
            raise ContractError(
                f"{spec.graph_path}: the gear {(batch, tokens, context)} has a cache input of "
                f"{by_name['past_k.0']} elements, not {window}; {_AGAIN}"
            )
        found[(batch, tokens, context)] = list(dims)
    return found
