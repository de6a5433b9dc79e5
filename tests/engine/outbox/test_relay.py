"""The relay on PostgreSQL alone: batches, wake-ups, and one job for each consumer of an event (E1.3, E1.4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest

from duly import Database, Relay, emit
from duly.clock import monotonic
from duly.duty import Cycle
from duly.messages import NewEvent
from duly.settings import Settings
from duly.testing import BusinessClock
from duly.wakeup import Wakeup
from tests.engine.outbox.broker import Broker, BrokerTransport
from tests.support import rows, value

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
STATUSES = "SELECT status, count(*)::int FROM duly.event_log GROUP BY status ORDER BY status"
EIGHT_RELAYS = """
INSERT INTO duly.processes (id, kind, version, started_at, seen_at)
SELECT 'relay ' || n, 'relay', '1', clock_timestamp(), clock_timestamp() FROM generate_series(1, 8) AS n
"""
JOBS = "SELECT name, entity_id FROM duly.jobs ORDER BY name, entity_id"


def order_changed(aggregate: str = "o1", n: int = 0, **options: Any) -> NewEvent:
    return NewEvent("order.changed", "shop.orders", aggregate, {"n": n}, **options)


def add_consumer(dsn: str, name: str, patterns: Sequence[str], *, ordered: bool = False, enabled: bool = True) -> None:
    rows(
        dsn,
        "INSERT INTO duly.consumers (name, patterns, ordered, enabled, registered_at)"
        " VALUES (%(name)s, %(patterns)s, %(ordered)s, %(enabled)s, duly.now())",
        {"name": name, "patterns": list(patterns), "ordered": ordered, "enabled": enabled},
    )


async def emit_events(db: Database, *events: NewEvent) -> list[UUID]:
    async with db.transaction() as tx:
        return await emit(tx, *events)


# -- one bounded cycle -----------------------------------------------------------------------------------------------


async def test_a_cycle_publishes_a_hundred_events_unless_told_otherwise(db: Database, dsn: str) -> None:
    """E1.3."""
    await emit_events(db, *(order_changed(f"o{n}") for n in range(250)))
    assert (await Relay(db).run_once()).facts["published"] == 100
    assert rows(dsn, STATUSES) == [("PENDING", 150), ("PUBLISHED", 100)]
    assert (await Relay(db, batch=30).run_once()).facts["published"] == 30
    other = Database(dsn, settings=Settings(relay_batch=7))
    assert (await Relay(other).run_once()).facts["published"] == 7
    await other.close()


async def test_the_largest_batch_that_may_be_configured_gets_through(db: Database, dsn: str) -> None:
    """STYLE: a limit on everything, and it holds: 10,000 aggregates, two ordered consumers, one transaction."""
    for name in ("ledger", "mail"):
        add_consumer(dsn, name, ["*"], ordered=True)
    await emit_events(db, *(order_changed(f"o{n}") for n in range(10_000)))
    assert (await Relay(db, batch=10_000).run_once()).facts["published"] == 10_000
    assert value(dsn, "SELECT count(*) FROM duly.jobs") == 20_000


async def test_an_event_without_a_consumer_is_published_all_the_same(db: Database, dsn: str) -> None:
    """E1.4: nobody listens today; the history has it."""
    (id_,) = await emit_events(db, order_changed("o1"))
    await Relay(db).run_once()
    assert rows(dsn, "SELECT id, status FROM duly.event_log") == [(id_, "PUBLISHED")]
    assert rows(dsn, JOBS) == []


async def test_nothing_to_do_is_nothing_done(db: Database, dsn: str) -> None:
    """E3.13."""
    cycle = await Relay(db).run_once()
    assert (cycle.done, cycle.wait_seconds) == (0, None)


async def test_what_was_emitted_is_what_the_history_keeps(db: Database, dsn: str) -> None:
    """E1.2: nothing is changed on the way."""
    await emit_events(db, NewEvent("a.b", "t", "x", {"deep": [1, {"ż": None}]}, headers={"tenant": "acme"}))
    columns = "id, seq, type, topic, aggregate_id, payload, headers, created_at, attempts"
    before = rows(dsn, f"SELECT {columns} FROM duly.outbox")
    await Relay(db).run_once()
    assert rows(dsn, f"SELECT {columns} FROM duly.events") == before
    assert rows(dsn, "SELECT count(*) FROM duly.outbox") == [(0,)]


async def test_an_event_that_commits_late_is_not_lost(db: Database, dsn: str) -> None:
    """DESIGN: a cursor by id would have passed it by; later ones were published before it was visible."""
    with psycopg.connect(dsn) as slow:
        slow.execute("SELECT duly.emit('order.changed', 'shop', 'o1', '{\"n\": 1}')")
        await emit_events(db, order_changed("o2", 2))
        assert (await Relay(db).run_once()).facts["published"] == 1
        assert (await Relay(db).run_once()).done == 0
    assert (await Relay(db).run_once()).facts["published"] == 1
    assert rows(dsn, "SELECT aggregate_id FROM duly.events ORDER BY seq") == [("o1",), ("o2",)]


async def test_order_is_that_of_emission_although_the_clock_goes_back(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E1.5: by seq, never by created_at; in batches that hold a part of them only."""
    add_consumer(dsn, "ledger", ["*"])
    for n in range(9):
        clock.freeze(NOON - timedelta(minutes=n))
        await emit_events(db, order_changed("o1", n))
    for _ in range(3):
        assert (await Relay(db, batch=3).run_once()).facts["published"] == 3
    numbers = "SELECT (e.payload->>'n')::int FROM duly.jobs j JOIN duly.events e ON e.id = j.event_id ORDER BY j.id"
    assert [row[0] for row in rows(dsn, numbers)] == list(range(9))


async def test_the_statements_of_a_cycle_do_not_grow_with_the_batch(db: Database, dsn: str) -> None:
    """DESIGN: statement counts do not depend on the machine; one event costs as many as a hundred with 3 consumers."""
    for name, ordered in (("one", True), ("two", True), ("three", False)):
        add_consumer(dsn, name, ["order.*"], ordered=ordered)
    relay = Relay(db)
    counted: list[int] = []
    for events in (1, 1, 100, 100):
        await emit_events(db, *(order_changed(f"o{n % 9}", n) for n in range(events)))
        statements: list[str] = []

        def note(record: asyncpg.connection.LoggedQuery, into: list[str] = statements) -> None:
            into.append(record.query)

        connection = await relay.connection()
        connection.add_query_logger(note)
        assert (await relay.cycle()).facts["published"] == events
        connection.remove_query_logger(note)
        counted.append(len(statements))
    await relay.close()
    assert counted[1:] == [counted[1]] * 3  # the very first cycle also counts the relays
    assert counted[1] <= 9  # BEGIN, lanes, events, consumers, two locks, move, COMMIT; and how long to wait


# -- consumers -------------------------------------------------------------------------------------------------------


async def test_each_consumer_whose_pattern_fits_type_or_topic_gets_one_job(db: Database, dsn: str) -> None:
    """E2.1: and a pattern that fits both, or two patterns that fit, still make one."""
    for name, patterns in {
        "by-type": ["order.changed"],
        "by-topic": ["shop.orders"],
        "by-prefix": ["order.*"],
        "by-suffix": ["*.orders"],
        "by-both": ["order.*", "shop.*", "*"],
        "other": ["order", "shop", "changed", "Order.changed", "order.changed.twice", "payment.*"],
    }.items():
        add_consumer(dsn, name, patterns)
    add_consumer(dsn, "switched-off", ["*"], enabled=False)
    await emit_events(db, order_changed("o1"))
    await Relay(db).run_once()
    assert rows(dsn, JOBS) == [
        (f"consumer:{name}", "o1") for name in ("by-both", "by-prefix", "by-suffix", "by-topic", "by-type")
    ]


async def test_a_job_knows_its_event_and_where_it_came_from(db: Database, dsn: str) -> None:
    """E1.2, E5.7: the chain of causes does not break at the relay."""
    add_consumer(dsn, "mail", ["*"])
    correlation, parent = uuid4(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"correlation_id": str(correlation), "traceparent": parent}
    (id_,) = await emit_events(db, order_changed("o1", headers=headers))
    await Relay(db).run_once()
    query = "SELECT event_id, correlation_id, causation_id, traceparent, source, waits, order_key FROM duly.jobs"
    assert rows(dsn, query) == [(id_, correlation, id_, parent, "Deferred", "due", None)]


async def test_a_correlation_id_that_is_no_uuid_does_not_stop_the_relay(db: Database, dsn: str) -> None:
    """E7.3: headers are whatever another program wrote."""
    add_consumer(dsn, "mail", ["*"])
    strange = ["", "request 7", "00000000-0000-0000-0000-00000000000g", "{0af76519-16cd-43dd-8448-eb211c80319c}"]
    await emit_events(db, *(order_changed("o1", headers={"correlation_id": value}) for value in strange))
    await Relay(db).run_once()
    assert rows(dsn, "SELECT correlation_id FROM duly.jobs") == [(None,)] * 4


async def test_an_unordered_consumer_may_work_on_all_events_of_an_aggregate_at_once(db: Database, dsn: str) -> None:
    """E2.1: one job each, all of them due."""
    add_consumer(dsn, "mail", ["*"])
    await emit_events(db, *(order_changed("o1", n) for n in range(3)))
    await Relay(db).run_once()
    assert rows(dsn, "SELECT waits, run_at <= duly.now() FROM duly.jobs") == [("due", True)] * 3


async def test_an_ordered_consumer_is_given_one_event_of_an_aggregate_at_a_time(db: Database, dsn: str) -> None:
    """E2.3: the first is due, the others stand behind it, in one batch or in several."""
    add_consumer(dsn, "ledger", ["*"], ordered=True)
    await emit_events(db, order_changed("o1", 1), order_changed("o2", 1), order_changed("o1", 2))
    await Relay(db).run_once()
    await emit_events(db, order_changed("o1", 3), order_changed("o3", 1))
    await Relay(db).run_once()
    assert rows(dsn, "SELECT order_key, array_agg(waits ORDER BY id) FROM duly.jobs GROUP BY 1 ORDER BY 1") == [
        ("o1", ["due", "behind", "behind"]),
        ("o2", ["due"]),
        ("o3", ["due"]),
    ]


# -- the loop --------------------------------------------------------------------------------------------------------


@dataclass
class Live:
    """A relay that runs; it would poll only twice a minute, so whatever comes sooner was woken."""

    relay: Relay
    listener: psycopg.AsyncConnection[Any]

    async def until_published(self, dsn: str, ids: Sequence[UUID], seconds: float = 10.0) -> float:
        """Wait for the relay's own word that it published, and look; how long that took."""
        began = monotonic()
        async with asyncio.timeout(seconds):
            while True:
                query = "SELECT count(*) FROM duly.events WHERE id = ANY(%(ids)s)"
                if value(dsn, query, {"ids": list(ids)}) == len(ids):
                    return monotonic() - began
                async for _ in self.listener.notifies(timeout=0.25, stop_after=1):
                    pass


@asynccontextmanager
async def live_relay(db: Database, dsn: str, *, deaf: bool = False) -> AsyncIterator[Live]:
    stop = asyncio.Event()
    wakeup = None if deaf else Wakeup(db)
    relay = Relay(db, wakeup=wakeup)
    relay.poll_seconds = 30.0
    tasks = [asyncio.create_task(duty.run(stop)) for duty in (relay, wakeup) if duty is not None]
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as listener:
        await listener.execute("LISTEN duly")
        try:
            yield Live(relay, listener)
        finally:
            stop.set()
            await asyncio.gather(*tasks)


async def test_a_commit_is_published_within_milliseconds(db: Database, dsn: str) -> None:
    """E1.3: woken, not found by polling; by our session and by plain SQL on somebody else's connection."""
    async with live_relay(db, dsn) as live:
        await live.until_published(dsn, await emit_events(db, order_changed("first")))
        ours = [await live.until_published(dsn, await emit_events(db, order_changed(f"o{n}"))) for n in range(10)]
        theirs = [
            await live.until_published(dsn, [value(dsn, "SELECT duly.emit('order.changed', 'shop', 'o1')")])
            for _ in range(10)
        ]
    # Some 5 ms on an idle machine; the bound leaves room for a busy one, and polling would take 30 s.
    assert sorted(ours)[5] < 0.5
    assert sorted(theirs)[5] < 0.5


async def test_one_wake_up_is_enough_for_any_amount_of_work(db: Database, dsn: str) -> None:
    """E1.3: while there is work the relay does not wait."""
    async with live_relay(db, dsn) as live:
        ids = await emit_events(db, *(order_changed(f"o{n}") for n in range(1_500)))
        assert await live.until_published(dsn, ids) < 10


async def test_a_relay_that_hears_nothing_polls_ten_times_a_second(db: Database, dsn: str) -> None:
    """E1.3: through a pooler, say, where no wake-up arrives."""
    async with live_relay(db, dsn, deaf=True) as live:
        for n in range(3):
            assert await live.until_published(dsn, await emit_events(db, order_changed(f"o{n}"))) < 2


async def test_a_relay_that_hears_nothing_waits_a_tenth_of_a_second_at_most(db: Database) -> None:
    """E1.3: whatever its poll interval is, and however far away the next retry."""
    for relay in (Relay(db), Relay(db, wakeup=Wakeup(db))):  # the second one's ear is not open yet
        relay.poll_seconds = 30.0
        assert [relay._pause(Cycle(wait_seconds=wait)) for wait in (None, 8.0, 0.05)] == [0.1, 0.1, 0.05]


async def test_a_relay_whose_connections_are_cut_goes_on_by_itself(db: Database, dsn: str) -> None:
    """FAULTS: pg_terminate_backend; listening is taken up again, and a full look follows."""
    async with live_relay(db, dsn) as live:
        await live.until_published(dsn, await emit_events(db, order_changed("o1")))
        for _ in range(3):
            cut = rows(
                dsn,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name IN ('duly-relay', 'duly-listen', 'duly-notify')",
            )
            assert len(cut) >= 2
            id_ = value(dsn, "SELECT duly.emit('order.changed', 'shop', 'o2')")
            await live.until_published(dsn, [id_], 20)
        assert live.relay.health.up


# -- sharing ---------------------------------------------------------------------------------------------------------


async def test_relays_share_the_lanes_and_none_is_left_out(db: Database, dsn: str) -> None:
    """E1.5: a relay takes its share of the lanes in turns, so that every aggregate gets its turn whoever is alive."""
    rows(dsn, EIGHT_RELAYS)
    await emit_events(db, *(order_changed(f"o{n}") for n in range(640)))
    lanes = value(dsn, "SELECT count(DISTINCT lane) FROM duly.outbox")
    assert lanes == 64
    relay = Relay(db, batch=1_000)
    first = (await relay.cycle()).facts["published"]
    assert 0 < first < 640 / 4  # an eighth of the lanes, more or less
    for _ in range(64):
        await relay.cycle()
    await relay.close()
    assert rows(dsn, "SELECT count(*) FROM duly.outbox") == [(0,)]


@pytest.mark.parametrize("outside", [True, False])
async def test_what_waits_in_the_lanes_of_relays_that_died_waits_for_no_turn(
    db: Database, dsn: str, broker: Broker, outside: bool
) -> None:
    """E1.3: whoever finds nothing in its own share looks at all lanes before it waits for the next poll."""
    rows(dsn, EIGHT_RELAYS)
    relay = Relay(db, transport=BrokerTransport(broker.port) if outside else None)
    for n in range(64):
        await emit_events(db, order_changed(f"o{n}"))
        assert (await relay.cycle()).facts["published"] == 1
    await relay.close()


@pytest.mark.parametrize("relays", [4])
async def test_many_relays_publish_each_event_once(db: Database, dsn: str, relays: int) -> None:
    """E1.5: one job for each (event, consumer), in order, however many relays there are."""
    add_consumer(dsn, "ledger", ["*"], ordered=True)
    add_consumer(dsn, "mail", ["*"])
    for n in range(40):
        await emit_events(db, *(order_changed(f"o{a}", n) for a in range(10)))
    made = [Relay(db, batch=7) for _ in range(relays)]

    async def work(relay: Relay) -> None:
        while value(dsn, "SELECT EXISTS (SELECT 1 FROM duly.outbox)"):
            await relay.cycle()
        await relay.close()

    async with asyncio.timeout(60):
        await asyncio.gather(*(work(relay) for relay in made))
    assert rows(dsn, "SELECT name, count(*), count(DISTINCT event_id) FROM duly.jobs GROUP BY name ORDER BY name") == [
        ("consumer:ledger", 400, 400),
        ("consumer:mail", 400, 400),
    ]
    numbers = (
        "SELECT array_agg((e.payload->>'n')::int ORDER BY j.id)"
        " FROM duly.jobs j JOIN duly.events e ON e.id = j.event_id"
        " WHERE j.name = 'consumer:ledger' GROUP BY j.order_key"
    )
    assert rows(dsn, numbers) == [(list(range(40)),)] * 10
