"""Clean-up: E1.8 (history is dropped by partition), E3.16 (executions, processed events, dead letters by age)."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import pytest

from duly.app import Duly
from duly.db import Database
from duly.errors import Invalid
from duly.jobs.worker import Worker
from duly.operate import maintenance
from duly.schedules.tick import Scheduler
from tests.engine.operate.conftest import NOON, Make

PARTITIONS = """
SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = CAST('duly.' || %(parent)s AS regclass) AND c.relname LIKE '%%\\_p%%' ORDER BY 1
"""


def partitions(make: Make, parent: str) -> list[str]:
    return [row[0] for row in make.run(PARTITIONS, parent=parent)]


async def test_partitions_are_made_from_today_on_and_making_them_again_changes_nothing(
    db: Database, make: Make
) -> None:
    """E1.8."""
    before = len(partitions(make, "events"))
    async with db.transaction() as tx:
        said = await maintenance.create_partitions(tx, days_ahead=7)
        again = await maintenance.create_partitions(tx, days_ahead=7)
    assert said == "made 8 partitions of events and 8 of executions"
    assert again == "made 0 partitions of events and 0 of executions"
    assert len(partitions(make, "events")) == before + 8
    made = {f"executions_p202603{day:02}" for day in range(2, 10)}
    assert made <= set(partitions(make, "executions"))


async def test_rows_without_a_partition_move_into_the_one_that_is_made(db: Database, make: Make) -> None:
    id = make.published()
    run = make.execution(1)
    assert make.value("SELECT count(*) FROM duly.events_default") == 1
    async with db.transaction() as tx:
        await maintenance.create_partitions(tx)
    assert make.run("SELECT id FROM duly.events_p20260302") == [(id,)]
    assert make.run("SELECT execution_id FROM duly.executions_p20260302") == [(run,)]


async def test_history_older_than_the_retention_is_dropped_by_partition(db: Database, make: Make) -> None:
    """E1.8, E3.16: what is exactly as old as the retention stays."""
    for parent in ("events", "executions"):
        make.run("SELECT duly.create_partitions(%(parent)s, '2026-02-20', 11)", parent=parent)
    make.run(
        "INSERT INTO duly.executions SELECT duly.uuid7(), 1, 'charge', NULL, 'Deferred', at, at, true, 'done', NULL, 0,"
        " NULL, 'w1', 1 FROM unnest(ARRAY[timestamptz '2026-02-21 12:00Z', '2026-02-28 12:00Z']) AS at"
    )
    async with db.transaction() as tx:
        said = await maintenance.drop_history(tx, events_days=5, executions_days=3)
    assert said == "dropped 5 partitions of events; dropped 7 partitions of executions"
    old = [name for name in partitions(make, "events") if "_p2026" in name]
    assert old[0] == "events_p20260225"
    assert make.run("SELECT completed_at::date::text FROM duly.executions") == [("2026-02-28",)]


async def test_a_partition_that_waiting_work_still_needs_is_kept_and_named(db: Database, make: Make) -> None:
    make.run("SELECT duly.create_partitions('events', '2026-02-20', 3)")
    make.clock.freeze(NOON.replace(month=2, day=21))
    needed = make.published()
    make.clock.freeze(NOON)
    make.dead(1, "consumer:audit", event_id=needed)
    async with db.transaction() as tx:
        said = await maintenance.drop_history(tx, events_days=5, executions_days=5)
    assert "dropped 2 partitions of events (1 older partition kept: waiting jobs or dead letters need" in said
    assert make.value("SELECT count(*) FROM duly.events") == 1


async def test_old_rows_outside_every_partition_are_deleted_too(db: Database, make: Make) -> None:
    """The default partition is never dropped; without this it would only grow."""
    make.clock.freeze(NOON - timedelta(days=40))
    make.published("old")
    needed = make.published("needed")
    make.execution(1)
    make.clock.freeze(NOON)
    make.job("consumer:audit", event_id=needed)
    recent, run = make.published("recent"), make.execution(2)
    async with db.transaction() as tx:
        said = await maintenance.drop_history(tx, events_days=30, executions_days=30)
    assert "dropped 0 partitions of events and 1 row outside every partition" in said
    assert {row[0] for row in make.run("SELECT id FROM duly.events")} == {needed, recent}
    assert make.run("SELECT execution_id FROM duly.executions") == [(run,)]


async def test_an_old_row_outside_every_partition_stays_while_a_dead_letter_needs_it(db: Database, make: Make) -> None:
    """E1.8: an operator may still retry it."""
    make.clock.freeze(NOON - timedelta(days=40))
    needed = make.published("needed")
    make.clock.freeze(NOON)
    make.dead(1, "consumer:audit", event_id=needed)
    async with db.transaction() as tx:
        await maintenance.drop_history(tx, events_days=30, executions_days=30)
    assert make.run("SELECT id FROM duly.events") == [(needed,)]


async def test_processed_events_are_forgotten_by_age(db: Database, make: Make) -> None:
    """E3.16."""
    for days, number in ((31, 1), (29, 2)):
        make.insert(
            "processed_events",
            "consumer",
            {"consumer": "audit", "event_id": UUID(int=number), "processed_at": NOON - timedelta(days=days)},
        )
    async with db.transaction() as tx:
        assert await maintenance.forget_processed_events(tx, days=30) == "forgot 1 processed event"
    assert make.run("SELECT event_id FROM duly.processed_events") == [(UUID(int=2),)]


async def test_a_call_is_bounded_and_queues_the_next_one_when_more_remain(db: Database, make: Make) -> None:
    make.run(
        "INSERT INTO duly.processed_events SELECT 'audit', gen_random_uuid(), duly.now() - interval '40 days'"
        " FROM generate_series(1, 25)"
    )
    async with db.transaction() as tx:
        said = await maintenance.forget_processed_events(tx, days=30, batch=5, batches=4)
    assert said == "forgot 20 processed events; more remain, and the next run is queued"
    assert make.run("SELECT name, run_at FROM duly.jobs") == [("duly.forget-processed-events", NOON)]
    async with db.transaction() as tx:
        said = await maintenance.forget_processed_events(tx, days=30, batch=10, batches=4)
    assert said == "forgot 5 processed events"
    assert make.value("SELECT count(*) FROM duly.jobs") == 1


async def test_dead_letters_are_forgotten_by_age_and_their_aggregate_goes_on(db: Database, make: Make) -> None:
    """E3.16: the audit keeps how many of each name."""
    make.dead(1, "consumer:audit", order_key="order-1", buried_at=NOON - timedelta(days=91))
    make.dead(2, "charge", buried_at=NOON - timedelta(days=100))
    make.dead(3, "charge", buried_at=NOON - timedelta(days=89))
    make.behind("consumer:audit", "order-1", id=9)
    make.run("SELECT duly.alert('dead_letter', 'charge', 'x'), duly.alert('dead_letter', 'consumer:audit', 'x')")
    async with db.transaction() as tx:
        assert await maintenance.forget_dead_letters(tx, days=90) == "forgot 2 dead letters"
    assert make.run("SELECT id FROM duly.dead_letters") == [(3,)]
    assert make.run("SELECT id, waits FROM duly.jobs") == [(9, "due")]
    assert make.run("SELECT subject FROM duly.alerts WHERE resolved_at IS NULL") == [("charge",)]
    kept = [(entry["actor"], entry["subject"], entry["before"]["count"]) for entry in make.audit()]
    assert kept == [("duly", "dead_letters:charge", 1), ("duly", "dead_letters:consumer:audit", 1)]


async def test_a_thousand_dead_letters_are_forgotten_at_a_time_each_of_an_order_of_its_own(
    db: Database, make: Make
) -> None:
    """Each takes a lock of its order until the commit; the rest is for the next run, which is queued."""
    make.run(
        "INSERT INTO duly.dead_letters (id, name, payload, priority, due_at, created_at, original_delay, retry_count,"
        " source, order_key, reason, error, error_kind, buried_at) SELECT n, 'consumer:audit', '{}', 3, duly.now(),"
        " duly.now(), '0', 3, 'Deferred', 'order-' || n, 'retries_used_up', 'x', 'X', duly.now() - interval '91 days'"
        " FROM generate_series(1, 1100) n"
    )
    async with db.transaction() as tx:
        said = await maintenance.forget_dead_letters(tx, days=90)
    assert said == "forgot 1000 dead letters; more remain, and the next run is queued"
    assert make.run("SELECT name FROM duly.jobs") == [("duly.forget-dead-letters",)]
    async with db.transaction() as tx:
        assert await maintenance.forget_dead_letters(tx, days=90) == "forgot 100 dead letters"


async def test_a_dead_letter_that_an_operator_holds_is_not_forgotten(db: Database, make: Make) -> None:
    make.dead(1, buried_at=NOON - timedelta(days=91))
    async with db.transaction() as operator, db.transaction() as tx:
        connection = await operator.connection()
        await connection.exec_driver_sql("SELECT 1 FROM duly.dead_letters WHERE id = 1 FOR UPDATE")
        assert await maintenance.forget_dead_letters(tx, days=90) == "forgot 0 dead letters"
    assert make.value("SELECT count(*) FROM duly.dead_letters") == 1


async def test_audit_resolved_alerts_and_silent_processes_are_forgotten(db: Database, make: Make) -> None:
    """E3.16: an open alert stays, however old."""
    for days in (731, 729):
        make.insert(
            "audit",
            "id",
            {"at": NOON - timedelta(days=days), "actor": "alice", "action": "x", "subject": str(days)},
        )
    for subject, raised, resolved in (("old", 200, 91), ("recent", 200, 89), ("open", 200, None)):
        resolved_at = NOON - timedelta(days=resolved) if resolved else None
        at = NOON - timedelta(days=raised)
        columns = {"kind": "dead_letter", "subject": subject, "message": "x", "raised_at": at, "last_at": at}
        make.insert("alerts", "id", columns | {"resolved_at": resolved_at})
    make.process("gone", silent=90_000)
    make.process("here", silent=3_600)
    async with db.transaction() as tx:
        said = await maintenance.forget_audit(tx, days=730)
    assert said == "forgot 1 audit row, 1 resolved alert and 1 silent process row"
    assert make.run("SELECT subject FROM duly.audit") == [("729",)]
    assert make.run("SELECT subject FROM duly.alerts ORDER BY 1") == [("open",), ("recent",)]
    assert make.run("SELECT id FROM duly.processes") == [("here",)]


async def test_each_clean_up_is_a_schedule_that_every_application_runs(db: Database, make: Make) -> None:
    """E3.16: a night passes; executions, processed events, idempotency keys and dead letters go by an age of each."""
    for number, days in ((1, 31), (2, 28)):
        at = NOON - timedelta(days=days)
        make.execution(number, completed_at=at)
        values = {"consumer": "audit", "event_id": UUID(int=number), "processed_at": at}
        make.insert("processed_events", "consumer", values)
    for number, days in ((1, 91), (2, 88)):
        make.dead(number, buried_at=NOON - timedelta(days=days))
    make.run(
        "INSERT INTO duly.idempotency_keys SELECT 'alice', n::text, sha256('x'), 200, '[]', '', duly.now(),"
        " duly.now() + make_interval(days => n) FROM generate_series(0, 1) AS n"
    )
    app = Duly()
    await app.prepare(db)
    await Scheduler(db).run_once()
    make.clock.freeze(NOON + timedelta(hours=16))
    await Scheduler(db).run_once()
    await Worker(db, app.handlers, concurrency=1).run_once()
    assert make.run("SELECT job_id FROM duly.executions WHERE name = 'charge'") == [(2,)]
    assert make.run("SELECT event_id FROM duly.processed_events") == [(UUID(int=2),)]
    assert make.run("SELECT id FROM duly.dead_letters") == [(2,)]
    assert make.run("SELECT key FROM duly.idempotency_keys") == [("1",)]


async def test_a_retention_of_no_days_is_refused(db: Database) -> None:
    async with db.transaction() as tx:
        with pytest.raises(Invalid):
            await maintenance.drop_history(tx, events_days=0, executions_days=30)
        with pytest.raises(Invalid):
            await maintenance.forget_dead_letters(tx, days=0)
        with pytest.raises(Invalid):
            await maintenance.create_partitions(tx, days_ahead=0)
