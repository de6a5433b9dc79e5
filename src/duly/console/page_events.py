"""The outbox and the consumers; one event with what its consumers made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fastapi import Request
from fastapi.responses import Response

from duly.brokers.connect import broker_names
from duly.console import sql
from duly.console.overview import Queue, read_pulse
from duly.console.record import read_audit
from duly.console.routes import BadQuery, Pages, Query, read, show, signed_in
from duly.errors import NotFound
from duly.ids import parse_uuid
from duly.messages import may_read
from duly.operate import sql_why
from duly.operate.counts import Count
from duly.operate.events import EventEntry, list_events
from duly.operate.why import why
from duly.operate.why_job import CONSUMER_PREFIX
from duly.webhooks.look import list_of_events

if TYPE_CHECKING:
    from duly.console.app import Console, Look

PAGE = 50
STATUSES = ("FAILED", "PENDING", "PUBLISHED")
CONSUMERS_LIMIT = 200
RATE_SECONDS = 300.0
RATE_SCAN = 1_000
NONE = Count(0)


@dataclass(frozen=True)
class Consuming:
    """A consumer and how far behind it is."""

    name: str
    job_name: str
    patterns: list[str]
    ordered: bool
    enabled: bool
    via: str | None
    queue: Queue | None
    dead: Count
    last: Any
    per_minute: float | None
    spark: list[int]


def register(pages: Pages) -> None:
    """Add these routes."""
    pages.get("/outbox")(outbox)
    pages.get("/events/{id}")(event)


async def outbox(request: Request) -> Response:
    """How many wait and for how long, the events of one state, and the consumers."""
    console: Console = request.app.state.console
    query = Query(request)
    status, aggregate = query.choice("status", STATUSES), query.text("aggregate")
    roles = signed_in(request).roles
    async with read(request) as look:
        pulse = await read_pulse(look)
        shown = status or ("FAILED" if pulse.failed.number else "PENDING" if pulse.pending.number else "PUBLISHED")
        if aggregate is not None:
            about = await list_events(look.tx, status=status, aggregate_id=aggregate, limit=PAGE)
            found = [one for one in about if may_read(one.type, roles)]  # that there is one would say too much
        else:
            found = [one.seen_by(roles) for one in await _events(look, shown, query)]
        consumers = await _consumers(look, console, pulse)
        rate = await _published_a_minute(look)
    after = None
    if aggregate is None and len(found) > PAGE:
        found = found[:PAGE]
        after = str(found[-1].id if shown == "PUBLISHED" else found[-1].seq)
    return show(
        request, "outbox.html", now=look.now, pulse=pulse, shown=shown, statuses=STATUSES, events=found, after=after,
        aggregate=aggregate, consumers=consumers, rate=rate, is_first=query.text("after") is None,
        brokers=broker_names(),
    )  # fmt: skip


async def _events(look: Look, status: str, query: Query) -> list[EventEntry]:
    if status == "PUBLISHED":
        given = query.text("after")
        before = parse_uuid(given) if given else None
        if given and before is None:
            raise BadQuery("after is what the link to the next page says")
        rows = await look.rows(sql.LIST_PUBLISHED, before=before, limit=PAGE + 1)
    else:
        statement = sql.LIST_FAILED if status == "FAILED" else sql.LIST_PENDING
        rows = await look.rows(statement, before=query.number("after"), limit=PAGE + 1)
    return [EventEntry(*row) for row in rows]


async def _published_a_minute(look: Look) -> float:
    """Of the last five minutes; where more was published than is counted, of as long as that took."""
    [(number, seconds)] = await look.rows(sql.COUNT_JUST_PUBLISHED, scan=RATE_SCAN, seconds=RATE_SECONDS)
    return float(number * 60 / (max(seconds, 1.0) if number == RATE_SCAN else RATE_SECONDS))


async def _consumers(look: Look, console: Console, pulse: Any) -> list[Consuming]:
    rows = await look.rows(sql.LIST_CONSUMERS, limit=CONSUMERS_LIMIT)
    queues = {queue.name: queue for queue in pulse.queues}
    names = [CONSUMER_PREFIX + row.name for row in rows]
    last = {row.name: row for row in await look.rows(sql.LIST_LAST_RUNS, names=names)}
    points = console.rollup.points(look.now)
    found = []
    for row, name in zip(rows, names, strict=True):
        minutes = [point.names.get(name, 0) for point in points]
        recent = minutes[-5:]
        found.append(
            Consuming(
                row.name,
                name,
                list(row.patterns),
                row.ordered,
                row.enabled,
                row.via,
                queues.get(name),
                pulse.dead_letters.get(name, NONE),
                last.get(name),
                sum(recent) / len(recent) if recent else None,
                minutes,
            )
        )
    return found


async def event(request: Request, id: UUID) -> Response:
    """One event: where it stands, who consumed it, and what it carries; of a closed one, where it stands."""
    session = signed_in(request)
    async with read(request) as look:
        rows = await look.rows(sql.FIND_EVENT, id=id) or await look.rows(sql.FIND_RECEIVED, id=id)
        audit = await read_audit(request, look, subject=f"event:{id}", limit=20)
        if not rows and not audit:
            raise NotFound("no event has this id; history older than the retention is dropped")
        found = rows[0] if rows else None
        is_closed = found is not None and not may_read(found.type, session.roles)
        deliveries = []
        if found is not None and not is_closed:
            deliveries = await look.rows(sql_why.FIND_DELIVERIES, aggregate_id=found.aggregate_id, id=id, limit=100)
        webhooks = [] if is_closed else await list_of_events(look.tx, [id])
        sentences = await why(look.tx, f"event:{id}", roles=session.roles)
    return show(
        request, "event.html", now=look.now, id=id, event=found, deliveries=deliveries, audit=audit,
        webhooks=webhooks,
        sentences=sentences, is_closed=is_closed, may_see=session.may_act and not is_closed,
    )  # fmt: skip
