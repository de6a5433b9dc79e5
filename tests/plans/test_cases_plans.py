"""Cases among 300,000, and what moved on accounts among a million entries: by index, at the cost of what is shown.

A plan is looked at in both ways PostgreSQL may plan a prepared statement, for these values and for any values.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import TextClause

from apps.finance.compliance import sql
from apps.finance.ledger import store_flows
from apps.finance.payments import store as payments
from apps.wiring import app
from duly.testing import TestServer
from tests.plans.test_transfers_plans import any_planning, explain, fetch, prepare

FILL = """
INSERT INTO compliance.alerts (id, source, payment_id, transaction_id, rule_set_id, outcome, severity, facts, matched,
    incomplete, trace, raised_at)
SELECT ('01900000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid, k.kind, p.id, p.id, 'aml-screening', 'REVIEW',
       'MEDIUM', '{}', '[]', '[]', '[]', timestamptz '2033-01-01'
FROM generate_series(1, 300000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n %% 1000 = 0 THEN 'PAYMENT_REVIEW' ELSE 'AML' END) AS k(kind)
CROSS JOIN LATERAL (SELECT ('01900000-0000-7000-a000-' || lpad(to_hex(n), 12, '0'))::uuid) AS p(id);
INSERT INTO compliance.cases (id, kind, status, severity, alert_id, payment_id, transaction_id, amount, currency,
    needs_two, assignee, due_at, overdue_at, decision, reason_code, reason, effect, resolved_by, ended_at, created_at,
    updated_at)
SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, a.source, s.status,
       CASE WHEN n %% 5000 = 3 THEN 'CRITICAL' ELSE 'MEDIUM' END, a.id, a.payment_id, a.transaction_id, 1, 'PLN', false,
       CASE WHEN n %% 10000 = 7 THEN 'rare' WHEN n %% 3 = 0 THEN 'busy' END, t.at,
       CASE WHEN n %% 500 = 0 THEN t.at END,
       CASE s.status WHEN 'RESOLVED' THEN 'REJECT' END, CASE s.status WHEN 'RESOLVED' THEN 'FRAUD' END,
       CASE s.status WHEN 'RESOLVED' THEN 'x' END, CASE s.status WHEN 'RESOLVED' THEN 'REVERSED' END,
       CASE s.status WHEN 'RESOLVED' THEN 'o' END, CASE s.status WHEN 'RESOLVED' THEN t.at + interval '1 day' END, t.at,
       t.at
FROM generate_series(1, 300000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n %% 250 = 0 THEN 'OPEN' ELSE 'RESOLVED' END) AS s(status)
CROSS JOIN LATERAL (SELECT timestamptz '2033-01-01' + n * interval '1 second') AS t(at)
JOIN compliance.alerts a ON a.id = ('01900000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid;
INSERT INTO compliance.case_events SELECT id, l, created_at, 'o', CASE l WHEN 1 THEN 'OPENED' ELSE 'COMMENTED' END, '{}'
FROM compliance.cases CROSS JOIN generate_series(1, 2) AS l;
INSERT INTO ledger.accounts (id, name, type, currency, digits, side, may_go_negative, created_at)
SELECT ('01900000-0000-7000-c000-' || lpad(to_hex(n), 12, '0'))::uuid, 'a', 'LIABILITY', 'PLN', 2, -1, true,
       timestamptz '2033-01-01'
FROM generate_series(1, 1000) AS n;
INSERT INTO ledger.entries (account_id, version, transaction_id, line, amount, balance_after, posted_at)
SELECT ('01900000-0000-7000-c000-' || lpad(to_hex(1 + n %% 1000), 12, '0'))::uuid, 1 + n / 1000,
       ('01900000-0000-7000-b000-' || lpad(to_hex(n / 2), 12, '0'))::uuid, 1 + n %% 2,
       CASE n %% 2 WHEN 0 THEN 1 ELSE -1 END, 0, timestamptz '2033-01-01' + n / 1000 * interval '1 hour'
FROM generate_series(0, 999999) AS n;
INSERT INTO ledger.balances (account_id, currency, digits, side, may_go_negative, version, posted_at)
SELECT id, 'PLN', 2, -1, true, 1000, timestamptz '2033-03-01' FROM ledger.accounts;
INSERT INTO ledger.transactions (id, reference, currency, amount, posted_at)
SELECT ('01900000-0000-7000-b000-' || lpad(to_hex(n), 12, '0'))::uuid, 't' || n, 'PLN', 1, timestamptz '2033-01-01'
FROM generate_series(0, 499999) AS n
"""
ONE = "'01900000-0000-7000-8000-000000001388'"
ONES = "'{01900000-0000-7000-8000-000000001388}'"
ABOUT = "'01900000-0000-7000-a000-000000001388'"
ABOUTS = "'{01900000-0000-7000-a000-000000001388}'"
ALERTS = "'{01900000-0000-7000-9000-000000001388}'"
ACCOUNTS = "'{01900000-0000-7000-c000-000000000005,01900000-0000-7000-c000-000000000006}'"
VERSIONS, MOMENTS = "'{800,700}'", "'{2033-02-03 07:00+00,2033-01-30 03:00+00}'"
FILTERS = ("status", "kind", "severity", "assignee", "hidden_from", "before")
QUEUE = dict.fromkeys(FILTERS, "NULL") | {"limit": "50"}


def queue(*columns: str, **given: str) -> tuple[TextClause, dict[str, str]]:
    statement = sql.LIST_ALONG[columns] if columns else sql.LIST_CASES
    return statement, QUEUE | {name: f"'{value}'" for name, value in given.items()}


CASES: dict[str, tuple[TextClause, dict[str, str], set[str], int, int]] = {
    "queue": (*queue(), {"cases_pkey"}, 50, 80),
    "queue behind some page": (*queue(before=ONE.strip("'")), {"cases_pkey"}, 50, 80),
    "open ones": (*queue("status", status="OPEN"), {"cases_by_status"}, 50, 120),
    "of a status that nobody has": (*queue("status", status="EXPIRED"), {"cases_by_status"}, 0, 10),
    "of a rare kind": (*queue("kind", kind="PAYMENT_REVIEW"), {"cases_by_kind"}, 50, 120),
    "of the usual kind": (*queue("kind", kind="AML"), {"cases_by_kind"}, 50, 120),
    "open ones of a kind": (
        *queue("kind", "status", kind="AML", status="OPEN"), {"cases_by_kind_and_status"}, 50, 120,
    ),
    "ended ones of a kind that has none": (
        *queue("kind", "status", kind="PAYMENT_REVIEW", status="RESOLVED"), {"cases_by_kind_and_status"}, 0, 10,
    ),
    "critical ones": (*queue("severity", severity="CRITICAL"), {"cases_by_severity"}, 50, 120),
    "open critical ones": (
        *queue("severity", "status", severity="CRITICAL", status="OPEN"), {"cases_by_severity_and_status"}, 0, 10,
    ),
    "of somebody who has few": (*queue("assignee", assignee="rare"), {"cases_by_assignee"}, 30, 80),
    "of somebody who has many, the open ones": (
        *queue("assignee", "status", assignee="busy", status="OPEN"), {"cases_by_assignee_and_status"}, 50, 120,
    ),
    "of nobody": (*queue("assignee", assignee="nobody"), {"cases_by_assignee"}, 0, 10),
    "late ones": (sql.LIST_OVERDUE, QUEUE, {"cases_overdue"}, 50, 120),
    "one": (sql.LOCK_CASE, {"id": ONE}, {"cases_pkey"}, 1, 20),
    "that of a payment": (sql.LOCK_OPEN_OF_PAYMENT, {"id": ABOUT}, {"cases_of_a_payment"}, 0, 20),
    "its timeline": (
        sql.READ_TIMELINE, {"id": ONE, "before": "2147483647", "limit": "200"}, {"case_events_pkey"}, 2, 20,
    ),
    "timelines": (sql.READ_TIMELINES, {"ids": ONES, "limit": "100"}, {"case_events_pkey"}, 2, 20),
    "its alert": (sql.FIND_ALERTS, {"ids": ALERTS}, {"alerts_pkey"}, 1, 20),
    "what follows it": (sql.FIND_SUCCESSORS, {"ids": ONES}, {"cases_are_reopened_once"}, 0, 20),
    "who has a case": (sql.FIND_CASED, {"payment_ids": ABOUTS}, {"alerts_of_a_payment"}, 0, 20),
    "about a payment": (
        sql.FIND_CASES_ABOUT, {"payment_id": ABOUT, "transaction_ids": ABOUTS, "limit": "100"},
        {"cases_of_a_payment", "cases_of_a_transaction", "cases_pkey"}, 1, 40,
    ),
    "recovery": (sql.READ_WAITING, {"after": ONE, "limit": "500"}, {"cases_open"}, 500, 1_200),
    "old ones": (
        sql.LOCK_OLD, {"days": "1", "limit": "200"}, {"cases_ended", "cases_are_reopened_once"}, 200, 2_000,
    ),
    "held payments": (payments.LOCK_HELD, {"ids": ABOUTS}, {"payments_pkey", "payments_state"}, 0, 20),
    "whose postings": (payments.FIND_POSTED, {"ids": ABOUTS}, {"payments_transaction_is_its_own"}, 0, 20),
    "what moved": (
        store_flows.READ_FLOWS,
        {"accounts": ACCOUNTS, "versions": VERSIONS, "moments": MOMENTS, "most": "20000"},
        {"accounts_pkey", "entries_pkey", "transactions_pkey"}, 2, 4_000,
    ),
    "to whom": (
        store_flows.COUNT_RECEIVERS,
        {"accounts": ACCOUNTS, "versions": VERSIONS, "moments": MOMENTS, "most": "500"},
        {"accounts_pkey", "entries_pkey", "transactions_pkey", "entries_line_is_one"}, 2, 8_000,
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
    """F9, F10: whatever the number of cases and entries, the cost is that of the page, or of the window."""
    statement, values, indexes, expected, most = CASES[name]
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, statement, generic, **values)
        found, plan = fetch(connection, call), explain(connection, call)
        assert len(found) == expected, found[:3]
        assert plan.tables_read_whole() == set(), plan.text
        assert plan.indexes <= indexes, plan.text
        assert plan.buffers <= most, f"{plan.buffers} buffers\n{plan.text}"
