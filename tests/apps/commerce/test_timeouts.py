"""What ends an order that nobody pays: its timer, the sweep after it, and the last net (C2, C3)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from apps.commerce import service
from apps.commerce.service import SWEEP_LIMIT, Sweep
from apps.wiring import app
from duly.db import Database
from duly.operate.dead_letters import retry_dead_letter
from duly.schedules.tick import Scheduler
from duly.testing import BusinessClock, drain
from tests.apps.commerce.acting import (
    Customers,
    check_consistent,
    count,
    counting,
    events_of,
    fill,
    holding,
    run_job,
    runs_of,
    statuses,
    timers_of,
)
from tests.support import rows, value

NOON = datetime(2033, 5, 4, 12, tzinfo=UTC)
WAITING, EXPIRED, PAID = ("AWAITING_PAYMENT", "PENDING"), ("EXPIRED", "EXPIRED"), ("PAID", "PAID")
BREAK = """
CREATE FUNCTION commerce.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'the disk of this row is broken' USING ERRCODE = 'XX001';
END $$;
CREATE TRIGGER fail BEFORE UPDATE ON commerce.payments FOR EACH ROW EXECUTE FUNCTION commerce.fail()
"""
MEND = "DROP TRIGGER fail ON commerce.payments"


# -- the timer -------------------------------------------------------------------------------------------------------


async def test_the_timer_expires_order_and_payment_with_one_event(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C2: at its time and not a moment before it; the last net is withdrawn."""
    clock.freeze(NOON)
    order = await shop.place()
    clock.advance(minutes=15, microseconds=-1)
    await drain(db, app.handlers)
    assert (statuses(dsn, order), runs_of(dsn, "PaymentTimeout")) == (WAITING, [])
    clock.advance(microseconds=1)
    await drain(db, app.handlers)
    assert (statuses(dsn, order), timers_of(dsn, order)) == (EXPIRED, [])
    assert runs_of(dsn, "PaymentTimeout") == [("done", "the order and its payment have expired")]
    shown = (await shop.get("ann", f"/v1/orders/{order}")).json()
    assert shown["payment"] == {
        "status": "EXPIRED", "dueAt": "2033-05-04T12:15:00Z", "settledAt": "2033-05-04T12:15:00Z"
    }  # fmt: skip
    assert value(dsn, "SELECT payload FROM duly.event_log WHERE type = 'OrderExpired'") == {
        "order_id": order, "customer_id": "ann", "payment_due_at": "2033-05-04T12:15:00+00:00",
        "expired_at": "2033-05-04T12:15:00+00:00",
    }  # fmt: skip
    check_consistent(dsn)


async def test_an_expired_order_cannot_be_paid(shop: Customers, db: Database, dsn: str, clock: BusinessClock) -> None:
    """C2: 409, with a type of its own."""
    order = await shop.place()
    clock.advance(minutes=16)
    await drain(db, app.handlers)
    answer = await shop.pay(order)
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:duly:problem:already-expired")
    assert (statuses(dsn, order), events_of(dsn, order)) == (EXPIRED, ["OrderPlaced", "OrderExpired"])
    check_consistent(dsn)


async def test_a_timer_that_fires_twice_expires_once(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C2: the second finds it settled, does nothing and says so."""
    order = await shop.place()
    clock.advance(minutes=16)
    for _ in range(2):
        rows(dsn, "SELECT duly.schedule('PaymentTimeout', %(id)s)", {"id": order})
        await drain(db, app.handlers)
    assert runs_of(dsn, "PaymentTimeout") == [
        ("done", "the order and its payment have expired"), ("done", "nothing to do: the order is EXPIRED")
    ]  # fmt: skip
    check_consistent(dsn)


@pytest.mark.parametrize("name", ["PaymentTimeout", "OrderExpiration"])
async def test_a_timer_that_comes_after_the_payment_does_nothing_and_says_so(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock, name: str
) -> None:
    """C2: as when it ran already while the customer paid."""
    order = await shop.place()
    await shop.pay(order)
    clock.advance(hours=49)
    rows(dsn, "SELECT duly.schedule(%(name)s, %(id)s)", {"name": name, "id": order})
    await drain(db, app.handlers)
    assert runs_of(dsn, name) == [("done", "nothing to do: the order is PAID")]
    assert statuses(dsn, order) == PAID
    check_consistent(dsn)


async def test_a_timer_that_somebody_runs_early_waits_for_its_time(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C2: nothing expires before its time, whoever asks for it."""
    clock.freeze(NOON)
    order = await shop.place()
    clock.advance(minutes=5)
    rows(dsn, "SELECT duly.schedule('PaymentTimeout', %(id)s)", {"id": order})
    await drain(db, app.handlers)
    assert (statuses(dsn, order), runs_of(dsn, "PaymentTimeout")[0][0]) == (WAITING, "snoozed")
    assert timers_of(dsn, order)[0] == ("PaymentTimeout", NOON + timedelta(minutes=15))
    clock.advance(minutes=10)
    await drain(db, app.handlers)
    assert statuses(dsn, order) == EXPIRED


@pytest.mark.parametrize(
    ("entity", "outcome", "words"),
    [
        ("00000000-0000-7000-8000-000000000000", "cancelled", "no order has the id"),
        ("order-7", "buried", "its entity is no id"),
    ],
)
async def test_a_timer_about_nothing_ends(db: Database, dsn: str, entity: str, outcome: str, words: str) -> None:
    """C2: trying again is no help."""
    rows(dsn, "SELECT duly.schedule('PaymentTimeout', %(id)s)", {"id": entity})
    await drain(db, app.handlers)
    [(how, message)] = runs_of(dsn, "PaymentTimeout")
    assert how == outcome
    assert words in str(message)


async def test_a_failing_timer_is_retried_after_a_tenth_and_a_fifth_of_its_delay_then_buried(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C2, E3.6: 15 minutes, so 1.5 and 3 minutes; then it is an operator's, and the sweep does what it did not."""
    clock.freeze(NOON)
    order = await shop.place()
    rows(dsn, BREAK)
    clock.advance(minutes=15)
    for minutes, status in ((1.5, WAITING), (3, WAITING), (0, WAITING)):
        await drain(db, app.handlers)
        assert statuses(dsn, order) == status
        if minutes:
            expected = ("PaymentTimeout", clock.now() + timedelta(minutes=minutes))
            assert timers_of(dsn, order)[0] == expected
            clock.advance(minutes=minutes, microseconds=-1)
            assert await drain(db, app.handlers) == 0
            clock.advance(microseconds=1)
    assert [outcome for outcome, _ in runs_of(dsn, "PaymentTimeout")] == ["retried", "retried", "buried"]
    [(name, entity, letter)] = rows(dsn, "SELECT name, entity_id, id FROM duly.dead_letters")
    assert (name, entity) == ("PaymentTimeout", order)
    rows(dsn, MEND)
    await run_job(db, dsn, "PaymentExpiration")
    assert statuses(dsn, order) == EXPIRED
    async with db.transaction() as tx:
        await retry_dead_letter(tx, letter, actor="test", reason="the disk is mended")
    await drain(db, app.handlers)
    assert runs_of(dsn, "PaymentTimeout")[-1] == ("done", "nothing to do: the order is EXPIRED")
    check_consistent(dsn)


async def test_a_retry_of_the_last_net_waits_an_hour_at_most(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C3, E3.6: a tenth of 48 hours would be 4.8."""
    clock.freeze(NOON)
    order = await shop.place()
    rows(dsn, "DELETE FROM duly.jobs WHERE name = 'PaymentTimeout'")
    rows(dsn, BREAK)
    clock.advance(hours=48)
    await drain(db, app.handlers)
    assert timers_of(dsn, order) == [("OrderExpiration", NOON + timedelta(hours=49))]


async def test_the_last_net_closes_what_everything_else_missed_and_warns(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C3: also when schedules and timers are gone."""
    order, paid = await shop.place(), await shop.place()
    await shop.pay(paid)
    rows(dsn, "DELETE FROM duly.jobs WHERE name = 'PaymentTimeout'")
    clock.advance(hours=48, seconds=1)
    with capture_logs() as logs:
        await drain(db, app.handlers)
    assert (statuses(dsn, order), statuses(dsn, paid)) == (EXPIRED, PAID)
    assert runs_of(dsn, "OrderExpiration") == [("done", "the order and its payment have expired")]
    [warned] = [line for line in logs if line["log_level"] == "warning"]
    assert (warned["event"], warned["order_id"]) == ("order_expired_by_the_last_net", order)
    check_consistent(dsn)


# -- the sweep -------------------------------------------------------------------------------------------------------


async def test_the_sweep_expires_what_timers_missed_and_warns_with_the_count(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C3: what is paid, or not overdue, is left alone."""
    lost, paid = await shop.place(), await shop.place()
    await shop.pay(paid)
    rows(dsn, "DELETE FROM duly.jobs WHERE name = 'PaymentTimeout'")
    clock.advance(minutes=14)
    young = await shop.place()
    clock.advance(minutes=2, seconds=1)
    with capture_logs() as logs:
        await run_job(db, dsn, "PaymentExpiration")
    assert (statuses(dsn, lost), statuses(dsn, paid), statuses(dsn, young)) == (EXPIRED, PAID, WAITING)
    assert runs_of(dsn, "PaymentExpiration") == [("done", "expired 1 that their timers missed")]
    [warned] = [line for line in logs if line["event"] == "payments_swept"]
    assert (warned["log_level"], warned["count"]) == ("warning", 1)
    check_consistent(dsn)


async def test_a_sweep_without_work_says_nothing_loud(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C3: nor does it take what its own timer is about to do: a warning must mean that something failed."""
    await shop.place()
    clock.advance(minutes=15, seconds=30)
    with capture_logs() as logs:
        async with db.transaction() as tx:
            assert await service.expire_overdue(tx) == Sweep(0, has_more=False)
    assert [line for line in logs if line["log_level"] == "warning"] == []


async def test_one_commit_of_the_sweep_is_bounded_and_takes_the_oldest_first(db: Database, dsn: str) -> None:
    """C3: events in the same order."""
    fill(dsn, 2, minutes=20)
    old, older = fill(dsn, 3, minutes=30), fill(dsn, 2, minutes=40)
    async with db.transaction() as tx:
        assert await service.expire_overdue(tx, limit=5) == Sweep(5, has_more=True)
    query = "SELECT aggregate_id::uuid FROM duly.outbox WHERE type = 'OrderExpired' ORDER BY seq"
    assert [order for (order,) in rows(dsn, query)] == [*older, *old]
    async with db.transaction() as tx:
        assert await service.expire_overdue(tx, limit=5) == Sweep(2, has_more=False)
    assert value(dsn, "SELECT count(*) FROM commerce.orders WHERE status = 'EXPIRED'") == 7


async def test_what_is_left_is_swept_at_once_by_a_run_of_its_own(db: Database, dsn: str) -> None:
    """C3: a thousand a commit, however many there are."""
    fill(dsn, 2 * SWEEP_LIMIT + 50)
    await run_job(db, dsn, "PaymentExpiration")
    assert [message for _, message in runs_of(dsn, "PaymentExpiration")] == [
        "expired 1000 that their timers missed; the rest follows",
        "expired 1000 that their timers missed; the rest follows",
        "expired 50 that their timers missed",
    ]
    assert rows(dsn, "SELECT DISTINCT status FROM commerce.orders") == [("EXPIRED",)]
    check_consistent(dsn)


@pytest.mark.parametrize(("due", "statements"), [(0, 1), (1, 4), (10, 4), (500, 4)])
async def test_the_number_of_statements_does_not_depend_on_how_many_are_overdue(
    db: Database, dsn: str, due: int, statements: int
) -> None:
    """C3: lock, settle, withdraw timers, emit."""
    fill(dsn, due, timers=True)
    async with db.transaction(confirm=False) as tx, counting(db) as sent:
        assert (await service.expire_overdue(tx)).count == due
    assert len(sent) == statements, sent
    assert count(dsn, "duly.jobs") == 0
    check_consistent(dsn)


async def test_a_sweep_passes_by_what_somebody_has_in_hand(db: Database, dsn: str) -> None:
    """C3: whoever pays at this moment is not waited for, nor overruled."""
    orders = fill(dsn, 3)
    with holding(dsn, orders[1]):
        async with asyncio.timeout(10), db.transaction() as tx:
            assert (await service.expire_overdue(tx)).count == 2
        assert statuses(dsn, orders[1]) == WAITING
    async with db.transaction() as tx:
        assert (await service.expire_overdue(tx)).count == 1
    check_consistent(dsn)


async def test_any_failure_of_the_sweep_undoes_all_of_it(db: Database, dsn: str) -> None:
    """C3: orders, payments, timers and events are one commit."""
    orders = fill(dsn, 5, timers=True)
    rows(dsn, BREAK)
    with pytest.raises(Exception, match="broken"):
        async with db.transaction() as tx:
            await service.expire_overdue(tx)
    assert [statuses(dsn, order) for order in orders] == [WAITING] * 5
    check_consistent(dsn)


async def test_after_an_outage_of_an_hour_timers_and_sweep_agree(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C2, C3: both are overdue at once; each order expires once, whoever comes first."""
    fill(dsn, 200, minutes=60, timers=True)
    await run_job(db, dsn, "PaymentExpiration")
    assert value(dsn, "SELECT count(*) FROM duly.event_log WHERE type = 'OrderExpired'") == 200
    check_consistent(dsn)


# -- the schedules ---------------------------------------------------------------------------------------------------


def test_the_schedules_come_with_the_migration(dsn: str) -> None:
    """C3."""
    query = """
        SELECT name, cron, timezone, enabled, misfire FROM duly.schedules
        WHERE name IN ('PaymentExpiration', 'CartAbandonment', 'TokenCleanup', 'commerce.forget-carts') ORDER BY 1"""
    assert rows(dsn, query) == [
        ("CartAbandonment", "17 * * * *", "UTC", True, "run_once"),
        ("PaymentExpiration", "*/5 * * * *", "UTC", True, "run_once"),
        ("TokenCleanup", "23 3 * * *", "UTC", True, "run_once"),
        ("commerce.forget-carts", "37 3 * * *", "UTC", True, "run_once"),
    ]
    names = {name for (name,) in rows(dsn, "SELECT name FROM duly.schedules")}
    assert names <= set(app.handlers), "a schedule without a handler"


async def test_the_scheduler_fires_the_sweep_every_five_minutes(db: Database, dsn: str, clock: BusinessClock) -> None:
    """C3: from the row in the database to the expired order, nothing called by hand."""
    clock.freeze(NOON)
    await Scheduler(db).run_once()
    orders: list[UUID] = fill(dsn, 3)
    clock.advance(minutes=5)
    await Scheduler(db).run_once()
    await drain(db, app.handlers)
    assert [statuses(dsn, order) for order in orders] == [EXPIRED] * 3
    assert value(dsn, "SELECT source FROM duly.executions WHERE name = 'PaymentExpiration'") == "Scheduled"
