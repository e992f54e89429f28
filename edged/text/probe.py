"""Probe: tries a chat template on harmless conversations when its model is loaded.

Finds out whether marking its control tokens changes nothing but safety, and what the template
takes for granted about tool calls. Runs before anybody encodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from edged.errors import RequestError
from edged.text.marks import ControlMarks
from edged.text.messages import ChatMessage, Habits, TemplateValues
from edged.text.template import ChatTemplate
from edged.text.tokens import Tokens

_TALK = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "One?"),
    ChatMessage("assistant", "Two."),
    ChatMessage("user", "Three?"),
)
_CALL = {
    "id": "c1a2b3c4d",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "sky"}'},
}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}
_TOOL_TALK = (
    ChatMessage("user", "One?"),
    ChatMessage("assistant", tool_calls=(_CALL,)),
    ChatMessage("tool", "Four.", name="look", tool_call_id="c1a2b3c4d"),
)
_TALKS = ((_TALK[1:2], None), (_TALK, None), (_TALK[1:], None), (_TOOL_TALK, (_TOOL,)))
# Most usual first; what a template prints of a wrong guess.
_HABITS = tuple(Habits(objects, null) for objects in (True, False) for null in (True, False))
_SIGNS_OF_A_WRONG_GUESS = ("None", "{'at': 'sky'}", '\\"at\\"')


class Probe:
    """One template under test. names: the literals of bos_token and eos_token."""

    def __init__(
        self,
        source: str,
        tokens: Tokens,
        marks: ControlMarks,
        names: Mapping[str, str],
        now: datetime,
    ) -> None:
        self._tokens = tokens
        self._marks = marks
        self._names = names
        self._marked_names = {key: marks.mark(text) for key, text in names.items()}
        # One instant for both, so that a date in the prompt cannot differ.
        self._plain = ChatTemplate(source, None, lambda: now)
        self._marked = ChatTemplate(source, marks, lambda: now)

    def habits(self) -> Habits:
        """What suits the template.

        Raises ValueError when marking would change what a harmless conversation means, or when
        the template refuses every conversation.
        """
        found = next(filter(self._suits, _HABITS), Habits())
        refusals = [
            self._compare(messages, tools, found, prompt)
            for messages, tools in _TALKS
            for prompt in (True, False)
        ]
        if all(refusals):
            raise ValueError(refusals[0])
        return found

    def _suits(self, habits: Habits) -> bool:
        try:
            text = self._render(self._plain, _TOOL_TALK, (_TOOL,), habits, True, self._names)
        except RequestError:
            return False
        return not any(sign in text for sign in _SIGNS_OF_A_WRONG_GUESS)

    def _compare(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, object]] | None,
        habits: Habits,
        prompt: bool,
    ) -> str:
        """ "" if marking changes nothing, else the template's refusal of this conversation."""
        try:
            plain = self._render(self._plain, messages, tools, habits, prompt, self._names)
        except RequestError as refusal:
            return refusal.message
        try:
            marked = self._render(self._marked, messages, tools, habits, prompt, self._marked_names)
        except RequestError as refusal:
            raise ValueError(refusal.message) from None
        ids = self._tokens.encode_marked(self._marks.split(marked))
        if ids != self._tokens.parse_literals(plain):
            raise ValueError("it builds control tokens in a way that cannot be kept safe")
        return ""

    @staticmethod
    def _render(
        template: ChatTemplate,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, object]] | None,
        habits: Habits,
        prompt: bool,
        names: Mapping[str, str],
    ) -> str:
        values = TemplateValues(habits)
        variables = {**names, "add_generation_prompt": prompt, "enable_thinking": False}
        return template.render(
            [values.message(message, "messages") for message in messages],
            values.plain(tools, "tools") if tools else None,
            variables,
        )
