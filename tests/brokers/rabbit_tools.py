"""What the tests of RabbitMQ share: events, a look into queues, and a wire that can be held and cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from duly.brokers import Message, Source
from duly.brokers.rabbitmq.line import read_address
from duly.ids import uuid7
from duly.messages import Event

TOPIC = "shop.orders"
GROUP = "shop"


def event(aggregate: str, *, type_: str = "order.placed", topic: str = TOPIC, **payload: Any) -> Event:
    """An event that was never in a database."""
    moment = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    return Event(uuid7(), type_, topic, aggregate, payload, {"correlation_id": "c-1"}, moment)


def events(count: int, **more: Any) -> list[Event]:
    """So many, each of another aggregate."""
    return [event(f"order-{number}", number=number, **more) for number in range(count)]


async def read_all(source: Source, count: int, *, seconds: float = 60.0, limit: int = 100) -> list[Message]:
    """Receive until there are so many; nothing is acknowledged."""
    found: list[Message] = []
    async with asyncio.timeout(seconds):
        while len(found) < count:
            found += await source.receive(limit, wait_seconds=1)
    return found


def ids(messages: Sequence[Message]) -> list[str]:
    """The ids of events, as they are on the wire."""
    return [message.headers["cloudevents:id"] for message in messages]


def queue_of(url: str, group: str = GROUP) -> str:
    """The name of the queue of a group there."""
    return f"{read_address(url).exchange}.{group}"


@contextlib.asynccontextmanager
async def peek(url: str) -> AsyncIterator[AbstractChannel]:
    """A channel of a client that is not ours."""
    connection = await aio_pika.connect(url.partition("?")[0], timeout=30)
    async with connection, connection.channel() as channel:
        yield channel


async def take_all(channel: AbstractChannel, queue: str, count: int) -> list[AbstractIncomingMessage]:
    """What is in a queue, taken out of it."""
    reads = await channel.get_queue(queue)
    found: list[AbstractIncomingMessage] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            message = await reads.get(no_ack=True, fail=False)
            if message is not None:
                found.append(message)
    return found


async def waiting(url: str, queue: str) -> int:
    """How many messages of a queue are with nobody."""
    async with peek(url) as channel:
        return (await channel.get_queue(queue)).declaration_result.message_count or 0


class Wire:
    """A proxy before the server: its answers can be held back, and its lines cut."""

    def __init__(self, url: str) -> None:
        self._to = urlsplit(url)
        self.answering = asyncio.Event()
        self.answering.set()
        self.bytes_sent = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        port = self._server.sockets[0].getsockname()[1]
        return self._to._replace(netloc=f"{self._to.username}:{self._to.password}@127.0.0.1:{port}").geturl()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Every line, now."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        server, to_server = await asyncio.open_connection(self._to.hostname, self._to.port)
        self._writers += [to_client, to_server]
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass(client, to_server, back=False), self._pass(server, to_client, back=True))
        to_client.close()
        to_server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool) -> None:
        while piece := await reader.read(65_536):
            if back:
                await self.answering.wait()
            else:
                self.bytes_sent += len(piece)
            writer.write(piece)
            await writer.drain()
        writer.close()
