"""Emitting: in the caller's own transaction, on every kind of connection, and from plain SQL."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
from psycopg.types.json import Jsonb
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from duly import emit, sync
from duly.db import Database
from duly.errors import BadPayload, Invalid
from duly.messages import EventBody, NewEvent
from duly.telemetry import Origin, originating
from duly.testing import BusinessClock
from tests.engine.outbox.writers import ORDERS, WRITERS, Writer, async_engine, order_placed
from tests.support import rows, value

by_name = pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)


class Abandoned(Exception):
    """The caller changed its mind."""


def orders_and_events(dsn: str) -> tuple[list[str], list[str]]:
    """What anybody else can see."""
    return (
        [row[0] for row in rows(dsn, "SELECT id FROM orders ORDER BY id")],
        [row[0] for row in rows(dsn, "SELECT aggregate_id FROM duly.outbox ORDER BY seq")],
    )


# -- one transaction with the caller ---------------------------------------------------------------------------------


@by_name
async def test_an_event_is_invisible_until_its_transaction_commits(dsn: str, writer: Writer) -> None:
    """E1.1, E7.3: and then it is there with the order, under the names and the payload that were given."""
    rows(dsn, ORDERS)
    async with writer(dsn) as tx:
        await tx.place("o1")
        assert orders_and_events(dsn) == ([], [])
    assert orders_and_events(dsn) == (["o1"], ["o1"])
    assert rows(dsn, "SELECT type, topic, payload, attempts, status FROM duly.event_log") == [
        ("order.placed", "shop", {"n": 1}, 0, "PENDING")
    ]


@by_name
async def test_an_event_is_rolled_back_with_its_transaction(dsn: str, writer: Writer) -> None:
    """E1.1, E7.3: neither the order nor the event."""
    rows(dsn, ORDERS)

    async def abandon() -> None:
        async with writer(dsn) as tx:
            await tx.place("o1")
            raise Abandoned

    with pytest.raises(Abandoned):
        await abandon()
    assert orders_and_events(dsn) == ([], [])


@by_name
async def test_a_commit_wakes_the_relay_whoever_makes_it(dsn: str, writer: Writer) -> None:
    """E1.3: woken by commit, on every kind of connection."""
    rows(dsn, ORDERS)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as listener:
        await listener.execute("LISTEN duly")
        async with writer(dsn) as tx:
            await tx.place("o1")
        heard = [notify.payload async for notify in listener.notifies(timeout=1, stop_after=1)]
    assert heard == ["outbox"]


async def test_a_rolled_back_savepoint_takes_its_events_along(db: Database, dsn: str) -> None:
    """E1.1: nested transactions too."""
    async with db.transaction() as tx:
        await emit(tx, order_placed("o1"))
        savepoint = await tx.begin_nested()
        await emit(tx, order_placed("o2"))
        await savepoint.rollback()
        await emit(tx, order_placed("o3"))
    assert rows(dsn, "SELECT aggregate_id FROM duly.outbox ORDER BY seq") == [("o1",), ("o3",)]


async def test_a_transaction_that_fails_later_leaves_no_event(db: Database, dsn: str) -> None:
    """E1.1: a constraint that is checked at COMMIT, after the event was written."""
    rows(dsn, "CREATE TABLE orders (id text UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    async def place_twice() -> None:
        async with db.transaction() as tx:
            for _ in range(2):
                await tx.execute(text("INSERT INTO orders VALUES ('o1')"))
                await emit(tx, order_placed("o1"))

    with pytest.raises(IntegrityError, match="duplicate key"):
        await place_twice()
    assert orders_and_events(dsn) == ([], [])


# -- many at once ----------------------------------------------------------------------------------------------------


async def test_many_events_are_one_statement_and_keep_their_order(dsn: str) -> None:
    """E1.5: the ids come back in the order given, which is the order of seq."""
    connection = await asyncpg.connect(dsn)
    try:
        statements: list[str] = []
        connection.add_query_logger(lambda record: statements.append(record.query))
        ids = await emit(connection, *(order_placed(f"o{n}") for n in range(500)))
    finally:
        await connection.close()
    assert len(statements) == 1
    assert rows(dsn, "SELECT id, aggregate_id FROM duly.outbox ORDER BY seq") == [
        (id_, f"o{n}") for n, id_ in enumerate(ids)
    ]


async def test_no_event_is_no_statement_and_too_many_are_refused(db: Database, dsn: str) -> None:
    """STYLE: a limit on everything."""
    async with db.transaction() as tx:
        assert await emit(tx) == []
        with pytest.raises(Invalid, match="10001 events at once: emit at most 10000"):
            await emit(tx, *[order_placed("o1")] * 10_001)
        assert len(await emit(tx, *[order_placed("o1")] * 10_000)) == 10_000
    assert value(dsn, "SELECT count(*) FROM duly.outbox") == 10_000


# -- ids and time ----------------------------------------------------------------------------------------------------


async def test_ids_are_version_seven_and_sort_by_the_databases_time(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E1.2: the first 48 bits are the milliseconds of created_at, which is the business clock's time."""
    moment = datetime(2031, 3, 30, 0, 59, 59, 998_700, tzinfo=UTC)
    made: list[UUID] = []
    for _ in range(5):
        clock.freeze(moment)
        async with db.transaction() as tx:
            made += await emit(tx, order_placed("o1"))
        assert value(dsn, "SELECT max(created_at) FROM duly.outbox") == moment
        assert made[-1].int >> 80 == int(moment.timestamp() * 1000)
        moment += timedelta(milliseconds=1)
    assert made == sorted(made)
    assert len(set(made)) == 5
    assert {(id_.version, id_.variant) for id_ in made} == {(7, "specified in RFC 4122")}


async def test_a_year_of_events_sorts_by_time(db: Database, clock: BusinessClock) -> None:
    """E1.2."""
    made: list[UUID] = []
    for month in range(1, 13):
        clock.freeze(datetime(2027, month, 1, tzinfo=UTC))
        async with db.transaction() as tx:
            made += await emit(tx, order_placed("o1"))
    assert made == sorted(made)


# -- headers ---------------------------------------------------------------------------------------------------------


def headers(dsn: str) -> list[dict[str, Any]]:
    return [row[0] for row in rows(dsn, "SELECT headers FROM duly.outbox ORDER BY seq")]


async def test_events_carry_where_they_come_from(db: Database, dsn: str) -> None:
    """E1.2, E5.4, E5.7."""
    correlation, causation = uuid4(), uuid4()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with originating(Origin(correlation, causation, parent)):
        async with db.transaction() as tx:
            await emit(tx, order_placed("o1"))
        with db.transaction_sync() as session:
            sync.emit(session, order_placed("o2"))
    expected = {"correlation_id": str(correlation), "causation_id": str(causation), "traceparent": parent}
    assert headers(dsn) == [expected, expected]


async def test_headers_of_the_callers_own_are_kept_and_win(db: Database, dsn: str) -> None:
    """E1.2."""
    with originating(Origin(uuid4())):
        async with db.transaction() as tx:
            await emit(tx, NewEvent("a.b", "t", "x", headers={"correlation_id": "mine", "tenant": "acme"}))
    assert headers(dsn) == [{"correlation_id": "mine", "tenant": "acme"}]


async def test_a_transaction_without_an_origin_gets_one_id_for_all_its_events(db: Database, dsn: str) -> None:
    """E5.4: made when absent; the next transaction is another story."""
    for _ in range(2):
        async with db.transaction() as tx:
            await emit(tx, order_placed("o1"))
            await emit(tx, order_placed("o2"), order_placed("o3"))
    ids = [header["correlation_id"] for header in headers(dsn)]
    assert len(set(ids[:3])) == len(set(ids[3:])) == 1
    assert ids[0] != ids[3]


async def test_two_transactions_on_one_pooled_connection_do_not_share_an_id(db: Database, dsn: str) -> None:
    """E5.4: a connection outlives the request; what one request caused must not look like another's."""
    for _ in range(2):
        async with db.engine.begin() as connection:
            await emit(connection, order_placed("o1"))
    first, second = (header["correlation_id"] for header in headers(dsn))
    assert first != second


async def test_plain_sql_gets_a_correlation_id_too(dsn: str) -> None:
    """E5.4, E7.3: and one that is given is kept."""
    given = str(uuid4())
    rows(dsn, "SELECT duly.emit('a.b', 't', 'x')")
    rows(dsn, "SELECT duly.emit('a.b', 't', 'x', '{}', %(headers)s)", {"headers": Jsonb({"correlation_id": given})})
    made, kept = (header["correlation_id"] for header in headers(dsn))
    assert UUID(made).version == 7
    assert kept == given


# -- refusals --------------------------------------------------------------------------------------------------------


class OrderPlaced(EventBody, type="order.placed", topic="shop", aggregate="order_id"):
    order_id: str
    note: str = ""


async def test_a_bad_payload_is_refused_before_anything_is_sent(db: Database, dsn: str) -> None:
    """FAULTS: the caller's error, with its path; the transaction can go on."""
    async with db.transaction() as tx:
        for bad in (
            NewEvent("a.b", "t", "x", {"a": float("nan")}),
            NewEvent("a.b", "t", "x", {"a": "\x00"}),
            NewEvent("a.b", "t", "x", {"a": "\ud800"}),
            NewEvent("a.b", "t", "x", {"a": "x" * 300_000}),
            NewEvent("a.b", "t", "x", {}, headers={"tenant": "\x00"}),
            OrderPlaced(order_id="o1", note="\x00"),
        ):
            with pytest.raises(BadPayload):
                await emit(tx, order_placed("good"), bad)
        await emit(tx, order_placed("o1"))
    assert rows(dsn, "SELECT aggregate_id FROM duly.outbox") == [("o1",)]


@pytest.mark.parametrize("aggregate", ["", "a" * 201, "nul \x00", "half \ud800", 7, None], ids=repr)
async def test_an_aggregate_id_that_cannot_be_kept_is_refused_before_anything_is_sent(
    db: Database, dsn: str, aggregate: Any
) -> None:
    """E1.2: and the transaction can go on."""
    async with db.transaction() as tx:
        with pytest.raises(Invalid):
            await emit(tx, NewEvent("a.b", "t", aggregate))
        await emit(tx, NewEvent("a.b", "t", "a" * 200))
    assert value(dsn, "SELECT count(*) FROM duly.outbox") == 1


@pytest.mark.parametrize("header", [5, None, ["x"], {"a": 1}, True], ids=repr)
async def test_a_header_is_text_or_refused(db: Database, header: Any) -> None:
    """E1.2: whoever continues the trace, or writes the wire's headers, expects text."""
    async with db.transaction() as tx:
        with pytest.raises(Invalid):
            await emit(tx, NewEvent("a.b", "t", "x", headers={"traceparent": header}))


@pytest.mark.parametrize(
    ("arguments", "constraint"),
    [
        ("'order placed', 't', 'x'", "outbox_type_is_named"),
        ("'a.b', '', 'x'", "outbox_topic_is_named"),
        ("'a.b', 't', ''", "outbox_aggregate_is_short"),
        ("'a.b', 't', repeat('x', 201)", "outbox_aggregate_is_short"),
        ("'a.b', 't', 'x', '[]'", "outbox_payload_is_object"),
        ("'a.b', 't', 'x', '1'", "outbox_payload_is_object"),
        ("'a.b', 't', 'x', '{}', '[]'", "outbox_headers_is_object"),
        ("'a.b', 't', 'x', NULL", "not-null"),
        ("'a.b', 't', 'x', '{}', NULL", "not-null"),
        ("NULL, 't', 'x'", "not-null"),
    ],
)
def test_plain_sql_is_held_to_the_same_names(dsn: str, arguments: str, constraint: str) -> None:
    """E7.3: the schema says what is impossible."""
    with pytest.raises(psycopg.IntegrityError, match=constraint):
        rows(dsn, f"SELECT duly.emit({arguments})")


async def test_a_transaction_of_the_wrong_kind_is_refused_with_what_to_pass(db: Database) -> None:
    """E1.1."""
    with pytest.raises(TypeError, match="str is not a transaction duly knows: pass an AsyncSession"):
        await emit("tx", order_placed("o1"))
    with db.transaction_sync() as session, pytest.raises(TypeError, match=r"use duly\.sync"):
        await emit(session, order_placed("o1"))
    async with db.transaction() as tx:
        with pytest.raises(TypeError, match="not a synchronous transaction"):
            sync.emit(tx, order_placed("o1"))


# -- concurrency -----------------------------------------------------------------------------------------------------


async def test_emitters_do_not_wait_for_each_other(dsn: str) -> None:
    """E1.1: an open transaction that has emitted holds back nobody, not even on the same aggregate."""
    engine = async_engine(dsn)
    async with AsyncSession(engine) as slow:
        await emit(slow, order_placed("o1"))
        async with AsyncSession(engine) as quick, asyncio.timeout(5):
            await emit(quick, order_placed("o1"))
            await quick.commit()
        assert value(dsn, "SELECT count(*) FROM duly.outbox") == 1
        await slow.commit()
    assert value(dsn, "SELECT count(*) FROM duly.outbox") == 2
