"""Scheduling: one INSERT in the caller's transaction, and one pending job for each name and entity (E3.2, E7.3)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from duly.db import Database, Tx
from duly.errors import AlreadyScheduled, BadPayload, Invalid
from duly.jobs.handlers import JobContext
from duly.jobs.schedule import NewJob, find_queued, schedule, schedule_many
from duly.jobs.worker import Worker
from duly.testing import BusinessClock
from tests.engine.jobs.callers import ALL, Opener, count_jobs
from tests.engine.jobs.witness import is_empty
from tests.support import handlers, rows, value

NOON = datetime(2030, 6, 1, 12, tzinfo=UTC)
ROW = "SELECT id, run_at, due_at, original_delay, payload, retry_count, waits FROM duly.jobs ORDER BY id"

any_caller = pytest.mark.parametrize("opened", ALL, ids=lambda opener: opener.__name__)


@any_caller
async def test_scheduling_is_one_statement_and_commits_with_its_caller(dsn: str, opened: Opener) -> None:
    """E3.2, E7.3: nothing is visible before the caller commits, and the job is there afterwards."""
    async with opened(dsn) as caller:
        caller.statements.clear()
        job_id = await caller.schedule(caller.tx, "expire", "e1", NOON)
        assert len(caller.statements) == 1
        assert "duly.schedule" in caller.statements[0]
        assert count_jobs(dsn) == 0
        await caller.commit()
    assert rows(dsn, "SELECT id, name, entity_id, run_at FROM duly.jobs") == [(job_id, "expire", "e1", NOON)]


@any_caller
async def test_scheduling_rolls_back_with_its_caller(dsn: str, opened: Opener) -> None:
    """E3.2, E7.3: a caller that rolls back never scheduled anything."""
    async with opened(dsn) as caller:
        await caller.schedule(caller.tx, "expire", "e1", NOON)
        await caller.rollback()
    assert count_jobs(dsn) == 0


@any_caller
async def test_cancelling_is_one_statement_and_ends_with_its_caller(dsn: str, opened: Opener) -> None:
    """E3.2, E7.3: a cancellation that is rolled back never happened; a committed one deletes the timer."""
    rows(dsn, "SELECT duly.schedule('expire', 'e1'), duly.schedule('expire', 'e2'), duly.schedule('remind', 'e1')")
    async with opened(dsn) as caller:
        caller.statements.clear()
        assert await caller.cancel(caller.tx, "expire", "e1") == 1
        assert len(caller.statements) == 1
        assert count_jobs(dsn) == 3
        await caller.rollback()
    assert count_jobs(dsn) == 3
    async with opened(dsn) as caller:
        assert await caller.cancel(caller.tx, "expire", "e1") == 1
        assert await caller.cancel(caller.tx, "expire", "e1") == 0
        await caller.commit()
    assert rows(dsn, "SELECT name, entity_id FROM duly.jobs ORDER BY id") == [("expire", "e2"), ("remind", "e1")]


async def test_scheduling_writes_one_row_and_touches_no_other_table(dsn: str) -> None:
    """E3.2: one INSERT and nothing else, as PostgreSQL itself counts it."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT duly.schedule('expire', 'e1', duly.now() + interval '1 hour')")
        touched = connection.execute("""
            SELECT relname::text, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_xact_user_tables
            WHERE n_tup_ins + n_tup_upd + n_tup_del > 0
        """).fetchall()
    assert touched == [("jobs", 1, 0, 0)]


async def test_sql_and_python_write_the_same_row(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E7.3: the plain SQL call does what the Python call does, column by column."""
    clock.freeze(NOON)
    later = NOON + timedelta(minutes=15)
    async with db.transaction() as tx:
        await schedule(tx, "a", "e", later, payload={"k": 1}, priority=2, max_retries=7, backoff=[1, 2])
    rows(
        dsn,
        """
        SELECT duly.schedule('b', 'e', %(later)s, '{"k": 1}', priority => 2, max_retries => 7,
                             backoff_seconds => '{1,2}')
        """,
        {"later": later},
    )
    ours = "id, name, unique_key, correlation_id"
    columns = value(
        dsn,
        f"""
        SELECT string_agg(column_name, ', ' ORDER BY ordinal_position) FROM information_schema.columns
        WHERE table_schema = 'duly' AND table_name = 'jobs' AND NOT column_name = ANY(string_to_array('{ours}', ', '))
        """,
    )
    by_python, by_sql = rows(dsn, f"SELECT {columns} FROM duly.jobs ORDER BY id")
    assert by_python == by_sql
    assert rows(dsn, "SELECT unique_key FROM duly.jobs ORDER BY id") == [("a e",), ("b e",)]


async def test_a_job_without_a_time_is_due_at_once(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.2: run_at is optional; entities may be text, UUIDs or numbers; a job needs no entity at all."""
    clock.freeze(NOON)
    async with db.transaction() as tx:
        await schedule(tx, "a", 42)
        await schedule(tx, "a", UUID(int=7))
        await schedule(tx, "a")
        await schedule(tx, "a")
    assert rows(dsn, "SELECT entity_id, run_at, original_delay FROM duly.jobs ORDER BY id") == [
        ("42", NOON, timedelta(0)),
        (str(UUID(int=7)), NOON, timedelta(0)),
        (None, NOON, timedelta(0)),
        (None, NOON, timedelta(0)),
    ]


@pytest.mark.parametrize(
    ("name", "entity", "options"),
    [
        ("has space", "e", {}),
        ("", "e", {}),
        ("x" * 101, "e", {}),
        ("a", "", {}),
        ("a", "e" * 201, {}),
        ("a", "nul\x00", {}),
        ("a", "e", {"run_at": datetime(2030, 1, 1)}),  # noqa: DTZ001 - naive is the point
        ("a", "e", {"priority": 0}),
        ("a", "e", {"priority": 5}),
        ("a", "e", {"max_retries": -1}),
        ("a", "e", {"max_retries": 1001}),
        ("a", "e", {"backoff": []}),
        ("a", "e", {"backoff": [-1]}),
        ("a", "e", {"on_conflict": "whatever"}),
        ("a", "e", {"payload": {"x": float("nan")}}),
        ("a", "e", {"payload": {"x": "\ud800"}}),
        ("a", "e", {"payload": {"x": "a" * 300_000}}),
    ],
)
async def test_what_could_never_run_is_refused_before_it_is_written(
    db: Database, dsn: str, name: str, entity: str, options: dict[str, Any]
) -> None:
    """E3.2: a bad call is an Invalid in the caller's face, and its transaction goes on."""
    async with db.transaction() as tx:
        with pytest.raises((Invalid, BadPayload)):
            await schedule(tx, name, entity, **options)
        await schedule(tx, "good", "e")
    assert rows(dsn, "SELECT name FROM duly.jobs") == [("good",)]


# -- a second call for the same (name, entity) while the first is pending ---------------------------------------------


async def test_replace_moves_the_one_timer(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.2: by default the later call decides when, with what, and from what delay its backoff follows."""
    clock.freeze(NOON)
    async with db.transaction() as tx:
        first = await schedule(tx, "expire", "e", NOON + timedelta(hours=1), payload={"v": 1})
    rows(dsn, "UPDATE duly.jobs SET retry_count = 2, waits = 'retry', last_error = 'x'")
    clock.advance(minutes=10)
    async with db.transaction() as tx:
        assert await schedule(tx, "expire", "e", NOON + timedelta(hours=2), payload={"v": 2}) == first
    moved = NOON + timedelta(hours=2)
    assert rows(dsn, ROW) == [(first, moved, moved, timedelta(minutes=110), {"v": 2}, 0, "due")]


async def test_keep_leaves_the_first_timer_as_it_was(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.2: the second caller gets the id of the job that stays."""
    clock.freeze(NOON)
    async with db.transaction() as tx:
        first = await schedule(tx, "expire", "e", NOON + timedelta(hours=1), payload={"v": 1})
        before = rows(dsn, ROW)
        second = await schedule(tx, "expire", "e", NOON, payload={"v": 2}, on_conflict="keep")
    assert second == first
    assert before == []
    assert rows(dsn, "SELECT id, run_at, payload FROM duly.jobs") == [(first, NOON + timedelta(hours=1), {"v": 1})]


async def test_reject_raises_and_leaves_the_callers_transaction_usable(db: Database, dsn: str) -> None:
    """E3.2: AlreadyScheduled is a conflict of the domain, not a broken transaction."""
    async with db.transaction() as tx:
        await schedule(tx, "expire", "e", NOON, on_conflict="reject")
        with pytest.raises(AlreadyScheduled):
            await schedule(tx, "expire", "e", on_conflict="reject")
        await schedule(tx, "other", "e")
    assert rows(dsn, "SELECT name FROM duly.jobs ORDER BY id") == [("expire",), ("other",)]


async def test_plain_sql_rejects_with_a_unique_violation(dsn: str) -> None:
    """E7.3: in SQL the same rule is an error that SQL programs know."""
    rows(dsn, "SELECT duly.schedule('expire', 'e')")
    with pytest.raises(psycopg.errors.UniqueViolation):
        rows(dsn, "SELECT duly.schedule('expire', 'e', on_conflict => 'reject')")
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        rows(dsn, "SELECT duly.schedule('expire', 'e', on_conflict => 'whatever')")
    assert count_jobs(dsn) == 1


async def test_allow_makes_another_job(db: Database, dsn: str) -> None:
    """E3.2: both run."""
    async with db.transaction() as tx:
        first = await schedule(tx, "expire", "e", NOON)
        assert await schedule(tx, "expire", "e", NOON, on_conflict="allow") != first
    assert count_jobs(dsn) == 2


async def test_other_names_and_other_entities_are_other_timers(db: Database, dsn: str) -> None:
    """E3.2: uniqueness is by both, and names cannot be confused with entities."""
    async with db.transaction() as tx:
        for name, entity in [("a", "b"), ("a", "c"), ("b", "b"), ("a.b", "c"), ("a", "b c")]:
            await schedule(tx, name, entity)
    assert count_jobs(dsn) == 5


async def test_a_running_job_does_not_stand_in_the_way_of_the_next(db: Database, dsn: str) -> None:
    """E3.2: the rules hold while a job is pending only, so a handler can set its own next timer."""
    kept: list[int] = []

    async def again(ctx: JobContext, tx: Tx) -> None:
        if ctx.payload["last"]:
            return
        for rule in ("reject", "keep", "replace"):
            kept.append(await schedule(tx, "again", ctx.entity_id, payload={"last": True}, on_conflict=rule))
            if rule == "reject":
                assert kept[-1] != ctx.job_id

    async with db.transaction() as tx:
        await schedule(tx, "again", "e", payload={"last": False})
    worked = await Worker(db, handlers(again)).run_once()
    assert len(set(kept)) == 1
    assert worked.done == 2
    assert is_empty(dsn)


@pytest.mark.parametrize("rule", ["replace", "keep", "reject"])
async def test_a_job_that_waits_for_its_retry_is_pending_and_unique(
    db: Database, dsn: str, clock: BusinessClock, rule: Any
) -> None:
    """E3.2: a failed job with retries left is pending again (E3.7), so the conflict rules hold for it again."""
    clock.freeze(NOON)

    async def flaky() -> None:
        raise RuntimeError("not yet")

    async with db.transaction() as tx:
        first = await schedule(tx, "flaky", "e")
    await Worker(db, handlers(flaky)).run_once()
    assert rows(dsn, "SELECT id, waits FROM duly.jobs") == [(first, "retry")]
    async with db.transaction() as tx:
        if rule == "reject":
            with pytest.raises(AlreadyScheduled):
                await schedule(tx, "flaky", "e", NOON + timedelta(hours=1), on_conflict=rule)
        else:
            second = await schedule(tx, "flaky", "e", NOON + timedelta(hours=1), on_conflict=rule)
            assert rule == "replace" or second == first
    expected = NOON + (timedelta(hours=1) if rule == "replace" else timedelta(seconds=1))
    assert rows(dsn, "SELECT run_at, retry_count FROM duly.jobs") == [(expected, 0 if rule == "replace" else 1)]


async def test_a_retry_goes_back_beside_a_timer_that_was_set_while_it_ran(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E3.2: the next timer was set while the first ran; when the first then fails, neither is lost."""
    clock.freeze(NOON)

    async def flaky(ctx: JobContext) -> None:
        async with db.transaction() as tx:
            await schedule(tx, "flaky", ctx.entity_id, NOON + timedelta(hours=1))
        raise RuntimeError("not yet")

    async with db.transaction() as tx:
        await schedule(tx, "flaky", "e")
    await Worker(db, handlers(flaky)).run_once()
    assert rows(dsn, "SELECT waits, run_at FROM duly.jobs ORDER BY run_at") == [
        ("retry", NOON + timedelta(seconds=1)),
        ("due", NOON + timedelta(hours=1)),
    ]


# -- many at once -----------------------------------------------------------------------------------------------------


async def test_many_jobs_are_one_statement(db: Database, dsn: str) -> None:
    """E3.2: bulk scheduling is one statement however many there are, and rolls back with its caller."""
    jobs = [NewJob("bulk", number, NOON, {"n": number}) for number in range(2_000)]
    connection = await db.connect()
    await connection.fetch("SELECT $1::timestamptz[], $2::integer[]", [], [])  # asyncpg learns types once a connection
    transaction = connection.transaction()
    await transaction.start()
    sent: list[str] = []
    connection.add_query_logger(lambda record: sent.append(record.query))
    assert await schedule_many(connection, jobs) == 2_000
    assert await schedule_many(connection, []) == 0
    await asyncio.sleep(0)  # asyncpg hands a statement to its loggers at the loop's next turn
    assert len(sent) == 1
    await transaction.rollback()
    assert count_jobs(dsn) == 0
    await schedule_many(connection, jobs)
    await connection.close()
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE payload->>'n' = entity_id") == 2_000


async def test_the_last_of_several_given_for_one_entity_wins(db: Database, dsn: str) -> None:
    """E3.2: as if they had been given one by one."""
    jobs = [NewJob("bulk", "e", NOON, {"v": 1}), NewJob("bulk", "f", NOON), NewJob("bulk", "e", NOON, {"v": 2})]
    async with db.transaction() as tx:
        assert await schedule_many(tx, [*jobs, NewJob("bulk"), NewJob("bulk")]) == 4
    assert value(dsn, "SELECT payload FROM duly.jobs WHERE entity_id = 'e'") == {"v": 2}
    assert count_jobs(dsn) == 4


async def test_the_first_of_several_given_for_one_entity_is_kept(db: Database, dsn: str) -> None:
    """E3.2: with keep, as if they had been given one by one."""
    jobs = [NewJob("bulk", "e", NOON, {"v": 1}), NewJob("bulk", "e", NOON, {"v": 2})]
    async with db.transaction() as tx:
        await schedule_many(tx, jobs, on_conflict="keep")
    assert rows(dsn, "SELECT payload FROM duly.jobs") == [({"v": 1},)]


async def test_several_given_for_one_entity_are_rejected_together(db: Database, dsn: str) -> None:
    """E3.2: with reject, the caller sees AlreadyScheduled and no error of the database."""
    async with db.transaction() as tx:
        with pytest.raises(AlreadyScheduled):
            await schedule_many(tx, [NewJob("bulk", "e"), NewJob("bulk", "e")], on_conflict="reject")


async def test_bulk_rules_look_at_what_is_pending_already(db: Database, dsn: str) -> None:
    """E3.2: keep adds what is missing; reject refuses all; allow adds all."""
    some = [NewJob("bulk", number, NOON) for number in (1, 2)]
    more = [NewJob("bulk", number, NOON + timedelta(hours=1)) for number in (1, 2, 3)]
    async with db.transaction() as tx:
        await schedule_many(tx, some)
        await schedule_many(tx, more, on_conflict="keep")
    assert rows(dsn, "SELECT entity_id, run_at > %(noon)s FROM duly.jobs ORDER BY entity_id", {"noon": NOON}) == [
        ("1", False),
        ("2", False),
        ("3", True),
    ]
    with pytest.raises(AlreadyScheduled):
        async with db.transaction() as tx:
            await schedule_many(tx, [NewJob("bulk", 3), NewJob("bulk", 4)], on_conflict="reject")
    assert count_jobs(dsn) == 3
    async with db.transaction() as tx:
        assert await schedule_many(tx, more, on_conflict="allow") == 3
    assert count_jobs(dsn) == 6


async def test_more_than_ten_thousand_at_once_are_refused(db: Database, dsn: str) -> None:
    """E3.2: a limit on everything."""
    async with db.transaction() as tx:
        with pytest.raises(Invalid, match="10000"):
            await schedule_many(tx, [NewJob("bulk", number) for number in range(10_001)])
    assert count_jobs(dsn) == 0


# -- asking -----------------------------------------------------------------------------------------------------------


async def test_who_still_has_a_job_in_the_queue_can_be_asked(db: Database, dsn: str) -> None:
    """E3.2: pending, waiting for a retry, or running; of this name; not the dead, nor those that are done."""
    ids = ["later", "running", "other", "dead", "done"]
    async with db.transaction() as tx:
        await schedule_many(tx, [NewJob("call", one, NOON) for one in ("later", "running")])
        await schedule(tx, "another", "other")
        assert await find_queued(tx, "call", ids) == {"later", "running"}
    rows(
        dsn,
        """UPDATE duly.jobs SET lease_token = 1, lease_expires_at = now() + interval '1 hour', leased_by = 'w'
           WHERE entity_id = 'running'""",
    )
    async with db.transaction() as tx:
        assert await find_queued(tx, "call", ids) == {"later", "running"}
        assert await find_queued(tx, "call", [UUID(int=7), 8]) == set()
        assert await find_queued(tx, "call", []) == set()


async def test_a_question_about_too_many_is_refused(db: Database) -> None:
    """A limit on everything."""
    async with db.transaction() as tx:
        with pytest.raises(Invalid, match="10000"):
            await find_queued(tx, "call", range(10_001))
        with pytest.raises(Invalid):
            await find_queued(tx, "no name", ["x"])
