"""What an export is to be: how weights are stored, and whose operators the graph uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from edged.export import ExportError

DEFAULT_SOC = "Ascend310B4"
DTYPES = ("auto", "int8", "fp32", "fp16")
TARGETS = ("cpu", "onnx", "om", "twin")

# How matrices are stored: as the graph's own type, in 8-bit blocks, or in the source's own
# 4-bit blocks where it has them and 8-bit blocks elsewhere.
Recipe = Literal["float", "int8", "auto"]
Gear = tuple[int, int, int]


@dataclass(frozen=True)
class Form:
    """dtype: of the weights; target: "cpu" = onnxruntime's own operators (cpu.py), "onnx" = plain
    ones (plain.py), "om" = those compiled by ATC, "twin" = packed for the simulated board.
    gears: the (batch, tokens, context) shapes compiled into an .om; soc: the chip it is for.
    """

    dtype: str = "int8"
    target: str = "cpu"
    gears: tuple[Gear, ...] = ()
    soc: str = DEFAULT_SOC

    @property
    def recipe(self) -> Recipe:
        recipes: dict[str, Recipe] = {"auto": "auto", "int8": "int8"}
        return recipes.get(self.dtype, "float")

    @property
    def float_type(self) -> np.dtype[Any]:
        """Of everything outside blocks, the cache included."""
        return np.dtype(np.float16 if self.dtype == "fp16" else np.float32)

    @property
    def compiled(self) -> bool:
        """An .om with shape gears comes out."""
        return self.target in ("om", "twin")

    @property
    def graph(self) -> str:
        """The contract's flavour, as in model.json."""
        return "edged-graph-v2-inplace" if self.target == "cpu" else "edged-graph-v2"

    def check(self) -> Form:
        """Itself, or ExportError for a combination there is no graph for."""
        if self.target == "cpu" and self.dtype == "fp16":
            raise ExportError("fp16 is not for the cpu target; add --target onnx, or use fp32")
        if self.compiled and self.recipe != "float":
            raise ExportError("an .om holds plain weights; use --dtype fp16 or fp32")
        if self.compiled and not re.fullmatch(r"Ascend\d+[A-Za-z0-9_]*", self.soc):
            raise ExportError(
                f"--soc {self.soc!r} names no chip; use Ascend and the name `npu-smi info` shows, "
                "as in Ascend310B4"
            )
        return self


def shape_gears(batches: Sequence[int], contexts: Sequence[int], chunk: int) -> tuple[Gear, ...]:
    """One decode shape per batch and context, one prefill chunk of one sequence per context."""
    decode = [(b, 1, s) for s in sorted(set(contexts)) for b in sorted(set(batches))]
    return tuple(decode + [(1, chunk, s) for s in sorted(set(contexts)) if chunk > 1])
