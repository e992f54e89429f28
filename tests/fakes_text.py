"""Support for the text tests: nasty strings, small vocabularies, llama.cpp as the reference."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CONTROLS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|user|>", "<|assistant|>", "<|system|>"),
    *("</think>", "[INST]"),
)
USER_DEFINED = ("<tool_call>", "</tool_call>")

_WORDS = ("hello", "World", "don't", "I'LL", "we've", "it's", "naïve", "Straße", "ĳs", "ΑΣΣ")
_SCRIPTS = (
    "漢字かな交じり文です。",
    "한국어 문장입니다",
    "中文，没有空格的句子！",
    "Привет, мир",
    "Ελληνικά κείμενο",
    "שלום עולם",
    "مرحبا بالعالم ١٢٣",
    "हिन्दी में लिखा",
    "ไทยไม่มีช่องว่าง",
    "தமிழ்",
    "ქართული",
    "አማርኛ",
    "བོད་ཡིག",
    "ᚠᚢᚦᚨᚱᚲ",
    "𐌰𐌱𐌲 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛",
)
_EMOJI = (
    "🤖",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "👍🏽👍🏿",
    "🇩🇪🇫🇷",
    "1️⃣2️⃣",
    "❤️",
    "☃︎",
    "🫠🫨",
)
_SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\t\t",
    " \t ",
    "\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    "\r\n\r\n",
    "\r",
    " \n ",
    "\n \n",
    "\u00a0",
    "\u2003\u2003",
    "\u3000",
    "\u2028",
    "\u0085",
    "\x0b\x0c",
)
_DIGITS = (
    "1",
    "12",
    "123",
    "1234",
    "1234567890123",
    "3.14159",
    "1,000,000",
    "2024-01-31T23:59:59Z",
    "٣٤٥٦٧",
    "१२३४",
    "１２３４５",
    "²³⁴⁵",
    "½¾",
    "ⅣⅫ",
    "①②③④",
    "0x1F",
    "1e-9",
)
_MARKS = (
    "e\u0301",
    "a\u0308\u0304",
    "\u0301",
    " \u0301x",
    "Z\u0351\u036b\u0343\u036a\u0302a\u0334",
    "क्षि",
    "\u200d",
    "\u200b",
    "\u200e\u202eabc\u202c",
    "\ufeff",
    "\ufe0f",
    "\u00ad",
)
_CONTROL_CHARS = ("\x00", "a\x00b", "\x01\x02\x1b[0m", "\x7f", "\x80\x9f", "\x1f")
_PRIVATE = ("\ue000", "\uf8ff", "\U000f0000", "\U0010fffd", "\ufffd", "\ufffe", "\ufdd0")
_CODE = (
    "def f(x):\n    return x+1\n",
    "for(int i=0;i<10;++i){a[i]=*p++;}",
    "<div class='a'>\n\t<p>&nbsp;</p>\n</div>",
    '{"a": [1, 2.5, null], "b": "c\\n"}',
    "SELECT * FROM t WHERE a='x';--",
    "#!/bin/sh\necho \"$HOME\" | sed 's/\\//_/g'",
    "https://example.org/a?b=c&d=%20#e",
    "a_b__c___d CamelCaseHTTPServer snake_case",
    "!!!???...;;;:::---===+++***///\\\\\\|||&&&",
    "«»„“”‘’‚…—–·•†‡§¶©®™€£¥",
    "$$$ ^^^ ``` ~~~ <<>> <=> != === =>",
    "\\u0041 \\x41 %s {}",
)
_CONTRACTIONS = ("'s", "'S", "'t", "'T", "'re", "'RE", "'rE", "'ve", "'Ve", "'m", "'M")
_MORE_CONTRACTIONS = ("'ll", "'LL", "'lL", "'d", "'D", "x's", " 's", "''s", "'sx", "1's", "’s", "'")
_LITERALS = (
    "<|im_end|>",
    "<|im_start|>system\nobey",
    "a<|endoftext|>b",
    "<|im_",
    "end|>",
    "<|im_end|",
    "<|IM_END|>",
    "< |im_end|>",
    "<|<|im_end|>im_end|>",
    "<tool_call>{}</tool_call>",
    "<|eot_id|><|eot_id|>",
    "[INST]</s><s>",
)


def nasty_strings() -> list[str]:
    """More than 200 different strings that tokenizers tend to disagree on."""
    parts = [
        *_WORDS,
        *_SCRIPTS,
        *_EMOJI,
        *_SPACES,
        *_DIGITS,
        *_MARKS,
        *_CONTROL_CHARS,
        *_PRIVATE,
        *_CODE,
        *_CONTRACTIONS,
        *_MORE_CONTRACTIONS,
        *_LITERALS,
    ]
    around = [f"{space}a{space}{space}1{space}!{space}" for space in _SPACES]
    joined = [left + right for left, right in zip(parts, parts[7:], strict=False)]
    spaced = [left + " " + right for left, right in zip(parts, parts[31:], strict=False)]
    long = ["a" * 3000, "ab" * 1500, "字" * 500, "1" * 1000, " " * 700 + "x", "\n" * 300, "é" * 999]
    long += [".".join(parts), "'".join(_WORDS) * 5, "x" + "\t" * 99 + "y", "\r\n" * 50 + " z"]
    return ["", *parts, *around, *joined, *spaced, *long]


def crossing_tokenizer(strings: Sequence[str], tokens: int = 3000) -> Tokenizer:
    """Byte-level BPE whose merges cross every boundary, so that each different cut shows.

    Trained on the strings themselves, without cutting them; CONTROLS have the ids 0, 1, ...
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        min_frequency=1,
        special_tokens=[*CONTROLS, *USER_DEFINED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=12,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:400] for text in strings], trainer)
    return tokenizer


def write_gguf(path: Path, vocabulary: Tokenizer, pre: str | None, **changes: object) -> Path:
    """A tiny random llama model around a vocabulary, as llama.cpp loads it.

    changes: metadata values to set ("tokenizer.ggml.add_bos_token" as add_bos_token, ...);
    model= replaces tokenizer.ggml.model.
    """
    import gguf
    import numpy as np

    width, context = 32, 64
    described = json.loads(vocabulary.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in described["merges"]]
    kinds = dict.fromkeys(CONTROLS, 3) | dict.fromkeys(USER_DEFINED, 4)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // 2)
    writer.add_tokenizer_model(str(changes.pop("model", "gpt2")))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in changes.items():
        getattr(writer, f"add_{key}")(value)
    random = np.random.default_rng(1)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32))

    tensor("token_embd.weight", len(tokens), width)
    tensor("output_norm.weight", width)
    for name in ("attn_norm", "ffn_norm"):
        tensor(f"blk.0.{name}.weight", width)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        tensor(f"blk.0.{name}.weight", width, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(folder: Path, template: str | None, tokens: int = 600, **manifest: object) -> Path:
    """A model directory with a small vocabulary, made by the real exporter of tokenizers."""
    from edged.export.tokenizer import export_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    source = write_gguf(folder / "source.gguf", crossing_tokenizer(_LITERALS, tokens), "smollm")
    info = export_tokenizer(source, folder)
    described = {
        "name": "small",
        "context_tokens": 4096,
        "tokenizer_vocab": info.vocab_size,
        "eos_ids": info.eos_ids,
        "bos_id": info.bos_id,
        "add_bos": info.add_bos,
        "bos_token": info.bos_token,
        "eos_token": info.eos_token,
        "chat_template": template,
        "tokenizer_hash": info.tokenizer_hash,
    }
    (folder / "model.json").write_text(json.dumps(described | manifest))
    return folder


class LlamaCpp:
    """llama.cpp's own tokenizer of a GGUF file, through its server's /tokenize route."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        self._http = http.client.HTTPConnection(host, int(port), timeout=60)

    def ids(self, text: str, parse_special: bool = False, add_special: bool = False) -> list[int]:
        body = {"content": text, "parse_special": parse_special, "add_special": add_special}
        self._http.request(
            "POST", "/tokenize", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = self._http.getresponse()
        found = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"llama.cpp refused {text[:40]!r}: {found}")
        ids: list[int] = found["tokens"]
        return ids

    def close(self) -> None:
        self._http.close()


@contextmanager
def llama_cpp(gguf_path: Path) -> Iterator[LlamaCpp]:
    """Runs llama.cpp on a file for the length of the block."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf_path)
    params.n_ctx = 64
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = 1
    params.n_threads_http = 1
    params.warmup = False
    params.ui = False
    params.port = 0
    server = xllamacpp.Server(params)
    # A server that is dropped before its loop runs joins that loop for ever: one task runs it.
    server.handle_completions({"prompt": [0], "max_tokens": 1})
    client = LlamaCpp(server.listening_address)
    try:
        yield client
    finally:
        client.close()
        del server
