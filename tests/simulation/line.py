"""One connection for a whole example: duly's own coroutines run on it without an event loop, and nothing is committed.

Each example is one transaction that is rolled back, so a step costs its statements and no more. The business clock is
frozen far from every partition; leases end when the machine says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import psycopg
from psycopg.raw_cursor import RawCursor

T = TypeVar("T")
START = datetime(2040, 1, 1, 12, tzinfo=UTC)
TUPLES = psycopg.pq.ExecStatus.TUPLES_OK
SWEEP_EXAMPLES = 40
MAX_TURNS = 10_000
_SWEPT = ("jobs", "dead_letters", "executions_default", "outbox", "events_default", "alerts", "audit", "consumers")


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing but this line to its end."""
    for _ in range(MAX_TURNS):
        try:
            work.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
    raise AssertionError("a coroutine that should not wait did not end")


class Line:
    """Looks like an asyncpg connection to duly, and is psycopg."""

    def __init__(self, dsn: str) -> None:
        options = (
            "-c timezone=UTC -c duly.notify=off -c duly.forgetting=on -c jit=off -c plan_cache_mode=force_generic_plan"
        )
        self.connection = psycopg.connect(dsn, prepare_threshold=1, options=options)
        self.connection.prepared_max = 400
        self._cursor = RawCursor(self.connection)
        self._cursor.format = psycopg.pq.Format.BINARY
        self._examples = 0

    def ask(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement."""
        self._cursor.execute(query.encode(), values)
        result = self._cursor.pgresult
        return self._cursor.fetchall() if result is not None and result.status == TUPLES else []

    async def fetch(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What duly calls."""
        return self.ask(query, values)

    async def fetchrow(self, query: str, *values: Any) -> Any:
        """By this duly knows an asyncpg connection."""
        raise AssertionError("duly uses fetch")

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Part of the example's one transaction; nothing here is ever rolled back alone."""
        yield

    def begin(self) -> None:
        """A world without jobs and events, at the start of its time."""
        if self._examples % SWEEP_EXAMPLES == 0:
            self._sweep()
        self._examples += 1
        self.set_clock(START)

    def end(self) -> None:
        """Undo the example."""
        self.connection.rollback()

    def close(self) -> None:
        """Hang up."""
        self.connection.close()

    def set_clock(self, at: datetime) -> None:
        """Move the business clock."""
        self.ask("UPDATE duly.business_clock SET frozen_at = $1", [at])

    def _sweep(self) -> None:
        """What was rolled back still takes space, and makes every index longer."""
        self.ask("SET LOCAL session_replication_role = replica")
        for table in _SWEPT:
            self.ask("TRUNCATE duly." + table)
        self.ask("DELETE FROM duly.schedules")
        self.connection.commit()


def at(seconds: float) -> datetime:
    """So long after the start."""
    return START + timedelta(seconds=seconds)
