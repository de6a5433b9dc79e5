"""Identity checks among 300,000: sessions, callbacks, timers, pages and the clean-up by index, at the cost of a page.

Whatever is open is old, so that who goes along the wrong index reads thousands first. A plan is looked at in both ways
PostgreSQL may plan a prepared statement, for these values and for any values.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import TextClause

from apps.finance.kyc import store
from apps.wiring import app
from duly.testing import TestServer
from tests.plans.test_transfers_plans import any_planning, explain, fetch, prepare

FILL = """
INSERT INTO kyc.sessions (id, user_id, provider, status, token, requested_by, provider_ref, evidence_ref, version,
                          created_at, expires_at, updated_at)
SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'user-' || n % 60000, 'sandbox', s.status,
       repeat('t', 32), 'agent', CASE WHEN s.status <> 'PENDING' THEN 'ses-' || lpad(to_hex(n), 24, '0') END,
       CASE WHEN s.status IN ('APPROVED', 'REJECTED') THEN 'ev-' || lpad(to_hex(n), 24, '0') END, 2, m.at,
       m.at + interval '1 day', m.at + interval '1 hour'
FROM generate_series(1, 300000) AS n
CROSS JOIN LATERAL (
    SELECT CASE WHEN n <= 400 THEN 'PENDING' WHEN n <= 900 THEN 'IN_PROGRESS' WHEN n % 10 = 0 THEN 'EXPIRED'
                WHEN n % 7 = 0 THEN 'REJECTED' ELSE 'APPROVED' END) AS s(status)
CROSS JOIN LATERAL (SELECT timestamptz '2033-01-01' + n * interval '1 minute') AS m(at);
INSERT INTO kyc.history (session_id, number, at, from_status, to_status, cause)
SELECT id, 1, created_at, NULL, 'PENDING', 'create' FROM kyc.sessions;
INSERT INTO kyc.history (session_id, number, at, from_status, to_status, cause)
SELECT id, 2, updated_at, 'PENDING', status, CASE status WHEN 'EXPIRED' THEN 'expire' ELSE 'callback' END
FROM kyc.sessions;
INSERT INTO kyc.unmatched_callbacks (id, provider, event_id, client_ref, problem, received_at, dismissed_at,
                                     dismissed_by, handled)
SELECT ('01900000-0000-7000-a000-' || lpad(to_hex(n), 12, '0'))::uuid, 'sandbox', lpad(to_hex(n), 64, '0'),
       gen_random_uuid(), 'unknown_session', t.at, CASE WHEN d.is_over THEN t.at END,
       CASE WHEN d.is_over THEN 'agent' END, CASE WHEN d.is_over THEN 'NOT_OURS' END
FROM generate_series(1, 100000) AS n
CROSS JOIN LATERAL (SELECT n > 200) AS d(is_over)
CROSS JOIN LATERAL (SELECT timestamptz '2033-01-01' + n * interval '1 minute') AS t(at);
INSERT INTO duly.alerts (kind, subject, message, raised_at, last_at, resolved_at)
SELECT 'application', 'kyc.callbacks.sandbox:' || n, 'x', duly.now(), duly.now(), CASE WHEN n > 200 THEN duly.now() END
FROM generate_series(1, 20000) AS n
"""
ONE, ENDED = "'01900000-0000-7000-8000-000000000010'", "'01900000-0000-7000-8000-000000022222'"
KEPT = "'01900000-0000-7000-a000-000000000010'"
REFERENCE = "'ses-000000000000000000000200'"  # of one that is in progress
OPEN_CALLBACKS = {"unmatched_open_of_session", "unmatched_open"}
EITHER = {"sessions_provider_ref_is_unique", "sessions_pkey"}
CASES: dict[str, tuple[TextClause, dict[str, str], set[str], int, int]] = {
    "a new one": (
        store.INSERT_SESSION,
        {"id": "gen_random_uuid()", "user_id": "'user-7'", "provider": "'sandbox'", "token": "repeat('t', 32)",
         "requested_by": "'agent'", "window": "'24 hours'"},
        set(), 1, 60,
    ),
    "a change": (
        store.SAVE_SESSION,
        {"id": ONE, "version": "2", "from_status": "'PENDING'", "status": "'IN_PROGRESS'", "provider_ref": "NULL",
         "evidence_ref": "NULL", "cause": "'open'"},
        {"sessions_pkey"}, 1, 80,
    ),
    "one of them": (store.FIND_SESSION, {"id": ENDED}, {"sessions_pkey"}, 1, 10),
    "locking one": (store.LOCK_SESSION, {"id": ONE}, {"sessions_pkey"}, 1, 20),
    "whose reference": (
        store.FIND_REFERENCE, {"provider": "'sandbox'", "reference": REFERENCE},
        {"sessions_provider_ref_is_unique"}, 1, 10,
    ),
    "callback by reference": (
        store.LOCK_REFERRED, {"provider": "'sandbox'", "session_ref": REFERENCE, "client_ref": "NULL"}, EITHER, 1, 40,
    ),
    "callback by our id": (
        store.LOCK_REFERRED, {"provider": "'sandbox'", "session_ref": "NULL", "client_ref": ONE}, EITHER, 1, 40,
    ),
    "callback about nobody": (
        store.LOCK_REFERRED, {"provider": "'sandbox'", "session_ref": "'x'", "client_ref": "gen_random_uuid()"},
        EITHER, 0, 40,
    ),
    "history": (store.READ_HISTORY, {"id": ENDED, "limit": "20"}, {"history_pkey"}, 2, 10),
    "sweep": (store.LOCK_DUE, {"limit": "500"}, {"sessions_due"}, 500, 2_000),
    "page": (store.LIST_SESSIONS, {"before": ENDED, "limit": "51"}, {"sessions_pkey"}, 51, 70),
    "first page": (store.LIST_SESSIONS, {"before": "NULL", "limit": "51"}, {"sessions_pkey"}, 51, 70),
    "page of a status": (
        store.LIST_IN_STATUS, {"status": "'APPROVED'", "before": ENDED, "limit": "51"}, {"sessions_status"}, 51, 90,
    ),
    "page of a status that few are in": (
        store.LIST_IN_STATUS, {"status": "'PENDING'", "before": "NULL", "limit": "51"}, {"sessions_status"}, 51, 90,
    ),
    "page of a person": (
        store.LIST_OF_USER, {"user_id": "'user-77'", "before": "NULL", "limit": "51"}, {"sessions_user"}, 5, 20,
    ),
    "page of a person who has none": (
        store.LIST_OF_USER, {"user_id": "'user-99999'", "before": "NULL", "limit": "51"}, {"sessions_user"}, 0, 10,
    ),
    "old sessions": (
        store.FORGET_SESSIONS, {"days": "30", "limit": "500"}, {"sessions_age", "sessions_pkey"}, 500, 12_000,
    ),
    "keeping a callback": (
        store.KEEP_CALLBACK,
        {"id": "gen_random_uuid()", "provider": "'sandbox'", "event_id": "repeat('f', 64)", "client_ref": "NULL",
         "session_ref": "NULL", "status": "NULL", "problem": "'unknown_session'", "session_id": "NULL",
         "evidence_ref": "NULL"},
        set(), 0, 200,
    ),
    "another callback of a session": (
        store.HAS_OPEN_CALLBACK, {"provider": "'sandbox'", "session_id": ONE}, OPEN_CALLBACKS, 1, 20,
    ),
    "another callback of none": (
        store.HAS_OPEN_CALLBACK, {"provider": "'sandbox'", "session_id": "NULL"}, OPEN_CALLBACKS, 1, 20,
    ),
    "the engine's alert": (store.LOCK_ALERTS, {"subject": "'kyc.callbacks.sandbox:7'"}, {"alerts_open"}, 1, 20),
    "a kept callback": (store.FIND_CALLBACK, {"id": KEPT}, {"unmatched_callbacks_pkey"}, 1, 10),
    "kept callbacks": (
        store.LIST_CALLBACKS, {"before": "NULL", "limit": "51"}, {"unmatched_callbacks_pkey"}, 51, 70,
    ),
    "open callbacks": (store.LIST_OPEN_CALLBACKS, {"before": "NULL", "limit": "51"}, {"unmatched_open"}, 51, 70),
    "dismissal": (
        store.DISMISS_CALLBACK, {"id": KEPT, "actor": "'agent'", "handled": "'NOT_OURS'"},
        {"unmatched_callbacks_pkey", "unmatched_open"}, 1, 60,
    ),
    "old callbacks": (
        store.FORGET_CALLBACKS, {"days": "30", "limit": "100"}, {"unmatched_age", "unmatched_callbacks_pkey"}, 100,
        2_000,
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
                connection.execute(statement.encode())
            connection.execute("VACUUM ANALYZE")
            connection.execute("UPDATE duly.business_clock SET frozen_at = '2034-06-01'")
        yield made


def test_every_statement_is_looked_at() -> None:
    """Whoever adds one adds it here."""
    known = {id(statement) for statement, *_ in CASES.values()}
    named = {name: one for name, one in vars(store).items() if isinstance(one, TextClause)}
    assert {name for name, one in named.items() if id(one) not in known} == set()


@any_planning
@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_is_found_by_index(dsn: str, generic: bool, name: str) -> None:
    """F8: whatever the number of sessions, the cost is that of what is asked."""
    statement, values, indexes, expected, most = CASES[name]
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, statement, generic, **values)
        if expected or "SELECT" in statement.text:
            assert len(fetch(connection, call)) == expected
        plan = explain(connection, call)
        assert plan.tables_read_whole() <= {"business_clock"}, plan.text
        assert plan.indexes <= indexes, plan.text
        assert plan.buffers <= most, f"{plan.buffers} buffers\n{plan.text}"
