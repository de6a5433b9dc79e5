"""Where work comes from: correlation and causation ids flow from a job to the jobs and events it makes (E5.4, E1.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from duly import sync
from duly.db import Database, Tx
from duly.jobs.handlers import JobContext
from duly.jobs.schedule import schedule
from duly.jobs.worker import Worker
from duly.messages import NewEvent
from duly.outbox.emit import emit
from duly.telemetry import Origin, originating
from tests.support import handlers, rows, value

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EVENT = NewEvent("thing.happened", "things", "agg")


def in_session(_db: Database) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: Tx) -> None:
        await schedule(tx, "follow-up", ctx.entity_id)
        await emit(tx, EVENT)

    return work


def in_connection(_db: Database) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: AsyncConnection) -> None:
        await schedule(tx, "follow-up", ctx.entity_id)
        await emit(tx, EVENT)

    return work


def in_asyncpg(_db: Database) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: asyncpg.Connection) -> None:
        await schedule(tx, "follow-up", ctx.entity_id)
        await emit(tx, EVENT)

    return work


def in_sync_session(_db: Database) -> Callable[..., Any]:
    def work(ctx: JobContext, tx: Session) -> None:
        sync.schedule(tx, "follow-up", ctx.entity_id)
        sync.emit(tx, EVENT)

    return work


def in_a_transaction_of_its_own(db: Database) -> Callable[..., Any]:
    async def work(ctx: JobContext) -> None:
        async with db.transaction() as tx:
            await schedule(tx, "follow-up", ctx.entity_id)
            await emit(tx, EVENT)

    return work


def in_a_thread_of_its_own(db: Database) -> Callable[..., Any]:
    def work(ctx: JobContext) -> None:
        with db.transaction_sync() as tx:
            sync.schedule(tx, "follow-up", ctx.entity_id)
            sync.emit(tx, EVENT)

    return work


SHAPES = [
    in_session, in_connection, in_asyncpg, in_sync_session, in_a_transaction_of_its_own, in_a_thread_of_its_own
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
async def test_ids_flow_from_a_job_to_what_it_makes(
    db: Database, dsn: str, shape: Callable[[Database], Callable[..., Any]]
) -> None:
    """E5.4: the correlation id of the request reaches them all; the cause of each is the run that made it."""
    request = Origin(correlation_id=uuid4(), causation_id=uuid4(), traceparent=TRACEPARENT)
    with originating(request):
        async with db.transaction() as tx:
            await schedule(tx, "work", "e")
    assert rows(dsn, "SELECT correlation_id, causation_id, traceparent FROM duly.jobs") == [
        (request.correlation_id, request.causation_id, TRACEPARENT)
    ]
    await Worker(db, handlers(shape(db))).run_once()
    [(run, correlation, causation)] = rows(
        dsn, "SELECT execution_id, correlation_id, causation_id FROM duly.executions"
    )
    assert (correlation, causation) == (request.correlation_id, request.causation_id)
    assert rows(dsn, "SELECT name, correlation_id, causation_id, traceparent FROM duly.jobs") == [
        ("follow-up", request.correlation_id, run, TRACEPARENT)
    ]
    assert value(dsn, "SELECT headers FROM duly.outbox") == {
        "correlation_id": str(request.correlation_id),
        "causation_id": str(run),
        "traceparent": TRACEPARENT,
    }


async def test_jobs_that_run_at_the_same_time_do_not_mix_their_origins(db: Database, dsn: str) -> None:
    """E5.4: each run has its own, however they interleave; afterwards none is left behind."""
    together = asyncio.Barrier(5)

    async def work(ctx: JobContext, tx: Tx) -> None:
        await together.wait()
        await schedule(tx, "follow-up", ctx.entity_id)
        await together.wait()

    given: dict[str, UUID] = {}
    for number in range(5):
        given[str(number)] = uuid4()
        with originating(Origin(correlation_id=given[str(number)])):
            async with db.transaction() as tx:
                await schedule(tx, "work", number)
    await Worker(db, handlers(work)).run_once()
    assert dict(rows(dsn, "SELECT entity_id, correlation_id FROM duly.jobs")) == given


async def test_without_an_origin_everything_of_one_transaction_shares_a_fresh_id(db: Database, dsn: str) -> None:
    """E5.4: made when absent; another transaction has another."""
    for _ in range(2):
        async with db.transaction() as tx:
            await schedule(tx, "a")
            await schedule(tx, "b")
            await emit(tx, EVENT)
    found = rows(
        dsn,
        """
        SELECT correlation, count(*) FROM (
            SELECT correlation_id AS correlation FROM duly.jobs
            UNION ALL SELECT (headers->>'correlation_id')::uuid FROM duly.outbox) AS made
        GROUP BY correlation
        """,
    )
    assert [count for _, count in found] == [3, 3]
    assert all(isinstance(correlation, UUID) for correlation, _ in found)


async def test_plain_sql_jobs_have_a_correlation_id_too(dsn: str) -> None:
    """E5.4, E7.3: given or made."""
    mine = uuid4()
    rows(dsn, "SELECT duly.schedule('a', 'x')")
    rows(dsn, "SELECT duly.schedule('a', 'y', correlation_id => %(mine)s, causation_id => %(mine)s)", {"mine": mine})
    made, given = rows(dsn, "SELECT correlation_id, causation_id FROM duly.jobs ORDER BY id")
    assert isinstance(made[0], UUID)
    assert given == (mine, mine)


async def test_a_dead_letter_and_a_retry_keep_their_origin(db: Database, dsn: str) -> None:
    """E5.4: the chain does not break where something fails."""
    seen: list[UUID | None] = []

    async def work(ctx: JobContext) -> None:
        seen.append(ctx.correlation_id)
        raise RuntimeError("broken")

    origin = Origin(correlation_id=uuid4())
    with originating(origin):
        async with db.transaction() as tx:
            await schedule(tx, "work", "e", max_retries=1, backoff=[0])
    while value(dsn, "SELECT count(*) FROM duly.jobs"):
        await Worker(db, handlers(work)).run_once()
    assert seen == [origin.correlation_id] * 2
    assert rows(dsn, "SELECT correlation_id FROM duly.dead_letters") == [(origin.correlation_id,)]
    assert rows(dsn, "SELECT DISTINCT correlation_id FROM duly.executions") == [(origin.correlation_id,)]
