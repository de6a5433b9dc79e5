"""Identity checks among 300,000, and what a dossier looks up: by index, at the cost of a page.

A plan is looked at in both ways PostgreSQL may plan a prepared statement, for these values and for any values.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import TextClause

from apps.finance.dossier import reading
from apps.finance.kyc import store
from apps.wiring import app
from duly.testing import TestServer
from tests.plans.test_transfers_plans import any_planning, explain, fetch, prepare

FILL = """
INSERT INTO kyc.sessions (id, user_id, provider, status, token, requested_by, provider_ref, evidence_ref, created_at,
    expires_at, updated_at)
SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'user-' || n %% 50000, 'sandbox', s.status,
       repeat('t', 32), 'agent', 'ses_' || md5(n::text),
       CASE WHEN s.status IN ('APPROVED', 'REJECTED') THEN 'ev_' || md5(n::text) END, t.at,
       t.at + interval '1 day', t.at
FROM generate_series(1, 300000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n %% 25 = 0 THEN 'PENDING' WHEN n %% 31 = 0 THEN 'IN_PROGRESS'
                                WHEN n %% 7 = 0 THEN 'EXPIRED' ELSE 'APPROVED' END) AS s(status)
CROSS JOIN LATERAL (SELECT timestamptz '2033-01-01' + n * interval '1 minute') AS t(at);
INSERT INTO kyc.history (session_id, number, at, to_status, cause)
SELECT id, 1, created_at, 'PENDING', 'create' FROM kyc.sessions;
INSERT INTO kyc.unmatched_callbacks (id, provider, event_id, problem, received_at, dismissed_at, dismissed_by, handled)
SELECT ('01900000-0000-7000-a000-' || lpad(to_hex(n), 12, '0'))::uuid, 'sandbox', md5(n::text) || md5(n::text),
       'unknown_session', t.at, CASE WHEN d.is_over THEN t.at END, CASE WHEN d.is_over THEN 'agent' END,
       CASE WHEN d.is_over THEN 'NO_ACTION' END
FROM generate_series(1, 100000) AS n
CROSS JOIN LATERAL (SELECT n BETWEEN 5001 AND 95000) AS d(is_over)
CROSS JOIN LATERAL (SELECT timestamptz '2033-01-01' + n * interval '1 minute') AS t(at);
INSERT INTO ledger.transactions (id, reference, currency, amount, posted_at, xid)
SELECT ('01900000-0000-7000-b000-' || lpad(to_hex(n), 12, '0'))::uuid, 't' || n, 'PLN', 1, timestamptz '2033-01-01',
       (n * 10)::text::xid8
FROM generate_series(1, 100000) AS n;
INSERT INTO ledger.seals (number, first_xid, next_xid, transactions, entries, previous_hash, hash, sealed_at)
SELECT n, ((n - 1) * 100)::text::xid8, (n * 100)::text::xid8, 10, 20, sha256((n - 1)::text::bytea),
       sha256(n::text::bytea), timestamptz '2033-01-01'
FROM generate_series(1, 9000) AS n;
INSERT INTO payments.unmatched_callbacks (id, provider, event_id, payment_ref, status, problem, payment_id, received_at,
    dismissed_at, dismissed_by, dismiss_reason)
SELECT gen_random_uuid(), 'bank', 'e' || n, 'u' || n, 'SETTLED', 'amount_differs',
       ('01900000-0000-7000-8000-' || lpad(to_hex(n %% 20000), 12, '0'))::uuid, t.at, t.at, 'boss', 'seen'
FROM generate_series(1, 100000) AS n CROSS JOIN LATERAL (SELECT timestamptz '2033-01-01') AS t(at)
"""
ONE = "'01900000-0000-7000-8000-000000001388'"
POSTED = "'01900000-0000-7000-b000-000000001388'"
KEPT = "'01900000-0000-7000-a000-000000001000'"
CASES: dict[str, tuple[TextClause, dict[str, str], set[str], int, int]] = {
    "lock": (store.LOCK_SESSION, {"id": ONE}, {"sessions_pkey"}, 1, 20),
    "callback by id": (
        store.LOCK_REFERRED, {"provider": "'sandbox'", "session_ref": "NULL", "client_ref": ONE},
        {"sessions_pkey", "sessions_provider_ref_is_unique"}, 1, 40,
    ),
    "callback by reference": (
        store.LOCK_REFERRED,
        {"provider": "'sandbox'", "session_ref": "'ses_' || md5('5000')", "client_ref": "NULL"},
        {"sessions_pkey", "sessions_provider_ref_is_unique"}, 1, 40,
    ),
    "sweep": (store.LOCK_DUE, {"limit": "100"}, {"sessions_due"}, 100, 600),
    "history": (store.READ_HISTORY, {"id": ONE, "limit": "20"}, {"history_pkey"}, 1, 20),
    "page": (store.LIST_SESSIONS, {"before": ONE, "limit": "50"}, {"sessions_pkey"}, 50, 80),
    "first page": (store.LIST_SESSIONS, {"before": "NULL", "limit": "50"}, {"sessions_pkey"}, 50, 80),
    "page of a status": (
        store.LIST_IN_STATUS, {"status": "'PENDING'", "before": "NULL", "limit": "50"}, {"sessions_status"}, 50, 80,
    ),
    "page of a status that nobody has": (
        store.LIST_IN_STATUS, {"status": "'REJECTED'", "before": "NULL", "limit": "50"}, {"sessions_status"}, 0, 10,
    ),
    "page of a person": (
        store.LIST_OF_USER, {"user_id": "'user-77'", "before": "NULL", "limit": "50"}, {"sessions_user"}, 6, 30,
    ),
    "open callbacks": (store.LIST_OPEN_CALLBACKS, {"before": "NULL", "limit": "50"}, {"unmatched_open"}, 50, 80),
    "kept callbacks": (
        store.LIST_CALLBACKS, {"before": "NULL", "limit": "50"}, {"unmatched_callbacks_pkey"}, 50, 80,
    ),
    "dismissal": (
        store.DISMISS_CALLBACK, {"id": KEPT, "actor": "'agent'", "handled": "'NO_ACTION'"},
        {"unmatched_callbacks_pkey", "unmatched_open"}, 1, 60,
    ),
    "old sessions": (
        store.FORGET_SESSIONS, {"days": "1", "limit": "100"}, {"sessions_age", "sessions_pkey"}, 100, 4_000,
    ),
    "old callbacks": (
        store.FORGET_CALLBACKS, {"days": "1", "limit": "100"},
        {"unmatched_age", "unmatched_callbacks_pkey"}, 100, 2_000,
    ),
    "the seal over a transaction": (
        reading.FIND_SEAL, {"id": POSTED}, {"transactions_pkey", "seals_end"}, 1, 20,
    ),
    "callbacks of a payment": (
        reading.LIST_CALLBACKS, {"id": ONE, "limit": "500"}, {"unmatched_of_payment"}, 5, 30,
    ),
    "history of a payment": (reading.READ_HISTORY, {"id": ONE, "limit": "5000"}, {"history_pkey"}, 0, 20),
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
            connection.execute("UPDATE duly.business_clock SET frozen_at = '2035-02-01'")
        yield made


@any_planning
@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_is_found_by_index(dsn: str, generic: bool, name: str) -> None:
    """F8: whatever the number of sessions, the cost is that of the page."""
    statement, values, indexes, expected, most = CASES[name]
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, statement, generic, **values)
        found, plan = fetch(connection, call), explain(connection, call)
        assert len(found) == expected, found
        assert plan.tables_read_whole() == set(), plan.text
        assert plan.indexes <= indexes, plan.text
        assert plan.buffers <= most, f"{plan.buffers} buffers\n{plan.text}"
