"""Publishing to Kafka: one idempotent producer in one thread, every event waited for until all replicas have it.

The client's own asyncio producer carries no headers (its batches cannot), so this is the plain one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from duly.brokers import Later, wire
from duly.brokers.kafka import checking
from duly.brokers.kafka.address import TOPIC, Address
from duly.brokers.kafka.thread import OneThread
from duly.brokers.kafka.trouble import AWAY, MISSING, Complaints, error_of, missing_topic, words
from duly.clock import monotonic
from duly.failpoints import failpoint
from duly.messages import Event, declared_events

log = structlog.get_logger("duly.kafka")
PUBLISH_SECONDS = 12.0  # the relay gives a wave thirty
DOWN_SECONDS = 2.0  # all brokers were gone for so long: do not wait for the rest
POLL_SECONDS = 0.1
METADATA_SECONDS = 10.0  # for all topics that it has not seen
CLOSE_SECONDS = 5.0
_PRODUCER = {
    "enable.idempotence": True,
    "acks": "all",
    "message.timeout.ms": 10_000,
    "topic.metadata.propagation.max.ms": 2_000,
    "partitioner": "murmur2_random",  # as Java's: a key is in the same partition whoever sends it
    "linger.ms": 2,
    "queue.buffering.max.messages": 20_000,
    "queue.buffering.max.kbytes": 65_536,
}
Answer = str | Later | None


class KafkaTransport:
    """Kafka as a place to publish to: the event's topic, its aggregate as the key, CloudEvents in binary mode."""

    name = "kafka"

    def __init__(self, address: Address) -> None:
        self._address = address
        self._sender = Sender(address)
        self._thread = OneThread("kafka-producer")

    async def check(self) -> None:
        """Refuse topics that lose what they acknowledged; a topic that is missing is told, for its events wait."""
        topics = sorted({body.event_topic for body in declared_events().values()})
        await checking.check_topics(self._address, [one for one in topics if TOPIC.fullmatch(one)], must_exist=False)

    async def publish(self, events: Sequence[Event]) -> Sequence[Answer]:
        """Send each to its topic and wait for its acknowledgement by all replicas in sync."""
        stop = threading.Event()
        try:
            return await self._thread.call(self._sender.publish, list(events), stop)
        finally:
            stop.set()  # whoever waits no longer: neither does the thread

    async def close(self) -> None:
        """Hang up."""
        await self._thread.end(self._sender.close, seconds=2 * CLOSE_SECONDS)


class Sender:
    """The producer, and only one thread calls it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._producer: Producer | None = None
        self._complaints = Complaints()
        self._known: set[str] = set()

    def publish(self, events: Sequence[Event], stop: threading.Event) -> list[Answer]:
        """One answer for each event, within PUBLISH_SECONDS; ConnectionError or TimeoutError when Kafka is away."""
        producer = self._producer
        if producer is None or self._complaints.fatal:
            producer = self._open()
        producer.poll(0)
        self._complaints.down_since = None  # that was then; if it is so still, we hear it again
        wave = Wave(events, stop, until=monotonic() + METADATA_SECONDS)
        self._refuse_topics(wave)
        wave.until = monotonic() + PUBLISH_SECONDS
        for number in wave.unanswered():
            if wave.is_over:
                break
            self._produce(wave, number)
        failpoint("transport.sent")
        self._wait(wave)
        for number in wave.rejected():  # with others in one batch, and perhaps for another's fault
            if wave.is_over:
                break
            wave.send_alone(number)
            self._produce(wave, number)
            self._wait(wave)
        return self._settle(wave)

    def close(self) -> None:
        """Wait a little for what is under way, and hang up."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.flush(CLOSE_SECONDS)
            producer.purge()
            producer.close()

    def _open(self) -> Producer:
        self.close()
        self._complaints = complaints = Complaints()
        self._known = set()
        try:
            self._producer = Producer(
                {**_PRODUCER, **self._address.client, "error_cb": lambda error: complaints.hear(error, now=monotonic())}
            )
        except KafkaException as error:
            raise ConnectionError(f"Kafka's client cannot be started: {words(error_of(error))}") from None
        return self._producer

    def _refuse_topics(self, wave: Wave) -> None:
        for topic in {event.topic for event in wave.events} - self._known:
            if wave.is_over:
                answer: Answer = Later("Kafka takes too long to tell of its topics: this one was not asked for yet")
            else:
                answer = self._ask_for(topic, seconds=max(0.1, wave.until - monotonic()))
            if answer is None:
                self._known.add(topic)
            else:
                wave.answer_topic(topic, answer)

    def _ask_for(self, topic: str, *, seconds: float) -> Answer:
        """Whether the topic is there; asking does not create it, and makes the producer look again."""
        assert self._producer is not None
        if not TOPIC.fullmatch(topic):
            return f"Kafka knows no topic of the name {topic!r}: it takes letters, digits and . _ -"
        try:
            error = self._producer.list_topics(topic, timeout=seconds).topics[topic].error
        except KafkaException as exception:
            self._producer.poll(0)
            raise ConnectionError(f"{words(error_of(exception))} ({self._complaints.words})") from None
        if error is None:
            return None
        if error.code() in MISSING:
            return missing_topic(topic)
        return Later(f"the topic {topic} cannot be written to: {words(error)}")

    def _produce(self, wave: Wave, number: int) -> None:
        assert self._producer is not None
        event = wave.events[number]
        headers: list[tuple[str, str | bytes | None]]
        try:
            attributes, body = wire.encode(event, wire.KAFKA)
            headers, key = [(name, value.encode()) for name, value in attributes.items()], event.aggregate_id.encode()
        except (ValueError, RecursionError) as error:
            wave.answers[number] = f"cannot be encoded: {type(error).__name__}"
            return
        while True:
            try:
                self._producer.produce(event.topic, body, key, headers=headers, on_delivery=wave.hears(number))
                return
            except BufferError:  # the queue is full: its head is delivered, or times out
                if wave.is_over:
                    return
                self._producer.poll(POLL_SECONDS)
            except KafkaException as error:
                wave.heard(number, error_of(error))
                return

    def _wait(self, wave: Wave) -> None:
        assert self._producer is not None
        while wave.waiting() and not wave.is_over:
            self._producer.poll(POLL_SECONDS)
            down_since = self._complaints.down_since
            if wave.delivered:
                self._complaints.down_since = None
            elif self._complaints.fatal or (down_since is not None and monotonic() > down_since + DOWN_SECONDS):
                break
        if wave.waiting():
            self._producer.purge()  # nothing that we gave up on is kept
            self._producer.poll(0)

    def _settle(self, wave: Wave) -> list[Answer]:
        """The answers; what has none waits, unless Kafka as a whole is away."""
        silent = {wave.events[number].topic for number in wave.unanswered()}
        self._known -= silent | wave.missing
        if silent and not wave.delivered and not wave.stop.is_set():
            self._check_away(min(silent))
        why = Later(f"Kafka did not acknowledge it: {wave.words or self._complaints.words}")
        return [wave.answers.get(number, why) for number in range(len(wave.events))]

    def _check_away(self, topic: str) -> None:
        assert self._producer is not None
        if self._complaints.fatal:
            raise ConnectionError(f"Kafka's producer has to begin anew: {self._complaints.words}")
        if self._complaints.down_since is not None:
            down_since, self._complaints.down_since = self._complaints.down_since, None
            raise ConnectionError(f"no broker for {monotonic() - down_since:.0f} s: {self._complaints.words}")
        try:
            self._producer.list_topics(topic, timeout=DOWN_SECONDS)
        except KafkaException as exception:
            raise TimeoutError(f"Kafka does not answer: {words(error_of(exception))}") from None


class Wave:
    """Events that were sent together, and what became of each."""

    def __init__(self, events: Sequence[Event], stop: threading.Event, *, until: float) -> None:
        self.events = events
        self.stop = stop
        self.until = until
        self.answers: dict[int, Answer] = {}
        self.delivered = 0
        self.missing: set[str] = set()
        self.words = ""
        self._heard: set[int] = set()
        self._sent: set[int] = set()
        self._rejected: list[int] = []
        self._alone = False

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more, or its time is up: nothing more is sent."""
        return self.stop.is_set() or monotonic() > self.until

    def unanswered(self) -> list[int]:
        """What has no answer."""
        return [number for number in range(len(self.events)) if number not in self.answers]

    def waiting(self) -> list[int]:
        """What was sent, and nothing was heard of it."""
        return sorted(self._sent - self._heard)

    def rejected(self) -> list[int]:
        """What was rejected and may fare better alone."""
        return list(self._rejected)

    def send_alone(self, number: int) -> None:
        """From now on a rejection is this event's own."""
        self._alone = True
        self._heard.discard(number)

    def answer_topic(self, topic: str, answer: Answer) -> None:
        """The same answer for each event of a topic."""
        self.answers |= {number: answer for number, event in enumerate(self.events) if event.topic == topic}

    def hears(self, number: int) -> Callable[[KafkaError | None, Message], None]:
        """What the producer calls when it knows."""
        self._sent.add(number)
        return lambda error, _message: self.heard(number, error)

    def heard(self, number: int, error: KafkaError | None) -> None:
        """It was delivered, or it was not: whose fault is that?"""
        self._heard.add(number)
        topic = self.events[number].topic
        if error is None:
            self.delivered += 1
            self.answers[number] = None
        elif error.code() in MISSING:
            self.missing.add(topic)
            self.answers[number] = missing_topic(topic)
        elif error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            self.answers[number] = Later(f"the topic {topic} cannot be written to: {words(error)}")
        elif error.code() in AWAY or error.fatal() or error.code() == KafkaError._FATAL:
            self.words = words(error)
        elif self._alone or number not in self._sent:
            self.answers[number] = words(error)
        else:
            self._rejected.append(number)
