"""What the tables refuse, written as attacks in plain SQL: no code can forget it."""

from __future__ import annotations

import re
from uuid import uuid4

import psycopg
import pytest

from apps.finance.compliance.model import Effect, LineKind, Severity, Status
from apps.finance.compliance.tables import case_events, cases
from tests.apps.finance.compliance.acting import APPROVE, REJECT, Office
from tests.apps.finance.ledger.test_attacks import ROLES_FILE
from tests.support import rows

CHANGE = "UPDATE compliance.cases SET version = version + 1, "
DECIDED = (
    "status = 'RESOLVED', ended_at = duly.now(), decision = 'REJECT', reason_code = 'FRAUD', reason = 'x', effect = "
)
PROPOSED = (
    "status = 'PROPOSED', proposed_decision = 'REJECT', proposed_code = 'FRAUD', proposed_reason = 'x', "
    "proposed_at = duly.now(), needs_two = true, proposed_by = "
)


@pytest.mark.parametrize(
    ("attack", "constraint"),
    [
        (CHANGE + "status = 'CLOSED'", "cases_status_is_known"),
        (CHANGE + "amount = 1", "this never changes"),
        (CHANGE + "payment_id = gen_random_uuid()", "this never changes"),
        (CHANGE + "initiated_by = 'somebody else'", "this never changes"),
        (CHANGE + "due_at = due_at + interval '1 day'", "this never changes"),
        (CHANGE + "kind = 'AML'", "this never changes"),
        (CHANGE + "reopens_id = gen_random_uuid(), reopened_by = 'x'", "this never changes"),
        ("UPDATE compliance.cases SET assignee = 'x'", "this never changes"),
        (CHANGE + "status = 'RESOLVED', ended_at = duly.now()", "cases_resolution_is_whole"),
        (CHANGE + "status = 'PROPOSED', needs_two = true", "cases_proposal_is_whole"),
        (CHANGE + "ended_at = duly.now()", "cases_end_has_its_time"),
        (CHANGE + DECIDED + "'GONE', resolved_by = 'olga'", "cases_effect_is_known"),
        (CHANGE + DECIDED + "'REVERSED', resolved_by = 'teller'", "cases_are_not_ones_own"),
        (CHANGE + DECIDED + "'REVERSED', resolved_by = 'olga', needs_two = true", "cases_large_are_confirmed"),
        (CHANGE + DECIDED + "'REVERSED', resolved_by = 'olga', confirmed_by = 'otto'", "cases_large_are_confirmed"),
        (CHANGE + DECIDED + "'REVERSED', resolved_by = 'olga', confirmed_by = 'olga', needs_two = true",
         "cases_confirmed_by_another"),
        (CHANGE + DECIDED + "'REVERSED', resolved_by = 'olga', confirmed_by = 'teller', needs_two = true",
         "cases_are_not_ones_own"),
        (CHANGE + PROPOSED + "'teller'", "cases_are_not_ones_own"),
        (CHANGE + PROPOSED + "'olga', confirmed_by = 'otto'", "cases_confirmed_are_resolved"),
        (CHANGE + "confirmed_by = 'otto'", "cases_confirmed_are_resolved"),
        ("DELETE FROM compliance.cases", "refused"),
        ("TRUNCATE compliance.cases CASCADE", "refused"),
        ("SELECT set_config('compliance.forgetting', 'on', false); DELETE FROM compliance.cases", "refused"),
        ("UPDATE compliance.case_events SET actor = 'x'", "refused"),
        ("DELETE FROM compliance.case_events", "refused"),
        ("TRUNCATE compliance.case_events", "refused"),
        ("UPDATE compliance.alerts SET outcome = 'REJECT'", "refused"),
        ("DELETE FROM compliance.alerts", "refused"),
        ("TRUNCATE compliance.alerts CASCADE", "refused"),
        ("INSERT INTO compliance.case_events SELECT case_id, 2, at, 'x', 'OPENED', '{}' FROM compliance.case_events",
         "case_events_begin_once"),
        ("INSERT INTO compliance.case_events SELECT case_id, 2, at, 'x', 'LOST', '{}' FROM compliance.case_events",
         "case_events_kind_is_known"),
        ("INSERT INTO compliance.alerts SELECT gen_random_uuid(), source, payment_id, transaction_id, decision_id, "
         "rule_set_id, rule_set_version, outcome, severity, facts, matched, incomplete, trace, raised_at "
         "FROM compliance.alerts", "alerts_of_a_payment"),
    ],
)  # fmt: skip
async def test_what_is_impossible_is_refused(office: Office, attack: str, constraint: str) -> None:
    await office.hold()
    with pytest.raises(psycopg.Error, match=constraint):
        rows(office.dsn, attack)


@pytest.mark.parametrize("body", [APPROVE, REJECT])
async def test_what_has_ended_never_changes(office: Office, body: dict[str, str]) -> None:
    """F10: not by the application's own role, and not by its owner."""
    _, case = await office.hold()
    await office.do(case, "resolve", body)
    for change in ("reason = 'another'", "status = 'OPEN'", "assignee = 'x'", "effect = 'NOTHING_HELD'"):
        with pytest.raises(psycopg.Error, match="has ended, and never changes"):
            rows(office.dsn, CHANGE + change)
    line = f"INSERT INTO compliance.case_events VALUES ('{case}', 9, duly.now(), 'x', 'COMMENTED', '{{}}')"
    with pytest.raises(psycopg.Error, match="nothing is added to its timeline"):
        rows(office.dsn, line)


async def test_what_has_expired_never_changes(office: Office) -> None:
    """F10: a case that ended with its review is as final as one that somebody has decided."""
    _, case = await office.hold()
    await office.run(days=7.1)
    assert office.status(case) == "EXPIRED"
    for change in ("status = 'OPEN', ended_at = NULL", "assignee = 'x'", DECIDED + "'REVERSED', resolved_by = 'olga'"):
        with pytest.raises(psycopg.Error, match="has ended, and never changes"):
            rows(office.dsn, CHANGE + change)
    line = f"INSERT INTO compliance.case_events VALUES ('{case}', 9, duly.now(), 'x', 'COMMENTED', '{{}}')"
    with pytest.raises(psycopg.Error, match="nothing is added to its timeline"):
        rows(office.dsn, line)


async def test_who_reopened_a_case_does_not_confirm_it(office: Office) -> None:
    """F10, four eyes: whoever writes."""
    _, case = await office.hold()
    await office.do(case, "resolve", REJECT)
    await office.do(case, "reopen", {"reason": "x"}, who="ida", expect=201)
    decided = DECIDED + "'NOTHING_HELD', needs_two = true, resolved_by = 'olga', confirmed_by = "
    with pytest.raises(psycopg.Error, match="cases_confirmed_by_another"):
        rows(office.dsn, CHANGE + decided + "'ida' WHERE reopens_id IS NOT NULL")
    rows(office.dsn, CHANGE + decided + "'otto' WHERE reopens_id IS NOT NULL")


async def test_that_two_must_decide_is_not_taken_back(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPLIANCE_FOUR_EYES", "*=1")
    await office.hold()
    with pytest.raises(psycopg.Error, match="this never changes"):
        rows(office.dsn, CHANGE + "needs_two = false")


async def test_a_case_is_followed_by_one_and_open_once(office: Office) -> None:
    _, case = await office.hold()
    copied = "kind, status, severity, alert_id, payment_id, amount, currency, needs_two, due_at, created_at, updated_at"
    query = f"INSERT INTO compliance.cases (id, {copied}) SELECT gen_random_uuid(), {copied} FROM compliance.cases"
    with pytest.raises(psycopg.Error, match="cases_open_once"):
        rows(office.dsn, query)
    await office.do(case, "resolve", REJECT)
    await office.do(case, "reopen", {"reason": "x"}, expect=201)


async def test_the_applications_role_screens_and_cannot_rewrite_a_timeline(office: Office) -> None:
    """FAULTS: least privilege, as deploy/sql/roles.sql grants it."""
    await office.flag()
    role = f"app_{uuid4().hex[:12]}"
    rows(office.dsn, f"CREATE ROLE {role} NOLOGIN")
    try:
        rows(office.dsn, ROLES_FILE.read_text().replace("duly_app", role))
        for attack in ("UPDATE compliance.case_events SET actor = 'x'", "UPDATE compliance.alerts SET facts = '{}'"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                rows(office.dsn, f"SET ROLE {role}; {attack}")
        measured = "SELECT version FROM ledger.find_entry_at(gen_random_uuid(), duly.now())"
        with psycopg.connect(office.dsn) as connection:
            connection.execute(f"SET ROLE {role}".encode())
            assert connection.execute(measured.encode()).fetchone() == (0,)
            connection.execute("UPDATE compliance.cases SET version = version + 1, assignee = 'olga'")
    finally:
        rows(office.dsn, f"DROP OWNED BY {role}")
        rows(office.dsn, f"DROP ROLE {role}")


@pytest.mark.parametrize(
    ("table", "constraint", "values"),
    [
        (cases, "cases_status_is_known", Status),
        (cases, "cases_severity_is_known", Severity),
        (cases, "cases_effect_is_known", Effect),
        (case_events, "case_events_kind_is_known", LineKind),
    ],
)
def test_the_tables_know_the_models_words(table: object, constraint: str, values: type[Status]) -> None:
    (rule,) = [str(one.sqltext) for one in table.constraints if one.name == constraint]  # type: ignore[attr-defined]  # a Table
    assert set(re.findall(r"'([A-Z_]+)'", rule)) == {one.value for one in values}
