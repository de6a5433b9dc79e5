"""A slow or dead subscriber delays nobody (E6.2), and what a delivery costs is a known number of statements."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import event as sqlalchemy_event

from duly import Database, Duly, Relay, Worker, schedule
from duly.db import fetch
from duly.duty import Duty
from duly.jobs.handlers import Handler
from duly.messages import Event
from duly.testing import BusinessClock, drain
from duly.wakeup import Wakeup
from duly.webhooks import deliver as deliver_module
from duly.webhooks.admit import DELIVER_JOB, create_consumer, fan_out
from duly.webhooks.deliver import LEASE_SECONDS, PLACES_AT_ONCE, Deliverer
from duly.webhooks.sql import READ_NOW
from tests.engine.jobs.wire import breaking_wire
from tests.engine.webhooks.hooks import Hooks
from tests.engine.webhooks.subscriber import Request, answering, subscriber
from tests.support import rows, value

EVENTS = 1_000
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


async def stall(_request: Request, _writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def processes(db: Database, handlers: dict[str, Handler], *, slots: int, workers: int = 1) -> AsyncIterator[None]:
    """What ``duly worker`` and ``duly relay`` run, in this event loop."""
    wakeup = Wakeup(db)
    sending = {DELIVER_JOB: handlers[DELIVER_JOB]}
    working = {name: handler for name, handler in handlers.items() if name != DELIVER_JOB}
    duties: list[Duty] = [Relay(db, wakeup=wakeup)]
    for _ in range(workers):
        duties.append(Worker(db, working, wakeup=wakeup, elsewhere=sending))
        duties.append(
            Worker(db, sending, wakeup=wakeup, concurrency=slots, lease_seconds=LEASE_SECONDS, name="webhooks",
                   pool_size=5, elsewhere=working)
        )  # fmt: skip
    stop = asyncio.Event()
    tasks = [asyncio.create_task(run(stop)) for run in [*(duty.run for duty in duties), wakeup.run]]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def until(fact: Callable[[], bool], what: str, seconds: float = 90) -> None:
    async with asyncio.timeout(seconds):
        while not fact():
            await asyncio.sleep(0.02)
    assert fact(), what


@pytest.mark.timeout(180)
async def test_a_subscriber_that_never_answers_delays_no_other_and_no_job(hooks: Hooks) -> None:
    """E6.2: a thousand events for each of the two; the slow one holds a handful of slots, and the queue stays short."""
    app = Duly()
    ran: list[str] = []

    @app.job("ordinary")
    async def ordinary() -> None:
        ran.append("x")

    hooks.db.settings = hooks.settings.model_copy(update={"shutdown_grace_seconds": 0})
    handlers = app.handlers | {DELIVER_JOB: hooks.handlers[DELIVER_JOB]}
    async with subscriber(stall) as slow, subscriber() as quick:
        dead = await hooks.subscribe(slow.url, timeout_seconds=30)
        await hooks.subscribe(quick.url, max_in_flight=10)
        async with processes(hooks.db, handlers, slots=20):
            for _ in range(EVENTS // 200):
                await hooks.emit(200)
            await until(lambda: len(quick.requests) >= EVENTS, "the quick one got everything")
            async with hooks.db.transaction() as tx:
                await schedule(tx, "ordinary")
            await until(lambda: bool(ran), "an ordinary job runs")
            assert slow.open <= 5
            assert len(hooks.jobs()) <= 10  # those under way, and those that ran out of time on a slow machine
    assert len({request.headers["x-event-id"] for request in quick.requests}) == EVENTS
    assert slow.most_open == 5
    assert quick.most_open <= 10
    counts = dict(
        rows(hooks.dsn, "SELECT status, count(*) FROM duly.webhook_deliveries WHERE subscription_id = %(id)s"
             " GROUP BY status", {"id": dead.id})
    )  # fmt: skip
    assert counts["WAITING"] >= EVENTS - 10


async def test_nobody_gets_more_than_half_of_the_slots(hooks: Hooks) -> None:
    hooks = Hooks(hooks.db, hooks.dsn, hooks.settings.model_copy(update={"webhook_concurrency": 8}))
    handlers = dict(hooks.handlers)
    consumer = handlers["consumer:duly.webhooks"]
    handlers[consumer.name] = create_consumer(8)
    await hooks.subscribe("http://127.0.0.1:8009/hook", max_in_flight=100)
    await hooks.emit(50)
    del handlers[DELIVER_JOB]
    await drain(hooks.db, handlers)
    assert len(hooks.jobs()) == 4


async def test_nobody_gets_more_than_half_of_the_slots_from_an_operator_or_after_a_pause(hooks: Hooks) -> None:
    """Whoever admits counts in the same way: the consumer, an operator, and the worker itself."""
    hooks = Hooks(hooks.db, hooks.dsn, hooks.settings.model_copy(update={"webhook_concurrency": 8}))
    made = await hooks.subscribe("http://127.0.0.1:8009/hook", max_in_flight=100)
    await hooks.pause(made.id)
    await hooks.emit(50)
    await drain(hooks.db, {name: one for name, one in hooks.handlers.items() if name != DELIVER_JOB})
    await hooks.resume(made.id)
    assert len(hooks.jobs()) == 4
    rows(hooks.dsn, "UPDATE duly.webhook_deliveries SET status = 'WAITING'")
    async with hooks.db.transaction() as tx:
        assert await Deliverer(hooks.settings).resume(tx, made.id) == 4


async def test_an_event_that_is_fanned_out_again_makes_no_second_delivery(hooks: Hooks) -> None:
    """E6.1: also when the inbox has long forgotten it."""
    await hooks.subscribe("http://127.0.0.1:8009/hook")
    later = datetime.now(UTC) + timedelta(minutes=1)
    events = [Event(uuid4(), "order.placed", "shop", "a", {}, {}, later) for _ in range(3)]
    made = []
    for number in (2, 3):
        async with hooks.db.transaction() as tx:
            made.append(await fan_out(tx, events[:number], most=25))
    assert made == [2, 1]
    assert len(await hooks.deliveries()) == len(hooks.jobs()) == 3


@pytest.mark.timeout(180)
async def test_two_workers_deliver_everything_once(hooks: Hooks) -> None:
    async with subscriber() as one, subscriber() as other:
        await hooks.subscribe(one.url)
        await hooks.subscribe(other.url, max_in_flight=50)
        async with processes(hooks.db, hooks.handlers, slots=10, workers=2):
            await hooks.emit(300)
            await until(lambda: len(one.requests) + len(other.requests) >= 600, "all are delivered")
            await until(lambda: not hooks.jobs(), "and recorded")
    for subscriber_ in (one, other):
        ids = Counter(request.headers["x-event-id"] for request in subscriber_.requests)
        assert (len(ids), set(ids.values())) == (300, {1})
    assert value(hooks.dsn, "SELECT count(*) FROM duly.webhook_attempts") == 600
    assert one.most_open <= 5


async def test_many_retries_that_are_due_at_once_take_their_turns(hooks: Hooks) -> None:
    """A subscriber whose retries all come due after a night does not get more than its share."""
    async with subscriber(answering(500)) as one:
        made = await hooks.subscribe(one.url, max_in_flight=3)
        await hooks.emit(60)
        rows(hooks.dsn, "UPDATE duly.business_clock SET shift = '0'")
        for _ in range(60):
            await hooks.drain()
            rows(
                hooks.dsn, "UPDATE duly.webhook_subscriptions SET failures = 0, failing_since = NULL, open_until = NULL"
            )
            rows(hooks.dsn, "SELECT duly.schedule('duly.sweep-webhooks')")
            if not await hooks.deliveries(made.id, status="WAITING"):
                break
        assert len(hooks.jobs()) > 20
        rows(hooks.dsn, "UPDATE duly.webhook_subscriptions SET failures = 0, failing_since = NULL, open_until = NULL")
        one.behave = answering(200)
        one.most_open = 0
        rows(hooks.dsn, "UPDATE duly.business_clock SET shift = '10 minutes'")
        await hooks.drain()
        assert one.most_open <= 3
        assert {delivery.status for delivery in await hooks.deliveries()} == {"DELIVERED"}


async def test_a_retry_that_finds_no_free_place_waits_for_one(hooks: Hooks, clock: BusinessClock) -> None:
    gate = asyncio.Event()

    async def hold(request: Request, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        await answering(200)(request, writer)

    async with subscriber(answering(500)) as one:
        await hooks.subscribe(one.url, max_in_flight=2)
        await hooks.emit(3)
        await hooks.drain()
        rows(hooks.dsn, "UPDATE duly.webhook_subscriptions SET failures = 0, failing_since = NULL, open_until = NULL")
        one.behave = hold
        one.requests.clear()
        clock.advance(minutes=1)
        draining = asyncio.create_task(hooks.drain())
        waiting = "SELECT count(*) FROM duly.webhook_deliveries WHERE status = 'WAITING'"
        await until(lambda: value(hooks.dsn, waiting) == 1, "the third waits", seconds=20)
        await until(lambda: len(one.requests) == 2, "the others are sent", seconds=20)
        gate.set()
        await draining
    assert len(one.requests) == 3
    assert {delivery.status for delivery in await hooks.deliveries()} == {"DELIVERED"}


async def test_a_fan_out_of_200_events_to_three_subscriptions_is_five_statements(hooks: Hooks) -> None:
    for _ in range(3):
        await hooks.subscribe("http://127.0.0.1:8009/hook")
    later = datetime.now(UTC) + timedelta(minutes=1)
    events = [Event(uuid4(), "order.placed", "shop", "a", {}, {}, later) for _ in range(200)]
    counted: list[str] = []
    sync = hooks.db.engine.sync_engine
    async with hooks.db.transaction() as tx:
        await fetch(tx, READ_NOW)
        sqlalchemy_event.listen(sync, "before_cursor_execute", lambda *given: counted.append(given[2]))
        assert await fan_out(tx, events, most=25) == 600
    assert len(counted) == 5, counted
    assert len(hooks.jobs()) == 15


async def test_a_delivery_is_a_known_number_of_statements_beside_its_claim(hooks: Hooks, dsn: str) -> None:
    """One to read, then in one commit: the time-out for locks, lock, record, admit, schedule the next, settle."""
    async with subscriber() as one, breaking_wire(dsn) as wire:
        await hooks.subscribe(one.url, max_in_flight=1)
        await hooks.emit(21)
        del hooks.handlers[DELIVER_JOB]
        await hooks.drain()
        db = Database(wire.dsn)
        handlers = {DELIVER_JOB: Hooks(hooks.db, dsn).handlers[DELIVER_JOB]}
        for _ in range(21):
            assert (await Worker(db, handlers).run_once()).done >= 0
        await db.close()
    assert len(one.requests) == 21
    sent: Counter[str] = Counter()
    for statement, count in wire.sent.items():
        for word in ("duly.webhook", "duly.schedule_many", "COMMIT"):
            if word in statement:
                sent[word] += count
                break
    # 21 deliveries: read, lock, record, admit; 20 times the next one's job; two commits each
    assert sent["duly.webhook"] == 21 * 4
    assert sent["duly.schedule_many"] == 20
    assert sent["COMMIT"] == 21 * 2


async def test_a_subscription_that_somebody_has_locked_delays_no_other(hooks: Hooks, dsn: str) -> None:
    """E6.2: an operator's open transaction, or a worker that stalls over it; nothing is sent twice for it."""
    async with subscriber() as one, subscriber() as other:
        locked = await hooks.subscribe(one.url)
        await hooks.subscribe(other.url)
        await hooks.emit(3)
        handlers = {name: handler for name, handler in hooks.handlers.items() if name != DELIVER_JOB}
        await drain(hooks.db, handlers)
        others = "SELECT count(*) FROM duly.webhook_deliveries WHERE status = 'DELIVERED' AND subscription_id <> %(id)s"
        with psycopg.connect(dsn) as holder:
            holder.execute("SELECT 1 FROM duly.webhook_subscriptions WHERE id = %s FOR UPDATE", [locked.id])
            working = asyncio.create_task(Worker(hooks.db, {DELIVER_JOB: hooks.handlers[DELIVER_JOB]}).run_once())
            async with asyncio.timeout(15):
                while value(dsn, others, {"id": locked.id}) < 3:
                    await asyncio.sleep(0.05)
            assert not working.done()
            holder.rollback()
        await working
    assert (len(one.requests), len(other.requests)) == (3, 3)
    assert {delivery.status for delivery in await hooks.deliveries()} == {"DELIVERED"}


async def test_retries_of_a_subscription_that_somebody_has_locked_leave_sessions_to_the_others(
    hooks: Hooks, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E6.2: few of them wait at a time, and each for a moment; the others' retries pass."""
    monkeypatch.setattr(deliver_module, "PLACE_LOCK_SECONDS", 0.5)
    async with subscriber(answering(500)) as one, subscriber(answering(500)) as other:
        locked, free = await hooks.subscribe(one.url), await hooks.subscribe(other.url, "parcel.*")
        await hooks.emit(5)
        await hooks.drain()
        await hooks.emit(type="parcel.sent")
        await hooks.drain()
        rows(dsn, "UPDATE duly.webhook_subscriptions SET failures = 0, failing_since = NULL, open_until = NULL")
        clock.advance(minutes=1)
        other.behave = answering(200)
        most = 0

        def is_delivered() -> bool:
            nonlocal most
            most = max(most, value(dsn, WAITING))
            return bool(
                value(dsn, "SELECT status = 'DELIVERED' FROM duly.webhook_deliveries WHERE subscription_id = %(id)s",
                      {"id": free.id})
            )  # fmt: skip

        with psycopg.connect(dsn) as holder:
            holder.execute("SELECT 1 FROM duly.webhook_subscriptions WHERE id = %s FOR UPDATE", [locked.id])
            working = asyncio.create_task(Worker(hooks.db, {DELIVER_JOB: hooks.handlers[DELIVER_JOB]}).run_once())
            await until(is_delivered, "the other's retry passes", seconds=20)
            holder.rollback()
        await working
    assert most == PLACES_AT_ONCE


async def test_many_deliveries_that_end_together_are_recorded_in_one_commit(hooks: Hooks, dsn: str) -> None:
    """Read, lock, record, admit: as many statements for a crowd as for one."""
    async with subscriber() as one, breaking_wire(dsn) as wire:
        for _ in range(4):
            await hooks.subscribe(one.url, max_in_flight=20)
        await hooks.emit(20)
        del hooks.handlers[DELIVER_JOB]
        await hooks.drain()
        all_sent = asyncio.Barrier(80)

        async def answer_all_at_once(request: Request, writer: asyncio.StreamWriter) -> None:
            await all_sent.wait()
            await answering(200)(request, writer)

        one.behave = answer_all_at_once
        db = Database(wire.dsn)
        handlers = {DELIVER_JOB: Hooks(hooks.db, dsn).handlers[DELIVER_JOB]}
        await Worker(db, handlers, concurrency=80).run_once()
        await db.close()
    assert {delivery.status for delivery in await hooks.deliveries()} == {"DELIVERED"}
    commits = sum(count for statement, count in wire.sent.items() if "COMMIT" in statement)
    recorded = sum(count for statement, count in wire.sent.items() if "INSERT INTO duly.webhook_attempts" in statement)
    assert recorded <= 20
    assert commits <= 40
