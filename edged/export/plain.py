"""edged-graph v2 in plain ONNX operators (opset 13): what a compiler for the NPU takes.

Inputs input_ids, position_ids [B,T], past_len [B,1], logit_idx [B], kv_pos [S], past_k.i and
past_v.i flat [B*Hk*S*D]; outputs logits [B,V], new_k.i and new_v.i [B,Hk,T,D].
"""

from __future__ import annotations

import numpy as np

from edged.export.emit import Emitter
from edged.export.hyper import Hyper
from edged.export.weights import Weights

# Every input but the cache's: int32, sizes and symbols.
_INPUTS: tuple[tuple[str, tuple[int | str, ...]], ...] = (
    ("input_ids", ("B", "T")),
    ("position_ids", ("B", "T")),
    ("past_len", ("B", 1)),
    ("logit_idx", ("B",)),
    ("kv_pos", ("S",)),
)
_MASKED = -1e4  # finite, so that a fully masked row stays finite in fp16 too


def graph_inputs(layers: int) -> list[tuple[str, tuple[int | str, ...]]]:
    """(name, dims) of every input in the graph's order; N = B*Hk*S*D of a cache input."""
    cache = [(f"past_{part}.{layer}", ("N",)) for layer in range(layers) for part in "kv"]
    return [*_INPUTS, *cache]


class PlainGraph:
    """Emits one decoder. dtype: of weights' results and cache, float32 or float16."""

    def __init__(self, emit: Emitter, weights: Weights, dtype: np.dtype) -> None:
        self.e = emit
        self.w = weights
        self.h: Hyper = weights.hyper
        self.dtype = dtype

    def build(self) -> None:
        e, h = self.e, self.h
        for name, dims in _INPUTS:
            e.input(name, np.int32, dims)
        self._shapes()
        self._masks()
        cos, sin = self.w.rope_tables(self.dtype)
        self.cos = e.op("Unsqueeze", e.op("Gather", cos, "position_ids"), self._axes(1))
        self.sin = e.op("Unsqueeze", e.op("Gather", sin, "position_ids"), self._axes(1))
        x = self.w.embed("input_ids", self.dtype)
        for layer in range(h.layers):
            x = e.op("Add", x, self._attention(layer, self._norm(x, f"{layer}.attn_norm")))
            x = e.op("Add", x, self._mlp(layer, self._norm(x, f"{layer}.ffn_norm")))
        flat = e.op("Reshape", x, self._ints(-1, h.hidden))
        last = self._norm(e.op("Gather", flat, "logit_idx"), "norm")
        self.w.head(last, self.dtype)
        e.output("logits", np.float32, ["B", h.vocab])

    def _ints(self, *values: int) -> str:
        return self.e.const(values, np.int64)

    def _axes(self, *values: int) -> str:
        return self.e.const(values, np.int64)

    def _shapes(self) -> None:
        """Shape vectors that depend on B, T and S, computed once."""
        e, h = self.e, self.h
        batch_tokens = e.op("Shape", "input_ids")
        batch = e.op("Slice", batch_tokens, self._ints(0), self._ints(1))
        tokens = e.op("Slice", batch_tokens, self._ints(1), self._ints(2))
        context = e.op("Shape", "kv_pos")
        self.cache_shape = e.op(
            "Concat", batch, self._ints(h.kv_heads), context, self._ints(h.head_dim), axis=0
        )
        self.split_at = e.op("Concat", context, tokens, axis=0)
        self.heads_shape = e.op(
            "Concat", batch, self._ints(h.heads), tokens, self._ints(h.head_dim), axis=0
        )

    def _masks(self) -> None:
        """Additive: [B,1,1,S] hides cache rows from past_len on, [B,1,G*T,T] hides the future."""
        e = self.e
        zero, masked = e.const(0.0, self.dtype), e.const(_MASKED, self.dtype)
        valid = e.op("Less", e.op("Unsqueeze", "kv_pos", self._axes(0)), "past_len")
        past = e.op("Where", valid, zero, masked)
        self.past_mask = e.op("Unsqueeze", past, self._axes(1, 2))
        query = e.op("Unsqueeze", "position_ids", self._axes(2))
        key = e.op("Unsqueeze", "position_ids", self._axes(1))
        new = e.op("Where", e.op("Less", query, key), masked, zero)
        new = e.op("Unsqueeze", new, self._axes(1))
        copies = [new] * self.h.group
        self.new_mask = e.op("Concat", *copies, axis=2) if self.h.group > 1 else new

    def _norm(self, x: str, weight: str) -> str:
        """RMSNorm over the last axis, in float32: squares overflow fp16."""
        e = self.e
        wide = x if self.dtype == np.float32 else e.op("Cast", x, to=1)
        square = e.op("Pow", wide, e.const(2.0, np.float32))
        mean = e.op("ReduceMean", square, axes=[-1])
        root = e.op("Sqrt", e.op("Add", mean, e.const(self.h.norm_eps, np.float32)))
        unit = e.op("Div", wide, root)
        if self.dtype != np.float32:
            unit = e.op("Cast", unit, to=10)
        return e.op("Mul", unit, self.w.vector(weight, self.dtype))

    def _rope(self, x: str, name: str = "") -> str:
        """Rotate [B,H,T,D] by halves."""
        e, half = self.e, self.h.head_dim // 2
        names = e.names("Split", 2)
        a, b = e.ops("Split", x, self._ints(half, half), names=names, axis=-1)
        first = e.op("Sub", e.op("Mul", a, self.cos), e.op("Mul", b, self.sin))
        second = e.op("Add", e.op("Mul", b, self.cos), e.op("Mul", a, self.sin))
        return e.op("Concat", first, second, name=name, axis=-1)

    def _split_heads(self, x: str, heads: int, norm: str = "", name: str = "") -> str:
        """[B,T,H*D] -> [B,H,T,D], with the family's per-head norm if there is one."""
        x = self.e.op("Reshape", x, self._ints(0, 0, heads, self.h.head_dim))
        if norm and self.h.family.qk_norm:
            x = self._norm(x, norm)
        return self.e.op("Transpose", x, name=name, perm=[0, 2, 1, 3])

    def _attention(self, layer: int, x: str) -> str:
        """Scores over the cache and over the new rows; neither K nor V is ever concatenated."""
        e, h = self.e, self.h
        qkv = self.w.linear(x, f"{layer}.qkv", self.dtype)
        split = self._ints(h.q_rows, h.kv_rows, h.kv_rows)
        q, k, v = e.ops("Split", qkv, split, names=e.names("Split", 3), axis=-1)
        q = self._rope(self._split_heads(q, h.heads, f"{layer}.q_norm"))
        q = e.op("Reshape", q, self._ints(0, h.kv_heads, -1, h.head_dim))
        k = self._rope(self._split_heads(k, h.kv_heads, f"{layer}.k_norm"), f"new_k.{layer}")
        v = self._split_heads(v, h.kv_heads, name=f"new_v.{layer}")
        for name in (k, v):
            e.output(name, self.dtype, ["B", h.kv_heads, "T", h.head_dim])
        past_k, past_v = (
            e.op("Reshape", e.input(f"past_{part}.{layer}", self.dtype, ["N"]), self.cache_shape)
            for part in "kv"
        )
        past = e.op("Add", self._scores(q, past_k), self.past_mask)
        new = e.op("Add", self._scores(q, k), self.new_mask)
        share = e.op("Softmax", e.op("Concat", past, new, axis=-1), axis=-1)
        past, new = e.ops("Split", share, self.split_at, names=e.names("Split", 2), axis=-1)
        mixed = e.op("Add", e.op("MatMul", past, past_v), e.op("MatMul", new, v))
        mixed = e.op("Transpose", e.op("Reshape", mixed, self.heads_shape), perm=[0, 2, 1, 3])
        joined = e.op("Reshape", mixed, self._ints(0, 0, h.q_rows))
        return self.w.linear(joined, f"{layer}.o", self.dtype)

    def _scores(self, q: str, k: str) -> str:
        return self.e.op("MatMul", q, self.e.op("Transpose", k, perm=[0, 1, 3, 2]))

    def _mlp(self, layer: int, x: str) -> str:
        e = self.e
        both = self.w.linear(x, f"{layer}.gate_up", self.dtype)
        split = self._ints(self.h.ffn, self.h.ffn)
        gate, up = e.ops("Split", both, split, names=e.names("Split", 2), axis=-1)
        silu = e.op("Mul", gate, e.op("Sigmoid", gate))
        return self.w.linear(e.op("Mul", silu, up), f"{layer}.down", self.dtype)
