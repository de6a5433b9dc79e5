"""A handler's writes and its job's completion are one commit, also when COMMIT gets no answer (E3.11)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from duly.db import Database, Tx
from duly.jobs.handlers import JobContext
from duly.jobs.schedule import schedule
from duly.jobs.worker import Worker
from tests.engine.jobs.wire import Cut, Wire, breaking_wire
from tests.engine.jobs.witness import (
    EFFECT,
    effects,
    is_empty,
    make_effects,
    outcomes,
    queue,
    terminate_backends,
    until,
)
from tests.support import handlers, rows, value

Ending = Callable[[], None]


def through_session(end: Ending) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
        await asyncio.to_thread(end)

    return work


def through_connection(end: Ending) -> Callable[..., Any]:
    async def work(tx: AsyncConnection, ctx: JobContext) -> None:
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
        await asyncio.to_thread(end)

    return work


def through_asyncpg(end: Ending) -> Callable[..., Any]:
    async def work(ctx: JobContext, tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO effects VALUES ($1)", ctx.entity_id)
        await asyncio.to_thread(end)

    return work


def through_sync_session(end: Ending) -> Callable[..., Any]:
    def work(ctx: JobContext, tx: Session) -> None:
        tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
        end()

    return work


any_transaction = pytest.mark.parametrize(
    "through", [through_session, through_connection, through_asyncpg, through_sync_session], ids=lambda f: f.__name__
)


async def schedule_work(db: Database, **options: Any) -> None:
    async with db.transaction() as tx:
        await schedule(tx, "work", "e", **options)


@any_transaction
async def test_writes_and_completion_are_one_transaction(
    db: Database, dsn: str, through: Callable[[Ending], Any]
) -> None:
    """E3.11: the effect and the history's row carry the same transaction id, and nobody saw one without the other."""
    make_effects(dsn)
    seen: list[Any] = []

    def look() -> None:
        seen.append((dict(effects(dsn)), queue(dsn), outcomes(dsn)))

    await schedule_work(db)
    await Worker(db, handlers(through(look))).run_once()
    assert seen == [({}, [("e", "Running", 0)], [])]
    assert effects(dsn) == {"e": 1}
    assert is_empty(dsn)
    assert value(dsn, "SELECT (SELECT xmin::text FROM effects) = (SELECT xmin::text FROM duly.executions)")


@any_transaction
async def test_a_failing_handler_leaves_no_writes(db: Database, dsn: str, through: Callable[[Ending], Any]) -> None:
    """E3.11: all or nothing; the failure itself is recorded."""
    make_effects(dsn)

    def fail() -> None:
        raise RuntimeError("after the write")

    await schedule_work(db)
    await Worker(db, handlers(through(fail))).run_once()
    assert effects(dsn) == {}
    assert queue(dsn) == [("e", "Pending", 1)]
    assert outcomes(dsn) == [("e", "retried", 0)]


async def test_a_session_is_flushed_before_the_job_is_completed(db: Database, dsn: str) -> None:
    """E3.11: a constraint that only the COMMIT would check still fails the run, not the worker."""
    rows(dsn, "CREATE TABLE parents (id int PRIMARY KEY)")
    rows(dsn, "CREATE TABLE children (id int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")

    async def work(tx: Tx) -> None:
        await tx.execute(text("INSERT INTO children VALUES (1)"))

    await schedule_work(db)
    await Worker(db, handlers(work)).run_once()
    assert queue(dsn) == [("e", "Pending", 1)]
    assert "foreign key" in value(dsn, "SELECT message FROM duly.executions")


async def test_what_a_handler_schedules_exists_only_if_its_run_does(db: Database, dsn: str) -> None:
    """E3.11: follow-up timers are part of the same commit."""

    async def work(ctx: JobContext, tx: Tx) -> None:
        await schedule(tx, "follow-up", ctx.entity_id)
        if ctx.retry_count == 0:
            raise RuntimeError("first try")

    await schedule_work(db, backoff=[0])
    worker = Worker(db, handlers(work))
    while value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'work'"):
        await worker.run_once()
    assert outcomes(dsn) == [("e", "retried", 0), ("e", "done", 1)]
    assert rows(dsn, "SELECT name FROM duly.jobs") == [("follow-up",)]


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_losing_a_deadlock_costs_no_attempt(db: Database, dsn: str, kind: str) -> None:
    """E3.11: PostgreSQL ends one of the two; it is run again at once, and both are done."""
    rows(dsn, "CREATE TABLE hot (id int PRIMARY KEY, touched int NOT NULL DEFAULT 0)")
    rows(dsn, "INSERT INTO hot VALUES (1), (2)")
    touch = text("UPDATE hot SET touched = touched + 1 WHERE id = :id")
    first_locks = threading.Barrier(2)
    tries: list[str | None] = []

    async def work(ctx: JobContext, tx: Tx) -> None:
        mine, other = (1, 2) if ctx.entity_id == "a" else (2, 1)
        tries.append(ctx.entity_id)
        await tx.execute(touch, {"id": mine})
        if len(tries) <= 2:
            await asyncio.to_thread(first_locks.wait, 10)
        await tx.execute(touch, {"id": other})

    def work_in_thread(ctx: JobContext, tx: Session) -> None:
        mine, other = (1, 2) if ctx.entity_id == "a" else (2, 1)
        tries.append(ctx.entity_id)
        tx.execute(touch, {"id": mine})
        if len(tries) <= 2:
            first_locks.wait(10)
        tx.execute(touch, {"id": other})

    function = work if kind == "async" else work_in_thread
    async with db.transaction() as tx:
        await schedule(tx, function.__name__, "a")
        await schedule(tx, function.__name__, "b")
    worker = Worker(db, handlers(function, max_retries=0))
    await worker.run_once()
    assert len(tries) >= 3
    assert worker.counts == {"done": 2}
    assert rows(dsn, "SELECT touched FROM hot") == [(2,), (2,)]


# -- COMMIT without an answer --------------------------------------------------------------------------------------


async def on_wire(wire: Wire, function: Callable[..., Any]) -> None:
    """A worker behind the wire, until the queue is empty."""
    behind = Database(wire.dsn)
    worker = Worker(behind, handlers(function, max_retries=0))
    try:
        async with asyncio.timeout(30):
            await worker.run_once()
            while await behind.run(_waiting, confirm=False):
                await worker.run_once()
    finally:
        await behind.close()


async def _waiting(tx: Tx) -> int:
    return int((await tx.execute(text("SELECT count(*) FROM duly.jobs"))).scalar_one())


@any_transaction
@pytest.mark.parametrize("cut", ["statement", "reply"])
async def test_a_commit_without_an_answer_is_looked_up_and_never_guessed(
    db: Database, dsn: str, through: Callable[[Ending], Any], cut: Cut
) -> None:
    """E3.11: lost before it arrived, the job runs again; lost after it took effect, it does not; no attempt is used."""
    make_effects(dsn)
    await schedule_work(db)
    async with breaking_wire(dsn) as wire:

        def arm() -> None:
            if not wire.cuts:
                wire.cut_next = cut

        await on_wire(wire, through(arm))
        assert wire.cuts == 1
    assert effects(dsn) == {"e": 1}
    assert is_empty(dsn)
    before = [] if cut == "reply" else [("e", "released", 0)]
    assert outcomes(dsn) == [*before, ("e", "done", 0)]


@any_transaction
@pytest.mark.parametrize("cut", ["statement", "reply"])
async def test_a_commit_that_cannot_be_looked_up_at_once_is_no_failure_either(
    db: Database, dsn: str, through: Callable[[Ending], Any], cut: Cut
) -> None:
    """E3.11, E3.15: the database stays away for a moment longer: no attempt is used, and the effect happens once."""
    make_effects(dsn)
    await schedule_work(db)
    async with breaking_wire(dsn) as wire:
        wire.refuse_after_cut = 2

        def arm() -> None:
            if not wire.cuts:
                wire.cut_next = cut

        await on_wire(wire, through(arm))
        assert (wire.cuts, wire.refuse_after_cut) == (1, 0)
    assert rows(dsn, "SELECT error FROM duly.dead_letters") == []
    assert effects(dsn) == {"e": 1}
    assert is_empty(dsn)


@any_transaction
async def test_a_backend_that_is_terminated_before_commit_costs_no_attempt(
    db: Database, dsn: str, through: Callable[[Ending], Any]
) -> None:
    """E3.11, E3.15: the server ends our connection after the writes; nothing of them stays, and the job runs again."""
    make_effects(dsn)
    ended: list[int] = []

    def terminate() -> None:
        if not ended:
            ended.extend(terminate_backends(dsn, "state = 'idle in transaction'"))

    await schedule_work(db)
    worker = Worker(db, handlers(through(terminate), max_retries=0))
    await worker.run_once()
    assert len(ended) == 1
    assert rows(dsn, "SELECT error FROM duly.dead_letters") == []
    while not is_empty(dsn):
        await worker.run_once()
    assert effects(dsn) == {"e": 1}
    assert outcomes(dsn) == [("e", "released", 0), ("e", "done", 0)]


async def test_a_settlement_without_an_answer_is_written_again_and_takes_effect_once(db: Database, dsn: str) -> None:
    """E3.5: handlers without a transaction are settled in batches; a batch cut off is repeated with its tokens."""
    runs: list[str | None] = []

    async def work(ctx: JobContext) -> None:
        runs.append(ctx.entity_id)
        terminate_backends(dsn, "application_name = 'duly-settle'")

    async with db.transaction() as tx:
        for number in range(5):
            await schedule(tx, "work", number)
    worker = Worker(db, handlers(work, max_retries=0), concurrency=1)
    await worker.run_once()
    await until(lambda: is_empty(dsn))
    assert sorted(map(str, runs)) == ["0", "1", "2", "3", "4"]
    assert [row[1] for row in outcomes(dsn)] == ["done"] * 5
