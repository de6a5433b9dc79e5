"""Nobody is tipped off: who initiates payments, or hears of them, learns nothing of cases, officers or reasons."""

from __future__ import annotations

import json

import pytest

from apps.finance.compliance import events
from apps.finance.ledger import service as ledger
from apps.finance.payments.events import PaymentPendingReview
from duly.db import Database
from duly.messages import EventBody, may_read
from tests.apps.finance.compliance.acting import APPROVE, REJECT, Office, add_rule, open_customer
from tests.apps.finance.compliance.test_resolve import flagged_payment
from tests.apps.finance.payments.acting import do
from tests.support import rows, value

CANARY = "canary-4711"
OUTSIDE = "SELECT payload::text FROM duly.event_log WHERE topic <> 'compliance.events'"


def heard_outside(dsn: str) -> str:
    """Everything that subscribers of payments and the ledger could hear."""
    return " ".join(text for (text,) in rows(dsn, OUTSIDE))


@pytest.mark.parametrize("body", [APPROVE, REJECT])
async def test_an_initiator_reads_that_it_was_not_approved_and_no_more(office: Office, body: dict[str, str]) -> None:
    payment, case = await office.hold()
    await office.do(case, "comments", {"text": f"{CANARY} comment"}, who="officer-olga", expect=201)
    await office.do(case, "evidence", {"reference": f"{CANARY}-evidence"}, who="officer-olga", expect=201)
    await office.do(case, "resolve", {**body, "reason": f"{CANARY} reason"}, who="officer-olga")
    found = await office.payers.read(payment)
    told = json.dumps(found) + heard_outside(office.dsn)
    for secret in (CANARY, "officer-olga", case, body["reasonCode"], "review_rejected", "Large payment", "compliance"):
        assert secret not in told, secret
    if body is REJECT:
        assert (found["state"], found["reason"]) == ("REJECTED", "not_approved")


async def test_a_review_that_expires_reads_like_one_that_was_rejected(office: Office) -> None:
    rejected, case = await office.hold()
    await office.do(case, "resolve", REJECT)
    expired, _ = await office.hold()
    await office.run(days=7.1)
    one, two = await office.payers.read(rejected), await office.payers.read(expired)
    assert (one["state"], one["reason"]) == (two["state"], two["reason"]) == ("REJECTED", "not_approved")
    assert [line["detail"] for line in one["history"]] == [line["detail"] for line in two["history"]]
    told = [
        json.loads(text)["reason"]
        for (text,) in rows(office.dsn, "SELECT payload::text FROM duly.event_log WHERE type = 'payment.rejected'")
    ]
    assert told == ["not_approved", "not_approved"]


async def test_what_the_rules_reject_reads_the_same(office: Office, db: Database) -> None:
    await add_rule(db, {"field": "amount", "op": "gte", "value": "70.00"}, "REJECT", rule_set="payment-screening")
    made = await office.payers.pay("70.00")
    assert (made["state"], made["reason"]) == ("REJECTED", "not_approved")
    assert (await office.payers.read(made["id"]))["history"][0]["detail"] == "not_approved"


async def test_a_reversal_names_nobody(office: Office) -> None:
    transaction, case = await office.flag("60.00")
    await office.do(case, "resolve", {**REJECT, "reason": f"{CANARY} reason"}, who="officer-olga")
    told = heard_outside(office.dsn)
    assert "transaction.reversed" in str(rows(office.dsn, "SELECT type FROM duly.event_log"))
    for secret in (CANARY, "officer-olga", case, "compliance", "FRAUD"):
        assert secret not in told, secret
    reason = "SELECT reason FROM ledger.transactions WHERE reverses_id = %(id)s"
    assert value(office.dsn, reason, {"id": transaction}) == "operations"


async def test_a_payment_that_officers_called_back_reads_like_one_that_a_bookkeeper_reversed(
    office: Office, db: Database
) -> None:
    """F9: that somebody has looked at it after it was posted would tip off whoever sent it."""
    payment, case = await flagged_payment(office)
    await office.do(case, "resolve", {**REJECT, "reason": f"{CANARY} reason"}, who="officer-olga")
    loose = await do(db, open_customer)
    other = (await office.payers.pay("10.00", payee=loose))["id"]
    posted = value(office.dsn, "SELECT transaction_id FROM payments.payments WHERE id = %(id)s", {"id": other})
    await do(db, lambda tx: ledger.reverse(tx, posted, reason="by hand"))
    await office.screen()
    called, reversed_ = await office.payers.read(payment), await office.payers.read(other)
    for one in (called, reversed_):
        assert (one["state"], one["reason"]) == ("PERMANENTLY_FAILED", "reversed")
        line = one["history"][-1]
        assert (line["toState"], line["cause"], line["detail"]) == ("PERMANENTLY_FAILED", "reversed", None)
    told = json.dumps(called) + heard_outside(office.dsn)
    for secret in (CANARY, "officer-olga", case, "recall", "compliance", "FRAUD"):
        assert secret not in told, secret
    office.check()


def test_whoever_runs_the_engine_reads_nothing_of_it() -> None:
    """Neither what compliance does, nor that a payment is looked at: closed in the console, but to officers."""
    closed: list[type[EventBody]] = [*events.FACTS, PaymentPendingReview]
    assert all(not may_read(one.event_type, {"ADMINISTRATOR", "OPERATOR"}) for one in closed)
    assert all(may_read(one.event_type, {"OPERATOR", "COMPLIANCE_OFFICER"}) for one in closed)


async def test_what_compliance_tells_says_what_and_never_why(office: Office) -> None:
    _, case = await office.flag("60.00")
    await office.do(case, "comments", {"text": f"{CANARY} comment"}, expect=201)
    why = {"reasonCode": "SUSPECTED_LAUNDERING", "reason": f"{CANARY} reason"}
    await office.do(case, "resolve", REJECT | why)
    inside = str(rows(office.dsn, "SELECT payload::text FROM duly.event_log WHERE topic = 'compliance.events'"))
    assert '"decision": "REJECT"' in inside
    for secret in (CANARY, "SUSPECTED_LAUNDERING", "reasonCode", "Large transaction"):
        assert secret not in inside, secret
    kinds = {fact.event_type for fact in events.FACTS}
    assert {
        kind for (kind,) in rows(office.dsn, "SELECT type FROM duly.event_log WHERE topic = 'compliance.events'")
    } <= kinds
