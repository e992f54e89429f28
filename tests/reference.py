"""The independent reference: llama.cpp on the same weights, and a plain driver of our graph.

Nothing here comes from the product's own step loop; tests compare that loop with these.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnxruntime as ort
import xllamacpp

from edged.machine import default_state_dir
from edged.models import ensure_exported, fetch_demo


def demo_gguf() -> Path:
    """The demo model as shipped (Q4_1), fetched if need be."""
    return fetch_demo(default_state_dir(), print)


def exported(dtype: str, target: str = "cpu") -> Path:
    """The model directory of the demo model, exported if need be."""
    return ensure_exported(demo_gguf(), default_state_dir(), dtype, target=target)


def demo_f32_gguf() -> Path:
    """The demo model's dequantised weights as an F32 GGUF, written once."""
    source = demo_gguf()
    target = source.with_name("SmolLM2-135M-Instruct.F32.gguf")
    if not target.exists():
        temporary = target.with_suffix(f".{os.getpid()}")
        write_f32(source, temporary)
        temporary.replace(target)
    return target


def write_f32(source: Path, target: Path) -> None:
    """Copy a GGUF file with all tensors dequantised to float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """llama.cpp (xllamacpp) on one GGUF file; token ids in and out, greedy."""

    def __init__(
        self, path: Path, *, context: int = 2048, slots: int = 1, threads: int = 2
    ) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context * slots
        params.n_parallel = slots
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.n_gpu_layers = 0
        # A float32 cache: the default float16 would differ from our float32 graph by itself.
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.fit_params = False
        params.ui = False
        params.warmup = False
        params.port = 0
        params.verbosity = -1
        self._server = xllamacpp.Server(params)
        # A server that is dropped before its loop runs joins that loop for ever: one task runs it.
        self._server.handle_completions({"prompt": [0], "max_tokens": 1})

    def generate(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        """Up to `count` greedy ids after the prompt; an end-of-sequence id (left out) ends it."""
        answer = self._complete(prompt_ids, count)["__verbose"]
        ids = list(answer["tokens"])
        return ids[:-1] if answer["stop_type"] == "eos" else ids

    def logprobs(self, prompt_ids: Sequence[int], top: int) -> dict[int, float]:
        """Natural-log probabilities of the `top` likeliest next ids."""
        answer = self._complete(prompt_ids, 1, n_probs=top)
        first = answer["choices"][0]["logprobs"]["content"][0]
        return {item["id"]: item["logprob"] for item in first["top_logprobs"]}

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """llama.cpp's own tokenizer, over its HTTP listener (the binding does not expose it)."""
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return list(json.load(response)["tokens"])

    def _complete(self, prompt_ids: Sequence[int], count: int, **more: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._server.handle_completions(
            {
                "prompt": list(prompt_ids),
                "max_tokens": count,
                "temperature": 0,
                "cache_prompt": False,
                "verbose": True,
                "return_tokens": True,
                **more,
            }
        )
        if "error" in answer:
            raise RuntimeError(f"llama.cpp: {answer['error']}")
        return answer


class Driver:
    """Runs a model directory of either flavour on onnxruntime, one sequence, the cache in NumPy.

    Nothing is bound in place here: a graph that returns its whole cache returns a copy.
    """

    def __init__(self, folder: Path, context: int = 256, threads: int = 2) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        self._session = ort.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._names = [output.name for output in self._session.get_outputs()]
        layers, heads, size = (self.about[key] for key in ("layers", "kv_heads", "head_dim"))
        dtype = np.float16 if self.about["cache_dtype"] == "fp16" else np.float32
        self.context = context
        self._cache = {
            f"{part}.{layer}": np.zeros((1, heads, context, size), dtype)
            for layer in range(layers)
            for part in "kv"
        }
        self.past = 0

    def feed(self, ids: Sequence[int], pad_to: int = 0) -> np.ndarray:
        """Append ids to the sequence; logits [V] after the last one. pad_to: run T at least so."""
        count = len(ids)
        padding = max(0, pad_to - count)
        positions = list(range(self.past, self.past + count))
        positions += [self.about["context_tokens"]] * padding
        inputs = {
            "input_ids": np.array([[*ids, *[0] * padding]], np.int32),
            "position_ids": np.array([positions], np.int32),
            "past_len": np.array([[self.past]], np.int32),
            "logit_idx": np.array([count - 1], np.int32),
            "kv_pos": np.arange(self.context, dtype=np.int32),
        }
        inplace = self.about["graph"].endswith("-inplace")
        for name, rows in self._cache.items():
            inputs[f"past_{name}"] = rows if inplace else rows.reshape(-1)
        outputs = dict(zip(self._names, self._session.run(None, inputs), strict=True))
        new = slice(self.past, self.past + count)
        for name, rows in self._cache.items():
            if inplace:
                rows[:, :, new] = outputs[f"present_{name}"][:, :, new]
            else:
                rows[:, :, new] = outputs[f"new_{name}"][:, :, :count]
        self.past += count
        logits: np.ndarray = outputs["logits"][0]
        return logits

    def reset(self) -> None:
        self.past = 0

    def generate(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        """Greedy ids after the prompt, up to `count` or an end-of-sequence id (not included)."""
        self.reset()
        logits = self.feed(prompt_ids)
        ids: list[int] = []
        while len(ids) < count:
            best = int(logits.argmax())
            if best in self.about["eos_ids"]:
                break
            ids.append(best)
            logits = self.feed([best])
        return ids


@cache
def chat_prompts() -> tuple[str, ...]:
    """Twelve chat prompts of different kinds, rendered in the demo model's template."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    questions = (
        "What is the capital of France?",
        "Write a haiku about a thermometer.",
        "Explain in two sentences why the sky is blue.",
        "List three prime numbers larger than 100.",
        "Translate 'good morning' into Spanish, German and Italian.",
        "A sensor reads 81 °C. The limit is 80 °C. What should I do?",
        "Write a Python function that reverses a string.",
        "Who wrote 'Pride and Prejudice', and when?",
        "Summarise: the pump stopped at 03:12, restarted at 03:15, and ran until noon.",
        "What's 17 * 23?",
        "Tell me a joke about databases 🤖.",
        "Continue: Once upon a time, in a village by the sea,",
    )
    return tuple(
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
        for question in questions
    )
