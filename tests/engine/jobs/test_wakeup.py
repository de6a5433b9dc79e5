"""When a due job starts: within a second of its time, woken by a commit, and without any wake-up at all (E3.3)."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
from sqlalchemy.orm import Session

from duly import sync
from duly.db import Database, Tx
from duly.duty import Cycle
from duly.jobs.handlers import JobContext
from duly.jobs.schedule import schedule
from duly.jobs.worker import Worker
from duly.settings import Settings
from duly.testing import BusinessClock
from duly.wakeup import Wakeup
from tests.engine.jobs.witness import terminate_backends, until, working
from tests.support import handlers, rows, value

HARDLY_EVER = Settings(poll_seconds=60)  # so that only a wake-up, or knowing the next time, can start a job


class Starts:
    """Remembers which jobs started, and how late."""

    def __init__(self) -> None:
        self.late_by: dict[str | None, timedelta] = {}
        self._changed = asyncio.Event()

    def note(self, ctx: JobContext) -> None:
        self.late_by[ctx.entity_id] = ctx.late_by
        self._changed.set()

    async def of(self, entity: str, seconds: float = 10) -> timedelta:
        async with asyncio.timeout(seconds):
            while entity not in self.late_by:
                self._changed.clear()
                await self._changed.wait()
        return self.late_by[entity]


def deaf_but_patient(dsn: str) -> tuple[Database, Starts, dict[str, Any]]:
    starts = Starts()

    async def work(ctx: JobContext) -> None:
        starts.note(ctx)

    return Database(dsn, settings=HARDLY_EVER), starts, handlers(work)


async def test_a_deferred_job_starts_within_a_second_of_its_time(dsn: str) -> None:
    """E3.3: not early, not with the next poll a minute later: the worker knows when the next one is due."""
    db, starts, known = deaf_but_patient(dsn)
    wakeup = Wakeup(db)
    async with working(Worker(db, known, wakeup=wakeup), wakeup=wakeup):
        async with db.transaction() as tx:
            await schedule(tx, "work", "soon", value(dsn, "SELECT duly.now() + interval '1.2 seconds'"))
        assert timedelta(0) <= await starts.of("soon") < timedelta(seconds=1)
    assert value(dsn, "SELECT count(*) FROM duly.executions") == 1
    await db.close()


async def test_a_commit_through_python_wakes_the_worker(dsn: str) -> None:
    """E3.3: a job that is due at once does not wait for a poll."""
    db, starts, known = deaf_but_patient(dsn)
    wakeup = Wakeup(db)
    worker = Worker(db, known, wakeup=wakeup)
    async with working(worker, wakeup=wakeup):
        await until(lambda: worker.health.detail == "working")
        async with db.transaction() as tx:
            await schedule(tx, "work", "now")
        assert await starts.of("now") < timedelta(seconds=1)
    await db.close()


async def test_a_commit_through_plain_sql_wakes_the_worker(dsn: str) -> None:
    """E3.3, E7.3: psql, a trigger or another language wakes it just the same."""
    db, starts, known = deaf_but_patient(dsn)
    wakeup = Wakeup(db)
    worker = Worker(db, known, wakeup=wakeup)
    async with working(worker, wakeup=wakeup):
        await until(lambda: worker.health.detail == "working")
        rows(dsn, "SELECT duly.schedule('work', 'now')")
        assert await starts.of("now") < timedelta(seconds=1)
        rows(dsn, "SELECT duly.schedule('work', 'soon', duly.now() + interval '1.2 seconds')")
        assert await starts.of("soon") < timedelta(seconds=1)
    await db.close()


async def test_a_job_of_another_process_or_another_pool_wakes_the_worker(dsn: str) -> None:
    """E3.3: a caller's own asyncpg connection, which duly does not commit, wakes it too."""
    db, starts, known = deaf_but_patient(dsn)
    wakeup = Wakeup(db)
    worker = Worker(db, known, wakeup=wakeup)
    async with working(worker, wakeup=wakeup):
        await until(lambda: worker.health.detail == "working")
        connection = await asyncpg.connect(dsn)
        async with connection.transaction():
            await schedule(connection, "work", "now")
        assert await starts.of("now") < timedelta(seconds=1)
        await connection.close()
    await db.close()


async def test_what_a_handler_schedules_for_now_starts_at_once(dsn: str) -> None:
    """E3.3: follow-ups of asynchronous and of synchronous handlers do not wait for a poll either."""
    db, starts, known = deaf_but_patient(dsn)

    async def first(tx: Tx) -> None:
        await schedule(tx, "first_in_thread", "t")

    def first_in_thread(tx: Session) -> None:
        sync.schedule(tx, "work", "last")

    known |= handlers(first, first_in_thread)
    wakeup = Wakeup(db)
    worker = Worker(db, known, wakeup=wakeup)
    async with working(worker, wakeup=wakeup):
        await until(lambda: worker.health.detail == "working")
        rows(dsn, "SELECT duly.schedule('first')")
        assert await starts.of("last") < timedelta(seconds=1)
    await db.close()


async def test_a_wakeup_that_lost_its_connection_listens_again_and_misses_nothing(dsn: str) -> None:
    """E3.3: while it was deaf it polls; once it listens again, everybody looks at the queue."""
    db, starts, known = deaf_but_patient(dsn)
    wakeup = Wakeup(db)
    worker = Worker(db, known, wakeup=wakeup)
    async with working(worker, wakeup=wakeup):
        await until(lambda: worker.health.detail == "working")
        assert len(terminate_backends(dsn, "application_name = 'duly-listen'")) == 1
        rows(dsn, "SELECT duly.schedule('work', 'while deaf')")
        await starts.of("while deaf")
        await until(lambda: value(dsn, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'duly-listen'"))
        await until(lambda: wakeup.listening)
        rows(dsn, "SELECT duly.schedule('work', 'hearing')")
        assert await starts.of("hearing") < timedelta(seconds=1)
    await db.close()


async def test_without_any_wakeup_polling_still_starts_a_job_within_a_second(dsn: str) -> None:
    """E3.3: wake-ups are a hint, polling is the truth."""
    db, starts, known = deaf_but_patient(dsn)
    worker = Worker(db, known)
    async with working(worker):
        await until(lambda: worker.health.detail == "working")
        rows(dsn, "SELECT duly.schedule('work', 'now')")
        assert await starts.of("now") < timedelta(seconds=1)
    await db.close()


async def test_a_wakeup_that_is_lost_costs_a_poll_and_no_more(db: Database, dsn: str) -> None:
    """E3.3: the worker listens, and nobody tells it of this job; ten seconds later at most it has looked by itself."""
    starts, wakeup = Starts(), Wakeup(db)

    async def work(ctx: JobContext) -> None:
        starts.note(ctx)

    worker = Worker(db, handlers(work), wakeup=wakeup)
    async with working(worker, wakeup=wakeup):
        await until(lambda: worker.health.detail == "working")
        assert worker._pause(Cycle()) <= 10
        rows(
            dsn,
            """
            INSERT INTO duly.jobs (name, entity_id, run_at, due_at, created_at)
            SELECT 'work', 'untold', at, at, at FROM duly.now() AS at
            """,
        )
        assert await starts.of("untold", seconds=15) < timedelta(seconds=10)


async def test_a_retry_starts_when_it_is_due(dsn: str) -> None:
    """E3.3, E3.6: nobody notifies a retry; the worker knows its time."""
    db, starts, _ = deaf_but_patient(dsn)

    async def work(ctx: JobContext) -> None:
        if ctx.retry_count == 0:
            raise RuntimeError("once")
        starts.note(ctx)

    wakeup = Wakeup(db)
    async with working(Worker(db, handlers(work, backoff_seconds=[1]), wakeup=wakeup), wakeup=wakeup):
        rows(dsn, "SELECT duly.schedule('work', 'again')")
        assert timedelta(seconds=1) <= await starts.of("again") < timedelta(seconds=2)
    await db.close()


async def test_nothing_runs_before_its_time(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.3: the database's clock decides, to the microsecond; this machine's clock decides nothing."""
    clock.freeze(value(dsn, "SELECT timestamptz '2031-01-01 00:00:00+00'"))
    seen: list[str | None] = []

    async def work(ctx: JobContext) -> None:
        seen.append(ctx.entity_id)

    async with db.transaction() as tx:
        await schedule(tx, "work", "due", clock.now())
        await schedule(tx, "work", "not yet", clock.now() + timedelta(microseconds=1))
    await Worker(db, handlers(work)).run_once()
    assert seen == ["due"]
    clock.advance(microseconds=1)
    await Worker(db, handlers(work)).run_once()
    assert seen == ["due", "not yet"]
