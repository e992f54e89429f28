"""edged-graph v2 for onnxruntime's CPU: its fused operators, the cache appended in place.

Inputs as in plain.py (position_ids and kv_pos are accepted and not needed). Outputs logits and
present_k.i, present_v.i [B,Hk,S,D], to be bound to the memory of past_k.i and past_v.i: the new
rows are written at past_len, nothing else is touched, and only valid rows are read.
"""

from __future__ import annotations

import numpy as np

from edged.export.emit import Emitter
from edged.export.hyper import Hyper
from edged.export.weights import CONTRIB, Weights


class CpuGraph:
    """Emits one decoder, float32 outside its blocks. T > 1 is for B = 1 only."""

    def __init__(self, emit: Emitter, weights: Weights) -> None:
        self.e = emit
        self.w = weights
        self.h: Hyper = weights.hyper
        self.dtype: np.dtype[np.float32] = np.dtype(np.float32)

    def build(self) -> None:
        e, h = self.e, self.h
        e.input("input_ids", np.int32, ["B", "T"])
        e.input("position_ids", np.int32, ["B", "T"])
        e.input("past_len", np.int32, ["B", 1])
        e.input("logit_idx", np.int32, ["B"])
        e.input("kv_pos", np.int32, ["S"])
        self._lengths()
        self.cos, self.sin = self.w.rope_tables(self.dtype)
        x = self.w.embed("input_ids", self.dtype)
        y = self._norm(x, "0.attn_norm")
        for layer in range(h.layers - 1):
            x, y = self._skip(x, self._attention(layer, y), f"{layer}.ffn_norm")
            x, y = self._skip(x, self._mlp(layer, y), f"{layer + 1}.attn_norm")
        x, y = self._skip(x, self._attention(h.layers - 1, y), f"{h.layers - 1}.ffn_norm")
        x = e.op("Add", x, self._mlp(h.layers - 1, y))
        flat = e.op("Reshape", x, self._ints(-1, h.hidden))
        last = self._norm(e.op("Gather", flat, "logit_idx"), "norm")
        self.w.head(last, self.dtype)
        e.output("logits", np.float32, ["B", h.vocab])

    def _ints(self, *values: int) -> str:
        return self.e.const(values, np.int64)

    def _lengths(self) -> None:
        """What GroupQueryAttention asks for: the last valid index per row, the longest row."""
        e = self.e
        sizes = e.op("Shape", "input_ids")
        tokens = e.op("Cast", e.op("Slice", sizes, self._ints(1), self._ints(2)), to=6)
        total = e.op("Add", e.op("Reshape", "past_len", self._ints(-1)), tokens)
        self.last = e.op("Sub", total, e.const([1], np.int32))
        self.longest = e.op("ReduceMax", total, axes=[0], keepdims=0)

    def _norm(self, x: str, weight: str) -> str:
        return self.e.op(
            "SimplifiedLayerNormalization", x, self.w.vector(weight, self.dtype),
            axis=-1, epsilon=self.h.norm_eps, stash_type=1,
        )  # fmt: skip

    def _skip(self, x: str, branch: str, weight: str) -> tuple[str, str]:
        """x + branch, and its norm."""
        total, normed = self.e.names("Skip", 2)
        self.e.ops(
            "SkipSimplifiedLayerNormalization", x, branch, self.w.vector(weight, self.dtype),
            names=(normed, "", "", total), domain=CONTRIB, epsilon=self.h.norm_eps,
        )  # fmt: skip
        return total, normed

    def _attention(self, layer: int, x: str) -> str:
        e, h = self.e, self.h
        qkv = self.w.linear(x, f"{layer}.qkv", self.dtype)
        query = (qkv, "", "") if not h.family.qk_norm else self._normed_heads(layer, qkv)
        shape: list[int | str] = ["B", h.kv_heads, "S", h.head_dim]
        past = [e.input(f"past_{part}.{layer}", self.dtype, shape) for part in "kv"]
        present = [f"present_{part}.{layer}" for part in "kv"]
        out, *_ = e.ops(
            "GroupQueryAttention", *query, *past, self.last, self.longest, self.cos, self.sin,
            names=(*e.names("Attention", 1), *present), domain=CONTRIB,
            num_heads=h.heads, kv_num_heads=h.kv_heads, do_rotary=1,
            scale=1.0,  # 1/sqrt(D) is part of q's weights
        )  # fmt: skip
        for name in present:
            e.output(name, self.dtype, shape)
        return self.w.linear(out, f"{layer}.o", self.dtype)

    def _normed_heads(self, layer: int, qkv: str) -> tuple[str, str, str]:
        """q, k and v apart, q and k normed per head."""
        e, h = self.e, self.h
        split = self._ints(h.q_rows, h.kv_rows, h.kv_rows)
        q, k, v = e.ops("Split", qkv, split, names=e.names("Split", 3), axis=-1)
        q, k = (
            e.op("Reshape", self._norm(self._heads(x, n), f"{layer}.{name}"), self._ints(0, 0, -1))
            for x, n, name in ((q, h.heads, "q_norm"), (k, h.kv_heads, "k_norm"))
        )
        return q, k, v

    def _heads(self, x: str, count: int) -> str:
        return self.e.op("Reshape", x, self._ints(0, 0, count, self.h.head_dim))

    def _mlp(self, layer: int, x: str) -> str:
        e = self.e
        both = self.w.linear(x, f"{layer}.gate_up", self.dtype)
        split = self._ints(self.h.ffn, self.h.ffn)
        gate, up = e.ops("Split", both, split, names=e.names("Split", 2), axis=-1)
        silu = e.op("QuickGelu", gate, domain=CONTRIB, alpha=1.0)
        return self.w.linear(e.op("Mul", silu, up), f"{layer}.down", self.dtype)
