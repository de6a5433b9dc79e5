"""Writes events in the caller's own transaction: rolled back with it, never visible before it commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from duly.db import Statement, fetch, fetch_sync, must_notify, origin_of
from duly.errors import Invalid
from duly.messages import EventBody, NewEvent, check_text, encode_payload
from duly.telemetry import Origin

MAX_EVENTS_AT_ONCE = 10_000

EMIT = Statement("""
SELECT duly.emit_many(CAST(:types AS text[]), CAST(:topics AS text[]), CAST(:aggregate_ids AS text[]),
                      CAST(CAST(:payloads AS text[]) AS jsonb[]), CAST(CAST(:headers AS text[]) AS jsonb[]),
                      CAST(:notify AS boolean))
""")


async def emit(tx: Any, *events: EventBody | NewEvent) -> list[UUID]:
    """Write events, in this order, and return their ids. One statement however many there are."""
    values = _values(tx, events)
    if not values:
        return []
    rows = await fetch(tx, EMIT, notify=must_notify(tx, "outbox"), **values)
    return [row[0] for row in rows]


def emit_sync(tx: Any, *events: EventBody | NewEvent) -> list[UUID]:
    """The same on a synchronous session or connection."""
    values = _values(tx, events)
    if not values:
        return []
    rows = fetch_sync(tx, EMIT, notify=True, **values)
    return [row[0] for row in rows]


def _values(tx: Any, events: Sequence[EventBody | NewEvent]) -> dict[str, list[str]]:
    if len(events) > MAX_EVENTS_AT_ONCE:
        raise Invalid(f"{len(events)} events at once: emit at most {MAX_EVENTS_AT_ONCE} in one call")
    if not events:
        return {}
    written = [event.envelope() for event in events]
    origin = origin_of(tx)
    return {
        "types": [event.type for event in written],
        "topics": [event.topic for event in written],
        "aggregate_ids": [_aggregate(event) for event in written],
        "payloads": [encode_payload(event.payload) for event in written],
        "headers": [encode_payload(_headers(event, origin), what="headers") for event in written],
    }


def _aggregate(event: NewEvent) -> str:
    if not isinstance(event.aggregate_id, str) or not 1 <= len(event.aggregate_id) <= 200:
        raise Invalid(f"{event.type}: the aggregate id must be text of 1 to 200 characters")
    return check_text(event.aggregate_id, f"{event.type}: aggregate id")


def origin_headers(origin: Origin) -> dict[str, str]:
    """What every event from there carries; for those who call ``duly.emit_many`` in SQL of their own."""
    known = {
        "correlation_id": origin.correlation_id,
        "causation_id": origin.causation_id,
        "traceparent": origin.traceparent,
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def _headers(event: NewEvent, origin: Origin) -> dict[str, str]:
    for name, value in event.headers.items():
        if not isinstance(value, str):
            raise Invalid(f"{event.type}: the header {name!r} must be text, not {type(value).__name__}")
    return origin_headers(origin) | dict(event.headers)
