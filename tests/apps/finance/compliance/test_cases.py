"""Cases of held payments, and working on them: queue, claims, comments, evidence, due dates (F5, F10)."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from apps.finance.compliance.model import MOST_LINES
from duly.db import Database
from tests.apps.finance.compliance.acting import APPROVE, REJECT, Office, add_rule
from tests.apps.transfers.acting import new_key
from tests.support import rows, value


async def test_a_payment_under_review_has_its_case_from_the_first_moment(office: Office) -> None:
    """F5: the same commit; with the alert, the trace, the timer and the fact."""
    payment, case = await office.hold("60.00")
    found = await office.read(case)
    assert (found["kind"], found["status"], found["severity"]) == ("PAYMENT_REVIEW", "OPEN", "MEDIUM")
    assert (found["amount"], found["currency"], found["paymentId"]) == ("60.00", "PLN", payment)
    assert [rule["name"] for rule in found["alert"]["matched"]] == ["Large payment"]
    (line,) = found["alert"]["trace"]
    assert line["conditions"] == {"field": "amount", "op": "gte", "value": "50.00", "outcome": "true", "fact": "60.00"}
    assert found["payment"]["state"] == "PENDING_REVIEW"
    assert found["transaction"] is None
    assert [line["kind"] for line in found["timeline"]] == ["OPENED"]
    assert office.facts(case) == ["compliance.case.opened"]
    office.check()


async def test_what_is_approved_or_rejected_by_the_rules_has_no_case(office: Office, db: Database) -> None:
    await add_rule(db, {"field": "amount", "op": "gte", "value": "70.00"}, "REJECT", rule_set="payment-screening")
    assert (await office.payers.pay("10.00"))["state"] == "PROCESSING"
    assert (await office.payers.pay("70.00"))["state"] == "REJECTED"
    assert office.count("compliance.cases") == 0


async def test_a_request_that_is_repeated_with_its_key_opens_one_case(office: Office) -> None:
    key = new_key()
    for _ in range(2):
        await office.payers.pay("60.00", key=key)
    assert office.count("compliance.cases") == 1


async def test_a_case_is_claimed_by_one_and_given_back(office: Office) -> None:
    _, case = await office.hold()
    assert (await office.do(case, "claim"))["assignee"] == "olga"
    again = await office.do(case, "claim")
    assert again["version"] == 2, "who has it keeps it, and nothing is written"
    assert (await office.ask("POST", f"/{case}/claim", who="otto")).json()["type"] == "urn:duly:problem:case-taken"
    assert (await office.ask("POST", f"/{case}/unclaim", who="otto")).status_code == 409
    assert (await office.ask("POST", f"/{case}/resolve", APPROVE, who="otto")).status_code == 409
    assert (await office.do(case, "unclaim"))["assignee"] is None
    assert (await office.ask("POST", f"/{case}/unclaim")).json()["type"] == "urn:duly:problem:not-assigned"
    assert (await office.do(case, "assign", {"assignee": "otto"}))["assignee"] == "otto"
    assert (await office.do(case, "assign", {"assignee": "olga"}, who="ida"))["assignee"] == "olga"
    assert office.lines(case) == ["OPENED", "CLAIMED", "UNCLAIMED", "ASSIGNED", "ASSIGNED"]
    assert office.facts(case).count("compliance.case.assigned") == 4
    office.check()


async def test_comments_and_evidence_are_lines_of_the_timeline(office: Office) -> None:
    _, case = await office.hold()
    await office.do(case, "comments", {"text": "Asked for\nthe invoice."}, expect=201)
    await office.do(case, "evidence", {"reference": "vault:2033/07/a-1"}, who="otto", expect=201)
    lines = (await office.read(case))["timeline"]
    assert [(line["actor"], line["kind"], line["detail"]) for line in lines[1:]] == [
        ("olga", "COMMENTED", {"text": "Asked for\nthe invoice."}),
        ("otto", "EVIDENCE_ADDED", {"reference": "vault:2033/07/a-1"}),
    ]
    assert office.facts(case) == ["compliance.case.opened"], "what people write is told to nobody"
    office.check()


async def test_a_timeline_is_read_in_pages(office: Office) -> None:
    _, case = await office.hold()
    for number in range(5):
        await office.do(case, "comments", {"text": f"no {number}"}, expect=201)
    first = (await office.ask("GET", f"/{case}/timeline?limit=4")).json()
    assert ([line["number"] for line in first["items"]], first["next"]) == ([3, 4, 5, 6], 3)
    second = (await office.ask("GET", f"/{case}/timeline?limit=4&before=3")).json()
    assert ([line["number"] for line in second["items"]], second["next"]) == ([1, 2], None)


async def test_a_case_that_is_talked_to_death_can_still_be_decided(office: Office, dsn: str) -> None:
    """A limit on everything; but a decision is always possible."""
    _, case = await office.hold()
    fill = f"""
        ALTER TABLE compliance.cases DISABLE TRIGGER USER;
        UPDATE compliance.cases SET version = {MOST_LINES};
        ALTER TABLE compliance.cases ENABLE TRIGGER USER;
        INSERT INTO compliance.case_events
        SELECT '{case}', n, duly.now(), 'olga', 'COMMENTED', '{{}}' FROM generate_series(2, {MOST_LINES}) AS n
    """
    for statement in fill.split(";"):
        rows(dsn, statement)
    for what, body in (("comments", {"text": "x"}), ("evidence", {"reference": "x"}), ("claim", None)):
        answer = await office.ask("POST", f"/{case}/{what}", body)
        assert answer.json()["type"] == "urn:duly:problem:timeline-full", answer.text
    await office.do(case, "resolve", REJECT)
    office.check()


@pytest.mark.parametrize(
    ("what", "body", "path"),
    [
        ("resolve", {**REJECT, "decision": "MAYBE"}, "$.decision"),
        ("resolve", {**REJECT, "reasonCode": "BECAUSE"}, "$.reasonCode"),
        ("resolve", {**REJECT, "reason": ""}, "$.reason"),
        ("resolve", {**REJECT, "reason": "x" * 4001}, "$.reason"),
        ("resolve", {**REJECT, "reason": "\u0000"}, "$.reason"),
        ("resolve", {**REJECT, "more": 1}, "$.more"),
        ("resolve", {"decision": "REJECT"}, "$.reasonCode"),
        ("resolve", [], "$"),
        ("assign", {"assignee": ""}, "$.assignee"),
        ("assign", {"assignee": "x" * 256}, "$.assignee"),
        ("assign", {"assignee": " olga"}, "$.assignee"),
        ("assign", {"assignee": None}, "$.assignee"),
        ("comments", {"text": "\u200b"}, "$.text"),
        ("comments", {"text": 1}, "$.text"),
        ("comments", {}, "$.text"),
        ("evidence", {"reference": ""}, "$.reference"),
        ("evidence", {"reference": "x" * 201}, "$.reference"),
        ("refuse", {}, "$.reason"),
        ("reopen", {"reason": " "}, "$.reason"),
    ],
)  # fmt: skip
async def test_bad_input_is_named_and_changes_nothing(office: Office, what: str, body: Any, path: str) -> None:
    _, case = await office.hold()
    answer = await office.ask("POST", f"/{case}/{what}", body)
    assert answer.status_code == 422, answer.text
    assert path in {error["path"] for error in answer.json()["errors"]}
    assert office.lines(case) == ["OPENED"]


@pytest.mark.parametrize("reference", ["a scan of the passport", "name: Jan\nborn: 1990", "żółć", "-x", "<b>"])
async def test_evidence_is_a_name_and_no_content(office: Office, reference: str) -> None:
    _, case = await office.hold()
    answer = await office.ask("POST", f"/{case}/evidence", {"reference": reference})
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:duly:problem:bad-evidence")
    assert reference not in answer.text


@pytest.mark.parametrize("code", ["FRAUD", "SANCTIONS_MATCH"])
async def test_a_reason_is_one_for_the_decision(office: Office, code: str) -> None:
    _, case = await office.hold()
    answer = await office.ask("POST", f"/{case}/resolve", {**APPROVE, "reasonCode": code})
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:duly:problem:wrong-reason-code")
    assert office.status(case) == "OPEN"


@pytest.mark.parametrize("what", ["claim", "unclaim", "confirm"])
async def test_what_is_not_there_is_not_found(office: Office, what: str) -> None:
    assert (await office.ask("POST", f"/{uuid4()}/{what}")).status_code == 404
    assert (await office.ask("POST", f"/no-id/{what}")).status_code == 422


@pytest.mark.parametrize(
    "query", ["status=GONE", "kind=X", "severity=1", "assignee=", "overdue=maybe", "limit=0", "limit=201", "before=x"]
)
async def test_bad_filters_are_refused(office: Office, query: str) -> None:
    assert (await office.ask("GET", f"?{query}")).status_code == 422


async def test_the_queue_is_filtered_and_paged(office: Office, dsn: str) -> None:
    """Newest first, by what officers ask for; every filter, alone and together."""
    held = [(await office.hold("50.00"))[1]]
    await office.do(held[0], "resolve", REJECT)
    held.append((await office.hold("51.00"))[1])
    await office.do(held[1], "claim", who="otto")
    newest = held[::-1]
    assert [case["id"] for case in await office.queue()] == newest
    for query, expected in {
        "status=OPEN": [held[1]], "status=RESOLVED": [held[0]], "status=EXPIRED": [], "kind=PAYMENT_REVIEW": newest,
        "kind=AML": [], "kind=PAYMENT_REVIEW&status=OPEN": [held[1]], "severity=MEDIUM": newest, "severity=HIGH": [],
        "severity=MEDIUM&status=RESOLVED": [held[0]], "assignee=otto": [held[1]], "assignee=olga": [],
        "assignee=otto&status=RESOLVED": [], "assignee=otto&status=OPEN&kind=PAYMENT_REVIEW": [held[1]],
        "overdue=true": [],
    }.items():  # fmt: skip
        assert [case["id"] for case in await office.queue(query)] == expected, query
    page = (await office.ask("GET", "?limit=1")).json()
    assert ([case["id"] for case in page["items"]], page["next"]) == ([held[1]], held[1])
    rest = (await office.ask("GET", f"?limit=1&before={page['next']}")).json()
    assert ([case["id"] for case in rest["items"]], rest["next"]) == ([held[0]], None)
    for query in ("kind=PAYMENT_REVIEW", "severity=MEDIUM", "kind=PAYMENT_REVIEW&severity=MEDIUM"):
        rest = (await office.ask("GET", f"?{query}&before={held[1]}")).json()
        assert [case["id"] for case in rest["items"]] == [held[0]], query


async def test_who_is_too_late_is_told_once(office: Office, dsn: str) -> None:
    """A timer for each case, in the commit that opens it: three days for what is of medium severity."""
    _, case = await office.hold()
    await office.run(hours=71.9)
    assert (office.lines(case), await office.queue("overdue=true")) == (["OPENED"], [])
    await office.run(hours=0.2)
    assert office.lines(case) == ["OPENED", "OVERDUE"]
    assert [one["id"] for one in await office.queue("overdue=true")] == [case]
    assert office.facts(case)[-1] == "compliance.case.overdue"
    subject = "SELECT subject FROM duly.alerts WHERE resolved_at IS NULL AND kind = 'application'"
    assert rows(dsn, subject) == [(f"compliance.overdue:{case}",)]
    office.check()
    await office.run(hours=24)
    assert office.lines(case) == ["OPENED", "OVERDUE"]
    await office.do(case, "resolve", APPROVE)
    assert rows(dsn, subject) == []
    assert await office.queue("overdue=true") == []
    office.check()


async def test_a_held_payment_never_expires_without_a_word(
    office: Office, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    """However much time the settings give: a day before the review ends by itself, somebody hears of it."""
    monkeypatch.setenv("COMPLIANCE_SLA_HOURS", "MEDIUM=9999")
    payment, case = await office.hold("50.00")
    _, posted = await office.flag("50.00")
    left = "SELECT extract(epoch FROM due_at - created_at)::integer / 3600 FROM compliance.cases WHERE id = %(id)s"
    assert [value(dsn, left, {"id": one}) for one in (case, posted)] == [6 * 24, 9999]
    await office.run(days=5.9)
    assert office.lines(case) == ["OPENED"]
    await office.run(days=0.2)
    assert office.lines(case) == ["OPENED", "OVERDUE"]
    alerts = "SELECT count(*) FROM duly.alerts WHERE kind = 'application' AND resolved_at IS NULL"
    assert (value(dsn, alerts), office.payers.state(payment)) == (1, "PENDING_REVIEW")
    await office.run(days=1)
    assert (office.status(case), value(dsn, alerts)) == ("EXPIRED", 0)
    office.check()


async def test_settings_decide_how_soon(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPLIANCE_SLA_HOURS", "MEDIUM=1")
    _, case = await office.hold()
    await office.run(hours=1.1)
    assert office.lines(case) == ["OPENED", "OVERDUE"]


async def test_a_review_that_expires_takes_its_case_along(office: Office) -> None:
    """F10: by the system, in the same commit; what was proposed comes too late."""
    payment, case = await office.hold()
    await office.do(case, "claim")
    await office.run(days=3.1)
    await office.run(days=4)
    assert (office.payers.state(payment), office.status(case)) == ("REJECTED", "EXPIRED")
    assert office.lines(case) == ["OPENED", "CLAIMED", "OVERDUE", "EXPIRED"]
    found = await office.read(case)
    assert (found["timeline"][-1]["actor"], found["resolution"]) == ("system", None)
    assert office.facts(case)[-1] == "compliance.case.expired"
    assert (await office.ask("POST", f"/{case}/resolve", APPROVE)).json()["type"] == "urn:duly:problem:case-ended"
    office.check()


async def test_what_has_ended_takes_nothing_more(office: Office, dsn: str) -> None:
    _, case = await office.hold()
    await office.do(case, "resolve", REJECT)
    before = value(dsn, "SELECT c::text FROM compliance.cases c")
    for what, body in (
        ("claim", None), ("unclaim", None), ("assign", {"assignee": "x"}), ("comments", {"text": "x"}),
        ("evidence", {"reference": "x"}), ("resolve", APPROVE), ("confirm", None), ("refuse", {"reason": "x"}),
    ):  # fmt: skip
        answer = await office.ask("POST", f"/{case}/{what}", body)
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:duly:problem:case-ended"), what
    assert value(dsn, "SELECT c::text FROM compliance.cases c") == before
    office.check()
