"""ChatTemplate: a model's jinja2 chat template, sandboxed and bounded.

A template is code from the model's author: it sees plain values, cannot reach Python, and its
loops, products and output are capped. Its failures are template_error, never a 500.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edged.errors import RequestError
from edged.text.marks import LOOP_FILTER, ROLE_FILTER, ControlMarks, mark_template

MAX_RENDERED_CHARS = 4_000_000
MAX_LOOP_TURNS = 1_000_000
RESERVED = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"),
        *("raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler"),
    )
)
# Not an identifier, so that no template can name it.
_BUDGET = "edged.budget"


class ChatTemplate:
    """One compiled template. Safe to render from several threads at once."""

    def __init__(
        self,
        source: str,
        marks: ControlMarks | None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """marks: where control literals become marks; None = leave the template as written.

        Raises ValueError with the line when the template cannot be compiled.
        """
        self._marks = marks
        environment = _environment(clock, marks)
        try:
            tree = environment.parse(source)
            if marks is not None:
                mark_template(tree, marks)
            tree.set_environment(environment).set_lineno(1)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, UnicodeError) as error:
            raise ValueError(str(error)) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text, marks included. Values must come from TemplateValues.

        Raises RequestError("template_error"): what the template itself refuses (its message),
        a fault inside it, or a cap.
        """
        budget = _Budget()
        values = {**variables, "messages": messages, "tools": tools, _BUDGET: budget}
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(values):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise _TooMuch(f"writes more than {MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
        except _Refusal as refusal:
            raise RequestError("template_error", self._said(refusal), "messages") from None
        # The template is foreign code fed with foreign data: whatever it raises is the failure
        # of this one request. Nothing of ours runs inside.
        except Exception as error:  # noqa: BLE001
            text = f"the chat template failed on these messages: {self._said(error)}"
            raise RequestError("template_error", text, "messages") from None
        return "".join(pieces)

    def _said(self, error: Exception) -> str:
        text = str(error) or type(error).__name__
        return self._marks.unmark(text) if self._marks else text


class _Refusal(jinja2.TemplateError):
    """raise_exception(...) inside a template: it refuses the conversation."""


class _TooMuch(SecurityError):
    """A cap on what a template may do was hit."""


class _Budget:
    """Turns of loops left in one rendering."""

    def __init__(self) -> None:
        self._left = MAX_LOOP_TURNS

    def spend(self, turns: int) -> None:
        self._left -= turns
        if self._left < 0:
            raise _TooMuch(f"loops more than {MAX_LOOP_TURNS} times")


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox without its two ways to make a huge value from a short expression."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise _TooMuch("uses **, which is not allowed")
        for text, factor in ((left, right), (right, left)):
            repeats = isinstance(text, str | list | tuple) and isinstance(factor, int)
            if repeats and len(text) * factor > MAX_RENDERED_CHARS:
                raise _TooMuch(f"repeats a text beyond {MAX_RENDERED_CHARS} characters")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what to train on; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(clock: Callable[[], datetime], marks: ControlMarks | None) -> _Sandbox:
    """What chat templates expect to find, as Hugging Face's own renderer offers it."""
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )

    def raise_exception(message: object) -> None:
        raise _Refusal(str(message))

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    environment.filters["tojson"] = _tojson
    environment.filters[LOOP_FILTER] = _counted
    if marks is not None:
        environment.filters[ROLE_FILTER] = lambda role, before, after: marks.mark_role(
            before, role, after
        )
    return environment


@jinja2.pass_context
def _counted(context: Context, values: Any) -> Any:
    """What a loop runs over, paid for before it starts."""
    if not hasattr(values, "__len__"):
        values = list(values)
    context[_BUDGET].spend(len(values))
    return values


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: no HTML escaping, unlike jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
