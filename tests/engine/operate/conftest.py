"""Rows for the operator's tests, made with plain SQL at the business clock's time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from duly.testing import BusinessClock

NOON = datetime(2026, 3, 2, 12, 0, 0, tzinfo=UTC)


class Who(TypedDict):
    """Who acts, and why."""

    actor: str
    reason: str


WHO = Who(actor="alice", reason="the bank is back")


class Make:
    """Writes rows; what is not given gets a plain value."""

    def __init__(self, connection: psycopg.Connection[Any], clock: BusinessClock) -> None:
        self.connection = connection
        self.clock = clock

    def run(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        """One statement, and its rows."""
        cursor = self.connection.execute(query.encode(), values or None)
        return cursor.fetchall() if cursor.description else []

    def value(self, query: str, **values: Any) -> Any:
        """The first column of the first row."""
        return self.run(query, **values)[0][0]

    def insert(self, table: str, returning: str, columns: dict[str, Any]) -> Any:
        """One row of a table of duly."""
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        marks = sql.SQL(", ").join(map(sql.Placeholder, columns))
        statement = sql.SQL("INSERT INTO duly.{} ({}) VALUES ({}) RETURNING {}").format(
            sql.Identifier(table), names, marks, sql.Identifier(returning)
        )
        row = self.connection.execute(statement, columns).fetchone()
        assert row is not None
        return row[0]

    def job(self, name: str = "charge", **columns: Any) -> int:
        """A job that is due now."""
        now = self.clock.now()
        given = {"name": name, "run_at": now, "due_at": now, "created_at": now}
        return int(self.insert("jobs", "id", given | columns))

    def behind(self, name: str, order_key: str, **columns: Any) -> int:
        """A job that waits behind an earlier one of its order."""
        id = self.job(name, order_key=order_key, waits="behind", **columns)
        self.run("UPDATE duly.jobs SET run_at = 'infinity' WHERE id = %(id)s", id=id)
        return id

    def lease(self, id: int, *, worker: str = "w1", seconds: float = 300) -> None:
        """Let a worker take a job; a negative time is a lease that has expired."""
        self.run(
            "UPDATE duly.jobs SET lease_token = nextval('duly.lease_tokens'), leased_by = %(worker)s,"
            " claimed_at = duly.now(), lease_expires_at = clock_timestamp() + %(lease)s WHERE id = %(id)s",
            id=id,
            worker=worker,
            lease=timedelta(seconds=seconds),
        )

    def dead(self, id: int, name: str = "charge", **columns: Any) -> int:
        """A dead letter."""
        now = self.clock.now()
        given = {
            "id": id,
            "name": name,
            "payload": "{}",
            "priority": 3,
            "due_at": now,
            "created_at": now,
            "original_delay": timedelta(0),
            "retry_count": 3,
            "source": "Deferred",
            "reason": "retries_used_up",
            "error": "boom",
            "error_kind": "ValueError",
            "buried_at": now,
        }
        return int(self.insert("dead_letters", "id", given | columns))

    def event(self, aggregate_id: str = "order-1", **columns: Any) -> UUID:
        """An event in the outbox."""
        id = self.value("SELECT duly.uuid7(duly.now())")
        given = {
            "id": id,
            "type": "order.placed",
            "topic": "shop",
            "aggregate_id": aggregate_id,
            "payload": '{"card": "4111-SECRET"}',
            "created_at": self.clock.now(),
        }
        self.insert("outbox", "seq", given | columns)
        return UUID(str(id))

    def failed_event(self, aggregate_id: str = "order-1", **columns: Any) -> UUID:
        """An event that the relay gave up, with its alert."""
        failed = {"attempts": 5, "failed_at": self.clock.now(), "last_error": "broker said no"}
        id = self.event(aggregate_id, **(failed | columns))
        self.run("SELECT duly.alert('event_failed', %(id)s, 'gave up')", id=str(id))
        return id

    def published(self, aggregate_id: str = "order-1", **columns: Any) -> UUID:
        """An event in the history."""
        id = self.event(aggregate_id, **columns)
        self.run(
            "WITH moved AS (DELETE FROM duly.outbox WHERE id = %(id)s RETURNING *)"
            " INSERT INTO duly.events (id, seq, type, topic, aggregate_id, payload, headers, created_at, published_at,"
            " attempts) SELECT id, seq, type, topic, aggregate_id, payload, headers, created_at, duly.now(), attempts"
            " FROM moved",
            id=id,
        )
        return id

    def execution(self, job_id: int, name: str = "charge", **columns: Any) -> UUID:
        """A run in the log."""
        now = self.clock.now()
        given = {
            "execution_id": self.value("SELECT duly.uuid7()"),
            "job_id": job_id,
            "name": name,
            "source": "Deferred",
            "started_at": now - timedelta(seconds=2),
            "completed_at": now,
            "succeeded": columns.get("outcome", "done") == "done",
            "outcome": "done",
            "retry_count": 0,
            "worker": "w1",
            "lease_token": 1,
        }
        return UUID(str(self.insert("executions", "execution_id", given | columns)))

    def process(self, id: str = "w1", kind: str = "worker", names: tuple[str, ...] = (), silent: float = 0) -> None:
        """A process that gave a sign of life so many seconds ago."""
        self.run(
            "INSERT INTO duly.processes (id, kind, names, version, started_at, seen_at)"
            " VALUES (%(id)s, %(kind)s, %(names)s, '1', clock_timestamp(), clock_timestamp() - %(silent)s)",
            id=id,
            kind=kind,
            names=list(names),
            silent=timedelta(seconds=silent),
        )

    def audit(self) -> list[dict[str, Any]]:
        """Every audit row, oldest first."""
        rows = self.run("SELECT CAST(row_to_json(a) AS text) FROM duly.audit a ORDER BY id")
        return [json.loads(row[0]) for row in rows]


@pytest.fixture
def make(dsn: str, clock: BusinessClock) -> Iterator[Make]:
    """A maker of rows, with the clock stopped at noon."""
    clock.freeze(NOON)
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Make(connection, clock)


async def until_blocked(make: Make) -> None:
    """Return as soon as some backend of this database waits for a lock that another one holds."""
    for _ in range(20_000):
        if make.value(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ):
            return
        await asyncio.sleep(0)
    raise AssertionError("nobody waits for a lock")
