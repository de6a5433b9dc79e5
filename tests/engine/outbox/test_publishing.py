"""Publishing to a broker: what a person sees, failures, backoff, and an operator's second chance (E1.4, E1.6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from duly import Relay, emit
from duly.db import Database
from duly.duty import Cycle
from duly.errors import Unavailable
from duly.messages import Event, NewEvent
from duly.testing import BusinessClock
from tests.engine.outbox.broker import Broker, BrokerTransport
from tests.support import rows, value

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
# What an operator types who knows the columns and nothing else.
REQUEUE = "UPDATE duly.outbox SET attempts = 0, failed_at = NULL WHERE failed_at IS NOT NULL"
LOG = "SELECT aggregate_id, (payload->>'n')::int, status, attempts, last_error FROM duly.event_log ORDER BY seq"


async def emit_numbers(db: Database, aggregate: str, numbers: Sequence[int], type_: str = "order.changed") -> None:
    async with db.transaction() as tx:
        await emit(tx, *(NewEvent(type_, "shop", aggregate, {"n": n}) for n in numbers))


async def relay_once(db: Database, broker: Broker, **options: Any) -> Cycle:
    return await Relay(db, transport=BrokerTransport(broker.port), **options).run_once()


async def relay_all(db: Database, broker: Broker, **options: Any) -> None:
    """Until there is nothing to do at this moment."""
    relay = Relay(db, transport=BrokerTransport(broker.port), **options)
    try:
        for _ in range(1_000):
            if not (await relay.cycle()).done:
                return
    except Unavailable:  # the broker is away: what the loop would wait for
        return
    finally:
        await relay.close()
    raise AssertionError("the relay finds no end")


def aggregates_of_one_lane(dsn: str, count: int) -> list[str]:
    """Names that share a lane, so that one stands in the other's way if anything does."""
    query = "SELECT 'a' || n FROM generate_series(1, 10000) AS n WHERE hashtextextended('a' || n, 0) & 63 = 7"
    return [row[0] for row in rows(dsn, query)][:count]


# -- what a person sees ----------------------------------------------------------------------------------------------


async def test_an_event_is_pending_then_published_with_its_time(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """E1.4, E1.2: and the broker got its envelope."""
    clock.freeze(NOON)
    await emit_numbers(db, "a1", [1])
    assert rows(dsn, "SELECT status, published_at FROM duly.event_log") == [("PENDING", None)]
    clock.advance(seconds=3)
    assert (await relay_once(db, broker)).facts == {"published": 1, "failed": 0, "held": 0}
    ((id_, status, published_at, attempts),) = rows(
        dsn, "SELECT id, status, published_at, attempts FROM duly.event_log"
    )
    assert (status, published_at, attempts) == ("PUBLISHED", NOON + timedelta(seconds=3), 0)
    (received,) = broker.received()
    assert (received.envelope["id"], received.envelope["subject"]) == (str(id_), "a1")
    assert received.envelope["time"] == NOON.isoformat()
    assert rows(dsn, "SELECT count(*) FROM duly.outbox") == [(0,)]


async def test_each_failure_counts_and_waits_twice_as_long(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """E1.4: 1, 2, 4, 8 seconds; never before its time; at the fifth attempt it is FAILED, and says why."""
    clock.freeze(NOON)
    broker.rules.refuse["a1"] = "no such topic"
    await emit_numbers(db, "a1", [1])
    for attempt, wait_seconds in enumerate((1, 2, 4, 8), 1):
        assert (await relay_once(db, broker)).facts["failed"] == 1
        cycle = await relay_once(db, broker)
        assert (cycle.done, cycle.wait_seconds) == (0, wait_seconds)
        assert rows(dsn, LOG) == [("a1", 1, "PENDING", attempt, "no such topic")]
        clock.advance(seconds=wait_seconds - 0.001)
        assert (await relay_once(db, broker)).done == 0
        clock.advance(seconds=0.001)
    assert (await relay_once(db, broker)).facts["failed"] == 1
    assert rows(dsn, LOG) == [("a1", 1, "FAILED", 5, "no such topic")]
    clock.advance(days=30)
    assert (await relay_once(db, broker)).done == 0
    assert len(broker.requests) == 5


async def test_an_event_that_failed_raises_one_alert_that_names_it(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """E1.4."""
    broker.rules.refuse["a1"] = "no such topic"
    await emit_numbers(db, "a1", [1, 2])
    await emit_numbers(db, "a2", [1])
    await fail_for_good(db, broker, clock)
    failed = value(dsn, "SELECT id FROM duly.event_log WHERE status = 'FAILED'")
    assert rows(dsn, "SELECT kind, subject, count, resolved_at, message FROM duly.alerts") == [
        (
            "event_failed",
            str(failed),
            1,
            None,
            "order.changed could not be published to shop in 5 attempts; its aggregate is held back",
        )
    ]


async def fail_for_good(db: Database, broker: Broker, clock: BusinessClock) -> None:
    """Use up all the attempts that time allows."""
    for _ in range(5):
        await relay_all(db, broker)
        clock.advance(seconds=8)


async def test_the_statements_of_a_cycle_do_not_grow_with_the_failures(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """DESIGN: fifty events that fail for good at once, each with its alert, cost no more statements than one."""
    counted: list[int] = []
    relay = Relay(db, transport=BrokerTransport(broker.port))
    for name, events in (("w", 1), ("x", 1), ("y", 50)):  # the driver learns its types in the first round
        broker.rules.refuse.update({f"{name}{n}": "no such topic" for n in range(events)})
        async with db.transaction() as tx:
            await emit(tx, *(NewEvent("order.changed", "shop", f"{name}{n}", {"n": 0}) for n in range(events)))
        rows(dsn, "UPDATE duly.outbox SET attempts = 4, retry_at = duly.now(), last_error = '' WHERE failed_at IS NULL")
        statements: list[str] = []
        connection = await relay.connection()
        connection.add_query_logger(lambda record, into=statements: into.append(record.query))
        assert (await relay.cycle()).facts["failed"] == events
        counted.append(len(statements))
    await relay.close()
    assert value(dsn, "SELECT count(*) FROM duly.alerts") == 52
    assert counted[2] == counted[1]


# -- one aggregate waits, the others do not --------------------------------------------------------------------------


async def test_a_failing_event_holds_back_its_own_aggregate_and_no_other(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """E1.4, E1.5: not even one that shares its lane and was emitted later."""
    held, free = aggregates_of_one_lane(dsn, 2)
    broker.rules.refuse[held] = "no such topic"
    for n in (1, 2, 3):
        await emit_numbers(db, held, [n])
        await emit_numbers(db, free, [n])
    await relay_all(db, broker)
    assert broker.first_deliveries() == {free: [1, 2, 3]}
    await fail_for_good(db, broker, clock)
    await emit_numbers(db, held, [4])
    await emit_numbers(db, free, [4])
    await relay_all(db, broker)
    assert broker.first_deliveries() == {free: [1, 2, 3, 4]}
    assert rows(dsn, f"SELECT status, parked FROM duly.event_log WHERE aggregate_id = '{held}' ORDER BY seq") == [
        ("FAILED", False),
        ("PENDING", True),
        ("PENDING", True),
        ("PENDING", True),
    ]


@pytest.mark.parametrize("seconds_later", [0, 20], ids=["at_once", "after_its_last_wait"])
async def test_an_event_that_is_requeued_goes_first_and_the_held_ones_follow_in_order(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker, seconds_later: int
) -> None:
    """E1.4, E1.5: whenever the operator does it, with those that were emitted before and after."""
    clock.freeze(NOON)
    broker.rules.refuse["a1"] = "no such topic"
    await emit_numbers(db, "a1", [1, 2, 3])
    for wait_seconds in (1, 2, 4, 8, 0):
        await relay_all(db, broker)
        clock.advance(seconds=wait_seconds)
    assert rows(dsn, "SELECT status FROM duly.event_log ORDER BY seq") == [("FAILED",), ("PENDING",), ("PENDING",)]
    broker.rules.refuse.clear()
    clock.advance(seconds=seconds_later)
    assert rows(dsn, REQUEUE + " RETURNING attempts") == [(0,)]
    await emit_numbers(db, "a1", [4])
    for _ in range(4):
        await relay_all(db, broker)
        clock.advance(seconds=10)
    assert broker.first_deliveries() == {"a1": [1, 2, 3, 4]}
    assert rows(dsn, "SELECT DISTINCT status FROM duly.event_log") == [("PUBLISHED",)]


async def test_a_requeued_event_with_nothing_behind_it_is_not_overtaken(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """E1.5: the next event of its aggregate is emitted after the operator's UPDATE."""
    clock.freeze(NOON)
    broker.rules.refuse["a1"] = "no such topic"
    await emit_numbers(db, "a1", [1])
    for wait_seconds in (1, 2, 4, 8, 0):
        await relay_all(db, broker)
        clock.advance(seconds=wait_seconds)
    broker.rules.refuse.clear()
    rows(dsn, REQUEUE)
    await emit_numbers(db, "a1", [2])
    for _ in range(3):
        await relay_all(db, broker)
        clock.advance(seconds=10)
    assert broker.first_deliveries() == {"a1": [1, 2]}


async def test_a_long_line_behind_a_failed_event_drains_in_order(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """E1.5: more than is freed at a time."""
    broker.rules.refuse["a1"] = "no such topic"
    await emit_numbers(db, "a1", range(2_500))
    await fail_for_good(db, broker, clock)
    await relay_all(db, broker, batch=1_000)
    assert rows(dsn, "SELECT count(*) FROM duly.outbox WHERE parked") == [(2_499,)]
    broker.rules.refuse.clear()
    clock.advance(minutes=1)
    rows(dsn, REQUEUE)
    await relay_all(db, broker, batch=1_000)
    assert broker.first_deliveries() == {"a1": list(range(2_500))}
    assert len(broker.received()) == 2_500


async def test_an_event_that_is_deleted_lets_the_next_ones_go(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """E1.4: an operator may give it up; whatever it held back is found without it."""
    broker.rules.refuse["a1"] = "no such topic"
    await emit_numbers(db, "a1", [1, 2, 3])
    await fail_for_good(db, broker, clock)
    broker.rules.refuse.clear()
    rows(dsn, "DELETE FROM duly.outbox WHERE failed_at IS NOT NULL")
    await relay_all(db, broker)
    assert broker.first_deliveries() == {"a1": [2, 3]}


async def test_a_retry_that_succeeds_lets_the_next_ones_go(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """E1.4: the history tells how many attempts it took."""
    broker.rules.refuse["a1"] = "busy"
    await emit_numbers(db, "a1", [1, 2])
    await relay_all(db, broker)
    broker.rules.refuse.clear()
    await emit_numbers(db, "a1", [3])
    await relay_all(db, broker)
    assert broker.received() == []
    clock.advance(seconds=1)
    await relay_all(db, broker)
    assert broker.first_deliveries() == {"a1": [1, 2, 3]}
    assert rows(dsn, "SELECT attempts FROM duly.events ORDER BY seq") == [(1,), (0,), (0,)]


async def test_what_is_first_seen_when_the_retry_before_it_is_due_is_not_left_behind(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """E1.5: it was parked in the transaction that published the one it waited for, and lay there for a minute."""
    broker.rules.refuse["a1"] = "busy"
    await emit_numbers(db, "a1", [1])
    await relay_all(db, broker)
    broker.rules.refuse.clear()
    await emit_numbers(db, "a1", [2])
    clock.advance(seconds=1)
    await relay_all(db, broker)
    assert broker.first_deliveries() == {"a1": [1, 2]}
    assert rows(dsn, "SELECT seq FROM duly.outbox") == []


# -- the transport ---------------------------------------------------------------------------------------------------


async def test_the_broker_is_never_handed_two_events_of_one_aggregate_at_a_time(db: Database, broker: Broker) -> None:
    """E1.5: whatever the broker does with a request, order cannot suffer."""
    for aggregate in ("a1", "a2", "a3"):
        await emit_numbers(db, aggregate, [1, 2, 3])
    await relay_all(db, broker)
    assert [sorted(request) for request in broker.requests] == [["a1", "a2", "a3"]] * 3


async def test_an_ack_that_is_lost_sends_again_and_loses_nothing(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """E1.6: at least once, under the same id."""
    broker.rules.drop_acks = 1
    await emit_numbers(db, "a1", [1, 2])
    await relay_all(db, broker)
    clock.advance(seconds=1)
    await relay_all(db, broker)
    received = broker.received()
    assert [one.n for one in received] == [1, 1, 2]
    assert received[0].id == received[1].id
    assert rows(dsn, "SELECT DISTINCT status FROM duly.event_log") == [("PUBLISHED",)]


@pytest.mark.parametrize("error", ["bad \x00 byte", "half \ud83d", "x" * 100_000], ids=["nul", "surrogate", "long"])
async def test_whatever_a_broker_says_can_be_written_down(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker, error: str
) -> None:
    """E1.4: an error text is a stranger's text; it must not stop the relay."""
    broker.rules.refuse["a1"] = error
    await emit_numbers(db, "a1", [1])
    await emit_numbers(db, "a2", [1])
    await relay_all(db, broker)
    assert rows(dsn, "SELECT aggregate_id, status, attempts FROM duly.event_log ORDER BY 1") == [
        ("a1", "PENDING", 1),
        ("a2", "PUBLISHED", 0),
    ]
    assert len(value(dsn, "SELECT last_error FROM duly.outbox")) <= 2_000


class Broken:
    """A client library at its worst."""

    name = "broken"

    def __init__(self, raises: BaseException) -> None:
        self._raises = raises

    async def check(self) -> None:
        """It seems fine."""

    async def publish(self, events: Sequence[Event]) -> Sequence[str | None]:
        raise self._raises

    async def close(self) -> None:
        return None


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("odd"), Exception("a \x00")], ids=repr)
async def test_whatever_a_client_raises_is_a_failed_attempt(db: Database, dsn: str, error: Exception) -> None:
    """E1.4: the relay goes on."""
    await emit_numbers(db, "a1", [1])
    relay = Relay(db, transport=Broken(error))
    assert (await relay.run_once()).facts == {"published": 0, "failed": 1, "held": 0}
    ((attempts, last_error),) = rows(dsn, "SELECT attempts, last_error FROM duly.outbox")
    assert attempts == 1
    assert last_error.startswith(type(error).__name__)


async def test_an_outage_of_ten_minutes_needs_no_operator(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """FAULTS: the outbox grows, and drains in order per key by itself when the broker is back."""
    broker.stop()
    for minute in range(10):
        for aggregate in ("a1", "a2"):
            await emit_numbers(db, aggregate, [minute])
        for _ in range(6):
            await relay_all(db, broker)
            clock.advance(seconds=10)
    broker.start()
    for _ in range(6):
        await relay_all(db, broker)
        clock.advance(seconds=10)
    assert broker.first_deliveries() == {"a1": list(range(10)), "a2": list(range(10))}
    assert rows(dsn, "SELECT DISTINCT status FROM duly.event_log") == [("PUBLISHED",)]
    assert rows(dsn, "SELECT count(*) FROM duly.alerts") == [(0,)]


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not fact():
            await asyncio.sleep(0.01)


async def test_a_running_relay_says_that_the_broker_is_away_and_goes_on_when_it_is_back(
    db: Database, dsn: str, broker: Broker
) -> None:
    """E3.15, FAULTS: it stays up, its health says so, nobody's attempts are used up, and it heals by itself."""
    relay = Relay(db, transport=BrokerTransport(broker.port))
    stop = asyncio.Event()
    broker.stop()
    running = asyncio.create_task(relay.run(stop))
    await emit_numbers(db, "a1", [1, 2])
    await until(lambda: not relay.health.up)
    assert "test-broker" in relay.health.detail
    assert rows(dsn, "SELECT DISTINCT attempts FROM duly.outbox") == [(0,)]
    broker.start()
    assert await asyncio.to_thread(broker.wait_until, lambda: len(broker.received()) == 2, 20)
    await until(lambda: relay.health.up)
    stop.set()
    await running
    assert broker.first_deliveries() == {"a1": [1, 2]}


async def test_an_event_that_makes_the_broker_hang_up_is_not_an_outage(
    db: Database, dsn: str, clock: BusinessClock, broker: Broker
) -> None:
    """E1.4: NATS cuts the line at a message that is too large; that is this event's failure, and nobody else's."""
    broker.rules.hang_up_on.add("a1")
    for n in (0, 1):
        for aggregate in ("a0", "a1", "a2"):
            await emit_numbers(db, aggregate, [n])
    for _ in range(6):
        await relay_all(db, broker)
        await emit_numbers(db, "a3", [len(broker.requests)])  # life goes on
        clock.advance(seconds=20)
    await relay_all(db, broker)
    delivered = broker.first_deliveries()
    assert (delivered.get("a0"), delivered.get("a2")) == ([0, 1], [0, 1])
    assert len(delivered["a3"]) == 6
    assert rows(dsn, "SELECT status FROM duly.event_log WHERE aggregate_id = 'a1' ORDER BY seq") == [
        ("FAILED",),
        ("PENDING",),
    ]
