"""The sweeps and requests of commerce among 200,000 payments: by index, at a cost of what is due (C2, C3).

200,000 orders, of which 20,000 wait: 100 are overdue on one day and 1,000 on the next. As many carts, of which 20,000
are open and 1,000 untouched for a day; and 100,000 links. A plan is looked at in both ways PostgreSQL may plan a
prepared statement, for these values and for any values.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import psycopg
import pytest
from sqlalchemy import TextClause

from apps.commerce import store
from apps.wiring import app
from duly.testing import BusinessClock, TestServer
from tests.plans.test_transfers_plans import any_planning, explain, fetch, prepare

FEW, MANY = 100, 1_000
DAY_OF_THE_FEW = datetime(2034, 1, 2, tzinfo=UTC)
DAY_OF_THE_MANY = datetime(2034, 1, 3, tzinfo=UTC)
FILL = """
INSERT INTO commerce.orders (id, customer_id, currency, total, status, created_at, updated_at)
SELECT duly.uuid7(timestamptz '2033-01-01' + n * interval '1 second'), 'c' || n % 5000, 'PLN', 10, s.status, c.at,
       CASE WHEN s.status = 'AWAITING_PAYMENT' THEN c.at ELSE c.at + interval '1 hour' END
FROM generate_series(1, 200000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n % 10 <> 0 THEN (ARRAY['PAID', 'EXPIRED'])[1 + n % 2]
                                ELSE 'AWAITING_PAYMENT' END) AS s(status)
CROSS JOIN LATERAL (SELECT CASE WHEN n % 10 <> 0 THEN timestamptz '2033-01-01'
                                WHEN n % 2000 = 0 THEN timestamptz '2034-01-01'
                                WHEN n % 200 = 10 AND n < 180000 THEN timestamptz '2034-01-02 12:00'
                                ELSE timestamptz '2034-02-01' END + n * interval '1 millisecond') AS c(at);
INSERT INTO commerce.order_lines SELECT id, 1, 'tea', 1, 10 FROM commerce.orders;
INSERT INTO commerce.payments (order_id, amount, status, created_at, due_at, settled_at)
SELECT id, total, CASE status WHEN 'AWAITING_PAYMENT' THEN 'PENDING' ELSE status END, created_at,
       created_at + interval '15 minutes', CASE status WHEN 'AWAITING_PAYMENT' THEN NULL ELSE updated_at END
FROM commerce.orders;
INSERT INTO commerce.carts (id, customer_id, currency, status, created_at, touched_at, closed_at)
SELECT gen_random_uuid(), 'c' || n % 5000, 'PLN', CASE WHEN n % 10 = 0 THEN 'OPEN' ELSE 'ABANDONED' END, c.at, c.at,
       CASE WHEN n % 10 = 0 THEN NULL ELSE c.at + interval '25 hours' END
FROM generate_series(1, 200000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n % 200 = 10 THEN timestamptz '2034-01-01' WHEN n % 10 = 0 THEN '2034-02-01'
                                ELSE timestamptz '2033-12-01' END + n * interval '1 millisecond') AS c(at);
INSERT INTO commerce.order_links
SELECT sha256(n::text::bytea), o.id, t.at, t.at + interval '7 days'
FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM commerce.orders) AS o
CROSS JOIN LATERAL (SELECT CASE WHEN n % 100 = 0 THEN timestamptz '2033-12-01' ELSE '2034-01-01' END) AS t(at)
WHERE n <= 100000;
"""


@pytest.fixture(scope="module")
def dsn(server: TestServer) -> Iterator[str]:
    """A database with all of it; every test rolls back what it did."""
    with server.database(app) as made:
        with psycopg.connect(made, autocommit=True) as connection:
            connection.execute("SET statement_timeout = 0")
            connection.execute("SET session_replication_role = replica")  # no foreign keys are looked up meanwhile
            for statement in FILL.split(";\n"):
                connection.execute(statement.encode())
            connection.execute("VACUUM ANALYZE")
            waiting = "SELECT count(*), count(*) FILTER (WHERE status = 'PENDING') FROM commerce.payments"
            assert connection.execute(waiting.encode()).fetchone() == (200_000, 20_000)
        yield made


@any_planning
@pytest.mark.parametrize(
    ("day", "due"), [(DAY_OF_THE_FEW, FEW), (DAY_OF_THE_MANY, MANY)], ids=["100_overdue", "1000_overdue"]
)
def test_what_is_overdue_is_found_and_settled_by_index(dsn: str, generic: bool, day: datetime, due: int) -> None:
    """C3: a few pages for each that is overdue; settled ones are not looked at, nor those that may still be paid."""
    BusinessClock(dsn).freeze(day)
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, store.LOCK_OVERDUE_ORDERS, generic, limit=str(MANY))
        found, plan = fetch(connection, call), explain(connection, call)
        assert (len(found), found) == (due, sorted(found))
        assert plan.indexes == {"payments_due", "orders_pkey"}, plan.text
        assert plan.tables_read_whole() == set(), plan.text
        assert plan.buffers <= 60 + 10 * due, f"{plan.buffers} buffers\n{plan.text}"
        ids = ",".join(str(order) for (order,) in found)
        call = prepare(connection, store.SETTLE_ORDERS, generic, ids=f"'{{{ids}}}'", status="'EXPIRED'")
        assert len(fetch(connection, call)) == due
        plan = explain(connection, call)
        assert plan.tables_read_whole() == set(), plan.text
        assert plan.buffers <= 100 + 60 * due, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_when_nothing_is_overdue_next_to_nothing_is_read(dsn: str, generic: bool) -> None:
    """C3: every five minutes, however many wait."""
    BusinessClock(dsn).freeze(datetime(2033, 12, 31, tzinfo=UTC))
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in (store.LOCK_OVERDUE_ORDERS, store.ABANDON_CARTS):
            call = prepare(connection, statement, generic, limit=str(MANY))
            assert fetch(connection, call) == []
            plan = explain(connection, call)
            assert plan.buffers <= 12, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
@pytest.mark.parametrize(
    ("statement", "indexes", "done"),
    [
        (store.ABANDON_CARTS, {"carts_untouched", "carts_pkey"}, MANY),
        (store.FORGET_CARTS, {"carts_closed", "carts_pkey"}, MANY),
        (store.FORGET_LINKS, {"order_links_expired", "order_links_pkey"}, MANY),
    ],
    ids=["abandon_carts", "forget_carts", "forget_links"],
)
def test_a_clean_up_reads_what_it_takes(
    dsn: str, generic: bool, statement: TextClause, indexes: set[str], done: int
) -> None:
    """C3: a thousand at a time among hundreds of thousands."""
    BusinessClock(dsn).freeze(datetime(2034, 1, 3, tzinfo=UTC))
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, statement, generic, limit=str(MANY), days="10")
        rows = fetch(connection, call)
        assert (rows[0][0] if len(rows) == 1 else len(rows)) == done
        plan = explain(connection, call)
        assert plan.indexes == indexes, plan.text
        assert plan.tables_read_whole() == set(), plan.text
        assert plan.buffers <= 100 + 60 * done, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
@pytest.mark.parametrize(
    ("statement", "indexes"),
    [
        (store.LOCK_ORDER, {"orders_pkey"}),
        (store.FIND_ORDER, {"orders_pkey", "payments_pkey", "order_lines_pkey"}),
        (store.SETTLE_ORDERS, {"orders_pkey", "payments_pkey"}),
        (store.FIND_LINK, {"order_links_pkey"}),
        (store.INSERT_LINK, {"order_links_order"}),
        (store.INSERT_CART, {"carts_open"}),
    ],
    ids=["lock_order", "find_order", "settle_orders", "find_link", "insert_link", "insert_cart"],
)
def test_whatever_one_request_needs_costs_a_few_pages(
    dsn: str, generic: bool, statement: TextClause, indexes: set[str]
) -> None:
    """C2, C3: beside 200,000 orders."""
    BusinessClock(dsn).freeze(DAY_OF_THE_FEW)
    with psycopg.connect(dsn, autocommit=True) as connection:
        waiting = "SELECT id FROM commerce.orders WHERE status = 'AWAITING_PAYMENT' ORDER BY id OFFSET 1000 LIMIT 1"
        row = connection.execute(waiting.encode()).fetchone()
        assert row is not None
        fresh = "'01890000-0000-7000-8000-000000000000'"
        call = prepare(
            connection, statement, generic, id=fresh if statement is store.INSERT_CART else f"'{row[0]}'",
            ids=f"'{{{row[0]}}}'", status="'PAID'", order_id=f"'{row[0]}'", token_sha256="sha256('new')",
            customer_id="'c7'", currency="'PLN'", most="20",
        )  # fmt: skip
        plan = explain(connection, call)
    assert plan.indexes == indexes, plan.text
    assert plan.tables_read_whole() == set(), plan.text
    assert plan.buffers <= 160, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_a_page_of_orders_is_read_along_the_index(dsn: str, generic: bool) -> None:
    """C2: the newest fifty of a customer with forty, and of those before one."""
    query = (
        "SELECT o.*, p.status FROM commerce.orders o JOIN commerce.payments p ON p.order_id = o.id"
        " WHERE o.customer_id = :customer_id AND o.id < :before ORDER BY o.id DESC LIMIT :limit"
    )
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(
            connection, TextClause(query), generic, customer_id="'c7'", limit="51",
            before="'ffffffff-0000-7000-8000-000000000000'",
        )  # fmt: skip
        plan = explain(connection, call)
    assert plan.indexes == {"orders_customer", "payments_pkey"}, plan.text
    assert plan.tables_read_whole() == set(), plan.text
    assert plan.buffers <= 400, f"{plan.buffers} buffers\n{plan.text}"
