"""Topics: the names of the MQTT tree, and which reply topics are safe to answer on.

Pure. Owns the confused-deputy rule: a requester names the topic, the daemon has the rights.
Never publishes.
"""

from __future__ import annotations

from dataclasses import dataclass

from edged.errors import ConfigError

VERBS = ("generate", "chat", "cancel", "status")
MAX_TOPIC_BYTES = 256
DISCOVERY_PREFIX = "homeassistant"
# Subtrees of a node that carry state or commands; an answer there could forge either.
OWN_TREES = frozenset({"state", "req", "cmd", "event"})


@dataclass(frozen=True)
class Topics:
    """The tree of one node: base/{node}/req|res|state; base/reply is the requesters' own."""

    base: str
    node: str

    @property
    def root(self) -> str:
        return f"{self.base}/{self.node}"

    @property
    def requests(self) -> str:
        """The one filter of directed requests."""
        return f"{self.root}/req/+"

    @property
    def availability(self) -> str:
        return f"{self.root}/state/availability"

    def state(self, name: str) -> str:
        return f"{self.root}/state/{name}"

    def answer(self, request_id: str) -> str:
        """The default reply topic."""
        return f"{self.root}/res/{request_id}"

    def verb(self, topic: str) -> str:
        """The last level of a request topic; "" for any other topic."""
        prefix = f"{self.root}/req/"
        return topic[len(prefix) :] if topic.startswith(prefix) else ""


def matches(pattern: str, topic: str) -> bool:
    """Whether a topic filter covers a topic (MQTT 5.0 §4.7)."""
    levels = topic.split("/")
    wanted = pattern.split("/")
    if topic.startswith("$") and wanted[0] in ("+", "#"):
        return False
    for index, level in enumerate(wanted):
        if level == "#":
            return True
        if index >= len(levels) or level not in ("+", levels[index]):
            return False
    return len(levels) == len(wanted)


def reply_problem(topic: str, topics: Topics, allow: tuple[str, ...]) -> str | None:
    """Why nothing may be published on this reply topic; None = it may."""
    if not topic or len(topic.encode("utf-8", "replace")) > MAX_TOPIC_BYTES:
        return f"a reply topic has 1 to {MAX_TOPIC_BYTES} bytes"
    if "+" in topic or "#" in topic:
        return "a reply topic has no wildcards (+ and #)"
    if not topic.isprintable():
        return "a reply topic has no control characters"
    if topic.startswith("$"):
        return "a reply topic does not begin with $"
    if matches(f"{DISCOVERY_PREFIX}/#", topic) or _is_own_tree(topic, topics):
        return "this topic carries state or commands, not answers"
    if topic.startswith(f"{topics.root}/res/"):
        return None
    if any(matches(pattern, topic) for pattern in allow):
        return None
    return "this topic is not in mqtt.reply_allow"


def _is_own_tree(topic: str, topics: Topics) -> bool:
    """State, request or command topics of this node, of its neighbours or of a pool."""
    if not topic.startswith(f"{topics.base}/"):
        return False
    name, _, rest = topic[len(topics.base) + 1 :].partition("/")
    return name == "pool" or (name != "reply" and rest.split("/")[0] in OWN_TREES)


def check_names(base: str, allow: tuple[str, ...]) -> None:
    """Raise ConfigError unless base is a plain topic and every allowed filter is valid."""
    plain = base.isprintable() and not set(base) & set("+#") and base.strip("/") == base
    if not base or not plain or base.startswith("$"):
        raise ConfigError("mqtt.base: use a topic without wildcards, such as edged/v1")
    for pattern in allow:
        levels = pattern.split("/")
        odd = any(len(level) > 1 and set(level) & set("+#") for level in levels)
        if not pattern or odd or "#" in levels[:-1]:
            raise ConfigError(f"mqtt.reply_allow: {pattern!r} is not a valid topic filter")
