"""Two officers above an amount, never the initiator, never the same one twice (F10)."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from apps.finance.compliance import model
from apps.finance.compliance.model import DEFAULT_SLA_HOURS, Severity, read_rules
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import Direction, NewEntry, Posting
from duly.db import Database
from duly.errors import Refused
from tests.apps.finance.compliance.acting import APPROVE, REJECT, ROLE, SCOPE, Office, open_customer
from tests.apps.finance.ledger.acting import move
from tests.apps.finance.payments.acting import do
from tests.support import value

FORBIDDEN = "urn:duly:problem:"


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 55.00 on, two decide."""
    monkeypatch.setenv("COMPLIANCE_FOUR_EYES", "PLN=55.00")


async def test_up_to_the_limit_one_decides(office: Office) -> None:
    _, case = await office.hold("55.00")
    assert (await office.do(case, "resolve", APPROVE))["status"] == "RESOLVED"


async def test_above_it_one_proposes_and_another_confirms(office: Office) -> None:
    payment, case = await office.hold("55.01")
    assert (await office.read(case))["needsTwo"]
    said = await office.do(case, "resolve", APPROVE)
    assert (said["status"], said["proposal"]["proposedBy"], said["resolution"]) == ("PROPOSED", "olga", None)
    assert office.payers.state(payment) == "PENDING_REVIEW"
    own = await office.ask("POST", f"/{case}/confirm")
    assert (own.status_code, own.json()["type"]) == (403, f"{FORBIDDEN}second-officer-needed")
    for body in (APPROVE, REJECT):
        twice = await office.ask("POST", f"/{case}/resolve", body, who="otto")
        assert twice.json()["type"] == "urn:duly:problem:case-proposed"
    done = await office.do(case, "confirm", who="otto")
    assert (done["status"], done["resolution"]["effect"]) == ("RESOLVED", "RELEASED")
    assert (done["resolution"]["resolvedBy"], done["resolution"]["confirmedBy"]) == ("olga", "otto")
    assert office.payers.state(payment) == "PROCESSING"
    assert office.lines(case) == ["OPENED", "PROPOSED", "RESOLVED"]
    assert office.facts(case) == ["compliance.case.opened", "compliance.case.proposed", "compliance.case.resolved"]
    office.check()


async def test_a_proposal_is_refused_or_taken_back(office: Office) -> None:
    payment, case = await office.hold("60.00")
    assert (await office.ask("POST", f"/{case}/confirm", who="otto")).json()["type"].endswith("nothing-proposed")
    assert (await office.ask("POST", f"/{case}/refuse", {"reason": "x"})).json()["type"].endswith("nothing-proposed")
    await office.do(case, "resolve", APPROVE)
    assert (await office.do(case, "refuse", {"reason": "ask again"}, who="otto"))["status"] == "OPEN"
    await office.do(case, "resolve", REJECT, who="otto")
    await office.do(case, "refuse", {"reason": "was mistaken"}, who="otto")
    assert office.lines(case) == ["OPENED", "PROPOSED", "PROPOSAL_REFUSED", "PROPOSED", "PROPOSAL_WITHDRAWN"]
    assert (office.payers.state(payment), office.status(case)) == ("PENDING_REVIEW", "OPEN")
    office.check()


async def test_who_initiated_the_payment_decides_nothing_about_it(office: Office) -> None:
    """Nor is it shown, nor assigned to, that person: an officer who pays is a customer in that case."""
    _, case = await office.hold("60.00")
    for what, body in (
        ("claim", None), ("unclaim", None), ("assign", {"assignee": "otto"}), ("comments", {"text": "mine"}),
        ("evidence", {"reference": "x"}), ("resolve", APPROVE), ("confirm", None), ("refuse", {"reason": "x"}),
    ):  # fmt: skip
        answer = await office.ask("POST", f"/{case}/{what}", body, who="teller")
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:duly:problem:own-payment"), what
    assert (await office.ask("GET", f"/{case}", who="teller")).status_code == 403
    assert (await office.ask("GET", f"/{case}/timeline", who="teller")).status_code == 403
    assert await office.queue(who="teller") == []
    assert len(await office.queue()) == 1
    theirs = await office.ask("POST", f"/{case}/assign", {"assignee": "teller"})
    assert theirs.status_code == 403
    await office.do(case, "resolve", APPROVE)
    assert (await office.ask("POST", f"/{case}/confirm", who="teller")).status_code == 403
    await office.do(case, "confirm", who="otto")
    assert (await office.ask("POST", f"/{case}/reopen", {"reason": "x"}, who="teller")).status_code == 403


async def test_the_initiator_decides_nothing_about_what_the_payment_posted(office: Office) -> None:
    """The case is about a transaction, and still about that person's payment."""
    _, held = await office.hold("60.00")
    await office.do(held, "resolve", APPROVE)
    await office.do(held, "confirm", who="otto")
    await office.screen()
    case = office.case_of_transaction(str(value(office.dsn, "SELECT transaction_id FROM payments.payments")))
    assert (await office.ask("POST", f"/{case}/resolve", APPROVE, who="teller")).status_code == 403


async def test_who_posted_money_decides_nothing_about_it(office: Office) -> None:
    """Without a payment, too: alone, with others, or out of a hold; a bookkeeper may be an officer as well."""
    ann, ben = office.payers.ann, office.payers.ben
    headers = office.api.headers("olga", f"ledger:write {SCOPE}", "LEDGER_POSTER", ROLE)

    async def send(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await office.api.client.post(path, json=body, headers=headers)
        assert answer.status_code == 201, answer.text
        said: dict[str, Any] = answer.json()
        return said

    def new(amount: str, debit: UUID, credit: UUID) -> dict[str, Any]:
        return {"reference": str(uuid4()), "entries": move(debit, credit, amount)}

    one = (await send("/v1/transactions", new("51.00", ann, ben)))["id"]
    many = await send("/v1/transactions/batch", {"transactions": [new("50.00", ben, ann), new("50.00", ann, ben)]})
    hold = await send(f"/v1/accounts/{ben}/holds", {"amount": "50.00", "reference": "h"})
    captured = (await send(f"/v1/holds/{hold['id']}/capture", {"toAccountId": str(ann), "reference": "c"}))["id"]
    await office.screen()
    posted = [one, *(each["id"] for each in many["transactions"]), captured]
    for transaction in posted:
        case = office.case_of_transaction(transaction)
        answer = await office.ask("POST", f"/{case}/resolve", APPROVE)
        assert (answer.status_code, answer.json()["type"]) == (403, f"{FORBIDDEN}own-payment")
    assert (await office.queue(), len(await office.queue(who="otto"))) == ([], 4)
    assert (await office.do(office.case_of_transaction(one), "resolve", APPROVE, who="otto"))["status"] == "RESOLVED"
    office.check()


async def test_reopening_drops_no_eyes(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two have decided it: two decide it again, whatever the limit is by then, and the second is not who reopened."""
    _, case = await office.flag("60.00")
    await office.do(case, "resolve", APPROVE)
    await office.do(case, "confirm", who="otto")
    monkeypatch.setenv("COMPLIANCE_FOUR_EYES", "PLN=1000000")
    made = await office.do(case, "reopen", {"reason": "news"}, who="ida", expect=201)
    assert made["needsTwo"]
    assert (await office.do(made["id"], "resolve", REJECT))["status"] == "PROPOSED"
    reopener = await office.ask("POST", f"/{made['id']}/confirm", who="ida")
    assert (reopener.status_code, reopener.json()["type"]) == (403, f"{FORBIDDEN}second-officer-needed")
    assert (await office.do(made["id"], "confirm", who="otto"))["status"] == "RESOLVED"
    office.check()


async def test_a_limit_that_is_lowered_counts_from_the_next_decision_on(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, case = await office.hold("51.00")
    monkeypatch.setenv("COMPLIANCE_FOUR_EYES", "*=1")
    assert (await office.do(case, "resolve", APPROVE))["status"] == "PROPOSED"


async def test_all_legs_together_are_judged(office: Office, db: Database) -> None:
    """Two debits of 30.00 each are 60.00 that would be reversed."""
    third = await do(db, open_customer)
    lines = [
        NewEntry(office.payers.ann, Decimal(30), Direction.DEBIT), NewEntry(third, Decimal(30), Direction.DEBIT),
        NewEntry(office.payers.ben, Decimal(60), Direction.CREDIT),
    ]  # fmt: skip
    posted = (await do(db, lambda tx: ledger.post(tx, Posting(str(uuid4()), lines)))).id
    await office.screen()
    case = office.case_of_transaction(str(posted))
    assert (await office.do(case, "resolve", REJECT))["status"] == "PROPOSED"


async def test_a_confirmation_that_the_books_refuse_leaves_the_proposal(office: Office, db: Database) -> None:
    _, case = await office.flag("60.00")
    third = await do(db, open_customer)
    gone = await office.post("10.00", debit=office.payers.ben, credit=third)
    await office.do(case, "resolve", REJECT)
    refused = await office.ask("POST", f"/{case}/confirm", who="otto")
    assert (refused.status_code, refused.json()["caseStatus"]) == (409, "PROPOSED")
    assert office.lines(case)[-1] == "RESOLUTION_REFUSED"
    await do(db, lambda tx: ledger.reverse(tx, UUID(gone), reason="came back"))
    assert (await office.do(case, "confirm", who="otto"))["resolution"]["effect"] == "REVERSED"
    office.check()


async def test_proposals_are_bounded_and_a_full_case_can_be_decided(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two who disagree for ever do not fill the database; the last proposal stands, and can be confirmed."""
    monkeypatch.setattr(model, "MOST_LINES", 3)
    monkeypatch.setattr(model, "MOST_PROPOSAL_LINES", 6)
    _, case = await office.hold("60.00")
    for _ in range(2):
        await office.do(case, "resolve", APPROVE)
        await office.do(case, "refuse", {"reason": "no"}, who="otto")
    comment = await office.ask("POST", f"/{case}/comments", {"text": "x"})
    assert comment.json()["type"] == "urn:duly:problem:timeline-full"
    await office.do(case, "resolve", APPROVE)
    assert len(office.lines(case)) == 6
    refused = await office.ask("POST", f"/{case}/refuse", {"reason": "no"}, who="otto")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:duly:problem:timeline-full")
    assert (await office.do(case, "confirm", who="otto"))["status"] == "RESOLVED"
    office.check()


async def test_what_is_proposed_expires_with_the_review(office: Office) -> None:
    payment, case = await office.hold("60.00")
    await office.do(case, "resolve", APPROVE)
    await office.run(days=7.1)
    assert (office.status(case), office.payers.state(payment)) == ("EXPIRED", "REJECTED")
    assert (await office.ask("POST", f"/{case}/confirm", who="otto")).json()["type"].endswith("case-ended")
    office.check()


def test_settings_are_read_or_refused() -> None:
    rules = read_rules("PLN=55, *=1000.50", "HIGH=2")
    assert [rules.wants_two(Decimal(amount), "PLN") for amount in ("55", "55.01")] == [False, True]
    assert [rules.wants_two(Decimal(amount), "JPY") for amount in ("1000", "1001")] == [False, True]
    assert (rules.sla_hours[Severity.HIGH], rules.sla_hours[Severity.LOW]) == (2, 120)
    assert not read_rules("", "").wants_two(Decimal(10**9), "PLN")
    for four_eyes, hours in (
        ("PLN", DEFAULT_SLA_HOURS), ("pln=1", DEFAULT_SLA_HOURS), ("PLN=-1", DEFAULT_SLA_HOURS), ("PLN=1e9", ""),
        ("", "HIGH=0"), ("", "SOON=1"), ("", "HIGH=x"), ("=1", ""),
    ):  # fmt: skip
        with pytest.raises(Refused):
            read_rules(four_eyes, hours)
