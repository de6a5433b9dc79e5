"""What the tests of Kafka share: events, topics by hand, and a look at what a broker wrote to its disk."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from duly.brokers import Later, Message
from duly.brokers.kafka import KafkaSource, KafkaTransport, source
from duly.ids import uuid7
from duly.messages import Event
from tests.brokers.server_kafka import KafkaServer


def fresh(name: str = "orders") -> str:
    """A topic that no test used before."""
    return f"shop.{name}.{uuid7().hex[-8:]}"


def event(n: int, topic: str, *, aggregate: str = "o-1", **payload: Any) -> Event:
    """The n-th of an aggregate."""
    headers = {"correlation_id": "c-1", "note to self": "ü"}
    return Event(uuid7(), "order.placed", topic, aggregate, {"n": n, **payload}, headers, datetime.now(UTC))


async def make_topic(
    server: KafkaServer, topic: str, *, partitions: int = 1, config: Mapping[str, str] | None = None
) -> str:
    """A topic as an operator makes one."""
    admin = AdminClient(server.client)
    made = admin.create_topics([NewTopic(topic, partitions, 1, config=dict(config or {}))], operation_timeout=30)
    await asyncio.wrap_future(made[topic])
    await asyncio.to_thread(_wait_until_led, server, topic, partitions)
    return topic


def _wait_until_led(server: KafkaServer, topic: str, partitions: int) -> None:
    """The broker hears of a topic a little later than its controller."""
    consumer = Consumer({**server.client, "group.id": "looking"})
    for _ in range(300):
        with contextlib.suppress(KafkaException):
            for number in range(partitions):
                consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=30)
            break
        time.sleep(0.1)
    consumer.close()


async def drop_topic(server: KafkaServer, topic: str) -> None:
    """The topic, and all that was in it."""
    admin = AdminClient(server.client)
    await asyncio.wrap_future(admin.delete_topics([topic], operation_timeout=30)[topic])


async def topics_of(server: KafkaServer) -> set[str]:
    """Every topic there is."""
    return set((await asyncio.to_thread(AdminClient(server.client).list_topics, timeout=30)).topics)


async def committed(server: KafkaServer, group: str, topic: str, partition: int = 0) -> int:
    """The group's offset as the broker has it; below zero when there is none."""
    return await asyncio.to_thread(_committed, server, group, TopicPartition(topic, partition))


def _committed(server: KafkaServer, group: str, partition: TopicPartition) -> int:
    consumer = Consumer({**server.client, "group.id": group})  # it never joins
    try:
        return int(consumer.committed([partition], timeout=60)[0].offset)
    finally:
        consumer.close()


async def ends_of(server: KafkaServer, topic: str) -> dict[int, int]:
    """The offset of each partition that its next message will have."""
    return await asyncio.to_thread(_ends_of, server, topic)


def _ends_of(server: KafkaServer, topic: str) -> dict[int, int]:
    consumer = Consumer({**server.client, "group.id": "looking"})
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        _wait_until_led(server, topic, len(partitions))
        found = {one: consumer.get_watermark_offsets(TopicPartition(topic, one), timeout=30) for one in partitions}
        return {one: int(ends[1]) for one, ends in found.items()}
    finally:
        consumer.close()


async def set_offsets(server: KafkaServer, group: str, topic: str, offsets: Mapping[int, int]) -> None:
    """What an operator does with a group that nobody reads as."""
    await asyncio.to_thread(_set_offsets, server, group, [TopicPartition(topic, *one) for one in offsets.items()])


def _set_offsets(server: KafkaServer, group: str, offsets: list[TopicPartition]) -> None:
    consumer = Consumer({**server.client, "group.id": group})
    try:
        consumer.commit(offsets=offsets, asynchronous=False)
    finally:
        consumer.close()


async def answers_to(transport: KafkaTransport, events: Sequence[Event], *, tries: int = 30) -> list[str | None]:
    """Publish as the relay does, again and again while an event has to wait: on a busy machine answers are late."""
    answers: list[str | Later | None] = [Later("")] * len(events)
    for _ in range(tries):
        waiting = [index for index, answer in enumerate(answers) if isinstance(answer, Later)]
        if not waiting:
            break
        with contextlib.suppress(OSError):
            found = await transport.publish([events[index] for index in waiting])
            for index, answer in zip(waiting, found, strict=True):
                answers[index] = answer
    assert not [answer for answer in answers if isinstance(answer, Later)], answers
    return [None if isinstance(answer, Later) else answer for answer in answers]


async def deliver(transport: KafkaTransport, *events: Event) -> None:
    """Publish until each is acknowledged."""
    assert await answers_to(transport, events) == [None] * len(events)


async def eventually(fact: Any, expected: Any, *, seconds: float = 60.0) -> None:
    """Ask until the answer is the one; an error when it never is."""
    found = None
    for _ in range(int(seconds / 0.1)):
        found = await fact()
        if found == expected:
            return
        await asyncio.sleep(0.1)
    assert found == expected


@contextlib.asynccontextmanager
async def reading(
    server: KafkaServer, topics: Sequence[str], *, group: str = "duly", options: str = ""
) -> AsyncIterator[KafkaSource]:
    """A source that is closed in the end."""
    made = source(f"{server.url}{options}", topics=topics, group=group)
    try:
        yield made
    finally:
        await made.close()


async def receive(
    source: KafkaSource, count: int, *, limit: int = 100, seconds: float = 90.0, acknowledge: bool = False
) -> list[Message]:
    """So many messages, and an error when they do not come; without an acknowledgement the first batch is all."""
    found: list[Message] = []
    async with asyncio.timeout(seconds):
        while len(found) < count:
            batch = await source.receive(limit, wait_seconds=0.5)
            if acknowledge:
                await source.acknowledge(batch)
                found += batch
            else:
                found = list(batch)
    return found


def first_batch(server: KafkaServer, topic: str) -> dict[str, int]:
    """The head of the first batch of a partition, as it is on the broker's disk."""
    log = Path(server.directory) / "logs" / f"{topic}-0" / f"{0:020d}.log"
    _, _, _, magic, _, _, last, _, _, producer, epoch, sequence = struct.unpack(">qiibIhiqqqhi", log.read_bytes()[:57])
    return {"magic": magic, "last": last, "producer": producer, "epoch": epoch, "sequence": sequence}
