"""The scheduler: each occurrence becomes one job, whoever else runs, dies or was away (E3.1, E3.3, E3.4, E3.12)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from structlog.testing import capture_logs

from duly.db import Database, fetch
from duly.duty import Cycle
from duly.schedules.edit import edit_schedule
from duly.schedules.sql import CHOOSE_DUE_SCHEDULES
from duly.schedules.tick import BATCH, Scheduler
from duly.telemetry import OCCURRENCES_FIRED, OCCURRENCES_MISSED
from duly.testing import BusinessClock
from duly.wakeup import Wakeup
from tests.support import rows, value

NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def _only_our_schedules(dsn: str, clock: BusinessClock) -> None:
    """Without the engine's own clean-up, at noon."""
    rows(dsn, "DELETE FROM duly.schedules")
    clock.freeze(NOON)


def given_schedule(dsn: str, name: str, cron: str, **columns: Any) -> None:
    """A row as a migration or a hand at psql would write it."""
    given = {"name": name, "cron": cron, **columns}
    names = ", ".join(given)
    places = ", ".join(f"%({column})s" for column in given)
    rows(dsn, f"INSERT INTO duly.schedules ({names}) VALUES ({places})", given)


def jobs(dsn: str, name: str = "%") -> list[tuple[str, datetime]]:
    found = rows(dsn, "SELECT name, due_at FROM duly.jobs WHERE name LIKE %(n)s ORDER BY id", {"n": name})
    return [(row[0], row[1]) for row in found]


def due_ats(dsn: str, name: str = "%") -> list[datetime]:
    return [at for _, at in jobs(dsn, name)]


def column(dsn: str, name: str, expression: str) -> Any:
    return value(dsn, f"SELECT {expression} FROM duly.schedules WHERE name = %(name)s", {"name": name})


def alerts(dsn: str) -> list[tuple[Any, ...]]:
    return rows(dsn, "SELECT kind, subject, count, message FROM duly.alerts WHERE resolved_at IS NULL ORDER BY id")


async def tick_once(db: Database) -> Cycle:
    return await Scheduler(db).run_once()


# -- an occurrence becomes a job -----------------------------------------------------------------------------


async def test_a_new_row_gets_its_next_run_and_fires_nothing(db: Database, dsn: str) -> None:
    """E3.1: a migration seeds name and cron only."""
    given_schedule(dsn, "Report", "0 * * * *")
    cycle = await tick_once(db)
    assert cycle.done == 0
    assert jobs(dsn) == []
    assert column(dsn, "Report", "next_run_at") == NOON + timedelta(hours=1)
    assert column(dsn, "Report", "last_run_at") is None


async def test_a_due_occurrence_is_one_job_that_carries_what_the_schedule_says(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E3.1, E3.6: name, payload and retries of the schedule; the original delay is the cron interval."""
    given_schedule(dsn, "Report", "*/15 * * * *", payload='{"a": 1}', max_retries=7, next_run_at=NOON)
    clock.freeze(NOON + timedelta(seconds=2))
    assert (await tick_once(db)).done == 1
    assert rows(
        dsn,
        "SELECT name, entity_id, source, payload, max_retries, run_at, due_at, created_at, original_delay,"
        " retry_count, waits, correlation_id IS NOT NULL FROM duly.jobs",
    ) == [
        (
            "Report", None, "Scheduled", {"a": 1}, 7, NOON, NOON, NOON + timedelta(seconds=2),
            timedelta(minutes=15), 0, "due", True,
        )
    ]  # fmt: skip
    assert column(dsn, "Report", "last_run_at") == NOON
    assert column(dsn, "Report", "next_run_at") == NOON + timedelta(minutes=15)
    assert column(dsn, "Report", "version") == 1, "the clock is no editor"
    assert (await tick_once(db)).done == 0
    assert len(jobs(dsn)) == 1


async def test_nothing_fires_before_its_time(db: Database, dsn: str, clock: BusinessClock) -> None:
    given_schedule(dsn, "Report", "0 * * * *", next_run_at=NOON)
    clock.freeze(NOON - timedelta(microseconds=1))
    assert (await tick_once(db)).done == 0
    clock.freeze(NOON)
    assert (await tick_once(db)).done == 1


async def test_a_disabled_schedule_does_not_fire(db: Database, dsn: str) -> None:
    given_schedule(dsn, "Report", "0 * * * *", next_run_at=NOON, enabled=False)
    assert (await tick_once(db)).done == 0
    assert column(dsn, "Report", "next_run_at") == NOON


async def test_jobs_of_one_tick_have_ids_and_correlations_of_their_own_oldest_first(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    given_schedule(dsn, "B", "* * * * *", next_run_at=NOON - MINUTE)
    given_schedule(dsn, "A", "* * * * *", next_run_at=NOON)
    assert (await tick_once(db)).done == 3
    assert jobs(dsn) == [("B", NOON - MINUTE), ("A", NOON), ("B", NOON)]
    assert value(dsn, "SELECT count(DISTINCT correlation_id) FROM duly.jobs") == 3


async def test_local_time_decides_across_a_change_of_the_clocks(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.14, end to end: 02:30 does not exist on 29 March in Warsaw."""
    start = datetime(2026, 3, 27, 20, tzinfo=UTC)
    clock.freeze(start)
    given_schedule(dsn, "Night", "30 2 * * *", timezone="Europe/Warsaw")
    for _ in range(3 * 48):
        await tick_once(db)
        clock.advance(minutes=30)
    zone = ZoneInfo("Europe/Warsaw")
    assert [at.astimezone(zone).strftime("%d %H:%M") for at in due_ats(dsn)] == [
        "28 02:30",
        "29 03:00",
        "30 02:30",
    ]


async def test_an_edit_takes_effect_at_the_next_tick(db: Database, dsn: str, clock: BusinessClock) -> None:
    """E3.1: it was due at one; after the edit it is due at ten past twelve."""
    given_schedule(dsn, "Report", "0 13 * * *")
    await tick_once(db)
    async with db.transaction() as tx:
        await edit_schedule(tx, "Report", cron="*/10 * * * *", actor="ada")
    clock.advance(minutes=10)
    assert (await tick_once(db)).done == 1
    assert due_ats(dsn) == [NOON + timedelta(minutes=10)]


@pytest.mark.parametrize(
    ("edit", "following"),
    [
        ("cron = '*/10 * * * *'", NOON + timedelta(minutes=10)),
        ("timezone = 'Europe/Warsaw'", NOON + timedelta(hours=23)),
    ],
)
async def test_an_edit_by_plain_sql_takes_effect_at_the_next_tick(
    db: Database, dsn: str, clock: BusinessClock, edit: str, following: datetime
) -> None:
    """E3.1: the row says what is to be, and the scheduler that runs already plans it anew."""
    given_schedule(dsn, "Report", "0 13 * * *")
    scheduler = Scheduler(db)
    await scheduler.cycle()
    assert column(dsn, "Report", "next_run_at") == NOON + timedelta(hours=1)
    rows(dsn, f"UPDATE duly.schedules SET {edit} WHERE name = 'Report'")
    assert (await scheduler.cycle()).done == 0
    assert column(dsn, "Report", "next_run_at") == following
    clock.freeze(following)
    assert (await scheduler.cycle()).done == 1
    await scheduler.close()
    assert due_ats(dsn) == [following]


# -- the boundaries (E3.3) and the bound (E3.13) -------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "wait"), [(0.0, 30.0), (0.25, 29.75), (10.0, 20.0), (29.999, 0.001), (30.0, 30.0), (44.5, 15.5)]
)
async def test_the_next_tick_is_on_a_half_minute_of_the_databases_clock(
    db: Database, clock: BusinessClock, seconds: float, wait: float
) -> None:
    """E3.3: it waits for the boundary, not for an interval, so it cannot drift."""
    clock.freeze(NOON + timedelta(seconds=seconds))
    cycle = await tick_once(db)
    assert cycle.wait_seconds == pytest.approx(wait, abs=1e-6)


async def test_the_loop_waits_exactly_to_the_boundary_deaf_or_not(db: Database, clock: BusinessClock) -> None:
    """E3.3: no poll interval of the base class cuts the wait short."""
    clock.freeze(NOON + timedelta(seconds=4))
    deaf = Scheduler(db)
    assert deaf._pause(await deaf.run_once()) == pytest.approx(26.0)
    wakeup = Wakeup(db)
    wakeup.listening = True
    hearing = Scheduler(db, wakeup=wakeup)
    assert hearing._pause(await hearing.run_once()) == pytest.approx(26.0)


async def test_run_once_is_one_bounded_tick_and_says_that_more_is_due(db: Database, dsn: str) -> None:
    """E3.13: a hundred rows, then the caller comes again at once."""
    for number in range(BATCH + 20):
        given_schedule(dsn, f"S{number}", "0 12 * * *", next_run_at=NOON)
    scheduler = Scheduler(db)
    cycles = [await scheduler.cycle() for _ in range(3)]
    await scheduler.close()
    assert [(cycle.done, cycle.wait_seconds) for cycle in cycles] == [(BATCH, 0.0), (20, 30.0), (0, 30.0)]


async def test_new_rows_beyond_a_batch_do_not_wait_for_the_boundary(db: Database, dsn: str) -> None:
    for number in range(BATCH + 1):
        given_schedule(dsn, f"S{number}", "0 13 * * *")
    first = await tick_once(db)
    assert (first.done, first.wait_seconds) == (0, 0.0)
    await tick_once(db)
    assert value(dsn, "SELECT count(*) FROM duly.schedules WHERE next_run_at IS NULL") == 0


async def test_an_edit_wakes_a_sleeping_scheduler(db: Database, dsn: str) -> None:
    """E3.1, E3.3: the clock stands still, so only the wake-up can have caused the second tick."""
    wakeup = Wakeup(db)
    scheduler = SignallingScheduler(db, wakeup=wakeup)
    stop = asyncio.Event()
    listener = asyncio.create_task(wakeup.run(stop))
    async with asyncio.timeout(20):
        while not wakeup.listening:
            await asyncio.sleep(0)
        running = asyncio.create_task(scheduler.run(stop))
        await scheduler.ticked.wait()
        scheduler.ticked.clear()
        given_schedule(dsn, "Report", "0 13 * * *")
        db.poke("schedules")
        await scheduler.ticked.wait()
        assert column(dsn, "Report", "next_run_at") == NOON + timedelta(hours=1)
        stop.set()
        await asyncio.gather(running, listener)


class SignallingScheduler(Scheduler):
    """Says when a tick is over."""

    def __init__(self, db: Database, *, wakeup: Wakeup | None = None) -> None:
        super().__init__(db, wakeup=wakeup)
        self.ticked = asyncio.Event()

    async def cycle(self) -> Cycle:
        result = await super().cycle()
        self.ticked.set()
        return result


async def test_fired_jobs_wake_the_workers_after_the_commit(db: Database, dsn: str) -> None:
    given_schedule(dsn, "Report", "0 * * * *", next_run_at=NOON)
    async with listening(db) as heard, asyncio.timeout(20):
        await tick_once(db)
        assert await heard.get() == "jobs"


@contextlib.asynccontextmanager
async def listening(db: Database) -> AsyncIterator[asyncio.Queue[str]]:
    """The wake-ups that any process on this database would hear."""
    heard: asyncio.Queue[str] = asyncio.Queue()
    connection = await db.connect()
    await connection.add_listener("duly", lambda *facts: heard.put_nowait(facts[3]))
    yield heard
    await connection.close()


async def test_a_tick_costs_as_many_statements_for_a_hundred_schedules_as_for_one(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    async def statements(scheduler: Scheduler) -> list[str]:
        seen: list[str] = []
        connection = await scheduler.connection()
        with connection.query_logger(lambda record: seen.append(record.query)):
            await scheduler.cycle()
        return seen

    scheduler = Scheduler(db)
    given_schedule(dsn, "S0", "0 * * * *", next_run_at=NOON)
    await scheduler.cycle()  # the driver looks up array types once on each connection
    rows(dsn, "UPDATE duly.schedules SET next_run_at = %(at)s", {"at": NOON})
    one = await statements(scheduler)
    rows(dsn, "UPDATE duly.schedules SET next_run_at = %(at)s", {"at": NOON})
    for number in range(1, BATCH):
        given_schedule(dsn, f"S{number}", "0 * * * *", next_run_at=NOON)
    hundred = await statements(scheduler)
    idle = await statements(scheduler)
    await scheduler.close()
    assert len(jobs(dsn)) == 2 + BATCH
    assert one == hundred
    assert len(one) == 6, "BEGIN, choose, insert, advance, COMMIT, boundary"
    assert len(idle) == 4, "BEGIN, choose, COMMIT, boundary"


# -- several schedulers, and crashes (E3.4) ------------------------------------------------------------------


async def test_several_schedulers_at_once_fire_each_occurrence_once(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E3.4: eight on connections of their own, let loose together at every minute."""
    names = [f"S{number:02}" for number in range(30)]
    for name in names:
        given_schedule(dsn, name, "* * * * *", next_run_at=NOON)
    barrier = asyncio.Barrier(8)

    async def compete(scheduler: Scheduler) -> int:
        await scheduler.connection()
        await barrier.wait()
        return (await scheduler.cycle()).done

    schedulers = [Scheduler(db) for _ in range(8)]
    for _ in range(10):
        fired = await asyncio.gather(*(compete(scheduler) for scheduler in schedulers))
        await schedulers[0].cycle()  # whoever skipped a locked row finds it done or does it
        assert sum(fired) <= len(names)
        clock.advance(minutes=1)
    await asyncio.gather(*(scheduler.close() for scheduler in schedulers))
    expected = [(name, NOON + MINUTE * n) for n in range(10) for name in names]
    assert sorted(jobs(dsn)) == sorted(expected)


async def test_a_row_that_another_scheduler_holds_is_skipped_not_waited_for(db: Database, dsn: str) -> None:
    """E3.4: the holder dies without a commit; the occurrence is still due."""
    given_schedule(dsn, "Report", "0 * * * *", next_run_at=NOON)
    holder = await db.connect()
    transaction = holder.transaction()
    await transaction.start()
    assert len(await fetch(holder, CHOOSE_DUE_SCHEDULES, batch=100)) == 1
    assert (await tick_once(db)).done == 0
    await transaction.rollback()
    await holder.close()
    assert (await tick_once(db)).done == 1
    assert due_ats(dsn) == [NOON]


# -- after downtime (E3.12) ----------------------------------------------------------------------------------


async def test_run_once_queues_the_newest_of_what_was_missed(db: Database, dsn: str, clock: BusinessClock) -> None:
    given_schedule(dsn, "Report", "*/10 * * * *", next_run_at=NOON, misfire="run_once")
    clock.freeze(NOON + timedelta(minutes=65))
    assert (await tick_once(db)).done == 1
    assert due_ats(dsn) == [NOON + timedelta(minutes=60)]
    assert column(dsn, "Report", "next_run_at") == NOON + timedelta(minutes=70)
    assert column(dsn, "Report", "last_run_at") == NOON + timedelta(minutes=60)
    assert (await tick_once(db)).done == 0


async def test_run_once_covers_the_missed_ones_with_the_one_that_is_due_now(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    given_schedule(dsn, "Report", "* * * * *", next_run_at=NOON, misfire="run_once")
    clock.freeze(NOON + timedelta(hours=1))
    assert (await tick_once(db)).done == 1
    assert due_ats(dsn) == [NOON + timedelta(hours=1)]


async def test_run_all_queues_every_missed_one_oldest_first(db: Database, dsn: str, clock: BusinessClock) -> None:
    given_schedule(dsn, "Report", "*/10 * * * *", next_run_at=NOON, misfire="run_all")
    clock.freeze(NOON + timedelta(minutes=65))
    assert (await tick_once(db)).done == 7
    assert due_ats(dsn) == [NOON + timedelta(minutes=10 * n) for n in range(7)]


async def test_run_all_works_off_a_long_backlog_a_thousand_at_a_time(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E3.12: bounded batches, the rest at once in the next cycle, and one report for the whole downtime."""
    given_schedule(dsn, "Report", "* * * * *", next_run_at=NOON, misfire="run_all")
    clock.freeze(NOON + MINUTE * 2499)
    assert [(await tick_once(db)).done for _ in range(4)] == [1000, 1000, 500, 0]
    assert due_ats(dsn) == [NOON + MINUTE * n for n in range(2500)]
    assert column(dsn, "Report", "missed_count") == 1000
    assert column(dsn, "Report", "missed_oldest") == NOON
    assert column(dsn, "Report", "missed_newest") == NOON + MINUTE * 2497
    [(kind, subject, count, message)] = alerts(dsn)
    assert (kind, subject, count) == ("occurrences_missed", "Report", 1)
    assert message.startswith("runs missed: 1000+, the oldest of 2026-05-04 12:00 UTC")


async def test_what_is_missed_while_a_backlog_is_worked_off_joins_its_report(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    given_schedule(dsn, "Report", "* * * * *", next_run_at=NOON, misfire="run_all")
    clock.freeze(NOON + MINUTE * 1500)
    await tick_once(db)
    clock.advance(minutes=10)
    await tick_once(db)
    assert column(dsn, "Report", "missed_count") == 1010
    assert column(dsn, "Report", "missed_oldest") == NOON
    assert column(dsn, "Report", "missed_newest") == NOON + MINUTE * 1508


async def test_a_backlog_of_many_schedules_is_bounded_and_shared_fairly(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E3.12: no stampede; a schedule on time is not starved by the backlog of the others."""
    for number in range(49):
        given_schedule(dsn, f"Late{number}", "* * * * *", next_run_at=NOON, misfire="run_all")
    clock.freeze(NOON + MINUTE * 900)
    given_schedule(dsn, "OnTime", "0 * * * *", next_run_at=NOON + MINUTE * 900)
    assert (await tick_once(db)).done == 49 * 200 + 1
    assert len(jobs(dsn, "OnTime")) == 1


async def test_skip_drops_what_was_missed_and_fires_what_is_due_now(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    given_schedule(dsn, "Report", "*/10 * * * *", next_run_at=NOON, misfire="skip")
    clock.freeze(NOON + timedelta(minutes=65))
    assert (await tick_once(db)).done == 0
    assert jobs(dsn) == []
    assert column(dsn, "Report", "next_run_at") == NOON + timedelta(minutes=70)
    assert column(dsn, "Report", "last_run_at") is None
    assert column(dsn, "Report", "missed_count") == 7
    clock.freeze(NOON + timedelta(minutes=90, seconds=59))
    assert (await tick_once(db)).done == 1
    assert due_ats(dsn) == [NOON + timedelta(minutes=90)]


@pytest.mark.parametrize("misfire", ["run_once", "run_all", "skip"])
async def test_a_minute_late_is_not_missed_and_a_moment_more_is(
    db: Database, dsn: str, clock: BusinessClock, misfire: str
) -> None:
    given_schedule(dsn, "Report", "0 * * * *", next_run_at=NOON, misfire=misfire)
    clock.freeze(NOON + timedelta(seconds=60))
    assert (await tick_once(db)).done == 1
    assert (column(dsn, "Report", "missed_count"), alerts(dsn)) == (0, [])
    clock.freeze(NOON + timedelta(hours=1, seconds=60, microseconds=1))
    assert (await tick_once(db)).done == (0 if misfire == "skip" else 1)
    assert column(dsn, "Report", "missed_count") == 1


@pytest.mark.parametrize("misfire", ["run_once", "run_all", "skip"])
async def test_two_that_are_due_within_the_minute_both_fire_by_every_policy(
    db: Database, dsn: str, misfire: str
) -> None:
    given_schedule(dsn, "Report", "* * * * *", next_run_at=NOON - MINUTE, misfire=misfire)
    assert (await tick_once(db)).done == 2


async def test_missed_occurrences_are_logged_stored_counted_and_alerted(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E3.12: how many, the oldest and the newest, logged and shown."""
    name = "Missed.Report"
    given_schedule(dsn, name, "*/10 * * * *", next_run_at=NOON)
    clock.freeze(NOON + timedelta(minutes=35))
    missed_before = OCCURRENCES_MISSED.labels(name)._value.get()
    fired_before = OCCURRENCES_FIRED.labels(name)._value.get()
    with capture_logs() as logs:
        await tick_once(db)
    newest = NOON + timedelta(minutes=30)
    assert [entry for entry in logs if entry["event"] == "occurrences_missed"] == [
        {
            "event": "occurrences_missed",
            "log_level": "warning",
            "name": name,
            "missed": "4",
            "oldest": NOON.isoformat(),
            "newest": newest.isoformat(),
            "misfire": "run_once",
        }
    ]
    assert column(dsn, name, "ARRAY[missed_oldest, missed_newest]") == [NOON, newest]
    assert column(dsn, name, "missed_count") == 4
    assert OCCURRENCES_MISSED.labels(name)._value.get() - missed_before == 4
    assert OCCURRENCES_FIRED.labels(name)._value.get() - fired_before == 1
    assert alerts(dsn) == [
        (
            "occurrences_missed",
            name,
            1,
            "runs missed: 4, the oldest of 2026-05-04 12:00 UTC, the newest of 2026-05-04 12:30 UTC; "
            "by its rule (run_once) one job was queued, for the newest of what was due",
        )
    ]


@pytest.mark.parametrize(("misfire", "fired"), [("run_once", 1), ("skip", 1)])
async def test_a_year_of_missed_minutes_is_jumped_over_not_walked(
    db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch, misfire: str, fired: int
) -> None:
    """E3.12: counting stops at a thousand, and says so; half a million minutes are never computed."""
    given_schedule(dsn, "Report", "* * * * *", timezone="Europe/Warsaw", next_run_at=NOON, misfire=misfire)
    year_later = NOON + timedelta(days=365, seconds=30)
    clock.freeze(year_later)
    steps = 0
    real_step = CronSim.__next__

    def counted(iterator: CronSim) -> datetime:
        nonlocal steps
        steps += 1
        return real_step(iterator)

    monkeypatch.setattr(CronSim, "__next__", counted)
    with capture_logs() as logs:
        assert (await tick_once(db)).done == fired
    assert steps < 3000
    assert due_ats(dsn) == [year_later - timedelta(seconds=30)]
    assert column(dsn, "Report", "missed_count") == 1000
    assert column(dsn, "Report", "missed_newest") == year_later - timedelta(seconds=90)
    assert [entry["missed"] for entry in logs if entry["event"] == "occurrences_missed"] == ["1000+"]


# -- rows broken by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"cron": "61 * * * *"}, "minute field"),
        ({"cron": "0 0 30 2 *"}, "never runs"),
        ({"cron": "0 * * * *", "timezone": "../../etc/passwd"}, "no IANA time zone"),
    ],
)
async def test_a_broken_row_is_reported_and_put_off_while_the_others_go_on(
    db: Database, dsn: str, clock: BusinessClock, broken: dict[str, str], words: str
) -> None:
    given_schedule(dsn, "Broken", next_run_at=NOON, **broken)
    given_schedule(dsn, "Good", "0 * * * *", next_run_at=NOON)
    with capture_logs() as logs:
        cycle = await tick_once(db)
    assert jobs(dsn) == [("Good", NOON)]
    assert (cycle.done, cycle.facts["broken"]) == (1, 1)
    assert words in column(dsn, "Broken", "last_error")
    assert column(dsn, "Broken", "next_run_at") == NOON + timedelta(minutes=5), "it does not spin"
    [(kind, subject, _, message)] = alerts(dsn)
    assert (kind, subject) == ("schedule_broken", "Broken")
    assert words in message
    assert [entry["name"] for entry in logs if entry["event"] == "schedule_broken"] == ["Broken"]


async def test_a_next_run_at_minus_infinity_is_no_crash_but_a_new_beginning(db: Database, dsn: str) -> None:
    given_schedule(dsn, "Odd", "0 * * * *", next_run_at="-infinity", misfire="run_all")
    given_schedule(dsn, "Good", "0 * * * *", next_run_at=NOON)
    await tick_once(db)
    assert jobs(dsn) == [("Good", NOON)]
    assert column(dsn, "Odd", "next_run_at") == NOON + timedelta(hours=1)


async def test_a_repaired_row_runs_again_from_now_and_its_alert_is_resolved(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    given_schedule(dsn, "Report", "61 * * * *", next_run_at=NOON)
    await tick_once(db)
    rows(dsn, "UPDATE duly.schedules SET cron = '* * * * *'")
    clock.advance(minutes=5, seconds=10)
    await tick_once(db)
    assert jobs(dsn) == [], "what it would have run while it was broken is nobody's guess"
    assert column(dsn, "Report", "last_error") is None
    assert column(dsn, "Report", "next_run_at") == NOON + timedelta(minutes=6)
    assert alerts(dsn) == []
    clock.advance(minutes=1)
    assert (await tick_once(db)).done == 1


async def test_a_row_that_stays_broken_raises_its_one_alert_again(db: Database, dsn: str, clock: BusinessClock) -> None:
    given_schedule(dsn, "Report", "61 * * * *", next_run_at=NOON)
    for _ in range(3):
        await tick_once(db)
        clock.advance(minutes=5)
    assert [(kind, count) for kind, _, count, _ in alerts(dsn)] == [("schedule_broken", 3)]


# -- zone rules that changed ---------------------------------------------------------------------------------


async def test_a_process_with_newer_zone_rules_plans_anew(db: Database, dsn: str) -> None:
    """What an older process planned by rules that no longer hold is corrected before it fires."""
    stale = NOON + timedelta(hours=7)
    given_schedule(dsn, "Report", "0 20 * * *", timezone="Europe/Warsaw", next_run_at=stale)
    given_schedule(dsn, "Right", "0 18 * * *", next_run_at=NOON + timedelta(hours=6))
    given_schedule(dsn, "Broken", "61 * * * *", next_run_at=stale)
    with capture_logs() as logs:
        await tick_once(db)
    assert column(dsn, "Report", "next_run_at") == NOON + timedelta(hours=6)
    assert column(dsn, "Right", "next_run_at") == NOON + timedelta(hours=6)
    assert column(dsn, "Broken", "next_run_at") == stale
    assert [entry["names"] for entry in logs if entry["event"] == "schedules_replanned"] == [["Report"]]


async def test_planning_anew_goes_through_every_batch_once(db: Database, dsn: str) -> None:
    for number in range(2 * BATCH + 1):
        given_schedule(dsn, f"S{number:03}", "0 18 * * *", next_run_at=NOON + timedelta(hours=7))
    scheduler = Scheduler(db)
    waits = [(await scheduler.cycle()).wait_seconds for _ in range(4)]
    await scheduler.close()
    assert waits == [0.0, 0.0, 30.0, 30.0]
    assert value(dsn, "SELECT count(DISTINCT next_run_at) FROM duly.schedules") == 1
    assert column(dsn, "S200", "next_run_at") == NOON + timedelta(hours=6)


async def test_a_database_that_goes_away_between_ticks_is_found_again(db: Database, dsn: str) -> None:
    """E3.4: the connection is killed, the next cycle opens another, and the occurrence fires once."""
    scheduler = Scheduler(db)
    await scheduler.cycle()
    given_schedule(dsn, "Report", "0 * * * *", next_run_at=NOON)
    rows(dsn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'duly-scheduler'")
    stop = asyncio.Event()
    async with listening(db) as heard, asyncio.timeout(20):
        running = asyncio.create_task(scheduler.run(stop))
        assert await heard.get() == "jobs"
        stop.set()
        await running
    assert due_ats(dsn) == [NOON]
