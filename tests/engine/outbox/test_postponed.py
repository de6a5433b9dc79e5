"""One topic that is not to be had: its events wait without an attempt, and the others go on (E1.4)."""

from __future__ import annotations

from datetime import timedelta

from duly.db import Database
from duly.operate import why
from duly.testing import BusinessClock
from tests.engine.outbox.broker import Broker
from tests.engine.outbox.test_publishing import NOON, emit_numbers, relay_all, relay_once
from tests.support import rows, value

AWAY = {"order.late": "the topic shop has no leader"}
LOG = "SELECT aggregate_id, (payload->>'n')::int, attempts, parked, retry_at, last_error FROM duly.outbox ORDER BY seq"


async def test_its_event_keeps_its_attempts_and_says_why_and_the_others_are_published(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    clock.freeze(NOON)
    broker.rules.away = AWAY
    await emit_numbers(db, "a1", [1], "order.late")
    await emit_numbers(db, "a1", [2])
    await emit_numbers(db, "a2", [1])
    await relay_all(db, broker)
    soon = NOON + timedelta(seconds=2)
    assert rows(dsn, LOG) == [("a1", 1, 0, False, soon, AWAY["order.late"]), ("a1", 2, 0, True, None, None)]
    assert broker.first_deliveries() == {"a2": [1]}
    async with db.transaction() as tx:
        said = await why(tx, str(value(dsn, "SELECT id FROM duly.outbox ORDER BY seq LIMIT 1")))
    assert "it is sent again at" in said[1]
    assert "has no leader" in said[1]


async def test_it_is_tried_again_for_as_long_as_it_takes_and_then_goes_in_order(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    clock.freeze(NOON)
    broker.rules.away = AWAY
    await emit_numbers(db, "a1", [1], "order.late")
    await emit_numbers(db, "a1", [2, 3])
    waits = []
    for _ in range(20):
        await relay_all(db, broker)
        (retry_at,) = (row[0] for row in rows(dsn, "SELECT retry_at FROM duly.outbox WHERE retry_at IS NOT NULL"))
        wait = (retry_at - value(dsn, "SELECT duly.now()")).total_seconds()
        waits.append(wait)
        clock.advance(seconds=wait)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (2, 30)
    assert value(dsn, "SELECT max(attempts) FROM duly.outbox") == 0
    broker.rules.away = {}
    await relay_all(db, broker)
    assert broker.first_deliveries() == {"a1": [1, 2, 3]}
    assert rows(dsn, "SELECT 1 FROM duly.outbox") == []


async def test_nobody_asks_again_before_its_time(db: Database, dsn: str, clock: BusinessClock, broker: Broker) -> None:
    clock.freeze(NOON)
    broker.rules.away = AWAY
    await emit_numbers(db, "a1", [1], "order.late")
    assert (await relay_once(db, broker)).facts == {"published": 0, "failed": 1, "held": 0}
    requests = len(broker.requests)
    for _ in range(5):
        assert (await relay_once(db, broker)).done == 0
    assert len(broker.requests) == requests


async def test_a_topic_that_is_away_shows_that_the_broker_is_there(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """An event that cuts the line is found although the others have to wait."""
    clock.freeze(NOON)
    broker.rules.away = AWAY
    broker.rules.hang_up_on = {"a1"}
    await emit_numbers(db, "a1", [1])
    await emit_numbers(db, "a2", [1], "order.late")
    await relay_once(db, broker)
    assert rows(dsn, "SELECT aggregate_id, attempts FROM duly.outbox ORDER BY seq") == [("a1", 1), ("a2", 0)]
