"""The pure parts of the upstream engine: words for a server, its events, its refusals, its key."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged import config
from edged.core import Chat, ChatMessage, Prompt, Request, Sampling, TokenLogprob
from edged.engine.upstream.asking import Seam, ask, unsuited
from edged.engine.upstream.dial import dial_of
from edged.engine.upstream.events import Characters, Events, piece
from edged.engine.upstream.logprobs import after
from edged.engine.upstream.refusal import Busy, fault_of, retry_after_s
from edged.errors import ConfigError, EngineFault, RowFault
from edged.settings import Upstream

USER = ChatMessage("user", "hi")
BEGUN = ChatMessage("assistant", "So ")
TALK = Chat((USER,))
OPEN = Chat((USER, BEGUN), continue_final=True)
NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=timezone.utc)


def asked(
    source: Chat | Prompt | None = TALK, stop: tuple[str, ...] = (), **sampling: Any
) -> Request:
    return Request("r", "m", (1, 2), 50, Sampling(**sampling), stop, source=source)


# --- what can be asked -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "request_", "begun", "lacks"),
    [
        ("openai", asked(), False, ""),
        ("openai", asked(), True, "continue_final_message"),
        ("openai", asked(Prompt("x")), True, ""),
        ("openai", asked(OPEN), False, "continue_final_message"),
        ("openai", asked(top_k=4), False, "top_k"),
        ("openai", asked(min_p=0.1), False, "min_p"),
        ("openai", asked(repetition_penalty=1.1), False, "repetition_penalty"),
        ("openai", asked(ignore_eos=True), False, "ignore_eos"),
        ("openai", asked(Chat((USER,), template_kwargs={"x": 1})), False, "chat_template_kwargs"),
        ("vllm", asked(top_k=4, min_p=0.1, ignore_eos=True), True, ""),
        ("vllm", asked(Chat((USER,), template_kwargs={"x": 1})), False, ""),
        (
            "vllm",
            asked(Chat((USER,), template_kwargs={"enable_thinking": True})),
            False,
            "chat_template_kwargs",
        ),
        ("vllm", asked(OPEN), True, ""),
        ("vllm", asked(Chat((USER, BEGUN))), False, ""),
        ("llama.cpp", asked(Chat((USER, BEGUN))), False, "messages"),
        ("llama.cpp", asked(OPEN), False, ""),
        ("edged", asked(None), False, "prompt"),
        ("openai", asked(logprobs=3), False, ""),
        ("edged", dataclasses.replace(asked(), forwarded=True), False, "X-Edged-Forwarded"),
        ("edged", asked(Chat((USER,), tools=({},))), False, "tools"),
    ],
)
def test_what_a_kind_of_server_cannot_do_is_named(
    kind: str, request_: Request, begun: bool, lacks: str
) -> None:
    """Nothing that changes the answer is left out in silence."""
    assert unsuited(request_, begun, kind) == lacks


def test_every_sampling_rule_is_sent_also_in_its_neutral_form() -> None:
    """Servers have defaults of their own (top_k 40, min_p 0.05); ours hold."""
    for kind, repetition in (("vllm", "repetition_penalty"), ("llama.cpp", "repeat_penalty")):
        body = ask(asked(stop=("x",)), "", kind, "m").body
        assert body["top_k"] in (0, -1)
        assert (body["min_p"], body["top_p"], body[repetition]) == (0.0, 1.0, 1.0)
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
    strict = ask(asked(stop=("x",)), "", "openai", "m").body
    assert set(strict) == {
        *("model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p"),
        *("presence_penalty", "frequency_penalty", "seed", "stop"),
    }


def test_penalties_look_back_over_everything_on_llama_cpp() -> None:
    """Its own window is 64 tokens; off stays off, for the window costs memory."""
    assert ask(asked(), "", "llama.cpp", "m").body["repeat_last_n"] == 0
    wide = ask(asked(presence_penalty=0.5), "", "llama.cpp", "m").body
    assert wide["repeat_last_n"] >= 52


def test_a_begun_answer_is_the_assistants_open_message() -> None:
    """Blanks at its end stay here: servers differ in whether they keep them."""
    asking = ask(asked(stop=("x",)), "It is so,\n ", "vllm", "m")

    assert asking.path == "/chat/completions"
    assert asking.body["messages"][-1] == {"role": "assistant", "content": "It is so,"}
    assert asking.body["continue_final_message"] is True
    assert asking.body["add_generation_prompt"] is False
    assert asking.blanks == "\n "
    assert "stop" not in asking.body  # it may have begun in what is written
    assert asking.body["seed"] != ask(asked(), "", "vllm", "m").body["seed"]


def test_a_clients_own_begun_answer_goes_on_behind_it() -> None:
    """continue_final_message and what we have written since are one message."""
    asking = ask(asked(OPEN), "it goes", "vllm", "m")
    assert asking.body["messages"][-1]["content"] == "So it goes"
    assert [m["role"] for m in asking.body["messages"]] == ["user", "assistant"]
    fresh = ask(asked(OPEN), "", "llama.cpp", "m")
    assert (fresh.body["messages"][-1]["content"], fresh.blanks) == ("So", " ")
    assert fresh.body["echo"] is False


def test_an_answer_of_blanks_only_begins_anew() -> None:
    """No server can continue an empty message."""
    asking = ask(asked(), "\n\n", "vllm", "m")
    assert len(asking.body["messages"]) == 1
    assert "continue_final_message" not in asking.body
    assert asking.blanks == "\n\n"


def test_a_raw_prompt_grows() -> None:
    """Completion prompts need no template: what is written is put behind them."""
    asking = ask(asked(Prompt("Once ")), "upon ", "openai", "m")
    assert (asking.path, asking.body["prompt"], asking.blanks) == ("/completions", "Once upon", " ")
    assert ask(asked(Prompt("Once ")), "", "openai", "m").body["prompt"] == "Once "


blanks = st.text(" \n\t", max_size=4)


@given(
    before=blanks, again=blanks, word=st.text("ab ", max_size=4), cuts=st.sets(st.integers(1, 8))
)
def test_blanks_at_the_seam_are_never_doubled_nor_lost(
    before: str, again: str, word: str, cuts: set[int]
) -> None:
    """However the answer is cut: what equals the blanks already written is dropped, once."""
    text = again + word
    seam, shown = Seam(before), ""
    for start, end in pairwise([0, *sorted(c for c in cuts if c < len(text)), len(text)]):
        shown += seam.push(text[start:end])
    same = 0
    while same < min(len(before), len(text)) and before[same] == text[same]:
        same += 1
    assert shown == text[same:]


# --- events ----------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    events=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=8)),
    ends=st.lists(st.sampled_from(["\n", "\r\n", "\r"]), min_size=1, max_size=4),
    cuts=st.sets(st.integers(1, 60)),
)
def test_events_do_not_depend_on_how_the_bytes_arrive(
    events: list[str], ends: list[str], cuts: set[int]
) -> None:
    """Any line end, any cut, inside characters too; comments and other fields are no events."""
    parts = [": ping\n\n", "event: x\nid: 1\n\n"]
    for number, event in enumerate(events):
        end = ends[number % len(ends)]
        parts.append(f"data: {event}{end}{end}")
    data = "".join(parts).encode() + b"\n"
    reader, found = Events(), []
    for start, stop in pairwise([0, *sorted(c for c in cuts if c < len(data)), len(data)]):
        found += reader.feed(data[start:stop])
    assert found == events


def test_the_lines_of_one_event_are_joined() -> None:
    """As the standard for server-sent events has it."""
    assert Events().feed(b"data: a\ndata:b\n\n") == ["a\nb"]


def test_an_endless_event_is_cut_off() -> None:
    """Neither a long line nor many lines fill the memory."""
    for line in (b"data: " + b"x" * 70_000, b"data: " + b"x" * 70_000 + b"\n", b"y" * 70_000):
        reader = Events()
        with pytest.raises(EngineFault):
            for _ in range(40):
                reader.feed(line)


@pytest.mark.parametrize(
    ("event", "text", "finish", "tokens"),
    [
        ('{"choices":[{"delta":{"content":"a"}}]}', "a", None, None),
        ('{"choices":[{"delta":{"content":null,"role":"assistant"}}]}', "", None, None),
        ('{"choices":[{"text":"b","finish_reason":"length"}]}', "b", "length", None),
        ('{"choices":[],"usage":{"completion_tokens":7}}', "", None, 7),
        ('{"choices":[{"index":1,"delta":{"content":"x"}}]}', "", None, None),
        ('{"choices":[{"delta":{"reasoning_content":"hm"}}]}', "", None, None),
        ('{"choices":null,"usage":null}', "", None, None),
    ],
)
def test_a_chunk_says_text_finish_and_tokens(
    event: str, text: str, finish: str | None, tokens: int | None
) -> None:
    """Both APIs, with what servers add to them; hidden reasoning is no part of the answer."""
    found = piece(event)
    assert (found.text, found.finish, found.tokens) == (text, finish, tokens)


@given(text=st.text(st.characters(codec="utf-16"), max_size=6), cuts=st.sets(st.integers(1, 11)))
def test_surrogates_in_two_halves_are_whole_characters(text: str, cuts: set[int]) -> None:
    """However a server cuts its UTF-16."""
    units = text.encode("utf-16-le")
    whole = Characters()
    edges = [0, *sorted(2 * c for c in cuts if 2 * c < len(units)), len(units)]
    halves = [units[a:b].decode("utf-16-le", "surrogatepass") for a, b in pairwise(edges)]
    assert "".join(map(whole.push, halves)) == text


def test_log_probabilities_of_both_apis_become_ours() -> None:
    """Tokens by their bytes, so that half a character stays half a character."""
    half, other = {"token": "?", "bytes": [0xF0, 0x9F], "logprob": -0.5}, {"token": "a"}
    told = {"content": [{**half, "top_logprobs": [half, {**other, "logprob": -1}]}]}
    delta = {"choices": [{"delta": {"content": "x"}, "logprobs": told}]}
    (chat,) = piece(json.dumps(delta)).logprobs
    assert chat == TokenLogprob(b"\xf0\x9f", -0.5, ((b"\xf0\x9f", -0.5), (b"a", -1.0)))

    told = {
        "tokens": ["é", "b"],
        "token_logprobs": [-0.1, None],
        "top_logprobs": [{"é": -0.1}, None],
    }
    both = piece(json.dumps({"choices": [{"text": "éb", "logprobs": told}]})).logprobs
    assert both == (
        TokenLogprob("é".encode(), -0.1, (("é".encode(), -0.1),)),
        TokenLogprob(b"b", -9999.0, ()),
    )


@pytest.mark.parametrize(
    "told",
    [
        {"content": [{"token": "a", "logprob": float("-inf"), "bytes": [999]}]},
        {"content": [{"token": "a", "logprob": float("nan")}]},
        {"tokens": ["a"], "token_logprobs": []},
        {"tokens": ["a"]},
    ],
)
def test_odd_log_probabilities_are_still_numbers(told: Any) -> None:
    """What is not told or no number is OpenAI's word for impossible; bytes out of range count as
    not told."""
    event = json.dumps({"choices": [{"text": "a", "logprobs": told}]})
    assert piece(event).logprobs == (TokenLogprob(b"a", -9999.0, ()),)


def test_rivals_are_bounded() -> None:
    """No server fills our memory with them."""
    top = [{"token": str(n), "logprob": -1.0} for n in range(500)]
    told = {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": top}]}
    event = json.dumps({"choices": [{"text": "a", "logprobs": told}]})
    assert len(piece(event).logprobs[0].top) == 20


def test_log_probabilities_of_dropped_blanks_are_dropped() -> None:
    """A token that is blanks only goes with them; one that is more stays."""
    tokens = [TokenLogprob(t, -1.0) for t in (b"\n", b" ", b" a", b"b")]
    assert after(tokens, 0) == tuple(tokens)
    assert after(tokens, 2) == tuple(tokens[2:])
    assert after(tokens, 3) == tuple(tokens[2:])
    assert after(tokens, 99) == ()


@pytest.mark.parametrize(
    ("kind", "rivals", "sent"),
    [("openai", 0, 0), ("vllm", 2, 2), ("llama.cpp", 0, 1), ("llama.cpp", 4, 4)],
)
def test_log_probabilities_are_asked_for(kind: str, rivals: int, sent: int) -> None:
    """In the words of each API; llama.cpp tells none when asked for no rivals."""
    chat = ask(asked(logprobs=rivals), "", kind, "m")
    raw = ask(asked(Prompt("x"), logprobs=rivals), "", kind, "m")
    assert (chat.body["logprobs"], chat.body["top_logprobs"]) == (True, sent)
    assert raw.body["logprobs"] == sent
    assert chat.rivals == raw.rivals == rivals
    assert "logprobs" not in ask(asked(), "", kind, "m").body


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "3"}, 3.0),
        ({"Retry-After": "1.5"}, 1.5),
        ({"Retry-After-Ms": "250", "Retry-After": "1"}, 0.25),
        ({"Retry-After": "Mon, 30 Nov 2026 12:00:07 GMT"}, 7.0),
        ({"Retry-After": "Mon, 30 Nov 2020 12:00:07 GMT"}, 0.0),
        ({"Retry-After": "999999"}, 300.0),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "soon"}, None),
    ],
)
def test_retry_after_in_all_its_forms(headers: dict[str, str], seconds: float | None) -> None:
    """Seconds, milliseconds or a date; bounded; nonsense counts as not told."""
    assert retry_after_s(headers, NOW) == seconds


def test_a_refusal_tells_status_and_code_but_never_the_servers_words() -> None:
    """Validation errors quote the prompt; it would end in our log."""
    body = json.dumps({"error": {"message": "bad: secret", "code": 400, "type": "BadRequest"}})
    fault = fault_of(400, {}, body.encode(), NOW)
    assert isinstance(fault, RowFault)
    assert str(fault) == "it refuses this request: 400 (BadRequest)"
    odd = json.dumps({"error": {"code": "secret words"}})
    assert "secret" not in str(fault_of(500, {}, odd.encode(), NOW))
    for body_ in (b"", b"<html>", b"[]", b'"x"', b'{"error": "no"}', b"[" * 5000):
        assert isinstance(fault_of(502, {}, body_, NOW), EngineFault)
    assert isinstance(fault_of(429, {}, b"", NOW), Busy)


# --- configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "base", "origin"),
    [
        ("http://h:8000", "http://h:8000/v1", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000/v1", "http://h:8000"),
        ("http://h/openai/v1", "http://h/openai/v1", "http://h"),
    ],
)
def test_the_url_is_a_host_or_the_base_of_an_api(url: str, base: str, origin: str) -> None:
    """As servers' manuals give it and as OpenAI's clients take it."""
    dial = dial_of(Upstream(url=url), {})
    assert (dial.base, dial.origin) == (base, origin)


def test_https_checks_the_certificate_unless_told_otherwise(tmp_path: Path) -> None:
    """A wrong ca_file is a configuration error that names the key."""
    import ssl

    safe, loose = (dial_of(Upstream(url="https://h", verify_tls=v), {}).tls for v in (True, False))
    assert safe and safe.verify_mode == ssl.CERT_REQUIRED and safe.check_hostname
    assert loose and loose.verify_mode == ssl.CERT_NONE
    for path in (tmp_path / "none.pem", Path(__file__)):
        with pytest.raises(ConfigError, match=r"upstream\.ca_file"):
            dial_of(Upstream(url="https://h", ca_file=str(path)), {})


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"two words", "ключ".encode(), b"a\nb", b"k" * 5000]
)
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    """The message names the key of the configuration, never the content."""
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"upstream\.api_key_file") as caught:
        dial_of(Upstream(url="http://h", api_key_file=str(path)), {})
    assert "two words" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"upstream\.api_key_file"):
        dial_of(Upstream(url="http://h", api_key_file=str(tmp_path / "none")), {})


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (("engines.chain=['cpu','openai']",), r"upstream\.url"),
        (("engines.chain=['openai']", "upstream.url=http://h"), r"engines\.chain"),
        (("engines.chain=['cpu','openai']", "upstream.url=h:8000"), r"upstream\.url"),
        (("engines.chain=['cpu','openai']", "upstream.url=http://k@h"), r"upstream\.url"),
        (("engines.chain=['cpu','openai']", "upstream.url=http://h?x=1"), r"upstream\.url"),
        (("upstream.kind=ollama",), r"upstream\.kind"),
        (("upstream.idle_timeout_s=0",), r"upstream\.idle_timeout_s"),
    ],
)
def test_a_configuration_that_cannot_work_names_its_key(sets: tuple[str, ...], key: str) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError, match=key):
        config.load(None, sets)
