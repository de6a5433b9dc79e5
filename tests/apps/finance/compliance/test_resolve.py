"""Deciding cases (F10): what is held is released or let go, what was posted is reversed or stays; each once."""

from __future__ import annotations

from functools import partial
from uuid import UUID

import pytest

from apps.finance.compliance import service
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AccountType
from apps.finance.payments import service as payments
from apps.sandbox.bank import Behaviour
from duly.db import Database
from tests.apps.finance.compliance.acting import APPROVE, REJECT, Office, open_customer, post
from tests.apps.finance.payments.acting import do
from tests.apps.transfers.acting import new_key
from tests.support import rows, value

REVERSALS = "SELECT count(*) FROM ledger.transactions WHERE reverses_id IS NOT NULL"


async def test_approving_releases_what_was_held(office: Office) -> None:
    payment, case = await office.hold()
    said = await office.do(case, "resolve", APPROVE)
    assert (said["status"], said["resolution"]["effect"]) == ("RESOLVED", "RELEASED")
    assert (said["resolution"]["resolvedBy"], said["resolution"]["confirmedBy"]) == ("olga", None)
    assert office.payers.state(payment) == "PROCESSING"
    assert await office.payers.both() == ("40.00", "0.00")
    assert office.facts(case) == ["compliance.case.opened", "compliance.case.resolved"]
    found = await office.read(case)
    assert (found["transaction"]["amount"], len(found["transaction"]["entries"])) == ("60.00", 2)
    await office.run(days=8)
    assert office.payers.state(payment) == "PROCESSING", "the timer of the review finds nothing to do"
    office.check()


async def test_rejecting_lets_go_what_was_held(office: Office) -> None:
    payment, case = await office.hold()
    said = await office.do(case, "resolve", REJECT)
    assert said["resolution"]["effect"] == "HOLD_VOIDED"
    assert office.payers.state(payment) == "REJECTED"
    assert await office.payers.both() == ("100.00", "0.00")
    office.check()


async def test_a_release_without_cover_by_then_fails_and_the_case_says_so(office: Office, db: Database) -> None:
    payment, case = await office.hold("60.00")
    hold = value(office.dsn, "SELECT review_hold_id FROM payments.payments")
    await do(db, lambda tx: ledger.void_hold(tx, hold))
    await office.post("90.00")
    said = await office.do(case, "resolve", APPROVE)
    assert (said["status"], said["resolution"]["effect"]) == ("RESOLVED", "RELEASE_FAILED")
    assert office.payers.state(payment) == "FAILED"
    office.check()


async def test_rejecting_what_was_posted_reverses_it(office: Office) -> None:
    transaction, case = await office.flag("60.00")
    assert await office.payers.both() == ("40.00", "60.00")
    said = await office.do(case, "resolve", REJECT)
    assert (said["resolution"]["effect"], await office.payers.both()) == ("REVERSED", ("100.00", "0.00"))
    await office.screen()
    assert office.count("compliance.cases") == 1, "a reversal raises no alert: there is no loop"
    found = await office.read(case)
    assert (found["transaction"]["status"], found["transaction"]["id"]) == ("REVERSED", transaction)
    office.check()


async def test_approving_what_was_posted_leaves_it(office: Office) -> None:
    _, case = await office.flag("60.00")
    assert (await office.do(case, "resolve", APPROVE))["resolution"]["effect"] == "MONEY_STAYS"
    assert await office.payers.both() == ("40.00", "60.00")
    office.check()


@pytest.mark.parametrize("decision", [REJECT, APPROVE])
async def test_what_somebody_has_reversed_before_is_said_so(
    office: Office, db: Database, decision: dict[str, str]
) -> None:
    """Whatever is decided: that money stays is said of money that is there."""
    transaction, case = await office.flag("60.00")
    await do(db, lambda tx: ledger.reverse(tx, UUID(transaction), reason="typo"))
    assert (await office.do(case, "resolve", decision))["resolution"]["effect"] == "ALREADY_REVERSED"
    assert value(office.dsn, REVERSALS) == 1
    office.check()


async def test_money_that_has_gone_on_is_not_taken_from_others(office: Office, db: Database) -> None:
    """The ledger refuses: 409, the case is open, and its timeline says what was tried. Later it may succeed."""
    _, case = await office.flag("60.00")
    third = await do(db, open_customer)
    gone = await office.post("30.00", debit=office.payers.ben, credit=third)
    key = new_key()
    answer = await office.ask("POST", f"/{case}/resolve", REJECT, **{"Idempotency-Key": key})
    body = answer.json()
    assert (answer.status_code, body["type"]) == (409, "urn:duly:problem:resolution-refused")
    assert (body["caseId"], body["caseStatus"]) == (case, "OPEN")
    again = await office.ask("POST", f"/{case}/resolve", REJECT, **{"Idempotency-Key": key})
    assert (again.content, again.headers["idempotent-replayed"]) == (answer.content, "true")
    assert office.lines(case) == ["OPENED", "RESOLUTION_REFUSED"]
    detail = (await office.read(case))["timeline"][-1]["detail"]
    assert (detail["decision"], detail["problem"]) == ("REJECT", "InsufficientFunds")
    assert value(office.dsn, REVERSALS) == 0
    office.check()
    await do(db, lambda tx: ledger.reverse(tx, UUID(gone), reason="came back"))
    assert (await office.do(case, "resolve", REJECT))["resolution"]["effect"] == "REVERSED"
    office.check()


async def test_a_release_that_the_books_refuse_leaves_all_as_it_was(office: Office, db: Database) -> None:
    payment, case = await office.hold("60.00")
    await do(db, lambda tx: ledger.close_account(tx, office.payers.ben))
    assert (await office.ask("POST", f"/{case}/resolve", APPROVE)).status_code == 409
    assert (office.payers.state(payment), office.status(case)) == ("PENDING_REVIEW", "OPEN")
    assert value(office.dsn, "SELECT status FROM ledger.holds") == "ACTIVE"
    office.check()
    await do(db, lambda tx: ledger.reopen_account(tx, office.payers.ben))
    assert (await office.do(case, "resolve", APPROVE))["resolution"]["effect"] == "RELEASED"
    office.check()


async def test_a_review_whose_release_the_books_refused_still_ends_by_itself(office: Office, db: Database) -> None:
    """F10: of what was refused half-way nothing stays; the timer that was withdrawn first is there again."""
    payment, case = await office.hold("60.00")
    await do(db, lambda tx: ledger.close_account(tx, office.payers.ben))
    assert (await office.ask("POST", f"/{case}/resolve", APPROVE)).status_code == 409
    timers = "SELECT count(*) FROM duly.jobs WHERE name = 'payments.expire-review' AND entity_id = %(id)s"
    assert value(office.dsn, timers, {"id": payment}) == 1
    await office.run(days=7.1)
    assert (office.payers.state(payment), office.status(case)) == ("REJECTED", "EXPIRED")
    assert await office.payers.available(office.payers.ann) == "100.00"
    office.check()


# -- payments that were posted ----------------------------------------------------------------------------------------


async def flagged_payment(office: Office) -> tuple[str, str]:
    """A payment that was held and released; what it posted is flagged, and a second case is open."""
    payment, case = await office.hold()
    await office.do(case, "resolve", APPROVE)
    posted = str(value(office.dsn, "SELECT transaction_id FROM payments.payments"))
    handlers = office.payers
    handlers.order(Behaviour.BUSY)  # the bank does not take it
    await office.screen()
    return payment, office.case_of_transaction(posted)


async def test_a_payment_that_the_bank_does_not_have_is_called_back(office: Office) -> None:
    payment, case = await flagged_payment(office)
    assert office.payers.state(payment) == "FAILED"
    assert (await office.do(case, "resolve", REJECT))["resolution"]["effect"] == "REVERSED"
    assert office.payers.state(payment) == "PERMANENTLY_FAILED"
    assert await office.payers.both() == ("100.00", "0.00")
    sent = len(office.payers.bank.log)
    await office.run(days=1)
    await office.payers.retry()
    assert len(office.payers.bank.log) == sent, "it is not sent any more"
    office.check()
    office.payers.check()


@pytest.mark.parametrize("behaviour", [Behaviour.ACCEPT, Behaviour.BREAK])
async def test_a_payment_that_the_bank_may_have_is_decided_when_it_is_over(
    office: Office, behaviour: Behaviour
) -> None:
    payment, held = await office.hold()
    await office.do(held, "resolve", APPROVE)
    office.payers.order(behaviour)
    await office.screen()
    case = office.case_of_transaction(str(value(office.dsn, "SELECT transaction_id FROM payments.payments")))
    refused = await office.ask("POST", f"/{case}/resolve", REJECT)
    assert (refused.status_code, "bank" in refused.json()["detail"]) == (409, True)
    assert office.lines(case)[-1] == "RESOLUTION_REFUSED"
    office.payers.settle(payment)
    await office.payers.call(payment, "SETTLED")
    assert office.payers.state(payment) == "COMPLETED"
    assert (await office.do(case, "resolve", REJECT))["resolution"]["effect"] == "REVERSED"
    assert await office.payers.both() == ("100.00", "0.00")
    office.check()


@pytest.mark.parametrize("decision", [REJECT, APPROVE])
async def test_a_payment_that_failed_is_reversed_already(office: Office, decision: dict[str, str]) -> None:
    payment, held = await office.hold()
    await office.do(held, "resolve", APPROVE)
    office.payers.order(Behaviour.DECLINE)
    await office.screen()
    case = office.case_of_transaction(str(value(office.dsn, "SELECT transaction_id FROM payments.payments")))
    assert office.payers.state(payment) == "PERMANENTLY_FAILED"
    assert (await office.do(case, "resolve", decision))["resolution"]["effect"] == "ALREADY_REVERSED"
    assert value(office.dsn, REVERSALS) == 1
    office.check()


@pytest.mark.parametrize("decision", [REJECT, APPROVE])
async def test_a_payment_that_is_on_its_way_back_is_said_so(
    office: Office, db: Database, decision: dict[str, str]
) -> None:
    """The bank has declined it, and the ledger does not take the money back yet: the payer's account is closed."""
    payment, held = await office.hold("100.00")
    await office.do(held, "resolve", APPROVE)
    await do(db, lambda tx: ledger.close_account(tx, office.payers.ann))
    office.payers.order(Behaviour.DECLINE)
    await office.screen()
    assert office.payers.state(payment) == "RETURNING"
    case = office.case_of_transaction(str(value(office.dsn, "SELECT transaction_id FROM payments.payments")))
    assert (await office.do(case, "resolve", decision))["resolution"]["effect"] == "RETURNING"
    office.check()


async def test_a_payment_that_was_released_elsewhere_leaves_nothing_to_release(office: Office, db: Database) -> None:
    """Nobody does so; but a case that is late to hear of it says what it finds."""
    payment, case = await office.hold()
    await do(db, lambda tx: payments.reject(tx, UUID(payment), actor="x"))
    assert (await office.do(case, "resolve", APPROVE))["resolution"]["effect"] == "NOTHING_HELD"
    assert await office.payers.both() == ("100.00", "0.00")


# -- reopening --------------------------------------------------------------------------------------------------------


async def test_reopening_makes_a_second_case_that_is_linked_both_ways(office: Office, dsn: str) -> None:
    """F10: the old one stays as it is."""
    transaction, case = await office.flag("60.00")
    assert (await office.ask("POST", f"/{case}/reopen", {"reason": "x"})).json()["type"].endswith("case-not-ended")
    await office.do(case, "resolve", APPROVE)
    before = rows(dsn, "SELECT c::text FROM compliance.cases c")
    answer = await office.ask("POST", f"/{case}/reopen", {"reason": "a second bank has called"}, who="otto")
    made = answer.json()
    assert (answer.status_code, answer.headers["location"]) == (201, f"/v1/compliance/cases/{made['id']}")
    assert (made["status"], made["reopensId"], made["reopenedBy"]) == ("OPEN", case, "otto")
    assert (await office.read(case))["reopenedAs"] == made["id"]
    assert before[0] in rows(dsn, "SELECT c::text FROM compliance.cases c")
    assert (await office.read(made["id"]))["timeline"][0]["detail"]["reason"] == "a second bank has called"
    again = await office.ask("POST", f"/{case}/reopen", {"reason": "me too"})
    assert again.json()["type"] == "urn:duly:problem:already-reopened"
    assert (await office.do(made["id"], "resolve", REJECT))["resolution"]["effect"] == "REVERSED"
    assert office.facts(transaction) == ["aml.flagged"]
    office.check()


async def test_a_released_payment_whose_case_is_reopened_can_be_reversed(office: Office) -> None:
    payment, case = await office.hold()
    await office.do(case, "resolve", APPROVE)
    made = await office.do(case, "reopen", {"reason": "new facts"}, expect=201)
    assert (await office.do(made["id"], "resolve", REJECT))["resolution"]["effect"] == "REVERSED"
    assert office.payers.state(payment) == "PERMANENTLY_FAILED"
    assert await office.payers.both() == ("100.00", "0.00")
    office.check()
    office.payers.check()


async def test_a_rejected_payment_whose_case_is_reopened_stays_rejected(office: Office) -> None:
    payment, case = await office.hold()
    await office.do(case, "resolve", REJECT)
    made = await office.do(case, "reopen", {"reason": "the customer has called"}, expect=201)
    assert (await office.do(made["id"], "resolve", APPROVE))["resolution"]["effect"] == "NOTHING_HELD"
    assert office.payers.state(payment) == "REJECTED"
    office.check()


async def test_the_file_of_a_payment_has_every_case_about_it(office: Office, db: Database) -> None:
    """For the dossier: both cases, their alerts and whole timelines, the oldest first."""
    payment, case = await office.hold()
    await office.do(case, "resolve", APPROVE)
    await office.screen()
    posted = UUID(str(value(office.dsn, "SELECT transaction_id FROM payments.payments")))
    for about in ([], [posted]):
        files = await do(db, partial(service.read_cases_about, payment_id=UUID(payment), transaction_ids=about))
        assert [file.case.kind.value for file in files] == ["PAYMENT_REVIEW", "AML"]
        assert [line.kind.value for line in files[0].timeline] == ["OPENED", "RESOLVED"]
        assert files[1].alert.source.value == "AML"
    only = await do(db, lambda tx: service.read_cases_about(tx, payment_id=None, transaction_ids=[posted]))
    assert [file.case.kind.value for file in only] == ["AML"]
    assert await do(db, lambda tx: service.read_cases_about(tx, payment_id=None, transaction_ids=[])) == []


async def test_an_account_of_another_side_is_reversed_the_same(office: Office, db: Database) -> None:
    """ASSET accounts: what lowers one is a credit."""
    one, two = [await do(db, lambda tx: open_customer(tx, kind=AccountType.ASSET)) for _ in range(2)]
    async with db.transaction() as tx:
        transaction = await post(tx, two, one, "75.00")
    await office.screen()
    case = office.case_of_transaction(str(transaction))
    found = await office.read(case)
    assert (found["alert"]["facts"]["fromAccount"], found["alert"]["facts"]["toAccount"]) == (str(one), str(two))
    assert (await office.do(case, "resolve", REJECT))["resolution"]["effect"] == "REVERSED"
    office.check()
