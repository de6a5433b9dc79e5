"""What the bank and the books disagree on stands still, until a person decides; once (F6)."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from apps.finance.ledger import service as ledger
from apps.finance.payments import service
from apps.finance.payments.model import Heard, Report, Source
from apps.sandbox.bank import Behaviour
from duly.db import Database
from tests.apps.finance.ledger.acting import refused
from tests.apps.finance.payments.acting import Payers, alerts_of, do, facts_of, history_of, open_account, subjects_of
from tests.apps.finance.payments.test_races import holding_payment
from tests.apps.finance.payments.test_reversed import reverse
from tests.apps.transfers.acting import until_waiting
from tests.support import rows, value

RETURNS = "SELECT count(*) FROM duly.jobs WHERE name = 'payments.return'"


async def returning(payers: Payers) -> str:
    """Declined, and whoever paid has closed the account."""
    made = await payers.pay("100.00")
    await do(payers.db, lambda tx: ledger.close_account(tx, payers.ann))
    payers.order(Behaviour.DECLINE)
    await payers.run()
    assert payers.state(made["id"]) == "RETURNING"
    return str(made["id"])


async def disputed(payers: Payers) -> str:
    """The bank answers with another amount."""
    made = await payers.pay("10.00")
    await payers.run()
    payers.bank.charges[payers.key(made["id"])].amount = "9.99"
    payers.settle(made["id"])
    await payers.run(hours=1.1)
    return str(made["id"])


async def test_an_answer_with_another_amount_contradicts_and_completes_nothing(payers: Payers, dsn: str) -> None:
    payment = await disputed(payers)
    found = await payers.read(payment)
    assert (found["state"], found["contradictedAt"] is not None) == ("PROCESSING", True)
    assert (found["history"][-1]["cause"], found["history"][-1]["detail"]) == ("contradiction", "SETTLED 9.99 PLN")
    assert subjects_of(dsn) == [f"payments.contradiction:{payment}"]
    assert await payers.both() == ("90.00", "0.00")
    asked = len(payers.bank.log)
    payers.bank.charges[payers.key(payment)].amount = "10.00"
    assert (await payers.call(payment, "SETTLED", amount="10.00", currency="PLN")).json() == {"status": "ignored"}
    await payers.run(days=2)
    assert (payers.state(payment), len(payers.bank.log)) == ("PROCESSING", asked), "of this a person decides"


async def test_what_waits_for_a_retry_and_is_contradicted_is_not_sent_again(payers: Payers, db: Database) -> None:
    """An answer that was long under way says that the bank has it, with another amount."""
    payers.order(Behaviour.BUSY)
    payment = UUID((await payers.pay("10.00"))["id"])
    await payers.run()
    late = Heard(Report.PENDING, Source.SEND, "ref-1", attempt=1, amount=Decimal("9.99"))
    await do(db, lambda tx: service.note_answer(tx, payment, late))
    await payers.run(minutes=2)
    await payers.retry()
    found = await payers.read(str(payment))
    assert (found["state"], found["retryable"], found["contradictedAt"] is not None) == ("FAILED", True, True)
    assert len(payers.bank.log) == 1
    assert (await payers.resolve(str(payment), "RETURN")).json()["state"] == "PERMANENTLY_FAILED"
    payers.check()


@pytest.mark.parametrize(
    ("outcome", "state", "spendable"),
    [("COMPLETE", "COMPLETED", ("90.00", "10.00")), ("RETURN", "PERMANENTLY_FAILED", ("100.00", "0.00"))],
)
async def test_a_person_ends_what_is_contradicted(
    payers: Payers, dsn: str, outcome: str, state: str, spendable: tuple[str, str]
) -> None:
    payment = await disputed(payers)
    answer = await payers.resolve(payment, outcome)
    assert (answer.status_code, answer.json()["state"], answer.json()["contradictedAt"]) == (200, state, None)
    assert await payers.both() == spendable
    assert (await payers.read(payment))["history"][-1]["detail"] == f"by boss: {outcome}: asked the bank"
    fact = "payment.completed" if outcome == "COMPLETE" else "payment.permanently_failed"
    assert facts_of(dsn, payment)[-1] == fact
    assert subjects_of(dsn) == []
    assert rows(dsn, "SELECT actor, reason FROM duly.audit WHERE action = 'alert.resolved'") == [
        ("boss", "asked the bank")
    ]  # fmt: skip
    assert refused(await payers.resolve(payment, outcome))[:2] == (409, "nothing-to-resolve")


async def test_a_return_stops_once_the_bank_contradicts_it_until_a_person_decides(
    payers: Payers, db: Database, dsn: str
) -> None:
    """Neither the hourly try nor the look for lost jobs gives back what the bank says it has paid."""
    payment = await returning(payers)
    await payers.call(payment, "SETTLED")
    assert (payers.state(payment), history_of(dsn, payment)[-1][1]) == ("RETURNING", "contradiction")
    await do(db, lambda tx: ledger.reopen_account(tx, payers.ann))
    await payers.run(hours=1.1)
    assert await do(db, service.recover) == (0, False)
    await payers.run(hours=1.1)
    assert (payers.state(payment), value(dsn, RETURNS)) == ("RETURNING", 0)
    assert await payers.both() == ("0.00", "0.00")
    answer = await payers.resolve(payment, "RETURN")
    assert answer.json()["state"] == "PERMANENTLY_FAILED"
    assert await payers.both() == ("100.00", "0.00")
    assert value(dsn, "SELECT count(*) FROM ledger.transactions WHERE reverses_id IS NOT NULL") == 1


async def test_a_return_that_the_ledger_still_refuses_goes_on_by_itself(payers: Payers, db: Database, dsn: str) -> None:
    payment = await returning(payers)
    await payers.call(payment, "SETTLED")
    answer = await payers.resolve(payment, "RETURN")
    assert (answer.status_code, answer.json()["state"], answer.json()["contradictedAt"]) == (200, "RETURNING", None)
    assert (value(dsn, RETURNS), subjects_of(dsn)) == (1, [f"payments.return:{payment}"])
    await do(db, lambda tx: ledger.reopen_account(tx, payers.ann))
    await payers.run(hours=1.1)
    assert (payers.state(payment), subjects_of(dsn)) == ("PERMANENTLY_FAILED", [])
    payers.check()


async def test_an_alert_that_somebody_closed_before_is_no_obstacle_and_others_stay(payers: Payers, dsn: str) -> None:
    payment = await disputed(payers)
    rows(dsn, "UPDATE duly.alerts SET resolved_at = duly.now()")
    rows(dsn, "SELECT duly.alert('application', 'payments.contradiction:another', 'x')")
    rows(dsn, "SELECT duly.alert('application', %(subject)s, 'x')", {"subject": f"payments.reference:{payment}"})
    assert (await payers.resolve(payment, "RETURN")).status_code == 200
    assert subjects_of(dsn) == ["payments.contradiction:another", f"payments.reference:{payment}"]


async def test_what_is_returning_can_be_completed_instead(payers: Payers, dsn: str) -> None:
    """The bank had paid after all; no job tries to give it back any more."""
    payment = await returning(payers)
    assert (await payers.resolve(payment, "COMPLETE")).json()["state"] == "COMPLETED"
    payers.settle(payment)
    assert (await payers.available(payers.ben), value(dsn, RETURNS)) == ("100.00", 0)
    payers.check()


async def test_a_reversed_posting_cannot_be_completed(payers: Payers, dsn: str) -> None:
    loose = await do(payers.db, lambda tx: open_account(tx, may_go_negative=True))
    payment = (await payers.pay("10.00", payee=loose))["id"]
    await payers.run()
    await reverse(payers, payment)
    await payers.call(payment, "SETTLED")
    assert refused(await payers.resolve(payment, "COMPLETE"))[:2] == (409, "not-resolvable")
    assert (await payers.resolve(payment, "RETURN")).json()["state"] == "PERMANENTLY_FAILED"
    assert (await payers.available(payers.ann), await payers.available(loose)) == ("100.00", "0.00")
    assert value(dsn, "SELECT count(*) FROM ledger.transactions WHERE reverses_id IS NOT NULL") == 1


@pytest.mark.parametrize(
    ("first", "then", "right", "wrong"),
    [("SETTLED", "FAILED", "COMPLETE", "RETURN"), ("FAILED", "SETTLED", "RETURN", "COMPLETE")],
)
async def test_what_is_over_stays_over_and_is_taken_note_of(
    payers: Payers, dsn: str, first: str, then: str, right: str, wrong: str
) -> None:
    made = await payers.pay("10.00")
    await payers.run()
    await payers.call(made["id"], first)
    await payers.call(made["id"], then)
    before, spendable = payers.state(made["id"]), await payers.both()
    assert refused(await payers.resolve(made["id"], wrong))[:2] == (409, "not-resolvable")
    assert (await payers.resolve(made["id"], right)).json()["contradictedAt"] is None
    assert (payers.state(made["id"]), await payers.both()) == (before, spendable)
    assert history_of(dsn, made["id"])[-1] == (before, "resolve")


@pytest.mark.parametrize("first", ["RETURN", "COMPLETE"])
async def test_two_people_decide_once(payers: Payers, dsn: str, first: str) -> None:
    payment = await disputed(payers)
    second = "COMPLETE" if first == "RETURN" else "RETURN"
    with holding_payment(dsn, payment):
        tasks = []
        for waiting, outcome in enumerate((first, second, first), 1):
            tasks.append(asyncio.create_task(payers.resolve(payment, outcome)))
            await until_waiting(dsn, waiting)
    answers = [await task for task in tasks]
    assert [answer.status_code for answer in answers] == [200, 409, 409]
    assert payers.state(payment) == ("COMPLETED" if first == "COMPLETE" else "PERMANENTLY_FAILED")
    assert sum(cause == "resolve" for _, cause in history_of(dsn, payment)) == 1


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"outcome": "RETURN"}, "$.reason"), ({"outcome": "KEEP", "reason": "x"}, "$.outcome"),
        ({"outcome": "RETURN", "reason": ""}, "$.reason"), ({"outcome": "RETURN", "reason": "x" * 201}, "$.reason"),
    ],
)  # fmt: skip
async def test_a_decision_says_what_and_why(payers: Payers, body: dict[str, Any], path: str) -> None:
    made = await payers.pay("10.00")
    answer = await payers.api.client.post(f"/v1/payments/{made['id']}/resolve", json=body, headers=payers.admin)
    assert refused(answer)[::2] == (422, [path])


async def test_only_who_may_decides_and_only_where_there_is_something_to_decide(payers: Payers, dsn: str) -> None:
    made = await payers.pay("10.00")
    path = f"/v1/payments/{made['id']}/resolve"
    body = {"outcome": "COMPLETE", "reason": "please"}
    assert (await payers.api.client.post(path, json=body, headers=payers.headers)).status_code == 403
    assert (await payers.api.client.post(path, json=body)).status_code == 401
    assert refused(await payers.resolve(made["id"], "COMPLETE"))[:2] == (409, "nothing-to-resolve")
    assert refused(await payers.resolve(str(uuid4()), "COMPLETE"))[:2] == (404, "payment-not-found")
    assert (alerts_of(dsn), UUID(made["id"]).version) == ([], 7)


async def test_a_long_history_shows_the_newest_lines_and_says_so(payers: Payers, dsn: str) -> None:
    made = await payers.pay("10.00")
    assert (await payers.read(made["id"]))["hasMoreHistory"] is False
    rows(
        dsn,
        """INSERT INTO payments.history (payment_id, number, at, from_state, to_state, cause)
           SELECT id, n, created_at, state, state, 'x' FROM payments.payments, generate_series(2, 301) AS n""",
    )
    found = await payers.read(made["id"])
    assert ([line["number"] for line in found["history"]], found["hasMoreHistory"]) == (list(range(102, 302)), True)
