"""The golden prompt: what the written graph itself answers, kept in model.json for comparison.

A worker that runs the same graph must agree. Greedy, on onnxruntime's CPU, one sequence; all
weights are in memory while it runs, which the rest of an export never asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edged.export.emit import DATA_FILE, GRAPH_FILE
from edged.export.tokenizer import TOKENIZER_FILE

TEXT = "The quick brown fox jumps over the lazy dog"
TOKENS = 8
TOP = 8
_SPARE_BYTES = 128 << 20
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


class Skipped(Exception):
    """There is no golden prompt; the message tells why."""


def golden(folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """{prompt_ids: [..], tokens: [8 ids], top_logprobs: per token 8 [id, natural log]}.

    about: the content of model.json. End-of-sequence ids do not end it. Raises Skipped.
    """
    ids = _prompt_ids(folder, about)
    usable = min(about["vocab"], about["tokenizer_vocab"])
    if max(ids) >= usable or len(ids) + TOKENS > about["context_tokens"]:
        raise Skipped("the model is too small for it")
    try:
        sequence = _Sequence(folder, about, len(ids) + TOKENS)
    except ImportError:
        raise Skipped("onnxruntime is not installed") from None
    tokens: list[int] = []
    tops: list[list[tuple[int, float]]] = []
    feed = ids
    for _ in range(TOKENS):
        logits = sequence.feed(feed)[:usable]
        if not np.isfinite(logits).all():
            raise Skipped("the graph's logits are not finite; use --dtype fp32")
        tops.append(_top(logits))
        tokens.append(int(logits.argmax()))
        feed = tokens[-1:]
    return {"prompt_ids": ids, "tokens": tokens, "top_logprobs": tops}


def _prompt_ids(folder: Path, about: Mapping[str, Any]) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    ids = list(tokenizer.encode(TEXT, add_special_tokens=False).ids)
    if about["add_bos"] and about["bos_id"] is not None:
        return [about["bos_id"], *ids]
    return ids


def _top(logits: np.ndarray) -> list[tuple[int, float]]:
    """The likeliest ids, best first; of equals the lower id."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    best = np.argsort(-wide, kind="stable")[:TOP]
    return [(int(i), round(float(wide[i]), 6)) for i in best]


class _Sequence:
    """The graph of either flavour with the cache of one sequence, `context` tokens long."""

    def __init__(self, folder: Path, about: Mapping[str, Any], context: int) -> None:
        import onnxruntime as ort

        _check_memory(folder, about)
        options = ort.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = ort.InferenceSession(
            str(folder / GRAPH_FILE), options, providers=["CPUExecutionProvider"]
        )
        self._names = [output.name for output in self._session.get_outputs()]
        self._in_place = str(about["graph"]).endswith("-inplace")
        self._context = context
        self._past = 0
        dtype = np.float16 if about["cache_dtype"] == "fp16" else np.float32
        self._cache = {
            f"{part}.{layer}": np.zeros((1, about["kv_heads"], context, about["head_dim"]), dtype)
            for layer in range(about["layers"])
            for part in "kv"
        }

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Append ids; float32 logits [V] after the last one."""
        end = self._past + len(ids)
        inputs = {
            "input_ids": np.array([ids], np.int32),
            "position_ids": np.arange(self._past, end, dtype=np.int32)[None],
            "past_len": np.array([[self._past]], np.int32),
            "logit_idx": np.array([len(ids) - 1], np.int32),
            "kv_pos": np.arange(self._context, dtype=np.int32),
        }
        for name, rows in self._cache.items():
            inputs[f"past_{name}"] = rows if self._in_place else rows.reshape(-1)
        outputs = dict(zip(self._names, self._session.run(None, inputs), strict=True))
        for name, rows in self._cache.items():
            if self._in_place:
                self._cache[name] = outputs[f"present_{name}"]
            else:
                rows[:, :, self._past : end] = outputs[f"new_{name}"]
        self._past = end
        logits: np.ndarray = outputs["logits"][0]
        return logits


def _check_memory(folder: Path, about: Mapping[str, Any]) -> None:
    """Raises Skipped. The runtime keeps a repacked copy; of fp16 weights one in float32."""
    copies = 3 if about["weights_dtype"] == "fp16" else 2
    needed = copies * (folder / DATA_FILE).stat().st_size + _SPARE_BYTES
    available = min(_meminfo_bytes(), _cgroup_bytes())
    if needed > available:
        raise Skipped(
            f"it needs {needed >> 20} MiB of memory, {int(available) >> 20} MiB are available"
        )


def _meminfo_bytes() -> float:
    """What the machine has left; without end where it does not say."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else math.inf


def _cgroup_bytes() -> float:
    """What this process's own group (a service's MemoryMax) may use in all."""
    try:
        lines = _CGROUP.read_text(encoding="ascii").splitlines()
        path = next(line[len("0::/") :] for line in lines if line.startswith("0::/"))
        limit = (_CGROUPS / path / "memory.max").read_text(encoding="ascii").strip()
    except (OSError, StopIteration):
        return math.inf
    return int(limit) if limit.isdecimal() else math.inf
