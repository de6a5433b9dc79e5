"""Two at once: exactly one wins, and order, payment, events and timers agree afterwards (C2, C3).

A rival session holds an order's lock as the barrier: everybody queues behind it, and runs when it lets go.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from uuid import UUID

import httpx2
import psycopg
import pytest
from prometheus_client import REGISTRY

from apps.commerce import service, store
from apps.commerce.model import OrderStatus
from apps.wiring import app
from duly.db import Database
from duly.jobs.worker import Worker
from duly.testing import BusinessClock, drain
from tests.apps.commerce.acting import (
    Customers,
    check_consistent,
    events_of,
    fill,
    holding,
    runs_of,
    statuses,
    timers_of,
    until_waiting,
)
from tests.apps.commerce.race import EXPIRED, PAID, Race
from tests.support import rows, value

ROUNDS = 96
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


def conflicts() -> float:
    """How many requests of this process ran again because they lost a deadlock."""
    return REGISTRY.get_sample_value("duly_http_retries_total", {"reason": "conflict"}) or 0.0


async def test_paying_and_timing_out_at_once_has_one_winner(shop: Customers, dsn: str, clock: BusinessClock) -> None:
    """C2: with real connections, over HTTP and by a real Worker; `python -m tests.apps.commerce.race` does more."""
    before = conflicts()
    worker_db = Database(dsn)
    race = Race(shop, worker_db, dsn, clock, seed=7)
    try:
        await race.run(ROUNDS)
    finally:
        await worker_db.close()
    for kind in ("in line", "free"):
        assert race.wins[kind, "PAID"] + race.wins[kind, "EXPIRED"] == ROUNDS / 2
        assert race.wins[kind, "PAID"], f"no payment ever won: {race.wins}"
        assert race.wins[kind, "EXPIRED"], f"no timer ever won: {race.wins}"
    assert (value(dsn, DEADLOCKS), conflicts()) == (0, before)
    assert (
        rows(dsn, "SELECT 1 FROM duly.dead_letters UNION ALL SELECT 1 FROM duly.executions WHERE NOT succeeded") == []
    )


async def test_a_timer_that_waited_for_a_payment_leaves_it_alone(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C2: it saw the order wait, waited for its lock, and must look again."""
    order = await shop.place()
    clock.advance(minutes=16)
    async with db.transaction() as tx:
        await store.lock_order(tx, UUID(order))
        working = asyncio.create_task(Worker(db, app.handlers).run_once())
        await until_waiting(dsn, 1)
        await service.pay_order(tx, UUID(order), by="ann")
    await working
    assert (statuses(dsn, order), timers_of(dsn, order)) == (PAID, [])
    assert runs_of(dsn, "PaymentTimeout") == [("done", "nothing to do: the order is PAID")]
    check_consistent(dsn)


async def test_a_sweep_that_looked_before_a_payment_leaves_it_alone(shop: Customers, db: Database, dsn: str) -> None:
    """C2, C3: paid between the look at what is overdue and the write, an order is not ended a second time."""
    [order] = fill(dsn, 1, timers=True)
    async with db.transaction() as tx:
        overdue = await store.lock_overdue_orders(tx, limit=5)
    assert overdue == [order]
    assert (await shop.pay(str(order))).status_code == 200
    async with db.transaction() as tx:
        assert await store.settle_orders(tx, overdue, OrderStatus.EXPIRED) == []
    assert statuses(dsn, order) == PAID
    check_consistent(dsn)


async def test_a_timer_that_is_being_withdrawn_is_not_claimed(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C2: nobody waits for a payment that is just being made."""
    order = await shop.place()
    clock.advance(minutes=16)
    async with db.transaction() as tx:
        await service.pay_order(tx, UUID(order), by="ann")
        async with asyncio.timeout(10):
            assert (await Worker(db, app.handlers).run_once()).done == 0
    assert (statuses(dsn, order), runs_of(dsn, "PaymentTimeout")) == (PAID, [])
    check_consistent(dsn)


async def test_a_payment_that_waited_for_the_timer_is_refused(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C2: it decides after it has the lock, not before."""
    order = await shop.place()
    clock.advance(minutes=16)
    async with db.transaction() as tx:
        assert (await service.time_out_order(tx, UUID(order))).has_expired
        paying = asyncio.create_task(shop.pay(order))
        await until_waiting(dsn, 1)
    answer = await paying
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:duly:problem:already-expired")
    await drain(db, app.handlers)
    check_consistent(dsn)


async def test_a_payment_whose_rival_fails_wins(shop: Customers, db: Database, dsn: str, clock: BusinessClock) -> None:
    """C2: a timer that rolled back has expired nothing."""
    order = await shop.place()
    clock.advance(minutes=16)
    paying: list[asyncio.Task[httpx2.Response]] = []

    async def fail() -> None:
        async with db.transaction() as tx:
            await service.time_out_order(tx, UUID(order))
            paying.append(asyncio.create_task(shop.pay(order)))
            await until_waiting(dsn, 1)
            raise RuntimeError("not this time")

    with pytest.raises(RuntimeError, match="not this time"):
        await fail()
    assert (await paying[0]).status_code == 200
    assert (statuses(dsn, order), events_of(dsn, order)) == (PAID, ["OrderPlaced", "OrderPaid"])
    check_consistent(dsn)


async def test_many_payments_at_once_are_one(shop: Customers, dsn: str) -> None:
    """C2: the others are told that it is paid."""
    order = await shop.place()
    with holding(dsn, order):
        racing = [asyncio.create_task(shop.pay(order)) for _ in range(6)]
        await until_waiting(dsn, len(racing))
    answers = await asyncio.gather(*racing)
    assert Counter(answer.status_code for answer in answers) == {200: 1, 409: 5}
    assert {answer.json()["type"] for answer in answers if answer.status_code == 409} == {
        "urn:duly:problem:already-paid"
    }
    check_consistent(dsn)


async def test_payment_timer_and_sweep_at_once_have_one_winner(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C2, C3: three contenders for forty orders."""
    random.seed(11)
    orders = [str(order) for order in fill(dsn, 40, minutes=17, timers=True)]
    worker_db, sweeper_db = Database(dsn), Database(dsn)

    async def pay(order: str) -> int:
        await asyncio.sleep(random.uniform(0, 0.1))
        return (await shop.pay(order)).status_code

    async def sweep() -> int:
        swept = 0
        for _ in range(8):
            await asyncio.sleep(0.01)
            async with sweeper_db.transaction() as tx:
                swept += (await service.expire_overdue(tx, limit=3)).count
        return swept

    working = asyncio.create_task(Worker(worker_db, app.handlers, concurrency=4).run_once())
    sweeping = asyncio.create_task(sweep())
    paid = await asyncio.gather(*map(pay, orders))
    swept = await sweeping
    await working
    found = Counter(statuses(dsn, order) for order in orders)
    assert (found[PAID], found[PAID] + found[EXPIRED]) == (paid.count(200), 40)
    by_timer = runs_of(dsn, "PaymentTimeout").count(("done", "the order and its payment have expired"))
    assert swept + by_timer == found[EXPIRED]
    assert value(dsn, DEADLOCKS) == 0
    check_consistent(dsn)
    await worker_db.close()
    await sweeper_db.close()


@contextlib.contextmanager
def holding_inserts(dsn: str, table: str) -> Iterator[None]:
    """Whoever inserts waits with what was counted before, until the block ends."""
    rows(
        dsn,
        """
        CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql
        AS 'BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END';
        CREATE TRIGGER waits BEFORE INSERT ON commerce.{table} FOR EACH ROW EXECUTE FUNCTION public.wait()
        """.replace("{table}", table),
    )
    with psycopg.connect(dsn) as rival:
        rival.execute("SELECT pg_advisory_xact_lock(1)")
        yield
        rival.rollback()


async def test_carts_that_are_opened_at_once_are_no_more_than_one_may_have(shop: Customers, dsn: str) -> None:
    """A limit on everything: who counts has to be alone with the customer, or each counts without the others."""
    for _ in range(service.MOST_OPEN_CARTS - 1):
        await shop.open_cart()
    with holding_inserts(dsn, "carts"):
        opening = [asyncio.create_task(shop.post("ann", "/v1/carts", {"currency": "PLN"})) for _ in range(4)]
        await until_waiting(dsn, len(opening))
    assert sorted(answer.status_code for answer in await asyncio.gather(*opening)) == [201, 409, 409, 409]


async def test_links_that_are_made_at_once_are_no_more_than_an_order_may_have(shop: Customers, dsn: str) -> None:
    """A limit on everything."""
    order = await shop.place()
    for _ in range(service.MOST_LINKS - 1):
        await shop.post("ann", f"/v1/orders/{order}/links")
    with holding_inserts(dsn, "order_links"):
        making = [asyncio.create_task(shop.post("ann", f"/v1/orders/{order}/links")) for _ in range(4)]
        await until_waiting(dsn, len(making))
    assert sorted(answer.status_code for answer in await asyncio.gather(*making)) == [201, 409, 409, 409]


async def test_sweeps_at_once_expire_each_order_once(db: Database, dsn: str) -> None:
    """C3: they pass each other by."""
    fill(dsn, 200, timers=True)

    async def sweep() -> int:
        return (await db.run(service.expire_overdue)).count

    counts = await asyncio.gather(*(sweep() for _ in range(5)))
    assert sum(counts) == 200
    assert value(dsn, "SELECT count(*) FROM duly.outbox WHERE type = 'OrderExpired'") == 200
    check_consistent(dsn)


@pytest.mark.parametrize(
    ("harm", "rule"),
    [
        ("UPDATE commerce.payments SET status = 'PAID', settled_at = due_at", "an order and its payment disagree"),
        ("UPDATE commerce.orders SET status = 'PAID', updated_at = now()", "an order and its payment disagree"),
        ("UPDATE commerce.orders SET total = total + 1", "an order and its payment disagree"),
        ("UPDATE commerce.order_lines SET quantity = quantity + 1", "a total is not the sum of its lines"),
        ("DELETE FROM duly.outbox", "an order has other events"),
        (
            "SELECT duly.emit('OrderExpired', topic, aggregate_id, payload) FROM duly.outbox",
            "an order has other events",
        ),
        ("DELETE FROM duly.jobs WHERE name = 'OrderExpiration'", "has not its two timers"),
        ("UPDATE duly.jobs SET due_at = due_at + interval '1 s'", "has not its two timers"),
        (
            "WITH p AS (UPDATE commerce.payments SET status = 'PAID', settled_at = due_at RETURNING due_at)"
            " UPDATE commerce.orders SET status = 'PAID', updated_at = due_at FROM p",
            "a settled order has a timer",
        ),
    ],
)
async def test_the_checker_of_these_tests_sees_what_is_wrong(shop: Customers, dsn: str, harm: str, rule: str) -> None:
    """A checker that cannot fail proves nothing."""
    await shop.place()
    check_consistent(dsn)
    rows(dsn, harm)
    with pytest.raises(AssertionError, match=rule):
        check_consistent(dsn)
