"""The ledger among a million entries: statements, balances, pages of checks and seals by index, at the cost of a page.

500,000 transactions of two entries, between 1,000 accounts and one hot account that has every second entry. A plan is
looked at in both ways PostgreSQL may plan a prepared statement, for these values and for any values.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import TextClause

from apps.finance.ledger import store, store_audit
from apps.wiring import app
from duly.testing import TestServer
from tests.plans.test_transfers_plans import any_planning, explain, fetch, prepare

HOT = UUID(int=1)
TRANSACTIONS = 500_000
FILL = """
INSERT INTO ledger.accounts (id, name, type, currency, digits, side, may_go_negative, created_at)
SELECT lpad(to_hex(n), 32, '0')::uuid, 'a' || n, 'LIABILITY', 'PLN', 2, -1, true, timestamptz '2033-01-01'
FROM generate_series(1, 1001) AS n;
INSERT INTO ledger.transactions (id, reference, currency, amount, posted_at, xid)
SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'r' || n, 'PLN', 1,
       timestamptz '2033-01-01' + n * interval '1 second', (1000 + n)::text::xid8
FROM generate_series(1, 500000) AS n;
INSERT INTO ledger.entries (account_id, version, transaction_id, line, amount, balance_after, posted_at)
SELECT lpad('1', 32, '0')::uuid, n, t.id, 1, 1, n, t.posted_at
FROM (SELECT *, row_number() OVER (ORDER BY id) AS n FROM ledger.transactions) AS t;
INSERT INTO ledger.entries (account_id, version, transaction_id, line, amount, balance_after, posted_at)
SELECT lpad(to_hex(2 + n % 1000), 32, '0')::uuid, (n - 1) / 1000 + 1, t.id, 2, -1, -((n - 1) / 1000 + 1), t.posted_at
FROM (SELECT *, row_number() OVER (ORDER BY id) AS n FROM ledger.transactions) AS t;
INSERT INTO ledger.balances (account_id, currency, digits, side, may_go_negative, balance, version, posted_at)
SELECT DISTINCT ON (e.account_id) e.account_id, 'PLN', 2, -1, true, e.balance_after, e.version, e.posted_at
FROM ledger.entries e ORDER BY e.account_id, e.version DESC;
INSERT INTO ledger.holds (id, account_id, reference, amount, status, created_at, expires_at, ended_at)
SELECT gen_random_uuid(), lpad(to_hex(1 + n % 1000), 32, '0')::uuid, 'h' || n, 1, s.status, timestamptz '2033-01-01',
       timestamptz '2033-01-08', CASE s.status WHEN 'VOIDED' THEN timestamptz '2033-01-02' END
FROM generate_series(1, 20000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n % 10 = 0 THEN 'ACTIVE' ELSE 'VOIDED' END) AS s(status);
UPDATE ledger.balances b SET held = h.held
FROM (SELECT account_id, sum(amount) AS held FROM ledger.holds WHERE status = 'ACTIVE' GROUP BY 1) AS h
WHERE h.account_id = b.account_id
"""


@pytest.fixture(scope="module")
def dsn(server: TestServer) -> Iterator[str]:
    """A database with all of it; every test rolls back what it did."""
    with server.database(app) as made:
        with psycopg.connect(made, autocommit=True) as connection:
            connection.execute("SET statement_timeout = 0")
            connection.execute("SET session_replication_role = replica")
            for statement in FILL.split(";\n"):
                connection.execute(statement.encode())
            connection.execute("VACUUM ANALYZE")
            counted = connection.execute("SELECT count(*) FROM ledger.entries").fetchone()
            assert counted == (2 * TRANSACTIONS,)
        yield made


MIDDLE = "'2033-01-04 00:00:00+00'"
PAGE = 50
CASES: dict[str, tuple[TextClause, dict[str, str], set[str], int, int]] = {
    "balance": (store.FIND_BALANCE, {"id": f"'{HOT}'"}, {"balances_pkey"}, 1, 5),
    "balance of the past": (
        store.FIND_BALANCE_AT, {"id": f"'{HOT}'", "moment": MIDDLE}, {"balances_pkey"}, 1, 150,
    ),
    "statement": (
        store.LIST_ENTRIES, {"id": f"'{HOT}'", "before": "NULL", "limit": str(PAGE)},
        {"accounts_pkey", "entries_pkey", "transactions_pkey"}, PAGE, 350,
    ),
    "statement, far back": (
        store.LIST_ENTRIES, {"id": f"'{HOT}'", "before": "1000", "limit": str(PAGE)},
        {"accounts_pkey", "entries_pkey", "transactions_pkey"}, PAGE, 350,
    ),
    "transaction": (
        store.FIND_TRANSACTION, {"id": "'01900000-0000-7000-8000-000000000100'"},
        {"transactions_pkey", "entries_line_is_one", "accounts_pkey", "transactions_reversed_once"}, 2, 30,
    ),
    "check of transactions": (
        store_audit.CHECK_TRANSACTIONS,
        {"after": "'01900000-0000-7000-8000-000000010000'", "limit": "100"},
        {"transactions_pkey", "entries_line_is_one", "accounts_pkey", "transactions_reversed_once"}, 1, 3_000,
    ),
    "check of one account's entries": (
        store_audit.CHECK_ENTRIES, {"after": f"'{HOT}'", "after_version": "250000", "limit": "100"},
        {"entries_pkey", "transactions_pkey", "accounts_pkey"}, 1, 2_500,
    ),
    "check of balances": (
        store_audit.CHECK_BALANCES, {"after": f"'{HOT}'", "limit": "100"},
        {"accounts_pkey", "balances_pkey", "entries_pkey", "holds_active"}, 1, 2_000,
    ),
    "end of the next seal": (
        store_audit.FIND_END, {"first_xid": "'200000'", "horizon": "'900000'", "limit": "1000"},
        {"transactions_written"}, 1, 50,
    ),
    "lines of the next seal": (
        store_audit.READ_LINES,
        {"xid": "'200000'", "id": "'00000000-0000-0000-0000-000000000000'", "next_xid": "'900000'", "limit": "100"},
        {"transactions_written", "entries_line_is_one"}, 200, 1_500,
    ),
}  # fmt: skip


@any_planning
@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_is_found_by_index(dsn: str, generic: bool, name: str) -> None:
    """F2, F3: whatever the ledger's size, the cost is that of the page."""
    statement, values, indexes, expected, most = CASES[name]
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, statement, generic, **values)
        found, plan = fetch(connection, call), explain(connection, call)
        assert len(found) == expected, found
        assert plan.tables_read_whole() == set(), plan.text
        assert plan.indexes <= indexes | {"accounts_terms_are_kept"}, plan.text
        assert plan.buffers <= most, f"{plan.buffers} buffers\n{plan.text}"


def test_a_balance_of_the_past_is_the_right_one(dsn: str) -> None:
    """F2: at each of many moments, found in twenty probes; the hot account has an entry a second."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for second in (0, 1, 2, 255, 256, 257, 259_200, 499_999, 500_000, 600_000):
            query = (
                "SELECT version, balance FROM ledger.find_entry_at(%s, timestamptz '2033-01-01' + %s * interval '1 s')"
            )
            found = connection.execute(query, [HOT, second]).fetchone()
            assert found == (min(second, TRANSACTIONS), min(second, TRANSACTIONS))


def test_posting_reads_a_handful_of_pages_however_old_the_accounts(dsn: str) -> None:
    """F3: the function, its guard and its proof find everything by index."""
    post = """
        SELECT outcome FROM ledger.post(ARRAY[gen_random_uuid()], ARRAY['new'], ARRAY[1, 1], ARRAY[%s, %s]::uuid[],
                                        ARRAY[1, -1], ARRAY[false, false], '{}', false, 'clerk')"""
    with psycopg.connect(dsn) as connection:
        for _ in range(8):  # the plans of the function are made once, and kept
            connection.execute(post, [HOT, UUID(int=5)])
            connection.rollback()
        call = post.replace("%s, %s", f"'{HOT}', '{UUID(int=5)}'")
        plan = explain_in(connection, call)
        assert plan <= 150, f"{plan} buffers"
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        connection.rollback()


def explain_in(connection: psycopg.Connection[tuple[object, ...]], call: str) -> int:
    """How many pages it touches, triggers included."""
    row = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}".encode()).fetchone()
    assert row is not None
    plan = row[0][0]["Plan"]  # type: ignore[index]  # JSON
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])
