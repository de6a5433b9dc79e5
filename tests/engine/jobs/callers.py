"""Every kind of transaction a caller may bring, each with a record of the statements it sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import psycopg
from sqlalchemy import create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from duly import sync
from duly.jobs.schedule import cancel, schedule
from tests.support import value


@dataclass
class Caller:
    """An open transaction of somebody else's, and duly's calls in the shape that it needs."""

    tx: Any
    schedule: Callable[..., Awaitable[int]]
    cancel: Callable[..., Awaitable[int]]
    commit: Callable[[], Awaitable[None]]
    rollback: Callable[[], Awaitable[None]]
    statements: list[str] = field(default_factory=list)


Opener = Callable[[str], contextlib.AbstractAsyncContextManager[Caller]]


def _awaitable(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def call(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    return call


def _settled(function: Callable[..., Awaitable[int]]) -> Callable[..., Awaitable[int]]:
    """asyncpg hands a statement to its loggers at the loop's next turn."""

    async def call(*given: Any, **named: Any) -> int:
        result = await function(*given, **named)
        await asyncio.sleep(0)
        return result

    return call


def _record(engine: Any) -> list[str]:
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *sent: statements.append(sent[2]))
    return statements


@contextlib.asynccontextmanager
async def async_session(dsn: str) -> AsyncIterator[Caller]:
    engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(dsn))
    statements = _record(engine.sync_engine)
    async with AsyncSession(engine) as tx:
        yield Caller(tx, schedule, cancel, tx.commit, tx.rollback, statements)
    await engine.dispose()


@contextlib.asynccontextmanager
async def async_connection(dsn: str) -> AsyncIterator[Caller]:
    engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(dsn))
    statements = _record(engine.sync_engine)
    async with engine.connect() as tx:
        yield Caller(tx, schedule, cancel, tx.commit, tx.rollback, statements)
    await engine.dispose()


@contextlib.asynccontextmanager
async def asyncpg_connection(dsn: str) -> AsyncIterator[Caller]:
    tx = await asyncpg.connect(dsn)
    await tx.fetch("SELECT $1::timestamptz[], $2::integer[]", [], [])  # asyncpg learns types once a connection
    transaction = tx.transaction()
    await transaction.start()
    statements: list[str] = []
    tx.add_query_logger(lambda record: statements.append(record.query))
    yield Caller(tx, _settled(schedule), _settled(cancel), transaction.commit, transaction.rollback, statements)
    await tx.close()


class _RecordingCursor(psycopg.Cursor[Any]):
    def execute(self, query: Any, *given: Any, **named: Any) -> Any:
        statements: list[str] = self.connection.__dict__.setdefault("statements", [])
        statements.append(str(query))
        return super().execute(query, *given, **named)


class _RecordingAsyncCursor(psycopg.AsyncCursor[Any]):
    async def execute(self, query: Any, *given: Any, **named: Any) -> Any:
        statements: list[str] = self.connection.__dict__.setdefault("statements", [])
        statements.append(str(query))
        return await super().execute(query, *given, **named)


@contextlib.asynccontextmanager
async def psycopg_async_connection(dsn: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(dsn, cursor_factory=_RecordingAsyncCursor) as tx:
        statements = tx.__dict__.setdefault("statements", [])
        yield Caller(tx, schedule, cancel, tx.commit, tx.rollback, statements)


@contextlib.asynccontextmanager
async def session(dsn: str) -> AsyncIterator[Caller]:
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    statements = _record(engine)
    with Session(engine) as tx:
        yield _synchronous(tx, statements)
    engine.dispose()


@contextlib.asynccontextmanager
async def connection(dsn: str) -> AsyncIterator[Caller]:
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    statements = _record(engine)
    with engine.connect() as tx:
        yield _synchronous(tx, statements)
    engine.dispose()


@contextlib.asynccontextmanager
async def psycopg_connection(dsn: str) -> AsyncIterator[Caller]:
    with psycopg.connect(dsn, cursor_factory=_RecordingCursor) as tx:
        yield _synchronous(tx, tx.__dict__.setdefault("statements", []))


@contextlib.asynccontextmanager
async def plain_sql(dsn: str) -> AsyncIterator[Caller]:
    """Somebody who knows nothing but SQL: psql, a trigger, another language."""
    async with await psycopg.AsyncConnection.connect(dsn, cursor_factory=_RecordingAsyncCursor) as tx:

        async def only(query: str, values: dict[str, Any]) -> int:
            found = await (await tx.execute(query.encode(), values)).fetchone()
            assert found is not None
            return int(found[0])

        async def schedule_by_sql(_tx: Any, name: str, entity_id: str | None, run_at: Any = None, **more: Any) -> int:
            named = "".join(f", {key} => %({key})s" for key in more)
            values = {"name": name, "entity_id": entity_id, "run_at": run_at, **more}
            return await only(f"SELECT duly.schedule(%(name)s, %(entity_id)s, %(run_at)s{named})", values)

        async def cancel_by_sql(_tx: Any, name: str, entity_id: str) -> int:
            return await only("SELECT duly.cancel(%(name)s, %(entity)s)", {"name": name, "entity": entity_id})

        statements = tx.__dict__.setdefault("statements", [])
        yield Caller(tx, schedule_by_sql, cancel_by_sql, tx.commit, tx.rollback, statements)


def _synchronous(tx: Any, statements: list[str]) -> Caller:
    return Caller(
        tx,
        _awaitable(sync.schedule),
        _awaitable(sync.cancel),
        _awaitable(tx.commit),
        _awaitable(tx.rollback),
        statements,
    )


PYTHON: list[Opener] = [
    async_session, async_connection, asyncpg_connection, psycopg_async_connection,
    session, connection, psycopg_connection,
]  # fmt: skip
ALL: list[Opener] = [*PYTHON, plain_sql]


def count_jobs(dsn: str) -> int:
    """How many jobs another connection sees."""
    return int(value(dsn, "SELECT count(*) FROM duly.jobs"))
