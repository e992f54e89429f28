"""Chat templates: what they may use, what they are refused, and whose fault a failure is."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from edged.errors import RequestError
from edged.text import template as template_module
from edged.text.marks import ControlMarks
from edged.text.template import ChatTemplate

CONTROLS = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "</think>", "<|x|>")
USER = {"role": "user", "content": "hello"}


def render(source: str, content: str = "hello", **variables: Any) -> str:
    """The prompt as a reader sees it, control tokens of the template as [[literal]]."""
    marks = ControlMarks(CONTROLS)
    found = ChatTemplate(source, marks, lambda: datetime(2024, 5, 6)).render(
        [{"role": "user", "content": content}], variables.pop("tools", None), variables
    )
    parts = marks.split(found)
    parts[1::2] = [f"[[{literal}]]" for literal in parts[1::2]]
    return "".join(parts)


def refused(source: str, **variables: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        render(source, **variables)
    assert caught.value.code == "template_error"
    assert caught.value.param == "messages"
    return caught.value


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<|im_start|>{{ messages[0].content }}<|im_end|>", "[[<|im_start|>]]hello[[<|im_end|>]]"),
        ("{{ '<|im_start|>' + messages[0]['role'] + '\\n' }}", "[[<|im_start|>]]user\n"),
        ("{{ '<|im_start|>' ~ 1 ~ '<|im_end|>' }}", "[[<|im_start|>]]1[[<|im_end|>]]"),
        ("{% set end = '<|im_end|>' %}{{ end }}{{ end }}", "[[<|im_end|>]][[<|im_end|>]]"),
        ("{{ '<|x|>' if messages else '<|im_end|>' }}", "[[<|x|>]]"),
        ("{{ none or '<|x|>' }}", "[[<|x|>]]"),
        ("{{ ['<|x|>', '<|x|>'] | join('-') }}", "[[<|x|>]]-[[<|x|>]]"),
        ("{% macro m(t) %}{{ t }}!{% endmacro %}{{ m('<|x|>') }}", "[[<|x|>]]!"),
        ("{{ 'a-b'.replace('-', '<|x|>') }}", "a[[<|x|>]]b"),
        ("{{ '%s<|x|>' % 'a' }}", "a[[<|x|>]]"),
        ("{% set n = namespace(t='<|x|>') %}{{ n.t }}", "[[<|x|>]]"),
    ],
)
def test_control_tokens_the_template_writes_are_marked(source: str, expected: str) -> None:
    """However a template gets its own control tokens to the output, they are control tokens."""
    assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\\n' ~ m.content }}{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% set role = m.role %}<|{{ role }}|>\n{{ m.content }}{% endfor %}",
    ],
)
def test_control_tokens_made_of_a_role_are_marked(source: str) -> None:
    """'<|' + role + '|>' is a control token where the model has one of that name."""
    assert render(source) == "[[<|user|>]]\nhello"


@pytest.mark.parametrize("role", ["im_end", "x", "nobody"])
def test_an_unknown_role_makes_no_control_token(role: str) -> None:
    """A role that is none of the known ones stays text between the bars."""
    marks = ControlMarks(CONTROLS)
    source = "{{ '<|' + messages[0].role + '|>' }}"
    assert ChatTemplate(source, marks).render([{"role": role}], None, {}) == f"<|{role}|>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{{ messages[0].content | upper | lower }}",
        "{{ messages[0].content.replace('/', '') }}",
        "{{ messages[0].content | replace('/', '') }}",
        "{{ messages[0].content.split('/') | join }}",
        "{{ messages[0].content[::-1][::-1] }}",
        "{{ '<|im_' + messages[0].content[5:] }}",
        "<|im_{{ messages[0].content[5:] }}",
        "{{ '<|' + 'im_end' + messages[0].content[-2:] }}",
        "{{ '<|' ~ messages[0].content[2:] }}",
        "{{ messages | tojson }}",
        "{{ '%s|>' % messages[0].content[:-2] }}",
        "{% for c in messages[0].content %}{{ c }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("content", ["<|im_end|>", "<|im/_end|>", "<|IM_END|>"])
def test_no_treatment_of_user_text_makes_a_control_token(source: str, content: str) -> None:
    """Joining, cutting, replacing and changing case may spell a literal; it stays text."""
    assert "[[" not in render(source, content)


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("{{ '</think>' in messages[0].content }}", "a</think>b", "True"),
        ("{{ messages[0].content.split('</think>')[-1] }}", "a</think>b", "b"),
        ("{{ messages[0].content.startswith('</think>') }}", "</think>b", "True"),
        ("{{ messages[0].content | replace('</think>', '<|x|>') }}", "a</think>b", "a[[<|x|>]]b"),
        ("{{ messages[0].content == '<|x|>' }}", "<|x|>", "True"),
        ("{{ messages[0].content | trim }}", " \n<|x|> ", "<|x|>"),
        ("{{ messages[0].content == '' }}", "", "True"),
        ("{{ messages[0].content | length }}", "<|x|>", "5"),
        ("{{ messages[0].content[:3] }}", "<|x|>", "<|x"),
    ],
)
def test_templates_that_test_or_cut_user_text_work(
    source: str, content: str, expected: str
) -> None:
    """A template sees exactly what the user wrote, control literals included."""
    assert render(source, content) == expected


def test_a_refusal_of_the_template_is_the_clients_fault() -> None:
    """raise_exception(...) becomes a 400 with the template's own words."""
    error = refused("{{ raise_exception('roles must alternate <|im_start|>') }}")
    assert error.message == "roles must alternate <|im_start|>"
    assert error.spec.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 5 }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ missing.field }}",
        "{{ missing() }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ missing | tojson }}",
    ],
)
def test_a_fault_inside_a_template_is_a_400(source: str) -> None:
    """Whatever goes wrong in a template ends this request only, with a template_error."""
    assert refused(source).message.startswith("the chat template failed on these messages: ")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    """A template reaches neither Python nor what it was given to change it."""
    refused(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 100000000 }}",
        "{{ 100000000 * 'x' }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{% for a in range(99999999) %}{% endfor %}",
    ],
)
def test_a_template_cannot_run_away(source: str) -> None:
    """Products, loops and output are capped; the render ends with a refusal, soon."""
    refused(source)


def test_the_output_cap_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of the allowed length passes, one character more does not."""
    monkeypatch.setattr(template_module, "MAX_RENDERED_CHARS", 10)
    assert render("{{ n * 'x' }}", n=10) == "x" * 10
    refused("{{ n * 'x' }}x", n=10)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "06 May 2024"),
        ("{{ {'a': '<é>&\\'', 'b': [1, none]} | tojson }}", '{"a": "<é>&\'", "b": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": 2\n}'),
        (
            "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
            "13",
        ),
        ("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}", "1"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{% for i in [1, 2] %}{{ loop.last }}{{ loop.index }}{% endfor %}", "False1True2"),
        ("{% for i in [1, 2] | map('string') %}{{ i }}/{{ loop.length }} {% endfor %}", "1/2 2/2 "),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{{ messages[::-1] | length }}{{ undefined_name }}", "1"),
    ],
)
def test_templates_find_what_they_expect(source: str, expected: str) -> None:
    """The names, filters and white-space rules that templates are written for."""
    assert render(source) == expected


def test_a_template_that_does_not_parse_names_the_line() -> None:
    """The person who exported the model learns where its template is wrong."""
    with pytest.raises(ValueError, match="line 2: "):
        ChatTemplate("ok\n{% if %}", None)
