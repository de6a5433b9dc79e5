"""E4.5, E3.16: the nightly clean-up forgets keys whose time is over, in bounded batches, and no others."""

from __future__ import annotations

from datetime import UTC, datetime

from duly.app import Duly
from duly.db import Database
from duly.jobs.worker import Worker
from duly.operate import maintenance
from duly.schedules.tick import Scheduler
from duly.testing import BusinessClock
from tests.support import rows, value

NAME = "duly.forget-idempotency-keys"


def make_keys(dsn: str, count: int, *, hours_left: int) -> None:
    rows(
        dsn,
        """INSERT INTO duly.idempotency_keys
           SELECT 'alice', %(hours)s || '-' || n, sha256('x'), 200, '[]', '', duly.now(),
                  duly.now() + make_interval(hours => %(hours)s) FROM generate_series(1, %(count)s) AS n""",
        {"count": count, "hours": hours_left},
    )


def left(dsn: str) -> int:
    return int(value(dsn, "SELECT count(*) FROM duly.idempotency_keys"))


async def test_only_keys_whose_time_is_over_are_forgotten(db: Database, dsn: str) -> None:
    """E4.5: to the hour."""
    make_keys(dsn, 3, hours_left=0)
    make_keys(dsn, 2, hours_left=-1)
    make_keys(dsn, 4, hours_left=1)
    async with db.transaction() as tx:
        assert await maintenance.forget_idempotency_keys(tx) == "forgot 5 idempotency keys"
    assert rows(dsn, "SELECT DISTINCT split_part(key, '-', 1) FROM duly.idempotency_keys") == [("1",)]
    assert left(dsn) == 4


async def test_a_run_is_bounded_and_queues_the_next(db: Database, dsn: str) -> None:
    """E3.16: a night's limit does not let a busy table grow from night to night."""
    make_keys(dsn, 25, hours_left=-1)
    async with db.transaction() as tx:
        said = await maintenance.forget_idempotency_keys(tx, batch=5, batches=2)
    assert said == "forgot 10 idempotency keys; more remain, and the next run is queued"
    assert left(dsn) == 15
    assert rows(dsn, "SELECT name FROM duly.jobs") == [(NAME,)]


async def test_the_oldest_go_first(db: Database, dsn: str) -> None:
    for hours in (-1, -3, -2):
        make_keys(dsn, 2, hours_left=hours)
    async with db.transaction() as tx:
        await maintenance.forget_idempotency_keys(tx, batch=4, batches=1)
    assert rows(dsn, "SELECT key FROM duly.idempotency_keys ORDER BY 1") == [("-1-1",), ("-1-2",)]


async def test_it_is_a_schedule_like_any_other_and_runs_at_night(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E4.5, E3.16: seeded by the migration, once a night, handled by every application."""
    clock.freeze(datetime(2026, 3, 2, 3, 50, tzinfo=UTC))
    make_keys(dsn, 3, hours_left=-1)
    make_keys(dsn, 1, hours_left=1)
    app = Duly()
    await app.prepare(db)
    scheduler, worker = Scheduler(db), Worker(db, app.handlers)
    await scheduler.run_once()
    await worker.run_once()
    before = left(dsn)
    clock.freeze(datetime(2026, 3, 2, 3, 57, 30, tzinfo=UTC))
    await scheduler.run_once()
    await worker.run_once()
    assert (before, left(dsn)) == (4, 1)
    message = value(dsn, "SELECT message FROM duly.executions WHERE name = %(name)s", {"name": NAME})
    assert message == "forgot 3 idempotency keys"
