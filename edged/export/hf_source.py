"""Reads a Hugging Face folder: sizes from config.json, matrices as float32 on demand.

The safetensors files are tensor_files.py's, GPTQ's and AWQ's packing is hf_packed.py's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from edged.export import ExportError
from edged.export.blocks import Affine
from edged.export.hf_packed import Packing, Parts, check_parts, packing
from edged.export.hyper import Hyper, family, scaled_rope
from edged.export.tensor_files import (
    Entry,
    read_floats,
    read_header,
    read_json,
    read_words,
    weight_files,
)

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


class HfSource:
    """One folder. Names of tensors are edged's own: `embed`, `norm`, `head`, `3.q`, ..."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_json(folder / "config.json")
        self.paths = weight_files(folder)
        self._entries = {
            name: entry for path in self.paths for name, entry in read_header(path).items()
        }
        self._packing = packing(self._config.get("quantization_config"))
        self.hyper = self._hyper().check()

    @property
    def stored_as(self) -> str:
        """How matrices are stored: "gptq 4 bits", "BF16", ..."""
        if self._packing is not None:
            return f"{self._packing.method} {self._packing.bits} bits"
        return self._find("embed").dtype

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of a matrix as float32 [stop - start, K]."""
        packed = self._packed(name)
        if packed is not None:
            return packed.rows(self._parts(packed, name), start, stop)
        return read_floats(self._find(name), start, stop)

    def matrix(self, name: str) -> np.ndarray:
        """A whole matrix [N, K] or vector [N] as float32."""
        return self.rows(name, 0, self.shape(name)[0])

    def affine(self, name: str) -> Affine | None:
        """Checkpoints are not stored in 4-bit blocks."""
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        packed = self._packed(name)
        if packed is not None:
            return packed.shape(self._part(name, "qweight").shape)
        return self._find(name).shape

    def label(self, name: str) -> str:
        """The tensor's name in the files."""
        layer, _, part = name.rpartition(".")
        return f"model.layers.{layer}.{_LAYER[part]}" if layer else _TOP[part]

    def _find(self, name: str) -> Entry:
        full = self.label(name)
        if full not in self._entries:
            raise ExportError(f"tensor {full} is missing in {self._folder}; the model is damaged")
        return self._entries[full]

    def _packed(self, name: str) -> Packing | None:
        """How this matrix is packed, if it is: norms and embeddings are not."""
        stored = self._stem(name) + "qweight" in self._entries
        return self._packing if stored else None

    def _stem(self, name: str) -> str:
        return self.label(name).removesuffix("weight")

    def _part(self, name: str, part: str) -> Entry:
        full = self._stem(name) + part
        if full not in self._entries:
            raise ExportError(f"tensor {full} is missing in {self._folder}; the model is damaged")
        return self._entries[full]

    def _parts(self, packed: Packing, name: str) -> Parts:
        words, zeros = (read_words(self._part(name, part)) for part in ("qweight", "qzeros"))
        scales = self._part(name, "scales")
        width = self.shape(name)[-1]
        if packed.method == "gptq" and self._stem(name) + "g_idx" in self._entries:
            groups = read_words(self._part(name, "g_idx")).astype(np.int64)
        else:
            count = max(1, math.prod(scales.shape[:1]))
            groups = np.arange(width) // max(1, -(-width // count))
        floats = read_floats(scales, 0, math.prod(scales.shape[:1]))
        return check_parts(Parts(words, zeros, floats, groups), packed, self.label(name))

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
            tied=not {"lm_head.weight", "lm_head.qweight"} & self._entries.keys(),
            family=parts,
        )

    def _refuse_unsupported(self) -> None:
        """What would silently change the answers is refused by name."""
        if self._config.get("hidden_act", "silu") != "silu":
            raise ExportError(f"activation {self._config['hidden_act']!r} is not supported")
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
