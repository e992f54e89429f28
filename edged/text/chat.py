"""Chat: from messages to prompt ids through the model's template, control tokens kept apart.

A model whose template cannot be followed exactly (probe.py finds out at load) refuses chats
and says why; everything else it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from edged.errors import RequestError
from edged.text.marks import ControlMarks
from edged.text.messages import ChatMessage, Habits, TemplateValues
from edged.text.probe import Probe
from edged.text.template import RESERVED, ChatTemplate
from edged.text.tokens import Tokens

# Used when a model has <|im_start|> and <|im_end|> but names no template.
CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Thinking costs a board minutes; a client switches it on by chat_template_kwargs.
DEFAULTS: Mapping[str, object] = {"enable_thinking": False}


@dataclass(frozen=True)
class RenderJob:
    """What one rendering needs; plain values only, so it may run in a thread.

    chars: about how long the prompt is.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    variables: Mapping[str, Any]
    chars: int


class Chat:
    """problem: why every conversation would fail, "" if none would. habits: see probe.py."""

    def __init__(
        self,
        tokens: Tokens,
        source: str | None,
        bos_token: str,
        eos_token: str,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._tokens = tokens
        self._marks = ControlMarks(tuple(tokens.control))
        self._template: ChatTemplate | None = None
        names = {"bos_token": bos_token, "eos_token": eos_token}
        self._names = {key: self._marks.mark(text) for key, text in names.items()}
        self.problem = ""
        self.habits = Habits()
        if source is None and {"<|im_start|>", "<|im_end|>"} <= tokens.control.keys():
            source = CHATML if tokens.start_ids else CHATML.removeprefix("{{ bos_token }}")
        if source is None:
            self.problem = (
                "it has no chat template; use a raw completion or export an instruct model"
            )
            return
        try:
            self._template = ChatTemplate(source, self._marks, clock)
            self.habits = Probe(source, tokens, self._marks, names, clock()).habits()
        except ValueError as error:
            self.problem = f"its chat template cannot be used: {error}"

    def job(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, object]] | None,
        template_kwargs: Mapping[str, object] | None,
        add_generation_prompt: bool,
    ) -> RenderJob:
        """Check and copy what the client sent. Raises RequestError naming the field."""
        values = TemplateValues(self.habits)
        if self.problem:
            raise RequestError("template_error", f"this model cannot chat: {self.problem}", "model")
        if not messages:
            raise RequestError(
                "invalid_request", "messages is empty; send at least one", "messages"
            )
        given = values.plain(template_kwargs or {}, "chat_template_kwargs")
        for key in given:
            if key in RESERVED:
                where = f"chat_template_kwargs.{key}"
                raise RequestError("invalid_request", f"{key} is set by the server", where)
        fixed = {**self._names, "add_generation_prompt": add_generation_prompt}
        return RenderJob(
            messages=[values.message(item, f"messages[{i}]") for i, item in enumerate(messages)],
            tools=values.plain(tools, "tools") if tools else None,
            variables={**DEFAULTS, **given, **fixed},
            chars=values.chars,
        )

    def ids(self, job: RenderJob) -> list[int]:
        """Prompt ids. Raises RequestError("template_error")."""
        if self._template is None:
            raise RequestError("template_error", self.problem, "model")
        rendered = self._template.render(job.messages, job.tools, job.variables)
        return self._tokens.encode_marked(self._marks.split(rendered))
