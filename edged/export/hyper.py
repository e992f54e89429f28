"""What a decoder of a known family looks like: sizes, rotary frequencies, optional parts.

Pure values; both readers fill them in and both graphs are built from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edged.export import ExportError


@dataclass(frozen=True)
class Family:
    """How one architecture differs from a plain llama decoder."""

    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_permuted: bool = False  # q and k rows are interleaved for GGUF's own rotary order


FAMILIES: dict[str, Family] = {
    "llama": Family(gguf_permuted=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
}


def family(architecture: str) -> Family:
    """Raises ExportError for an architecture there is no graph for."""
    if architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ExportError(f"unknown architecture {architecture!r}; edged exports {known}")
    return FAMILIES[architecture]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding, half-split order. scaling is kept for model.json and messages only.

    divisors: one per frequency (empty = all 1), the whole effect of linear and llama3 scaling.
    """

    theta: float
    scaling: str = "none"
    divisors: tuple[float, ...] = ()

    def tables(self, positions: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin, float32 [positions, head_dim / 2]; angles in float64."""
        exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        frequency = self.theta**-exponent
        if self.divisors:
            frequency = frequency / np.asarray(self.divisors, dtype=np.float64)
        angle = np.arange(positions, dtype=np.float64)[:, None] * frequency[None, :]
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@dataclass(frozen=True)
class Hyper:
    """Sizes of one model. vocab is the rows of the embedding, which may exceed the tokenizer."""

    architecture: str
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_tokens: int
    norm_eps: float
    rope: Rope
    tied: bool
    family: Family = field(default_factory=Family)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor the graph needs."""
        yield "embed", (self.vocab, self.hidden)
        yield "norm", (self.hidden,)
        if not self.tied:
            yield "head", (self.vocab, self.hidden)
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.hidden,),
            "ffn_norm": (self.hidden,),
            "q": (self.q_rows, self.hidden),
            "k": (self.kv_rows, self.hidden),
            "v": (self.kv_rows, self.hidden),
            "o": (self.hidden, self.q_rows),
            "gate": (self.ffn, self.hidden),
            "up": (self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }
        if self.family.qkv_bias:
            layer |= {"q_bias": (self.q_rows,), "k_bias": (self.kv_rows,)}
            layer |= {"v_bias": (self.kv_rows,)}
        if self.family.qk_norm:
            layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        for i in range(self.layers):
            for part, shape in layer.items():
                yield f"{i}.{part}", shape

    def check(self) -> Hyper:
        """Itself, or ExportError when the sizes contradict each other."""
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim)
        if min(*sizes, self.ffn, self.vocab, self.context_tokens) < 1:
            raise ExportError("the model's header holds a size below 1; the file is damaged")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ExportError(
                f"{self.heads} query heads, {self.kv_heads} kv heads and head size "
                f"{self.head_dim} do not fit together; the file is damaged"
            )
        return self


def scaled_rope(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> Rope:
    """Rope from a Hugging Face rope_scaling mapping: empty, default, linear or llama3."""
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "default":
        return Rope(theta)
    try:
        if kind == "linear":
            return Rope(theta, kind, (float(scaling["factor"]),) * (head_dim // 2))
        if kind == "llama3":
            return Rope(theta, kind, _llama3_divisors(theta, head_dim, scaling))
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"rope scaling {kind!r} lacks a number: {error}") from None
    raise ExportError(f"rope scaling {kind!r} is not supported; edged exports linear and llama3")


def _llama3_divisors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> tuple[float, ...]:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1 - smooth) / factor + smooth))
    return tuple(divisors)
