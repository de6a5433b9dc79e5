"""History is kept in daily partitions and dropped with them (E1.8)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from duly import Database, Duly, Event, Relay, Tx, emit
from duly.messages import NewEvent
from duly.operate import maintenance
from duly.testing import BusinessClock, drain
from tests.support import rows, value

DAY = datetime(2033, 6, 15, 12, tzinfo=UTC)
PARTITIONS = """
SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'duly.events'::regclass AND c.relname >= 'events_p2033' ORDER BY 1
"""
WHERE = "SELECT tableoid::regclass::text, aggregate_id FROM duly.events ORDER BY aggregate_id"


async def publish(db: Database, *aggregates: str) -> None:
    async with db.transaction() as tx:
        await emit(tx, *(NewEvent("order.changed", "shop", aggregate) for aggregate in aggregates))
    await Relay(db).run_once()


def create(dsn: str, first_day: str, days: int, parent: str = "events") -> Any:
    return value(dsn, f"SELECT duly.create_partitions('{parent}', '{first_day}', {days})")


def drop(dsn: str, before: str, parent: str = "events") -> Any:
    return value(dsn, f"SELECT duly.drop_partitions('{parent}', '{before}')")


# -- made ahead ------------------------------------------------------------------------------------------------------


def test_partitions_are_made_for_each_day_once(dsn: str) -> None:
    """E1.8: asking again makes none; overlapping days are skipped."""
    assert create(dsn, "2033-06-15", 3) == 3
    assert create(dsn, "2033-06-15", 3) == 0
    assert create(dsn, "2033-06-17", 2) == 1
    assert rows(dsn, PARTITIONS) == [(f"events_p203306{day}",) for day in (15, 16, 17, 18)]


async def test_an_event_lands_in_the_partition_of_its_day(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E1.8: to the millisecond, in UTC, whatever the session's zone."""
    create(dsn, "2033-06-14", 3)
    for aggregate, moment in {
        "1 first": datetime(2033, 6, 15, tzinfo=UTC),
        "2 last": datetime(2033, 6, 15, 23, 59, 59, 999_999, tzinfo=UTC),
        "3 next": datetime(2033, 6, 16, tzinfo=UTC),
    }.items():
        clock.freeze(moment)
        await publish(db, aggregate)
    assert rows(dsn, WHERE) == [
        ("duly.events_p20330615", "1 first"),
        ("duly.events_p20330615", "2 last"),
        ("duly.events_p20330616", "3 next"),
    ]


async def test_a_day_begins_at_midnight_in_utc_whatever_the_zone_of_who_makes_its_partition(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E1.8: an operator's psql in Auckland draws the same bounds as the clean-up."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET timezone = 'Pacific/Auckland'")
        for parent in ("events", "executions"):
            connection.execute("SELECT duly.create_partitions(%s, '2033-06-14', 3)", [parent])
    for hours in (0, 11, 13, 23):
        clock.freeze(datetime(2033, 6, 15, hours, tzinfo=UTC))
        await publish(db, f"{hours:02}")
    assert rows(dsn, WHERE) == [("duly.events_p20330615", f"{hours:02}") for hours in (0, 11, 13, 23)]


async def test_rows_without_a_partition_are_kept_and_move_over_when_it_is_made(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E1.8: the maintenance job may be late; nothing is refused, nothing lost, and it can still be found."""
    for day in range(3):
        clock.freeze(DAY + timedelta(days=day))
        await publish(db, f"day {day}")
    before = rows(dsn, "SELECT * FROM duly.events ORDER BY id")
    assert {table for table, _ in rows(dsn, WHERE)} == {"duly.events_default"}
    assert create(dsn, "2033-06-15", 2) == 2
    assert rows(dsn, WHERE) == [
        ("duly.events_p20330615", "day 0"),
        ("duly.events_p20330616", "day 1"),
        ("duly.events_default", "day 2"),
    ]
    assert rows(dsn, "SELECT * FROM duly.events ORDER BY id") == before
    indexes = "SELECT count(*) FROM pg_indexes WHERE tablename = 'events_p20330615'"
    assert value(dsn, indexes) == value(dsn, indexes.replace("_p20330615", "_default"))


async def test_the_log_of_runs_is_partitioned_in_the_same_way(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E1.8, E3.8."""
    app = Duly()

    @app.consumer("mail", on="*")
    async def mail(event: Event, tx: Tx) -> None:
        return None

    await app.prepare(db)
    clock.freeze(DAY)
    await publish(db, "o1")
    await drain(db, app.handlers)
    assert rows(dsn, "SELECT tableoid::regclass::text FROM duly.executions") == [("duly.executions_default",)]
    assert create(dsn, "2033-06-15", 1, "executions") == 1
    assert rows(dsn, "SELECT tableoid::regclass::text FROM duly.executions") == [("duly.executions_p20330615",)]
    assert drop(dsn, "2033-06-16", "executions") >= 1
    assert rows(dsn, "SELECT count(*) FROM duly.executions") == [(0,)]


@pytest.mark.parametrize(("parent", "days"), [("jobs", 1), ("events", 0), ("events", 401), ("events; DROP", 1)])
def test_only_the_two_histories_have_partitions(dsn: str, parent: str, days: int) -> None:
    """STYLE: a limit on everything."""
    with pytest.raises(psycopg.errors.RaiseException, match="parent must be events or executions, days 1 to 400"):
        create(dsn, "2033-06-15", days, parent)


# -- dropped by age --------------------------------------------------------------------------------------------------


async def test_partitions_are_dropped_by_age_and_younger_ones_stay(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E1.8: the day itself stays, the days before it go, with one DROP each."""
    create(dsn, "2033-06-15", 3)
    for day in range(3):
        clock.freeze(DAY + timedelta(days=day))
        await publish(db, f"day {day}")
    old = value(
        dsn, "SELECT count(*) FROM pg_class WHERE relname ~ '^events_p' AND relname < 'events_p2033' AND relkind = 'r'"
    )
    assert drop(dsn, "2033-06-17") == old + 2
    assert rows(dsn, PARTITIONS) == [("events_p20330617",)]
    assert rows(dsn, WHERE) == [("duly.events_p20330617", "day 2")]


@pytest.mark.parametrize("waiting_in", ["jobs", "dead_letters"])
async def test_a_partition_that_waiting_work_needs_is_not_dropped(
    db: Database, dsn: str, clock: BusinessClock, waiting_in: str
) -> None:
    """E1.8: a job that waits for its retry, or a dead letter that may be retried, still finds its event."""
    app = Duly()
    seen: list[str] = []
    broken = True

    @app.consumer("mail", on="*", max_retries=5 if waiting_in == "jobs" else 0)
    async def mail(event: Event, tx: Tx) -> None:
        if broken:
            raise ConnectionError("the mail server is away")
        seen.append(event.aggregate_id)

    await app.prepare(db)
    create(dsn, "2033-06-14", 2)
    clock.freeze(DAY)
    await publish(db, "o1")
    await drain(db, app.handlers)
    assert value(dsn, f"SELECT count(*) FROM duly.{waiting_in}") == 1
    clock.advance(days=60)
    drop(dsn, "2033-08-01")
    assert rows(dsn, PARTITIONS) == [("events_p20330615",)]
    broken = False
    if waiting_in == "dead_letters":
        rows(
            dsn,
            "WITH gone AS (DELETE FROM duly.dead_letters RETURNING *)"
            " INSERT INTO duly.jobs (id, name, entity_id, run_at, due_at, created_at, event_id, waits)"
            " SELECT id, name, entity_id, duly.now(), due_at, created_at, event_id, 'requeued' FROM gone",
        )
    await drain(db, app.handlers)
    assert seen == ["o1"]
    drop(dsn, "2033-08-01")
    assert rows(dsn, PARTITIONS) == []


async def test_the_clean_up_drops_what_is_older_than_the_retention(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E1.8, E3.16: with what the default partition kept, too."""
    clock.freeze(DAY)
    async with db.transaction() as tx:
        await maintenance.create_partitions(tx)
    assert len(rows(dsn, PARTITIONS)) == 8
    await publish(db, "in its partition")
    clock.freeze(DAY - timedelta(days=20))
    await publish(db, "in the default partition")
    clock.freeze(DAY + timedelta(days=30))
    async with db.transaction() as tx:
        said = await maintenance.drop_history(tx, events_days=30, executions_days=30)
    assert "1 row outside every partition" in said
    assert [aggregate for _, aggregate in rows(dsn, WHERE)] == ["in its partition"]
    clock.advance(days=1)
    async with db.transaction() as tx:
        await maintenance.drop_history(tx, events_days=30, executions_days=30)
    assert rows(dsn, WHERE) == []


# -- beside live traffic ---------------------------------------------------------------------------------------------


async def test_making_partitions_does_not_wait_for_readers_and_writers_of_other_days(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E1.8: an open report over today's history, and today's events, go on while tomorrow's partition is made."""
    clock.freeze(DAY)
    create(dsn, "2033-06-15", 1)
    await publish(db, "o1")
    with psycopg.connect(dsn) as report:
        report.execute("SELECT count(*) FROM duly.events_p20330615")
        async with db.transaction() as tx:
            await maintenance.create_partitions(tx)
            await publish(db, "o2")
            assert rows(dsn, "SELECT aggregate_id FROM duly.events_p20330615 ORDER BY 1") == [("o1",), ("o2",)]
    assert len(rows(dsn, PARTITIONS)) == 8
