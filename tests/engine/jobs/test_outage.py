"""The database goes away and comes back: nothing is lost, nothing happens twice, nobody restarts anything (E3.15)."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import asyncpg
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from duly.db import Database, Tx
from duly.inbox.receive import Consumer
from duly.jobs import worker as worker_module
from duly.jobs.handlers import JobContext, TxKind
from duly.jobs.schedule import schedule
from duly.jobs.worker import Worker
from duly.messages import Event
from duly.testing import TestServer
from duly.wakeup import Wakeup
from tests.engine.jobs.wire import breaking_wire
from tests.engine.jobs.witness import (
    EFFECT,
    each_once,
    effects,
    is_empty,
    make_effects,
    outcomes,
    queue,
    schedule_numbers,
    schedule_twins,
    terminate_backends,
    until,
    working,
)  # fmt: skip
from tests.support import handlers, rows


@pytest.fixture(scope="module")
def fragile() -> Iterator[TestServer]:
    """A PostgreSQL that may be crashed: no other test uses it."""
    directory = Path(tempfile.mkdtemp(prefix="duly-outage-"))
    made = TestServer(directory)
    made.start()
    yield made
    made.stop()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def fragile_db(fragile: TestServer) -> AsyncIterator[Database]:
    fragile.postgres.start()
    with fragile.database() as dsn:
        make_effects(dsn)
        db = Database(dsn)
        yield db
        await db.close()
        fragile.postgres.start()


async def write_effect(ctx: JobContext, tx: Tx) -> None:
    await tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
    await tx.execute(text("SELECT pg_sleep(0.02)"))


async def write_effect_raw(ctx: JobContext, tx: asyncpg.Connection) -> None:
    await tx.execute("INSERT INTO effects VALUES ($1)", ctx.entity_id)
    await tx.execute("SELECT pg_sleep(0.02)")


def write_effect_in_thread(ctx: JobContext, tx: Session) -> None:
    tx.execute(text(EFFECT), {"entity_id": ctx.entity_id, "run": ""})
    tx.execute(text("SELECT pg_sleep(0.02)"))


async def test_a_crash_of_postgres_under_load_heals_by_itself(fragile: TestServer, fragile_db: Database) -> None:
    """E3.15: crashed and restarted under a running worker: every effect once, and no attempt is counted."""
    dsn = fragile_db.dsn
    schedule_numbers(dsn, "write_effect", 60, max_retries=0)
    known = handlers(write_effect, write_effect_raw, write_effect_in_thread)
    wakeup = Wakeup(fragile_db)
    worker = Worker(fragile_db, known, wakeup=wakeup, concurrency=4)
    async with working(worker, wakeup=wakeup):
        await until(lambda: len(effects(dsn)) >= 5)
        await asyncio.to_thread(fragile.postgres.stop, mode="immediate")
        await asyncio.to_thread(fragile.postgres.start)
        await until(lambda: is_empty(dsn), seconds=30, what="everything is worked off")
        rows(
            dsn,
            """
            SELECT duly.schedule(CASE WHEN n % 2 = 0 THEN 'write_effect_in_thread' ELSE 'write_effect_raw' END,
                                 n::text, max_retries => 0)
            FROM generate_series(61, 110) AS n
            """,
        )
        await until(lambda: len(effects(dsn)) >= 65)
        await asyncio.to_thread(fragile.postgres.stop, mode="immediate")
        await asyncio.to_thread(fragile.postgres.start)
        await until(lambda: is_empty(dsn), seconds=30, what="everything is worked off")
        await until(lambda: worker.health.up and wakeup.listening)
    assert rows(dsn, "SELECT entity_id, error FROM duly.dead_letters") == []
    assert effects(dsn) == each_once(110)
    ended = Counter(outcome for _, outcome, _ in outcomes(dsn))
    assert ended["done"] == 110
    assert set(ended) <= {"done", "released"}


async def test_what_was_done_while_the_database_was_away_is_settled_afterwards(
    fragile: TestServer, fragile_db: Database
) -> None:
    """E3.15: a handler that needs no database finishes during the outage; it is not run a second time."""
    dsn = fragile_db.dsn
    began, may_end = asyncio.Event(), asyncio.Event()
    runs: list[str | None] = []

    async def call_partner(ctx: JobContext) -> None:
        began.set()
        await may_end.wait()
        runs.append(ctx.entity_id)

    async with fragile_db.transaction() as tx:
        await schedule(tx, "call_partner", "1", max_retries=0)
    worker = Worker(fragile_db, handlers(call_partner))
    async with working(worker):
        await asyncio.wait_for(began.wait(), 10)
        await asyncio.to_thread(fragile.postgres.stop, mode="immediate")
        may_end.set()
        await until(lambda: runs == ["1"] and not worker.health.up)
        await asyncio.to_thread(fragile.postgres.start)
        await until(lambda: worker.health.up and is_empty(dsn), seconds=30)
    assert runs == ["1"]
    assert outcomes(dsn) == [("1", "done", 0)]


async def test_a_worker_whose_slots_are_all_busy_notices_an_outage_too(
    fragile: TestServer, fragile_db: Database
) -> None:
    """E3.15: it has no room to claim anything, and says that it is down all the same; then up again."""
    dsn = fragile_db.dsn
    began, may_end = asyncio.Event(), asyncio.Event()

    async def call_partner() -> None:
        began.set()
        await may_end.wait()

    schedule_numbers(dsn, "call_partner", 4)
    worker = Worker(fragile_db, handlers(call_partner), concurrency=1)
    async with working(worker):
        await asyncio.wait_for(began.wait(), 10)
        await until(lambda: worker.health.detail == "working")
        await asyncio.to_thread(fragile.postgres.stop, mode="immediate")
        try:
            await until(lambda: not worker.health.up, seconds=8, what="the worker says that it is down")
        finally:
            await asyncio.to_thread(fragile.postgres.start)
            may_end.set()
        await until(lambda: worker.health.up and is_empty(dsn), seconds=30)
    assert [outcome for _, outcome, _ in outcomes(dsn)] == ["done"] * 4


@pytest.mark.parametrize("name", ["write_effect", "write_effect_raw", "write_effect_in_thread"])
async def test_a_job_whose_turn_comes_during_an_outage_is_given_back_without_a_failure(
    fragile: TestServer, fragile_db: Database, name: str
) -> None:
    """E3.15: its transaction cannot even begin; that is nobody's attempt, in whichever kind of transaction."""
    dsn = fragile_db.dsn
    gates, passed = {"a": asyncio.Event(), "b": asyncio.Event()}, asyncio.Event()

    async def gate(ctx: JobContext) -> None:
        await gates[str(ctx.entity_id)].wait()

    async def after() -> None:
        passed.set()

    async with fragile_db.transaction() as tx:
        await schedule(tx, "gate", "a", priority=1, max_retries=0)
        await schedule(tx, "gate", "b", priority=1, max_retries=0)
        await schedule(tx, name, "1", priority=3, max_retries=0)
        await schedule(tx, "after", "z", priority=4, max_retries=0)
    known = handlers(gate, after, write_effect, write_effect_raw, write_effect_in_thread)
    async with working(Worker(fragile_db, known, concurrency=2)):
        await until(lambda: [status for _, status, _ in queue(dsn)] == ["Running"] * 4, what="all four are claimed")
        await asyncio.to_thread(fragile.postgres.stop, mode="immediate")
        gates["a"].set()
        await asyncio.wait_for(passed.wait(), 20)  # the one after it in the same slot: its own turn is over
        await asyncio.to_thread(fragile.postgres.start)
        gates["b"].set()
        await until(lambda: is_empty(dsn), seconds=30)
    assert rows(dsn, "SELECT entity_id, error FROM duly.dead_letters") == []
    assert effects(dsn) == each_once(1)


async def test_what_could_not_be_given_back_during_an_outage_does_not_wait_for_its_lease(
    fragile: TestServer, fragile_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3.5, E3.15: claimed ahead, and the database away when it is to go back: it runs as soon as there is one."""
    monkeypatch.setattr(worker_module, "HOARD_SECONDS", 0.3)
    monkeypatch.setattr(worker_module, "WATCH_SECONDS", 0.05)
    dsn = fragile_db.dsn
    began, may_end = asyncio.Event(), asyncio.Event()
    ran: list[str | None] = []

    async def call_partner(ctx: JobContext) -> None:
        began.set()
        ran.append(ctx.entity_id)
        if ctx.entity_id == "1":
            await may_end.wait()

    schedule_numbers(dsn, "call_partner", 2)
    worker = Worker(fragile_db, handlers(call_partner), concurrency=1)
    async with working(worker):
        await asyncio.wait_for(began.wait(), 10)
        await asyncio.to_thread(fragile.postgres.stop, mode="immediate")
        await until(lambda: not worker.health.up, what="the worker says that it is down")
        await asyncio.to_thread(fragile.postgres.start)
        may_end.set()
        await until(lambda: is_empty(dsn), seconds=15, what="both are done")
    assert sorted(map(str, ran)) == ["1", "2"]


async def test_a_worker_that_starts_before_its_database_waits_for_it(fragile: TestServer, fragile_db: Database) -> None:
    """E3.15: the process stays up, says that it is down, and begins when it can."""
    dsn = fragile_db.dsn
    schedule_numbers(dsn, "write_effect", 3)
    fragile.postgres.stop(mode="fast")
    worker = Worker(fragile_db, handlers(write_effect))
    async with working(worker):
        await until(lambda: not worker.health.up)
        assert worker.health.detail != "starting"
        await asyncio.to_thread(fragile.postgres.start)
        await until(lambda: worker.health.up and is_empty(dsn), seconds=30)
    assert effects(dsn) == each_once(3)


async def test_connections_cut_at_random_cost_no_work(db: Database, dsn: str) -> None:
    """E3.15: again and again every connection of the worker is ended; each effect happens once."""

    def went_on(before: int) -> bool:
        return len(effects(dsn)) > before or is_empty(dsn)

    make_effects(dsn)
    schedule_numbers(dsn, "write_effect", 60, max_retries=0)
    async with working(Worker(db, handlers(write_effect), concurrency=4)):
        for _ in range(6):
            before = len(effects(dsn))
            terminate_backends(dsn, "application_name LIKE 'duly%'")
            await until(partial(went_on, before))
        await until(lambda: is_empty(dsn), seconds=60)
    assert rows(dsn, "SELECT entity_id, error FROM duly.dead_letters") == []
    assert effects(dsn) == each_once(60)


# -- a claim without an answer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 2])
async def test_jobs_of_a_claim_without_an_answer_do_not_wait_for_their_lease(
    db: Database, dsn: str, limit: int | None
) -> None:
    """E3.5, E3.15: the worker holds jobs that it does not know of; it gives them back and claims them anew."""
    make_effects(dsn)
    schedule_numbers(dsn, "write_effect", 3, max_retries=0)
    async with breaking_wire(dsn) as wire:
        wire.statement = b"nextval('duly.lease_tokens')"
        wire.cut_next = "reply"
        behind = Database(wire.dsn)
        async with working(Worker(behind, handlers(write_effect, limit=limit))):
            await until(lambda: is_empty(dsn), seconds=20)
        await behind.close()
        assert wire.cuts == 1
    assert effects(dsn) == each_once(3)
    assert outcomes(dsn) == [(str(number), "done", 0) for number in (1, 2, 3)]


async def test_twins_of_a_claim_without_an_answer_do_not_wait_for_their_lease(db: Database, dsn: str) -> None:
    """E3.2, E3.15: two jobs of one (name, entity) in the lost claim; only one can be the unique one again."""
    done: list[str | None] = []

    async def work(ctx: JobContext) -> None:
        done.append(ctx.entity_id)

    schedule_twins(dsn)
    async with breaking_wire(dsn) as wire:
        wire.statement = b"nextval('duly.lease_tokens')"
        wire.cut_next = "reply"
        behind = Database(wire.dsn)
        async with working(Worker(behind, handlers(work))):
            await until(lambda: is_empty(dsn), seconds=10, what="both are given back and run")
        await behind.close()
    assert done == ["twin", "twin"]


def publish_one_event(dsn: str) -> None:
    """An event in the history, and a consumer's job for it."""
    rows(
        dsn,
        """
        INSERT INTO duly.events (id, seq, type, topic, aggregate_id, payload, headers, created_at, published_at,
                                 attempts)
        VALUES (duly.uuid7(), 1, 'a.b', 'a', 'agg', '{}', '{}', now(), now(), 0)
        """,
    )
    rows(
        dsn,
        """
        INSERT INTO duly.jobs (name, run_at, due_at, created_at, event_id)
        SELECT 'consumer:c', now(), now(), now(), id FROM duly.events
        """,
    )


async def test_a_claim_whose_events_could_not_be_read_is_claimed_anew(db: Database, dsn: str) -> None:
    """E3.15: the connection dies between the claim and the reading of its events: nothing waits, nothing runs twice."""
    received: list[str] = []
    worked: list[str | None] = []

    async def consume(event: Event) -> None:
        received.append(event.aggregate_id)

    async def work(ctx: JobContext) -> None:
        worked.append(ctx.entity_id)

    publish_one_event(dsn)
    rows(dsn, "SELECT duly.schedule('work', 'w', priority => 1)")
    consumer = Consumer("consumer:c", consume, TxKind.NONE, consumer="c", patterns=["a.*"])
    worker = Worker(db, {**handlers(work), "consumer:c": consumer}, lease_seconds=60)
    with psycopg.connect(dsn) as blocker:
        blocker.execute("LOCK TABLE duly.events IN ACCESS EXCLUSIVE MODE")
        async with working(worker):
            blocked = "application_name = 'duly-worker' AND wait_event_type = 'Lock'"
            await until(lambda: terminate_backends(dsn, blocked), what="the worker waits to read the event")
            blocker.rollback()
            await until(lambda: is_empty(dsn), seconds=10, what="both are done")
    assert received == ["agg"]
    assert worked == ["w"]
    assert queue(dsn) == []
