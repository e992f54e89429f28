"""Drafts become requests, or refusals that name the field; the same for every ingress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes_http import CONTEXT_TOKENS, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.core import Request
from edged.errors import RequestError
from edged.ingress.prepare import RANGES, Catalog, Draft, Message, Part, prepare
from edged.settings import Generation


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    text = tiny_model(tmp_path_factory.mktemp("model"))
    return Catalog([text], Generation(max_tokens=64, temperature=0.5))


def user(text: str) -> list[Message]:
    return [Message("user", text)]


async def prepared(catalog: Catalog, draft: Draft, **more: Any) -> Request:
    given = {"request_id": "r1", "client": "c", "ingress": "http", "now_s": 100.0} | more
    return await prepare(draft, catalog, **given)


async def refused(catalog: Catalog, draft: Draft, **more: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await prepared(catalog, draft, **more)
    return caught.value


async def test_a_chat_becomes_a_request_with_its_template(catalog: Catalog) -> None:
    """The prompt ids are those of the chat template; what is not said comes from the config."""
    request = await prepared(catalog, Draft(messages=user("hi")), priority=7, deadline_s=101.0)

    text = catalog.find("").text
    shown = b"".join(text.token_bytes(i) for i in request.prompt_ids)
    assert shown == b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert request.model == "tiny" and request.id == "r1" and request.client == "c"
    assert request.max_tokens == 64 and request.sampling.temperature == 0.5
    assert request.priority == 7 and request.deadline_s == 101.0


async def test_control_words_in_user_text_stay_text(catalog: Catalog) -> None:
    """A user who writes <|im_end|> gets those ten characters, never the control token."""
    request = await prepared(catalog, Draft(messages=user("<|im_end|>")))

    plain = await prepared(catalog, Draft(messages=user("0123456789")))
    assert len(request.prompt_ids) == len(plain.prompt_ids)
    assert request.prompt_ids.count(2) == 1


async def test_the_answer_is_clamped_to_the_context(catalog: Catalog) -> None:
    """max_tokens beyond what the context leaves is cut down, not refused."""
    request = await prepared(catalog, Draft(prompt="x" * 200, max_tokens=10**30))

    assert request.max_tokens == CONTEXT_TOKENS - 200


@pytest.mark.parametrize("size", [CONTEXT_TOKENS, CONTEXT_TOKENS + 1, 3000])
async def test_a_prompt_beyond_the_context_is_refused_with_both_sizes(
    catalog: Catalog, size: int
) -> None:
    """Never truncated: the refusal says how long it is and how long it may be."""
    error = await refused(catalog, Draft(prompt="x" * size))

    assert error.code == "context_length_exceeded" and error.param == "prompt"
    assert str(size) in error.message and str(CONTEXT_TOKENS) in error.message


async def test_a_prompt_far_beyond_the_context_is_refused_early(catalog: Catalog) -> None:
    """A huge prompt costs no full tokenisation; the refusal still names both sizes."""
    error = await refused(catalog, Draft(prompt="x" * 900_000))

    assert error.code == "context_length_exceeded"
    assert "more than" in error.message and str(CONTEXT_TOKENS) in error.message


async def test_a_prompt_that_leaves_one_token_is_served(catalog: Catalog) -> None:
    """The longest prompt leaves room for one token."""
    request = await prepared(catalog, Draft(prompt="x" * (CONTEXT_TOKENS - 1)))

    assert request.max_tokens == 1


async def test_the_engines_context_counts_when_it_is_smaller(tmp_path: Path) -> None:
    """A context capped in the configuration is the limit, not the model's own."""
    catalog = Catalog([tiny_model(tmp_path)], context_tokens=32)

    assert (await prepared(catalog, Draft(prompt="x" * 31))).max_tokens == 1
    assert (await refused(catalog, Draft(prompt="x" * 32))).code == "context_length_exceeded"


async def test_an_unknown_model_is_named_with_those_there_are(catalog: Catalog) -> None:
    """model_not_found tells which models exist; no model and an empty one mean the default."""
    error = await refused(catalog, Draft(model="gpt-9", messages=user("hi")))

    assert (error.code, error.param) == ("model_not_found", "model")
    assert "gpt-9" in error.message and "tiny" in error.message
    for name in (None, "", "tiny"):
        assert (await prepared(catalog, Draft(model=name, prompt="a"))).model == "tiny"


async def test_no_model_at_all_is_said_to_be_loading() -> None:
    """Before any model is there the caller is asked to come again."""
    error = await refused(Catalog([]), Draft(prompt="a"))

    assert error.code == "model_loading" and error.spec.retryable


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": [Message("user")]}, "invalid_request", "messages[0].content"),
        (
            {"messages": [Message("user", [Part("image_url")])]},
            "unsupported_content",
            "messages[0].content[0].type",
        ),
        (
            {"messages": [Message("user", "a"), Message("user", [Part("text")])]},
            "invalid_request",
            "messages[1].content[0].text",
        ),
        ({"messages": user("a"), "prompt": "b"}, "invalid_request", "messages"),
        ({}, "invalid_request", "messages"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": [1, 99_999]}, "invalid_request", "prompt"),
        ({"prompt": [-1]}, "invalid_request", "prompt"),
        ({"prompt": "a\ud800"}, "invalid_request", "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"prompt": "a", "stop": ["a"] * 5}, "invalid_request", "stop"),
        ({"prompt": "a", "stop": ""}, "invalid_request", "stop"),
        ({"prompt": "a", "stop": "x" * 257}, "invalid_request", "stop"),
        ({"prompt": "a", "temperature": float("nan")}, "invalid_request", "temperature"),
        ({"prompt": "a", "temperature": float("inf")}, "invalid_request", "temperature"),
        ({"prompt": "a", "top_p": 0}, "invalid_request", "top_p"),
        ({"prompt": "a", "seed": 2**63}, "invalid_request", "seed"),
        ({"prompt": "a", "top_k": 10**400}, "invalid_request", "top_k"),
        ({"prompt": "a", "logprobs": 21}, "invalid_request", "logprobs"),
        (
            {"prompt": "a", "response_format": {"type": "json_schema"}},
            "unsupported_parameter",
            "response_format",
        ),
        (
            {"prompt": "a", "response_format": {"type": "yaml"}},
            "invalid_request",
            "response_format.type",
        ),
        ({"prompt": "a", "response_format": {}}, "invalid_request", "response_format.type"),
        ({"prompt": "a", "tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        (
            {"prompt": "a", "tool_choice": {"type": "function"}},
            "unsupported_parameter",
            "tool_choice",
        ),
        ({"prompt": "a", "tool_choice": "maybe"}, "invalid_request", "tool_choice"),
    ],
)
async def test_a_refusal_names_its_field(
    catalog: Catalog, changes: dict[str, Any], code: str, param: str
) -> None:
    """Every bad field is a 400 with its path, not a failure later."""
    error = await refused(catalog, Draft(**changes))

    assert (error.code, error.param, error.spec.status) == (code, param, 400)


@pytest.mark.parametrize("priority", [-1, 10])
async def test_priority_is_a_digit(catalog: Catalog, priority: int) -> None:
    """Priorities are 0 to 9."""
    error = await refused(catalog, Draft(prompt="a"), priority=priority)

    assert (error.code, error.param) == ("invalid_request", "priority")


async def test_a_deadline_in_the_past_is_refused(catalog: Catalog) -> None:
    """Nothing is tokenised for an answer nobody waits for."""
    error = await refused(catalog, Draft(prompt="a"), deadline_s=99.0)

    assert error.code == "deadline_exceeded"


async def test_harmless_tools_are_taken(catalog: Catalog) -> None:
    """Clients that always send tools get an answer; tool_choice none hides them."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    for choice in (None, "auto", "none"):
        await prepared(catalog, Draft(messages=user("hi"), tools=tools, tool_choice=choice))


async def test_roles_and_parts_reach_the_template(catalog: Catalog) -> None:
    """developer reads as system, text parts are joined by line ends, an assistant may be mute."""
    messages = [
        Message("developer", "d"),
        Message("user", [Part("text", "a"), Part("text", "b")]),
        Message("assistant"),
        Message("tool", "t", tool_call_id="1"),
    ]
    request = await prepared(catalog, Draft(messages=messages))

    text = catalog.find("").text
    shown = b"".join(text.token_bytes(i) for i in request.prompt_ids).decode()
    assert shown.startswith("<|im_start|>system\nd<|im_end|>\n<|im_start|>user\na\nb<|im_end|>")
    assert "<|im_start|>tool\nt<|im_end|>" in shown


async def test_a_seed_is_kept_and_a_missing_one_is_drawn(catalog: Catalog) -> None:
    """The same seed gives the same key; without one two requests differ."""
    one = await prepared(catalog, Draft(prompt="a", seed=-5))
    two = await prepared(catalog, Draft(prompt="a", seed=-5))
    free = [(await prepared(catalog, Draft(prompt="a"))).sampling.seed for _ in range(2)]

    assert one.sampling.seed == two.sampling.seed >= 0
    assert free[0] != free[1]


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(sorted(RANGES)),
    value=st.one_of(st.integers(), st.floats(allow_nan=True, allow_infinity=True)),
)
async def test_numbers_are_inside_their_range_or_refused(
    catalog: Catalog, name: str, value: float
) -> None:
    """No number whatever reaches the sampler from outside its range, or crashes the check."""
    least, greatest, _ = RANGES[name]
    try:
        request = await prepared(catalog, Draft(prompt="a", **{name: value}))  # type: ignore[arg-type]
    except RequestError as error:
        assert error.param == name
        return
    assert least <= value <= greatest
    taken = getattr(request.sampling, name)
    assert taken == value or name in ("seed", "top_k")
