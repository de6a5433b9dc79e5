"""After downtime, with unknown names, and in one bounded cycle (E3.10, E3.12, E3.13)."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from duly.db import Database, Tx, is_disconnect
from duly.jobs.handlers import JobContext
from duly.jobs.schedule import NewJob, schedule, schedule_many
from duly.jobs.worker import Worker
from duly.testing import BusinessClock
from tests.engine.jobs.witness import is_empty, outcomes, queue, schedule_numbers, until, working
from tests.support import handlers, rows, value

START = datetime(2030, 6, 1, 12, tzinfo=UTC)


async def noop() -> None:
    """Nothing to do."""


# -- unknown names -------------------------------------------------------------------------------------------------


async def test_a_job_without_a_handler_is_left_untouched_with_a_warning(db: Database, dsn: str) -> None:
    """E3.10: its row does not change, the worker says so and goes on with what it knows."""
    async with db.transaction() as tx:
        await schedule(tx, "unheard-of", "u", priority=1)
        await schedule(tx, "noop", "n")
    before = rows(dsn, "SELECT * FROM duly.jobs WHERE name = 'unheard-of'")
    with capture_logs() as logs:
        worked = await Worker(db, handlers(noop)).run_once()
    assert worked.done == 1
    assert rows(dsn, "SELECT * FROM duly.jobs") == before
    [warning] = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["name"] == "unheard-of"


async def test_a_worker_that_knows_the_name_runs_what_others_left(db: Database, dsn: str) -> None:
    """E3.10: two versions of workers at once: each job runs where its name is known."""

    async def newer() -> None: ...

    async with db.transaction() as tx:
        await schedule(tx, "newer", "u")
        await schedule(tx, "noop", "n")
    async with working(Worker(db, handlers(noop))):
        await until(lambda: outcomes(dsn) == [("n", "done", 0)])
        await Worker(db, handlers(newer)).run_once()
    assert sorted(outcomes(dsn)) == [("n", "done", 0), ("u", "done", 0)]


async def test_a_worker_without_any_handler_neither_claims_nor_crashes(db: Database, dsn: str) -> None:
    """E3.10: an empty registry is a worker that does nothing."""
    rows(dsn, "SELECT duly.schedule('noop', 'n')")
    assert (await Worker(db, {}).run_once()).done == 0
    assert queue(dsn) == [("n", "Pending", 0)]


async def test_what_another_worker_of_this_process_runs_is_no_warning(db: Database, dsn: str) -> None:
    """E3.10: webhooks have slots of their own; neither of the two workers warns of what the other has handlers for."""
    rows(dsn, "SELECT duly.schedule('sending', 's')")
    with capture_logs() as logs:
        await Worker(db, handlers(noop), elsewhere=["sending"]).run_once()
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == []
    assert queue(dsn) == [("s", "Pending", 0)]


# -- downtime ------------------------------------------------------------------------------------------------------


async def late_jobs(db: Database, clock: BusinessClock) -> None:
    """Forty timers, given in a wild order, one for each of the first forty minutes; then an hour of downtime."""
    clock.freeze(START)
    minutes = sorted(range(40), key=lambda minute: (minute * 7) % 40)
    async with db.transaction() as tx:
        await schedule_many(tx, [NewJob("work", minute, START + timedelta(minutes=minute)) for minute in minutes])
    clock.advance(hours=1)


async def test_a_backlog_is_worked_off_oldest_first(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.12: in the order in which the jobs were due, not in the order in which they were written."""
    started: list[int] = []

    async def work(ctx: JobContext) -> None:
        started.append(int(str(ctx.entity_id)))

    await late_jobs(db, clock)
    await Worker(db, handlers(work), concurrency=1).run_once()
    assert started == list(range(40))


async def test_a_backlog_is_reported_with_its_count_its_oldest_and_its_newest(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E3.12: logged before it is worked off, and told to whoever called run_once."""

    async def work() -> None: ...

    await late_jobs(db, clock)
    with capture_logs() as logs:
        worked = await Worker(db, handlers(work)).run_once()
    [found] = [entry for entry in logs if entry["event"] == "backlog_found"]
    assert found["count"] == 40
    assert datetime.fromisoformat(found["oldest"]) == START
    assert datetime.fromisoformat(found["newest"]) == START + timedelta(minutes=39)
    assert worked.facts["backlog"] == 40
    assert worked.facts["done"] == 40


async def test_the_long_running_worker_reports_a_backlog_when_it_starts(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E3.12: the restart after downtime is when it matters; what is due just now is no backlog."""

    async def work() -> None: ...

    await late_jobs(db, clock)
    with capture_logs() as logs:
        async with working(Worker(db, handlers(work))):
            await until(lambda: is_empty(dsn))
    assert [entry["count"] for entry in logs if entry["event"] == "backlog_found"] == [40]
    rows(dsn, "SELECT duly.schedule('work', 'x')")
    with capture_logs() as logs:
        await Worker(db, handlers(work)).run_once()
    assert [entry for entry in logs if entry["event"] == "backlog_found"] == []


async def test_a_backlog_is_no_stampede(db: Database, dsn: str) -> None:
    """E3.12: however much waits, ten run at once by default, and no more is claimed than will soon run."""
    running = most_running = 0
    held: list[int] = []

    async def work() -> None:
        nonlocal running, most_running
        running += 1
        most_running = max(most_running, running)
        leased = "SELECT count(*) FROM duly.jobs WHERE lease_token IS NOT NULL"
        held.append(await asyncio.to_thread(value, dsn, leased))
        running -= 1

    schedule_numbers(dsn, "work", 120)
    await Worker(db, handlers(work)).run_once()
    assert most_running == 10
    assert held[0] <= 20
    assert len(held) == 120
    assert is_empty(dsn)


# -- run_once ------------------------------------------------------------------------------------------------------


async def test_run_once_takes_a_thousand_jobs_at_most(db: Database, dsn: str) -> None:
    """E3.12, E3.13: one bounded cycle; the rest waits, untouched, for the next."""
    schedule_numbers(dsn, "noop", 2_500)
    worked = await Worker(db, handlers(noop)).run_once()
    assert worked.done <= 1_000
    assert worked.facts["done"] == worked.done
    rest = rows(dsn, "SELECT status, count(*) FROM duly.queue GROUP BY status")
    assert rest == [("Pending", 2_500 - worked.done)]


async def test_repeating_run_once_is_what_the_worker_does(db: Database, dsn: str) -> None:
    """E3.13: repeated, it works everything off, and each time it tells what that time did."""
    schedule_numbers(dsn, "noop", 1_200)
    worker = Worker(db, handlers(noop))
    done = []
    while (worked := await worker.run_once()).done:
        assert worked.facts["claimed"] == worked.done
        assert worked.facts["done"] == worked.done
        done.append(worked.done)
    assert sum(done) == 1_200
    assert is_empty(dsn)


async def test_run_once_ends_although_a_job_fails_and_is_due_again_at_once(db: Database, dsn: str) -> None:
    """E3.13: bounded, whatever the handlers do."""

    async def work() -> None:
        raise RuntimeError("again")

    async with db.transaction() as tx:
        await schedule(tx, "work", "e", max_retries=1000, backoff=[0])
    async with asyncio.timeout(60):
        worked = await Worker(db, handlers(work)).run_once()
    assert 1 <= worked.done <= 1_000
    assert queue(dsn)[0][:2] == ("e", "Pending")


async def test_run_once_leaves_the_future_alone(db: Database, dsn: str) -> None:
    """E3.13: it takes what is due now and does not wait for what comes."""
    rows(dsn, "SELECT duly.schedule('noop', 'later', duly.now() + interval '1 hour')")
    async with asyncio.timeout(10):
        assert (await Worker(db, handlers(noop)).run_once()).done == 0
    assert queue(dsn) == [("later", "Pending", 0)]


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("duly-")]


async def test_run_once_hangs_up(dsn: str) -> None:
    """E3.13: afterwards no connection and no thread of the worker is left."""

    async def work(tx: Tx) -> None:
        await tx.execute(text("SELECT 1"))

    def in_thread(ctx: JobContext) -> None:
        threads.extend(_threads())

    threads: list[str] = []
    db = Database(dsn)
    rows(dsn, "SELECT duly.schedule('work', 'a'), duly.schedule('in_thread', 'b'), duly.schedule('noop', 'c')")
    assert (await Worker(db, handlers(work, in_thread, noop), lease_seconds=1).run_once()).done == 3
    assert "duly-heartbeat" in threads
    connections = (
        "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await until(lambda: rows(dsn, connections) == [], seconds=5, what="all connections are closed")
    await until(lambda: not _threads(), seconds=5, what="all threads have ended")
    await db.close()


async def test_an_error_of_run_once_reaches_its_caller(tmp_path: Any) -> None:
    """E3.13: a command that cannot do its work says so; only the long-running worker waits for the database."""
    db = Database(f"postgresql://postgres@/nowhere?host={tmp_path}")
    with pytest.raises(Exception) as raised:  # noqa: PT011 - any error will do, if it means that the database is away
        await Worker(db, handlers(noop)).run_once()
    assert is_disconnect(raised.value)
    await db.close()
