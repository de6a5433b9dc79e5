"""Every minute: what is due is claimed, a hundred at a time, and handed to the queue in the same commit (B3, B7)."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest
from structlog.typing import EventDict

from apps.birthdays import service, store
from apps.wiring import app
from duly import Database, Scheduler, Worker
from duly.testing import BusinessClock, drain
from tests.apps.birthdays.acting import (
    NINE_IN_WARSAW,
    Receiver,
    claim,
    claim_only,
    fill,
    holding,
    logged,
    register,
    status_of,
    statuses,
)
from tests.apps.transfers.acting import counting
from tests.support import rows, value

JOBS = "SELECT name, entity_id FROM duly.jobs WHERE name LIKE 'birthdays.%' ORDER BY id"
SECOND = timedelta(seconds=1)
CLAIMING = {name: handler for name, handler in app.handlers.items() if name.startswith("birthdays.claim")}


def jobs(dsn: str, name: str) -> list[str]:
    return [entity for found, entity in rows(dsn, JOBS) if found == name]


@pytest.mark.usefixtures("clock")
async def test_the_schedules_come_with_the_migration(dsn: str) -> None:
    """B3, B6: every minute, and what was missed is one run."""
    query = "SELECT name, cron, timezone, misfire, enabled FROM duly.schedules WHERE name LIKE 'birthdays.%' ORDER BY 1"
    assert rows(dsn, query) == [
        ("birthdays.claim", "* * * * *", "UTC", "run_once", True),
        ("birthdays.forget-events", "23 4 * * *", "UTC", "run_once", True),
        ("birthdays.recheck-zones", "33 2 * * *", "UTC", "run_once", True),
        ("birthdays.recover", "*/10 * * * *", "UTC", "run_once", True),
    ]


async def test_a_second_before_its_time_nothing_is_claimed_and_at_its_time_it_is(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """B3: PROCESSING and the job that delivers it are one commit, and the version grows."""
    _, event_id = await register(db)
    clock.freeze(NINE_IN_WARSAW - SECOND)
    assert (await claim_only(db)).claimed == ()
    assert (statuses(dsn), rows(dsn, JOBS)) == ({"PENDING": 1}, [])
    clock.freeze(NINE_IN_WARSAW)
    assert (await claim_only(db)).claimed == (event_id,)
    assert rows(dsn, JOBS) == [("birthdays.deliver", str(event_id))]
    query = "SELECT status, version, processing_at, executed_at FROM birthdays.events"
    assert rows(dsn, query) == [("PROCESSING", 2, NINE_IN_WARSAW, None)]
    written = (
        "SELECT xmin::text FROM birthdays.events UNION SELECT xmin::text FROM duly.jobs WHERE entity_id IS NOT NULL"
    )
    assert len(rows(dsn, written)) == 1


async def test_the_jobs_carry_nothing_personal(db: Database, dsn: str, clock: BusinessClock) -> None:
    """B3: an id, and no more."""
    await register(db)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    assert rows(dsn, "SELECT payload FROM duly.jobs WHERE name = 'birthdays.deliver'") == [({},)]


async def test_a_hundred_at_a_time_the_oldest_first(db: Database, dsn: str, clock: BusinessClock) -> None:
    """B3, B7."""
    events = fill(dsn, 250, every=-timedelta(minutes=1))[::-1]  # the oldest first
    clock.freeze(NINE_IN_WARSAW)
    claims = [await claim_only(db) for _ in range(4)]
    assert [len(one.claimed) for one in claims] == [100, 100, 50, 0]
    assert [one.has_more for one in claims] == [True, True, False, False]
    assert [event_id for one in claims for event_id in one.claimed] == events
    assert jobs(dsn, "birthdays.deliver") == [str(event_id) for event_id in events]


@pytest.mark.parametrize("due", [0, 1, 10, 99])
async def test_the_number_of_statements_does_not_depend_on_how_many_are_due(
    db: Database, dsn: str, clock: BusinessClock, due: int
) -> None:
    """B3: look and lock, mark, hand over; nothing more when nothing is due."""
    fill(dsn, due)
    clock.freeze(NINE_IN_WARSAW)
    async with counting(db) as sent:
        assert len((await claim_only(db)).claimed) == due
    assert len(sent) == (3 if due else 1), sent


async def test_a_full_batch_asks_for_one_more_claim_at_once(db: Database, dsn: str, clock: BusinessClock) -> None:
    """B3: unique while it is pending, however often it is asked for; one statement more."""
    fill(dsn, 300)
    clock.freeze(NINE_IN_WARSAW)
    async with counting(db) as sent:
        assert (await claim_only(db)).has_more
    assert len(sent) == 4, sent
    assert (await claim_only(db)).has_more
    query = "SELECT entity_id, run_at FROM duly.jobs WHERE name = 'birthdays.claim-more'"
    assert rows(dsn, query) == [("next", NINE_IN_WARSAW)]


async def test_at_most_a_thousand_are_under_way_and_the_rest_waits_for_room(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """B7: no stampede; when there is no room, one look a second later."""
    fill(dsn, 1_250)
    clock.freeze(NINE_IN_WARSAW)
    rows(dsn, "SELECT duly.schedule('birthdays.claim')")
    await drain(db, CLAIMING)
    assert statuses(dsn) == {"PENDING": 250, "PROCESSING": 1_000}
    query = "SELECT run_at FROM duly.jobs WHERE name = 'birthdays.claim-more'"
    assert rows(dsn, query) == [(NINE_IN_WARSAW + SECOND,)]
    # 30 are delivered: so many are taken, and the next look is again a second later
    rows(
        dsn,
        """UPDATE birthdays.events SET status = 'COMPLETED', executed_at = duly.now()
           WHERE id = ANY(ARRAY(SELECT id FROM birthdays.events WHERE status = 'PROCESSING' LIMIT 30))""",
    )
    clock.advance(seconds=1)
    await drain(db, CLAIMING)
    assert statuses(dsn) == {"PENDING": 220, "PROCESSING": 1_000, "COMPLETED": 30}
    assert rows(dsn, query) == [(NINE_IN_WARSAW + 2 * SECOND,)]
    # nothing ended for a second: the next look is later
    clock.advance(seconds=1)
    await drain(db, CLAIMING)
    assert statuses(dsn) == {"PENDING": 220, "PROCESSING": 1_000, "COMPLETED": 30}
    assert rows(dsn, query) == [(NINE_IN_WARSAW + 12 * SECOND,)]


async def test_without_room_nobody_looks_again_when_nothing_waits(db: Database, dsn: str, clock: BusinessClock) -> None:
    """B7: a webhook that is away for hours does not mean a claim every second."""
    fill(dsn, 1_000)
    clock.freeze(NINE_IN_WARSAW)
    rows(dsn, "SELECT duly.schedule('birthdays.claim')")
    await drain(db, CLAIMING)
    assert statuses(dsn) == {"PROCESSING": 1_000}
    clock.advance(seconds=1)
    assert await drain(db, CLAIMING) == 1  # one look more, since the last batch was a full one
    assert jobs(dsn, "birthdays.claim-more") == []


async def test_events_that_others_hold_are_left_to_them(db: Database, dsn: str, clock: BusinessClock) -> None:
    """B3: SKIP LOCKED; nobody waits."""
    first, second, third = fill(dsn, 3)
    clock.freeze(NINE_IN_WARSAW)
    with holding(dsn, second):
        async with asyncio.timeout(10):
            assert (await claim_only(db)).claimed == (first, third)
    assert (await claim_only(db)).claimed == (second,)


async def test_a_version_that_is_not_the_one_that_was_read_is_skipped_and_logged(
    db: Database, dsn: str, clock: BusinessClock, log: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3: the second safeguard, for whoever changes events without our locks."""
    events = fill(dsn, 3)
    clock.freeze(NINE_IN_WARSAW)
    read = store.lock_ready

    async def changed_by_others(*given: object, **named: object) -> store.Ready:
        ready = await read(*given, **named)  # type: ignore[arg-type]  # handed on as it came
        stale = tuple((event_id, version - (event_id == events[1])) for event_id, version in ready.events)
        return store.Ready(ready.now, ready.room, ready.oldest, stale)

    monkeypatch.setattr(store, "lock_ready", changed_by_others)
    assert (await claim_only(db)).claimed == (events[0], events[2])
    assert logged(log, "birthdays_not_claimed")[0]["event_ids"] == [str(events[1])]
    assert status_of(dsn, events[1]) == "PENDING"
    assert jobs(dsn, "birthdays.deliver") == [str(events[0]), str(events[2])]


async def test_claims_at_once_take_each_event_once(db: Database, dsn: str, clock: BusinessClock) -> None:
    """B3: eight workers behind one barrier, on connections of their own."""
    events = fill(dsn, 450)
    clock.freeze(NINE_IN_WARSAW)
    databases = [Database(dsn, pool_size=1) for _ in range(8)]
    barrier = asyncio.Barrier(len(databases))

    async def one(own: Database) -> list[UUID]:
        async with own.transaction() as tx:
            await tx.connection()
            await barrier.wait()
            return list((await service.claim_ready(tx, looks_for_missed=False)).claimed)

    taken = await asyncio.gather(*(one(own) for own in databases))
    for own in databases:
        await own.close()
    together = [event_id for some in taken for event_id in some]
    assert len(together) == len(set(together))
    assert set(together) <= set(events)
    assert sum(bool(some) for some in taken) > 1, "nobody else got anything: that was no race"
    assert jobs(dsn, "birthdays.deliver") == sorted(map(str, together), key=jobs(dsn, "birthdays.deliver").index)
    while (await claim_only(db)).claimed:
        pass
    assert statuses(dsn) == {"PROCESSING": 450}
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'birthdays.deliver'") == 450


async def test_the_scheduler_claims_every_minute_and_workers_deliver(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B3: tick, claim, queue, delivery; through the real schedule."""
    _, event_id = await register(db)
    await Scheduler(db).run_once()
    clock.freeze(NINE_IN_WARSAW - timedelta(minutes=1))
    await Scheduler(db).run_once()
    await drain(db, {name: handler for name, handler in app.handlers.items() if name.startswith("birthdays.")})
    assert hook.seen == []
    clock.freeze(NINE_IN_WARSAW)
    await Scheduler(db).run_once()
    await drain(db, {name: handler for name, handler in app.handlers.items() if name.startswith("birthdays.")})
    assert hook.keys == [str(event_id)]
    assert status_of(dsn, event_id) == "COMPLETED"


# -- after downtime ---------------------------------------------------------------------------------------------------


async def test_what_was_missed_is_counted_told_and_then_delivered_the_oldest_first(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, log: list[EventDict]
) -> None:
    """B7: in the log and in the run's own message; each delivery says by how much it is late."""
    events = fill(dsn, 30, every=-timedelta(days=1))[::-1]
    clock.freeze(NINE_IN_WARSAW + timedelta(hours=2))
    await claim(db, dsn)
    (found,) = logged(log, "missed_birthdays_found")
    assert (found["count"], found["is_limit"]) == (30, False)
    assert (found["oldest"], found["newest"]) == ("2026-05-17T07:00:00+00:00", "2026-06-15T07:00:00+00:00")
    query = "SELECT message FROM duly.executions WHERE name = 'birthdays.claim'"
    assert rows(dsn, query) == [
        ("found 30 missed, the oldest of 2026-05-17 07:00 UTC, the newest of 2026-06-15 07:00 UTC; claimed 30",)
    ]
    assert sorted(hook.keys) == sorted(str(event_id) for event_id in events)
    for seen in hook.seen:
        days = 29 - events.index(UUID(seen.key))
        assert seen.body["lateSeconds"] == days * 86_400 + 7_200
        words = f"{days} day{'s' if days > 1 else ''}" if days else "2 hours"
        assert seen.body["message"].endswith(f"Sorry to be {words} late.")
    assert hook.keys[:10] != hook.keys[-10:]
    places = [events.index(UUID(key)) for key in hook.keys]
    assert max(abs(place - index) for index, place in enumerate(places)) < 20  # ten at a time, in order


async def test_no_more_than_a_thousand_missed_are_counted(
    db: Database, dsn: str, clock: BusinessClock, log: list[EventDict]
) -> None:
    """B7: the limit is on the finding, too."""
    fill(dsn, 1_100, every=-timedelta(minutes=1))
    clock.freeze(NINE_IN_WARSAW + timedelta(hours=1))
    async with counting(db) as sent:
        found = await claim_only(db)
    assert len(sent) == 5, sent
    assert found.missed is not None
    assert (found.missed.count, found.missed.oldest) == (1_000, NINE_IN_WARSAW - timedelta(minutes=1_099))
    assert logged(log, "missed_birthdays_found")[0]["is_limit"] is True


@pytest.mark.parametrize(("late_seconds", "is_missed"), [(0, False), (60, False), (90, False), (91, True)])
async def test_missed_is_what_is_more_than_ninety_seconds_late(
    db: Database, dsn: str, clock: BusinessClock, log: list[EventDict], late_seconds: int, is_missed: bool
) -> None:
    """B7: within a minute and a half it is merely waiting for its turn."""
    fill(dsn, 1)
    clock.freeze(NINE_IN_WARSAW + timedelta(seconds=late_seconds))
    found = await claim_only(db)
    assert (found.missed is not None, len(found.claimed)) == (is_missed, 1)
    assert bool(logged(log, "missed_birthdays_found")) is is_missed


async def test_a_follow_up_does_not_count_again(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, log: list[EventDict]
) -> None:
    """B7: 250 missed are three claims and one finding; all of them arrive, ten at a time at most."""
    hook.takes_seconds = 0.02
    fill(dsn, 250)
    clock.freeze(NINE_IN_WARSAW + timedelta(days=3))
    await claim(db, dsn)
    assert len(logged(log, "missed_birthdays_found")) == 1
    assert (len(hook.keys), len(set(hook.keys)), statuses(dsn)) == (250, 250, {"COMPLETED": 250, "PENDING": 250})
    assert 1 < hook.most_at_once <= 10


async def test_a_year_of_downtime_is_delivered_year_by_year(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B7: a birthday that is late is still delivered, also one of the year before."""
    user_id, _ = await register(db)
    clock.freeze(NINE_IN_WARSAW + timedelta(days=800))
    for _ in range(4):
        await claim(db, dsn)
    assert [seen.body["targetLocal"] for seen in hook.seen] == [f"{year}-06-15T09:00:00" for year in (2026, 2027, 2028)]
    assert [seen.body["lateSeconds"] // 86_400 for seen in hook.seen] == [800, 435, 69]
    query = "SELECT year FROM birthdays.events WHERE user_id = %(id)s AND status = 'PENDING'"
    assert rows(dsn, query, {"id": user_id}) == [(2029,)]


async def test_a_claim_that_fails_leaves_nothing(db: Database, dsn: str, clock: BusinessClock) -> None:
    """B3: neither half: no message under way without a job, no job without a message."""
    fill(dsn, 5)
    clock.freeze(NINE_IN_WARSAW)
    rows(
        dsn,
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               RAISE EXCEPTION 'no room'; END $$;
           CREATE TRIGGER refuse BEFORE INSERT ON duly.jobs FOR EACH ROW WHEN (NEW.name = 'birthdays.deliver')
               EXECUTE FUNCTION refuse()""",
    )
    with pytest.raises(Exception, match="no room"):
        await claim_only(db)
    assert statuses(dsn) == {"PENDING": 5}
    rows(dsn, "DROP TRIGGER refuse ON duly.jobs")
    assert len((await claim_only(db)).claimed) == 5


async def test_several_workers_share_the_deliveries_and_no_more_than_ten_run(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B3: in tens, over all processes together."""
    hook.takes_seconds = 0.02
    fill(dsn, 120)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    await claim_only(db)
    databases = [Database(dsn) for _ in range(3)]
    for _ in range(40):
        await asyncio.gather(*(Worker(own, app.handlers).run_once() for own in databases))
        if statuses(dsn).get("COMPLETED") == 120:
            break
    for own in databases:
        await own.close()
    assert (len(hook.keys), len(set(hook.keys))) == (120, 120)
    assert 5 < hook.most_at_once <= 10
