"""Reading from Kafka: one member of a consumer group, in one thread, which commits offsets only when it is told to.

What was read and not acknowledged is read again before anything else is: so a batch may be given back, or forgotten.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Raw
from confluent_kafka.admin import AdminClient

from duly.brokers import Message
from duly.brokers.kafka import checking
from duly.brokers.kafka.address import TOPIC, Address
from duly.brokers.kafka.thread import OneThread
from duly.brokers.kafka.trouble import AWAY, MISSING, Complaints, error_of, words
from duly.clock import monotonic
from duly.errors import Refused
from duly.telemetry import MESSAGES_MISSING

log = structlog.get_logger("duly.kafka")
Partition = tuple[str, int]
POLL_SECONDS = 0.2
DOWN_SECONDS = 2.0
COMMIT_AGAIN_SECONDS = 5.0
COMMITTED_SECONDS = 10.0
CLOSE_SECONDS = 15.0
MAX_BATCH_BYTES = 8 * 1024 * 1024
_CONSUMER = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "earliest",
    "isolation.level": "read_committed",
    "partition.assignment.strategy": "cooperative-sticky",
    "session.timeout.ms": 15_000,
    "heartbeat.interval.ms": 3_000,
    "max.poll.interval.ms": 120_000,
    "fetch.wait.max.ms": 250,
    "fetch.max.bytes": MAX_BATCH_BYTES,  # what is fetched ahead is bounded, in bytes
    "queued.min.messages": 2_000,
    "queued.max.messages.kbytes": 16_384,
}


class KafkaSource:
    """Topics of Kafka as a place to read from; the group's offsets say how far."""

    name = "kafka"
    keeps_position = True

    def __init__(self, address: Address, *, topics: Sequence[str], group: str) -> None:
        if not topics or not group:
            raise Refused("reading from Kafka needs at least one topic, and the name of a group")
        if wrong := [topic for topic in topics if not TOPIC.fullmatch(topic)]:
            raise Refused(f"Kafka knows no topic of the name {wrong[0]!r}: it takes letters, digits and . _ -")
        self._address, self._topics, self._group = address, sorted(set(topics)), group
        self._reader = Reader({**_CONSUMER, **address.client, "group.id": group}, self._topics)
        self._thread = OneThread("kafka-consumer")
        self._admin: AdminClient | None = None
        self._ids: dict[str, str] = {}
        self._told: dict[Partition, int] = {}
        self._missing = MESSAGES_MISSING.labels(self.name)  # there from the beginning: a first one is a rise

    async def check(self) -> None:
        """Refuse topics that are missing, or that throw messages away before they are read."""
        await checking.check_topics(self._address, self._topics, must_exist=True)

    async def resume(self, positions: Mapping[str, int]) -> None:
        """Begin again after what was acknowledged; the group keeps the positions, so none are needed."""
        await self._thread.call(self._reader.rewind)

    async def receive(self, limit: int, *, wait_seconds: float) -> Sequence[Message]:
        """What is there, in order per partition: at most so many, and at most MAX_BATCH_BYTES."""
        stop = threading.Event()
        try:
            return await self._thread.call(self._reader.read, limit, wait_seconds, stop)
        finally:
            stop.set()

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """Commit the offsets after these; the broker's answer is not waited for, and if it is no, we try again."""
        await self._thread.call(self._reader.acknowledge, list(messages))

    async def release(self, messages: Sequence[Message]) -> None:
        """Read again from the first that was not acknowledged."""
        await self._thread.call(self._reader.rewind)

    async def lag(self) -> int | None:
        """How many messages the group has not committed, in all partitions; and a look at what should not happen."""
        self._admin = self._admin or checking.admin_client(self._address)
        try:
            ends = await checking.topic_ends(self._admin, self._topics)
        except Refused:  # we may not look: that is no reason not to read
            return None
        if anew := {topic for topic, id_ in ends.ids.items() if self._ids.get(topic, id_) != id_}:
            log.warning("kafka_topic_made_anew", topics=sorted(anew))
            self._told = {one: offset for one, offset in self._told.items() if one[0] not in anew}
            begin = {one: first for one, (first, _) in ends.offsets.items() if one[0] in anew}
            await self._thread.call(self._reader.begin_anew, begin)
        self._ids |= ends.ids
        committed = await self._thread.call(self._reader.committed, list(ends.offsets))
        lag = 0
        for partition, (first, last) in ends.offsets.items():
            at = committed.get(partition, -1)
            if 0 <= at < first:
                self._tell_missing(partition, max(at, self._told.get(partition, 0)), first)
            lag += max(0, last - max(at, first))
        return lag

    def _tell_missing(self, partition: Partition, after: int, first: int) -> None:
        """Once of each message that the topic threw away before the group had read it."""
        if after < first:
            log.error("kafka_messages_missing", topic=partition[0], partition=partition[1], messages=first - after)
            self._missing.inc(first - after)
            self._told[partition] = first

    async def close(self) -> None:
        """Leave the group at once: others go on from what was acknowledged."""
        await self._thread.end(self._reader.close, seconds=CLOSE_SECONDS)


class Reader:
    """The consumer, and only one thread calls it; so it is told of a rebalance only while it reads."""

    def __init__(self, settings: Mapping[str, Any], topics: Sequence[str]) -> None:
        self._settings = settings
        self._topics = list(topics)
        self._consumer: Consumer | None = None
        self._complaints = Complaints()
        self._batch: list[Message] = []
        self._due: dict[Partition, int] = {}  # the offset that is to be acknowledged next
        self._next: dict[Partition, int] = {}  # the offset that is to be read next
        self._owed: set[Partition] = set()  # the broker did not take the offset
        self._committed_at = 0.0
        self._read_at = 0.0
        most = str(settings["max.poll.interval.ms"])
        self._most_seconds = int(most) / 1000 if most.isdecimal() else math.inf  # between two reads; or it cannot start

    def read(self, limit: int, wait_seconds: float, stop: threading.Event) -> list[Message]:
        """A batch; nothing is left unacknowledged of an earlier one, for that comes first, again."""
        self._leave_if_late()
        self._read_at = monotonic()
        consumer = self._open()
        self.rewind()
        self._commit_again()
        self._batch, size = [], 0
        until = monotonic() + wait_seconds
        while len(self._batch) < limit and size < MAX_BATCH_BYTES and not stop.is_set():
            left = max(0.0, until - monotonic())
            found = consumer.poll(0 if self._batch else min(POLL_SECONDS, left))
            if found is None:
                if self._batch or not left:
                    break
            elif (error := found.error()) is not None:
                self._complain(error)
            else:
                message = _message(found)
                partition, offset = message.token
                self._due[partition] = min(offset, self._due.get(partition, offset))  # less: it began anew
                self._next[partition] = offset + 1
                self._batch.append(message)
                size += len(message.body)
        self._read_at = monotonic()
        if not self._batch:
            self._check_away(consumer)
        batch, self._batch = self._batch, []
        return batch

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Commit, for each partition that is still ours, the offset after the last of these."""
        ends: dict[Partition, int] = {}
        for message in messages:
            partition, offset = message.token
            if partition in self._due:
                ends[partition] = max(offset + 1, ends.get(partition, 0))
        self._due |= ends
        self._commit(ends)

    def rewind(self) -> None:
        """Go back to the first message that was not acknowledged, in each partition."""
        behind = [one for one, offset in self._due.items() if offset < self._next.get(one, offset)]
        if self._consumer is None or not behind:
            return
        try:
            for topic, number in behind:
                offset = self._due[topic, number]
                self._consumer.seek(TopicPartition(topic, number, offset))
                self._next[topic, number] = offset
        except KafkaException as error:  # it is not ours any more, or not yet again
            log.info("kafka_begins_anew", reason=words(error_of(error)))
            self.close()

    def committed(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """The group's offsets, as the broker has them; below zero where there is none."""
        asked = [TopicPartition(topic, number) for topic, number in partitions]
        try:
            found = self._open().committed(asked, timeout=COMMITTED_SECONDS) if asked else []
        except KafkaException as error:
            raise ConnectionError(words(error_of(error))) from None
        return {(one.topic, one.partition): one.offset for one in found}

    def begin_anew(self, offsets: Mapping[Partition, int]) -> None:
        """Topics were deleted and made again: what we know of them is of the old ones. Read from their beginnings."""
        self._commit(offsets)
        self.close()

    def close(self) -> None:
        """Leave the group, and hang up; reading again joins again, after what was committed."""
        consumer, self._consumer = self._consumer, None
        self._due, self._next, self._owed = {}, {}, set()
        if consumer is not None:
            consumer.close()

    # -- the client ---------------------------------------------------------------------------------------------

    def _leave_if_late(self) -> None:
        """Who did not read for so long is out of the group, and its client has not heard of it yet.

        It would still read on, from wherever we tell it, what others have by now.
        """
        if self._consumer is not None and monotonic() > self._read_at + self._most_seconds:
            log.warning("kafka_left_the_group", reason="nothing was read for too long")
            self.close()

    def _open(self) -> Consumer:
        if self._consumer is not None and not self._complaints.fatal:
            return self._consumer
        self.close()
        self._complaints = complaints = Complaints()
        settings = {
            **self._settings,
            "error_cb": lambda error: complaints.hear(error, now=monotonic()),
            "on_commit": self._committed,
        }
        try:
            self._consumer = Consumer(settings)
        except KafkaException as error:
            raise ConnectionError(f"Kafka's client cannot be started: {words(error_of(error))}") from None
        self._read_at = monotonic()
        self._consumer.subscribe(self._topics, on_assign=_assigned, on_revoke=self._revoked, on_lost=self._lost)
        return self._consumer

    def _complain(self, error: KafkaError) -> None:
        if error.code() in MISSING or error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            log.warning("kafka_topic_not_read", reason=words(error))  # the others go on
        elif error.code() == KafkaError._MAX_POLL_EXCEEDED:
            log.warning("kafka_left_the_group", reason="nothing was read for too long")  # reading on joins again
        elif error.code() in AWAY:
            self._complaints.hear(error, now=monotonic())
        else:
            raise ConnectionError(f"Kafka refuses: {words(error)}")

    def _check_away(self, consumer: Consumer) -> None:
        """Nothing came: is that because nobody is there?"""
        down_since = self._complaints.down_since
        if down_since is None or monotonic() < down_since + DOWN_SECONDS:
            return
        try:
            consumer.list_topics(self._topics[0], timeout=DOWN_SECONDS)
        except KafkaException as error:
            raise ConnectionError(f"{words(error_of(error))} ({self._complaints.words})") from None
        self._complaints.down_since = None

    # -- offsets ------------------------------------------------------------------------------------------------

    def _commit(self, ends: Mapping[Partition, int]) -> None:
        if not ends or self._consumer is None:
            return
        offsets = [TopicPartition(topic, number, offset) for (topic, number), offset in ends.items()]
        self._committed_at = monotonic()
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            log.info("kafka_commit_failed", reason=words(error_of(error)))
            self._owed |= ends.keys()

    def _commit_again(self) -> None:
        if self._owed and monotonic() > self._committed_at + COMMIT_AGAIN_SECONDS:
            owed, self._owed = self._owed, set()
            self._commit({one: self._due[one] for one in owed if one in self._due})

    def _committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        for one in partitions:
            failed = one.error or error
            if failed is not None and failed.code() != KafkaError._NO_OFFSET:
                log.info("kafka_commit_failed", topic=one.topic, reason=words(failed))
                if failed.code() not in MISSING:
                    self._owed.add((one.topic, one.partition))

    # -- rebalancing --------------------------------------------------------------------------------------------

    def _revoked(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        gone = {(one.topic, one.partition) for one in partitions}
        self._commit({one: self._due[one] for one in self._owed & gone if one in self._due})
        self._forget(gone)

    def _lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        log.warning("kafka_partitions_lost", partitions=len(partitions))
        self._forget({(one.topic, one.partition) for one in partitions})

    def _forget(self, gone: set[Partition]) -> None:
        self._owed -= gone
        for kept in (self._due, self._next):
            for one in gone & kept.keys():
                del kept[one]
        self._batch = [message for message in self._batch if message.token[0] not in gone]


def _assigned(_consumer: Consumer, partitions: list[TopicPartition]) -> None:
    log.info("kafka_partitions_assigned", partitions=len(partitions))


def _message(raw: Raw) -> Message:
    """A message as it came."""
    topic, partition, offset = raw.topic() or "", raw.partition() or 0, raw.offset() or 0
    headers = {_text(name).lower(): _text(value) for name, value in list(raw.headers() or [])}
    return Message(
        topic=topic,
        headers=headers,
        body=raw.value() or b"",
        position=f"partition {partition}, offset {offset}",
        token=((topic, partition), offset),
        key=_key(raw.key()),
    )


def _key(key: str | bytes | None) -> str:
    """Two keys are never one: bytes that are no text are written in hexadecimal digits."""
    try:
        return key.decode() if isinstance(key, bytes) else key or ""
    except UnicodeDecodeError:
        return key.hex() if isinstance(key, bytes) else ""


def _text(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
