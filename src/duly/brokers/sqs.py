"""Amazon SQS: a FIFO queue for each topic, a message group for each aggregate, and events as structured CloudEvents.

``sqs://eu-central-1?prefix=duly-&visibility=30`` names the region; ``endpoint=`` another address than Amazon's own.
Credentials come the way every AWS client finds them (environment, profile, role), never from the URL.

* One topic has one queue, ``duly-shop-orders.fifo`` for ``shop.orders``. SQS knows no groups of readers: whoever reads
  a queue takes from it, so a second system that wants the same events needs a queue of its own.
* A group is locked while one of its messages is in flight, so its order survives any number of receivers. What is not
  acknowledged comes again when its visibility time-out has run out: at once when it is released, otherwise after
  ``visibility`` seconds. Storing a batch for longer is no harm, for what comes again is known.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from duly.brokers import Later
from duly.brokers.sqs_client import (
    REQUESTS_AT_ONCE,
    TEN,
    TOPIC,
    Address,
    Client,
    NotNow,
    NotThis,
    explain,
    is_passing,
    parse_address,
)
from duly.brokers.sqs_source import SqsSource
from duly.brokers.wire import STRUCTURED, encode_structured
from duly.clock import monotonic
from duly.failpoints import failpoint
from duly.messages import Event, declared_events

log = structlog.get_logger("duly.brokers.sqs")
BEGIN_SECONDS = 5.0  # so long a publish() begins requests; the last of them may take as long as any
BATCH_BYTES = 256 * 1024  # the smallest sum of one request that any region allows
RETENTION_SECONDS = 14 * 86_400  # the longest there is
LARGEST_MESSAGE_BYTES = 1_048_576
Answers = dict[int, str | Later | None]  # by the place of the event among those given
_GROUP = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}")
_NO_XML = str.maketrans({"\ufffe": "\\ufffe", "\uffff": "\\uffff"})  # SQS takes what XML 1.0 does; JSON can say it so


def transport(url: str) -> SqsTransport:
    """What the relay publishes to."""
    return SqsTransport(parse_address(url))


def source(url: str, *, topics: Sequence[str], group: str) -> SqsSource:
    """What a receiver reads: the queues of these topics. SQS has no groups of readers: the name says nothing to it."""
    return SqsSource(parse_address(url), topics)


async def setup(url: str, *, topics: Sequence[str], group: str | None) -> list[str]:
    """Create the queues that are missing, and leave alone those that are there; a sentence for each that was made."""
    client = Client(parse_address(url))
    made = []
    try:
        for topic in topics:
            name = client.address.queue(topic)
            if not await client.exists(name):
                await client.create(name, NEW_QUEUE)
                made.append(f"the FIFO queue {name}, for {topic}")
    finally:
        await client.close()
    return made


NEW_QUEUE = {
    "FifoQueue": "true",
    "ContentBasedDeduplication": "false",
    "DeduplicationScope": "messageGroup",
    "FifoThroughputLimit": "perMessageGroupId",
    "MessageRetentionPeriod": str(RETENTION_SECONDS),
    "MaximumMessageSize": str(LARGEST_MESSAGE_BYTES),
    "VisibilityTimeout": "30",
}


def group_id(aggregate_id: str) -> str:
    """The message group of an aggregate: its id, or the hash of one that SQS would not take."""
    if _GROUP.fullmatch(aggregate_id):
        return aggregate_id
    return "sha256-" + hashlib.sha256(aggregate_id.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class _Entry:
    """An event as it is sent, and its place among those that publish() was given."""

    place: int
    event: Event
    body: str
    size: int


class _Wave:
    """What the requests of one publish() share. One that takes long begins no more of them: the rest is sent next time.

    The relay gives up on a publish() as a whole, and then knows of no event that it was sent.
    """

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self.until = monotonic() + BEGIN_SECONDS
        self.requests = 0
        self.away: OSError | None = None

    def why_not(self) -> str:
        """Why no more requests are begun, if so."""
        if self.away:
            return str(self.away)
        return "SQS is slow: this waits for its turn" if self.requests and monotonic() > self.until else ""

    def note(self, error: Exception) -> str:
        """What went wrong with a request; when SQS is away that holds for all of them."""
        if isinstance(error, OSError):
            self.away = error
        return str(error)


class SqsTransport:
    """Publishes to SQS: ten events in a request, and each entry has its own answer."""

    name = "sqs"

    def __init__(self, address: Address) -> None:
        self._client = Client(address)

    async def check(self) -> None:
        """Reach SQS with these credentials, and look at the queue of every declared topic that has one."""
        topics = sorted({kind.event_topic for kind in declared_events().values()})
        if not topics:
            await self._client.reach()
        for topic in topics:
            name = self._client.address.queue(topic)
            if not await self._client.check(name):
                log.warning("queue_missing", queue=name, topic=topic, do="duly brokers setup")

    async def publish(self, events: Sequence[Event]) -> list[str | Later | None]:
        """Send all, some requests at a time; OSError when nothing at all could be sent."""
        answers: Answers = {}
        queues: dict[str, list[_Entry]] = {}
        for place, event in enumerate(events):
            entry = _as_entry(place, event)
            if isinstance(entry, _Entry):
                queues.setdefault(self._client.address.queue(event.topic), []).append(entry)
            else:
                answers[place] = entry
        wave = _Wave()
        results = await asyncio.gather(*(self._publish_to(name, batch, wave) for name, batch in queues.items()))
        for result in results:
            answers |= result
        if wave.away and all(isinstance(answer, Later) for answer in answers.values()):
            raise wave.away
        failpoint("transport.sent")
        return [answers[place] for place in range(len(events))]

    async def _publish_to(self, name: str, entries: Sequence[_Entry], wave: _Wave) -> Answers:
        try:
            async with wave.turns:
                if reason := wave.why_not():
                    return _later(entries, reason)
                largest = await self._client.largest_message(name)
        except (NotNow, NotThis, OSError) as error:
            return _later(entries, wave.note(error))
        answers: Answers = {}
        for entry in entries:
            if entry.size > largest:
                answers[entry.place] = (
                    f"the event has {entry.size} bytes on the wire, and {name} takes {largest}: keep the document "
                    "elsewhere and send its reference, or raise the queue's MaximumMessageSize"
                )
        fitting = [entry for entry in entries if entry.place not in answers]
        sent = await asyncio.gather(
            *(self._send(name, batch, wave) for batch in _batches(fitting, max(largest, BATCH_BYTES)))
        )
        for result in sent:
            answers |= result
        return answers

    async def _send(self, name: str, batch: Sequence[_Entry], wave: _Wave) -> Answers:
        """One request. Where SQS refuses all of it for one entry, each is sent alone."""
        try:
            async with wave.turns:
                if reason := wave.why_not():
                    return _later(batch, reason)
                wave.requests += 1
                return _read_answers(name, batch, await self._client.send(name, [_as_request(one) for one in batch]))
        except NotThis as error:
            if len(batch) == 1:
                return {batch[0].place: str(error)}
        except (NotNow, OSError) as error:
            return _later(batch, wave.note(error))
        answers: Answers = {}
        for entry in batch:
            answers |= await self._send(name, [entry], wave)
        return answers

    async def close(self) -> None:
        """Hang up."""
        await self._client.close()


def _as_entry(place: int, event: Event) -> _Entry | str:
    try:
        body = encode_structured(event)[1].decode().translate(_NO_XML)
    except (ValueError, RecursionError) as error:
        return f"cannot be written as a CloudEvent: {type(error).__name__}"
    attributes = sum(len(name) + len("String") + len(value) for name, value in _attributes(event).items())
    return _Entry(place, event, body, len(body.encode()) + attributes)


def _attributes(event: Event) -> dict[str, str]:
    return {"content-type": STRUCTURED, TOPIC: event.topic}


def _as_request(entry: _Entry) -> dict[str, Any]:
    return {
        "Id": str(entry.place),
        "MessageBody": entry.body,
        "MessageGroupId": group_id(entry.event.aggregate_id),
        "MessageDeduplicationId": str(entry.event.id),
        "MessageAttributes": {
            name: {"DataType": "String", "StringValue": value} for name, value in _attributes(entry.event).items()
        },
    }


def _batches(entries: Sequence[_Entry], most_bytes: int) -> list[list[_Entry]]:
    """No more than ten each, and no more bytes than one request may have."""
    batches: list[list[_Entry]] = []
    size = 0
    for entry in entries:
        if not batches or len(batches[-1]) == TEN or size + entry.size > most_bytes:
            batches.append([])
            size = 0
        batches[-1].append(entry)
        size += entry.size
    return batches


def _read_answers(name: str, batch: Sequence[_Entry], answer: Any) -> Answers:
    answers: Answers = {entry.place: Later(f"{name} gave no answer for this event") for entry in batch}
    answers |= {int(one["Id"]): None for one in answer.get("Successful", [])}
    for one in answer.get("Failed", []):
        code = str(one.get("Code", "?"))
        passes = not one.get("SenderFault") or is_passing(code)
        answers[int(one["Id"])] = Later(f"{name} asks us to wait: {code}") if passes else explain(name, code)
    return answers


def _later(entries: Iterable[_Entry], reason: str) -> Answers:
    return {entry.place: Later(reason) for entry in entries}
