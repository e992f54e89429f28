"""A client's own begun answer is continued, and the words of a request are kept beside its ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from fakes_http import Site, serving

from edged.core import Chat, Prompt, TokenLogprob

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
OPEN = {"add_generation_prompt": False, "continue_final_message": True}


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path) as running:
        yield running


async def post(site: Site, path: str = "/v1/chat/completions", **body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(site.url + path, json=body) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize("flags", [OPEN, {"continue_final_message": True}])
async def test_a_begun_answer_stays_open_at_its_end(site: Site, flags: dict[str, Any]) -> None:
    """The prompt ends with the assistant's words, not with an end-of-message token."""
    status, _ = await post(site, messages=TALK, **flags)

    assert status == 200
    request = site.scheduler.submitted[0].request
    shown = b"".join(site.text.token_bytes(i) for i in request.prompt_ids)
    assert shown == b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "
    assert isinstance(request.source, Chat) and request.source.continue_final


async def test_without_the_flag_a_new_answer_begins(site: Site) -> None:
    """As before: a last message of the assistant is closed."""
    status, _ = await post(site, messages=TALK)
    request = site.scheduler.submitted[0].request
    shown = b"".join(site.text.token_bytes(i) for i in request.prompt_ids)
    assert status == 200 and shown.endswith(b"Well, <|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": TALK[:1], **OPEN}, "continue_final_message"),
        ({"messages": TALK[1:], **OPEN}, "continue_final_message"),
        (
            {"messages": [*TALK[:1], {"role": "assistant", "content": ""}], **OPEN},
            "continue_final_message",
        ),
        (
            {"messages": TALK, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"messages": TALK, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": TALK, "continue_final_message": "yes"}, "continue_final_message"),
    ],
)
async def test_what_cannot_be_continued_is_refused_by_name(
    site: Site, body: dict[str, Any], param: str
) -> None:
    """400 with the field, never another meaning."""
    status, answer = await post(site, **body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_raw_prompts_do_not_know_the_flag(site: Site) -> None:
    """A completion has no messages: the flag is refused there, as before."""
    status, answer = await post(site, "/v1/completions", prompt="x", continue_final_message=True)
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")


async def test_the_words_are_kept_unless_the_client_sent_ids(site: Site) -> None:
    """They are what an engine with another tokenizer reads."""
    await post(site, "/v1/completions", prompt="x")
    await post(site, "/v1/completions", prompt=[5, 6])
    tools = [{"type": "function", "function": {"name": "f"}}]
    await post(site, messages=TALK[:1], tools=tools, tool_choice="none")

    first, second, third = [stream.request.source for stream in site.scheduler.submitted]
    assert first == Prompt("x")
    assert second is None
    assert isinstance(third, Chat) and third.tools == () and third.messages[0].content == "hi"


async def test_tokens_of_other_vocabularies_are_shown_by_their_bytes(site: Site) -> None:
    """Log probabilities from an engine by text read like our own."""
    site.scheduler.answer = None
    told = (TokenLogprob("é".encode()[:1], -0.5, ((b"x", -1.0),)), TokenLogprob(b"y", -0.1))
    for path, body in (
        ("/v1/chat/completions", {"messages": TALK[:1], "logprobs": True, "top_logprobs": 1}),
        ("/v1/completions", {"prompt": "x", "logprobs": 1}),
    ):
        asking = asyncio.ensure_future(post(site, path, **body))
        stream = await site.scheduler.next()
        stream.say("?y", told)
        stream.end()
        _, answer = await asking
        found = answer["choices"][0]["logprobs"]
        if "content" in found:
            first, second = found["content"]
            assert (first["bytes"], second["token"]) == ([0xC3], "y")
            assert first["top_logprobs"][0]["token"] == "x"
        else:
            assert found["tokens"] == ["\ufffd", "y"]
            assert found["top_logprobs"][0] == {"x": -1.0}


async def test_what_another_node_sent_here_is_marked(site: Site) -> None:
    """Two nodes that fall back on each other never send one request round in a circle."""
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"X-Edged-Forwarded": "1"}):
            url = site.url + "/v1/completions"
            async with session.post(url, json={"prompt": "x"}, headers=headers) as answer:
                assert answer.status == 200
    assert [stream.request.forwarded for stream in site.scheduler.submitted] == [False, True]
