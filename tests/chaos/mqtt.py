"""An MQTT requester of the chaos suite: keeps its session over broker restarts, counts answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiomqtt

from chaos.clients import Ask, Told

NODE = "test"
ROOT = f"edged/v1/{NODE}"
# What is queued for a session survives kill -9 of the broker.
BROKER = "persistent_client_expiration 1h\nautosave_on_changes true\nautosave_interval 1"


class Requester:
    """told: by request id. chunks: text of the chunks of a streamed answer, by id."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.told: dict[str, Told] = {}
        self.chunks: dict[str, dict[int, str]] = {}
        self.repeats: list[str] = []  # ids answered again, which QoS 1 allows after a kill
        self.state: dict[str, Any] = {}
        self._client: aiomqtt.Client | None = None
        self._up = asyncio.Event()

    async def keep(self) -> None:
        """Connected again and again, until cancelled."""
        while True:
            client = aiomqtt.Client(
                "127.0.0.1", self._port, identifier="chaos", clean_session=False
            )
            with contextlib.suppress(aiomqtt.MqttError):
                async with client:
                    await client.subscribe(f"{ROOT}/res/#", qos=1)
                    self._client = client
                    self._up.set()
                    async for message in client.messages:
                        self._hear(json.loads(bytes(message.payload)))
            self._up.clear()
            await asyncio.sleep(0.2)

    async def ask(self, id: str, ask: Ask, stream: bool = True) -> Told:
        """Sent once the broker has it; the answer comes when it comes."""
        told = self.told[id] = Told(ask)
        self.chunks[id] = {}
        await self.publish(f"{ROOT}/req/generate", ask.body | {"id": id, "stream": stream})
        return told

    async def publish(self, topic: str, body: dict[str, Any]) -> None:
        """Once the broker is there, and until it has taken it."""
        while True:
            await self._up.wait()
            assert self._client is not None
            try:
                await self._client.publish(topic, json.dumps(body), qos=1)
            except aiomqtt.MqttError:
                await asyncio.sleep(0.2)
                continue
            return

    def _hear(self, body: dict[str, Any]) -> None:
        told = self.told.get(body["id"])
        if told is None or body["type"] not in ("chunk", "final", "error"):
            return
        if body["type"] == "chunk":
            told.late += told.ends
            self.chunks[body["id"]][body["seq"]] = body["delta"]
            told.begun.set()
            return
        if told.ends:  # the same answer once more, or another one
            self.repeats.append(body["id"])
            told.late += body.get("text", told.text) != told.text
            return
        if body["type"] == "error":
            told.end("failed", body["error"]["code"])
            return
        told.engines, told.usage = body["engines"], body["usage"]
        told.text = body["text"]
        told.end(body["finish_reason"])


@contextlib.asynccontextmanager
async def requester(port: int) -> AsyncIterator[Requester]:
    made = Requester(port)
    task = asyncio.create_task(made.keep())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
