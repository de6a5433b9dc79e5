"""Two at once: claim, delivery, change and deletion of one birthday, each way round, by real locks (B3 to B6)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from structlog.typing import EventDict

from apps.birthdays import service, store
from apps.birthdays.model import BirthdayEvent
from apps.users.events import UserDeleted
from apps.users.model import UserNotFound
from apps.wiring import app
from duly import Database, Worker
from duly.testing import BusinessClock, drain
from tests.apps.birthdays.acting import (
    NINE_IN_WARSAW,
    Answer,
    Receiver,
    change,
    check_consistent,
    claim,
    claim_only,
    delete,
    events_of,
    logged,
    pending_of,
    register,
    status_of,
)
from tests.apps.transfers.acting import until_waiting
from tests.support import rows, value

DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
FOLLOW = {name: handler for name, handler in app.handlers.items() if name.startswith("consumer:birthdays")}
TOKYO_2027 = datetime(2027, 6, 15, tzinfo=UTC)


async def event_of(db: Database, event_id: UUID) -> BirthdayEvent:
    async with db.transaction() as tx:
        prepared = await service.prepare_delivery(tx, event_id)
    assert prepared is not None
    return prepared if isinstance(prepared, BirthdayEvent) else prepared.event


# -- a change and a claim ---------------------------------------------------------------------------------------------


async def test_a_change_that_meets_a_claim_under_way_leaves_the_event_to_it(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver, log: list[EventDict]
) -> None:
    """B5, the second layer: read as pending, claimed before the write; the version tells."""
    user_id, event_id = await register(db)
    await change(db, user_id, timezone="Asia/Tokyo")
    clock.freeze(NINE_IN_WARSAW)
    async with db.transaction() as tx:
        assert (await service.claim_ready(tx, looks_for_missed=False)).claimed == (event_id,)
        following = asyncio.create_task(drain(db, FOLLOW))
        await until_waiting(dsn, 1)  # it has read PENDING and waits to write
    await following
    (warning,) = logged(log, "birthday_not_rescheduled")
    assert (warning["event_id"], warning["reason"]) == (str(event_id), "it was claimed meanwhile")
    (line,) = logged(log, "birthdays_rescheduled")
    assert (line["rescheduled"], line["skipped"], line["skipped_event_ids"]) == (0, 1, [str(event_id)])
    await drain(db, app.handlers)
    assert (hook.seen[0].body["timezone"], pending_of(dsn, user_id)[2]) == ("Europe/Warsaw", TOKYO_2027)
    check_consistent(dsn)


async def test_a_claim_that_is_rolled_back_leaves_the_event_to_the_change(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """B5: who waited for it finds it as it was."""
    user_id, _ = await register(db)
    await change(db, user_id, timezone="America/Los_Angeles")
    clock.freeze(NINE_IN_WARSAW)
    following: list[asyncio.Task[int]] = []

    async def claim_and_fail() -> None:
        async with db.transaction() as tx:
            await service.claim_ready(tx, looks_for_missed=False)
            following.append(asyncio.create_task(drain(db, FOLLOW)))
            await until_waiting(dsn, 1)
            raise RuntimeError("not after all")

    with pytest.raises(RuntimeError, match="after all"):
        await claim_and_fail()
    await following[0]
    assert pending_of(dsn, user_id)[1] == "America/Los_Angeles"
    check_consistent(dsn)


async def test_a_claim_that_meets_a_change_under_way_goes_on_without_it(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """B3: locked by the consumer, skipped; by the next claim it is planned for another time."""
    user_id, _ = await register(db)
    _, other = await register(db)
    await change(db, user_id, timezone="America/Los_Angeles")
    clock.freeze(NINE_IN_WARSAW)
    async with db.transaction() as tx:
        person = await store.change_person(tx, user_id, timezone="America/Los_Angeles")
        assert person is not None
        (event,) = (await store.find_open_events(tx, user_id)).events
        assert await store.reschedule_event(tx, event, event.target.in_zone(person.timezone))
        async with asyncio.timeout(10):
            assert (await claim_only(db)).claimed == (other,)
    await drain(db, FOLLOW)
    assert (await claim_only(db)).claimed == ()
    assert pending_of(dsn, user_id)[2] == NINE_IN_WARSAW + timedelta(hours=9)


# -- a change and a delivery ------------------------------------------------------------------------------------------


async def test_a_change_that_waits_for_a_delivery_moves_the_year_that_it_planned(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """B6: next year was planned by the old data in a commit that the change waited for."""
    user_id, event_id = await register(db)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    await change(db, user_id, timezone="Asia/Tokyo")
    event = await event_of(db, event_id)
    async with db.transaction() as tx:
        await service.complete(tx, event)
        following = asyncio.create_task(drain(db, FOLLOW))
        await until_waiting(dsn, 1)
    await following
    assert events_of(dsn, user_id) == [(2026, "COMPLETED"), (2027, "PENDING")]
    assert pending_of(dsn, user_id)[1:] == ("Asia/Tokyo", TOKYO_2027)


async def test_a_delivery_that_waits_for_a_change_plans_by_the_new_data(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """B6: the other way round."""
    user_id, event_id = await register(db)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    event = await event_of(db, event_id)

    async def complete() -> None:
        async with db.transaction() as tx:
            await service.complete(tx, event)

    async with db.transaction() as tx:
        await store.change_person(tx, user_id, timezone="Asia/Tokyo")
        completing = asyncio.create_task(complete())
        await until_waiting(dsn, 1)
    await completing
    assert pending_of(dsn, user_id)[1:] == ("Asia/Tokyo", TOKYO_2027)


# -- a deletion and everything ----------------------------------------------------------------------------------------


async def test_a_deletion_that_waits_for_a_delivery_takes_along_the_year_that_it_planned(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """B1: nothing is left pending for somebody who is gone."""
    user_id, event_id = await register(db)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    event = await event_of(db, event_id)
    async with db.transaction() as tx:
        await service.complete(tx, event)
        deleting = asyncio.create_task(delete(db, user_id))
        await until_waiting(dsn, 1)
    await deleting
    assert events_of(dsn, user_id) == [(2026, "COMPLETED")]
    check_consistent(dsn)


async def test_a_delivery_that_waits_for_a_deletion_plans_nothing(db: Database, dsn: str, clock: BusinessClock) -> None:
    """B1, B4: it was delivered, and that was the last one."""
    user_id, event_id = await register(db)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    event = await event_of(db, event_id)

    async def complete() -> None:
        async with db.transaction() as tx:
            await service.complete(tx, event)

    async with db.transaction() as tx:
        await service.drop(tx, UserDeleted(user_id=user_id))
        completing = asyncio.create_task(complete())
        await until_waiting(dsn, 1)
    await completing
    assert events_of(dsn, user_id) == [(2026, "COMPLETED")]


async def test_a_deletion_while_the_webhook_is_called(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B4: the message is out; the event is completed, and no other follows. No transaction is open meanwhile."""
    user_id, event_id = await register(db)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    hold = asyncio.Event()
    hook.answers = [Answer(hold=hold)]
    working = asyncio.create_task(drain(db, app.handlers))
    async with asyncio.timeout(20):
        await hook.arrived.wait()
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%%'"
    async with asyncio.timeout(20):  # whoever else has one for a moment ends it
        while value(dsn, query, {}):
            await asyncio.sleep(0.01)
    await delete(db, user_id)
    hold.set()
    await working
    assert (len(hook.seen), status_of(dsn, event_id)) == (1, "COMPLETED")
    assert events_of(dsn, user_id) == [(2026, "COMPLETED")]


async def test_a_deletion_that_meets_a_claim_under_way_leaves_it_to_the_delivery(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """B1: claimed in the same moment; the delivery finds nobody."""
    user_id, event_id = await register(db)
    clock.freeze(NINE_IN_WARSAW)
    async with db.transaction() as tx:
        await service.claim_ready(tx, looks_for_missed=False)
        deleting = asyncio.create_task(delete(db, user_id))
        await until_waiting(dsn, 1)
    await deleting
    await drain(db, app.handlers)
    assert (hook.seen, status_of(dsn, event_id)) == ([], "FAILED")
    check_consistent(dsn)


# -- recovery ---------------------------------------------------------------------------------------------------------


async def test_a_recovery_that_meets_a_delivery_under_way_changes_nothing(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """B6: read as stalled, completed before the write."""
    user_id, event_id = await register(db)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    clock.advance(minutes=16)
    event = await event_of(db, event_id)

    async def recover() -> int:
        async with db.transaction() as tx:
            return await service.recover(tx)

    async with db.transaction() as tx:
        await service.complete(tx, event)
        rows(dsn, "DELETE FROM duly.jobs WHERE name = 'birthdays.deliver'")  # as its settlement would, in this commit
        recovering = asyncio.create_task(recover())
        await until_waiting(dsn, 1)
    assert await recovering == 0
    assert events_of(dsn, user_id) == [(2026, "COMPLETED"), (2027, "PENDING")]


async def test_a_recovery_that_meets_a_delivery_that_fails_keeps_its_reason(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """B6: read as stalled, refused by the webhook before the write."""
    _, event_id = await register(db)
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    clock.advance(minutes=16)
    event = await event_of(db, event_id)

    async def recover() -> int:
        async with db.transaction() as tx:
            return await service.recover(tx)

    async with db.transaction() as tx:
        await service.fail(tx, event, reason="the webhook answered 410")
        rows(dsn, "DELETE FROM duly.jobs WHERE name = 'birthdays.deliver'")  # as its settlement would, in this commit
        recovering = asyncio.create_task(recover())
        await until_waiting(dsn, 1)
    assert await recovering == 0
    query = "SELECT failure_reason FROM birthdays.events WHERE id = %(id)s"
    assert value(dsn, query, {"id": event_id}) == "the webhook answered 410"


# -- everything at once -----------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
async def test_a_recheck_that_read_before_a_change_leaves_it_alone(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """B5: the version check; by what it read, it would bring back the zone that was left."""
    user_id, _ = await register(db)
    rows(dsn, "UPDATE birthdays.events SET target_utc = target_utc + interval '1 hour'")  # by rules of yesterday
    clock.freeze(NINE_IN_WARSAW - timedelta(days=1))

    async def recheck() -> int:
        async with db.transaction() as tx:
            return await service.recheck_zones(tx)

    with psycopg.connect(dsn) as rival:
        rival.execute(
            "UPDATE birthdays.events"
            " SET timezone = 'Asia/Tokyo', target_utc = '2026-06-15 00:00Z', version = version + 1"
        )
        checking = asyncio.create_task(recheck())
        await until_waiting(dsn, 1)
    assert await checking == 0
    assert pending_of(dsn, user_id)[1:] == ("Asia/Tokyo", datetime(2026, 6, 15, tzinfo=UTC))


async def test_a_storm_of_everything_has_no_deadlock_and_adds_up(
    db: Database, dsn: str, clock: BusinessClock, hook: Receiver
) -> None:
    """Claims, deliveries, changes, deletions and recoveries over the days of a year, without any barrier."""
    chance = random.Random(11)
    alive = [(await register(db, born=date(1990, 6, 1 + n % 28)))[0] for n in range(30)]
    ended: Counter[str] = Counter()
    zones = ["Asia/Tokyo", "America/Los_Angeles", "Europe/Warsaw", "Pacific/Apia", "Asia/Kathmandu"]

    async def act(number: int) -> None:
        user_id = chance.choice(alive)
        with contextlib.suppress(UserNotFound):  # who was deleted in this very moment
            await do(number, user_id)

    async def do(number: int, user_id: UUID) -> None:
        match number % 4:
            case 0:
                await change(db, user_id, timezone=chance.choice(zones))
            case 1:
                await change(db, user_id, date_of_birth=date(1990, 6, chance.randint(1, 28)))
            case 2:
                async with db.transaction() as tx:
                    await service.recover(tx)
            case _ if number == 3 and len(alive) > 10 and user_id in alive:
                alive.remove(user_id)
                await delete(db, user_id)
                ended["deleted"] += 1

    workers = [Database(dsn) for _ in range(2)]
    for day in range(30):
        clock.freeze(datetime(2026, 6, 1, 12, tzinfo=UTC) + timedelta(days=day))
        rows(dsn, "SELECT duly.schedule('birthdays.claim')")
        await asyncio.gather(
            *(act(number) for number in range(8)), *(Worker(own, app.handlers).run_once() for own in workers)
        )
    clock.freeze(datetime(2026, 8, 1, tzinfo=UTC))
    await claim(db, dsn)
    await drain(db, app.handlers)
    for own in workers:
        await own.close()
    assert value(dsn, DEADLOCKS) == 0
    assert rows(dsn, "SELECT name, error FROM duly.dead_letters") == []
    assert len(hook.keys) == len(set(hook.keys))
    assert ended["deleted"] > 3
    found = Counter(tuple(status for _, status in events_of(dsn, user_id)) for user_id in alive)
    assert found.keys() <= {("COMPLETED", "PENDING"), ("PENDING",)}  # corrected to a day that had passed: next year
    assert found["COMPLETED", "PENDING"] > 5
    check_consistent(dsn)


@pytest.mark.parametrize(
    ("harm", "rule"),
    [
        ("DELETE FROM duly.jobs WHERE name = 'birthdays.deliver'", "under way without a job"),
        ("DELETE FROM birthdays.events", "nothing to expect"),
        ("DELETE FROM birthdays.people", "pending for nobody"),
        ("UPDATE birthdays.people SET first_name = 'X'", "copy of a user differs"),
        ("UPDATE birthdays.events SET timezone = 'UTC' WHERE status = 'PENDING'", "not planned by the person's zone"),
    ],
)
async def test_the_checker_of_these_tests_sees_what_is_wrong(
    db: Database, dsn: str, clock: BusinessClock, harm: str, rule: str
) -> None:
    """A checker that cannot fail proves nothing."""
    await register(db)
    await register(db, born=date(1990, 7, 1))
    clock.freeze(NINE_IN_WARSAW)
    await claim_only(db)
    check_consistent(dsn)
    rows(dsn, harm)
    with pytest.raises(AssertionError, match=rule):
        check_consistent(dsn)
