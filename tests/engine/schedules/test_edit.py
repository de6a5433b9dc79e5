"""The operators' door: checked, audited, in the caller's transaction, in force at the next tick (E3.1)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from duly.db import Database
from duly.errors import BadCron, BadPayload, BadZone, Conflict, Invalid, NotFound
from duly.schedules.edit import (
    add_schedule,
    disable_schedule,
    edit_schedule,
    enable_schedule,
    get_schedule,
    list_schedules,
    remove_schedule,
    seed_schedule,
    trigger_schedule,
)
from duly.schedules.tables import schedules
from duly.schedules.tick import Scheduler
from duly.tables import metadata
from duly.telemetry import Origin, originating
from duly.testing import BusinessClock
from tests.support import rows, value

NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _only_our_schedules(dsn: str, clock: BusinessClock) -> None:
    """Without the engine's own clean-up, a little past noon."""
    rows(dsn, "DELETE FROM duly.schedules")
    clock.freeze(NOON + timedelta(seconds=10))


def audit(dsn: str) -> list[tuple[Any, ...]]:
    return rows(dsn, "SELECT actor, action, subject, reason, before, after FROM duly.audit ORDER BY id")


async def given_schedule(db: Database, name: str = "Report", cron: str = "0 * * * *", **given: Any) -> None:
    async with db.transaction() as tx:
        await add_schedule(tx, name=name, cron=cron, actor="setup", **given)


# -- add and seed --------------------------------------------------------------------------------------------


async def test_an_added_schedule_shows_its_next_run_at_once(db: Database) -> None:
    async with db.transaction() as tx:
        added = await add_schedule(
            tx,
            name="Report",
            cron=" 30  2 * * * ",
            timezone="Europe/Warsaw",
            max_retries=5,
            misfire="run_all",
            dst_gap="skip",
            dst_overlap="both",
            payload={"to": "ops", "share": 0.5},
            actor="ada",
        )
    async with db.transaction() as tx:
        assert await get_schedule(tx, "Report") == added
    assert (added.cron, added.timezone, added.max_retries, added.misfire) == (
        "30 2 * * *",
        "Europe/Warsaw",
        5,
        "run_all",
    )
    assert (added.dst_gap, added.dst_overlap, added.enabled, added.version) == ("skip", "both", True, 1)
    assert added.payload == {"to": "ops", "share": Decimal("0.5")}
    assert added.next_run_at == datetime(2026, 5, 5, 0, 30, tzinfo=UTC)
    assert added.updated_at == NOON + timedelta(seconds=10)
    assert added.missed == "0"


async def test_adding_a_name_that_exists_is_a_conflict(db: Database) -> None:
    await given_schedule(db)
    with pytest.raises(Conflict, match="'Report' exists already"):
        await given_schedule(db)


async def test_a_schedule_added_disabled_waits_without_a_next_run(db: Database, dsn: str) -> None:
    await given_schedule(db, enabled=False)
    assert value(dsn, "SELECT next_run_at FROM duly.schedules") is None
    assert (await Scheduler(db).run_once()).done == 0


async def test_seeding_adds_what_is_absent_and_leaves_what_is_there(db: Database, dsn: str) -> None:
    """E3.1: seeded by code or migration, then the database wins."""
    async with db.transaction() as tx:
        assert await seed_schedule(tx, name="Report", cron="0 * * * *")
        await edit_schedule(tx, "Report", cron="5 * * * *", actor="ada")
    async with db.transaction() as tx:
        assert not await seed_schedule(tx, name="Report", cron="0 * * * *")
        assert (await get_schedule(tx, "Report")).cron == "5 * * * *"
    assert [(row[0], row[1]) for row in audit(dsn)] == [("seed", "schedule.added"), ("ada", "schedule.edited")]


async def test_two_processes_that_seed_at_once_add_one(db: Database, dsn: str) -> None:
    barrier = asyncio.Barrier(2)

    async def seed() -> bool:
        async with db.transaction() as tx:
            await tx.execute(text("SELECT 1"))
            await barrier.wait()
            return await seed_schedule(tx, name="Report", cron="0 * * * *")

    assert sorted(await asyncio.gather(seed(), seed())) == [False, True]
    assert value(dsn, "SELECT count(*) FROM duly.schedules") == 1


# -- edit ----------------------------------------------------------------------------------------------------


async def test_an_edit_changes_what_is_given_and_counts_from_now(db: Database) -> None:
    """E3.1: an edit takes effect at the next tick."""
    await given_schedule(db, payload={"a": 1})
    async with db.transaction() as tx:
        after = await edit_schedule(
            tx, "Report", cron="*/5 * * * *", timezone="Asia/Kathmandu", max_retries=9, actor="ada", reason="busy"
        )
    assert (after.cron, after.timezone, after.max_retries) == ("*/5 * * * *", "Asia/Kathmandu", 9)
    assert (after.misfire, after.payload, after.enabled) == ("run_once", {"a": 1}, True)
    assert after.next_run_at == NOON + timedelta(minutes=5)
    assert after.version == 2


async def test_an_edit_of_anything_but_the_timing_loses_no_due_run(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    await given_schedule(db)
    clock.freeze(NOON + timedelta(hours=1, seconds=5))
    async with db.transaction() as tx:
        after = await edit_schedule(tx, "Report", max_retries=1, misfire="skip", payload={"b": 2}, actor="ada")
    assert after.next_run_at == NOON + timedelta(hours=1)
    assert (await Scheduler(db).run_once()).done == 1
    assert rows(dsn, "SELECT max_retries, payload FROM duly.jobs") == [(1, {"b": 2})]


async def test_an_edit_leaves_a_payload_it_does_not_name_untouched(db: Database, dsn: str) -> None:
    await given_schedule(db, payload={"share": 0.5, "big": 12345678901234567890})
    async with db.transaction() as tx:
        await edit_schedule(tx, "Report", max_retries=1, actor="ada")
        await disable_schedule(tx, "Report", actor="ada")
        await enable_schedule(tx, "Report", actor="ada")
    assert value(dsn, "SELECT payload::text FROM duly.schedules") == '{"big": 12345678901234567890, "share": 0.5}'
    async with db.transaction() as tx:
        await edit_schedule(tx, "Report", payload={}, actor="ada")
    assert value(dsn, "SELECT payload::text FROM duly.schedules") == "{}"


async def test_a_trigger_does_not_hold_back_the_schedule(db: Database, dsn: str, clock: BusinessClock) -> None:
    await given_schedule(db)
    clock.freeze(NOON + timedelta(hours=1))
    async with db.transaction() as tx:
        await trigger_schedule(tx, "Report", actor="ada")
        assert (await Scheduler(db).run_once()).done == 1


@pytest.mark.parametrize("change", [disable_schedule, remove_schedule, trigger_schedule])
async def test_nobody_changes_anything_without_a_name(db: Database, dsn: str, change: Any) -> None:
    """Refused before the first write, so that a caller who catches it commits nothing."""
    await given_schedule(db)
    async with db.transaction() as tx:
        with pytest.raises(Invalid, match="say who"):
            await change(tx, "Report", actor="")
    assert rows(dsn, "SELECT enabled, version FROM duly.schedules") == [(True, 1)]
    assert value(dsn, "SELECT count(*) FROM duly.jobs") == 0


async def test_an_edit_from_an_old_page_is_a_conflict_and_writes_nothing(db: Database, dsn: str) -> None:
    await given_schedule(db)
    async with db.transaction() as tx:
        await edit_schedule(tx, "Report", max_retries=1, expected_version=1, actor="ada")
    with pytest.raises(Conflict, match="it has version 2, you saw 1"):
        async with db.transaction() as tx:
            await edit_schedule(tx, "Report", max_retries=2, expected_version=1, actor="bob")
    assert rows(dsn, "SELECT max_retries, version FROM duly.schedules") == [(1, 2)]
    assert len(audit(dsn)) == 2


async def test_of_two_edits_of_one_version_at_once_one_wins(db: Database, dsn: str) -> None:
    await given_schedule(db)
    barrier = asyncio.Barrier(2)

    async def edit(max_retries: int) -> str:
        try:
            async with db.transaction() as tx:
                await tx.execute(text("SELECT 1"))
                await barrier.wait()
                await edit_schedule(tx, "Report", max_retries=max_retries, expected_version=1, actor="ada")
        except Conflict:
            return "conflict"
        return "done"

    assert sorted(await asyncio.gather(edit(1), edit(2))) == ["conflict", "done"]
    assert value(dsn, "SELECT version FROM duly.schedules") == 2


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"cron": "61 * * * *"}, BadCron, "minute field"),
        ({"cron": "0 0 30 2 *"}, BadCron, "never runs"),
        ({"timezone": "Mars/Olympus"}, BadZone, "no IANA time zone"),
        ({"max_retries": 1001}, Invalid, "0 to 1000"),
        ({"max_retries": -1}, Invalid, "0 to 1000"),
        ({"misfire": "panic"}, Invalid, "run_once, run_all, skip"),
        ({"dst_gap": "before"}, Invalid, "after or skip"),
        ({"dst_overlap": "none"}, Invalid, "first or both"),
        ({"payload": {"a": float("nan")}}, BadPayload, "not a JSON number"),
        ({"payload": {"a": "\x00"}}, BadPayload, "NUL"),
        ({"actor": " "}, Invalid, "say who"),
        ({"reason": "x" * 1001}, Invalid, "reason"),
        ({"reason": "\x00"}, Invalid, "NUL"),
        ({}, Invalid, "nothing to change"),
    ],
)
async def test_a_wrong_edit_says_what_is_wrong_and_writes_nothing(
    db: Database, dsn: str, wrong: dict[str, Any], error: type[Invalid], words: str
) -> None:
    await given_schedule(db)
    about_people = {"actor": "ada", "max_retries": 2} if wrong.keys() & {"actor", "reason"} else {"actor": "ada"}
    with pytest.raises(error, match=words):
        async with db.transaction() as tx:
            await edit_schedule(tx, "Report", **{**about_people, **wrong})
    assert value(dsn, "SELECT version FROM duly.schedules") == 1
    assert len(audit(dsn)) == 1


@pytest.mark.parametrize("name", ["", "1st", "a b", "x" * 101, "a\x00", "'; DROP TABLE duly.jobs; --"])
async def test_a_name_that_no_job_can_have_is_refused(db: Database, name: str) -> None:
    with pytest.raises(Invalid):
        await given_schedule(db, name=name)


async def test_an_edit_repairs_a_broken_row_and_resolves_its_alert(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    rows(dsn, "INSERT INTO duly.schedules (name, cron) VALUES ('Report', '61 * * * *')")
    await Scheduler(db).run_once()
    assert value(dsn, "SELECT count(*) FROM duly.alerts WHERE resolved_at IS NULL") == 1
    async with db.transaction() as tx:
        repaired = await edit_schedule(tx, "Report", cron="0 * * * *", actor="ada")
    assert repaired.last_error is None
    assert repaired.next_run_at == NOON + timedelta(hours=1)
    assert value(dsn, "SELECT count(*) FROM duly.alerts WHERE resolved_at IS NULL") == 0
    clock.freeze(NOON + timedelta(hours=1))
    assert (await Scheduler(db).run_once()).done == 1, "not taken for a row that is still broken"


async def test_a_tick_does_not_make_an_edit_stale(db: Database, clock: BusinessClock) -> None:
    await given_schedule(db)
    clock.freeze(NOON + timedelta(hours=1))
    await Scheduler(db).run_once()
    async with db.transaction() as tx:
        await edit_schedule(tx, "Report", max_retries=1, expected_version=1, actor="ada")


# -- enable, disable, remove ---------------------------------------------------------------------------------


async def test_what_falls_due_while_disabled_is_not_missed(db: Database, dsn: str, clock: BusinessClock) -> None:
    await given_schedule(db)
    async with db.transaction() as tx:
        disabled = await disable_schedule(tx, "Report", actor="ada", reason="holiday")
    assert (disabled.enabled, disabled.next_run_at, disabled.version) == (False, None, 2)
    clock.advance(days=3)
    await Scheduler(db).run_once()
    async with db.transaction() as tx:
        enabled = await enable_schedule(tx, "Report", actor="ada")
    assert enabled.next_run_at == NOON + timedelta(days=3, hours=1)
    await Scheduler(db).run_once()
    assert value(dsn, "SELECT count(*) FROM duly.jobs") == 0
    assert value(dsn, "SELECT missed_count FROM duly.schedules") == 0


async def test_an_edit_of_a_disabled_schedule_leaves_it_without_a_next_run(db: Database) -> None:
    await given_schedule(db, enabled=False)
    async with db.transaction() as tx:
        assert (await edit_schedule(tx, "Report", cron="5 * * * *", actor="ada")).next_run_at is None


async def test_enabling_twice_changes_nothing_the_second_time(db: Database, dsn: str, clock: BusinessClock) -> None:
    await given_schedule(db)
    clock.freeze(NOON + timedelta(hours=1, seconds=5))
    async with db.transaction() as tx:
        again = await enable_schedule(tx, "Report", actor="ada")
        assert again.next_run_at == NOON + timedelta(hours=1), "the run that is due is not lost"
        await disable_schedule(tx, "Report", actor="ada")
        await disable_schedule(tx, "Report", actor="ada")
    assert [row[1] for row in audit(dsn)] == ["schedule.added", "schedule.disabled"]


async def test_a_broken_schedule_can_be_disabled_but_not_enabled(db: Database, dsn: str) -> None:
    rows(dsn, "INSERT INTO duly.schedules (name, cron) VALUES ('Report', '61 * * * *')")
    async with db.transaction() as tx:
        await disable_schedule(tx, "Report", actor="ada")
    with pytest.raises(BadCron):
        async with db.transaction() as tx:
            await enable_schedule(tx, "Report", actor="ada")


async def test_removing_keeps_the_jobs_that_are_queued(db: Database, dsn: str, clock: BusinessClock) -> None:
    await given_schedule(db)
    clock.freeze(NOON + timedelta(hours=1))
    await Scheduler(db).run_once()
    async with db.transaction() as tx:
        await remove_schedule(tx, "Report", actor="ada")
    assert value(dsn, "SELECT count(*) FROM duly.schedules") == 0
    assert value(dsn, "SELECT count(*) FROM duly.jobs") == 1


# -- trigger -------------------------------------------------------------------------------------------------


async def test_a_trigger_queues_one_manual_job_for_now(db: Database, dsn: str) -> None:
    """E3.6, E3.8: source Manual; the original delay is the cron interval."""
    await given_schedule(db, payload={"a": 1}, max_retries=4)
    async with db.transaction() as tx:
        job_id = await trigger_schedule(tx, "Report", actor="ada", reason="asked by finance")
    now = NOON + timedelta(seconds=10)
    assert rows(
        dsn,
        "SELECT id, name, entity_id, source, payload, run_at, due_at, created_at, original_delay, max_retries,"
        " correlation_id IS NOT NULL FROM duly.jobs",
    ) == [
        (job_id, "Report", None, "Manual", {"a": 1}, now, now, now, timedelta(hours=1), 4, True)
    ]  # fmt: skip
    assert audit(dsn)[-1] == (
        "ada",
        "schedule.triggered",
        "schedule:Report",
        "asked by finance",
        None,
        {"job_id": job_id},
    )
    assert rows(dsn, "SELECT version, last_run_at, next_run_at FROM duly.schedules") == [
        (1, None, NOON + timedelta(hours=1))
    ]


async def test_a_trigger_carries_the_callers_correlation(db: Database, dsn: str) -> None:
    await given_schedule(db)
    wanted = UUID(int=7)
    with originating(Origin(correlation_id=wanted)):
        async with db.transaction() as tx:
            await trigger_schedule(tx, "Report", actor="ada")
    assert value(dsn, "SELECT correlation_id FROM duly.jobs") == wanted


async def test_a_disabled_or_broken_schedule_can_still_be_triggered(db: Database, dsn: str) -> None:
    await given_schedule(db, enabled=False)
    rows(dsn, "UPDATE duly.schedules SET cron = '61 * * * *'")
    async with db.transaction() as tx:
        await trigger_schedule(tx, "Report", actor="ada")
    assert value(dsn, "SELECT count(*) FROM duly.jobs") == 1


# -- read ----------------------------------------------------------------------------------------------------


async def test_schedules_are_listed_by_name_a_page_at_a_time(db: Database) -> None:
    for name in ("C", "A", "B"):
        await given_schedule(db, name)
    async with db.transaction() as tx:
        assert [row.name for row in await list_schedules(tx)] == ["A", "B", "C"]
        assert [row.name for row in await list_schedules(tx, limit=2)] == ["A", "B"]
        assert [row.name for row in await list_schedules(tx, after_name="B")] == ["C"]
        with pytest.raises(Invalid, match="after_name"):
            await list_schedules(tx, after_name="\x00")


async def test_a_row_tells_its_missed_runs_and_explains_itself(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.12: shown."""
    await given_schedule(db, cron="* * * * *")
    clock.advance(days=30)
    await Scheduler(db).run_once()
    async with db.transaction() as tx:
        row = await get_schedule(tx, "Report")
    assert row.missed == "1000+"
    assert row.missed_oldest == NOON + timedelta(minutes=1)
    assert row.parsed().describe() == "Every minute, UTC time"


async def test_an_unknown_name_is_not_found(db: Database) -> None:
    for name in ("Nope", "", "a\x00b", "x" * 1000):
        with pytest.raises(NotFound, match="no schedule called"):
            async with db.transaction() as tx:
                await get_schedule(tx, name)
    for change in (enable_schedule, disable_schedule, remove_schedule, trigger_schedule):
        with pytest.raises(NotFound, match="'Nope'"):
            async with db.transaction() as tx:
                await change(tx, "Nope", actor="ada")
    with pytest.raises(NotFound, match="'Nope'"):
        async with db.transaction() as tx:
            await edit_schedule(tx, "Nope", cron="* * * * *", actor="ada")


# -- the transaction and its trace ---------------------------------------------------------------------------


async def test_every_change_is_one_audit_row_with_before_and_after(db: Database, dsn: str) -> None:
    await given_schedule(db)
    async with db.transaction() as tx:
        await edit_schedule(tx, "Report", cron="5 * * * *", actor="ada", reason="traffic")
        await disable_schedule(tx, "Report", actor="bob")
        await enable_schedule(tx, "Report", actor="bob")
        await remove_schedule(tx, "Report", actor="eve", reason="gone")
    added, edited, disabled, enabled, removed = audit(dsn)
    assert [row[2] for row in audit(dsn)] == ["schedule:Report"] * 5
    assert (added[0], added[1], added[4], added[5]["cron"]) == ("setup", "schedule.added", None, "0 * * * *")
    assert edited[:4] == ("ada", "schedule.edited", "schedule:Report", "traffic")
    assert (edited[4]["cron"], edited[4]["version"]) == ("0 * * * *", 1)
    assert (edited[5]["cron"], edited[5]["version"]) == ("5 * * * *", 2)
    assert (disabled[1], disabled[5]["enabled"], disabled[5]["version"]) == ("schedule.disabled", False, 3)
    assert (enabled[1], enabled[5]["enabled"], enabled[5]["version"]) == ("schedule.enabled", True, 4)
    assert (removed[1], removed[3], removed[4]["version"], removed[5]) == ("schedule.removed", "gone", 4, None)


async def test_a_rolled_back_change_leaves_nothing(db: Database, dsn: str) -> None:
    await given_schedule(db)

    async def change_and_fail() -> None:
        async with db.transaction() as tx:
            await edit_schedule(tx, "Report", cron="5 * * * *", actor="ada")
            await trigger_schedule(tx, "Report", actor="ada")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await change_and_fail()
    assert rows(dsn, "SELECT cron, version FROM duly.schedules") == [("0 * * * *", 1)]
    assert value(dsn, "SELECT count(*) FROM duly.jobs") == 0
    assert len(audit(dsn)) == 1


async def test_changes_wake_the_scheduler_and_triggers_wake_the_workers(db: Database) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    listener = await db.connect()
    await listener.add_listener("duly", lambda *facts: heard.put_nowait(facts[3]))
    async with asyncio.timeout(20):
        await given_schedule(db)
        assert await heard.get() == "schedules"
        for change in (disable_schedule, enable_schedule):
            async with db.transaction() as tx:
                await change(tx, "Report", actor="ada")
            assert await heard.get() == "schedules"
        async with db.transaction() as tx:
            await edit_schedule(tx, "Report", max_retries=1, actor="ada")
        assert await heard.get() == "schedules"
        async with db.transaction() as tx:
            await trigger_schedule(tx, "Report", actor="ada")
        assert await heard.get() == "jobs"
        async with db.transaction() as tx:
            await remove_schedule(tx, "Report", actor="ada")
        assert await heard.get() == "schedules"
    await listener.close()


# -- the table -----------------------------------------------------------------------------------------------

COLUMNS = """
SELECT column_name, data_type, is_nullable, column_default FROM information_schema.columns
WHERE table_schema = %(schema)s AND table_name = 'schedules' ORDER BY ordinal_position
"""
CONSTRAINTS = """
SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE conrelid = CAST(%(schema)s || '.schedules' AS regclass) AND contype <> 'n' ORDER BY conname
"""
INDEXES = """
SELECT indexname, replace(indexdef, %(schema)s || '.', '') FROM pg_indexes
WHERE schemaname = %(schema)s AND tablename = 'schedules' ORDER BY indexname
"""


@pytest.mark.parametrize("question", [COLUMNS, CONSTRAINTS, INDEXES])
async def test_the_declared_table_is_the_migrated_table(db: Database, dsn: str, question: str) -> None:
    """Built a second time from its declaration, it is the same to the last default, constraint and index."""
    rows(dsn, "CREATE SCHEMA declared")
    async with db.engine.begin() as connection:
        declared = await connection.execution_options(schema_translate_map={"duly": "declared"})
        await declared.run_sync(schedules.create)
    assert schedules.metadata is metadata
    migrated = rows(dsn, question, {"schema": "duly"})
    assert migrated
    assert rows(dsn, question, {"schema": "declared"}) == migrated
