"""Bad input is a clear 4xx that names the field, never a 500, never a hang; the next one works."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fakes_http import Site, chat_body, connected, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edged.errors import RequestError
from edged.ingress.http.bodies import ChatBody, CompletionBody, decode
from edged.ingress.http.unsupported import NEUTRAL

CHAT = "/v1/chat/completions"
GOOD = json.dumps(chat_body()).encode()


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path, max_body_bytes=300_000, body_timeout_s=0.3) as site:
        yield site


async def raw_post(
    site: Site, body: bytes, path: str = CHAT, content_type: str = "application/json"
) -> tuple[int, dict[str, Any]]:
    """One request on a connection of its own."""
    async with connected(site) as raw:
        raw.post(path, body, content_type)
        status, headers, answer = await raw.answer()
    assert headers["content-type"].startswith("application/json")
    assert headers["x-request-id"]
    return status, json.loads(answer)


async def next_one_works(site: Site) -> None:
    status, answer = await raw_post(site, GOOD)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "Hello"


def body_with(**changes: object) -> bytes:
    return json.dumps(chat_body(**changes)).encode()


NOT_JSON = {
    "empty": b"",
    "cut off": b'{"messages": [',
    "not JSON": b"hello",
    "trailing": GOOD + b"x",
    "NaN": GOOD[:-1] + b', "temperature": NaN}',
    "Infinity": GOOD[:-1] + b', "temperature": -Infinity}',
    "single quotes": b"{'messages': []}",
    "name twice": GOOD[:-1] + b', "model": "other"}',
    "name twice inside": b'{"messages":[{"role":"user","role":"system","content":"a"}]}',
    "invalid UTF-8": GOOD.replace(b"hi", b"\xff\xfe"),
    "invalid UTF-8 in an unknown field": GOOD[:-1] + b', "user": "\xc3"}',
    "UTF-16": GOOD.decode().encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + GOOD,
    "lone surrogate": GOOD.replace(b"hi", b"\\ud800"),
    "raw control character": GOOD.replace(b"hi", b"a\x01b"),
    "deep nesting": b"[" * 100_000,
    "deep nesting inside": GOOD[:-1] + b', "tools": ' + b"[" * 100_000,
    "deep and closed": GOOD[:-1] + b', "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "number of 10,000 digits": GOOD[:-1] + b', "seed": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON.keys())
async def test_what_is_not_json_is_refused(site: Site, body: bytes) -> None:
    """A body that is not strict JSON is 400 invalid_json, and the reason is told."""
    status, answer = await raw_post(site, body)

    error = answer["error"]
    assert (status, error["code"], error["type"]) == (400, "invalid_json", "invalid_request_error")
    assert len(error["message"]) < 300
    await next_one_works(site)


WRONG_FIELDS: list[tuple[bytes, str]] = [
    (b"[]", ""),
    (b'"hi"', ""),
    (b"null", ""),
    (b"{}", "messages"),
    (body_with(messages="hi"), "messages"),
    (body_with(messages=[]), "messages"),
    (body_with(messages=["hi"]), "messages[0]"),
    (body_with(messages=[{}]), "messages[0].role"),
    (body_with(messages=[{"role": "user"}]), "messages[0].content"),
    (body_with(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
    (body_with(messages=[{"role": "king", "content": "a"}]), "messages[0].role"),
    (
        body_with(messages=[{"role": "user", "content": [{"type": "text", "text": 4}]}]),
        "messages[0].content[0].text",
    ),
    (body_with(model=5), "model"),
    (body_with(temperature="hot"), "temperature"),
    (body_with(temperature=3), "temperature"),
    (body_with(temperature=True), "temperature"),
    (GOOD[:-1] + b', "temperature": 1e999}', "temperature"),
    (body_with(top_p=-1), "top_p"),
    (body_with(max_tokens=0), "max_tokens"),
    (body_with(max_tokens=1.5), "max_tokens"),
    (body_with(max_completion_tokens=-3), "max_tokens"),
    (body_with(stop=[1]), "stop[0]"),
    (body_with(stop=["a", "b", "c", "d", "e"]), "stop"),
    (body_with(seed="x"), "seed"),
    (body_with(seed=2**70), "seed"),
    (body_with(stream="yes"), "stream"),
    (body_with(stream_options=[]), "stream_options"),
    (body_with(tools="x"), "tools"),
    (body_with(logprobs=1), "logprobs"),
    (body_with(top_logprobs=3), "top_logprobs"),
    (body_with(logprobs=True, top_logprobs=1_000_000), "top_logprobs"),
    (body_with(chat_template_kwargs=[]), "chat_template_kwargs"),
    (body_with(response_format={"type": "xml"}), "response_format.type"),
]


@pytest.mark.parametrize(("body", "param"), WRONG_FIELDS)
async def test_a_wrong_field_is_named_by_its_path(site: Site, body: bytes, param: str) -> None:
    """Wrong types and values are 400 invalid_request with the field's path in param."""
    status, answer = await raw_post(site, body)

    error = answer["error"]
    assert (status, error["code"]) == (400, "invalid_request")
    assert (error["param"] or "") in (param, "body")
    await next_one_works(site)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("logit_bias", {"5": 1}),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("functions", [{"name": "f"}]),
        ("best_of", 2),
        ("echo", True),
        ("suffix", "x"),
        ("guided_json", {}),
        ("grammar", "root ::= 'a'"),
        ("min_tokens", 5),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
    ],
)
async def test_what_would_change_the_answer_is_never_ignored(
    site: Site, field: str, value: object
) -> None:
    """A field whose effect we cannot give is 400 unsupported_parameter naming it."""
    status, answer = await raw_post(site, body_with(**{field: value}))

    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
    assert answer["error"]["param"] == field
    await next_one_works(site)


def test_neutral_values_of_unsupported_fields_are_harmless() -> None:
    """Clients that spell out defaults are served."""
    for name, values in NEUTRAL.items():
        for value in (None, *values):
            body, ignored = decode(body_with(**{name: value}), ChatBody)
            assert body.messages and ignored == ()


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        (CHAT, body_with(model="gpt-9"), 404, "model_not_found", "model"),
        (
            CHAT,
            body_with(messages=[{"role": "user", "content": "x" * 5000}]),
            400,
            "context_length_exceeded",
            "messages",
        ),
        (
            CHAT,
            body_with(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            400,
            "unsupported_content",
            "messages[0].content[0].type",
        ),
        ("/v1/completions", b'{"prompt": ""}', 400, "invalid_request", "prompt"),
        ("/v1/completions", b'{"prompt": []}', 400, "invalid_request", "prompt"),
        ("/v1/completions", b'{"prompt": ["a", 1]}', 400, "invalid_request", "prompt"),
        ("/v1/completions", b'{"prompt": ["a", "b"]}', 400, "unsupported_parameter", "prompt"),
        ("/v1/completions", b'{"prompt": [99999999999]}', 400, "invalid_request", "prompt"),
        ("/v1/completions", b'{"prompt": [1.5]}', 400, "invalid_request", "prompt[0]"),
        ("/v1/completions", b"{}", 400, "invalid_request", "prompt"),
        ("/v1/completions", b'{"prompt": "a", "logprobs": 99}', 400, "invalid_request", "logprobs"),
        ("/v1/embeddings", b"{}", 404, "not_found", None),
        ("/v1/responses", b"{}", 404, "not_found", None),
        ("/v1/models", b"{}", 405, "method_not_allowed", None),
    ],
)
async def test_refusals_have_their_own_codes(
    site: Site, path: str, body: bytes, status: int, code: str, param: str | None
) -> None:
    """Unknown model, too long a prompt, images, unknown routes: each its status and code."""
    got, answer = await raw_post(site, body, path)

    assert (got, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)
    await next_one_works(site)


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=latin-1"],
)
async def test_a_body_must_say_that_it_is_json(site: Site, content_type: str) -> None:
    """text/plain and forms, which foreign web pages can send unasked, are 415."""
    status, answer = await raw_post(site, GOOD, content_type=content_type)

    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    assert (await raw_post(site, GOOD, content_type="application/json; charset=UTF-8"))[0] == 200


async def test_half_characters_anywhere_are_no_500(site: Site) -> None:
    """Lone surrogates in names, headers and paths are quoted safely or refused."""
    for name in (b'"\\ud800"', b'"\\udfff\\ud800"'):
        status, _ = await raw_post(site, GOOD[:-1] + b", " + name + b": 1}")
        assert status in (200, 400)
    for head in (
        b"GET /v1/models/%ff%fe HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /v1/models/\xff HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /\xc3\x28 HTTP/1.1\r\nHost: localhost\r\n",
        b"GET / HTTP/1.1\r\nHost: \xff\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: \xff\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nx-request-id: \xff\r\nAuthorization: \xff\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: \xff\r\n",
        b"OPTIONS / HTTP/1.1\r\nHost: localhost\r\nAccess-Control-Request-Method: \xff\r\n",
    ):
        async with connected(site) as raw:
            raw.writer.write(head + b"\r\n")
            assert (await raw.answer())[0] < 500
    await next_one_works(site)


@pytest.mark.parametrize("length", [len(GOOD), 50_000_000])
async def test_an_upload_that_asks_first_is_told_in_time(site: Site, length: int) -> None:
    """Expect: 100-continue gets its 100 only when the body is wanted, else the refusal."""
    async with connected(site) as raw:
        raw.send(
            f"POST {CHAT} HTTP/1.1\nContent-Type: application/json\nExpect: 100-continue\n"
            f"Content-Length: {length}"
        )
        status, _, _ = await raw.answer()
        if length == len(GOOD):
            assert status == 100
            raw.writer.write(GOOD)
            assert (await raw.answer())[0] == 200
        else:
            assert status == 413


async def test_a_huge_body_is_refused_unread(site: Site) -> None:
    """A body over the limit is 413 as soon as its length is known."""
    async with connected(site) as raw:
        raw.send(
            f"POST {CHAT} HTTP/1.1\nContent-Type: application/json\nContent-Length: 50000000000"
        )
        status, headers, answer = await raw.answer()

        assert status == 413 and json.loads(answer)["error"]["code"] == "payload_too_large"
        assert headers["connection"] == "close"
    await next_one_works(site)


async def test_a_huge_body_without_a_length_is_cut(site: Site) -> None:
    """A chunked body is counted while it is read."""
    async with connected(site) as raw:
        head = f"POST {CHAT} HTTP/1.1\nContent-Type: application/json\nTransfer-Encoding: chunked"
        raw.send(head)
        for _ in range(12):
            raw.writer.write(b"8000\r\n" + b" " * 0x8000 + b"\r\n")

        assert (await raw.answer())[0] == 413
    await next_one_works(site)


async def test_a_bomb_is_counted_unpacked(site: Site) -> None:
    """A compressed body counts with its unpacked size."""
    packed = gzip.compress(b" " * 5_000_000)
    async with connected(site) as raw:
        raw.send(
            f"POST {CHAT} HTTP/1.1\nContent-Type: application/json\nContent-Encoding: gzip\n"
            f"Content-Length: {len(packed)}",
            packed,
        )

        assert (await raw.answer())[0] in (400, 413)
    await next_one_works(site)


async def test_a_body_that_is_not_what_its_encoding_says_is_refused(site: Site) -> None:
    """Content-Encoding: gzip over plain JSON is a 400."""
    async with connected(site) as raw:
        raw.send(
            f"POST {CHAT} HTTP/1.1\nContent-Type: application/json\nContent-Encoding: gzip\n"
            f"Content-Length: {len(GOOD)}",
            GOOD,
        )

        assert (await raw.answer())[0] == 400
    await next_one_works(site)


async def test_a_body_that_stalls_times_out(site: Site) -> None:
    """A client that stops in mid-body gets 408 and loses its connection."""
    async with connected(site) as raw:
        head = f"POST {CHAT} HTTP/1.1\nContent-Type: application/json\nContent-Length: 100"
        raw.send(head, b'{"messages"')
        status, headers, answer = await raw.answer()

        assert status == 408 and json.loads(answer)["error"]["code"] == "request_timeout"
        assert headers["connection"] == "close"
    await next_one_works(site)


async def test_stalled_large_bodies_do_not_block_small_ones(site: Site) -> None:
    """However many large bodies trickle in, an ordinary request is served."""
    head = f"POST {CHAT} HTTP/1.1\nContent-Type: application/json\nContent-Length: 200000"
    async with AsyncExitStack() as stack:
        stalled = [await stack.enter_async_context(connected(site)) for _ in range(40)]
        for raw in stalled:
            raw.send(head)
        await next_one_works(site)
        for raw in stalled:
            assert (await raw.answer())[0] == 408


BROKEN_HTTP = {
    "no HTTP at all": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "garbage": (b"hello\r\n\r\n", 400),
    "bad version": (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 400),
    "bad header": (b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n", 400),
    "both lengths": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nabc",
        400,
    ),
    "huge header": (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    "huge path": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    "many headers": (
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"A%d: b\r\n" % i for i in range(500)),
        431,
    ),
}


@pytest.mark.parametrize(("data", "status"), BROKEN_HTTP.values(), ids=BROKEN_HTTP.keys())
async def test_broken_http_is_answered_in_our_words(site: Site, data: bytes, status: int) -> None:
    """Even what is no request gets an error object, and its connection ends."""
    async with connected(site) as raw:
        raw.writer.write(data + b"\r\n")
        got, headers, answer = await raw.answer()

        assert got == status and set(json.loads(answer)["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }
        assert await raw.rest() == b""
        assert headers["content-type"].startswith("application/json")
    await next_one_works(site)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(max_size=200))
async def test_no_bytes_whatever_make_a_500(site: Site, data: bytes) -> None:
    """Any body at all is answered with a 4xx, on a connection that goes on."""
    status, _ = await raw_post(site, data)

    assert 400 <= status < 500


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted({*ChatBody.__struct_fields__, *NEUTRAL, "prompt"}))


@settings(deadline=None, max_examples=200)
@given(fields=st.dictionaries(FIELDS, JSON_VALUES, max_size=5))
def test_any_json_object_is_taken_or_refused(fields: dict[str, Any]) -> None:
    """Decoding raises nothing but refusals, whatever the values."""
    data = json.dumps({**chat_body(), "prompt": "a", **fields}).encode()
    for kind in (ChatBody, CompletionBody):
        try:
            body, _ = decode(data, kind)
            body.draft()
        except RequestError as error:
            assert error.spec.status == 400


async def test_bad_and_good_requests_mix(site: Site) -> None:
    """Fifty bad requests at once leave fifty good ones unharmed."""
    bodies = [b"[" * 1000, GOOD] * 50
    answers = await asyncio.gather(*(raw_post(site, body) for body in bodies))

    assert [status for status, _ in answers] == [400, 200] * 50
