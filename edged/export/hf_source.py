"""Reads a Hugging Face folder: config.json and model.safetensors, whole or in shards.

The safetensors header is JSON with offsets; rows are read straight from the file, never mapped.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edged.export import ExportError
from edged.export.blocks import Affine
from edged.export.hyper import Hyper, family, scaled_rope

_TOP = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_MAX_HEADER_BYTES = 100 << 20


class _Entry(NamedTuple):
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class HfSource:
    """One folder. Names of tensors are edged's own: `embed`, `norm`, `head`, `3.q`, ..."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_json(folder / "config.json")
        self.paths = _weight_files(folder)
        self._entries = {
            name: entry for path in self.paths for name, entry in _header(path).items()
        }
        self.hyper = self._hyper().check()

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of a matrix as float32 [stop - start, K]."""
        entry = self._find(name)
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ExportError(
                f"unsupported quantisation {entry.dtype} of {name} in {entry.path.name}; "
                "take a bf16, fp16 or fp32 checkpoint"
            )
        width = math.prod(entry.shape[1:])
        raw = np.fromfile(
            entry.path,
            dtype=dtype,
            count=(stop - start) * width,
            offset=entry.offset + start * width * dtype.itemsize,
        ).reshape(stop - start, *entry.shape[1:])
        if entry.dtype == "BF16":
            wide: np.ndarray = raw.astype(np.uint32) << 16
            return wide.view(np.float32)
        return np.asarray(raw, dtype=np.float32)

    def matrix(self, name: str) -> np.ndarray:
        """A whole matrix [N, K] or vector [N] as float32."""
        return self.rows(name, 0, self.shape(name)[0])

    def affine(self, name: str) -> Affine | None:
        """Checkpoints are not stored in 4-bit blocks."""
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def label(self, name: str) -> str:
        """The tensor's name in the files."""
        layer, _, part = name.rpartition(".")
        return f"model.layers.{layer}.{_LAYER[part]}" if layer else _TOP[part]

    def _find(self, name: str) -> _Entry:
        full = self.label(name)
        if full not in self._entries:
            raise ExportError(f"tensor {full} is missing in {self._folder}; the model is damaged")
        return self._entries[full]

    def _hyper(self) -> Hyper:
        config = self._config
        arch = str(config.get("model_type", ""))
        parts = family(arch)
        self._refuse_unsupported()
        heads = self._int("num_attention_heads")
        head_dim = self._int("head_dim", self._int("hidden_size") // max(heads, 1))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ExportError(f"rope_scaling {rope!r} in config.json is not an object")
        theta = self._float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        return Hyper(
            architecture=arch,
            name=str(config.get("_name_or_path") or self._folder.resolve().name),
            layers=self._int("num_hidden_layers"),
            hidden=self._int("hidden_size"),
            heads=heads,
            kv_heads=self._int("num_key_value_heads", heads),
            head_dim=head_dim,
            ffn=self._int("intermediate_size"),
            vocab=self.shape("embed")[0],
            context_tokens=self._int("max_position_embeddings"),
            norm_eps=self._float(config.get("rms_norm_eps", 1e-6)),
            rope=scaled_rope(theta, head_dim, rope),
            tied="lm_head.weight" not in self._entries,
            family=parts,
        )

    def _refuse_unsupported(self) -> None:
        """What would silently change the answers is refused by name."""
        if self._config.get("hidden_act", "silu") != "silu":
            raise ExportError(f"activation {self._config['hidden_act']!r} is not supported")
        if self._config.get("quantization_config"):
            raise ExportError("pre-quantised checkpoints are not supported; take bf16 or a GGUF")
        biased = self._config.get("attention_bias") or self._config.get("mlp_bias")
        if biased and self._config.get("model_type") != "qwen2":
            raise ExportError("attention_bias / mlp_bias is not supported for this architecture")
        if self._config.get("use_sliding_window"):
            raise ExportError("sliding-window attention is not supported; set use_sliding_window")

    def _int(self, key: str, default: int | None = None) -> int:
        found = self._config.get(key)
        value = default if found is None else found
        if not isinstance(value, int):
            raise ExportError(f"{key} in {self._folder / 'config.json'} is not a whole number")
        return value

    def _float(self, value: Any) -> float:
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ExportError(f"{value!r} in {self._folder / 'config.json'} is no number above 0")
        return float(value)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file. Raises ExportError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ExportError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ExportError(f"{path} does not hold a JSON object")
    return data


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        paths = [folder / Path(name).name for name in names]
    else:
        paths = [folder / "model.safetensors"]
    for path in paths:
        if not path.is_file():
            raise ExportError(f"{path} is missing; download the model's safetensors files")
    return paths


def _header(path: Path) -> dict[str, _Entry]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        total = path.stat().st_size
        if not 2 <= size <= min(_MAX_HEADER_BYTES, total - 8):
            raise ExportError(f"{path} is not a safetensors file, or is cut off")
        try:
            header = json.loads(file.read(size))
        except ValueError:
            raise ExportError(f"{path} is not a safetensors file, or is cut off") from None
    try:
        tensors = {name: item for name, item in header.items() if name != "__metadata__"}
        return {name: _entry(path, item, 8 + size, total) for name, item in tensors.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{path} is damaged: {error}; download it again") from None


def _entry(path: Path, item: dict[str, Any], base: int, total: int) -> _Entry:
    """Raises ValueError when the sizes contradict each other or the file."""
    start, end = (base + int(offset) for offset in item["data_offsets"])
    shape = tuple(int(size) for size in item["shape"])
    dtype = _DTYPES.get(item["dtype"])
    if not base <= start <= end <= total or min(shape, default=0) < 0:
        raise ValueError("a tensor lies beyond its end")
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError("a tensor is not as long as its shape")
    return _Entry(path, str(item["dtype"]), shape, start)
