"""Sending and asking: what is unknown is asked about, nothing is charged twice, what fails goes back once (F6, F7)."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx2
import pytest

from apps.finance.ledger import service as ledger
from apps.finance.payments import service
from apps.finance.payments.gateways import TIMEOUT_VARIABLE, URL_VARIABLE
from apps.finance.payments.model import VALIDITY, WAITS
from apps.sandbox.bank import Behaviour, Charge
from apps.wiring import app
from duly.db import Database
from duly.testing import drain
from tests.apps.finance.payments.acting import Payers, alerts_of, do, facts_of, history_of
from tests.apps.transfers.acting import counting
from tests.engine.cli.commands import free_port
from tests.support import rows, value

LOST = [Behaviour.LOSE, Behaviour.GARBLE, Behaviour.BREAK]


def sends(payers: Payers) -> int:
    return sum(what == "send" for what, _ in payers.bank.log)


def asks(payers: Payers) -> int:
    return sum(what == "ask" for what, _ in payers.bank.log)


async def test_a_payment_that_settles_at_once_is_complete(payers: Payers, dsn: str) -> None:
    payers.order(Behaviour.SETTLE)
    made = await payers.pay("10.00")
    await payers.run()
    found = await payers.read(made["id"])
    assert (found["state"], found["attempts"]) == ("COMPLETED", 1)
    assert found["providerRef"] == payers.bank.charges[payers.key(made["id"])].reference
    assert await payers.both() == ("90.00", "10.00")
    payers.check()


async def test_a_declined_payment_gives_the_money_back_once(payers: Payers, dsn: str) -> None:
    """F6: final, and never sent again."""
    payers.order(Behaviour.DECLINE)
    made = await payers.pay("10.00")
    await payers.run()
    found = await payers.read(made["id"])
    assert (found["state"], found["reason"]) == ("PERMANENTLY_FAILED", "declined")
    assert UUID(found["reversalId"])
    assert await payers.both() == ("100.00", "0.00")
    assert facts_of(dsn, made["id"]) == ["payment.created", "payment.permanently_failed"]
    for _ in range(3):
        await payers.call(made["id"], "FAILED")
        await payers.run(days=1)
        await payers.retry()
    assert (sends(payers), value(dsn, "SELECT count(*) FROM ledger.transactions WHERE reverses_id IS NOT NULL")) == (
        1,
        1,
    )
    payers.check()


@pytest.mark.parametrize("behaviour", LOST)
async def test_an_answer_that_is_lost_is_asked_for_and_nothing_is_sent_again(
    payers: Payers, dsn: str, behaviour: Behaviour
) -> None:
    """The bank has it and we do not know: even a bank that ignores keys charges once."""
    payers.order(behaviour, forgets_keys=True)
    made = await payers.pay("10.00")
    await payers.run()
    assert payers.state(made["id"]) == "UNKNOWN"
    assert facts_of(dsn, made["id"]) == ["payment.created", "payment.unknown"]
    assert await payers.both() == ("90.00", "0.00")
    payers.settle(made["id"])
    await payers.run(minutes=0.5)
    assert asks(payers) == 0, "its request might still be under way"
    await payers.run(minutes=1)
    assert (payers.state(made["id"]), sends(payers), asks(payers)) == ("COMPLETED", 1, 1)
    assert await payers.both() == ("90.00", "10.00")
    payers.check()


async def test_a_question_that_comes_too_early_waits(payers: Payers, dsn: str) -> None:
    """F7: somebody runs the job by hand while our request might still be under way."""
    payers.order(Behaviour.LOSE)
    made = await payers.pay("10.00")
    await payers.run()
    rows(dsn, "UPDATE duly.jobs SET run_at = duly.now() WHERE name = 'payments.ask'")
    await payers.run()
    assert (payers.state(made["id"]), asks(payers)) == ("UNKNOWN", 0)
    await payers.run(minutes=2)
    assert (payers.state(made["id"]), asks(payers)) == ("PROCESSING", 1)
    payers.check()


async def test_the_bank_may_take_a_request_for_a_minute_by_its_own_clock(
    payers: Payers, db: Database, dsn: str
) -> None:
    """F7: whatever our business clock says."""
    made = await payers.pay("10.00")
    payers.clock.advance(days=3)
    before = value(dsn, "SELECT clock_timestamp()")
    order = await do(db, lambda tx: service.begin_sending(tx, UUID(made["id"])))
    assert before + VALIDITY <= order.valid_until <= value(dsn, "SELECT clock_timestamp()") + VALIDITY


async def test_a_time_out_is_an_unknown_outcome(payers: Payers, monkeypatch: pytest.MonkeyPatch) -> None:
    payers.order(Behaviour.LOSE, seconds=3)
    made = await payers.pay("10.00")
    monkeypatch.setenv(TIMEOUT_VARIABLE, "1.5")
    await payers.run()
    found = await payers.read(made["id"])
    assert (found["state"], found["reason"]) == ("UNKNOWN", "timeout")
    payers.check()


async def test_a_request_that_is_taken_after_our_time_out_is_charged_once(
    payers: Payers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before validUntil: it is neither asked about nor sent until it cannot be taken any more."""
    payers.order(Behaviour.LATE, seconds=2, forgets_keys=True)
    made = await payers.pay("10.00")
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.5")
    await payers.run()
    assert (payers.state(made["id"]), payers.bank.charges) == ("UNKNOWN", {})
    monkeypatch.setenv(TIMEOUT_VARIABLE, "10")
    await payers.run(minutes=1.25)
    await payers.retry()
    assert (sends(payers), asks(payers)) == (1, 0)
    await asyncio.gather(*payers.bank._tasks)
    assert payers.bank.charges[payers.key(made["id"])].times == 1
    await payers.run(minutes=1)
    await payers.retry()
    assert (payers.state(made["id"]), sends(payers), asks(payers)) == ("PROCESSING", 1, 1)
    payers.check()


async def test_a_request_that_never_arrived_is_sent_again_once_that_is_certain(payers: Payers, dsn: str) -> None:
    """The bank says that it knows no such payment, after the time in which it might have taken it."""
    payers.order(Behaviour.DROP, count=1, forgets_keys=True)
    made = await payers.pay("10.00")
    await payers.run()
    assert payers.state(made["id"]) == "UNKNOWN"
    await payers.run(minutes=2)
    found = await payers.read(made["id"])
    assert (found["state"], found["reason"], found["retryable"]) == ("FAILED", "payment_not_found", True)
    await payers.retry()
    assert (payers.state(made["id"]), sends(payers)) == ("PROCESSING", 2)
    assert [cause for _, cause in history_of(dsn, made["id"])] == [
        "initiate", "send", "send", "ask", "retry", "send", "send",
    ]  # fmt: skip
    assert len({key for _, key in payers.bank.log}) == 1, "every request has the payment's own key"
    payers.check()


async def test_a_bank_that_cannot_be_asked_is_asked_again_and_a_person_is_told(
    payers: Payers, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a blind resend, however long it takes."""
    payers.order(Behaviour.LOSE)
    made = await payers.pay("10.00")
    await payers.run()
    right = _url()
    monkeypatch.setenv(URL_VARIABLE, f"http://127.0.0.1:{free_port()}")
    for _ in range(12):
        await payers.run(hours=7)
        await payers.retry()
    assert payers.state(made["id"]) == "UNKNOWN"
    assert alerts_of(dsn) == ["payments.open"]
    monkeypatch.setenv(URL_VARIABLE, right)
    payers.settle(made["id"])
    await payers.run(hours=7)
    assert (payers.state(made["id"]), sends(payers)) == ("COMPLETED", 1)
    assert alerts_of(dsn) == [], "nobody needs to look at it any more"
    closed = "SELECT actor, reason FROM duly.audit WHERE action = 'alert.resolved'"
    assert rows(dsn, closed) == [("payments", "the payment is COMPLETED")]
    payers.check()


def _url() -> str:
    return os.environ[URL_VARIABLE]


async def test_a_page_that_is_not_the_banks_word_is_no_answer(payers: Payers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 404 of somebody who does not know the address must not send the money again."""
    payers.order(Behaviour.LOSE)
    made = await payers.pay("10.00")
    await payers.run()
    monkeypatch.setenv(URL_VARIABLE, payers.api.url + "/nowhere")
    await payers.run(minutes=5)
    assert payers.state(made["id"]) == "UNKNOWN"
    payers.check()


async def test_a_busy_bank_gets_it_again_after_the_waits_of_f7_and_then_it_goes_back(payers: Payers, dsn: str) -> None:
    """F7: 1 m, 5 m, 15 m, 1 h, 6 h, 24 h; seven tries; the bank is asked before the money goes back."""
    payers.order(Behaviour.BUSY)
    made = await payers.pay("10.00")
    await payers.run()
    for number, wait in enumerate(WAITS, 1):
        found = await payers.read(made["id"])
        assert (found["state"], found["attempts"], found["reason"]) == ("FAILED", number, "busy")
        await payers.run(minutes=wait / timedelta(minutes=1) - 0.5)
        await payers.retry()
        assert sends(payers) == number, "not before its time"
        await payers.run(minutes=1)
        await payers.retry()
        assert sends(payers) == number + 1
    assert (payers.state(made["id"]), asks(payers)) == ("UNKNOWN", 0)
    assert await payers.both() == ("90.00", "0.00")
    await payers.run(minutes=2)
    found = await payers.read(made["id"])
    assert (found["state"], found["reason"], asks(payers)) == ("PERMANENTLY_FAILED", "gave_up", 1)
    assert await payers.both() == ("100.00", "0.00")
    payers.check()


async def test_what_the_bank_has_after_all_does_not_go_back(payers: Payers, dsn: str) -> None:
    """The last answer said busy, and was wrong: the question finds the payment."""
    payers.order(Behaviour.BUSY)
    made = await payers.pay("10.00")
    await payers.run()
    for wait in WAITS[:-1]:
        await payers.run(minutes=wait / timedelta(minutes=1))
        await payers.retry()
    payers.order(Behaviour.BREAK)
    await payers.run(days=1.1)
    await payers.retry()
    assert payers.state(made["id"]) == "UNKNOWN"
    payers.settle(made["id"])
    await payers.run(minutes=5)
    assert payers.state(made["id"]) == "COMPLETED"
    payers.check()


async def test_nobody_listening_is_certainly_not_taken(payers: Payers, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await payers.pay("10.00")
    monkeypatch.setenv(URL_VARIABLE, f"http://127.0.0.1:{free_port()}")
    await payers.run()
    found = await payers.read(made["id"])
    assert (found["state"], found["reason"], found["retryable"]) == ("FAILED", "unreachable", True)
    payers.check()


async def test_a_bank_that_says_nothing_is_asked_after_an_hour(payers: Payers) -> None:
    """The call that tells of a settlement was lost."""
    made = await payers.pay("10.00")
    await payers.run()
    payers.settle(made["id"])
    await payers.run(minutes=59)
    assert (payers.state(made["id"]), asks(payers)) == ("PROCESSING", 0)
    await payers.run(minutes=2)
    assert (payers.state(made["id"]), asks(payers)) == ("COMPLETED", 1)
    payers.check()


async def test_a_payment_that_hangs_at_the_bank_is_told_to_a_person(payers: Payers, dsn: str) -> None:
    made = await payers.pay("10.00")
    for _ in range(14):
        await payers.run(hours=6.1)
    assert (payers.state(made["id"]), alerts_of(dsn)) == ("PROCESSING", ["payments.open"])
    payers.check()
    payers.settle(made["id"], "DECLINED")
    await payers.call(made["id"], "FAILED")
    assert (payers.state(made["id"]), alerts_of(dsn)) == ("PERMANENTLY_FAILED", [])
    payers.check()


async def test_that_a_payment_was_open_for_long_is_no_news_once_it_is_known_that_the_bank_has_not_got_it(
    payers: Payers, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent again in time; it is no longer the bank that a person should call."""
    payers.order(Behaviour.DROP, count=1, forgets_keys=True)
    made = await payers.pay("10.00")
    await payers.run()
    right = _url()
    monkeypatch.setenv(URL_VARIABLE, f"http://127.0.0.1:{free_port()}")
    for _ in range(5):
        await payers.run(hours=7)
    assert (payers.state(made["id"]), alerts_of(dsn)) == ("UNKNOWN", ["payments.open"])
    monkeypatch.setenv(URL_VARIABLE, right)
    await payers.run(hours=7)
    assert (payers.state(made["id"]), alerts_of(dsn)) == ("FAILED", [])
    payers.check()


async def test_a_try_whose_worker_died_is_asked_about_and_not_repeated(payers: Payers, dsn: str) -> None:
    """It began, and nothing was heard of it: as unknown as a time-out."""
    made = await payers.pay("10.00")
    rows(
        dsn,
        """UPDATE payments.payments SET delivery = 'UNDER_WAY', attempts = 1, sent_at = duly.now(),
           version = version + 1, updated_at = duly.now()""",
    )
    rows(
        dsn,
        """INSERT INTO payments.history (payment_id, number, at, from_state, to_state, cause, detail)
           SELECT id, version, updated_at, state, state, 'send', 'try 1' FROM payments.payments""",
    )
    await payers.run()
    assert (payers.state(made["id"]), sends(payers)) == ("UNKNOWN", 0)
    await payers.run(minutes=2)
    await payers.retry()
    assert (payers.state(made["id"]), sends(payers)) == ("PROCESSING", 1)
    payers.check()


async def test_money_that_cannot_go_back_waits_on_hold_and_a_person_is_told(
    payers: Payers, db: Database, dsn: str
) -> None:
    """Who paid has closed the account meanwhile: once it is open again, the money goes back, once."""
    made = await payers.pay("100.00")
    await do(db, lambda tx: ledger.close_account(tx, payers.ann))
    payers.order(Behaviour.DECLINE)
    await payers.run()
    found = await payers.read(made["id"])
    assert (found["state"], found["reason"], found["reversalId"]) == ("RETURNING", "declined", None)
    assert await payers.available(payers.ben) == "0.00"
    assert alerts_of(dsn) == ["payments.return"]
    payers.check()
    await payers.run(hours=1.1)
    assert payers.state(made["id"]) == "RETURNING"
    await do(db, lambda tx: ledger.reopen_account(tx, payers.ann))
    await payers.run(hours=1.1)
    assert payers.state(made["id"]) == "PERMANENTLY_FAILED"
    assert await payers.both() == ("100.00", "0.00")
    payers.check()


async def test_a_posting_that_somebody_reversed_is_not_reversed_again(payers: Payers, db: Database, dsn: str) -> None:
    """Whoever may reverse transactions has voided the hold and done it by hand."""
    made = await payers.pay("10.00")
    hold = value(dsn, "SELECT incoming_hold_id FROM payments.payments")
    await do(db, lambda tx: ledger.void_hold(tx, hold))
    await do(db, lambda tx: ledger.reverse(tx, UUID(made["transactionId"]), reason="by hand"))
    payers.order(Behaviour.DECLINE)
    await payers.run()
    assert payers.state(made["id"]) == "PERMANENTLY_FAILED"
    assert await payers.both() == ("100.00", "0.00")
    payers.check()


async def test_the_sweep_takes_a_hundred_at_a_time_in_four_statements(payers: Payers, db: Database, dsn: str) -> None:
    """F7."""
    rows(
        dsn,
        """
        WITH made AS (
            INSERT INTO payments.payments (id, from_account_id, to_account_id, amount, currency, state, reason,
                retryable, next_retry_at, attempts, sent_at, initiated_by, provider, bank_key, transaction_id, since,
                created_at, updated_at)
            SELECT duly.uuid7(), %(ann)s, %(ben)s, 1, 'PLN', 'FAILED', 'busy', true, duly.now(), 1, duly.now(), 't',
                   'bank', gen_random_uuid(), gen_random_uuid(), duly.now(), duly.now(), duly.now()
            FROM generate_series(1, 250) RETURNING id, created_at)
        INSERT INTO payments.history (payment_id, number, at, to_state, cause)
        SELECT id, 1, created_at, 'FAILED', 'initiate' FROM made
        """,
        {"ann": payers.ann, "ben": payers.ben},
    )
    ours = {name: one for name, one in app.handlers.items() if name.startswith("payments.retry")}
    assert await do(db, service.retry_due) == (100, True)
    await drain(db, ours)
    assert rows(dsn, "SELECT state, delivery, count(*) FROM payments.payments GROUP BY 1, 2") == [
        ("PROCESSING", "DUE", 250)
    ]
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'payments.send'") == 250
    rows(dsn, "UPDATE duly.jobs SET run_at = duly.now() + interval '1 day' WHERE name = 'payments.send'")
    async with counting(db) as sent:
        assert await do(db, service.retry_due) == (0, False)
    assert len(sent) == 1, sent


async def test_an_open_payment_that_lost_its_job_gets_another(payers: Payers, dsn: str) -> None:
    """A dead letter, or somebody's DELETE: nothing stays stuck."""
    made = await payers.pay("10.00")
    rows(dsn, "DELETE FROM duly.jobs WHERE name = 'payments.send'")
    rows(dsn, "SELECT duly.schedule('payments.recover')")
    await payers.run()
    assert sends(payers) == 0, "too early to call it lost"
    payers.clock.advance(minutes=20)
    rows(dsn, "SELECT duly.schedule('payments.recover')")
    await payers.run()
    assert (payers.state(made["id"]), asks(payers)) == ("FAILED", 1)
    await payers.retry()
    assert (payers.state(made["id"]), sends(payers)) == ("PROCESSING", 1)
    payers.check()


async def test_the_look_for_lost_jobs_goes_on_where_it_stopped(
    payers: Payers, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are open: each run has a limit, and another one goes on."""
    monkeypatch.setattr(service, "OPEN_PAGE", 2)
    monkeypatch.setattr(service, "OPEN_PAGES", 1)
    for _ in range(5):
        await payers.pay("1.00")
    rows(dsn, "DELETE FROM duly.jobs WHERE name = 'payments.send'")
    payers.clock.advance(minutes=20)
    ours = {name: one for name, one in app.handlers.items() if name.startswith("payments.recover")}
    rows(dsn, "SELECT duly.schedule('payments.recover')")
    await drain(payers.db, ours)
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'payments.ask'") == 5
    assert value(dsn, "SELECT count(*) FROM duly.jobs WHERE name = 'payments.recover-more'") == 0


async def test_a_bank_refuses_what_comes_too_late(payers: Payers) -> None:
    """A request that was delayed somewhere is not taken: that is why "no such payment" can be believed."""
    async with httpx2.AsyncClient() as client:
        answer = await client.post(
            _url() + "/payments",
            json={
                "reference": "late", "from": "a", "to": "b", "amount": "1.00", "currency": "PLN",
                "validUntil": "2026-01-01T00:00:00+00:00", "callbackUrl": "http://127.0.0.1/",
            },
        )  # fmt: skip
    assert (answer.status_code, payers.bank.charges) == (410, {})


async def test_two_payments_with_one_reference_at_the_bank_are_told_to_a_person(
    payers: Payers, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await payers.pay("10.00")
    await payers.run()
    second = await payers.pay("10.00")
    reference = payers.bank.charges[payers.key(first["id"])].reference

    def give_the_same(given: Any, *_: Any) -> Charge:
        return payers.bank.charges.setdefault(given.reference, Charge(reference, "PENDING", "10.00", "PLN"))

    monkeypatch.setattr(payers.bank, "_charge", give_the_same)  # a bad bank
    await payers.run()
    found = await payers.read(second["id"])
    assert (found["state"], found["providerRef"]) == ("PROCESSING", None)
    assert alerts_of(dsn) == ["payments.reference"]
