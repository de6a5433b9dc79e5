"""The lease: who holds a job, how long, who takes over, and why a zombie cannot write (E3.5)."""

from __future__ import annotations

import asyncio
import signal
import time
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from duly.db import Database, Tx
from duly.jobs import sql
from duly.jobs import worker as worker_module
from duly.jobs.handlers import JobContext
from duly.jobs.schedule import schedule
from duly.jobs.worker import Worker
from tests.engine.jobs.process import Order, run
from tests.engine.jobs.witness import (
    effects,
    expire_leases,
    is_empty,
    make_effects,
    queue,
    terminate_backends,
    until,
    working,
)  # fmt: skip
from tests.support import handlers, rows, value


async def schedule_work(db: Database, **options: Any) -> int:
    async with db.transaction() as tx:
        return await schedule(tx, "work", "e", **options)


async def test_a_claimed_job_carries_a_lease_of_five_minutes(db: Database, dsn: str) -> None:
    """E3.5: lock_expires_at is five minutes ahead by default, and says whose it is."""
    seen: list[Any] = []

    async def work() -> None:
        seen.extend(
            rows(
                dsn,
                """
                SELECT status, leased_by, extract(epoch FROM lock_expires_at - clock_timestamp())::float
                FROM duly.queue
                """,
            )
        )

    await schedule_work(db)
    worker = Worker(db, handlers(work))
    await worker.run_once()
    [(status, leased_by, seconds)] = seen
    assert (status, leased_by) == ("Running", worker.identity)
    assert 290 < seconds <= 300


async def test_a_job_of_a_dead_worker_is_taken_over_when_its_lease_ends(db: Database, dsn: str) -> None:
    """E3.5: killed with -9, it is nobody's until the lease ends; then it is pending with one more retry."""
    await schedule_work(db)
    assert run(Order(dsn, "worker.before_handler=kill9")) == -signal.SIGKILL
    retries: list[int] = []

    async def work(ctx: JobContext) -> None:
        retries.append(ctx.retry_count)

    assert (await Worker(db, handlers(work)).run_once()).done == 0
    assert queue(dsn) == [("e", "Running", 0)]
    dead = value(dsn, "SELECT leased_by FROM duly.jobs")
    expire_leases(dsn)
    assert queue(dsn) == [("e", "Failed", 0)]
    successor = Worker(db, handlers(work))
    await successor.run_once()
    assert retries == [1]
    assert is_empty(dsn)
    assert rows(dsn, "SELECT outcome, succeeded, retry_count, worker FROM duly.executions ORDER BY lease_token") == [
        ("lost", False, 0, dead),
        ("done", True, 1, successor.identity),
    ]


async def test_a_lost_run_is_as_complete_in_the_history_as_any_other(db: Database, dsn: str) -> None:
    """E3.5, E3.8: the run that was lost has its claim as its start, its own token, and a sentence."""
    job_id = await schedule_work(db)
    assert run(Order(dsn, "worker.before_handler=kill9")) == -signal.SIGKILL
    claimed_at, token = rows(dsn, "SELECT claimed_at, lease_token FROM duly.jobs")[0]
    expire_leases(dsn)

    async def work() -> None: ...

    await Worker(db, handlers(work)).run_once()
    [found] = rows(
        dsn,
        """
        SELECT job_id, name, entity_id, source, started_at, lease_token, message, completed_at > started_at
        FROM duly.executions WHERE outcome = 'lost'
        """,
    )
    assert found == (
        job_id, "work", "e", "Deferred", claimed_at, token, "the lease expired: the worker died or stalled", True
    )  # fmt: skip


async def test_a_handler_that_kills_its_process_ends_in_the_dead_letters(db: Database, dsn: str) -> None:
    """E3.5, E3.7: each death counts as an attempt; neighbours are worked on once; the killer does not run for ever."""
    make_effects(dsn)
    async with db.transaction() as tx:
        await schedule(tx, "poison", "p", max_retries=1, priority=1)
        await schedule(tx, "work", "n", priority=4)
    order = Order(dsn, concurrency=1, forever=False)
    for end in (-signal.SIGKILL, -signal.SIGKILL, 0):
        assert run(order) == end
        expire_leases(dsn)
    assert rows(dsn, "SELECT entity_id, retry_count, reason, error_kind FROM duly.dead_letters") == [
        ("p", 2, "worker_died", "WorkerDied")
    ]
    assert is_empty(dsn)
    assert effects(dsn) == {"n": 1}


# -- the heartbeat -------------------------------------------------------------------------------------------------


async def test_the_lease_is_renewed_while_the_handler_blocks_the_event_loop(db: Database, dsn: str) -> None:
    """E3.5: renewal has a thread of its own; nobody takes over from a handler that lives, however rude it is."""
    taken: list[Any] = []

    async def work() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            ends: set[datetime] = set()
            deadline = time.monotonic() + 15
            while len(ends) < 4 and time.monotonic() < deadline:  # the loop is blocked all the while: no await here
                found = connection.execute("SELECT lease_expires_at FROM duly.jobs").fetchone()
                assert found is not None
                ends.add(found[0])
                claim = {"names": ["work"], "limit": 1, "worker": "thief", "lease_seconds": 60}
                taken.extend(connection.execute(sql.CLAIM_JOBS.percent.encode(), claim).fetchall())
        assert max(ends) - min(ends) >= timedelta(seconds=0.9)

    await schedule_work(db)
    worker = Worker(db, handlers(work, max_retries=0), lease_seconds=1)
    await worker.run_once()
    assert worker.counts == {"done": 1}
    assert taken == []


async def test_a_heartbeat_that_lost_its_connection_goes_on_with_another(db: Database, dsn: str) -> None:
    """E3.5, E3.15: the lease is renewed after the cut as before it."""
    expires = "SELECT lease_expires_at FROM duly.jobs"

    async def work() -> None:
        for _ in range(2):
            before = value(dsn, expires)
            await until(partial(is_later, before), what="the lease is renewed")
            assert len(terminate_backends(dsn, "application_name = 'duly-heartbeat'")) == 1
        before = value(dsn, expires)
        await until(partial(is_later, before), what="the lease is renewed again")

    def is_later(before: datetime) -> bool:
        return bool(value(dsn, expires) > before)

    await schedule_work(db)
    worker = Worker(db, handlers(work, max_retries=0), lease_seconds=2)
    await worker.run_once()
    assert worker.counts == {"done": 1}


async def test_a_job_that_waits_in_this_process_for_a_slot_keeps_its_lease(db: Database, dsn: str) -> None:
    """E3.5: what was claimed ahead is renewed like what runs."""
    done: list[str | None] = []

    async def work(ctx: JobContext) -> None:
        if not done:
            before = value(dsn, "SELECT min(lease_expires_at) FROM duly.jobs")
            assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE lease_token IS NOT NULL") == 2
            await until(lambda: value(dsn, "SELECT min(lease_expires_at) FROM duly.jobs") > before)
        done.append(ctx.entity_id)

    async with db.transaction() as tx:
        await schedule(tx, "work", "1")
        await schedule(tx, "work", "2")
    worker = Worker(db, handlers(work), lease_seconds=1, concurrency=1)
    await worker.run_once()
    assert worker.counts == {"done": 2}


async def test_a_handler_that_blocks_the_loop_past_its_time_limit_loses_its_lease(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3.5: nobody in this process can end it, so the heartbeat stops renewing; another worker may take over."""
    monkeypatch.setattr(worker_module, "ABANDON_AFTER_SECONDS", 0.3)
    seen: list[str] = []

    async def work() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and "Failed" not in seen:  # the loop is blocked: no await here
                found = connection.execute("SELECT status FROM duly.queue").fetchone()
                assert found is not None
                seen.append(found[0])

    await schedule_work(db)
    await Worker(db, handlers(work, timeout_seconds=1.5), lease_seconds=0.6).run_once()
    assert seen[0] == "Running"
    assert seen[-1] == "Failed"


async def test_what_a_handler_reports_cannot_cost_others_their_leases(db: Database, dsn: str) -> None:
    """E3.5, E3.9: a progress message that PostgreSQL cannot store is stored as far as it can be."""
    reported, let_go = asyncio.Event(), asyncio.Event()

    async def odd(ctx: JobContext) -> None:
        ctx.report_progress("half \x00 \ud800 way")
        reported.set()
        await let_go.wait()

    rows(dsn, "SELECT duly.schedule('odd', 'o')")
    async with working(Worker(db, handlers(odd), lease_seconds=1)):
        await asyncio.wait_for(reported.wait(), 10)
        await until(lambda: value(dsn, "SELECT progress FROM duly.jobs") == "half \N{REPLACEMENT CHARACTER} ? way")
        let_go.set()
        await until(lambda: value(dsn, "SELECT count(*) FROM duly.jobs") == 0)
    assert value(dsn, "SELECT outcome FROM duly.executions") == "done"


async def test_jobs_claimed_ahead_of_slow_ones_go_back_to_others(db: Database, dsn: str) -> None:
    """E3.4: whoever was quick and claimed far ahead does not hoard when its handlers become slow."""
    began, let_go = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        began.set()
        await let_go.wait()

    rows(dsn, "SELECT duly.schedule('slow', n::text) FROM generate_series(1, 20) AS n")
    worker = Worker(db, handlers(slow), concurrency=1)
    worker._mean_seconds = 0.0001  # as after many quick jobs
    async with working(worker):
        await asyncio.wait_for(began.wait(), 10)
        running = "SELECT count(*) FROM duly.jobs WHERE lease_token IS NOT NULL"
        await until(lambda: value(dsn, running) == 1, seconds=15, what="all but the one that runs are given back")
        let_go.set()
        await until(lambda: value(dsn, "SELECT count(*) FROM duly.jobs") == 0, seconds=30)
    assert value(dsn, "SELECT count(*) FROM duly.executions WHERE outcome <> 'done'") == 0


async def test_values_of_a_failed_statement_are_not_kept(db: Database, dsn: str) -> None:
    """FAULTS: personal data never reaches dead letters, alerts or the history through an error's text."""
    rows(dsn, "CREATE TABLE people (email text PRIMARY KEY); INSERT INTO people VALUES ('canary@example.org')")

    async def work(tx: Tx) -> None:
        await tx.execute(text("INSERT INTO people VALUES (:email)"), {"email": "canary@example.org"})

    rows(dsn, "SELECT duly.schedule('work', 'w')")
    await Worker(db, handlers(work, max_retries=0)).run_once()
    kept = rows(
        dsn,
        "SELECT error FROM duly.dead_letters UNION ALL SELECT message FROM duly.alerts"
        " UNION ALL SELECT message FROM duly.executions",
    )
    assert len(kept) == 3
    for (message,) in kept:
        assert message.startswith("IntegrityError: duplicate key value violates unique constraint")
        assert "canary" not in message
