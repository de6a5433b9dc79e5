"""A source on a real socket: it reads what the small broker of the outbox's tests holds."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from duly.brokers import Message
from duly.errors import Refused
from tests.engine.outbox.broker import LINE_LIMIT, BrokerTransport

VIA = "socket"
SHARD = "log"
FULL_PORT = 1  # of a broker that says it would lose messages


def transport(url: str) -> BrokerTransport:
    """What publishes to ``socket://127.0.0.1:PORT``."""
    return BrokerTransport(_port(url))


def source(url: str, *, topics: Sequence[str], group: str) -> BrokerSource:
    """What reads it; there is one log for all topics."""
    return BrokerSource(_port(url), keeps_position=True)


async def setup(url: str, *, topics: Sequence[str], group: str | None) -> list[str]:
    """Nothing has to be made; who asks sees what was asked for."""
    return [f"made {topic} for {group or 'whoever reads it'}" for topic in topics]


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


class BrokerSource:
    """The client: one line to the broker, opened when needed, dropped after any error."""

    name = VIA

    def __init__(self, port: int, *, keeps_position: bool = False) -> None:
        self.keeps_position = keeps_position
        self._port = port
        self._after = 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def check(self) -> None:
        """Whether somebody is there."""
        if self._port == FULL_PORT:
            raise Refused("the log forgets what it acknowledged: give it a larger disk")
        await self._ask({})

    async def resume(self, positions: Mapping[str, int]) -> None:
        """From where the database, or the broker, says."""
        kept = (await self._ask({"group": "duly"}))["committed"] if self.keeps_position else positions.get(SHARD, 0)
        self._after = kept

    async def receive(self, limit: int, *, wait_seconds: float) -> Sequence[Message]:
        """The next ones."""
        found = await self._ask({"read": self._after, "limit": limit, "wait": wait_seconds})
        messages = [_as_message(offset, entry) for offset, entry in found]
        self._after += len(messages)
        return messages

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """Where the broker keeps the position, it is told."""
        if self.keeps_position:
            await self._ask({"commit": messages[-1].offset, "group": "duly"})

    async def release(self, messages: Sequence[Message]) -> None:
        """The first of them is the next."""
        self._after = messages[0].offset - 1

    async def lag(self) -> int | None:
        """What is there and was not read."""
        return int((await self._ask({}))["end"]) - self._after

    async def close(self) -> None:
        """Hang up."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with contextlib.suppress(OSError):
                await streams[1].wait_closed()

    async def _ask(self, request: dict[str, Any]) -> Any:
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=LINE_LIMIT)
            reader, writer = self._streams
            writer.write(json.dumps(request).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
            if not line:
                raise ConnectionResetError("the broker hung up")
            return json.loads(line)
        except BaseException:
            await self.close()
            raise


def _as_message(offset: int, entry: Mapping[str, Any]) -> Message:
    body = base64.b64decode(entry["body"])
    key = entry.get("key", "")
    return Message(entry["topic"], entry["headers"], body, f"log {offset}", shard=SHARD, offset=offset, key=key)
