"""NATS JetStream: an event goes to ``duly.<topic>.<type>`` and counts when a stream has it; one reader, in order.

The address is ``nats://[user:password@]host[:port][,host...]``, or ``nats+tls://``, with ``?creds=FILE`` for a
credentials file, ``?ca=FILE`` for a certificate authority, ``?stream=NAME&replicas=N`` for what ``setup`` creates.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StreamInfo
from nats.js.errors import APIError, NotFoundError

from duly.brokers import Later, Message, wire
from duly.brokers.nats_link import ANSWER_SECONDS, Link, parse, read_stored
from duly.brokers.nats_streams import (
    PREFIX,
    check_streams,
    cover,
    create_streams,
    find_streams,
    inner_topic,
    shard_of,
    subject_of,
)
from duly.clock import monotonic
from duly.errors import Invalid, Refused
from duly.failpoints import failpoint
from duly.ids import uuid7
from duly.messages import Event
from duly.telemetry import MESSAGES_MISSING

log = structlog.get_logger("duly.nats")
ACK_SECONDS = 10.0  # the relay gives a wave thirty
CLOSE_SECONDS = 3.0
LOOK_SECONDS = 30.0  # how often a topic that no stream takes is looked for again
DOUBTFUL = 20
PULL_BYTES = 32 * 1024 * 1024
INACTIVE_SECONDS = 60.0  # a reader that is not read from goes away by itself
HEADER_LINE_BYTES = 12  # NATS/1.0 and the line ends around the headers
_TOO_LARGE = 10054  # the stream takes no message of this size
_SEALED = 10109


def transport(url: str) -> NatsTransport:
    """What publishes to the servers at this address."""
    return NatsTransport(url)


def source(url: str, topics: Sequence[str], group: str) -> NatsSource:
    """What reads these topics there."""
    return NatsSource(url, topics, group)


async def setup(url: str, topics: Sequence[str], group: str | None) -> list[str]:
    """Create what is missing there: a stream on disk for the topics that none takes yet."""
    link = Link(url, name="duly-setup")
    try:
        await _open_to_check(link)
        return await create_streams(link, topics, parse(url))
    except APIError as error:
        raise Refused(f"NATS at {link.shown} made no stream: {error.description or error.code}") from None
    finally:
        await link.close(CLOSE_SECONDS)


async def _open_to_check(link: Link) -> None:
    """Connect, or say for good why that will not work; a server that is away is an OSError, and may come."""
    try:
        await link.open()
        await link.js.account_info()
    except PermissionError as error:
        raise Refused(f"{error}: look at DULY_BROKER and DULY_RECEIVE") from None
    except APIError as error:
        raise Refused(
            f"NATS at {link.shown} has no JetStream for us ({error.description or 'it is not enabled'}): start it "
            "with -js and a store directory, and enable it for this account"
        ) from None
    except NatsError as error:
        raise ConnectionError(f"NATS at {link.shown}: {error}") from None


# -- publishing ------------------------------------------------------------------------------------------------------


class NatsTransport:
    """Sends a wave at once and waits for each acknowledgement; by the event's id the stream drops a repetition."""

    name = "nats"

    def __init__(self, url: str) -> None:
        self._link = Link(url, name="duly-relay")

    async def check(self) -> None:
        """Refuse a server without JetStream, and streams of ours that would lose what they acknowledged."""
        try:
            await _open_to_check(self._link)
            streams = await find_streams(self._link, f"{PREFIX}.>")
            if not streams:
                raise Refused(f"NATS at {self._link.shown} has no stream for {PREFIX}.>: run `duly brokers setup`")
            check_streams(streams)
        finally:
            await self.close()

    async def publish(self, events: Sequence[Event]) -> Sequence[str | Later | None]:
        """Send each and wait for its PubAck."""
        try:
            return await self._publish(events)
        except (NatsError, OSError, TimeoutError) as error:
            await self.close()
            if isinstance(error, NatsError):
                raise ConnectionError(f"NATS at {self._link.shown}: {error}") from None
            raise

    async def _publish(self, events: Sequence[Event]) -> list[str | Later | None]:
        await self._link.open()
        answers: list[str | Later | None] = [None] * len(events)
        sent: dict[int, asyncio.Future[Msg]] = {}
        for index, event in enumerate(events):
            try:
                subject, headers, body = _as_message(event, self._link.max_bytes)
            except Invalid as error:
                answers[index] = str(error)
                continue
            sent[index] = await self._link.ask(subject, body, headers)
        await self._link.flush()
        failpoint("transport.sent")
        if sent:
            done, late = await asyncio.wait(sent.values(), timeout=ACK_SECONDS)
            self._link.forget(late)
            if not done:
                raise TimeoutError(f"NATS acknowledged nothing within {ACK_SECONDS:g} s{self._link.said()}")
        for index, future in sent.items():
            answers[index] = _answer(future.result()) if future.done() else Later(
                f"NATS did not acknowledge it within {ACK_SECONDS:g} s{self._link.said()}"
            )  # fmt: skip
        return answers

    async def close(self) -> None:
        """Hang up."""
        await self._link.close(CLOSE_SECONDS)


def _as_message(event: Event, max_bytes: int) -> tuple[str, dict[str, str], bytes]:
    subject = subject_of(event.topic, event.type)
    headers, body = wire.encode(event, wire.NATS)
    headers["Nats-Msg-Id"] = str(event.id)
    size = HEADER_LINE_BYTES + sum(len(name) + len(value) + 4 for name, value in headers.items()) + len(body)
    if size > max_bytes:  # the server would cut the line, and with it what others are sending
        raise Invalid(f"it has {size} bytes on the wire; this NATS takes {max_bytes} (max_payload)")
    return subject, headers, body


def _answer(reply: Msg) -> str | Later | None:
    """What a stream said to one event."""
    if (reply.headers or {}).get("Status") == "503":
        return Later("no stream of NATS takes it, or its stream has no leader: run `duly brokers setup`")
    try:
        said = json.loads(reply.data)
        error = said.get("error")
        if error is None and said.get("seq"):
            return None
    except (ValueError, AttributeError):
        error = None
    if not isinstance(error, dict):
        return "NATS answered with something that is no acknowledgement"
    code, number = error.get("code"), error.get("err_code")
    reason = f"NATS: {error.get('description') or code} ({number})"
    own = code is not None and code < 500 and number != _SEALED
    return reason if own or number == _TOO_LARGE else Later(reason)


# -- receiving -------------------------------------------------------------------------------------------------------


@dataclass
class _Reader:
    """Where we are in one stream, and the consumer on the server that delivers to us."""

    stream: str
    shard: str
    filters: list[str]
    next: int
    held: int  # messages in the stream when we began, other topics' among them
    skipped: int = 0  # the first number that we did not read, where the stream begins after it
    consumer: str = ""  # empty: it is to be made, from next on
    delivered: int = 0  # by that consumer
    pending: int = 0  # messages of ours after the last that came


@dataclass
class _Pull:
    """A question to a consumer that is not answered in full."""

    reader: _Reader
    consumer: str
    wanted: int


class NatsSource:
    """One reader in stream order. The server holds no position of ours: its consumer is made anew wherever we begin."""

    name = "nats"
    keeps_position = False

    def __init__(self, url: str, topics: Sequence[str], group: str) -> None:
        self.topics = sorted(set(topics))
        self.group = group
        self._link = Link(url, name=f"duly-receiver {group}")
        self._given: dict[str, int] = {}  # by shard: the last that receive() returned, or resume() told
        self._readers: list[_Reader] = []
        self._ahead: deque[Message] = deque()
        self._came: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._inbox = ""
        self._begun = False
        self._missing: list[str] = []
        self._said_missing: dict[str, int] = {}  # by shard: up to where that was said
        self._looked_at = float("-inf")
        self._doubtful = 0  # so many messages are looked at one by one
        self._numbers = itertools.count()
        MESSAGES_MISSING.labels(self.name)  # there from the beginning: a first one is a rise

    async def check(self) -> None:
        """Refuse topics that no stream takes, and streams that would lose what was not read yet."""
        try:
            await _open_to_check(self._link)
            for topic in self.topics:
                streams = await find_streams(self._link, f"{PREFIX}.{topic}.>")
                if not streams:
                    raise Refused(
                        f"NATS at {self._link.shown} has no stream for {PREFIX}.{topic}.>: run `duly brokers setup`"
                    )
                check_streams(streams)
        finally:
            await self.close()

    async def resume(self, positions: Mapping[str, int]) -> None:
        """Begin again after these."""
        self._given = dict(positions)
        self._restart()

    async def receive(self, limit: int, *, wait_seconds: float) -> Sequence[Message]:
        """What is there, in the order of each stream."""
        try:
            async with asyncio.timeout(wait_seconds + 2 * ANSWER_SECONDS):
                await self._fill(limit, wait_seconds)
        except (NatsError, OSError, TimeoutError) as error:
            self._doubtful = DOUBTFUL  # perhaps a message did this that the client cannot read
            await self._hang_up()
            if isinstance(error, OSError):  # TimeoutError is one, too
                raise
            raise ConnectionError(f"NATS at {self._link.shown}: {error}") from None
        found = [self._ahead.popleft() for _ in range(min(limit, len(self._ahead)))]
        for message in found:
            self._given[message.shard] = message.offset
        return found

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """Nothing to do: how far we are is in the database."""

    async def release(self, messages: Sequence[Message]) -> None:
        """Begin again before them."""
        for message in messages:
            self._given[message.shard] = min(self._given.get(message.shard, 0), message.offset - 1)
        self._restart()

    async def lag(self) -> int | None:
        """What the streams hold for us and we have not read."""
        if not self._begun or not self._link.is_open:
            return None
        waiting = len(self._ahead)
        for reader in self._readers:
            if reader.consumer:
                try:
                    waiting += (await self._link.js.consumer_info(reader.stream, reader.consumer)).num_pending
                except (NatsError, OSError, TimeoutError):
                    return None
        return waiting

    async def close(self) -> None:
        """Hang up, and take our consumers with us."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for reader in self._readers:
                    if reader.consumer and self._link.is_open:
                        await self._link.js.delete_consumer(reader.stream, reader.consumer)
        except (NatsError, OSError, TimeoutError):
            pass  # they go by themselves, a minute after nobody reads from them
        await self._hang_up()

    async def _hang_up(self) -> None:
        self._restart()
        await self._link.close(CLOSE_SECONDS)

    def _restart(self) -> None:
        """Forget what was read ahead; the next receive() begins after what was given out."""
        self._ahead.clear()
        self._readers = []
        self._begun = False

    # -- beginning -----------------------------------------------------------------------------------------------

    async def _fill(self, limit: int, wait_seconds: float) -> None:
        await self._begin()
        if self._doubtful:
            await self._look_one_by_one(min(limit, self._doubtful))
            if self._ahead:
                return
        if len(self._ahead) >= limit:
            return
        await self._pull(limit - len(self._ahead), wait_seconds=0)
        if not self._ahead and wait_seconds > 0:
            await self._pull(1, wait_seconds=wait_seconds)
            if self._ahead and limit > 1:
                await self._pull(limit - 1, wait_seconds=0)

    async def _begin(self) -> None:
        if not self._link.is_open:
            self._restart()
            await self._link.open()
            self._came = asyncio.Queue()
            self._inbox = await self._link.listen(self._came)
        if self._begun and self._missing and monotonic() - self._looked_at > LOOK_SECONDS and not self._ahead:
            self._restart()  # perhaps they are there by now
        if not self._begun:
            await self._find()
            self._begun = True
        for reader in self._readers:
            if not reader.consumer and not self._doubtful:
                await self._make_consumer(reader)

    async def _find(self) -> None:
        """The streams of our topics, and where we were in each."""
        self._looked_at = monotonic()
        streams: dict[str, tuple[StreamInfo, list[str]]] = {}
        missing = []
        for topic in self.topics:
            found = await find_streams(self._link, f"{PREFIX}.{topic}.>")
            for one in found:
                streams.setdefault(str(one.config.name), (one, []))[1].append(f"{PREFIX}.{topic}.>")
            if not found:
                missing.append(topic)
        if missing and missing != self._missing:
            log.error("topics_without_stream", topics=missing, todo="duly brokers setup")
        self._missing = missing
        if not streams:
            raise ConnectionError(f"NATS at {self._link.shown} has no stream for {', '.join(missing) or 'no topic'}")
        self._readers = [self._reader(info, filters) for info, filters in streams.values()]

    def _reader(self, info: StreamInfo, filters: Sequence[str]) -> _Reader:
        stream, state = str(info.config.name), info.state
        shard = shard_of(info, self._given)
        position = self._given.setdefault(shard, 0)
        begins = max(position + 1, state.first_seq)
        skipped = position + 1 if 0 < position < begins - 1 else 0
        return _Reader(stream, shard, cover(filters), begins, state.messages, skipped)

    def _say_missing(self, reader: _Reader, first: int, *, ours: int | None) -> None:
        """Messages from this one on went before we read them: somebody must know, once, how many of them were ours."""
        first, last = max(first, self._said_missing.get(reader.shard, 0) + 1), reader.next - 1
        if first > last:
            return
        self._said_missing[reader.shard] = last
        if ours is None:  # nobody can tell any more
            log.warning("messages_perhaps_missing", stream=reader.stream, first=first, last=last)
            return
        count = min(ours, last - first + 1)
        MESSAGES_MISSING.labels(self.name).inc(count)
        log.error("messages_missing", stream=reader.stream, first=first, last=last, count=count)

    async def _make_consumer(self, reader: _Reader) -> None:
        safe_group = "".join(letter if letter.isalnum() else "-" for letter in self.group)[:40]
        config = ConsumerConfig(
            name=f"duly-{safe_group}-{uuid7().hex}",
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=reader.next,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=INACTIVE_SECONDS,
            mem_storage=True,
            num_replicas=1,
        )
        if len(reader.filters) == 1:
            config.filter_subject = reader.filters[0]
        else:
            config.filter_subjects = reader.filters
        made = await self._link.js.add_consumer(reader.stream, config)
        reader.consumer, reader.delivered, reader.pending = made.name, 0, made.num_pending or 0
        if reader.skipped:
            is_ours_alone = reader.pending >= reader.held
            self._say_missing(reader, reader.skipped, ours=reader.next if is_ours_alone else None)
            reader.skipped = 0

    # -- reading -------------------------------------------------------------------------------------------------

    async def _pull(self, limit: int, *, wait_seconds: float) -> None:
        """Ask each reader's consumer for so many: for what is there, or (waiting) for the first that comes."""
        pulls = {
            f"{self._inbox}.{next(self._numbers)}": _Pull(reader, reader.consumer, limit)
            for reader in self._readers
            if reader.consumer
        }
        if not pulls:
            raise ConnectionError(f"NATS at {self._link.shown}: our consumers were taken away")
        for reply, pull in pulls.items():
            await self._ask(reply, pull, wait_seconds)
        async with asyncio.timeout(wait_seconds + ANSWER_SECONDS):
            await self._follow(pulls, is_first_enough=wait_seconds > 0)

    async def _follow(self, pulls: dict[str, _Pull], *, is_first_enough: bool) -> None:
        """Take what comes until every pull is answered, or the first message is there."""
        while pulls and not (is_first_enough and self._ahead):
            came = await self._came.get()
            if came is None:
                raise ConnectionResetError(f"NATS at {self._link.shown} hung up{self._link.said()}")
            if came.reply.startswith("$JS.ACK."):
                consumer = self._take(came)
                for reply, pull in list(pulls.items()):
                    pull.wanted -= pull.consumer == consumer
                    if pull.wanted <= 0:
                        del pulls[reply]
            elif came.subject in pulls and self._is_over(came, pulls[came.subject].reader):
                del pulls[came.subject]

    async def _ask(self, reply: str, pull: _Pull, wait_seconds: float) -> None:
        """Who waits, waits for one message, however large it is; who does not takes no more than fits into memory."""
        limits = {"expires": int(wait_seconds * 1e9)} if wait_seconds else {"no_wait": True, "max_bytes": PULL_BYTES}
        request = {"batch": pull.wanted, **limits}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{pull.reader.stream}.{pull.consumer}"
        await self._link.send(subject, json.dumps(request).encode(), reply)

    def _take(self, came: Msg) -> str:
        """One message, if it is the next of its consumer: a gap means that some were lost on the way to us."""
        metadata = came.metadata
        reader = next((one for one in self._readers if one.consumer == metadata.consumer), None)
        if reader is None:  # from a consumer that we gave up
            return metadata.consumer
        if metadata.sequence.consumer != reader.delivered + 1:
            log.warning("messages_lost_on_the_way", stream=reader.stream, after=reader.next - 1)
            reader.consumer = ""
            return metadata.consumer
        number, expected = metadata.sequence.stream, reader.next
        gone = reader.pending - 1 - metadata.num_pending  # at least: others may have come
        reader.next, reader.pending = number, metadata.num_pending
        if number > expected and gone > 0:  # the numbers in between are other topics' otherwise
            self._say_missing(reader, expected, ours=gone)
        reader.delivered += 1
        reader.next = number + 1
        headers = {name.lower(): value for name, value in (came.headers or {}).items()}
        self._keep(reader, number, came.subject, headers, came.data)
        return metadata.consumer

    def _keep(self, reader: _Reader, number: int, subject: str, headers: Mapping[str, str], body: bytes) -> None:
        topic = inner_topic(subject, headers, self.topics)
        if topic is not None:
            position = f"{reader.stream} #{number}"
            self._ahead.append(Message(topic, headers, body, position, shard=reader.shard, offset=number))

    def _is_over(self, status: Msg, reader: _Reader) -> bool:
        """Whether this ends a pull; a consumer that is gone is made again, from where we are."""
        code, reason = (status.headers or {}).get("Status"), (status.headers or {}).get("Description", "")
        if code == "100":
            return False
        if code not in ("404", "408") and "maxbytes" not in reason.lower():
            log.warning("nats_consumer_gone", stream=reader.stream, code=code, reason=reason)
            reader.consumer = ""
        return True

    async def _look_one_by_one(self, limit: int) -> None:
        """Read messages by their number, as JSON: whatever is in them, that cannot end the connection."""
        for reader in self._readers:
            for _ in range(limit):
                message = await self._stored(reader)
                if message is None:
                    break
                headers, body = read_stored(message)
                reader.next = message["seq"] + 1
                self._keep(reader, message["seq"], message["subject"], headers, body)
            await self._make_consumer(reader)
        self._doubtful = 0

    async def _stored(self, reader: _Reader) -> dict[str, Any] | None:
        """The next message of any of our subjects, if there is one."""
        found = []
        for subject in reader.filters:
            request = {"seq": reader.next, "next_by_subj": subject}
            try:
                answer = await self._link.get(f"$JS.API.STREAM.MSG.GET.{reader.stream}", request)
            except NotFoundError:
                continue
            found.append(answer["message"])
        return min(found, key=lambda message: int(message["seq"]), default=None)
