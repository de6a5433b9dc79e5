"""A payment begins: screened, covered, posted and sent, or refused for the right reason (F5)."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from apps.finance.compliance.service import open_for_payment
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AccountType, Direction, NewEntry, Posting
from apps.finance.payments import service
from apps.finance.payments.model import NotUnderReview
from apps.shared.money import BadAmount
from duly.db import Database
from tests.apps.finance.ledger.acting import refused
from tests.apps.finance.payments.acting import Payers, add_rule, do, facts_of, history_of, open_account
from tests.apps.transfers.acting import counting, new_key
from tests.support import rows, value

MANY = {"field": "amount", "op": "gt", "value": "50.00"}


async def test_an_approved_payment_is_posted_held_and_sent_in_one_commit(payers: Payers, dsn: str) -> None:
    """F5: 202 PROCESSING; the recipient has the money, and cannot spend it yet."""
    made = await payers.pay("10.50")
    assert (made["state"], made["amount"], made["attempts"], made["reason"]) == ("PROCESSING", "10.50", 0, None)
    assert UUID(made["transactionId"])
    assert UUID(made["decisionId"])
    assert await payers.both() == ("89.50", "0.00")
    assert facts_of(dsn, made["id"]) == ["payment.created"]
    assert history_of(dsn, made["id"]) == [("PROCESSING", "initiate")]
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'payments.send'") == 1
    payers.check()


async def test_a_payment_completes_and_the_money_can_be_spent(payers: Payers, dsn: str) -> None:
    """F5, F6: the bank takes it, and calls."""
    made = await payers.pay("10.00")
    await payers.run()
    assert (await payers.read(made["id"]))["attempts"] == 1
    payers.settle(made["id"])
    assert (await payers.call(made["id"], "SETTLED")).json() == {"status": "applied"}
    found = await payers.read(made["id"])
    assert (found["state"], found["reversalId"], found["reason"]) == ("COMPLETED", None, None)
    assert [line["toState"] for line in found["history"]] == ["PROCESSING", "PROCESSING", "PROCESSING", "COMPLETED"]
    assert await payers.both() == ("90.00", "10.00")
    assert facts_of(dsn, made["id"]) == ["payment.created", "payment.completed"]
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE name LIKE 'payments.%%'") == 0
    payers.check()


async def test_without_cover_the_payment_is_kept_and_the_answer_is_422(payers: Payers, dsn: str) -> None:
    """F5: FAILED/insufficient_balance is an answer, not a rollback; the key replays it."""
    key = new_key()
    answer = await payers.try_pay("100.01", key=key)
    assert refused(answer) == (422, "insufficient-balance", ["$.amount"])
    body = answer.json()
    assert (body["state"], body["reason"]) == ("FAILED", "insufficient_balance")
    assert answer.headers["location"] == f"/v1/payments/{body['paymentId']}"
    found = await payers.read(body["paymentId"])
    assert (found["state"], found["reason"], found["retryable"], found["transactionId"]) == (
        "FAILED", "insufficient_balance", False, None,
    )  # fmt: skip
    assert facts_of(dsn, found["id"]) == ["payment.failed"]
    again = await payers.try_pay("100.01", key=key)
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (422, answer.content, "true")
    assert value(dsn, "SELECT count(*) FROM payments.payments") == 1
    assert await payers.both() == ("100.00", "0.00")
    payers.check()


async def test_what_has_no_cover_is_not_screened(payers: Payers, db: Database, dsn: str) -> None:
    """F5: FAILED, whatever the rules would say; the last cent is cover enough."""
    await add_rule(db, MANY, "REJECT")
    answer = await payers.try_pay("100.01")
    assert (answer.status_code, answer.json()["state"]) == (422, "FAILED")
    assert value(dsn, "SELECT count(*) FROM decisions.log") == 0
    assert (await payers.pay("100.00"))["state"] == "REJECTED"
    payers.check()


async def test_cover_is_asked_for_where_the_account_may_go_negative_too(payers: Payers, db: Database) -> None:
    """F5: an account that may be overdrawn by a bookkeeper is not overdrawn by a payment."""
    loose = await do(db, lambda tx: open_account(tx, "5.00", may_go_negative=True))
    assert (await payers.try_pay("5.01", payer=loose)).status_code == 422
    assert (await payers.pay("5.00", payer=loose))["state"] == "PROCESSING"
    payers.check()


@pytest.mark.parametrize(("amount", "held"), [("10.00", None), ("50.00", 3000)])
async def test_a_payment_to_an_overdrawn_account_can_go_back(
    payers: Payers, db: Database, dsn: str, amount: str, held: int | None
) -> None:
    """At -20.00: what lifts it above zero is held, so it can spend nothing; afterwards nobody is lower than before."""
    loose = await do(db, _overdrawn)
    made = await payers.pay(amount, payee=loose)
    query = "SELECT h.amount FROM ledger.holds h JOIN payments.payments p ON p.incoming_hold_id = h.id"
    assert rows(dsn, query) == ([(held,)] if held else [])
    assert await payers.available(loose) == ("0.00" if held else "-10.00")
    assert (await payers.try_pay("0.01", payer=loose)).status_code == 422
    await payers.run()
    payers.settle(made["id"], "DECLINED")
    await payers.call(made["id"], "FAILED")
    assert payers.state(made["id"]) == "PERMANENTLY_FAILED"
    assert await payers.available(loose) == "-20.00"
    assert await payers.available(payers.ann) == "100.00"
    payers.check()


async def _overdrawn(tx: Any) -> UUID:
    loose = await open_account(tx, may_go_negative=True)
    other = await open_account(tx, may_go_negative=True)
    lines = [NewEntry(loose, Decimal(20), Direction.DEBIT), NewEntry(other, Decimal(20), Direction.CREDIT)]
    await ledger.post(tx, Posting("overdraft", lines))
    return loose


async def test_a_payment_between_assets_moves_the_other_way(payers: Payers, db: Database) -> None:
    """Assets grow with debits."""
    one = await do(db, lambda tx: open_account(tx, "30.00", kind=AccountType.ASSET))
    two = await do(db, lambda tx: open_account(tx, kind=AccountType.ASSET))
    made = await payers.pay("12.00", payer=one, payee=two)
    await payers.run()
    payers.settle(made["id"])
    await payers.call(made["id"], "SETTLED")
    assert (await payers.available(one), await payers.available(two)) == ("18.00", "12.00")
    payers.check()


async def test_an_expense_is_paid_from_an_asset(payers: Payers, db: Database) -> None:
    """F5: both grow with debits, so that money can go from one to the other."""
    asset = await do(db, lambda tx: open_account(tx, "30.00", kind=AccountType.ASSET))
    expense = await do(db, lambda tx: open_account(tx, kind=AccountType.EXPENSE))
    made = await payers.pay("12.00", payer=asset, payee=expense)
    await payers.call(made["id"], "SETTLED")
    assert (await payers.available(asset), await payers.available(expense)) == ("18.00", "12.00")
    payers.check()


async def test_what_the_rules_reject_moves_no_money(payers: Payers, db: Database, dsn: str) -> None:
    """F5: 202 REJECTED."""
    await add_rule(db, MANY, "REJECT")
    made = await payers.pay("60.00")
    assert (made["state"], made["reason"], made["transactionId"]) == ("REJECTED", "not_approved", None)
    assert await payers.both() == ("100.00", "0.00")
    assert facts_of(dsn, made["id"]) == ["payment.rejected"]
    assert value(dsn, "SELECT subject FROM decisions.log") == made["id"]
    payers.check()


async def test_what_the_rules_want_reviewed_is_held(payers: Payers, db: Database, dsn: str) -> None:
    """F5: 202 PENDING_REVIEW; the money can be spent by nobody."""
    await add_rule(db, MANY, "REVIEW")
    made = await payers.pay("60.00")
    assert (made["state"], made["transactionId"]) == ("PENDING_REVIEW", None)
    assert await payers.both() == ("40.00", "0.00")
    assert facts_of(dsn, made["id"]) == ["payment.pending_review"]
    assert (await payers.try_pay("45.00")).status_code == 422
    payers.check()


async def test_a_released_payment_goes_its_way(payers: Payers, db: Database, dsn: str) -> None:
    """F10: what was on hold is what is posted."""
    await add_rule(db, MANY, "REVIEW")
    made = await payers.pay("60.00")
    await do(db, lambda tx: service.release(tx, UUID(made["id"]), actor="olga", reason="known customer"))
    assert await payers.both() == ("40.00", "0.00")
    await payers.run()
    payers.settle(made["id"])
    await payers.call(made["id"], "SETTLED")
    assert await payers.both() == ("40.00", "60.00")
    assert facts_of(dsn, made["id"]) == ["payment.pending_review", "payment.created", "payment.completed"]
    with pytest.raises(NotUnderReview):
        await do(db, lambda tx: service.reject(tx, UUID(made["id"]), actor="olga"))
    await payers.run(days=30)  # the timers of the review and of its hold find nothing to do
    assert payers.state(made["id"]) == "COMPLETED"
    payers.check()


async def test_a_rejected_review_lets_the_money_go(payers: Payers, db: Database, dsn: str) -> None:
    """F10."""
    await add_rule(db, MANY, "REVIEW")
    made = await payers.pay("60.00")
    await do(db, lambda tx: service.reject(tx, UUID(made["id"]), actor="olga", reason="no"))
    assert (await payers.read(made["id"]))["reason"] == "not_approved"
    assert await payers.both() == ("100.00", "0.00")
    assert facts_of(dsn, made["id"]) == ["payment.pending_review", "payment.rejected"]
    payers.check()


async def test_a_review_that_nobody_ends_is_rejected_in_time(payers: Payers, db: Database) -> None:
    """After seven days, not before."""
    await add_rule(db, MANY, "REVIEW")
    made = await payers.pay("60.00")
    await payers.run(days=6.9)
    assert payers.state(made["id"]) == "PENDING_REVIEW"
    await payers.run(days=0.2)
    found = await payers.read(made["id"])
    assert (found["state"], found["reason"]) == ("REJECTED", "not_approved")
    assert await payers.both() == ("100.00", "0.00")
    payers.check()


async def test_what_is_reviewed_is_on_hold_for_as_long_as_it_is(payers: Payers, db: Database) -> None:
    """F5: nobody spends it on the last day either."""
    await add_rule(db, MANY, "REVIEW")
    made = await payers.pay("60.00")
    await payers.run(days=6.9)
    assert (payers.state(made["id"]), await payers.both()) == ("PENDING_REVIEW", ("40.00", "0.00"))
    payers.check()


async def test_a_hold_that_ended_before_the_release_is_paid_if_there_is_cover(payers: Payers, db: Database) -> None:
    """Workers were away for weeks, or somebody voided it."""
    await add_rule(db, MANY, "REVIEW")
    one = await payers.pay("51.00")
    hold = value(payers.dsn, "SELECT review_hold_id FROM payments.payments")
    await do(db, lambda tx: ledger.void_hold(tx, hold))
    two = await payers.pay("50.00")
    released = await do(db, lambda tx: service.release(tx, UUID(one["id"]), actor="olga", reason="fine"))
    assert (await payers.read(one["id"]))["history"][-1]["detail"] is None, "initiators hear of nobody who decides"
    assert (released.state.value, released.reason) == ("FAILED", "insufficient_balance")
    assert payers.state(two["id"]) == "PROCESSING"
    assert await payers.both() == ("50.00", "0.00")
    payers.check()


async def test_payments_before_count_in_the_velocity_facts(payers: Payers, db: Database) -> None:
    """F5, F11: the fourth within an hour is one too many."""
    await add_rule(db, {"field": "payments1h", "op": "gt", "value": 3}, "REJECT")
    states = [(await payers.pay("1.00"))["state"] for _ in range(5)]
    assert states == ["PROCESSING"] * 3 + ["REJECTED"] * 2
    payers.check()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"amount": 1.5}, "$.amount"), ({"amount": 1}, "$.amount"), ({"amount": "NaN"}, "$.amount"),
        ({"amount": "-1.00"}, "$.amount"), ({"amount": "0"}, "$.amount"), ({"amount": "0.00"}, "$.amount"),
        ({"amount": "1e2"}, "$.amount"), ({"amount": "Infinity"}, "$.amount"), ({"amount": "1.001"}, "$.amount"),
        ({"amount": "1.0001"}, "$.amount"), ({"amount": "1234567890123"}, "$.amount"), ({"amount": " 1"}, "$.amount"),
        ({"amount": None}, "$.amount"), ({"amount": True}, "$.amount"), ({"amount": "١"}, "$.amount"),
        ({"currency": "XXX"}, "$.currency"), ({"currency": "pln"}, "$.currency"), ({"currency": 985}, "$.currency"),
        ({"from": "me"}, "$.from"), ({"to": 7}, "$.to"), ({"from": str(uuid4())}, "$.from"),
        ({"to": str(uuid4())}, "$.to"), ({"currency": "EUR"}, "$.from"), ({"currency": "JPY", "amount": "1"}, "$.from"),
        ({"note": "x"}, "$.note"),
    ],
)  # fmt: skip
async def test_what_cannot_be_a_payment_is_refused_where_it_is_wrong(
    payers: Payers, dsn: str, change: dict[str, Any], path: str
) -> None:
    """Nothing is kept of it."""
    body = {"from": str(payers.ann), "to": str(payers.ben), "amount": "1.00", "currency": "PLN"} | change
    status, _, paths = refused(await payers.send(body))
    assert (status, paths) == (422, [path])
    assert value(dsn, "SELECT count(*) FROM payments.payments") == 0


@pytest.mark.parametrize("amount", ["NaN", "Infinity", "-1", "0", "1000000000000", "0.001"])
async def test_what_python_callers_give_is_checked_too(payers: Payers, db: Database, amount: str) -> None:
    def pay(tx: Any) -> Any:
        return service.initiate(
            tx,
            from_id=payers.ann,
            to_id=payers.ben,
            amount=Decimal(amount),
            currency="PLN",
            by="t",
            provider="bank",
            tell=open_for_payment,
        )

    with pytest.raises(BadAmount):
        await do(db, pay)


@pytest.mark.parametrize("missing", ["from", "to", "amount", "currency"])
async def test_each_member_is_needed(payers: Payers, missing: str) -> None:
    body = {"from": str(payers.ann), "to": str(payers.ben), "amount": "1.00", "currency": "PLN"}
    del body[missing]
    assert refused(await payers.send(body))[::2] == (422, [f"$.{missing}"])


async def test_nobody_pays_oneself(payers: Payers, dsn: str) -> None:
    assert refused(await payers.try_pay("1.00", payee=payers.ann)) == (422, "self-payment", ["$.to"])
    assert value(dsn, "SELECT count(*) FROM payments.payments") == 0


@pytest.mark.parametrize("end", ["from", "to"])
async def test_a_closed_account_neither_pays_nor_is_paid(payers: Payers, db: Database, end: str) -> None:
    closed = await do(db, open_account)
    await do(db, lambda tx: ledger.close_account(tx, closed))
    ends = {"payer": closed} if end == "from" else {"payee": closed}
    assert refused(await payers.try_pay("1.00", **ends)) == (409, "account-closed", [f"$.{end}"])


async def test_money_stays_on_its_side_of_the_books(payers: Payers, db: Database) -> None:
    asset = await do(db, lambda tx: open_account(tx, "5.00", kind=AccountType.ASSET))
    assert refused(await payers.try_pay("1.00", payee=asset)) == (422, "different-sides", ["$.to"])


async def test_a_recipient_whose_balance_would_be_too_large_is_refused(payers: Payers, db: Database) -> None:
    """Not a 500."""
    huge = await do(db, lambda tx: open_account(tx, "999999999999.99"))
    rich = await do(db, lambda tx: open_account(tx, "999999999999.99"))
    for _ in range(3):
        answer = await payers.try_pay("999999999999.99", payer=rich, payee=huge)
        assert answer.status_code in (202, 422), answer.text
    payers.check()


async def test_the_same_key_pays_once(payers: Payers, dsn: str) -> None:
    key = new_key()
    first, second = await payers.try_pay("10.00", key=key), await payers.try_pay("10.00", key=key)
    assert (first.content, second.status_code) == (second.content, 202)
    assert value(dsn, "SELECT count(*) FROM payments.payments") == 1
    assert await payers.available(payers.ann) == "90.00"


async def test_payments_are_listed_newest_first_by_page_and_state(payers: Payers) -> None:
    """UC-07."""
    made = [(await payers.pay("1.00"))["id"] for _ in range(3)]
    failed = (await payers.try_pay("500.00")).json()["paymentId"]

    async def page(query: str) -> dict[str, Any]:
        answer = await payers.api.client.get(f"/v1/payments?{query}", headers=payers.headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    first = await page("limit=2")
    assert [one["id"] for one in first["items"]] == [failed, made[2]]
    rest = await page(f"limit=2&before={first['next']}")
    assert ([one["id"] for one in rest["items"]], rest["next"]) == ([made[1], made[0]], None)
    assert [one["id"] for one in (await page("state=FAILED"))["items"]] == [failed]
    assert (await payers.api.client.get("/v1/payments?state=LOST", headers=payers.headers)).status_code == 422
    gone = await payers.api.client.get(f"/v1/payments/{uuid4()}", headers=payers.headers)
    assert refused(gone) == (404, "payment-not-found", [])


async def test_the_cost_of_a_payment_is_known(payers: Payers, db: Database) -> None:
    """F14: a dozen statements and a half, whatever there is in the tables."""
    await payers.pay("1.00")
    async with counting(db) as sent:
        await payers.pay("1.00", key=new_key())
    assert len(sent) == 15, sent
    assert rows(payers.dsn, "SELECT count(*) FROM payments.payments") == [(2,)]
