"""Job: one running MQTT request; plain state, its decisions are made in Jobs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from edged.core import Request
from edged.ingress.mqtt.chunks import Chunks
from edged.ingress.mqtt.dedupe import Key
from edged.ingress.mqtt.messages import Address
from edged.ingress.mqtt.protocol import Call
from edged.scheduler import Stream


@dataclass(eq=False)
class Job:
    """One running request. deadline_s: loop time. address: of the latest repetition.

    ending: "" = it runs, else "cancelled" (somebody asked) or "shutting_down".
    """

    call: Call
    address: Address
    started_s: float
    deadline_s: float | None
    task: asyncio.Task[None] | None = None
    request: Request | None = None
    chunks: Chunks | None = None
    stream: Stream | None = None
    ending: str = ""
    answered: bool = False
    next_seq: int = 0
    pieces: list[str] = field(default_factory=list)

    @property
    def loud(self) -> bool:
        """Whether the requester wants more than the one answer."""
        return self.call.stream or self.call.ack

    def end(self, why: str) -> None:
        """End it early, wherever it is. The first reason counts."""
        self.ending = self.ending or why
        if self.stream is not None:
            self.stream.cancel()  # its Finish tells how far it came
        elif self.task is not None:
            self.task.cancel()


def client_of(address: Address) -> str:
    """The key of fair share: MQTT hides the sender, so whoever shares a reply tree is one."""
    return "mqtt:" + address.topic.rpartition("/")[0]


def key_of(address: Address) -> Key:
    return (address.topic, address.id)
