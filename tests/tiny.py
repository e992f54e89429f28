"""Tiny random decoders, written as GGUF and as Hugging Face folders with the same weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2


@dataclass(frozen=True)
class Tiny:
    """One random model; head_dim need not be hidden / heads (as in qwen3)."""

    architecture: str = "llama"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    context: int = 256
    tied: bool = True
    llama3_factors: tuple[float, ...] = ()
    seed: int = 0

    def vocabulary(self) -> list[str]:
        return [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll"]

    def tensors(self) -> dict[str, np.ndarray]:
        """Weights under Hugging Face's names, rotary halves not interleaved."""
        rng = np.random.default_rng(self.seed)

        def normal(*shape: int) -> np.ndarray:
            # bfloat16 values, so that every format can hold them exactly.
            values = rng.normal(0, 0.15, shape).astype(ml_dtypes.bfloat16)
            return values.astype(np.float32)

        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = {
            "model.embed_tokens.weight": normal(len(self.vocabulary()), self.hidden),
            "model.norm.weight": 1 + normal(self.hidden),
        }
        if not self.tied:
            found["lm_head.weight"] = normal(len(self.vocabulary()), self.hidden)
        for i in range(self.layers):
            p = f"model.layers.{i}."
            found[p + "input_layernorm.weight"] = 1 + normal(self.hidden)
            found[p + "post_attention_layernorm.weight"] = 1 + normal(self.hidden)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                found[p + f"self_attn.{name}_proj.weight"] = normal(rows, self.hidden)
                if self.architecture == "qwen2":
                    found[p + f"self_attn.{name}_proj.bias"] = normal(rows)
            if self.architecture == "qwen3":
                found[p + "self_attn.q_norm.weight"] = 1 + normal(self.head_dim)
                found[p + "self_attn.k_norm.weight"] = 1 + normal(self.head_dim)
            found[p + "self_attn.o_proj.weight"] = normal(self.hidden, q)
            found[p + "mlp.gate_proj.weight"] = normal(self.ffn, self.hidden)
            found[p + "mlp.up_proj.weight"] = normal(self.ffn, self.hidden)
            found[p + "mlp.down_proj.weight"] = normal(self.hidden, self.ffn)
        return {
            name: values.astype(ml_dtypes.bfloat16).astype(np.float32)
            for name, values in found.items()
        }

    def write_gguf(
        self,
        path: Path,
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        drop: str = "",
    ) -> Path:
        """Matrices stored as `kind`; drop: a tensor (GGUF's name) to leave out."""
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.ffn)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(10_000.0)
        writer.add_vocab_size(len(self.vocabulary()))
        _add_tokenizer(writer, self.vocabulary())
        for name, values in self.tensors().items():
            stored = _gguf_name(name)
            if stored == drop:
                continue
            _add(writer, stored, self._permuted(stored, values), kind)
        if self.llama3_factors:
            writer.add_tensor("rope_freqs.weight", np.array(self.llama3_factors, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def write_hf(
        self, folder: Path, dtype: Any = np.float32, shards: int = 1, **config: Any
    ) -> Path:
        """config: entries of config.json to add or replace."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: values.astype(dtype) for name, values in self.tensors().items()}
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
        else:
            _write_shards(folder, tensors, shards)
        about = {
            "model_type": self.architecture,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "vocab_size": len(self.vocabulary()),
            "eos_token_id": EOS,
            "bos_token_id": 1,
            **config,
        }
        (folder / "config.json").write_text(json.dumps(about))
        _tokenizer(self.vocabulary()).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": SPECIALS[1], "eos_token": SPECIALS[2]})
        )
        return folder

    def _permuted(self, name: str, values: np.ndarray) -> np.ndarray:
        """`llama` GGUF files hold q and k with the rotary halves interleaved."""
        heads = {"attn_q": self.heads, "attn_k": self.kv_heads}.get(name.split(".")[-2])
        if self.architecture != "llama" or heads is None:
            return values
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)


_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, middle = name.split(".", 3)
    module, _, kind = middle.rpartition(".")
    return f"blk.{layer}.{_NAMES[module]}.{kind}"


def _add(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
        return
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: list[str]) -> None:
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([control if text in SPECIALS else normal for text in vocabulary])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)


def _tokenizer(vocabulary: list[str]) -> Tokenizer:
    made = Tokenizer(BPE({text: i for i, text in enumerate(vocabulary)}, [("h", "e"), ("l", "l")]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return made


def _write_shards(folder: Path, tensors: dict[str, np.ndarray], count: int) -> None:
    names = sorted(tensors)
    places = {}
    for shard in range(count):
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::count]}
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
