"""Chat: from messages to prompt ids through the model's template, control tokens kept apart.

At load the marked template is compared with the plain reading of the same template; a model
whose template cannot be followed exactly refuses chats and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from edged.errors import RequestError
from edged.text.marks import ControlMarks
from edged.text.messages import ChatMessage, TemplateValues
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

_TALK = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "One?"),
    ChatMessage("assistant", "Two."),
    ChatMessage("user", "Three?"),
)
_CALL = {"id": "c1a2b3c4d", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}
_TOOL_TALK = (
    ChatMessage("user", "One?"),
    ChatMessage("assistant", tool_calls=(_CALL,)),
    ChatMessage("tool", "Four.", name="look", tool_call_id="c1a2b3c4d"),
)


@dataclass(frozen=True)
class RenderJob:
    """What one rendering needs; plain values only, so it may run in a thread."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    variables: Mapping[str, Any]


class Chat:
    """problem: why every conversation would fail, "" if none would."""

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
        if source is None and {"<|im_start|>", "<|im_end|>"} <= tokens.control.keys():
            source = CHATML if tokens.start_ids else CHATML.removeprefix("{{ bos_token }}")
        if source is None:
            self.problem = (
                "it has no chat template; use a raw completion or export an instruct model"
            )
            return
        try:
            self._template = ChatTemplate(source, self._marks, clock)
            self._compare(source, names, clock())
        except ValueError as error:
            self.problem = f"its chat template cannot be used: {error}"

    def job(
        self,
        values: TemplateValues,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, object]] | None,
        template_kwargs: Mapping[str, object] | None,
        add_generation_prompt: bool,
    ) -> RenderJob:
        """Check and copy what the client sent. Raises RequestError naming the field."""
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
            [values.message(item, f"messages[{i}]") for i, item in enumerate(messages)],
            values.plain(tools, "tools") if tools else None,
            {**DEFAULTS, **given, **fixed},
        )

    def ids(self, job: RenderJob) -> list[int]:
        """Prompt ids. Raises RequestError("template_error")."""
        if self._template is None:
            raise RequestError("template_error", self.problem, "model")
        return self._marked_ids(self._template, job)

    def _marked_ids(self, template: ChatTemplate, job: RenderJob) -> list[int]:
        parts = self._marks.split(template.render(job.messages, job.tools, job.variables))
        parts[1::2] = [self._marks.literal(mark) for mark in parts[1::2]]
        return self._tokens.encode_marked(parts)

    def _compare(self, source: str, names: Mapping[str, str], now: datetime) -> None:
        """Raise ValueError unless harmless conversations give the ids of the plain reading."""
        plain = ChatTemplate(source, None, lambda: now)
        marked = ChatTemplate(source, self._marks, lambda: now)
        refusals = []
        trials = [(_TALK[1:2], None), (_TALK, None), (_TALK[1:], None), (_TOOL_TALK, [_TOOL])]
        for messages, tools in trials:
            for prompt in (True, False):
                job = self.job(TemplateValues(), messages, tools, None, prompt)
                literal = {**job.variables, **names}
                try:
                    expected = plain.render(job.messages, job.tools, literal)
                except RequestError as refusal:
                    refusals.append(refusal.message)
                    continue
                if self._marked_ids(marked, job) != self._tokens.parse_literals(expected):
                    raise ValueError("it builds control tokens in a way that cannot be kept safe")
        if len(refusals) == 2 * len(trials):
            raise ValueError(refusals[0])
