"""The OpenAI surface, as its own client and as raw JSON see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from fakes_http import MODEL, CrashingStream, Site, chat_body, connected, refusal, serving
from structlog.testing import capture_logs

from edged.core import TokenLogprob


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path) as site:
        yield site


@pytest_asyncio.fixture
async def client(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    base = f"{site.url}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="any", max_retries=0) as client:
        yield client


async def post(site: Site, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        answer = await session.post(site.url + path, json=body, headers=headers)
        return answer.status, await answer.json()


async def events(site: Site, path: str, body: dict[str, Any]) -> list[Any]:
    """Data of a stream's events; "[DONE]" stays a string."""
    async with aiohttp.ClientSession() as session:
        answer = await session.post(site.url + path, json=body)
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-cache"
        lines = [x for x in (await answer.text()).split("\n\n") if x.startswith("data: ")]
    return [x[6:] if x == "data: [DONE]" else json.loads(x[6:]) for x in lines]


async def test_the_official_client_gets_a_whole_answer(
    site: Site, client: openai.AsyncOpenAI
) -> None:
    """A chat completion has text, finish reason, usage and the engines that wrote it."""
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=5, seed=3
    )

    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert answer.usage is not None and answer.usage.completion_tokens == 7
    assert answer.usage.prompt_tokens_details.cached_tokens == 2  # type: ignore[union-attr]
    assert answer.system_fingerprint and answer.system_fingerprint.startswith("fp_")
    engines = answer.model_extra["edged"]["engines"]  # type: ignore[index]
    span = {"name": "cpu", "model": MODEL, "from_token": 0, "to_token": 7, "reason": "first"}
    assert engines == [span | {"approximate": False}]
    request = site.scheduler.submitted[0].request
    assert request.max_tokens == 5 and request.sampling.seed == 3 and request.ingress == "http"


async def test_the_official_client_streams(site: Site, client: openai.AsyncOpenAI) -> None:
    """Each piece arrives when it is written, not at the end."""
    site.scheduler.answer = None
    stream = await asyncio.gather(
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        ),
        _first_word(site, "one"),
    )
    chunks, fake = stream[0], stream[1]
    texts = []
    async for chunk in chunks:
        if chunk.choices[0].delta.content:
            texts.append(chunk.choices[0].delta.content)
            fake.say("two") if len(texts) == 1 else fake.end("length")
        last = chunk

    assert texts == ["one", "two"]
    assert last.choices[0].finish_reason == "length"


async def _first_word(site: Site, word: str) -> Any:
    fake = await site.scheduler.next()
    fake.say(word)
    return fake


async def test_a_stream_has_openais_exact_shape(site: Site) -> None:
    """Role chunk, content chunks, finish chunk, usage chunk, [DONE]; usage null before."""
    body = chat_body(stream=True, stream_options={"include_usage": True})
    role, content, finish, usage, done = await events(site, "/v1/chat/completions", body)

    same = {key: role[key] for key in ("id", "object", "created", "model", "system_fingerprint")}
    assert same["object"] == "chat.completion.chunk" and same["model"] == MODEL
    assert all(same.items() <= chunk.items() for chunk in (content, finish, usage))
    assert role["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert content["choices"][0]["delta"] == {"content": "Hello"}
    assert finish["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert [chunk["usage"] for chunk in (role, content, finish)] == [None] * 3
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 7
    assert usage["edged"]["engines"][0]["name"] == "cpu"
    assert done == "[DONE]"


async def test_without_include_usage_no_chunk_mentions_it(site: Site) -> None:
    """The finish chunk is the last one and carries the extension."""
    *_, finish, done = chunks = await events(site, "/v1/chat/completions", chat_body(stream=True))

    assert done == "[DONE]" and all("usage" not in c for c in chunks[:-1])
    assert finish["edged"]["timings"] == {
        "queue_ms": 1.0,
        "first_token_ms": 20.0,
        "total_ms": 500.0,
    }


async def test_pieces_without_text_make_no_chunk(site: Site) -> None:
    """A token that completes no character yet is not shown as an empty chunk."""
    site.scheduler.answer = None
    stream = asyncio.create_task(events(site, "/v1/chat/completions", chat_body(stream=True)))
    fake = await site.scheduler.next()
    for text in ("", "é", ""):
        fake.say(text)
    fake.end()

    texts = [c["choices"][0]["delta"].get("content") for c in (await stream)[:-1]]
    assert texts == ["", "é", None]


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [45, 46], [[45, 46]]])
async def test_completions_take_every_form_of_one_prompt(site: Site, prompt: object) -> None:
    """A string, a list of one string, a list of token ids: the raw prompt, no template."""
    status, answer = await post(
        site, "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 3}
    )

    assert status == 200 and answer["object"] == "text_completion"
    assert answer["choices"][0] == {
        "index": 0,
        "text": "Hello",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert len(site.scheduler.submitted[0].request.prompt_ids) == 2


async def test_completions_stream(client: openai.AsyncOpenAI) -> None:
    """The older API streams text, then the finish reason, then usage."""
    chunks = [
        chunk
        async for chunk in await client.completions.create(
            model=MODEL, prompt="hi", stream=True, stream_options={"include_usage": True}
        )
    ]

    assert [c.choices[0].text for c in chunks[:-1]] == ["Hello", ""]
    assert chunks[1].choices[0].finish_reason == "stop"
    assert chunks[2].usage is not None and chunks[2].usage.total_tokens > 7


def some_logprobs(site: Site) -> tuple[TokenLogprob, ...]:
    """For "aé": three byte tokens, one of them impossible beside its rival."""
    ids = [site.text.token_bytes(i) for i in range(site.text.vocab_tokens)]
    a, c3, a9 = (ids.index(piece) for piece in (b"a", b"\xc3", b"\xa9"))
    return (
        TokenLogprob(a, -0.25, ((a, -0.25), (c3, float("-inf")))),
        TokenLogprob(c3, -0.5, ((c3, -0.5),)),
        TokenLogprob(a9, -1.0, ()),
    )


async def test_chat_logprobs_have_openais_format(site: Site, client: openai.AsyncOpenAI) -> None:
    """Token, logprob, bytes and rivals; -9999 for what could not be drawn."""
    site.scheduler.answer = None
    asking = asyncio.create_task(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            logprobs=True,
            top_logprobs=2,
        )
    )
    fake = await site.scheduler.next()
    fake.say("aé", some_logprobs(site))
    fake.end()

    content = (await asking).choices[0].logprobs.content  # type: ignore[union-attr]
    assert fake.request.sampling.logprobs == 2 and content is not None
    assert [c.token for c in content] == ["a", "\ufffd", "\ufffd"]
    assert [c.logprob for c in content] == [-0.25, -0.5, -1.0]
    assert b"".join(bytes(c.bytes or []) for c in content).decode() == "aé"
    assert content[0].top_logprobs[1].logprob == -9999.0


async def test_completion_logprobs_have_the_older_format(site: Site) -> None:
    """Parallel lists; text_offset counts characters and goes on over the chunks."""
    site.scheduler.answer = None
    body = {"prompt": "hi", "logprobs": 1, "stream": True}
    asking = asyncio.create_task(events(site, "/v1/completions", body))
    fake = await site.scheduler.next()
    for piece, one in zip(("a", "", "é"), some_logprobs(site), strict=True):
        fake.say(piece, [one])
    fake.say("a", some_logprobs(site)[:1])
    fake.end()

    parts = [c["choices"][0]["logprobs"] for c in (await asking)[:-2]]
    assert [part["text_offset"] for part in parts] == [[0], [1], [1], [2]]
    assert parts[0]["token_logprobs"] == [-0.25]
    assert parts[0]["top_logprobs"] == [{"a": -0.25, "\ufffd": -9999.0}]
    assert parts[2]["top_logprobs"] == [None]


async def test_ignored_fields_are_named_in_the_answer(site: Site) -> None:
    """Nothing is dropped silently: the answer lists the fields that had no effect."""
    body = chat_body(user="u", store=False, colour="red", n=1, logit_bias={}, echo=False)
    status, answer = await post(site, "/v1/chat/completions", body)

    assert status == 200 and answer["edged"]["ignored"] == ["user", "store", "colour"]


async def test_extension_fields_reach_the_request(site: Site) -> None:
    """top_k, min_p, repetition_penalty, ignore_eos and the headers for priority and deadline."""
    body = chat_body(top_k=5, min_p=0.1, repetition_penalty=1.5, ignore_eos=True, stop="x")
    headers = {"X-Edged-Priority": "9", "X-Edged-Deadline-Ms": "60000"}
    status, _ = await post(site, "/v1/chat/completions", body, **headers)

    request = site.scheduler.submitted[0].request
    assert status == 200 and request.priority == 9 and request.stop == ("x",)
    left_s = (request.deadline_s or 0) - asyncio.get_running_loop().time()
    assert 30 < left_s < 60
    drawn = request.sampling
    assert (drawn.top_k, drawn.min_p, drawn.repetition_penalty, drawn.ignore_eos) == (
        5,
        0.1,
        1.5,
        True,
    )


async def test_models_are_listed_and_found(site: Site, client: openai.AsyncOpenAI) -> None:
    """The list has the model with its context; an unknown one is the client's NotFoundError."""
    listed = [model async for model in client.models.list()]
    found = await client.models.retrieve(MODEL)

    assert [model.id for model in listed] == [MODEL] == [found.id]
    assert found.model_extra == {"max_model_len": 256}
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("code", "after_s", "status", "headers"),
    [
        ("queue_full", 2.3, 429, {"Retry-After": "3", "retry-after-ms": "2300"}),
        ("queue_full", 500.0, 429, {"Retry-After": "60", "retry-after-ms": "60000"}),
        ("queue_full", None, 429, {"Retry-After": "1"}),
        ("model_loading", None, 503, {"Retry-After": "5"}),
        ("deadline_unmeetable", None, 429, {"x-should-retry": "false"}),
        ("thermal_shutdown", None, 503, {"Retry-After": "30"}),
    ],
)
async def test_a_refusal_at_admission_is_an_error_object(
    site: Site, code: str, after_s: float | None, status: int, headers: dict[str, str]
) -> None:
    """Status and retry headers come from the one table, streaming or not."""
    site.scheduler.refusal = refusal(code, after_s)
    for stream in (False, True):
        async with aiohttp.ClientSession() as session:
            answer = await session.post(
                f"{site.url}/v1/chat/completions", json=chat_body(stream=stream)
            )
            error = (await answer.json())["error"]
        assert answer.status == status and error["code"] == code
        assert set(error) == {"message", "type", "param", "code"}
        assert headers.items() <= dict(answer.headers).items()


@pytest.mark.parametrize(
    ("reason", "code", "status"),
    [
        ("failed", "engine_fault", 503),
        ("failed", "row_fault", 500),
        ("shed", "deadline_exceeded", 504),
        ("shed", "shutting_down", 503),
        ("cancelled", None, 499),
        ("failed", "no such code", 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_before_the_first_token_has_a_status(
    site: Site, reason: Any, code: str | None, status: int, stream: bool
) -> None:
    """A request that fails early fails with a status clients can retry on, even a stream."""
    site.scheduler.answer = None
    asking = asyncio.create_task(post(site, "/v1/chat/completions", chat_body(stream=stream)))
    fake = await site.scheduler.next()
    fake.end(reason, code, "why")

    got, answer = await asking
    assert got == status and answer["error"]["message"] == "why"


async def test_a_failure_in_mid_stream_is_an_error_event(
    site: Site, client: openai.AsyncOpenAI
) -> None:
    """After the headers an error comes as an event, which the official client raises."""
    site.scheduler.answer = None
    (chunks, fake) = await asyncio.gather(
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        ),
        _first_word(site, "one"),
    )
    fake.end("failed", "engine_fault", "the worker died")

    with pytest.raises(openai.APIError, match="the worker died") as caught:
        async for _ in chunks:
            pass
    assert caught.value.code == "engine_fault"


async def test_a_bug_is_a_500_that_is_not_retried(site: Site) -> None:
    """An exception of ours is answered, logged with its traceback, and serving goes on."""
    site.scheduler.refusal = ZeroDivisionError("a bug")
    with capture_logs() as logs:
        async with aiohttp.ClientSession() as session:
            answer = await session.post(f"{site.url}/v1/chat/completions", json=chat_body())
            error = (await answer.json())["error"]

    assert (answer.status, error["code"]) == (500, "internal_error")
    assert answer.headers["x-should-retry"] == "false"
    crash, line = logs
    assert crash["exc_info"] and crash["request_id"] == answer.headers["x-request-id"]
    assert line["event"] == "request" and line["error"] == "internal_error"
    site.scheduler.refusal = None
    assert (await post(site, "/v1/chat/completions", chat_body()))[0] == 200


async def test_a_bug_in_mid_stream_ends_it_with_an_error_event(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even then the stream ends in order and its slot is freed."""
    made: list[CrashingStream] = []

    def submit(request: Any) -> CrashingStream:
        made.append(CrashingStream(request))
        made[0].say("one")
        return made[0]

    monkeypatch.setattr(site.scheduler, "submit", submit)
    *_, last = await events(site, "/v1/chat/completions", chat_body(stream=True))

    assert last["error"]["code"] == "internal_error"
    assert made[0].closed.is_set()
    assert (
        site.metric('edged_requests_total{code="500",ingress="http",route="/v1/chat/completions"}')
        == 1
    )


async def test_one_log_line_per_request_and_no_word_of_the_prompt(site: Site) -> None:
    """The canonical line has ids, sizes and times; prompt, answer and key never appear."""
    body = chat_body(messages=[{"role": "user", "content": "my secret plan"}])
    headers = {"x-request-id": "req-1", "Authorization": "Bearer sesame"}
    with capture_logs() as logs:
        status, _ = await post(site, "/v1/chat/completions", body, **headers)
        async with aiohttp.ClientSession() as session:
            await session.get(f"{site.url}/livez")
            await session.get(f"{site.url}/metrics")

    (line,) = logs
    assert status == 200 == line["status"] and line["request_id"] == "req-1"
    assert line["finish"] == "stop" and line["model"] == MODEL and line["stream"] is False
    assert line["prompt_tokens"] > 0 and line["completion_tokens"] == 7
    for word in ("secret", "Hello", "sesame"):
        assert word not in str(line)


@pytest.mark.parametrize(
    ("given", "kept"), [("abc_DEF-1", True), ("x" * 64, True), ("x" * 65, False), ("a b", False)]
)
async def test_request_ids_are_kept_when_harmless(site: Site, given: str, kept: bool) -> None:
    """Every answer has x-request-id, the client's own if it is short and plain."""
    async with aiohttp.ClientSession() as session:
        answer = await session.get(f"{site.url}/v1/models", headers={"x-request-id": given})

    assert (answer.headers["x-request-id"] == given) is kept
    assert answer.headers["x-request-id"] and answer.headers["edged-node"] == "node-1"


async def test_one_connection_serves_many_requests(site: Site) -> None:
    """Keep-alive holds over answers, errors and streams alike."""
    body = json.dumps(chat_body()).encode()
    async with connected(site) as raw:
        for _ in range(3):
            raw.post("/v1/chat/completions", body)
            assert (await raw.answer())[0] == 200
            raw.post("/v1/chat/completions", b"{")
            assert (await raw.answer())[0] == 400


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_failed_answer_tells_who_wrote_what_there_was(site: Site, stream: bool) -> None:
    """The engines of what was written before the failure come with the error, in both forms."""
    site.scheduler.answer = None
    body = chat_body(stream=stream)
    ask = events if stream else post
    asking = asyncio.create_task(ask(site, "/v1/chat/completions", body))
    fake = await _first_word(site, "one")
    await asyncio.sleep(0.3)
    fake.end("failed", "engine_fault", "it died")

    error = next(e for e in reversed(await asking) if isinstance(e, dict))
    assert error["error"]["code"] == "engine_fault"
    assert [(e["name"], e["to_token"]) for e in error["edged"]["engines"]] == [("cpu", 7)]
