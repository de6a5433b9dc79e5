"""Reading from RabbitMQ: one queue, one reader at a time, so in order; what is given back keeps its place."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from aio_pika.abc import AbstractChannel
from aiormq.abc import AbstractChannel as BelowChannel
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelClosed, ChannelNotFoundEntity
from pamqp import commands

from duly.brokers import Message
from duly.brokers.rabbitmq import lenient, topology
from duly.brokers.rabbitmq.line import Address, Line, asking, plain

log = structlog.get_logger("duly.brokers")
MORE_SECONDS = 0.005  # how long a batch waits for its next message
MORE_TIMES = 20
MOST_UNREAD = 10_000
MOST_BYTES = 8 * 1024 * 1024  # in the buffer, but for one message that is larger
RENEWED_AFTER = 200  # messages of a channel that was given few at a time, for the large ones may be over
lenient.install()


class RabbitSource:
    """The queue of a group. Messages come into a buffer of at most one batch; RabbitMQ holds back the rest.

    It counts messages, and not their bytes. So a buffer that has enough of those takes no more: what comes all the same
    is dropped, and comes again on another channel, which is given as many at a time as had room in this one.

    Whatever goes wrong ends the channel: RabbitMQ then puts all that is not acknowledged back where it was, and a new
    channel begins with it. Messages of an earlier channel are ignored, and so are acknowledgements for them.
    """

    name = "rabbitmq"
    keeps_position = True

    def __init__(self, address: Address, *, topics: Sequence[str], group: str) -> None:
        self._address = address
        self._topics = tuple(topics)
        self._group = group
        self._queue = topology.queue(address, group)
        self._line = Line(address, "receiver")
        self._reading: _Reading | None = None
        self._room = MOST_UNREAD  # so many messages the next channel is given at a time

    async def check(self) -> None:
        """The exchanges and the queue are there and durable, one reads at a time, and the topics are bound."""
        pieces = [topology.exchange(self._address), topology.by_topic(self._address), self._queue]
        await topology.check(self._line, pieces)
        await topology.check_bound(self._line, topics=self._topics, group=self._group)

    async def resume(self, positions: Mapping[str, int]) -> None:
        """Give back what is not acknowledged; the next receive() begins with it. RabbitMQ keeps the position."""
        await self._give_back()
        await self._line.open()

    async def receive(self, limit: int, *, wait_seconds: float) -> Sequence[Message]:
        """What is there, in order; see Source."""
        if self._reading is not None and self._reading.is_over:
            await self._give_back()
        if self._reading is None:
            self._reading = await self._begin(min(limit, MOST_UNREAD, self._room))
        reading = self._reading
        await reading.wait(limit, wait_seconds)
        if reading.fault is not None:
            await self._give_back()
            raise ConnectionError(reading.fault)
        return [self._as_message(reading, reading.take()) for _ in range(min(limit, len(reading.buffer)))]

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """They are stored: RabbitMQ may forget them."""
        reading = self._reading
        tags = {tag for number, tag in (message.token for message in messages) if reading and number == reading.number}
        if reading is None or not tags:
            return
        try:
            async with asking(self._address):
                await reading.acknowledge(tags)
        except (OSError, ChannelClosed) as error:
            await self._give_back()
            raise ConnectionError(f"{plain(error)}: they come again") from None

    async def release(self, messages: Sequence[Message]) -> None:
        """Give back these, and all that came after them: they come again in the same order."""
        await self._give_back()

    async def lag(self) -> int | None:
        """How many wait in the queue, and in the buffer."""
        try:
            async with self._line.brief_channel() as channel:
                waiting = await self._queue.declare(channel, passive=True)
        except ChannelClosed:
            return None
        return waiting + (len(self._reading.buffer) if self._reading else 0)

    async def close(self) -> None:
        """Hang up: what is not acknowledged goes to whoever reads next, at once."""
        self._reading = None
        await self._line.drop()

    async def _begin(self, prefetch: int) -> _Reading:
        channel = await self._line.channel()
        reading = _Reading(channel, self._queue.name, is_narrow=self._room < MOST_UNREAD)
        try:
            async with asking(self._address):
                await channel.set_qos(prefetch_count=prefetch)
                await reading.begin()
        except ChannelNotFoundEntity:
            raise ConnectionError(
                f"RabbitMQ at {self._address.shown} has not {self._queue}: {topology.SETUP}"
            ) from None
        except ChannelClosed as error:
            raise ConnectionError(f"RabbitMQ does not let {self._queue} be read: {plain(error)}") from None
        except BaseException:
            await self._line.close_channel(channel)
            raise
        return reading

    async def _give_back(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            self._room = reading.room
            await self._line.close_channel(reading.channel)

    def _as_message(self, reading: _Reading, delivered: DeliveredMessage) -> Message:
        properties = delivered.header.properties
        headers = {name.lower(): text for name, text in _texts(properties.headers or {}).items()}
        if properties.content_type:
            headers["content-type"] = properties.content_type
        tag = delivered.delivery_tag or 0
        return Message(
            topic=headers.get(topology.TOPIC_HEADER, ""),
            headers=headers,
            body=delivered.body,
            position=f"{self._queue.name}, delivery {tag} of channel {reading.number}",
            token=(reading.number, tag),
        )


class _Reading:
    """One channel that reads, and what came on it; never begun twice."""

    _begun = 0

    def __init__(self, channel: AbstractChannel, queue: str, *, is_narrow: bool) -> None:
        _Reading._begun += 1
        self.number = _Reading._begun
        self.channel = channel
        self.room = MOST_UNREAD  # for the channel after this one
        self._is_narrow = is_narrow
        self._arrivals = 0
        self._bytes = 0
        self._is_full = False
        self.fault: str | None = None
        self.buffer: deque[DeliveredMessage] = deque()
        self._queue = queue
        self._unacknowledged: dict[int, None] = {}  # in order of delivery
        self._came = asyncio.Event()
        self._below: BelowChannel | None = None

    @property
    def is_over(self) -> bool:
        """Whether everything that had room was taken, and the rest is to come on another channel."""
        has_seen_enough = self._is_full or (self._is_narrow and self._arrivals >= RENEWED_AFTER)
        return has_seen_enough and not self.buffer

    async def begin(self) -> None:
        """Ask for messages."""
        self._below = await self.channel.get_underlay_channel()
        self._below.on_consumer_cancel_callbacks.add(self._cancelled)
        self.channel.close_callbacks.add(self._closed)
        await self._below.basic_consume(self._queue, self._arrived)

    async def wait(self, limit: int, seconds: float) -> None:
        """Until there is a message or a fault, and then a moment for more of them."""
        if not self._came.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._came.wait()
        for _ in range(MORE_TIMES):
            before = len(self.buffer)
            if self.fault is not None or not 0 < before < limit:
                return
            await asyncio.sleep(MORE_SECONDS)
            if len(self.buffer) == before:
                return

    def take(self) -> DeliveredMessage:
        """The next one."""
        taken = self.buffer.popleft()
        self._bytes -= _size(taken)
        self._unacknowledged[taken.delivery_tag or 0] = None
        if not self.buffer and self.fault is None:
            self._came.clear()
        return taken

    async def acknowledge(self, tags: set[int]) -> None:
        """All up to the last of them at once, unless one before it is still in work."""
        assert self._below is not None
        last = max(tags)
        if all(tag in tags for tag in self._unacknowledged if tag <= last):
            await self._below.basic_ack(last, multiple=True)
        else:
            for tag in sorted(tags):
                await self._below.basic_ack(tag)
        for tag in tags:
            self._unacknowledged.pop(tag, None)

    async def _arrived(self, message: DeliveredMessage) -> None:
        if self._is_full:
            return
        self.buffer.append(message)
        self._arrivals += 1
        self._bytes += _size(message)
        if self._bytes >= MOST_BYTES:
            self._is_full = True
            self.room = len(self.buffer)
        self._came.set()

    def _cancelled(self, frame: commands.Basic.Cancel) -> None:
        log.error("rabbitmq_queue_gone", queue=self._queue)
        self._fail(
            f"RabbitMQ has ended the reading of the queue {self._queue}: it was deleted, and what was in it is lost, "
            f"or it moves to another node. If it is gone, {topology.SETUP} anew"
        )

    def _closed(self, _: object, error: BaseException | None) -> None:
        self._fail(f"RabbitMQ was lost while the queue {self._queue} was read: {plain(error or ConnectionError())}")

    def _fail(self, fault: str) -> None:
        self.fault = self.fault or fault
        self._came.set()


def _size(message: DeliveredMessage) -> int:
    return len(message.body) + len(str(message.header.properties.headers or ""))


def _texts(headers: Mapping[str, Any]) -> dict[str, str]:
    """The headers that are text, or can be: tables and lists are left out."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        if isinstance(value, bool):
            found[name] = str(value).lower()
        elif isinstance(value, bytes | bytearray):
            found[name] = bytes(value).decode("utf-8", "replace")
        elif hasattr(value, "isoformat"):
            found[name] = value.isoformat()
        elif isinstance(value, str | int | float):
            found[name] = str(value)
    return found
