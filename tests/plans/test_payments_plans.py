"""Payments among half a million: the sweep, callbacks, pages and the recovery by index, at the cost of a page.

A plan is looked at in both ways PostgreSQL may plan a prepared statement, for these values and for any values.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import TextClause

from apps.finance.payments import store
from apps.wiring import app
from duly.testing import TestServer
from tests.plans.test_transfers_plans import any_planning, explain, fetch, prepare

PAYMENTS = 300_000
FILL = """
INSERT INTO payments.payments (id, from_account_id, to_account_id, amount, currency, state, reason, retryable,
    next_retry_at, attempts, sent_at, initiated_by, provider, provider_ref, bank_key, transaction_id, since, created_at,
    updated_at)
SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, gen_random_uuid(), gen_random_uuid(), 1, 'PLN',
       s.state, CASE s.state WHEN 'FAILED' THEN 'busy' END, s.state = 'FAILED',
       CASE s.state WHEN 'FAILED' THEN timestamptz '2033-01-01' + n * interval '1 second' END, 1,
       timestamptz '2033-01-01', 't', 'bank', 'ref-' || n,
       ('01900000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid, gen_random_uuid(), timestamptz '2033-01-01',
       timestamptz '2033-01-01', timestamptz '2033-01-01'
FROM generate_series(1, 300000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n %% 50 = 0 THEN 'FAILED' WHEN n %% 51 = 0 THEN 'PROCESSING' ELSE 'COMPLETED' END)
    AS s(state);
INSERT INTO payments.history (payment_id, number, at, to_state, cause)
SELECT id, 1, created_at, 'PROCESSING', 'initiate' FROM payments.payments;
INSERT INTO payments.unmatched_callbacks (id, provider, event_id, payment_ref, status, problem, received_at)
SELECT gen_random_uuid(), 'bank', 'e' || n, 'u' || n, 'SETTLED', 'unknown_reference',
       timestamptz '2033-01-01' + n * interval '1 second'
FROM generate_series(1, 20000) AS n
"""
ONE = "'01900000-0000-7000-8000-000000001388'"
KEY = "'01900000-0000-7000-9000-000000001388'"
CASES: dict[str, tuple[TextClause, dict[str, str], set[str], int, int]] = {
    "sweep": (store.CLAIM_DUE, {"limit": "100"}, {"payments_due", "payments_pkey"}, 100, 4_000),
    "callback by reference": (
        store.LOCK_REFERRED, {"provider": "'bank'", "reference": "'ref-5000'", "key": "NULL"},
        {"payments_provider_ref_is_unique", "payments_bank_key_is_unique", "payments_pkey"}, 1, 40,
    ),
    "callback by key": (
        store.LOCK_REFERRED, {"provider": "'bank'", "reference": "'nobody'", "key": KEY},
        {"payments_provider_ref_is_unique", "payments_bank_key_is_unique", "payments_pkey"}, 1, 40,
    ),
    "lock": (store.LOCK_PAYMENT, {"id": ONE}, {"payments_pkey"}, 1, 20),
    "history": (store.READ_HISTORY, {"id": ONE, "limit": "200"}, {"history_pkey"}, 1, 20),
    "recovery": (
        store.READ_OPEN, {"after": ONE, "idle": "'15 minutes'", "limit": "1000"}, {"payments_open"}, 1_000, 2_200,
    ),
    "early callbacks": (
        store.MATCH_CALLBACKS, {"id": ONE, "provider": "'bank'", "reference": "'u77'"}, {"unmatched_ref"}, 1, 40,
    ),
    "old callbacks": (
        store.FORGET_CALLBACKS, {"days": "1", "limit": "100"},
        {"unmatched_age", "unmatched_callbacks_pkey"}, 100, 2_000,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def dsn(server: TestServer) -> Iterator[str]:
    """A database with all of it; every test rolls back what it did."""
    with server.database(app) as made:
        with psycopg.connect(made, autocommit=True) as connection:
            connection.execute("SET statement_timeout = 0")
            connection.execute("SET session_replication_role = replica")
            for statement in FILL.split(";\n"):
                connection.execute(statement.replace("%%", "%").encode())
            connection.execute("VACUUM ANALYZE")
            connection.execute("UPDATE duly.business_clock SET frozen_at = '2033-02-01'")
        yield made


@any_planning
@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_is_found_by_index(dsn: str, generic: bool, name: str) -> None:
    """F6, F7: whatever the number of payments, the cost is that of the page."""
    statement, values, indexes, expected, most = CASES[name]
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, statement, generic, **values)
        found, plan = fetch(connection, call), explain(connection, call)
        assert len(found) == expected, found
        assert plan.tables_read_whole() == set(), plan.text
        assert plan.indexes <= indexes, plan.text
        assert plan.buffers <= most, f"{plan.buffers} buffers\n{plan.text}"
