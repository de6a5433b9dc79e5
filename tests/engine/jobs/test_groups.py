"""Jobs that share a transaction: one commit for many, and each keeps the promises it has alone (E3.5, E3.7, E3.11)."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from duly import Duly, Fail, JobContext, NewJob, Snooze, Tx, emit, schedule_many
from duly.db import Database
from duly.errors import Invalid
from duly.jobs.worker import Worker
from duly.messages import NewEvent
from duly.testing import BusinessClock
from tests.support import rows, value

WROTE = "SELECT array_agg(entity_id ORDER BY entity_id) FROM effects"
COMMITS = "SELECT count(DISTINCT xmin::text) FROM effects"


@pytest.fixture
def effects(dsn: str) -> str:
    """A table that the handlers write to."""
    rows(dsn, "CREATE TABLE effects (entity_id text, call int DEFAULT 0)")
    return dsn


async def enqueue(db: Database, name: str, count: int) -> None:
    async with db.transaction() as tx:
        await schedule_many(tx, [NewJob(name, f"e{number:03}") for number in range(count)])


def app_of(poison: dict[str, Any], calls: list[str], **options: Any) -> Duly:
    """A job that writes its entity, and then does what ``poison`` says for it."""
    app = Duly()

    @app.job("write", group=100, **options)
    async def write(ctx: JobContext, tx: Tx) -> Any:
        assert ctx.entity_id is not None
        calls.append(ctx.entity_id)
        await tx.execute(text("INSERT INTO effects VALUES (:id)"), {"id": ctx.entity_id})
        what = poison.get(ctx.entity_id)
        if isinstance(what, Exception):
            raise what
        if callable(what):
            return await what(ctx, tx)
        return what

    return app


async def work(db: Database, app: Duly) -> None:
    await Worker(db, app.handlers).run_once()


async def test_a_group_is_one_commit_and_each_job_has_its_execution(db: Database, effects: str) -> None:
    calls: list[str] = []
    await enqueue(db, "write", 50)
    await work(db, app_of({}, calls))
    assert len(calls) == 50
    assert value(effects, COMMITS) <= 5
    assert rows(
        effects, "SELECT count(*), count(DISTINCT execution_id) FROM duly.executions WHERE outcome = 'done'"
    ) == [(50, 50)]
    assert value(effects, "SELECT count(*) FROM duly.jobs") == 0


async def test_one_that_fails_is_retried_later_and_the_others_are_kept(
    db: Database, effects: str, clock: BusinessClock
) -> None:
    calls: list[str] = []
    poison: dict[str, Any] = {"e007": ValueError("bad"), "e023": ValueError("worse")}
    await enqueue(db, "write", 50)
    await work(db, app_of(poison, calls, max_retries=1, backoff=[60]))
    expected = [f"e{number:03}" for number in range(50) if number not in (7, 23)]
    assert value(effects, WROTE) == expected
    assert calls.count("e007") == calls.count("e023") == 1, "who failed is not called again for the others' sake"
    waiting = "SELECT entity_id, retry_count, last_error FROM duly.jobs ORDER BY entity_id"
    assert rows(effects, waiting) == [("e007", 1, "ValueError: bad"), ("e023", 1, "ValueError: worse")]
    clock.advance(seconds=61)
    await work(db, app_of(poison, calls, max_retries=1, backoff=[60]))
    assert rows(effects, "SELECT entity_id FROM duly.dead_letters ORDER BY 1") == [("e007",), ("e023",)]


async def test_many_failures_end_in_each_by_itself(db: Database, effects: str) -> None:
    calls: list[str] = []
    poison: dict[str, Any] = {f"e{number:03}": ValueError("bad") for number in range(0, 40, 2)}
    await enqueue(db, "write", 40)
    await work(db, app_of(poison, calls))
    assert value(effects, WROTE) == [f"e{number:03}" for number in range(1, 40, 2)]
    assert value(effects, "SELECT count(*) FROM duly.jobs WHERE retry_count = 1") == 20


async def test_returned_control_is_each_jobs_own(db: Database, effects: str) -> None:
    poison: dict[str, Any] = {"e001": Snooze(timedelta(seconds=30)), "e002": Fail("never")}
    await enqueue(db, "write", 5)
    await work(db, app_of(poison, []))
    outcomes = rows(effects, "SELECT entity_id, outcome FROM duly.executions ORDER BY entity_id")
    assert [outcome for _, outcome in outcomes] == ["done", "snoozed", "buried", "done", "done"]
    assert value(effects, COMMITS) == 1


async def test_a_reported_failure_keeps_nothing_of_its_job(db: Database, effects: str) -> None:
    async def report(ctx: JobContext, tx: Tx) -> None:
        ctx.report_failure("no cover")

    await enqueue(db, "write", 5)
    await work(db, app_of({"e003": report}, []))
    assert value(effects, WROTE) == ["e000", "e001", "e002", "e004"]


async def test_a_job_that_breaks_the_transaction_is_found(db: Database, effects: str) -> None:
    async def divide(ctx: JobContext, tx: Tx) -> None:
        await tx.execute(text("SELECT 1 / 0"))

    await enqueue(db, "write", 10)
    await work(db, app_of({"e004": divide}, []))
    assert value(effects, WROTE) == [f"e{number:03}" for number in range(10) if number != 4]
    assert rows(effects, "SELECT entity_id, retry_count FROM duly.jobs") == [("e004", 1)]


async def test_a_job_taken_over_by_another_worker_is_fenced_and_the_others_are_kept(db: Database, effects: str) -> None:
    async def steal(ctx: JobContext, tx: Tx) -> None:
        async with db.transaction() as other:
            await other.execute(text("UPDATE duly.jobs SET lease_token = lease_token + 1000 WHERE entity_id = 'e002'"))

    await enqueue(db, "write", 6)
    await work(db, app_of({"e005": steal}, []))
    assert value(effects, WROTE) == ["e000", "e001", "e003", "e004", "e005"]
    assert rows(effects, "SELECT entity_id FROM duly.jobs") == [("e002",)]


async def test_one_that_takes_too_long_is_ended_alone(db: Database, effects: str) -> None:
    async def hang(ctx: JobContext, tx: Tx) -> None:
        await asyncio.Event().wait()

    await enqueue(db, "write", 6)
    await work(db, app_of({"e003": hang}, [], timeout=0.3))
    assert value(effects, WROTE) == ["e000", "e001", "e002", "e004", "e005"]
    assert value(effects, "SELECT last_error FROM duly.jobs WHERE entity_id = 'e003'").startswith("TimeoutError")


async def test_events_of_each_job_carry_its_own_ids(db: Database, dsn: str) -> None:
    app = Duly()

    @app.job("tell", group=10)
    async def tell(ctx: JobContext, tx: Tx) -> None:
        await emit(tx, NewEvent("told", "t", str(ctx.entity_id)))

    async with db.transaction() as tx:
        await schedule_many(tx, [NewJob("tell", "a")])
    async with db.transaction() as tx:
        await schedule_many(tx, [NewJob("tell", "b")])
    jobs = dict(rows(dsn, "SELECT entity_id, correlation_id::text FROM duly.jobs"))
    await work(db, app)
    assert dict(rows(dsn, "SELECT aggregate_id, headers ->> 'correlation_id' FROM duly.outbox")) == jobs
    causes = dict(rows(dsn, "SELECT aggregate_id, headers ->> 'causation_id' FROM duly.outbox"))
    assert causes == dict(rows(dsn, "SELECT entity_id, execution_id::text FROM duly.executions"))


def test_a_group_without_a_transaction_is_refused() -> None:
    app = Duly()
    with pytest.raises(Invalid, match="a group is one transaction"):

        @app.job("x", group=2)
        async def without(ctx: JobContext) -> None: ...

    with pytest.raises(Invalid, match="group=0"):
        app.job("y", group=0)
