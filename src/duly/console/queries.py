"""What the operator's page shows; every query is bounded by an index, a LIMIT and a statement timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from duly.db import Database, Statement, Tx, fetch

CAP = 10_000
NAMES_LIMIT = 50
RECENT_LIMIT = 20
LIST_LIMIT = 200
ALIVE_SECONDS = 30

BEGIN_READING = Statement("SET TRANSACTION READ ONLY")
LIMIT_STATEMENTS = Statement("SET LOCAL statement_timeout = '3s'")
READ_TIME = Statement("SELECT duly.now() AS now, duly.now() <> statement_timestamp() AS moved")

# One step of the index for each name, then at most CAP of its rows; the oldest by priority likewise.
READ_QUEUE = Statement(
    """
    WITH RECURSIVE names AS (
        (SELECT name FROM duly.jobs ORDER BY name LIMIT 1)
        UNION ALL
        SELECT (SELECT j.name FROM duly.jobs j WHERE j.name > n.name ORDER BY j.name LIMIT 1)
        FROM names n WHERE n.name IS NOT NULL
    ), shown AS (SELECT name FROM names WHERE name IS NOT NULL LIMIT :names)
    SELECT s.name,
           count(*) FILTER (WHERE j.lease_token IS NULL) AS pending,
           count(*) FILTER (WHERE j.lease_token IS NULL AND j.run_at <= duly.now()) AS due,
           count(*) FILTER (WHERE j.lease_expires_at > clock_timestamp()) AS running,
           count(*) FILTER (WHERE j.lease_expires_at <= clock_timestamp()) AS failed,
           extract(epoch FROM duly.now() - nullif(o.run_at, 'infinity'))::float8 AS oldest_seconds
    FROM shown s
    CROSS JOIN LATERAL (
        SELECT lease_token, lease_expires_at, run_at FROM duly.jobs
        WHERE name = s.name ORDER BY priority, run_at, id LIMIT :cap + 1) j
    LEFT JOIN LATERAL (
        SELECT min(first.run_at) AS run_at FROM generate_series(1, 4) AS p(priority)
        CROSS JOIN LATERAL (
            SELECT run_at FROM duly.jobs
            WHERE name = s.name AND priority = p.priority AND lease_token IS NULL
            ORDER BY run_at, id LIMIT 1) first) o ON true
    GROUP BY s.name, o.run_at
    ORDER BY oldest_seconds DESC NULLS LAST, s.name
    """
)
READ_OUTBOX = Statement(
    """
    SELECT (SELECT count(*) FROM (
                SELECT FROM duly.outbox WHERE failed_at IS NULL LIMIT :cap + 1) AS p) AS pending,
           (SELECT count(*) FROM (
                SELECT FROM duly.outbox WHERE failed_at IS NOT NULL AND attempts > 0
                LIMIT :cap + 1) AS f) AS failed,
           extract(epoch FROM duly.now() - (
                SELECT created_at FROM duly.outbox WHERE failed_at IS NULL AND NOT parked
                ORDER BY seq LIMIT 1))::float8 AS lag_seconds
    """
)
READ_FAILED_EVENTS = Statement(
    """
    SELECT id, type, topic, aggregate_id, attempts, failed_at, last_error FROM duly.outbox
    WHERE failed_at IS NOT NULL AND attempts > 0 ORDER BY seq DESC LIMIT :limit
    """
)
READ_SCHEDULES = Statement(
    """
    SELECT name, cron, timezone, enabled, last_run_at, next_run_at, missed_count, last_error,
           extract(epoch FROM duly.now() - next_run_at)::float8 AS late_seconds
    FROM duly.schedules ORDER BY name LIMIT :limit
    """
)
# History has no index by time alone: the last runs of each name, merged.
READ_EXECUTIONS = Statement(
    """
    WITH RECURSIVE names AS (
        (SELECT name FROM duly.executions ORDER BY name LIMIT 1)
        UNION ALL
        SELECT (SELECT e.name FROM duly.executions e WHERE e.name > n.name ORDER BY e.name LIMIT 1)
        FROM names n WHERE n.name IS NOT NULL
    ), shown AS (SELECT name FROM names WHERE name IS NOT NULL LIMIT :names)
    SELECT e.name, e.job_id, e.entity_id, e.source, e.started_at, e.outcome, e.succeeded, e.message,
           extract(epoch FROM e.completed_at - e.started_at)::float8 AS took_seconds
    FROM shown s
    CROSS JOIN LATERAL (
        SELECT * FROM duly.executions WHERE name = s.name ORDER BY completed_at DESC LIMIT :limit) e
    ORDER BY e.completed_at DESC LIMIT :limit
    """
)
COUNT_DEAD_LETTERS = Statement("SELECT count(*) AS count FROM (SELECT FROM duly.dead_letters LIMIT :cap + 1) AS d")
READ_DEAD_LETTERS = Statement(
    """
    SELECT id, name, entity_id, reason, retry_count, error, buried_at FROM duly.dead_letters
    ORDER BY buried_at DESC, id DESC LIMIT :limit
    """
)
READ_ALERTS = Statement(
    """
    SELECT kind, subject, message, count, raised_at, last_at FROM duly.alerts
    WHERE resolved_at IS NULL ORDER BY last_at DESC LIMIT :limit
    """
)
READ_PROCESSES = Statement(
    """
    SELECT id, kind, names, version, started_at,
           extract(epoch FROM clock_timestamp() - seen_at)::float8 AS seen_seconds
    FROM duly.processes ORDER BY kind, id LIMIT :limit
    """
)

Rows = Sequence[Any]


@dataclass(frozen=True)
class Overview:
    """Everything on the first page, read in one transaction."""

    now: datetime
    clock_moved: bool
    queue: Rows
    outbox: Any
    failed_events: Rows
    schedules: Rows
    executions: Rows
    dead_letter_count: int
    dead_letters: Rows
    alerts: Rows
    processes: Rows
    attention: list[str] = field(default_factory=list)

    def total(self, status: str) -> int:
        """How many jobs of all names shown are in a state."""
        return sum(int(getattr(row, status)) for row in self.queue)

    def alive(self, kind: str) -> int:
        """How many processes of a kind were seen lately."""
        return sum(row.kind == kind and row.seen_seconds < ALIVE_SECONDS for row in self.processes)

    def unknown(self) -> list[str]:
        """Names that wait though no living worker has a handler for them."""
        known = {name for row in self.processes if row.seen_seconds < ALIVE_SECONDS for name in row.names}
        return [row.name for row in self.queue if row.due and row.name not in known]


async def read_overview(db: Database, *, timeout_seconds: float = 10.0) -> Overview:
    """Read the page; raises what the database raises when it is away or too slow."""
    async with asyncio.timeout(timeout_seconds), db.transaction() as tx:
        await fetch(tx, BEGIN_READING)
        await fetch(tx, LIMIT_STATEMENTS)
        view = await _read(tx)
    view.attention.extend(find_attention(view))
    return view


async def _read(tx: Tx) -> Overview:
    time = await _one(tx, READ_TIME)
    return Overview(
        now=time.now,
        clock_moved=time.moved,
        queue=await fetch(tx, READ_QUEUE, names=NAMES_LIMIT, cap=CAP),
        outbox=await _one(tx, READ_OUTBOX, cap=CAP),
        failed_events=await fetch(tx, READ_FAILED_EVENTS, limit=RECENT_LIMIT),
        schedules=await fetch(tx, READ_SCHEDULES, limit=LIST_LIMIT),
        executions=await fetch(tx, READ_EXECUTIONS, names=NAMES_LIMIT, limit=RECENT_LIMIT),
        dead_letter_count=(await _one(tx, COUNT_DEAD_LETTERS, cap=CAP)).count,
        dead_letters=await fetch(tx, READ_DEAD_LETTERS, limit=RECENT_LIMIT),
        alerts=await fetch(tx, READ_ALERTS, limit=RECENT_LIMIT),
        processes=await fetch(tx, READ_PROCESSES, limit=LIST_LIMIT),
    )


async def _one(tx: Tx, statement: Statement, **values: Any) -> Any:
    return (await fetch(tx, statement, **values))[0]


def find_attention(view: Overview) -> list[str]:
    """What an operator should look at first, as sentences with a cause."""
    found = [
        f"No {kind} is alive: {meaning}."
        for kind, meaning in (
            ("worker", "jobs wait"),
            ("relay", "events wait"),
            ("scheduler", "schedules do not fire"),
        )
        if not view.alive(kind)
    ]
    if view.alive("worker") and view.unknown():
        found.append(f"No worker alive has a handler for: {_some(view.unknown())}.")
    if view.dead_letter_count:
        found.append(f"{_count(view.dead_letter_count, 'dead letter waits', 'dead letters wait')} for a decision.")
    if view.outbox.failed:
        events = _count(view.outbox.failed, "event was not published and holds", "events were not published and hold")
        found.append(f"{events} back what follows.")
    if view.total("failed"):
        found.append(f"{_count(view.total('failed'), 'job lost its', 'jobs lost their')} worker, to be taken over.")
    late = [row.name for row in view.schedules if row.enabled and (row.late_seconds or 0) > 60]
    if late:
        found.append(f"Late schedules: {_some(late)}.")
    broken = [row.name for row in view.schedules if row.last_error]
    if broken:
        found.append(f"Broken schedules: {_some(broken)}.")
    return found


def capped(count: int) -> str:
    """A count with thousands separated; beyond the cap only that it is more."""
    return f"{CAP:,}+" if count > CAP else f"{count:,}"


def _count(count: int, one: str, many: str) -> str:
    return f"{capped(count)} {one if count == 1 else many}"


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (" and more" if len(names) > limit else "")
