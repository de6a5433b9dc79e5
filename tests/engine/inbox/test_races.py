"""Everything at once over a few aggregates: emitters, relays, workers, failures and operators (E1.5, E2.2, E2.3)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from duly import Database, Duly, Event, Relay, Tx, Worker, emit
from duly.messages import NewEvent
from tests.engine.inbox.effects import effects, prepare, record
from tests.support import rows, value

AGGREGATES = [f"a{n}" for n in range(4)]
PER_AGGREGATE = 60
LEFT = """
SELECT (SELECT count(*) FROM duly.outbox) + (SELECT count(*) FROM duly.jobs) + (SELECT count(*) FROM duly.dead_letters)
"""
STUCK = "SELECT name, order_key, waits, run_at::text, retry_count, lease_token FROM duly.jobs ORDER BY id LIMIT 20"


def register(app: Duly, *, failing: float) -> None:
    chance = random.Random(11)

    @app.consumer("ledger", on="order.*", ordered=True, max_retries=1_000, backoff=[0])
    async def ledger(event: Event, tx: Tx) -> None:
        await record(tx, "ledger", event)
        if chance.random() < failing:
            raise ConnectionError("try again")

    @app.consumer("batches", on="order.*", ordered=True, batch=10, max_retries=1_000, backoff=[0])
    async def batches(events: list[Event], tx: Tx) -> None:
        for event in events:
            await record(tx, "batches", event)
        if chance.random() < failing:
            raise ConnectionError("try again")

    @app.consumer("mail", on="order.*", max_retries=1_000, backoff=[0])
    async def mail(event: Event, tx: Tx) -> None:
        await record(tx, "mail", event)


async def emit_in_order(db: Database, aggregate: str) -> None:
    """An aggregate is one writer at a time, as a locked row makes it; the aggregates themselves race."""
    n = 0
    while n < PER_AGGREGATE:
        async with db.transaction() as tx:
            for _ in range(min(random.randint(1, 4), PER_AGGREGATE - n)):
                await emit(tx, NewEvent("order.changed", "shop", aggregate, {"n": n}))
                n += 1


async def until_drained(dsn: str, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            while await asyncio.to_thread(value, dsn, LEFT):
                pass
    except TimeoutError:
        pytest.fail(f"stuck: {rows(dsn, STUCK)}")


async def test_nothing_is_stranded_lost_doubled_or_out_of_order_when_everything_races(dsn: str) -> None:
    """E1.5, E2.2, E2.3: the relay adds behind a job while its worker finishes it, thousands of times."""
    app = Duly()
    register(app, failing=0.05)
    databases = [Database(dsn) for _ in range(3)]
    await prepare(app, databases[0], dsn)
    stop = asyncio.Event()
    duties: list[Callable[[asyncio.Event], Awaitable[None]]] = [
        *(Relay(db, batch=5).run for db in databases),
        *(Worker(db, app.handlers, concurrency=4).run for db in databases[:2]),
    ]
    running = [asyncio.ensure_future(duty(stop)) for duty in duties]
    await asyncio.gather(*(emit_in_order(databases[n % 3], aggregate) for n, aggregate in enumerate(AGGREGATES)))
    try:
        await until_drained(dsn, 60)
    finally:
        stop.set()
        await asyncio.gather(*running)
        for db in databases:
            await db.close()
    expected = {aggregate: list(range(PER_AGGREGATE)) for aggregate in AGGREGATES}
    assert effects(dsn, "ledger") == expected
    assert effects(dsn, "batches") == expected
    assert {aggregate: sorted(done) for aggregate, done in effects(dsn, "mail").items()} == expected
    assert value(dsn, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0
