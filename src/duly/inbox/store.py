"""What one transaction makes of messages: rows that know a redelivery, a job for each consumer, and dead letters.

The receiver calls it with a batch; the handler of ``receive:<via>``, with the one that an operator sends once more.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from duly.brokers import Message
from duly.brokers.wire import MAX_BODY_BYTES, MAX_HEADERS_BYTES, decode
from duly.db import Tx, fetch, request_poke
from duly.errors import Invalid
from duly.inbox import sql
from duly.inbox.receive import JOB_PREFIX, wanting
from duly.jobs.handlers import Handler, JobContext, TxKind
from duly.jobs.outcomes import Done, Fail
from duly.jobs.sql import LOCK_ORDER
from duly.messages import Event, encode_payload, storable

RECEIVE_PREFIX = "receive:"
KEPT_BODY_BYTES = 640 * 1024  # as base64 it fits a job's payload; of a longer one the beginning is kept
KEPT_BEGINNING = 16 * 1024
KEPT_HEADERS = 100
KEPT_HEADERS_BYTES = 64 * 1024  # beside a body in base64, they fit a job's payload, too
KEPT_NAME_LENGTH = 200
KEPT_BEGINNING_OF_HEADER = 200
KEPT_KEY_LENGTH = 2_000
RETRIES = 3


@dataclass(frozen=True)
class Unreadable:
    """A message that is no event, and why."""

    message: Message
    why: str


@dataclass(frozen=True)
class Batch:
    """Messages after a first look, in order of delivery, each event once."""

    events: list[tuple[Event, str]] = field(default_factory=list)  # and its position
    unreadable: list[Unreadable] = field(default_factory=list)
    repeated: int = 0


@dataclass(frozen=True)
class Stored:
    """What became of a batch."""

    received: int = 0
    known: int = 0
    unreadable: int = 0
    jobs: int = 0

    def plus(self, other: Stored) -> Stored:
        """Both together."""
        return Stored(
            self.received + other.received,
            self.known + other.known,
            self.unreadable + other.unreadable,
            self.jobs + other.jobs,
        )


def read_batch(messages: Sequence[Message]) -> Batch:
    """Decode each; the events, and what cannot be one."""
    batch = Batch()
    seen: set[UUID] = set()
    repeated = 0
    for message in messages:
        try:
            event = decode(message)
        except Invalid as error:
            batch.unreadable.append(Unreadable(message, str(error)))
        except Exception as error:  # noqa: BLE001 - a message that breaks our decoder must not stop the ones behind it
            batch.unreadable.append(Unreadable(message, f"it cannot be decoded: {type(error).__name__}"))
        else:
            if event.id in seen:
                repeated += 1
                continue
            seen.add(event.id)
            batch.events.append((event, storable(message.position[:300])))
    return Batch(batch.events, batch.unreadable, repeated)


async def store_batch(tx: Any, via: str, batch: Batch) -> Stored:
    """Write down everything of a batch, in the caller's transaction."""
    received, jobs = await _store_events(tx, via, batch.events) if batch.events else (0, 0)
    buried = await _bury(tx, via, batch.unreadable) if batch.unreadable else 0
    known = len(batch.events) - received + batch.repeated + len(batch.unreadable) - buried
    return Stored(received, known, buried, jobs)


async def _store_events(tx: Any, via: str, events: Sequence[tuple[Event, str]]) -> tuple[int, int]:
    consumers = await fetch(tx, sql.READ_CONSUMERS_VIA, via=via)
    routes = [
        (event, name, ordered)
        for event, _ in events
        for name, ordered in wanting(consumers, type_=event.type, topic=event.topic)
    ]
    keys = [(JOB_PREFIX + name, event.aggregate_id) for event, name, ordered in routes if ordered]
    if keys:  # nobody lets the next job of these keys run until we have decided whether ours wait
        await fetch(tx, LOCK_ORDER, names=[name for name, _ in keys], keys=[key for _, key in keys])
    rows = await fetch(
        tx, sql.RECEIVE_EVENTS, via=via,
        ids=[event.id for event, _ in events],
        types=[event.type for event, _ in events],
        topics=[event.topic for event, _ in events],
        aggregate_ids=[event.aggregate_id for event, _ in events],
        payloads=[encode_payload(event.payload, max_bytes=MAX_BODY_BYTES) for event, _ in events],
        headers=[encode_payload(event.headers, what="headers", max_bytes=MAX_HEADERS_BYTES) for event, _ in events],
        moments=[event.created_at for event, _ in events],
        positions=[position for _, position in events],
        routed_ids=[event.id for event, _, _ in routes],
        consumers=[name for _, name, _ in routes],
        ordered=[ordered for _, _, ordered in routes],
    )  # fmt: skip
    return rows[0][0], rows[0][1]


# -- messages that are no events -------------------------------------------------------------------------------------


async def _bury(tx: Any, via: str, unreadable: Sequence[Unreadable]) -> int:
    once = {_mark(one.message): one for one in unreadable}
    rows = await fetch(
        tx, sql.BURY_MESSAGES, name=RECEIVE_PREFIX + via,
        marks=list(once),
        payloads=[encode_payload(_as_payload(one.message), max_bytes=2 * MAX_BODY_BYTES) for one in once.values()],
        errors=[storable(one.why[:2000]) for one in once.values()],
    )  # fmt: skip
    buried: int = rows[0][0]
    return buried


def _mark(message: Message) -> str:
    """The same message has the same, however often it comes: brokers add headers of their own that change (x-...)."""
    headers = sorted((name, value) for name, value in message.headers.items() if not name.startswith("x-"))
    text = json.dumps([message.topic, headers]).encode("utf-8", "surrogatepass")
    return hashlib.sha256(len(text).to_bytes(8, "big") + text + message.body).hexdigest()


def _as_payload(message: Message) -> dict[str, Any]:
    """The message in words that can be stored, whatever it holds; a body that is too long is cut, and says so."""
    is_whole = len(message.body) <= KEPT_BODY_BYTES
    kept = message.body if is_whole else message.body[:KEPT_BEGINNING]
    headers, has_all = _keep_headers(message.headers)
    return {
        "topic": storable(message.topic[:300]),
        "position": storable(message.position[:300]),
        "key": storable(message.key[:KEPT_KEY_LENGTH]),
        "headers": headers,
        "body": base64.b64encode(kept).decode(),
        "bytes": len(message.body),
        "is_whole": is_whole and has_all,
    }


def _keep_headers(given: Mapping[str, str]) -> tuple[dict[str, str], bool]:
    """As much of them as there is room for, of a value that is too long the beginning; and whether that is all."""
    kept: dict[str, str] = {}
    left = KEPT_HEADERS_BYTES
    for name, value in given.items():
        for length in (len(value), KEPT_BEGINNING_OF_HEADER):
            header = storable(name[:KEPT_NAME_LENGTH]), storable(value[:length])
            cost = sum(len(part.encode()) for part in header)
            if cost <= left and len(kept) < KEPT_HEADERS:
                kept[header[0]] = header[1]
                left -= cost
                break
    return kept, {name: len(value) for name, value in kept.items()} == {
        storable(name): len(value) for name, value in given.items()
    }


def _as_message(payload: dict[str, Any]) -> Message:
    try:
        return Message(
            topic=payload["topic"],
            headers=payload["headers"],
            body=base64.b64decode(payload["body"], validate=True),
            position=payload["position"],
            key=payload.get("key", ""),
        )
    except (KeyError, TypeError, ValueError):
        raise Invalid("this job does not hold a message of a broker") from None


def create_receive_handler(via: str) -> Handler:
    """What an operator's retry of a buried message runs: it is decoded and routed as if it came just now."""

    async def receive_again(ctx: JobContext, tx: Tx) -> Done | Fail:
        if ctx.payload.get("is_whole") is False:
            return Fail("only the beginning of this message was kept: it was too large")
        try:
            batch = read_batch([_as_message(ctx.payload)])
        except Invalid as error:
            return Fail(str(error))
        if batch.unreadable:
            return Fail(batch.unreadable[0].why)
        stored = await store_batch(tx, via, batch)
        request_poke(tx, "jobs")
        return Done("it was known already" if stored.known else f"received; jobs made: {stored.jobs}")

    return Handler(RECEIVE_PREFIX + via, receive_again, TxKind.SESSION, True, True, RETRIES)
