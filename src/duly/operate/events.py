"""Events that wait, failed or were published: look, try a failed one again, or give it up."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, get_args
from uuid import UUID

from duly.db import Tx, fetch, request_poke
from duly.errors import Conflict, Invalid, NotFound
from duly.messages import may_read
from duly.operate import sql
from duly.operate.arguments import bulk_size, filter_text, page_size, signed

EventStatus = Literal["PENDING", "PUBLISHED", "FAILED"]
SCAN_LIMIT = 100_000
CLOSED = "closed"


@dataclass(frozen=True)
class EventEntry:
    """An event and where it stands. ``parked``: it waits for an earlier event of its aggregate."""

    id: UUID
    seq: int
    type: str
    topic: str
    aggregate_id: str
    status: EventStatus
    attempts: int
    retry_at: datetime | None
    parked: bool
    last_error: str | None
    created_at: datetime
    published_at: datetime | None

    def seen_by(self, roles: Set[str] | None) -> EventEntry:
        """The same for somebody with these roles: where a closed one stands, and not what it is, or of whom."""
        if may_read(self.type, roles):
            return self
        error = None if self.last_error is None else CLOSED
        return replace(self, type=CLOSED, topic=CLOSED, aggregate_id="", last_error=error)


@dataclass(frozen=True)
class DiscardedEvent:
    """An event that was given up: the audit has it, and nobody else."""

    id: UUID
    type: str
    aggregate_id: str
    discarded_at: datetime


async def requeue_event(tx: Tx, id: UUID, *, actor: str, reason: str | None = None) -> None:
    """Give a FAILED event all its attempts again; the later ones of its aggregate follow it."""
    signature = signed(actor=actor, reason=reason)
    await fetch(tx, sql.REQUEUE_EVENTS, seqs=[await _hold_failed(tx, id)], action="event.requeued", **signature)
    request_poke(tx, "outbox")


async def requeue_events(
    tx: Tx, *, topic: str | None = None, limit: int = 1_000, actor: str, reason: str | None = None
) -> int:
    """Give up to ``limit`` FAILED events all their attempts again, oldest first; how many. One audit row for each."""
    signature = signed(actor=actor, reason=reason)
    topic = filter_text("the topic", topic)
    seqs = await _hold_lanes(tx, id=None, topic=topic, limit=bulk_size(limit))
    done = await fetch(tx, sql.REQUEUE_EVENTS, seqs=seqs, action="event.requeued", **signature)
    request_poke(tx, "outbox")
    return len(done)


async def discard_event(tx: Tx, id: UUID, *, actor: str, reason: str | None = None) -> None:
    """Give up a FAILED event: it is never published, its aggregate goes on, and the audit row keeps all of it."""
    signature = signed(actor=actor, reason=reason)
    seq = await _hold_failed(tx, id)
    aggregate_id = (await fetch(tx, sql.FIND_AGGREGATE, seq=seq))[0][0]
    await fetch(tx, sql.DISCARD_EVENTS, seqs=[seq], action="event.discarded", **signature)
    await fetch(tx, sql.RELEASE_NEXT_EVENT, aggregate_id=aggregate_id)
    request_poke(tx, "outbox")


async def discard_events(
    tx: Tx, *, topic: str | None = None, limit: int = 1_000, actor: str, reason: str | None = None
) -> int:
    """Give up to ``limit`` FAILED events up, oldest first; how many. One audit row for each."""
    signature = signed(actor=actor, reason=reason)
    topic = filter_text("the topic", topic)
    seqs = await _hold_lanes(tx, id=None, topic=topic, limit=bulk_size(limit))
    aggregates = [row[0] for row in await fetch(tx, sql.FIND_AGGREGATES, seqs=seqs)]
    done = await fetch(tx, sql.DISCARD_EVENTS, seqs=seqs, action="event.discarded", **signature)
    await fetch(tx, sql.RELEASE_NEXT_EVENTS, aggregate_ids=aggregates)
    request_poke(tx, "outbox")
    return len(done)


async def list_events(
    tx: Tx,
    *,
    status: str | None = None,
    topic: str | None = None,
    aggregate_id: str | None = None,
    limit: int = 50,
) -> list[EventEntry]:
    """The newest first. A topic alone is looked for among the newest 100,000 of each status."""
    if status is not None and status not in get_args(EventStatus):
        raise Invalid(f"status={status!r}: choose {', '.join(get_args(EventStatus))}")
    topic, aggregate_id = filter_text("the topic", topic), filter_text("the aggregate id", aggregate_id)
    values = {"topic": topic, "limit": page_size(limit)}
    if aggregate_id is not None:
        rows = await fetch(tx, sql.LIST_EVENTS_OF_AGGREGATE, aggregate_id=aggregate_id, status=status, **values)
        return [EventEntry(*row) for row in rows]
    found: list[EventEntry] = []
    if status in (None, "PENDING"):
        found += [EventEntry(*row) for row in await fetch(tx, sql.LIST_PENDING_EVENTS, scan=SCAN_LIMIT, **values)]
    if status in (None, "FAILED"):
        found += [EventEntry(*row) for row in await fetch(tx, sql.LIST_FAILED_EVENTS, **values)]
    if status in (None, "PUBLISHED"):
        found += [EventEntry(*row) for row in await fetch(tx, sql.LIST_PUBLISHED_EVENTS, scan=SCAN_LIMIT, **values)]
    return sorted(found, key=lambda event: event.seq, reverse=True)[:limit]


async def list_discarded(tx: Tx, aggregate_ids: Sequence[str], *, limit: int = 50) -> list[DiscardedEvent]:
    """What was given up of some aggregates, as long as the audit is kept; of each the first, in order."""
    rows = await fetch(tx, sql.LIST_DISCARDED, aggregate_ids=list(aggregate_ids), limit=page_size(limit))
    return [DiscardedEvent(*row) for row in rows]


async def _hold_failed(tx: Tx, id: UUID) -> int:
    """The seq of a FAILED event that nobody else changes until this transaction ends."""
    for seq in await _hold_lanes(tx, id=id, topic=None, limit=1):
        return seq
    rows = await fetch(tx, sql.FIND_EVENT_STATUS, id=id)
    if not rows:
        raise NotFound(f"no event has the id {id}; history older than the retention is dropped")
    raise Conflict(f"event {id} is {rows[0][0]}: only a FAILED one can be requeued or discarded")


async def _hold_lanes(tx: Tx, *, id: UUID | None, topic: str | None, limit: int) -> list[int]:
    """Lock the lanes of the FAILED events, then look again: another operator may have been faster."""
    values = {"id": id, "topic": topic, "limit": limit}
    found = await fetch(tx, sql.FIND_FAILED_EVENTS, **values)
    if not found:
        return []
    lanes = sorted({row[1] for row in found})
    await fetch(tx, sql.LOCK_LANES, lanes=lanes)
    return [row[0] for row in await fetch(tx, sql.FIND_FAILED_EVENTS, **values) if row[1] in lanes]
