"""Reads a GGUF file: sizes from its header, matrices dequantised to float32 on demand.

Undoes what GGUF does to a model: reversed shapes and, for `llama`, permuted q and k rows.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from edged.export import ExportError
from edged.export.blocks import Affine
from edged.export.gguf_blocks import decoder
from edged.export.gguf_metadata import TensorEntry, read_header
from edged.export.hyper import Hyper, Rope, family

_TOP = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "rope_freqs": "rope_freqs.weight",
}
_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
# ".Q4_1", "-Q4_K_M", ".f16": how files are stored is not part of a model's name.
_QUANTISATION = re.compile(r"[.-]((i?q\d[a-z0-9_]*)|bf16|f16|f32)$", re.IGNORECASE)
_HEADS_OF = {"q": "heads", "q_bias": "heads", "k": "kv_heads", "k_bias": "kv_heads"}


class _Tensor(NamedTuple):
    """rows of row_bytes each; a vector is one row."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    rows: int
    row_bytes: int
    offset_bytes: int


class GgufSource:
    """One GGUF file. Names of tensors are edged's own: `embed`, `norm`, `head`, `3.q`, ..."""

    def __init__(self, path: Path) -> None:
        self.paths = [path]
        self._path = path
        self._pairs, entries = read_header(path)
        size_bytes = path.stat().st_size
        self._tensors = {entry.name: _tensor(entry, path, size_bytes) for entry in entries}
        self.hyper = self._hyper().check()

    @property
    def stored_as(self) -> str:
        """The type most matrices are stored in: "Q4_K", "F16", ..."""
        kinds: Counter[str] = Counter(
            str(t.kind.name) for t in self._tensors.values() if len(t.shape) > 1
        )
        return kinds.most_common(1)[0][0]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of a matrix as float32 [stop - start, K]."""
        return self._decode(name, slice(start, stop))

    def matrix(self, name: str) -> np.ndarray:
        """A whole matrix [N, K] or vector [N] as float32."""
        values = self._decode(name, slice(None))
        part = name.rpartition(".")[2]
        if self.hyper.family.gguf_permuted and part in _HEADS_OF:
            return _unpermute(values, getattr(self.hyper, _HEADS_OF[part]))
        return values

    def affine(self, name: str) -> Affine | None:
        """A matrix in its own 4-bit blocks, if it is stored so."""
        tensor = self._find(name)
        decode = decoder(tensor.kind)
        if decode is None:
            return None
        own = decode(self._raw(tensor, slice(None)))
        part = name.rpartition(".")[2]
        if self.hyper.family.gguf_permuted and part in _HEADS_OF:
            heads = getattr(self.hyper, _HEADS_OF[part])
            own = Affine(*(_unpermute(values, heads) for values in own))
        return own

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def label(self, name: str) -> str:
        """The tensor's name in the file."""
        layer, _, part = name.rpartition(".")
        return f"blk.{layer}.{_LAYER[part]}" if layer else _TOP[part]

    def _find(self, name: str) -> _Tensor:
        full = self.label(name)
        if full not in self._tensors:
            raise ExportError(f"tensor {full} is missing in {self._path.name}; the file is damaged")
        return self._tensors[full]

    def _raw(self, tensor: _Tensor, rows: slice) -> np.ndarray:
        """Rows of a tensor as they are stored, uint8 [rows, bytes]; of a vector, one row.

        Read, not mapped: pages of a map would stay in this process's resident memory.
        """
        start, stop, _ = rows.indices(tensor.rows)
        return np.fromfile(
            self._path,
            dtype=np.uint8,
            count=(stop - start) * tensor.row_bytes,
            offset=tensor.offset_bytes + start * tensor.row_bytes,
        ).reshape(stop - start, tensor.row_bytes)

    def _decode(self, name: str, rows: slice) -> np.ndarray:
        tensor = self._find(name)
        try:
            values = gguf.quants.dequantize(self._raw(tensor, rows), tensor.kind)
        except NotImplementedError:
            raise ExportError(
                f"unsupported quantisation {tensor.kind.name} of {self.label(name)}; "
                "take a Q8_0, Q4_K_M or F16 file of the same model"
            ) from None
        values = np.asarray(values, dtype=np.float32)
        return values[0] if len(tensor.shape) == 1 else values

    def _field(self, key: str, default: Any = None) -> Any:
        found = self._pairs.get(key, default)
        if found is None:
            raise ExportError(f"{key} is missing in {self._path.name}; the file is damaged")
        return found

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._field(key, default)
        if not isinstance(value, int):
            raise ExportError(f"{key} is {str(value)[:40]}, not a whole number; not supported")
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        value = self._field(key, default)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ExportError(f"{key} is {str(value)[:40]}, not a number above 0; not supported")
        return float(value)

    def _hyper(self) -> Hyper:
        arch = str(self._field("general.architecture"))
        parts = family(arch)
        heads = self._int(f"{arch}.attention.head_count")
        hidden = self._int(f"{arch}.embedding_length")
        head_dim = self._int(f"{arch}.attention.key_length", hidden // max(heads, 1))
        rotary = self._int(f"{arch}.rope.dimension_count", head_dim)
        if rotary != head_dim:
            raise ExportError(f"partial rotary embedding ({rotary} of {head_dim}) is not supported")
        if self._int(f"{arch}.expert_count", 0):
            raise ExportError("mixture-of-experts models are not supported; take a dense one")
        return Hyper(
            architecture=arch,
            name=_QUANTISATION.sub("", self._path.stem),
            layers=self._int(f"{arch}.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._int(f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn=self._int(f"{arch}.feed_forward_length"),
            vocab=self.shape("embed")[0],
            context_tokens=self._int(f"{arch}.context_length"),
            norm_eps=self._float(f"{arch}.attention.layer_norm_rms_epsilon"),
            rope=self._rope(arch, head_dim),
            tied="output.weight" not in self._tensors,
            family=parts,
        )

    def _rope(self, arch: str, head_dim: int) -> Rope:
        theta = self._float(f"{arch}.rope.freq_base", 10_000.0)
        if "rope_freqs.weight" in self._tensors:
            divisors = self._decode("rope_freqs", slice(None))
            return Rope(theta, "llama3", tuple(float(d) for d in divisors))
        kind = str(self._field(f"{arch}.rope.scaling.type", "none"))
        if kind == "linear":
            factor = self._float(f"{arch}.rope.scaling.factor")
            return Rope(theta, kind, (factor,) * (head_dim // 2))
        if kind != "none":
            raise ExportError(f"rope scaling {kind!r} is not supported; edged exports linear")
        return Rope(theta)


def _tensor(entry: TensorEntry, path: Path, size_bytes: int) -> _Tensor:
    """Raises ExportError for a type nobody knows and for what lies beyond the end of the file."""
    try:
        kind = gguf.GGMLQuantizationType(entry.kind)
    except ValueError:
        raise ExportError(
            f"unsupported quantisation, type {entry.kind} of {entry.name}; "
            "take a Q8_0, Q4_K_M or F16 file of the same model"
        ) from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = entry.shape[-1] // block * block_bytes
    rows = math.prod(entry.shape[:-1])
    if entry.shape[-1] % block or entry.offset_bytes + rows * row_bytes > size_bytes:
        raise ExportError(
            f"cannot read {path} as GGUF: {entry.name} lies beyond its end; fetch it again"
        )
    return _Tensor(kind, entry.shape, rows, row_bytes, entry.offset_bytes)


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleaved pairs (0, 1), (2, 3) ... of each head back to halves (0, D/2), (1, D/2 + 1)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
