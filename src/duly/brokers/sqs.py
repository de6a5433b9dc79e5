"""Amazon SQS: a FIFO queue for each topic, a message group for each aggregate, and events as structured CloudEvents.

``sqs://eu-central-1?prefix=duly-&visibility=30`` names the region; ``endpoint=`` another address than Amazon's own.
Credentials come the way every AWS client finds them (environment, profile, role), never from the URL.

* One topic has one queue, ``duly-shop-orders.fifo`` for ``shop.orders``. SQS knows no groups of readers: whoever reads
  a queue takes from it, so a second system that wants the same events needs a queue of its own.
* A group is locked while one of its messages is in flight, so its order survives any number of receivers. What is not
  acknowledged comes again when its visibility time-out has run out: at once when it is released, otherwise after
  ``visibility`` seconds. Storing a batch for longer is no harm, for what comes again is known.
* A request is never given up while it waits for messages: those it would have brought would be locked. What came for
  nobody is kept for the next ``receive``, or given back.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from duly.brokers import Later, Message
from duly.brokers.sqs_client import Address, Client, NotNow, NotThis, parse_address
from duly.brokers.wire import STRUCTURED, encode_structured
from duly.clock import monotonic
from duly.errors import Refused
from duly.failpoints import failpoint
from duly.messages import Event, declared_events

log = structlog.get_logger("duly.brokers.sqs")
T = TypeVar("T")
TEN = 10  # entries of one request, by the rules of SQS
REQUESTS_AT_ONCE = 8
BATCH_BYTES = 256 * 1024  # the smallest sum of one request that any region allows
POLL_SECONDS = 5  # no request waits longer for messages, so that closing does not either
ANSWER_SECONDS = 1.0  # for an answer that was not to wait; one that is slower is there for the next receive
REST_SECONDS = 5.0  # before a queue that is not to be had is asked again
CLOSE_SECONDS = 8.0
RETENTION_SECONDS = 14 * 86_400  # the longest there is
SHORTEST_RETENTION_SECONDS = 86_400
LARGEST_MESSAGE_BYTES = 1_048_576
TOPIC = "duly-topic"
_GROUP = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}")
_NO_XML = str.maketrans({"\ufffe": "\\ufffe", "\uffff": "\\uffff"})  # SQS takes what XML 1.0 does; JSON can say it so


def transport(url: str) -> SqsTransport:
    """What the relay publishes to."""
    return SqsTransport(parse_address(url))


def source(url: str, *, topics: Sequence[str], group: str) -> SqsSource:
    """What a receiver reads: the queues of these topics. SQS has no groups of readers: the name says nothing to it."""
    return SqsSource(parse_address(url), topics)


async def setup(url: str, *, topics: Sequence[str], group: str) -> list[str]:
    """Create the queues that are missing, and leave alone those that are there; a sentence for each that was made."""
    client = Client(parse_address(url))
    made = []
    try:
        for topic in topics:
            name = queue_name(client.address, topic)
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


def queue_name(address: Address, topic: str) -> str:
    """The queue of a topic: its letters and digits, and a few signs of its hash where they would be too many."""
    stem = address.prefix + re.sub(r"[^A-Za-z0-9]", "-", topic)
    if len(stem) > 75:
        stem = f"{stem[:66]}-{hashlib.sha256(topic.encode()).hexdigest()[:8]}"
    return f"{stem}.fifo"


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
            name = queue_name(self._client.address, topic)
            if not await _check_queue(self._client, name):
                log.warning("queue_missing", queue=name, topic=topic, do="duly brokers setup")

    async def publish(self, events: Sequence[Event]) -> list[str | Later | None]:
        """Send all, some requests at a time; OSError when nothing at all could be sent."""
        answers: dict[int, str | Later | None] = {}
        queues: dict[str, list[_Entry]] = {}
        for place, event in enumerate(events):
            entry = _as_entry(place, event)
            if isinstance(entry, _Entry):
                queues.setdefault(queue_name(self._client.address, event.topic), []).append(entry)
            else:
                answers[place] = entry
        turns = asyncio.Semaphore(REQUESTS_AT_ONCE)
        away: list[OSError] = []
        results = await asyncio.gather(*(self._publish_to(name, batch, turns, away) for name, batch in queues.items()))
        for result in results:
            answers |= result
        if away and all(isinstance(answer, Later) for answer in answers.values()):
            raise away[0]
        failpoint("transport.sent")
        return [answers[place] for place in range(len(events))]

    async def _publish_to(
        self, name: str, entries: Sequence[_Entry], turns: asyncio.Semaphore, away: list[OSError]
    ) -> dict[int, str | Later | None]:
        try:
            async with turns:
                largest = 0 if away else await self._client.largest_message(name)
        except (NotNow, OSError) as error:
            return _later(entries, error, away)
        if away:
            return _later(entries, away[0], away)
        answers: dict[int, str | Later | None] = {}
        for entry in entries:
            if entry.size > largest:
                answers[entry.place] = (
                    f"the event has {entry.size} bytes on the wire, and {name} takes {largest}: keep the document "
                    "elsewhere and send its reference, or raise the queue's MaximumMessageSize"
                )
        fitting = [entry for entry in entries if entry.place not in answers]
        sent = await asyncio.gather(
            *(self._send(name, batch, turns, away) for batch in _batches(fitting, max(largest, BATCH_BYTES)))
        )
        for result in sent:
            answers |= result
        return answers

    async def _send(
        self, name: str, batch: Sequence[_Entry], turns: asyncio.Semaphore, away: list[OSError]
    ) -> dict[int, str | Later | None]:
        """One request. Where SQS refuses all of it for one entry, each is sent alone."""
        try:
            async with turns:
                if away:
                    return _later(batch, away[0], away)
                return _read_answers(name, batch, await self._client.send(name, [_as_request(one) for one in batch]))
        except NotThis as error:
            if len(batch) == 1:
                return {batch[0].place: str(error)}
        except (NotNow, OSError) as error:
            return _later(batch, error, away)
        answers: dict[int, str | Later | None] = {}
        for entry in batch:
            answers |= await self._send(name, [entry], turns, away)
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


def _read_answers(name: str, batch: Sequence[_Entry], answer: Any) -> dict[int, str | Later | None]:
    answers: dict[int, str | Later | None] = {
        entry.place: Later(f"{name} gave no answer for this event") for entry in batch
    }
    answers |= {int(one["Id"]): None for one in answer.get("Successful", [])}
    for one in answer.get("Failed", []):
        reason = f"{name} refused the event: {one.get('Code', '?')}: {one.get('Message', '')}"
        answers[int(one["Id"])] = reason if one.get("SenderFault") else Later(reason)
    return answers


def _later(entries: Iterable[_Entry], error: Exception, away: list[OSError]) -> dict[int, str | Later | None]:
    if isinstance(error, OSError):
        away.append(error)
    return {entry.place: Later(str(error)) for entry in entries}


@dataclass(frozen=True)
class _Receipt:
    queue: str
    handle: str


@dataclass(frozen=True)
class _Haul:
    """What one request brought, and when."""

    queue: str
    messages: list[Message]
    at: float
    is_full: bool


class SqsSource:
    """Reads the queues of some topics; SQS itself keeps what was read and what was not."""

    name = "sqs"
    keeps_position = True

    def __init__(self, address: Address, topics: Sequence[str]) -> None:
        self._client = Client(address)
        self._topics: dict[str, str] = {}
        for topic in dict.fromkeys(topics):
            name = queue_name(address, topic)
            if name in self._topics:
                raise Refused(f"the topics {self._topics[name]} and {topic} would share the queue {name}: rename one")
            self._topics[name] = topic
        if not self._topics:
            raise Refused("there is no topic to read: name some with DULY_RECEIVE_TOPICS")
        self._polls: dict[str, asyncio.Task[_Haul]] = {}
        self._held: dict[_Receipt, Message] = {}
        self._rests: dict[str, tuple[float, str]] = {}
        self._turn = 0

    async def check(self) -> None:
        """Every queue is there, keeps messages long enough, and moves none away."""
        missing = [name for name in self._topics if not await _check_queue(self._client, name)]
        if missing:
            raise Refused(f"SQS has no queue {', '.join(missing)}: run `duly brokers setup`, or create it as FIFO")

    async def resume(self, positions: Mapping[str, int]) -> None:
        """Give back whatever was received and not acknowledged: SQS knows the rest."""
        await self.release(list(self._held.values()))

    async def receive(self, limit: int, *, wait_seconds: float) -> list[Message]:
        """No more than ``limit``, of all queues in turn; never two runs of one group, for SQS locks it meanwhile."""
        until = monotonic() + max(0.0, wait_seconds)
        names = list(self._topics)
        self._turn = (self._turn + 1) % len(names)
        names = names[self._turn :] + names[: self._turn]
        taken: list[Message] = []
        while names and len(taken) < limit:
            left = 0.0 if taken else max(0.0, until - monotonic())
            self._ask(names, limit - len(taken), left)
            polls = [self._polls[name] for name in names if name in self._polls]
            if not polls:
                break
            await asyncio.wait(polls, timeout=left or ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            found, full = await self._take(names, limit - len(taken), may_fail=not taken)
            taken += found
            if taken:
                names = full
            elif monotonic() >= until:
                break
        if not taken and len(self._rests) == len(self._topics):
            raise OSError("; ".join(reason for _, reason in self._rests.values()))
        return taken

    def _ask(self, names: Sequence[str], room: int, wait_seconds: float) -> None:
        """See that each queue has a request under way, unless it is resting."""
        for name in names:
            rest = self._rests.get(name)
            if rest and monotonic() >= rest[0]:
                del self._rests[name]
            if name not in self._polls and name not in self._rests:
                wait = min(math.ceil(wait_seconds), POLL_SECONDS)
                self._polls[name] = asyncio.create_task(self._poll(name, min(TEN, room), wait))

    async def _poll(self, name: str, most: int, wait_seconds: int) -> _Haul:
        answer = await self._client.receive(name, most, wait_seconds)
        raw = answer.get("Messages", [])
        return _Haul(name, [self._as_message(name, one) for one in raw], monotonic(), len(raw) == most)

    async def _take(self, names: Sequence[str], room: int, *, may_fail: bool) -> tuple[list[Message], list[str]]:
        """What has come and fits; and the queues that gave as much as was asked of them, so they may have more."""
        taken: list[Message] = []
        full: list[str] = []
        for name in names:
            poll = self._polls.get(name)
            if poll is None or not poll.done():
                continue
            if isinstance(poll.exception(), OSError) and (taken or not may_fail):
                continue  # SQS is away: that is told next time, when nothing is in our hands
            haul = self._outcome(name, poll)
            if haul is not None and len(haul.messages) > room - len(taken):
                continue
            del self._polls[name]
            if haul is None:
                continue
            if monotonic() - haul.at > self._client.address.visibility_seconds / 2:
                await self.release(haul.messages)  # too old to begin with: they come again, in the same order
                continue
            self._held |= {message.token: message for message in haul.messages}
            taken += haul.messages
            full += [name] if haul.is_full else []
        return taken, full

    def _outcome(self, name: str, poll: asyncio.Task[_Haul]) -> _Haul | None:
        """What a request brought; a queue that is not to be had rests, and the others go on. OSError: SQS is away."""
        try:
            return poll.result()
        except (NotNow, NotThis) as trouble:
            log.warning("queue_rests", queue=name, reason=str(trouble))
            self._rests[name] = (monotonic() + REST_SECONDS, str(trouble))
            return None
        except OSError:
            del self._polls[name]
            raise

    def _as_message(self, name: str, raw: Mapping[str, Any]) -> Message:
        headers = {
            key.lower(): value["StringValue"]
            for key, value in raw.get("MessageAttributes", {}).items()
            if isinstance(value.get("StringValue"), str)
        }
        topic = headers.pop(TOPIC, "")
        if queue_name(self._client.address, topic) != name:
            topic = self._topics[name]
        body = str(raw.get("Body", "")).encode("utf-8", "surrogatepass")
        receipt = _Receipt(name, raw["ReceiptHandle"])
        return Message(topic, headers, body, f"{name} message {raw.get('MessageId', '?')}", token=receipt)

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """Delete them. What could not be deleted comes again."""
        for message in messages:
            self._held.pop(message.token, None)
        by_queue = _by_queue(messages)
        requests = [(name, part) for name, handles in by_queue.items() for part in _tens(handles)]
        for several in _parts(requests, REQUESTS_AT_ONCE):
            await asyncio.gather(*(self._delete(name, handles) for name, handles in several))

    async def _delete(self, name: str, handles: Sequence[str]) -> None:
        try:
            failed = await self._client.delete(name, handles)
        except (NotNow, NotThis) as error:
            failed = [str(error)]
        if failed:
            log.warning("not_acknowledged", queue=name, messages=len(failed), reason=failed[0])

    async def release(self, messages: Sequence[Message]) -> None:
        """Make them visible at once, the last first: a group stays locked until its first is visible again."""
        for message in messages:
            self._held.pop(message.token, None)
        for name, handles in _by_queue(messages).items():
            for part in _tens(handles[::-1]):
                try:
                    failed = await self._client.show(name, part)
                except (NotNow, NotThis, OSError) as error:
                    failed = [str(error)]
                if failed:  # they come again when their visibility time-out has run out
                    log.warning("not_released", queue=name, messages=len(failed), reason=failed[0])

    async def lag(self) -> int | None:
        """How many messages are visible, by what SQS says of itself: approximately."""
        try:
            return sum([await self._client.waiting(name) for name in self._topics])
        except (NotNow, NotThis):
            return None

    async def close(self) -> None:
        """Wait for the requests under way, give back what they bring and what nobody acknowledged, and hang up."""
        if self._polls:
            done, late = await asyncio.wait(self._polls.values(), timeout=CLOSE_SECONDS)
            for poll in late:
                poll.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            brought = [poll.result().messages for poll in done if not poll.cancelled() and poll.exception() is None]
            self._polls.clear()
            await self.release([message for messages in brought for message in messages])
        await self.release(list(self._held.values()))
        await self._client.close()


async def _check_queue(client: Client, name: str) -> bool:
    """Whether there is one; refuse one that would lose messages or their order."""
    try:
        found = await client.attributes(name)
    except NotNow as error:
        if error.is_missing:
            return False
        raise Refused(str(error)) from None
    except PermissionError as error:
        raise Refused(str(error)) from None
    if found.get("FifoQueue") != "true":
        raise Refused(f"{name} is no FIFO queue, so it keeps no order: delete it and run `duly brokers setup`")
    if int(found.get("MessageRetentionPeriod", 0)) < SHORTEST_RETENTION_SECONDS:
        raise Refused(
            f"{name} keeps messages for {found.get('MessageRetentionPeriod', 0)} s, so a receiver that is down for "
            f"longer loses some: set MessageRetentionPeriod to {SHORTEST_RETENTION_SECONDS} or more"
        )
    if found.get("RedrivePolicy"):
        raise Refused(
            f"{name} has a redrive policy: while the database is away SQS would move good messages aside, out of their "
            "order. duly keeps dead letters itself: remove the policy"
        )
    return True


def _by_queue(messages: Sequence[Message]) -> dict[str, list[str]]:
    queues: dict[str, list[str]] = {}
    for message in messages:
        queues.setdefault(message.token.queue, []).append(message.token.handle)
    return queues


def _parts(values: Sequence[T], most: int) -> list[Sequence[T]]:
    return [values[start : start + most] for start in range(0, len(values), most)]


def _tens(values: Sequence[T]) -> list[Sequence[T]]:
    return _parts(values, TEN)
