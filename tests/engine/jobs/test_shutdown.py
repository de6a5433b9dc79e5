"""A clean stop: what has not started goes back at once, what runs may finish, and nobody waits for a lease (E3.5)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from duly.db import Database, Tx
from duly.jobs import worker as worker_module
from duly.jobs.handlers import JobContext
from duly.jobs.worker import Worker
from duly.settings import Settings
from duly.wakeup import Wakeup
from tests.engine.jobs.witness import (
    EFFECT,
    be_deaf,
    effects,
    is_empty,
    make_effects,
    outcomes,
    queue,
    schedule_numbers,
    schedule_twins,
    until,
    working,
)  # fmt: skip
from tests.support import handlers, rows, value


@pytest.fixture
async def hasty(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    """A database whose workers get a tenth of a second to finish."""
    monkeypatch.setattr(worker_module, "STOP_SECONDS", 0.3)
    db = Database(dsn, settings=Settings(shutdown_grace_seconds=0.1))
    yield db
    await db.close()


async def test_jobs_that_have_not_started_are_released_at_once(db: Database, dsn: str) -> None:
    """E3.5: while the running one still runs, the others are pending again, as if they had never been claimed."""
    began, may_end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        await may_end.wait()

    schedule_numbers(dsn, "work", 2)
    before = rows(dsn, "SELECT retry_count, run_at, snoozes FROM duly.jobs WHERE entity_id = '2'")
    async with working(Worker(db, handlers(work), concurrency=1)) as stop:
        await asyncio.wait_for(began.wait(), 10)
        await until(lambda: value(dsn, "SELECT count(*) FROM duly.queue WHERE status = 'Running'") == 2)
        stop.set()
        await until(lambda: queue(dsn) == [("1", "Running", 0), ("2", "Pending", 0)], what="the second went back")
        may_end.set()
    assert queue(dsn) == [("2", "Pending", 0)]
    assert outcomes(dsn) == [("1", "done", 0)]
    assert rows(dsn, "SELECT retry_count, run_at, snoozes FROM duly.jobs") == before
    rows(dsn, "SELECT duly.schedule('work', '2', duly.now() + interval '1 hour')")
    assert queue(dsn) == [("2", "Pending", 0)]


async def test_a_released_job_wakes_another_worker(db: Database, dsn: str) -> None:
    """E3.3, E3.5: it does not wait for anybody's poll."""
    began, may_end, taken = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        await may_end.wait()

    async def same_work() -> None:
        taken.set()

    schedule_numbers(dsn, "work", 2)
    patient = Database(dsn, settings=Settings(poll_seconds=60))
    wakeup = Wakeup(patient)
    async with working(Worker(db, handlers(work), concurrency=1)) as stop:
        await asyncio.wait_for(began.wait(), 10)
        await until(lambda: value(dsn, "SELECT count(*) FROM duly.queue WHERE status = 'Running'") == 2)
        other = Worker(patient, {"work": handlers(same_work)["same_work"]}, wakeup=wakeup)
        async with working(other, wakeup=wakeup):
            await until(lambda: other.health.detail == "working")
            stop.set()
            await asyncio.wait_for(taken.wait(), 10)
            may_end.set()
    await patient.close()
    assert is_empty(dsn)


async def test_running_jobs_finish_within_the_grace(db: Database, dsn: str) -> None:
    """E3.5: a stop interrupts nobody who is quick enough, and nothing new begins."""
    make_effects(dsn)
    began, may_end = asyncio.Event(), asyncio.Event()

    async def work(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
        began.set()
        await may_end.wait()

    schedule_numbers(dsn, "work", 1)
    async with working(Worker(db, handlers(work))) as stop:
        await asyncio.wait_for(began.wait(), 10)
        stop.set()
        rows(dsn, "SELECT duly.schedule('work', 'too late')")
        may_end.set()
    assert effects(dsn) == {"1": 1}
    assert queue(dsn) == [("too late", "Pending", 0)]


async def test_a_job_that_outlasts_the_grace_is_released_without_a_retry(hasty: Database, dsn: str) -> None:
    """E3.5: its writes are rolled back, it is due again at once, and the stop is not its fault."""
    make_effects(dsn)
    began = asyncio.Event()

    async def work(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
        began.set()
        await asyncio.Event().wait()

    schedule_numbers(dsn, "work", 1)
    async with working(Worker(hasty, handlers(work, max_retries=0))):
        await asyncio.wait_for(began.wait(), 10)
    assert effects(dsn) == {}
    assert queue(dsn) == [("1", "Pending", 0)]
    assert outcomes(dsn) == [("1", "released", 0)]
    assert rows(dsn, "SELECT waits, run_at <= duly.now(), lease_token FROM duly.jobs") == [("released", True, None)]


async def test_a_thread_that_outlasts_the_grace_is_fenced(hasty: Database, dsn: str) -> None:
    """E3.5: its job runs elsewhere meanwhile; what the thread writes in the end rolls back."""
    make_effects(dsn)
    began, let_go, ended = threading.Event(), threading.Event(), threading.Event()

    def work(ctx: JobContext, tx: Session) -> None:
        first = not began.is_set()
        tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": "first" if first else "second"})
        began.set()
        if first:
            let_go.wait(20)
            ended.set()

    schedule_numbers(dsn, "work", 1)
    async with working(Worker(hasty, handlers(work))):
        await until(began.is_set)
    assert queue(dsn) == [("1", "Pending", 0)]
    await Worker(hasty, handlers(work)).run_once()
    let_go.set()
    await until(ended.is_set)
    open_ = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in tr%'"
    await until(lambda: value(dsn, open_) == 0, what="the thread's transaction is over")
    assert rows(dsn, "SELECT run FROM effects") == [("second",)]


def slots() -> list[asyncio.Task[Any]]:
    """The tasks of this loop in which handlers run."""
    return [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "_slot"]


async def test_a_handler_that_ignores_its_end_does_not_hold_up_the_stop(hasty: Database, dsn: str) -> None:
    """E3.5: the stop is bounded, whatever a handler does; when that returns at last, nothing of the worker is left."""
    began, let_go = asyncio.Event(), asyncio.Event()

    async def deaf() -> None:
        began.set()
        await be_deaf(let_go.is_set)

    schedule_numbers(dsn, "deaf", 1)
    stop = asyncio.Event()
    running = asyncio.create_task(Worker(hasty, handlers(deaf)).run(stop))
    await asyncio.wait_for(began.wait(), 10)
    stop.set()
    await asyncio.wait([running], timeout=5)
    ended = running.done()
    let_go.set()
    await asyncio.wait([running, *slots()], timeout=2)
    left = slots()
    for task in left:
        task.cancel()
    assert ended, "the worker waits for a handler that will not end"
    assert left == [], "a slot that outlived its worker keeps the process from ending"


async def test_a_stop_without_a_database_ends_too(hasty: Database, dsn: str) -> None:
    """E3.5, E3.15: leases end by themselves; the process does not wait for a database to say goodbye to."""
    began = asyncio.Event()

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    schedule_numbers(dsn, "work", 3)
    worker = Worker(hasty, handlers(work), concurrency=1)
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    await asyncio.wait_for(began.wait(), 10)
    away = hasty.dsn
    hasty.dsn = away.replace("t_", "gone_")
    rows(away, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE 'duly%'")
    began_to_stop = time.monotonic()
    stop.set()
    await asyncio.wait_for(running, 20)
    assert time.monotonic() - began_to_stop < 10
    hasty.dsn = away


# -- two of one (name, entity) held at once ------------------------------------------------------------------------


async def test_two_jobs_of_one_entity_are_both_released(db: Database, dsn: str) -> None:
    """E3.2, E3.5: only one of them can be the unique one again; that keeps neither from going back."""
    began, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def work() -> None:
        began.release()
        await may_end.wait()

    schedule_numbers(dsn, "work", 2, priority=1)
    schedule_twins(dsn)
    async with working(Worker(db, handlers(work), concurrency=2)) as stop:
        await began.acquire()
        await began.acquire()
        await until(lambda: value(dsn, "SELECT count(*) FROM duly.queue WHERE status = 'Running'") == 4)
        stop.set()
        try:
            await until(
                lambda: queue(dsn)[2:] == [("twin", "Pending", 0), ("twin", "Pending", 0)],
                seconds=5,
                what="both went back",
            )
        finally:
            may_end.set()
    rows(dsn, "SELECT duly.schedule('work', 'twin')")
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE entity_id = 'twin'") == 1


async def test_a_timer_that_is_being_set_elsewhere_does_not_keep_a_job_from_being_released(
    db: Database, dsn: str
) -> None:
    """E3.2, E3.5: the new timer has the key; the released job goes back without it."""
    began, may_end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        await may_end.wait()

    schedule_numbers(dsn, "work", 2)
    async with working(Worker(db, handlers(work), concurrency=1)) as stop:
        await asyncio.wait_for(began.wait(), 10)
        await until(lambda: value(dsn, "SELECT count(*) FROM duly.queue WHERE status = 'Running'") == 2)
        with psycopg.connect(dsn) as setting:
            setting.execute("SELECT duly.schedule('work', '2')")
            stop.set()
            blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'transactionid'"
            await until(
                lambda: value(dsn, blocked) or ("2", "Pending", 0) in queue(dsn), what="the release waits or is done"
            )
        may_end.set()
    assert queue(dsn) == [("2", "Pending", 0), ("2", "Pending", 0)]
