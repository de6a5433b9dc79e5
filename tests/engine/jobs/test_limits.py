"""Who goes first, how many at once, and how long: priorities, limits by name, time limits, slow neighbours (E3.4)."""

from __future__ import annotations

import asyncio
import signal
import threading
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from duly.db import Database, Tx, fetch
from duly.jobs import settle, sql
from duly.jobs import worker as worker_module
from duly.jobs.claim import Claims
from duly.jobs.handlers import JobContext
from duly.jobs.outcomes import Fail, Outcome, Snooze
from duly.jobs.schedule import schedule
from duly.jobs.settle import Settlement
from duly.jobs.worker import Worker
from tests.engine.jobs.process import Order, run
from tests.engine.jobs.witness import (
    EFFECT,
    be_deaf,
    effects,
    expire_leases,
    is_empty,
    make_effects,
    outcomes,
    queue,
    schedule_numbers,
    until,
    working,
)  # fmt: skip
from tests.support import handlers, rows, value

# -- priorities ----------------------------------------------------------------------------------------------------


async def test_urgent_work_goes_first_and_the_oldest_of_equals(db: Database, dsn: str) -> None:
    """E3.4: 1 before 2 before 3 before 4, across names; within a priority by time."""
    started: list[str | None] = []

    async def red(ctx: JobContext) -> None:
        started.append(ctx.entity_id)

    async def blue(ctx: JobContext) -> None:
        started.append(ctx.entity_id)

    async with db.transaction() as tx:
        for priority in (3, 1, 4, 2):
            for name in ("red", "blue"):
                for age in (1, 2):
                    run_at = value(dsn, f"SELECT duly.now() - interval '{age} minutes'")
                    await schedule(tx, name, f"{priority} {-age} {name}", run_at, priority=priority)
    await Worker(db, handlers(red, blue), concurrency=1).run_once()
    assert [str(entity).split()[0] for entity in started] == sorted("1122333344441122")
    for name in ("red", "blue"):
        mine = [entity for entity in started if str(entity).endswith(name)]
        assert [str(entity).split()[1] for entity in mine] == ["-2", "-1"] * 4


async def test_urgent_work_of_one_name_goes_before_other_work_of_another(db: Database, dsn: str) -> None:
    """E3.4: names take turns within a priority, never across."""
    started: list[str] = []

    async def minor() -> None:
        started.append("minor")

    async def urgent() -> None:
        started.append("urgent")

    schedule_numbers(dsn, "minor", 6, priority=4)
    schedule_numbers(dsn, "urgent", 6, priority=1)
    await Worker(db, handlers(minor, urgent), concurrency=1).run_once()
    assert started == ["urgent"] * 6 + ["minor"] * 6


async def test_a_long_queue_of_one_name_does_not_starve_another(db: Database, dsn: str) -> None:
    """E3.4: every name gets its turn."""
    started: list[str] = []

    async def many(ctx: JobContext) -> None:
        started.append("many")

    async def few(ctx: JobContext) -> None:
        started.append("few")

    schedule_numbers(dsn, "many", 200)
    rows(dsn, "SELECT duly.schedule('few', 'f')")
    await Worker(db, handlers(many, few), concurrency=2).run_once()
    assert started.index("few") < 20


async def test_a_long_queue_of_one_name_does_not_starve_a_limited_one(db: Database, dsn: str) -> None:
    """E3.4: also when the other may run only so often at once, and is more urgent."""
    started: list[str] = []

    async def many(ctx: JobContext) -> None:
        started.append("many")

    async def few(ctx: JobContext) -> None:
        started.append("few")

    schedule_numbers(dsn, "many", 200)
    rows(dsn, "SELECT duly.schedule('few', 'f', priority => 1)")
    known = handlers(many) | handlers(few, limit=1)
    await Worker(db, known, concurrency=2).run_once()
    assert started.index("few") < 20


# -- so many of a name at once, everywhere -------------------------------------------------------------------------


class Gauge:
    """How many run now, and how many ran at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_limit_holds_across_four_workers(db: Database, dsn: str, limit: int) -> None:
    """E3.4: as many run at once as the limit says, and never one more, whoever runs them."""
    make_effects(dsn)
    gauge = Gauge()

    async def work(ctx: JobContext, tx: Tx) -> None:
        with gauge:
            await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
            await tx.execute(text("SELECT pg_sleep(0.008 * (:number % 5))"), {"number": int(str(ctx.entity_id))})

    schedule_numbers(dsn, "work", 40)
    known = handlers(work, limit=limit)
    workers = [Worker(db, known, concurrency=4) for _ in range(4)]
    stop = asyncio.Event()
    running = [asyncio.create_task(worker.run(stop)) for worker in workers]
    await until(lambda: is_empty(dsn), seconds=40)
    stop.set()
    await asyncio.gather(*running)
    assert gauge.most == limit
    assert set(effects(dsn).values()) == {1}
    assert len(effects(dsn)) == 40


async def test_a_limit_holds_for_jobs_that_arrive_one_by_one(db: Database, dsn: str) -> None:
    """E3.4: each running job has a slot of its own; the one too many waits until a slot is free."""
    gauge, let_go = Gauge(), asyncio.Semaphore(0)

    async def work() -> None:
        with gauge:
            await let_go.acquire()

    def are_running(count: int) -> bool:
        return gauge.now == count

    worker = Worker(db, handlers(work, limit=2))
    async with working(worker):
        for number in range(1, 5):
            rows(dsn, f"SELECT duly.schedule('work', '{number}')")
            await until(partial(are_running, min(number, 2)))
        slots = rows(dsn, "SELECT slot FROM duly.jobs WHERE lease_token IS NOT NULL ORDER BY slot")
        assert slots == [(1,), (2,)]
        for _ in range(4):
            let_go.release()
        await until(lambda: is_empty(dsn))
    assert gauge.most == 2


@pytest.mark.parametrize("how", ["done", "snoozed", "failed", "retried"])
async def test_a_slot_is_free_again_however_the_run_ended(db: Database, dsn: str, how: str) -> None:
    """E3.4: success, snooze, dead letter, retry: the next one may run."""

    async def work(ctx: JobContext) -> Outcome | None:
        if ctx.entity_id == "1":
            if how == "snoozed":
                return Snooze(timedelta(hours=1))
            if how == "failed":
                return Fail("never")
            if how == "retried":
                raise RuntimeError("later")
        return None

    schedule_numbers(dsn, "work", 2)
    worker = Worker(db, handlers(work, limit=1, backoff_seconds=[3600]))
    await worker.run_once()
    await worker.run_once()
    assert ("2", "done", 0) in outcomes(dsn)
    assert rows(dsn, "SELECT count(*) FROM duly.jobs WHERE slot IS NOT NULL") == [(0,)]


async def test_the_slots_of_a_dead_worker_are_freed_with_its_leases(db: Database, dsn: str) -> None:
    """E3.4, E3.5: until the lease ends the slot is taken; then others run, and the lost job too."""
    schedule_numbers(dsn, "work", 3)
    make_effects(dsn)
    assert run(Order(dsn, "worker.before_handler=kill9", limit=1)) == -signal.SIGKILL

    async def work() -> None: ...

    worker = Worker(db, handlers(work, limit=1))
    assert (await worker.run_once()).done == 0
    assert rows(dsn, "SELECT count(*) FROM duly.jobs WHERE slot IS NOT NULL") == [(1,)]
    expire_leases(dsn)
    while (await worker.run_once()).done:
        pass
    assert is_empty(dsn)
    assert sorted(outcome for _, outcome, _ in outcomes(dsn)) == ["done", "done", "done", "lost"]


# -- so long and no longer -----------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's own patience, in tenths of a second instead of seconds."""
    monkeypatch.setattr(worker_module, "ABANDON_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(worker_module, "HOARD_SECONDS", 0.3)
    monkeypatch.setattr(worker_module, "WATCH_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
async def test_a_handler_that_hangs_is_ended_and_has_failed(db: Database, dsn: str) -> None:
    """E3.5, E3.9: its writes are rolled back, it is retried like any failure, and the history says why."""
    make_effects(dsn)

    async def work(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
        await asyncio.Event().wait()

    rows(dsn, "SELECT duly.schedule('work', 'e')")
    async with asyncio.timeout(10):
        await Worker(db, handlers(work, timeout_seconds=0.2)).run_once()
    assert queue(dsn) == [("e", "Pending", 1)]
    assert value(dsn, "SELECT message FROM duly.executions") == "TimeoutError: still running after 0.2 s"
    assert effects(dsn) == {}


@pytest.mark.usefixtures("impatient")
async def test_a_thread_that_hangs_is_fenced(db: Database, dsn: str) -> None:
    """E3.5: a thread cannot be ended; its run has failed, and what it writes later rolls back."""
    make_effects(dsn)
    let_go, ended = threading.Event(), threading.Event()

    def work(ctx: JobContext, tx: Session) -> None:
        tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
        let_go.wait(10)
        ended.set()

    rows(dsn, "SELECT duly.schedule('work', 'e')")
    async with asyncio.timeout(10):
        await Worker(db, handlers(work, timeout_seconds=0.2)).run_once()
    assert queue(dsn) == [("e", "Pending", 1)]
    let_go.set()
    await until(ended.is_set)
    busy = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%%'"
    await until(lambda: value(dsn, busy, {}) == 0, what="the thread's transaction is over")
    assert effects(dsn) == {}
    assert queue(dsn) == [("e", "Pending", 1)]


@pytest.mark.usefixtures("impatient")
async def test_a_handler_that_ignores_its_end_is_abandoned_and_others_go_on(db: Database, dsn: str) -> None:
    """E3.5: with a single slot; afterwards there is a single slot again, also when the deaf one returns."""
    gauge, let_go, returned = Gauge(), asyncio.Event(), asyncio.Event()

    async def deaf() -> None:
        await be_deaf(let_go.is_set)
        returned.set()

    async def work() -> None:
        with gauge:
            await asyncio.sleep(0.005)

    rows(dsn, "SELECT duly.schedule('deaf', 'd', priority => 1)")
    schedule_numbers(dsn, "work", 5)
    known = handlers(deaf, timeout_seconds=0.2) | handlers(work)
    worker = Worker(db, known, concurrency=1)
    async with working(worker):
        await until(lambda: value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'work'") == 0)
        assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'deaf'") == 1
        let_go.set()
        await asyncio.wait_for(returned.wait(), 5)
        schedule_numbers(dsn, "work", 20)
        await until(lambda: value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'work'") == 0)
    assert gauge.most == 1


@pytest.mark.usefixtures("impatient")
async def test_a_handler_that_ends_well_after_it_was_told_to_end_leaves_its_slot_intact(db: Database, dsn: str) -> None:
    """E3.5: it swallowed the request to end and returned; whatever the next handler does, the slot lives on."""

    async def swallows() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "well"
        return "never"

    async def leaks() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task

    async def work() -> None: ...

    rows(
        dsn,
        """
        SELECT duly.schedule('swallows', 's', priority => 1), duly.schedule('leaks', 'l', priority => 2),
               duly.schedule('work', 'w', priority => 3)
        """,
    )
    known = handlers(swallows, timeout_seconds=0.2) | handlers(leaks, work, max_retries=0)
    async with working(Worker(db, known, concurrency=1)):
        await until(lambda: is_empty(dsn), seconds=10, what="all three have run in the one slot")
    assert sorted(outcomes(dsn)) == [("l", "buried", 0), ("s", "done", 0), ("w", "done", 0)]


@pytest.mark.usefixtures("impatient")
async def test_a_job_does_not_wait_behind_a_slow_one_while_another_worker_is_free(db: Database, dsn: str) -> None:
    """E3.4: what one worker claimed ahead and cannot begin soon goes back, uncounted, to whoever has room."""
    began, may_end = asyncio.Event(), asyncio.Event()

    async def work(ctx: JobContext) -> None:
        if ctx.entity_id == "1":
            began.set()
            await may_end.wait()

    schedule_numbers(dsn, "work", 2)
    async with working(Worker(db, handlers(work), concurrency=1)):
        await asyncio.wait_for(began.wait(), 10)
        async with working(Worker(db, handlers(work), concurrency=1)):
            await until(lambda: outcomes(dsn) == [("2", "done", 0)], what="the second job is done by the other worker")
        may_end.set()
    assert outcomes(dsn)[0] == ("1", "done", 0)


async def test_a_synchronous_handler_does_not_block_the_others(db: Database, dsn: str) -> None:
    """E3.9: the plain function waits for something that only an asynchronous handler can give."""
    given = threading.Event()

    def waits() -> str:
        assert given.wait(10)
        return "given"

    async def gives() -> None:
        given.set()

    rows(dsn, "SELECT duly.schedule('waits', 'w', priority => 1), duly.schedule('gives', 'g', priority => 2)")
    worker = Worker(db, handlers(waits, gives), concurrency=2)
    async with asyncio.timeout(20):
        await worker.run_once()
    assert worker.counts == {"done": 2}


async def test_as_many_handlers_run_at_once_as_there_are_slots(db: Database, dsn: str) -> None:
    """E3.4: with transactions, without, and in threads; none waits for a connection of another's."""
    together: dict[str, asyncio.Barrier] = {"plain": asyncio.Barrier(12), "in_tx": asyncio.Barrier(12)}
    threads = threading.Barrier(12)

    async def plain() -> None:
        await together["plain"].wait()

    async def in_tx(tx: Tx) -> None:
        await tx.execute(text("SELECT 1"))
        await together["in_tx"].wait()

    def in_thread(tx: Session) -> None:
        tx.execute(text("SELECT 1"))
        threads.wait(10)

    for name in ("plain", "in_tx", "in_thread"):
        schedule_numbers(dsn, name, 12)
        worker = Worker(db, handlers(plain, in_tx, in_thread, max_retries=0), concurrency=12)
        async with asyncio.timeout(20):
            await worker.run_once()
        assert worker.counts == {"done": 12}, name


async def test_a_transaction_left_open_by_a_stopped_process_ends_by_itself(db: Database, dsn: str) -> None:
    """E3.5: a handler's transaction has an idle limit and a statement limit, in both kinds of handlers."""
    shown: dict[str, list[Any]] = {}
    limits = text("""
        SELECT current_setting('idle_in_transaction_session_timeout'), current_setting('statement_timeout')
    """)

    async def work(tx: Tx) -> None:
        shown["async"] = list((await tx.execute(limits)).one())

    def in_thread(tx: Session) -> None:
        shown["sync"] = list(tx.execute(limits).one())

    rows(dsn, "SELECT duly.schedule('work'), duly.schedule('in_thread')")
    await Worker(db, handlers(work, in_thread)).run_once()
    assert "0" not in shown["async"]
    assert "0" not in shown["sync"]


async def test_urgent_work_goes_first_within_one_claim_too(db: Database, dsn: str) -> None:
    """E3.4: a claim of many jobs of several names is worked off by priority, not name by name."""
    started: list[str] = []

    async def red(ctx: JobContext) -> None:
        started.append(str(ctx.entity_id))

    async def blue(ctx: JobContext) -> None:
        started.append(str(ctx.entity_id))

    for name in ("red", "blue"):
        schedule_numbers(dsn, name, 3, priority=4)
        rows(dsn, f"SELECT duly.schedule('{name}', 'urgent {name}', priority => 1)")
    worker = Worker(db, handlers(red, blue), concurrency=1)
    worker._mean_seconds = 0.0001  # as after many quick jobs: it claims far ahead
    await worker.run_once()
    assert sorted(started[:2]) == ["urgent blue", "urgent red"]


async def test_a_stalled_holder_whose_slot_was_given_away_is_fenced(db: Database, dsn: str) -> None:
    """E3.4, E3.5: it can neither renew nor settle; otherwise three of two would run when it wakes up."""
    schedule_numbers(dsn, "scan", 3)
    one, other = (Claims(handlers(scan, limit=2), worker=worker, lease_seconds=60) for worker in ("one", "other"))
    connection = await db.connect()
    try:
        first, second = await one.take(connection, 2)
        held = {first.id: first.lease_token, second.id: second.lease_token}
        rows(dsn, f"UPDATE duly.jobs SET lease_expires_at = now() - interval '1 s' WHERE id = {first.id}")
        rows(dsn, f"UPDATE duly.jobs SET run_at = now() - interval '1 day' WHERE id NOT IN ({first.id}, {second.id})")
        (third,) = await other.take(connection, 1)
        assert third.id not in held
        leases = {"ids": list(held), "tokens": list(held.values())}
        await fetch(connection, sql.RENEW_LEASES, **leases, progress=[None, None], lease_seconds=60.0)
        running = "SELECT count(*) FROM duly.queue WHERE status = 'Running'"
        assert value(dsn, running) == 2
        done = [Settlement(job, "done", 0.1) for job in (first, second, third)]
        assert await settle.write(connection, done, worker="one") == {second.lease, third.lease}
    finally:
        await connection.close()


async def scan() -> None:
    """A handler for the tests that claim by hand."""
