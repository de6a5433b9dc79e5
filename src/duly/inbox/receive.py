"""A consumer as a handler: loads its events, marks them in the inbox, and skips what was processed before."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from duly.db import Statement, fetch, fetch_sync, load_json
from duly.errors import Invalid
from duly.inbox.sql import LOAD_RECEIVED
from duly.jobs.handlers import Handler, Job
from duly.messages import Event

JOB_PREFIX = "consumer:"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,89}")
_PATTERN = re.compile(r"[A-Za-z*][A-Za-z0-9_.:*-]{0,199}")

LOAD_EVENTS = Statement("""
SELECT e.id, e.type, e.topic, e.aggregate_id, e.payload::text, e.headers::text, e.created_at,
       EXISTS (SELECT 1 FROM duly.processed_events p
               WHERE p.consumer = CAST(:consumer AS text) AND p.event_id = e.id) AS processed
FROM duly.events e WHERE e.id = ANY(CAST(:ids AS uuid[]))
""")
# Waits for a concurrent transaction that marks the same event, and then sees its row.
MARK_PROCESSED = Statement("""
INSERT INTO duly.processed_events (consumer, event_id, processed_at)
SELECT CAST(:consumer AS text), id, duly.now() FROM unnest(CAST(:ids AS uuid[])) AS id
ON CONFLICT DO NOTHING RETURNING event_id
""")
UNMARK_PROCESSED = Statement("""
DELETE FROM duly.processed_events WHERE consumer = CAST(:consumer AS text) AND event_id = ANY(CAST(:ids AS uuid[]))
""")


@dataclass
class Consumer(Handler):
    """A handler of events. The relay, or a receiver, makes its jobs: one for each event that a pattern matches."""

    consumer: str = ""
    patterns: list[str] = field(default_factory=list)
    ordered: bool = False
    keeps_patterns: bool = False  # its row in duly.consumers is kept by whoever knows what is wanted

    async def load(self, connection: Any, jobs: Sequence[Job]) -> None:
        """Give each job its event, in one statement; in two, where a broker brought some."""
        ids = [job.event_id for job in jobs if job.event_id is not None]
        rows = await fetch(connection, LOAD_EVENTS, consumer=self.consumer, ids=ids)
        found = {row[0]: row for row in rows}
        if missing := [id_ for id_ in ids if id_ not in found]:
            rows = await fetch(connection, LOAD_RECEIVED, consumer=self.consumer, ids=missing)
            found |= {row[0]: row for row in rows}
        for job in jobs:
            row = found.get(job.event_id)
            if row is None:
                job.unreadable = f"event {job.event_id} is no longer in the history"
                continue
            try:
                job.argument, job.duplicate = as_event(row), row[7]
            except (ValueError, RecursionError) as error:
                job.unreadable = f"event {job.event_id} cannot be decoded: {type(error).__name__}"

    async def mark(self, tx: Any, jobs: Sequence[Job]) -> set[int]:
        """Write the inbox rows; the jobs whose event had one already."""
        ids = [job.event_id for job in jobs]
        return _duplicates(jobs, await fetch(tx, MARK_PROCESSED, consumer=self.consumer, ids=ids))

    async def unmark(self, tx: Any, jobs: Sequence[Job]) -> None:
        """Take the inbox rows back, in the same transaction: the handler wants the event again, or gave it up."""
        await fetch(tx, UNMARK_PROCESSED, consumer=self.consumer, ids=[job.event_id for job in jobs])

    def unmark_sync(self, tx: Any, jobs: Sequence[Job]) -> None:
        """The same on a synchronous session."""
        fetch_sync(tx, UNMARK_PROCESSED, consumer=self.consumer, ids=[job.event_id for job in jobs])

    def mark_sync(self, tx: Any, jobs: Sequence[Job]) -> set[int]:
        """The same on a synchronous session."""
        ids = [job.event_id for job in jobs]
        return _duplicates(jobs, fetch_sync(tx, MARK_PROCESSED, consumer=self.consumer, ids=ids))


def as_event(row: Sequence[Any]) -> Event:
    """An event from a row whose JSON is still text; ValueError or RecursionError when Python cannot hold it."""
    return Event(row[0], row[1], row[2], row[3], load_json(row[4]), load_json(row[5]), row[6])


def matches(pattern: str, *, type_: str, topic: str) -> bool:
    """Whether a consumer's pattern (``quality.*``) fits the event's type or its topic."""
    return fnmatch.fnmatchcase(type_, pattern) or fnmatch.fnmatchcase(topic, pattern)


def wanting(consumers: Sequence[Sequence[Any]], *, type_: str, topic: str) -> list[tuple[str, bool]]:
    """Which of the consumers (name, patterns, ordered) want such an event, and whether in order."""
    return [
        (name, ordered)
        for name, patterns, ordered in consumers
        if any(matches(pattern, type_=type_, topic=topic) for pattern in patterns)
    ]


def check_consumer(name: str, patterns: Sequence[str]) -> None:
    """Refuse a name or pattern that could never work, with what to write instead."""
    if not _NAME.fullmatch(name):
        raise Invalid(f"{name!r} cannot name a consumer: use a letter, then up to 89 letters, digits or . _ -")
    if not patterns or len(patterns) > 100:
        raise Invalid(f"consumer {name!r}: say which events it wants, for example on='quality.*'")
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise Invalid(f"consumer {name!r}: {pattern!r} is no pattern; use a type or topic, with * as wildcard")


def _duplicates(jobs: Sequence[Job], rows: Sequence[Sequence[Any]]) -> set[int]:
    fresh: set[UUID] = {row[0] for row in rows}
    seen: set[int] = set()
    for job in jobs:
        if job.event_id in fresh:
            fresh.discard(job.event_id)  # the same event twice in one batch is handled once
        else:
            seen.add(job.id)
    return seen
