"""Cases among 400,000: the queue by any filters, a case, its timeline, timers, upkeep and screening, by index.

1,200 are open, 200 proposed, and whatever is rare is old: 60 of those that are open are about held payments, 60 are
critical, 60 are Olga's, so that who goes along the wrong index reads thousands first. 120,000 accounts, 100,000
transactions, 100,000 payments. A plan is looked at in both ways PostgreSQL may plan a prepared statement, for these
values and for any values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import TextClause

from apps.finance.compliance import sql
from apps.finance.compliance.model import Kind, Severity, Status
from apps.finance.compliance.store import Filters, choose_list
from apps.finance.ledger import store as ledger
from apps.finance.ledger import store_flows
from apps.finance.payments import store as payments
from apps.wiring import app
from duly.testing import TestServer
from tests.plans.test_transfers_plans import any_planning, explain, fetch, prepare

FILL = """
CREATE TEMP TABLE made AS
SELECT n, ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid AS id,
       ('01900000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid AS alert_id,
       CASE WHEN o.place BETWEEN 1 AND 60 OR (s.status <> 'OPEN' AND n % 2 = 1) THEN 'PAYMENT_REVIEW' ELSE 'AML' END
           AS kind,
       CASE WHEN o.place BETWEEN 61 AND 120 THEN 'CRITICAL' WHEN o.place > 0 THEN 'LOW'
            ELSE (ARRAY['LOW', 'LOW', 'MEDIUM', 'MEDIUM', 'HIGH', 'CRITICAL'])[1 + n / 2 % 6] END AS severity,
       CASE WHEN s.status = 'RESOLVED' AND n % 2 = 1 AND n % 20 = 1 THEN 'EXPIRED' ELSE s.status END AS status,
       CASE WHEN o.place BETWEEN 121 AND 180 THEN 'olga' WHEN o.place > 0 THEN NULL
            WHEN n % 20 = 7 THEN 'olga' ELSE 'officer-' || n % 20 END AS assignee,
       timestamptz '2026-01-01' + n * interval '10 minutes' AS at, o.place
FROM generate_series(1, 400000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n % 333 = 0 AND n <= 399600 THEN n / 333 ELSE 0 END) AS o(place)
CROSS JOIN LATERAL (SELECT CASE WHEN o.place > 0 THEN 'OPEN' WHEN n % 2000 = 1999 THEN 'PROPOSED' ELSE 'RESOLVED' END)
    AS s(status);
INSERT INTO compliance.alerts (id, source, payment_id, transaction_id, rule_set_id, rule_set_version, outcome, severity,
                               facts, matched, incomplete, trace, raised_at)
SELECT alert_id, kind, CASE kind WHEN 'PAYMENT_REVIEW' THEN id END, CASE kind WHEN 'AML' THEN id END, 'r', 1, 'REVIEW',
       severity, '{"amount": "60.00"}', '[]', '[]', '[]', at
FROM made;
INSERT INTO compliance.cases (id, kind, status, severity, alert_id, payment_id, transaction_id, amount, currency,
    initiated_by, needs_two, assignee, due_at, overdue_at, proposed_decision, proposed_code, proposed_reason,
    proposed_by, proposed_at, decision, reason_code, reason, effect, resolved_by, ended_at, version, created_at,
    updated_at)
SELECT id, kind, status, severity, alert_id, CASE kind WHEN 'PAYMENT_REVIEW' THEN id END,
       CASE kind WHEN 'AML' THEN id END, 6000, 'PLN', 'teller', status = 'PROPOSED', assignee, at + interval '1 day',
       CASE WHEN place % 4 = 1 THEN at + interval '1 day' END,
       CASE status WHEN 'PROPOSED' THEN 'REJECT' END, CASE status WHEN 'PROPOSED' THEN 'FRAUD' END,
       CASE status WHEN 'PROPOSED' THEN 'x' END, CASE status WHEN 'PROPOSED' THEN 'otto' END,
       CASE status WHEN 'PROPOSED' THEN at END,
       CASE status WHEN 'RESOLVED' THEN 'APPROVE' END, CASE status WHEN 'RESOLVED' THEN 'OTHER' END,
       CASE status WHEN 'RESOLVED' THEN 'x' END, CASE status WHEN 'RESOLVED' THEN 'MONEY_STAYS' END,
       CASE status WHEN 'RESOLVED' THEN 'otto' END,
       CASE WHEN status IN ('RESOLVED', 'EXPIRED') THEN at + interval '1 hour' END,
       CASE WHEN status IN ('RESOLVED', 'EXPIRED') THEN 2 ELSE 1 END, at, at + interval '1 hour'
FROM made ORDER BY n;
INSERT INTO compliance.cases (id, kind, status, severity, alert_id, payment_id, transaction_id, amount, currency,
    needs_two, due_at, decision, reason_code, reason, effect, resolved_by, ended_at, reopens_id, reopened_by,
    created_at, updated_at)
SELECT ('01900000-0000-7000-a000-' || lpad(to_hex(n), 12, '0'))::uuid, kind, 'RESOLVED', severity, alert_id,
       CASE kind WHEN 'PAYMENT_REVIEW' THEN id END, CASE kind WHEN 'AML' THEN id END, 6000, 'PLN', false, at, 'APPROVE',
       'OTHER', 'x', 'MONEY_STAYS', 'otto', timestamptz '2034-01-01', id, 'otto', at, at
FROM made WHERE n % 8 = 1 AND status IN ('RESOLVED', 'EXPIRED');
INSERT INTO compliance.case_events (case_id, number, at, actor, kind, detail)
SELECT id, 1, at, 'system', 'OPENED', '{}' FROM made;
INSERT INTO compliance.case_events (case_id, number, at, actor, kind, detail)
SELECT id, 2, at, 'otto', status, '{}' FROM made WHERE status IN ('RESOLVED', 'EXPIRED');
INSERT INTO compliance.case_events (case_id, number, at, actor, kind, detail)
SELECT m.id, l, at, 'otto', 'COMMENTED', '{"text": "x"}' FROM made m CROSS JOIN generate_series(3, 900) AS l
WHERE m.n BETWEEN 201001 AND 201100;
INSERT INTO duly.alerts (kind, subject, message, raised_at, last_at, resolved_at)
SELECT 'application', 'compliance.overdue:' || id, 'late', at, at, CASE WHEN status <> 'OPEN' THEN at END
FROM made WHERE n % 9 = 0;
INSERT INTO ledger.accounts (id, name, type, currency, digits, side, may_go_negative, created_at)
SELECT lpad(to_hex(n), 32, '0')::uuid, 'a' || n, 'LIABILITY', 'PLN', 2, -1, true, timestamptz '2033-01-01'
FROM generate_series(1, 120000) AS n;
INSERT INTO ledger.transactions (id, reference, currency, amount, posted_at, xid)
SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'r' || n, 'PLN', 1,
       timestamptz '2033-01-01' + n * interval '20 seconds', (1000 + n)::text::xid8
FROM generate_series(1, 100000) AS n;
INSERT INTO ledger.entries (account_id, version, transaction_id, line, amount, balance_after, posted_at)
SELECT lpad(to_hex(1 + n % 10000), 32, '0')::uuid, (n - 1) / 10000 + 1, t.id, 1, 1, 1, t.posted_at
FROM (SELECT *, row_number() OVER (ORDER BY id) AS n FROM ledger.transactions) AS t;
INSERT INTO ledger.entries (account_id, version, transaction_id, line, amount, balance_after, posted_at)
SELECT lpad(to_hex(10001 + n % 10000), 32, '0')::uuid, (n - 1) / 10000 + 1, t.id, 2, -1, -1, t.posted_at
FROM (SELECT *, row_number() OVER (ORDER BY id) AS n FROM ledger.transactions) AS t;
INSERT INTO payments.payments (id, from_account_id, to_account_id, amount, currency, state, initiated_by, provider,
    bank_key, transaction_id, review_hold_id, since, created_at, updated_at)
SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, gen_random_uuid(), gen_random_uuid(), 1, 'PLN',
       s.state, 'teller', 'bank', gen_random_uuid(),
       CASE s.state WHEN 'COMPLETED' THEN ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid END,
       gen_random_uuid(), timestamptz '2033-01-01', timestamptz '2033-01-01', timestamptz '2033-01-01'
FROM generate_series(1, 100000) AS n
CROSS JOIN LATERAL (SELECT CASE WHEN n % 100 = 0 THEN 'PENDING_REVIEW' ELSE 'COMPLETED' END) AS s(state)
"""
ENDED, OPEN, TALKED_ABOUT = (f"'01900000-0000-7000-8000-{number:012x}'" for number in (5_000, 666, 201_007))
LAST = f"01900000-0000-7000-8000-{400_000:012x}"


def spell(value: Any) -> str:
    """A value as SQL has it."""
    if isinstance(value, list):
        return f"ARRAY[{', '.join(map(spell, value))}]"
    return "NULL" if value is None else f"'{value}'"


def numbered(count: int) -> str:
    """The first so many ids of whatever has such ids."""
    return f"{spell([f'01900000-0000-7000-8000-{number:012x}' for number in range(1, count + 1)])}::uuid[]"


SEVERAL = f"ARRAY[{ENDED}, {OPEN}, {TALKED_ABOUT}]::uuid[]"
ASKED = {  # 400 accounts at their last entry, as a batch of 200 transactions asks about
    "accounts": f"{spell([f'{number:032x}' for number in range(101, 501)])}::uuid[]",
    "versions": f"{spell([10] * 400)}::bigint[]",
    "moments": f"{spell(['2033-01-24'] * 400)}::timestamptz[]",
}
LIMITS = {most: f"{spell([most] * 400)}::bigint[]" for most in (5, 20_000)}
TERMS = {"accounts_pkey", "accounts_terms_are_kept"}
STRETCHES = {  # of the same
    "accounts": ASKED["accounts"], "sides": f"{spell([-1] * 400)}::integer[]", "versions": ASKED["versions"],
    "afters": f"{spell([0] * 400)}::bigint[]", "lasts": f"{spell([10] * 400)}::bigint[]",
    "stretches": f"{spell(list(range(1, 401)))}::bigint[]", "places": f"{spell(list(range(400)))}::integer[]",
}  # fmt: skip
PKEY = {"cases_pkey"}


def opening(number: int) -> dict[str, str]:
    """The values of OPEN_CASES: so many new ones about transactions that nobody has looked at."""
    each: dict[str, tuple[str, Any]] = {
        "payment_ids": ("uuid", None), "decision_ids": ("uuid", None), "rule_set_versions": ("integer", 1),
        "outcomes": ("text", "REVIEW"), "severitys": ("text", "LOW"), "factss": ("text", "{}"),
        "matcheds": ("text", "[]"), "incompletes": ("text", "[]"), "traces": ("text", "[]"),
        "amounts": ("bigint", 6000), "currencys": ("text", "PLN"), "initiators": ("text", "teller"),
        "needs_twos": ("boolean", "false"), "hourss": ("integer", 4), "latests": ("timestamptz", None),
    }  # fmt: skip
    ids = ("alert_ids", "case_ids", "transaction_ids")
    return {
        "kind": "'AML'", "rule_set_id": "'aml-screening'",
        **{name: f"{spell([str(uuid4()) for _ in range(number)])}::uuid[]" for name in ids},
        **{name: f"{spell([value] * number)}::{kind}[]" for name, (kind, value) in each.items()},
    }  # fmt: skip


SAVING = {
    "id": OPEN, "version": "1", "status": "'OPEN'", "needs_two": "false", "assignee": "'otto'", "actor": "'otto'",
    "kind": "'CLAIMED'", "detail": "'{}'",
    **dict.fromkeys(
        ("overdue_at", "proposed_decision", "proposed_code", "proposed_reason", "proposed_by", "proposed_at",
         "decision", "reason_code", "reason", "effect", "resolved_by", "confirmed_by", "ended_at"), "NULL",
    ),
}  # fmt: skip
# What is asked, with which values, along which indexes, how many rows come of it, and how many pages are read at most.
CASES: dict[str, tuple[TextClause, dict[str, str], set[str], int, int]] = {
    "a case": (sql.FIND_CASE, {"id": ENDED}, PKEY, 1, 10),
    "locking a case": (sql.LOCK_CASE, {"id": OPEN}, PKEY, 1, 20),
    "the case of a review that ends": (
        sql.LOCK_OPEN_OF_PAYMENT, {"id": OPEN}, {"cases_of_a_payment", "cases_open"}, 1, 20,
    ),
    "what reopened it": (sql.FIND_SUCCESSORS, {"ids": SEVERAL}, {"cases_are_reopened_once"}, 0, 20),
    "its alert": (sql.FIND_ALERTS, {"ids": SEVERAL.replace("-8000-", "-9000-")}, {"alerts_pkey"}, 3, 20),
    "which of a page of held payments have a case": (
        sql.FIND_CASED, {"payment_ids": numbered(500)}, {"alerts_of_a_payment"}, 250, 3_000,
    ),
    "the end of a long timeline": (
        sql.READ_TIMELINE, {"id": TALKED_ABOUT, "before": "2147483647", "limit": "100"}, {"case_events_pkey"}, 100, 120,
    ),
    "the middle of a long timeline": (
        sql.READ_TIMELINE, {"id": TALKED_ABOUT, "before": "500", "limit": "50"}, {"case_events_pkey"}, 50, 70,
    ),
    "whole timelines": (sql.READ_TIMELINES, {"ids": SEVERAL, "limit": "10000"}, {"case_events_pkey"}, 903, 1_000),
    "cases about a payment": (
        sql.FIND_CASES_ABOUT, {"payment_id": OPEN, "transaction_ids": SEVERAL, "limit": "100"},
        {"cases_pkey", "cases_of_a_payment", "cases_of_a_transaction"}, 2, 60,
    ),
    "those that wait": (sql.READ_WAITING, {"after": OPEN, "limit": "500"}, {"cases_open"}, 500, 700),
    "how many are open or proposed": (
        sql.COUNT_BY_STATUS, {"statuses": "ARRAY['OPEN', 'PROPOSED']", "hidden_from": "'cora'", "cap": "1001"},
        {"cases_by_status"}, 2, 1_300,
    ),
    "how many are late": (sql.COUNT_OVERDUE, {"hidden_from": "'cora'", "cap": "1001"}, {"cases_overdue"}, 1, 400),
    "the engine's alert of a case": (
        sql.LOCK_ALERTS, {"subject": "'compliance.overdue:01900000-0000-7000-8000-0000000003e7'"}, {"alerts_open"}, 1,
        20,
    ),
    "a change": (sql.SAVE_CASE, SAVING, PKEY, 1, 200),
    "reopening": (
        sql.REOPEN_CASE,
        {"id": "gen_random_uuid()", "needs_two": "false", "hours": "4", "actor": "'otto'", "reopens_id": ENDED,
         "detail": "'{}'"},
        PKEY | {"cases_are_reopened_once"}, 1, 200,
    ),
    "opening one": (sql.OPEN_CASES, opening(1), set(), 1, 300),
    "opening a batch": (sql.OPEN_CASES, opening(200), set(), 200, 30_000),
    "old ones": (
        sql.LOCK_OLD, {"days": "1", "limit": "200"}, {"cases_ended", "cases_are_reopened_once", "cases_pkey"}, 200,
        2_500,
    ),
    "transactions that payments have posted": (
        payments.FIND_POSTED, {"ids": numbered(200)}, {"payments_transaction_is_its_own"}, 198, 1_200,
    ),
    "held payments without a case": (
        payments.LOCK_HELD, {"ids": numbered(500)}, {"payments_pkey", "payments_open", "payments_state"}, 5, 2_500,
    ),
    "of what kind accounts are": (ledger.FIND_TYPES, {"ids": ASKED["accounts"]}, TERMS, 400, 1_600),
    "who posted": (ledger.FIND_POSTERS, {"ids": numbered(200)}, {"transactions_pkey"}, 0, 1_000),
    "where windows begin": (store_flows.LOCATE_FLOWS, ASKED | {"mosts": LIMITS[20_000]}, TERMS, 400, 30_000),
    "where windows of busy ones begin": (store_flows.LOCATE_FLOWS, ASKED | {"mosts": LIMITS[5]}, TERMS, 400, 30_000),
    "what moved before": (
        store_flows.READ_FLOWS, STRETCHES,
        {"accounts_pkey", "accounts_terms_are_kept", "entries_pkey", "transactions_pkey"}, 400, 30_000,
    ),
    "whom it went to": (
        store_flows.COUNT_RECEIVERS, {**ASKED, "most": "500"},
        {"accounts_pkey", "accounts_terms_are_kept", "entries_pkey", "entries_line_is_one", "transactions_pkey"}, 400,
        80_000,
    ),
}  # fmt: skip
# Which cases of the queue, how many there are on a page of 51, and how many pages of the table are read at most.
PAGES: dict[str, tuple[Filters, int, int]] = {
    "all": (Filters(), 51, 90),
    "open": (Filters(Status.OPEN), 51, 90),
    "expired": (Filters(Status.EXPIRED), 51, 90),
    "of a kind": (Filters(kind=Kind.AML), 51, 90),
    "critical": (Filters(severity=Severity.CRITICAL), 51, 90),
    "of an officer": (Filters(assignee="olga"), 51, 90),
    "of nobody": (Filters(assignee="nobody"), 0, 20),
    "open ones of a kind": (Filters(Status.OPEN, Kind.PAYMENT_REVIEW), 51, 120),
    "open critical ones": (Filters(Status.OPEN, severity=Severity.CRITICAL), 51, 120),
    "resolved ones of a kind": (Filters(Status.RESOLVED, Kind.AML), 51, 350),
    "critical ones of a kind": (Filters(kind=Kind.AML, severity=Severity.CRITICAL), 51, 350),
    "open critical ones of a kind": (Filters(Status.OPEN, Kind.PAYMENT_REVIEW, Severity.CRITICAL), 0, 20),
    "expired ones of a kind that never expires": (Filters(Status.EXPIRED, Kind.AML), 0, 40),
    "an officer's open ones": (Filters(Status.OPEN, assignee="olga"), 51, 150),
    "an officer's ones of a kind": (Filters(kind=Kind.PAYMENT_REVIEW, assignee="olga"), 51, 600),
    "an officer's open critical ones of a kind": (
        Filters(Status.OPEN, Kind.AML, Severity.CRITICAL, "olga"), 0, 20,
    ),
    "overdue": (Filters(is_overdue=True), 51, 90),
    "overdue ones of a kind": (Filters(kind=Kind.PAYMENT_REVIEW, is_overdue=True), 15, 700),
}  # fmt: skip
LISTS = {
    "cases_pkey", "cases_by_status", "cases_by_kind", "cases_by_severity", "cases_by_assignee", "cases_by_label",
    "cases_by_assignee_and_label", "cases_overdue",
}  # fmt: skip
NOT_ASKED = {"ALLOW_FORGETTING"}  # reads no table
FORGOTTEN = {"FORGET_LINES", "FORGET_CASES", "FORGET_ALERTS"}  # looked at one after the other, below
LISTED = {"LIST_CASES", "LIST_OVERDUE", "LIST_BY_LABEL", "LIST_OF_ASSIGNEE_BY_LABEL"}


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
    named = {name: one for name, one in vars(sql).items() if isinstance(one, TextClause)}
    missing = {name for name, one in named.items() if id(one) not in known}
    assert missing == NOT_ASKED | FORGOTTEN | LISTED
    listed = {id(choose_list(filters)[0]) for filters, *_ in PAGES.values()}
    assert listed == {id(one) for one in (*sql.LIST_BY_ONE.values(), *(named[name] for name in LISTED))}


@any_planning
@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_is_found_by_index(dsn: str, generic: bool, name: str) -> None:
    """F9, F10: whatever the number of cases, the cost is that of what is asked."""
    statement, values, indexes, expected, most = CASES[name]
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, statement, generic, **values)
        found, plan = fetch(connection, call), explain(connection, call)
        assert len(found) == expected, found
        assert plan.tables_read_whole() <= {"business_clock"}, plan.text
        assert plan.indexes <= indexes, plan.text
        assert plan.buffers <= most, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
@pytest.mark.parametrize("before", [None, LAST], ids=["first_page", "next_page"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_queue_costs_a_page_whatever_is_asked_for(
    dsn: str, generic: bool, name: str, before: str | None
) -> None:
    """F10: also of what few cases are, behind many that are otherwise."""
    filters, expected, most = PAGES[name]
    statement, values = choose_list(filters)
    values |= {"before": before, "limit": 51}
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = prepare(connection, statement, generic, **{key: spell(value) for key, value in values.items()})
        found, plan = fetch(connection, call), explain(connection, call)
        assert len(found) == expected, len(found)
        assert plan.tables_read_whole() == set(), plan.text
        assert plan.indexes <= LISTS, plan.text
        assert plan.buffers <= most, f"{plan.buffers} buffers\n{plan.text}"


@any_planning
def test_the_clean_up_reads_what_it_takes(dsn: str, generic: bool) -> None:
    """200 cases with their lines and alerts; who has a successor stays."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        old = fetch(connection, prepare(connection, sql.LOCK_OLD, generic, days="1", limit="200"))
        ids = [str(one) for (one,) in old]
        alert_ids = [one.replace("-8000-", "-9000-") for one in ids]
        taken = [(sql.FORGET_LINES, ids, 4_000), (sql.FORGET_CASES, ids, 8_000), (sql.FORGET_ALERTS, alert_ids, 4_000)]
        with connection.transaction(force_rollback=True):
            connection.execute(sql.ALLOW_FORGETTING.text.encode())
            for statement, gone, most in taken:
                call = prepare(connection, statement, generic, ids=f"{spell(gone)}::uuid[]")
                plan = explain(connection, call)
                assert plan.tables_read_whole() == set(), plan.text
                assert plan.buffers <= most, f"{plan.buffers} buffers\n{plan.text}"
                connection.execute(call.encode())
