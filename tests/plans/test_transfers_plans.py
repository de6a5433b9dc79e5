"""The sweep among a million transfers: by index, and at a cost of what is due, not of what there is (T5).

300,000 products; 100 transfers are due on one day and 10,000 on the next, 239,900 are pending and young, 750,000 have
ended. A plan is looked at in both ways PostgreSQL may plan a prepared statement, for these values and for any values.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from sqlalchemy import TextClause

from apps.transfers import service, store
from apps.wiring import app
from duly.clock import monotonic
from duly.db import Database
from duly.testing import BusinessClock, TestServer

FEW, MANY = 100, 10_000
DAY_OF_THE_FEW = datetime(2034, 1, 4, 12, tzinfo=UTC)
DAY_OF_THE_MANY = datetime(2034, 1, 6, tzinfo=UTC)
FILL = """
INSERT INTO transfers.products
SELECT duly.uuid7(timestamptz '2033-01-01' + n * interval '1 second'), 'p' || n, 'alice', '2033-01-01'
FROM generate_series(1, 300000) AS n;
CREATE TEMP TABLE numbered AS SELECT id, row_number() OVER (ORDER BY id) AS n FROM transfers.products;
CREATE INDEX ON numbered (n);
INSERT INTO transfers.transfers
SELECT gen_random_uuid(), q.id, 'alice', 'bob', 'Pending', c.at, c.at
FROM numbered q
CROSS JOIN LATERAL (SELECT CASE WHEN q.n % 2500 = 1 AND q.n < 250000 THEN timestamptz '2034-01-01'
                                WHEN q.n % 25 = 2 AND q.n < 247500 THEN timestamptz '2034-01-02'
                                ELSE timestamptz '2034-02-01' END + q.n * interval '1 millisecond') AS c(at)
WHERE q.n <= 250000;
INSERT INTO transfers.transfers
SELECT gen_random_uuid(), q.id, 'alice', 'bob', (ARRAY['Accepted', 'Rejected', 'Cancelled', 'Expired'])[1 + m % 4],
       c.at, c.at + CASE WHEN m % 4 = 3 THEN interval '73 hours' ELSE interval '1 hour' END
FROM generate_series(1, 750000) AS m
JOIN numbered q ON q.n = 1 + m * 7 % 300000
CROSS JOIN LATERAL (SELECT timestamptz '2033-06-01' + m * interval '20 seconds') AS c(at);
INSERT INTO transfers.service_requests
SELECT gen_random_uuid(), id, 'alice', 'Oil it', CASE WHEN n <= 250000 THEN 'Paused' ELSE 'InProgress' END,
       '2034-01-01', '2034-01-01'
FROM numbered;
"""
PLACEHOLDER = re.compile(r"(?<![:\w]):(\w+)")
INDEXES = """
SELECT format('%I.%I', schemaname, indexname), indexdef FROM pg_indexes
WHERE schemaname = 'transfers' AND indexname !~ '_pkey$'
"""


@pytest.fixture(scope="module")
def dsn(server: TestServer) -> Iterator[str]:
    """A database with all of it; every test rolls back what it did."""
    with server.database(app) as made:
        with psycopg.connect(made, autocommit=True) as connection:
            connection.execute("SET statement_timeout = 0")
            connection.execute("SET session_replication_role = replica")  # no foreign keys are looked up meanwhile
            indexes = connection.execute(INDEXES.encode()).fetchall()
            for name, _ in indexes:
                connection.execute(f"DROP INDEX {name}".encode())
            for statement in FILL.split(";\n"):
                connection.execute(statement.encode())
            for _, definition in indexes:
                connection.execute(definition.encode())
            connection.execute("VACUUM ANALYZE")
            found = connection.execute("SELECT count(*) FROM transfers.transfers").fetchone()
        assert found == (1_000_000,)
        yield made


class Plan:
    """An executed plan."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.nodes = list(self._walk(root["Plan"]))
        self.buffers: int = root["Plan"]["Shared Hit Blocks"] + root["Plan"]["Shared Read Blocks"]
        self.indexes = {node["Index Name"] for node in self.nodes if "Index Name" in node}
        self.text = "\n".join(
            f"{node['Node Type']} on {node.get('Index Name') or node.get('Relation Name')}: {node['Actual Rows']} rows"
            for node in self.nodes
        )

    def _walk(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield node
        for child in node.get("Plans", ()):
            yield from self._walk(child)

    def tables_read_whole(self) -> set[str]:
        return {node["Relation Name"] for node in self.nodes if node["Node Type"] == "Seq Scan"}


def prepare(connection: psycopg.Connection[Any], statement: TextClause, generic: bool, **values: str) -> str:
    """The call of a prepared statement."""
    names = list(dict.fromkeys(PLACEHOLDER.findall(statement.text)))
    sql = PLACEHOLDER.sub(lambda name: f"${names.index(name[1]) + 1}", statement.text)
    connection.execute(f"SET plan_cache_mode = force_{'generic' if generic else 'custom'}_plan".encode())
    connection.execute(b"DEALLOCATE ALL")
    connection.execute(f"PREPARE looked_at AS {sql}".encode())
    return f"EXECUTE looked_at({', '.join(values[name] for name in names)})"


def explain(connection: psycopg.Connection[Any], call: str) -> Plan:
    """How it runs; what it did is rolled back."""
    with connection.transaction(force_rollback=True):
        plan = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}".encode()).fetchone()
    assert plan is not None
    return Plan(plan[0][0])


def fetch(connection: psycopg.Connection[Any], call: str) -> list[tuple[Any, ...]]:
    """What it returns; what it did is rolled back."""
    with connection.transaction(force_rollback=True):
        return connection.execute(call.encode()).fetchall()


any_planning = pytest.mark.parametrize("generic", [False, True], ids=["for_these_values", "for_any_values"])
any_amount = pytest.mark.parametrize(
    ("day", "due"), [(DAY_OF_THE_FEW, FEW), (DAY_OF_THE_MANY, MANY)], ids=["100_due", "10000_due"]
)


@any_planning
@any_amount
def test_what_is_due_is_found_by_status_and_time(dsn: str, generic: bool, day: datetime, due: int) -> None:
    """T5: a handful of pages for each that is due; those that are not due are not looked at, nor are ended ones."""
    BusinessClock(dsn).freeze(day)
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, store.LOCK_PRODUCTS_OF_DUE_TRANSFERS, generic, limit=str(MANY))
        found, plan = fetch(connection, call), explain(connection, call)
        assert len(found) == due
        assert found == sorted(found)
        assert plan.indexes == {"transfers_due", "products_pkey"}, plan.text
        assert plan.tables_read_whole() == set(), plan.text
        assert plan.buffers <= 60 + 10 * due, f"{plan.buffers} buffers\n{plan.text}"
        product_ids = ",".join(str(product) for (product,) in found)
        call = prepare(connection, store.EXPIRE_DUE_TRANSFERS, generic, product_ids=f"'{{{product_ids}}}'")
        assert len(fetch(connection, call)) == due
        plan = explain(connection, call)
        assert plan.tables_read_whole() == set(), plan.text
        assert plan.buffers <= 60 + 60 * due, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_when_nothing_is_due_next_to_nothing_is_read(dsn: str, generic: bool) -> None:
    """T5: most hours are like this, however many are pending."""
    BusinessClock(dsn).freeze(datetime(2033, 7, 1, tzinfo=UTC))
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, store.LOCK_PRODUCTS_OF_DUE_TRANSFERS, generic, limit=str(MANY))
        assert fetch(connection, call) == []
        plan = explain(connection, call)
    assert plan.buffers <= 10, f"{plan.buffers} buffers\n{plan.text}"


class _Undone(Exception):
    """Rolls the sweep back."""


async def sweep_and_undo(dsn: str) -> tuple[int, float]:
    """How many the whole sweep expires, and in how many seconds."""
    db = Database(dsn)
    try:
        async with db.transaction() as tx:
            began = monotonic()
            sweep = await service.expire_pending(tx, limit=MANY)
            seconds = monotonic() - began
            raise _Undone
    except _Undone:
        return sweep.expired_count, seconds
    finally:
        await db.close()


@any_amount
def test_the_whole_sweep_takes_its_time_by_what_is_due(dsn: str, day: datetime, due: int) -> None:
    """T5: half a second where a hundred are due; bounds are wide, since other tests use the same machine."""
    BusinessClock(dsn).freeze(day)
    runs = [asyncio.run(sweep_and_undo(dsn)) for _ in range(3)]
    assert {count for count, _ in runs} == {due}
    best = min(seconds for _, seconds in runs)
    assert best < (0.5 if due == FEW else 10), f"{due} due: {best:.3f} s"


@any_planning
@pytest.mark.parametrize(
    ("statement", "indexes"),
    [
        (store.LOCK_PENDING_TRANSFER, {"transfers_one_pending"}),
        (store.MOVE_REQUESTS, {"service_requests_status", "service_requests_newest"}),
        (store.FIND_PRODUCT_DETAILS, {"products_pkey", "transfers_one_pending", "service_requests_newest"}),
    ],
    ids=["lock_pending_transfer", "move_requests", "find_product_details"],
)
def test_whatever_one_request_needs_costs_a_few_pages(
    dsn: str, generic: bool, statement: TextClause, indexes: set[str]
) -> None:
    """T1, T2: beside a million transfers."""
    BusinessClock(dsn).freeze(DAY_OF_THE_FEW)
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT id FROM transfers.products ORDER BY id OFFSET 1000 LIMIT 1").fetchone()
        assert row is not None
        call = prepare(
            connection, statement, generic, product_id=f"'{row[0]}'", id=f"'{row[0]}'", limit="100",
            product_ids=f"'{{{row[0]}}}'", was="'{Paused}'", becomes="'InProgress'",
        )  # fmt: skip
        plan = explain(connection, call)
    assert plan.indexes, plan.text
    assert plan.indexes <= indexes, plan.text
    assert plan.tables_read_whole() == set(), plan.text
    assert plan.buffers <= 120, f"{plan.buffers} buffers\n{plan.text}"
