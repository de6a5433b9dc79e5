"""Why an event is where it is: pending, published or failed, and what its consumers made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from duly.messages import may_read
from duly.operate import sql_why as sql
from duly.operate.status import ALIVE_SECONDS
from duly.operate.why_look import CAP, SHOWN, Look, say_audit, say_origin
from duly.operate.words import plural, short, span, when

_STATES = {
    "waits": "has job {id}, which waits",
    "runs": "has job {id}, which is taken by a worker",
    "dead": "failed for good: dead letter {id}",
    "done": "handled it in job {id}",
    "duplicate": "skipped it in job {id}, having processed it before",
    "cancelled": "cancelled job {id}",
    "processed": "has processed it",
}


@dataclass(frozen=True)
class EventFacts:
    """One event, without its payload."""

    id: UUID
    seq: int
    type: str
    topic: str
    aggregate_id: str
    status: str
    attempts: int
    retry_at: datetime | None
    parked: bool
    last_error: str | None
    created_at: datetime
    published_at: datetime | None
    failed_at: datetime | None
    correlation_id: str | None
    causation_id: str | None


@dataclass(frozen=True)
class Arrival:
    """One event as a broker brought it, without its payload."""

    type: str
    topic: str
    aggregate_id: str
    created_at: datetime
    correlation_id: str | None
    causation_id: str | None
    via: str
    position: str
    received_at: datetime


async def why_event(look: Look, id: UUID) -> list[str]:
    """Everything known about one event; nothing when no table holds it."""
    event = await _find(look, id)
    audit = await say_audit(look, f"event:{id}")
    arrivals = [Arrival(*row) for row in await look.fetch(sql.FIND_ARRIVALS, id=id, limit=SHOWN)]
    if event is None and arrivals:
        return await _why_received(look, id, arrivals) + audit
    if event is None:
        return [f"Event {id} is gone; only the record of it is left.", *audit] if audit else []
    if not may_read(event.type, look.roles):
        return [f"Event {id} is {event.status}. What it is, and of whom, is closed to you.", *audit]
    said = [
        f"Event {id} is {event.type} on topic {event.topic}, of aggregate {event.aggregate_id}, emitted at "
        f"{when(event.created_at, look.now)}."
    ]
    if event.status == "PUBLISHED":
        said += [_say_published(event, look.now), *_say_arrivals(look, arrivals, "It came back")]
        said += await _say_deliveries(look, event.id, event.aggregate_id)
    elif event.status == "FAILED":
        said += await _say_failed(look, event)
    else:
        said += await _say_pending(look, event)
    return said + say_origin(correlation_id=event.correlation_id, causation_id=event.causation_id) + audit


async def _why_received(look: Look, id: UUID, arrivals: Sequence[Arrival]) -> list[str]:
    """Somebody else's event, or one of ours whose history is dropped."""
    first = arrivals[0]
    if not may_read(first.type, look.roles):
        return [f"Event {id} was received. What it is, and of whom, is closed to you."]
    return [
        f"Event {id} is {first.type} on topic {first.topic}, of aggregate {first.aggregate_id}, emitted at "
        f"{when(first.created_at, look.now)}.",
        *_say_arrivals(look, arrivals, "It came"),
        *await _say_deliveries(look, id, first.aggregate_id),
        *say_origin(correlation_id=first.correlation_id, causation_id=first.causation_id),
    ]


def _say_arrivals(look: Look, arrivals: Sequence[Arrival], verb: str) -> list[str]:
    return [
        f"{verb} from {one.via} ({short(one.position)}) at {when(one.received_at, look.now)}; a redelivery is known."
        for one in arrivals
    ]


async def _find(look: Look, id: UUID) -> EventFacts | None:
    for statement in (sql.FIND_PUBLISHED_EVENT, sql.FIND_WAITING_EVENT):
        for row in await look.fetch(statement, id=id):
            return EventFacts(*row)
    return None


def _say_published(event: EventFacts, now: datetime) -> str:
    assert event.published_at is not None, "a published event has its time"
    waited = span((event.published_at - event.created_at).total_seconds())
    failures = f", after {plural(event.attempts, 'failed attempt')}" if event.attempts else ""
    return f"It is PUBLISHED since {when(event.published_at, now)}, {waited} after it was emitted{failures}."


async def _say_failed(look: Look, event: EventFacts) -> list[str]:
    assert event.failed_at is not None, "a failed event has its time"
    held = await look.one(sql.COUNT_HELD, aggregate_id=event.aggregate_id, seq=event.seq, cap=CAP)
    return [
        f"It is FAILED since {when(event.failed_at, look.now)}, after {plural(event.attempts, 'attempt')}. "
        f"The last error: {short(event.last_error)}",
        f"Requeue it (`duly events requeue {event.id}`) or give it up (`duly events discard {event.id}`).",
        f"{plural(held, 'later event')} of its aggregate wait behind it.",
    ]


async def _say_pending(look: Look, event: EventFacts) -> list[str]:
    holders = await look.fetch(sql.FIND_HOLDER, aggregate_id=event.aggregate_id, seq=event.seq)
    if holders:
        return [f"It is PENDING. {_say_holder(look, holders[0])}"]
    if event.retry_at is not None and event.retry_at > look.now:
        error = f" The last error: {short(event.last_error)}" if event.last_error else ""
        failed = f"{plural(event.attempts, 'attempt')} failed, the next is" if event.attempts else "it is sent again"
        return [f"It is PENDING: {failed} at {when(event.retry_at, look.now)}.{error}"]
    if not await look.one(sql.COUNT_RELAYS, alive_seconds=ALIVE_SECONDS):
        return ["It is PENDING, and no relay is alive: start one (`duly relay`)."]
    if event.parked:
        return ["It is PENDING and held back, but nothing is before it any more: a relay lets it go soon."]
    return ["It is PENDING: a relay is alive and should publish it any moment."]


def _say_holder(look: Look, holder: Sequence[Any]) -> str:
    id, failed_at, retry_at, last_error = holder
    behind = f"It is held behind event {id} of the same aggregate"
    if failed_at is not None:
        return (
            f"{behind}, which is FAILED since {when(failed_at, look.now)}: requeue it (`duly events requeue {id}`) "
            f"or give it up (`duly events discard {id}`). Its error: {short(last_error)}"
        )
    if retry_at is not None:
        return f"{behind}, which is tried again at {when(retry_at, look.now)}. Its error: {short(last_error) or 'none'}"
    return f"{behind}, which goes first."


async def _say_deliveries(look: Look, id: UUID, aggregate_id: str) -> list[str]:
    """One sentence for each consumer; the first row of a consumer says the most."""
    rows = await look.fetch(sql.FIND_DELIVERIES, aggregate_id=aggregate_id, id=id, limit=SHOWN * 5)
    said: dict[str, str] = {}
    for name, job_id, state, message in rows:
        if name not in said:
            error = f": {short(message)}" if message else ""
            said[name] = (
                f"Consumer {name.removeprefix('consumer:')} {_STATES.get(state, state).format(id=job_id)}{error}."
            )
    if not said:
        return ["No consumer of this database got a job for it, or the history of those jobs is dropped."]
    return list(said.values())
