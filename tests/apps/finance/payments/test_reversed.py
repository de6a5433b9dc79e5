"""A bookkeeper reverses a payment's posting: it is not sent, never complete, and not reversed again (F4, F6)."""

from __future__ import annotations

import asyncio
from uuid import UUID

import psycopg
import pytest

from apps.finance.ledger import service as ledger
from apps.finance.payments import service
from apps.sandbox.bank import Behaviour
from duly.db import Database
from tests.apps.finance.payments.acting import Payers, alerts_of, do, facts_of, history_of, open_account
from tests.apps.transfers.acting import until_waiting
from tests.support import rows, value

REVERSALS = "SELECT count(*) FROM ledger.transactions WHERE reverses_id IS NOT NULL"


async def pay(payers: Payers) -> tuple[str, UUID]:
    """10.00 to somebody who may go negative, so that the ledger allows the reversal although the money is on hold."""
    loose = await do(payers.db, lambda tx: open_account(tx, may_go_negative=True))
    return (await payers.pay("10.00", payee=loose))["id"], loose


async def reverse(payers: Payers, payment: str) -> None:
    posted = value(payers.dsn, "SELECT transaction_id FROM payments.payments WHERE id = %(id)s", {"id": payment})
    await do(payers.db, lambda tx: ledger.reverse(tx, posted, reason="by hand"))


async def test_what_was_reversed_before_it_was_sent_never_reaches_the_bank(payers: Payers, dsn: str) -> None:
    payment, loose = await pay(payers)
    await reverse(payers, payment)
    await payers.run()
    found = await payers.read(payment)
    assert (found["state"], found["reason"], found["attempts"]) == ("PERMANENTLY_FAILED", "reversed", 0)
    assert (payers.bank.log, value(dsn, REVERSALS)) == ([], 1)
    assert (await payers.available(payers.ann), await payers.available(loose)) == ("100.00", "0.00")
    assert facts_of(dsn, payment) == ["payment.created", "payment.permanently_failed"]
    payers.check()


async def test_what_was_reversed_while_it_waited_for_a_retry_is_not_sent_again(payers: Payers, dsn: str) -> None:
    payers.order(Behaviour.BUSY)
    payment, loose = await pay(payers)
    await payers.run()
    await reverse(payers, payment)
    await payers.run(minutes=2)
    await payers.retry()
    assert (payers.state(payment), len(payers.bank.log), value(dsn, REVERSALS)) == ("PERMANENTLY_FAILED", 1, 1)
    assert await payers.available(loose) == "0.00"
    payers.check()


@pytest.mark.parametrize("how", ["call", "ask"])
async def test_what_was_reversed_after_it_was_sent_is_never_complete(payers: Payers, dsn: str, how: str) -> None:
    """The bank has paid, and the books say otherwise: for a person."""
    payment, _ = await pay(payers)
    await payers.run()
    await reverse(payers, payment)
    payers.settle(payment)
    if how == "call":
        assert (await payers.call(payment, "SETTLED")).status_code == 200
    else:
        await payers.run(hours=1.1)
    asked = len(payers.bank.log)
    await payers.run(hours=2)
    assert (payers.state(payment), value(dsn, REVERSALS), len(payers.bank.log)) == ("PROCESSING", 1, asked)
    assert history_of(dsn, payment)[-1] == ("PROCESSING", "contradiction")
    assert alerts_of(dsn)[0].startswith("payments.contradiction")
    assert "payment.completed" not in facts_of(dsn, payment)
    assert await payers.available(payers.ann) == "100.00"


async def test_what_is_contradicted_before_it_was_sent_is_left_to_a_person(payers: Payers, dsn: str) -> None:
    """The bank says that it has paid what nobody sent, and somebody reversed it."""
    payment, _ = await pay(payers)
    await reverse(payers, payment)
    await payers.call(payment, "SETTLED")
    await payers.run()
    assert (payers.state(payment), payers.bank.log) == ("PROCESSING", [])
    assert history_of(dsn, payment)[-1] == ("PROCESSING", "contradiction")


async def test_what_was_reversed_and_then_declined_is_over_without_a_second_reversal(payers: Payers, dsn: str) -> None:
    payment, loose = await pay(payers)
    await payers.run()
    await reverse(payers, payment)
    payers.settle(payment, "DECLINED")
    await payers.call(payment, "FAILED")
    assert (payers.state(payment), value(dsn, REVERSALS), alerts_of(dsn)) == ("PERMANENTLY_FAILED", 1, [])
    assert (await payers.available(payers.ann), await payers.available(loose)) == ("100.00", "0.00")
    payers.check()


async def test_a_reversal_and_a_try_at_the_same_moment(payers: Payers, db: Database, dsn: str) -> None:
    """Whoever sends waits for the bookkeeper, and finds the posting reversed."""
    payment, _ = await pay(payers)
    posted = value(dsn, "SELECT transaction_id FROM payments.payments")
    with psycopg.connect(dsn) as rival:
        rival.execute("SELECT ledger.reverse(%s, gen_random_uuid(), 'by hand', '{}', false)", [posted])
        sending = asyncio.create_task(do(db, lambda tx: service.begin_sending(tx, UUID(payment))))
        await until_waiting(dsn, 1)
        rival.commit()
    assert await sending is None
    assert rows(dsn, "SELECT state, reason, attempts FROM payments.payments") == [("PERMANENTLY_FAILED", "reversed", 0)]
