"""Many at once, on real connections: no overdraft, no deadlock, nothing twice (F5 to F7, FAULTS).

A rival session that holds a lock is the barrier: everybody queues behind it, and runs when it lets go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apps.finance.compliance.service import close_expired, open_for_payment
from apps.finance.payments import service
from apps.finance.payments.model import Heard, NotUnderReview, Report, Source
from apps.sandbox.bank import Behaviour
from apps.wiring import app
from duly.db import Database
from duly.settings import Settings
from duly.testing import drain
from tests.apps.finance.ledger.test_races import DEADLOCKS, holding
from tests.apps.finance.payments.acting import Payers, add_rule, alerts_of, do, facts_of, open_account
from tests.apps.transfers.acting import new_key, until_waiting
from tests.support import rows, value


@contextlib.contextmanager
def holding_payment(dsn: str, payment: str) -> Iterator[psycopg.Connection[Any]]:
    """A payment that somebody else has locked, until the block ends."""
    with psycopg.connect(dsn) as rival:
        rival.execute("SELECT 1 FROM payments.payments WHERE id = %s FOR NO KEY UPDATE", [payment])
        yield rival
        rival.rollback()


@pytest.fixture
async def wide(dsn: str) -> Any:
    """A database with a connection for everybody."""
    db = Database(dsn, settings=Settings(pool_size=24))
    yield db
    await db.close()


async def test_concurrent_payments_never_overdraw(payers: Payers, dsn: str) -> None:
    """F5: eight that each want 30.00 of 100.00, all in line before the first begins: three get it."""
    with holding(dsn, str(payers.ann)):
        trying = [asyncio.create_task(payers.try_pay("30.00")) for _ in range(8)]
        await until_waiting(dsn, 8)
    answers = [await one for one in trying]
    assert Counter(answer.status_code for answer in answers) == {202: 3, 422: 5}
    assert await payers.both() == ("10.00", "0.00")
    assert value(dsn, "SELECT count(*) FROM payments.payments WHERE reason = 'insufficient_balance'") == 5
    payers.check()


async def test_concurrent_reviews_and_payments_never_overdraw(payers: Payers, db: Database, dsn: str) -> None:
    """Half of them are only held."""
    await add_rule(db, {"field": "amount", "op": "gt", "value": "30.00"}, "REVIEW")
    with holding(dsn, str(payers.ann)):
        trying = [asyncio.create_task(payers.try_pay("30.00" if n % 2 else "30.01")) for n in range(8)]
        await until_waiting(dsn, 8)
    assert Counter([(await one).status_code for one in trying]) == {202: 3, 422: 5}
    assert float(await payers.available(payers.ann)) < 30
    payers.check()


async def test_a_limit_on_how_often_holds_for_payments_at_the_same_moment(
    payers: Payers, db: Database, dsn: str
) -> None:
    """Velocity facts count what began before, also when it began a millisecond ago."""
    await add_rule(db, {"field": "payments1h", "op": "gt", "value": 3}, "REJECT")
    with holding(dsn, str(payers.ann)):
        trying = [asyncio.create_task(payers.pay("1.00")) for _ in range(8)]
        await until_waiting(dsn, 8)
    assert Counter([(await one)["state"] for one in trying]) == {"PROCESSING": 3, "REJECTED": 5}
    payers.check()


async def test_payments_in_opposite_directions_never_deadlock(payers: Payers, wide: Database, dsn: str) -> None:
    accounts = [await do(wide, lambda tx: open_account(tx, "1000.00")) for _ in range(3)]

    async def pay(number: int) -> None:
        payer, payee = accounts[number % 3], accounts[(number + 1 + number // 3 % 2) % 3]
        async with wide.transaction() as tx:
            made = await service.initiate(
                tx,
                from_id=payer,
                to_id=payee,
                amount=Decimal(1),
                currency="PLN",
                by="t",
                provider="bank",
                tell=open_for_payment,
            )
        async with wide.transaction() as tx:
            status = Report.SETTLED if number % 2 else Report.DECLINED
            await service.note_answer(tx, made.payment.id, Heard(status, Source.CALLBACK))

    for first in range(0, 72, 24):
        await asyncio.gather(*(pay(number) for number in range(first, first + 24)))
    assert value(dsn, DEADLOCKS) == 0
    assert dict(rows(dsn, "SELECT state, count(*)::int FROM payments.payments GROUP BY 1")) == {
        "COMPLETED": 36, "PERMANENTLY_FAILED": 36,
    }  # fmt: skip
    payers.check()


async def test_twenty_requests_with_one_key_pay_once(payers: Payers, dsn: str) -> None:
    key = new_key()
    answers = await asyncio.gather(*(payers.try_pay("10.00", key=key) for _ in range(20)))
    assert {(answer.status_code, answer.content) for answer in answers} == {(202, answers[0].content)}
    assert value(dsn, "SELECT count(*) FROM payments.payments") == 1
    assert await payers.available(payers.ann) == "90.00"


async def test_one_event_many_times_at_once_is_applied_once(payers: Payers, dsn: str) -> None:
    """E6.3."""
    made = await payers.pay("10.00")
    await payers.run()
    payers.settle(made["id"])
    event_id = str(uuid4())
    with holding_payment(dsn, made["id"]):
        trying = [asyncio.create_task(payers.call(made["id"], "SETTLED", event_id=event_id)) for _ in range(6)]
        await until_waiting(dsn, 6)
    assert Counter([(await one).json()["status"] for one in trying]) == {"applied": 1, "duplicate": 5}
    assert facts_of(dsn, made["id"]) == ["payment.created", "payment.completed"]
    payers.check()


async def test_many_calls_of_a_final_failure_give_back_once(payers: Payers, dsn: str) -> None:
    """F6: exactly once."""
    made = await payers.pay("10.00")
    await payers.run()
    payers.settle(made["id"], "DECLINED")
    with holding_payment(dsn, made["id"]):
        trying = [asyncio.create_task(payers.call(made["id"], "FAILED")) for _ in range(6)]
        await until_waiting(dsn, 6)
    assert Counter([(await one).json()["status"] for one in trying]) == {"applied": 1, "ignored": 5}
    assert value(dsn, "SELECT count(*) FROM ledger.transactions WHERE reverses_id IS NOT NULL") == 1
    assert await payers.both() == ("100.00", "0.00")
    payers.check()


async def test_settled_and_failed_at_the_same_moment_end_in_one_of_them(payers: Payers, dsn: str) -> None:
    """The other one is for a person."""
    made = await payers.pay("10.00")
    await payers.run()
    with holding_payment(dsn, made["id"]):
        trying = [asyncio.create_task(payers.call(made["id"], one)) for one in ("SETTLED", "FAILED")]
        await until_waiting(dsn, 2)
    await asyncio.gather(*trying)
    state = payers.state(made["id"])
    assert state in ("COMPLETED", "PERMANENTLY_FAILED")
    assert await payers.both() == (("90.00", "10.00") if state == "COMPLETED" else ("100.00", "0.00"))
    assert alerts_of(dsn) == ["payments.contradiction"]


async def test_the_sweep_waits_for_nobody_and_a_call_wins_over_it(payers: Payers, db: Database, dsn: str) -> None:
    """SKIP LOCKED: a payment that somebody works on is left alone."""
    payers.order(Behaviour.BUSY)
    made = await payers.pay("10.00")
    await payers.run()
    payers.clock.advance(minutes=2)
    with holding_payment(dsn, made["id"]):
        calling = asyncio.create_task(payers.call(made["id"], "SETTLED"))
        await until_waiting(dsn, 1)
        async with asyncio.timeout(10):
            assert await do(db, service.retry_due) == (0, False)
    assert (await calling).json() == {"status": "applied"}
    assert await do(db, service.retry_due) == (0, False)
    assert payers.state(made["id"]) == "COMPLETED"
    payers.check()


async def test_two_sweeps_at_once_send_each_payment_once(payers: Payers, wide: Database, dsn: str) -> None:
    """F7."""
    payers.order(Behaviour.BUSY)
    made = [(await payers.pay("1.00"))["id"] for _ in range(6)]
    await payers.run()
    payers.clock.advance(minutes=2)
    counts = await asyncio.gather(*(do(wide, service.retry_due) for _ in range(4)))
    assert sum(count for count, _ in counts) == 6
    payers.order(Behaviour.ACCEPT)
    await payers.run()
    assert Counter(key for what, key in payers.bank.log if what == "send") == {payers.key(one): 2 for one in made}
    payers.check()


async def test_an_answer_and_a_call_at_the_same_moment(payers: Payers, wide: Database, dsn: str) -> None:
    """Whoever is first; the other finds a payment that is complete."""
    made = await payers.pay("10.00")
    order = await do(wide, lambda tx: service.begin_sending(tx, UUID(made["id"])))
    answer = Heard(Report.PENDING, Source.SEND, "bank-1", attempt=order.attempt)
    with holding_payment(dsn, made["id"]):
        noting = asyncio.create_task(do(wide, lambda tx: service.note_answer(tx, UUID(made["id"]), answer)))
        await until_waiting(dsn, 1)
        calling = asyncio.create_task(payers.call(made["id"], "SETTLED"))
        await until_waiting(dsn, 2)
    await noting
    assert (await calling).json() == {"status": "applied"}
    assert payers.state(made["id"]) == "COMPLETED"
    payers.check()


@pytest.mark.parametrize("first", ["release", "reject", "expire"])
async def test_a_review_ends_once(payers: Payers, wide: Database, dsn: str, first: str) -> None:
    """In each order."""
    await add_rule(wide, {"field": "amount", "op": "gt", "value": "50.00"}, "REVIEW")
    made = await payers.pay("60.00")
    payment_id = UUID(made["id"])
    payers.clock.advance(days=7.1)
    works: dict[str, Any] = {
        "release": lambda tx: service.release(tx, payment_id, actor="olga"),
        "reject": lambda tx: service.reject(tx, payment_id, actor="otto"),
        "expire": lambda tx: service.expire_review(tx, payment_id, tell=close_expired),
    }
    tasks = []
    with holding_payment(dsn, made["id"]):
        for waiting, name in enumerate([first, *(one for one in works if one != first)], 1):
            tasks.append(asyncio.create_task(do(wide, works[name])))
            await until_waiting(dsn, waiting)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    late = [one for one in ended[1:] if one is not None]
    assert not isinstance(ended[0], Exception)
    assert all(isinstance(one, NotUnderReview) for one in late)
    assert payers.state(made["id"]) == ("PROCESSING" if first == "release" else "REJECTED")
    await drain(payers.db, app.handlers)
    payers.check()


async def test_a_bookkeeper_who_is_quicker_leaves_no_cover(payers: Payers, db: Database, dsn: str) -> None:
    """The money goes between our look at the balance and the posting: refused by the ledger, and kept as such."""
    loose = await do(db, lambda tx: open_account(tx, "50.00", may_go_negative=True))
    with psycopg.connect(dsn) as rival:
        rival.execute(
            """SELECT ledger.post(ARRAY[gen_random_uuid()], ARRAY['quick'], ARRAY[1, 1], ARRAY[%s, %s]::uuid[],
               ARRAY[30, -30]::numeric[], ARRAY[false, false], '{}', false)""",
            [loose, payers.ben],
        )
        paying = asyncio.create_task(payers.try_pay("30.00", payer=loose))
        await until_waiting(dsn, 1)
        rival.commit()
    answer = await paying
    assert (answer.status_code, answer.json()["reason"]) == (422, "insufficient_balance")
    assert await payers.available(loose) == "20.00"
    payers.check()
