"""Payments among 300,000: the sweep, callbacks, pages, postings and the recovery by index, at the cost of a page.

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

FILL = """
INSERT INTO payments.payments (id, from_account_id, to_account_id, amount, currency, state, reason, retryable,
    next_retry_at, attempts, sent_at, initiated_by, provider, provider_ref, bank_key, transaction_id, since, created_at,
    updated_at, contradicted_at)
SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, gen_random_uuid(), gen_random_uuid(), 1, 'PLN',
       s.state, CASE s.state WHEN 'FAILED' THEN 'busy' END, s.state = 'FAILED',
       CASE s.state WHEN 'FAILED' THEN timestamptz '2033-01-01' + n * interval '1 second' END, 1,
       timestamptz '2033-01-01', 't', 'bank', 'ref-' || n,
       ('01900000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid, gen_random_uuid(), timestamptz '2033-01-01',
       timestamptz '2033-01-01', timestamptz '2033-01-01', CASE WHEN n %% 4 = 0 THEN timestamptz '2033-01-01' END
FROM generate_series(1, 300000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n %% 25 = 0 THEN 'FAILED' WHEN n %% 17 = 0 THEN 'PROCESSING' ELSE 'COMPLETED' END)
    AS s(state);
INSERT INTO payments.history (payment_id, number, at, to_state, cause)
SELECT id, 1, created_at, 'PROCESSING', 'initiate' FROM payments.payments;
INSERT INTO payments.unmatched_callbacks (id, provider, event_id, payment_ref, status, problem, payment_id, received_at,
    dismissed_at, dismissed_by, dismiss_reason)
SELECT ('01900000-0000-7000-a000-' || lpad(to_hex(n), 12, '0'))::uuid, 'bank', 'e' || n, 'u' || n %% 20000, 'SETTLED',
       CASE WHEN n > 20000 THEN 'amount_differs' ELSE 'unknown_reference' END,
       CASE WHEN n > 20000 THEN ('01900000-0000-7000-8000-' || lpad(to_hex(n %% 20000), 12, '0'))::uuid END, t.at,
       CASE WHEN d.is_over THEN t.at END, CASE WHEN d.is_over THEN 'boss' END, CASE WHEN d.is_over THEN 'seen' END
FROM generate_series(1, 200000) AS n
CROSS JOIN LATERAL (SELECT n BETWEEN 20001 AND 180000) AS d(is_over)
CROSS JOIN LATERAL (SELECT timestamptz '2033-01-01' + n * interval '1 second') AS t(at);
INSERT INTO ledger.transactions (id, reference, currency, amount, status, reverses_id, reason, posted_at)
SELECT ('01900000-0000-7000-b000-' || lpad(to_hex(n), 12, '0'))::uuid, 't' || n, 'PLN', 1,
       CASE WHEN n <= 50000 THEN 'REVERSED' ELSE 'POSTED' END,
       CASE WHEN n > 50000 THEN ('01900000-0000-7000-b000-' || lpad(to_hex(n - 50000), 12, '0'))::uuid END,
       CASE WHEN n > 50000 THEN 'by hand' END, timestamptz '2033-01-01'
FROM generate_series(1, 100000) AS n
"""
ONE = "'01900000-0000-7000-8000-000000001388'"
POSTED = "'01900000-0000-7000-b000-000000001388'"
KEPT = "'01900000-0000-7000-a000-000000001388'"  # open
KEY = "'{01900000-0000-7000-9000-000000001388}'"
CASES: dict[str, tuple[TextClause, dict[str, str], set[str], int, int]] = {
    "sweep": (store.CLAIM_DUE, {"limit": "100"}, {"payments_due", "payments_pkey"}, 100, 4_000),
    "callback by reference": (
        store.LOCK_REFERRED, {"provider": "'bank'", "reference": "'ref-5000'", "keys": "'{}'"},
        {"payments_provider_ref_is_unique", "payments_bank_key_is_unique", "payments_pkey"}, 1, 40,
    ),
    "callback by key": (
        store.LOCK_REFERRED, {"provider": "'bank'", "reference": "'nobody'", "keys": KEY},
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
    "whose reference": (
        store.FIND_REFERENCE, {"provider": "'bank'", "reference": "'ref-5000'"},
        {"payments_provider_ref_is_unique"}, 1, 10,
    ),
    "posting": (store.LOCK_POSTING, {"posted": POSTED, "id": ONE}, {"unmatched_payment"}, 1, 60),
    "page": (store.LIST_PAYMENTS, {"before": ONE, "limit": "50"}, {"payments_pkey"}, 50, 80),
    "first page": (store.LIST_PAYMENTS, {"before": "NULL", "limit": "50"}, {"payments_pkey"}, 50, 80),
    "page of a state": (
        store.LIST_PAYMENTS_IN_STATE, {"state": "'FAILED'", "before": "NULL", "limit": "50"},
        {"payments_state"}, 50, 80,
    ),
    "page of a state that nobody is in": (
        store.LIST_PAYMENTS_IN_STATE, {"state": "'RETURNING'", "before": "NULL", "limit": "50"},
        {"payments_state"}, 0, 10,
    ),
    "kept callbacks": (
        store.LIST_CALLBACKS, {"before": "NULL", "limit": "50"}, {"unmatched_callbacks_pkey"}, 50, 80,
    ),
    "open callbacks": (store.LIST_OPEN_CALLBACKS, {"before": "NULL", "limit": "50"}, {"unmatched_open"}, 50, 80),
    "open callbacks behind those that are dealt with": (
        store.LIST_OPEN_CALLBACKS, {"before": "'01900000-0000-7000-a000-00000002bf20'", "limit": "50"},
        {"unmatched_open"}, 50, 80,
    ),
    "dismissal": (
        store.DISMISS_CALLBACK, {"id": KEPT, "actor": "'boss'", "reason": "'seen'"},
        {"unmatched_callbacks_pkey", "unmatched_open"}, 1, 60,
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
