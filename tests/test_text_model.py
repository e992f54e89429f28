"""TextModel: prompts in, ids out; the template alone writes control tokens."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path

import pytest
from fakes_text import CONTROLS, nasty_strings, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edged.errors import ConfigError, RequestError
from edged.text.model import ChatMessage, TextModel

TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
    "'<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "role tokens": "{% for m in messages %}{{ '<|' + m['role'] + '|>' + '\\n' + m['content'] + "
    "'<|end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "role tokens in data": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "headers": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\\n\\n' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "thinking": "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and "
    "'</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if not enable_thinking %}{{ '\\n</think>' }}{% endif %}{% endif %}",
}
FRAGMENTS = ("<|", "|>", "<", ">", "|", "im_end", "im_", "end|>", "user", "</", "think>", "[", "]")
USER_TEXT = st.lists(
    st.one_of(
        st.sampled_from([*CONTROLS, *FRAGMENTS, " ", "\n", "\t", "\r\n"]), st.text(max_size=4)
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextModel]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: TextModel.load(write_model(folder / name.replace(" ", "-"), template))
        for name, template in TEMPLATES.items()
    }


@pytest.fixture(scope="module")
def model(models: dict[str, TextModel]) -> TextModel:
    return models["chatml"]


def chat(model: TextModel, *messages: ChatMessage, **options: object) -> tuple[int, ...]:
    return asyncio.run(model.chat_ids(messages, **options))  # type: ignore[arg-type]


def raw(model: TextModel, text: str) -> tuple[int, ...]:
    return asyncio.run(model.prompt_ids(text))


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def shape(model: TextModel, ids: Sequence[int]) -> list[str]:
    """Text and control literals in turn: ["", "<|im_start|>", "user\\nhi", "<|im_end|>", ...]."""
    parts: list[str] = []
    run: list[int] = []
    for token_id in ids:
        literal = model.token_text(token_id)
        if model.detokenizer().push([token_id]) == "" and literal in CONTROLS:
            parts += [text_of(model, run), literal]
            run = []
        else:
            run.append(token_id)
    return [*parts, text_of(model, run)]


def text_of(model: TextModel, ids: Sequence[int]) -> str:
    stream = model.detokenizer()
    return stream.push(ids) + stream.flush()


@pytest.mark.parametrize("name", TEMPLATES)
@given(st.lists(USER_TEXT, min_size=2, max_size=2))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_user_text_never_becomes_a_control_token(
    models: dict[str, TextModel], name: str, texts: list[str]
) -> None:
    """The control tokens are those of harmless words, and every word arrives as written."""
    model = models[name]
    assert model.chat_problem == ""
    words = ("SYSTEMWORD", "USERWORD")
    roles = ("system", "user")
    plain = shape(model, chat(model, *map(ChatMessage, roles, words)))
    found = shape(model, chat(model, *map(ChatMessage, roles, texts)))
    expected = [
        part.replace(words[0], texts[0]) if words[0] in part else part.replace(words[1], texts[1])
        for part in plain
    ]
    assert found == expected


@given(USER_TEXT.filter(bool))
@settings(deadline=None, max_examples=150)
def test_a_raw_prompt_is_plain_text(model: TextModel, text: str) -> None:
    """Control literals in a completion prompt are text, and the text comes back."""
    ids = raw(model, text)
    assert shape(model, ids) == [text]


@given(USER_TEXT)
@settings(deadline=None, max_examples=100)
def test_user_text_is_tokenised_as_if_it_stood_alone(model: TextModel, text: str) -> None:
    """Between two control tokens the ids are those of the same text without them."""
    ids = chat(model, user(text))
    start, end = (model_id(model, literal) for literal in ("<|im_start|>", "<|im_end|>"))
    first = ids.index(start) + 1
    assert ids[first : ids.index(end)] == raw(model, "user\n" + text)


def model_id(model: TextModel, literal: str) -> int:
    return next(i for i in range(model.vocab_tokens) if model.token_text(i) == literal)


@pytest.mark.parametrize("role", ["</think><|im_end|>", "<|im_start|>system", "x<|x|>"])
def test_roles_names_tools_and_kwargs_are_user_text(tmp_path: Path, role: str) -> None:
    """Every string of a request is text only, not just the contents."""
    source = (
        "{% for m in messages %}<|user|>{{ m.role }}{{ m.name }}{{ m.tool_call_id }}"
        "{{ (m.tool_calls or 0) | tojson }}{{ m.reasoning_content }}{% endfor %}"
        "{{ tools | tojson }}{{ word }}"
    )
    model = TextModel.load(write_model(tmp_path, source))
    message = ChatMessage(
        role,
        "x",
        name=role,
        tool_calls=[{"function": {"name": role, "arguments": json.dumps({role: role})}}],
        tool_call_id=role,
        extra={"reasoning_content": role},
    )
    ids = chat(model, message, tools=[{role: [role]}], template_kwargs={"word": role})
    assert [part for part in shape(model, ids) if part in CONTROLS] == ["<|user|>"]
    assert text_of(model, ids).count(role) == 10


def test_thoughts_of_earlier_answers_are_cut_by_the_template(models: dict[str, TextModel]) -> None:
    """A template that looks for '</think>' in an answer finds it, though it is a control token."""
    model = models["thinking"]
    answer = ChatMessage("assistant", "long thoughts</think>short answer")
    parts = shape(model, chat(model, user("q"), answer, user("r")))
    assert "assistant\nshort answer" in parts
    assert "thoughts" not in str(parts)


def test_thinking_is_off_unless_asked_for(models: dict[str, TextModel]) -> None:
    """Boards are slow: enable_thinking is false by default and the client's to set."""
    model = models["thinking"]
    assert "</think>" in shape(model, chat(model, user("q")))
    thinking = chat(model, user("q"), template_kwargs={"enable_thinking": True})
    assert "</think>" not in shape(model, thinking)


def test_add_generation_prompt_opens_the_answer(model: TextModel) -> None:
    """With it the prompt ends where the assistant begins; without it at the last message."""
    with_prompt = chat(model, user("q"))
    without = chat(model, user("q"), add_generation_prompt=False)
    assert with_prompt[: len(without)] == without
    assert shape(model, with_prompt[len(without) :]) == ["", "<|im_start|>", "assistant\n"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Bern"}', '{"city": "Bern"}'),
        ({"city": "Bern"}, '{"city": "Bern"}'),
        ("not json", '"not json"'),
        ("[1]", '"[1]"'),
    ],
)
def test_tool_arguments_reach_the_template_as_an_object(
    tmp_path: Path, arguments: object, expected: str
) -> None:
    """OpenAI sends arguments as JSON text; templates print objects."""
    source = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}{% endif %}<|end|>"
    )
    model = TextModel.load(write_model(tmp_path, source))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    ids = chat(
        model,
        user("q"),
        ChatMessage("assistant", tool_calls=[call]),
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    assert shape(model, ids) == [f"f {expected}f", "<|end|>", ""]


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("c.function.arguments", '{"city": "Bern"}'),
        ("c.function.arguments + ''", '{"city": "Bern"}'),
        ("c.function.arguments | tojson", '{"city": "Bern"}'),
        ("c.function.arguments.city", "Bern"),
        ("(c.function | tojson)", '{"name": "f", "arguments": {"city": "Bern"}}'),
    ],
)
@pytest.mark.parametrize("sent", ['{"city": "Bern"}', {"city": "Bern"}])
def test_tool_arguments_come_in_the_form_the_template_was_written_for(
    tmp_path: Path, printed: str, expected: str, sent: object
) -> None:
    """Some templates join arguments as text, others print an object as JSON: neither breaks."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ "
        + printed
        + " }}{% endfor %}{% endfor %}<|end|>"
    )
    model = TextModel.load(write_model(tmp_path, source))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": sent}}
    ids = chat(model, user("q"), ChatMessage("assistant", tool_calls=[call]))
    assert shape(model, ids) == [expected, "<|end|>", ""]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if m.content is not none %}[{{ m.content }}]{% endif %}", ""),
        ("{{ '[' + m.content + ']' }}", "[]"),
        ("[{{ m.content }}]", "[]"),
    ],
)
def test_absent_text_beside_tool_calls_suits_the_template(
    tmp_path: Path, source: str, expected: str
) -> None:
    """None for templates that ask for it, empty text for those that would stumble or print it."""
    whole = "{% for m in messages if m.tool_calls %}" + source + "{% endfor %}<|end|>"
    model = TextModel.load(write_model(tmp_path, whole))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ids = chat(model, user("q"), ChatMessage("assistant", tool_calls=[call]))
    assert shape(model, ids) == [expected, "<|end|>", ""]


def test_a_developer_message_is_passed_on(models: dict[str, TextModel]) -> None:
    """Roles are the template's business: none is renamed or dropped."""
    parts = shape(models["headers"], chat(models["headers"], ChatMessage("developer", "be brief")))
    header = ["<|start_header_id|>", "developer", "<|end_header_id|>"]
    assert parts[3:6] == header


def test_absent_content_is_empty_text(model: TextModel) -> None:
    """content null, as beside tool calls, never prints None."""
    parts = shape(model, chat(model, ChatMessage("assistant", None)))
    assert parts[:3] == ["", "<|im_start|>", "assistant\n"]


def test_dates_come_from_the_given_clock(tmp_path: Path) -> None:
    """strftime_now writes the local time of the clock TextModel was loaded with."""
    source = "<|user|>{{ strftime_now('%d %b %Y') }}"
    folder = write_model(tmp_path, source)
    model = TextModel.load(folder, clock=lambda: datetime(2031, 2, 3))
    assert text_of(model, chat(model, user("q"))) == "03 Feb 2031"


def refused(call: object, code: str, param: str) -> RequestError:
    assert callable(call)
    with pytest.raises(RequestError) as caught:
        call()
    assert (caught.value.code, caught.value.param) == (code, param)
    return caught.value


def test_bad_conversations_are_400s_that_name_the_field(model: TextModel) -> None:
    """Empty, malformed and reserved input: the client learns which field to mend."""
    invalid = "invalid_request"
    refused(lambda: chat(model), invalid, "messages")
    refused(lambda: chat(model, user("ok"), user("\ud83d")), invalid, "messages[1].content")
    bad_tool = [{"function": {"name": "\udfff"}}]
    refused(lambda: chat(model, user("q"), tools=bad_tool), invalid, "tools[0].function.name")
    escaped = [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]
    call = ChatMessage("assistant", tool_calls=escaped)
    where = "messages[0].tool_calls[0].function.arguments.a"
    refused(lambda: chat(model, call), invalid, where)
    for name in ("messages", "tools", "bos_token", "add_generation_prompt", "raise_exception"):
        reserved = {name: []}
        where = f"chat_template_kwargs.{name}"
        refused(lambda k=reserved: chat(model, user("q"), template_kwargs=k), invalid, where)
    nested: object = "x"
    for _ in range(100):
        nested = [nested]
    with pytest.raises(RequestError, match="nested deeper"):
        chat(model, user("q"), template_kwargs={"deep": nested})
    with pytest.raises(RequestError, match="more than 20000 values"):
        chat(model, user("q"), template_kwargs={"wide": [0] * 30_000})
    refused(lambda: raw(model, ""), invalid, "prompt")
    refused(lambda: raw(model, "a\udc00"), invalid, "prompt")


def test_a_refusing_template_is_a_template_error(tmp_path: Path) -> None:
    """The template's own words reach the client."""
    source = (
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('not this') }}"
        "{% endif %}<|user|>{{ m.content }}{% endfor %}"
    )
    model = TextModel.load(write_model(tmp_path, source))
    assert model.chat_problem == ""
    error = refused(lambda: chat(model, user("bad")), "template_error", "messages")
    assert error.message == "not this"
    assert chat(model, user("good"))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% if %}", "line 1"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% set a = '<|im' %}{% set b = a + '_end|>' %}{{ b }}{{ messages[0].content }}", "safe"),
        ("{{ 'x' * 10 ** 9 }}", "not allowed"),
    ],
)
def test_a_template_that_cannot_be_followed_refuses_chats_only(
    tmp_path: Path, template: str, problem: str
) -> None:
    """The model still completes raw prompts, and says why it does not chat."""
    model = TextModel.load(write_model(tmp_path, template))
    assert problem in model.chat_problem
    error = refused(lambda: chat(model, user("q")), "template_error", "model")
    assert problem in error.message
    assert raw(model, "still here")


def test_without_a_template_chatml_is_used_if_the_model_has_its_tokens(tmp_path: Path) -> None:
    """<|im_start|> and <|im_end|> in the vocabulary mean ChatML."""
    model = TextModel.load(write_model(tmp_path, None))
    parts = shape(model, chat(model, ChatMessage("system", "s"), user("q")))
    start, end = "<|im_start|>", "<|im_end|>"
    expected = [
        "",
        start,
        "system\ns",
        end,
        "\n",
        start,
        "user\nq",
        end,
        "\n",
        start,
        "assistant\n",
    ]
    assert parts == expected


def test_bos_begins_a_raw_prompt_where_the_model_wants_it(tmp_path: Path) -> None:
    """add_bos: once, before the text; the text's own literal of it stays text."""
    model = TextModel.load(write_model(tmp_path, None, add_bos=True))
    assert shape(model, raw(model, "<|im_start|>a")) == ["", "<|im_start|>", "<|im_start|>a"]


async def test_a_long_prompt_does_not_stop_the_loop(tmp_path: Path) -> None:
    """While 300,000 characters are tokenised the loop keeps turning."""
    model = TextModel.load(write_model(tmp_path, None, context_tokens=10**6))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    text = "many words " * 30_000
    ids = await model.prompt_ids(text)
    ticking.cancel()
    assert text_of(model, ids) == text
    assert ticks > 100


async def test_long_and_short_texts_are_tokenised_alike(model: TextModel) -> None:
    """A chat beyond the inline limit gives the ids of its pieces put together."""
    text = "".join(nasty_strings())[:9000]
    long = await model.chat_ids([user(text)])
    assert shape(model, long)[2] == "user\n" + text


async def test_a_hopelessly_long_prompt_is_refused_early(model: TextModel) -> None:
    """A megabyte of words for a context of 4,096 tokens is refused with both sizes."""
    text = "many words " * 100_000
    with pytest.raises(RequestError, match="the model's context is 4096 tokens") as caught:
        await model.prompt_ids(text)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(RequestError) as caught:
        await model.chat_ids([user(text)])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_token_texts_and_bytes_for_logprobs(model: TextModel) -> None:
    """Bytes are exact, halves of characters show as U+FFFD, control tokens by their literal."""
    ids = raw(model, "漢<|im_end|>")
    assert b"".join(map(model.token_bytes, ids)).decode() == "漢<|im_end|>"
    assert {len(model.token_text(i)) > 0 for i in ids} == {True}
    end = model_id(model, "<|im_end|>")
    assert (model.token_text(end), model.token_bytes(end)) == ("<|im_end|>", b"<|im_end|>")
    assert (model.token_text(10**9), model.token_bytes(10**9)) == ("", b"")


def test_what_a_model_says_of_itself(tmp_path: Path) -> None:
    """Name, sizes, end tokens and identity come from the model directory."""
    folder = write_model(tmp_path, None, eos_ids=[2, 3])
    model = TextModel.load(folder)
    assert (model.name, model.context_tokens, model.eos_ids) == ("small", 4096, frozenset((2, 3)))
    assert TextModel.load(folder, name="mine").name == "mine"
    assert model.token_text(model.vocab_tokens - 1) != ""
    assert len(model.tokenizer_hash) == 64


def _break(folder: Path, name: str, content: str | None) -> None:
    path = folder / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.json", None),
        ("model.json", "{"),
        ("model.json", '{"name": 5}'),
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "\x00"),
    ],
)
def test_a_damaged_model_directory_tells_the_next_step(
    tmp_path: Path, name: str, content: str | None
) -> None:
    """The file at fault and the command that mends it are in the message."""
    folder = write_model(tmp_path, None)
    _break(folder, name, content)
    with pytest.raises(ConfigError, match="edged export") as caught:
        TextModel.load(folder)
    assert name in str(caught.value)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """A tokenizer of another size than model.json speaks of is not used."""
    with pytest.raises(ConfigError, match="does not have the 599 tokens"):
        TextModel.load(write_model(tmp_path, None, tokenizer_vocab=599))


def test_the_text_side_is_light() -> None:
    """The daemon's text side loads neither numpy nor gguf, onnx or the Hugging Face hub."""
    heavy = ("numpy", "gguf", "onnx", "onnxruntime", "huggingface_hub", "transformers", "torch")
    code = f"import sys, edged.text.model; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_all_control_literals_are_in_the_test_vocabulary(model: TextModel) -> None:
    """The property tests speak of tokens that exist."""
    texts = {model.token_text(i) for i in range(model.vocab_tokens)}
    assert set(chain(CONTROLS)) <= texts
