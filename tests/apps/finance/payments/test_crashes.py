"""Crashes at every step of a payment: initiation, review, sending, asking, callback, sweep, return (F5 to F7, FAULTS).

kill -9 of real processes, exceptions in ours, and COMMITs that are lost, or whose answers are. The bank of these tests
ignores keys: whoever sends twice charges twice, and is found out.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest

from apps.finance.ledger import service as ledger
from apps.finance.payments import service
from apps.sandbox import bank as sandbox
from apps.sandbox.bank import Behaviour
from duly import failpoints
from duly.auth.issuer import Issuer
from duly.db import Database
from duly.failpoints import FailpointHit
from duly.settings import Settings
from tests.apps.conftest import serving
from tests.apps.finance.payments.acting import Payers, add_rule, do, facts_of
from tests.apps.transfers.acting import new_key
from tests.engine.cli.commands import environment, free_port, running, status, wait_until
from tests.engine.jobs.wire import Cut, breaking_wire
from tests.engine.jobs.witness import expire_leases
from tests.support import finish, python, rows, value

pytestmark = pytest.mark.timeout(240)
WORK = """
    import asyncio, os
    from apps.wiring import app
    from duly.db import Database
    from duly.jobs.worker import Worker

    async def main():
        db = Database(os.environ["DATABASE_URL"])
        ours = {name: one for name, one in app.handlers.items() if name.startswith("payments.")}
        await Worker(db, ours).run_once()
        await db.close()

    asyncio.run(main())
"""
REVIEW = """
    import asyncio, os
    from uuid import UUID
    from apps.finance.payments import service
    from duly.db import Database

    async def main():
        db = Database(os.environ["DATABASE_URL"])
        async with db.transaction() as tx:
            await getattr(service, os.environ["DOES"])(tx, UUID(os.environ["PAYMENT"]), actor="olga")

    asyncio.run(main())
"""
REVERSALS = "SELECT count(*) FROM ledger.transactions WHERE reverses_id IS NOT NULL"


def armed(point: str, action: str = "kill9") -> str:
    """``handler.mid@2`` is the second time that this point is passed."""
    name, _, hit = point.partition("@")
    return f"{name}={action}@{hit or 1}"


@pytest.fixture
def disarmed() -> Iterator[None]:
    """Whatever a test arms in this process."""
    yield
    failpoints.arm("")


async def fail_in_worker(payers: Payers, point: str) -> None:
    """A worker of ours in which an exception is raised there; it goes on with other jobs."""
    failpoints.arm(armed(point, "raise"))
    await payers.run()
    assert failpoints._armed["handler.mid"].seen >= int(point.partition("@")[2] or 1), "it was not reached"
    failpoints.arm("")


async def kill_worker(dsn: str, point: str) -> None:
    """A worker of its own that dies there; meanwhile our loop serves the bank."""
    code, output = await asyncio.to_thread(finish, python(dsn, WORK, failpoints=armed(point)), 90)
    assert code == -signal.SIGKILL, output


async def heal(payers: Payers) -> None:
    """Others take over, and time passes until nothing is under way any more."""
    for _ in range(5):
        expire_leases(payers.dsn)
        rows(payers.dsn, "UPDATE duly.jobs SET run_at = duly.now() WHERE waits = 'retry'")
        await payers.run(minutes=2)
        await payers.retry()
        payers.check()


def sent(payers: Payers) -> int:
    return sum(what == "send" for what, _ in payers.bank.log)


class Process:
    """A real ``duly api`` with failpoints, and somebody who may pay."""

    def __init__(self, dsn: str, home: Path) -> None:
        self.env = environment(
            DULY_APP="apps.wiring:app", DATABASE_URL=dsn, DULY_DATA=str(home), PORT=str(free_port()),
            DULY_ALLOW_UNSAFE_DATABASE="1",
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.env['PORT']}"
        self.log = home.with_suffix(".log")
        issuer = Issuer.open(Settings(data=home), port=int(self.env["PORT"]))
        token = issuer.sign("teller", scopes=["payments:initiate"], roles=["PAYMENTS_INITIATOR"])
        self.headers = {"Authorization": f"Bearer {token}"}

    def run(self, failpoints: str = "") -> Any:
        return running("api", env={**self.env, "DULY_FAILPOINTS": failpoints}, log=self.log)

    def wait(self) -> None:
        wait_until(lambda: status(f"{self.url}/readyz") == 200, what="/readyz is 200")

    def pay(self, body: dict[str, Any], key: str) -> httpx2.Response:
        headers = {**self.headers, "Idempotency-Key": key}
        return httpx2.post(f"{self.url}/v1/payments", json=body, headers=headers, timeout=30)

    def call(self, body: bytes, timestamp: int) -> httpx2.Response:
        headers = sandbox.sign(body, timestamp=timestamp)
        return httpx2.post(f"{self.url}/v1/webhooks/payments/bank", content=body, headers=headers, timeout=30)


@pytest.mark.parametrize(
    ("point", "kept"),
    [
        ("handler.mid", 0),  # screened
        ("handler.mid@2", 0),  # posted, not held
        ("handler.mid@3", 0),  # posted and held, and the payment is written; no fact, no job
        ("idempotency.stored", 0),
        ("http.before_commit", 0),
        ("http.before_response", 1),
    ],
)
async def test_an_api_killed_while_a_payment_begins_has_begun_it_once_or_not_at_all(
    payers: Payers, dsn: str, tmp_path: Path, point: str, kept: int
) -> None:
    """F5: payment, posting, hold, fact, job and key are one commit; the client comes again with its key."""
    body = {"from": str(payers.ann), "to": str(payers.ben), "amount": "10.00", "currency": "PLN"}
    key = new_key()
    process = Process(dsn, tmp_path / "api")
    with process.run(armed(point)) as api:
        await asyncio.to_thread(process.wait)
        with pytest.raises(httpx2.TransportError):
            await asyncio.to_thread(process.pay, body, key)
        assert api.wait(10) == -signal.SIGKILL
    assert value(dsn, "SELECT count(*) FROM payments.payments") == kept
    payers.check()
    with process.run():
        await asyncio.to_thread(process.wait)
        again = await asyncio.to_thread(process.pay, body, key)
    assert again.status_code == 202, again.text
    assert again.headers.get("idempotent-replayed", "false") == ("true" if kept else "false")
    assert value(dsn, "SELECT count(*) FROM payments.payments") == 1
    assert await payers.both() == ("90.00", "0.00")
    payers.check()


SENDING = {
    "worker.claimed": 0,
    "worker.before_handler": 0,
    "handler.mid": 0,  # the try is counted, and nothing was called
    "handler.mid@2": 1,  # called, and nothing is written
    "worker.handler_done": 1,
    "handler.mid@3": 1,  # in the transaction that notes the answer
    "settle.written": 1,
    "inbox.committed": 1,
}


@pytest.mark.parametrize("point", SENDING)
async def test_wherever_a_worker_is_killed_while_sending_nobody_is_charged_twice(
    payers: Payers, dsn: str, point: str
) -> None:
    """F7: an outcome that nobody knows is asked for; in the end the payment has arrived, once."""
    payers.order(Behaviour.ACCEPT, forgets_keys=True)
    made = await payers.pay("10.00")
    await kill_worker(dsn, point)
    assert sent(payers) == SENDING[point]
    payers.check()
    await heal(payers)
    assert (payers.state(made["id"]), sent(payers)) == ("PROCESSING", 1)
    payers.settle(made["id"])
    await payers.run(hours=2)
    assert payers.state(made["id"]) == "COMPLETED"
    assert await payers.both() == ("90.00", "10.00")
    payers.check()


@pytest.mark.parametrize(
    "point", ["handler.mid", "handler.mid@2", "handler.mid@3", "settle.written", "inbox.committed"]
)
async def test_wherever_a_worker_is_killed_while_asking_the_answer_counts_once(
    payers: Payers, dsn: str, point: str
) -> None:
    payers.order(Behaviour.BREAK, forgets_keys=True)
    made = await payers.pay("10.00")
    await payers.run()
    assert payers.state(made["id"]) == "UNKNOWN"
    payers.settle(made["id"])
    payers.clock.advance(minutes=2)
    await kill_worker(dsn, point)
    await heal(payers)
    assert (payers.state(made["id"]), sent(payers)) == ("COMPLETED", 1)
    assert facts_of(dsn, made["id"]) == ["payment.created", "payment.unknown", "payment.completed"]
    assert await payers.both() == ("90.00", "10.00")


@pytest.mark.parametrize(
    "point",
    ["handler.mid@2", "handler.mid@3", "handler.mid@4", "worker.handler_done", "settle.written", "inbox.committed"],
)
async def test_wherever_a_worker_is_killed_while_money_goes_back_it_goes_back_once(
    payers: Payers, dsn: str, point: str
) -> None:
    """F6: between the end of the hold and the reversal, and between the reversal and the payment's state, too."""
    payers.order(Behaviour.DECLINE, forgets_keys=True)
    made = await payers.pay("10.00")
    await kill_worker(dsn, point)
    payers.check()
    await heal(payers)
    assert (payers.state(made["id"]), sent(payers)) == ("PERMANENTLY_FAILED", 1)
    assert value(dsn, REVERSALS) == 1
    assert facts_of(dsn, made["id"])[-1] == "payment.permanently_failed"
    assert await payers.both() == ("100.00", "0.00")


@pytest.mark.parametrize("point", ["handler.mid", "worker.before_commit", "worker.committed"])
async def test_a_sweep_that_is_killed_is_whole_or_not_at_all(payers: Payers, dsn: str, point: str) -> None:
    """F7: PROCESSING and the job that sends are one commit."""
    payers.order(Behaviour.BUSY)
    made = [(await payers.pay("1.00"))["id"] for _ in range(3)]
    await payers.run()
    payers.order(Behaviour.ACCEPT, forgets_keys=True)
    payers.clock.advance(minutes=2)
    rows(dsn, "SELECT duly.schedule('payments.retry')")
    await kill_worker(dsn, point)
    payers.check()
    swept = value(dsn, "SELECT count(*) FROM payments.payments WHERE state = 'PROCESSING'")
    assert swept == (3 if point == "worker.committed" else 0)
    await heal(payers)
    assert {payers.state(one) for one in made} == {"PROCESSING"}
    assert sent(payers) == 6


@pytest.mark.parametrize("said", ["SETTLED", "FAILED"])
@pytest.mark.parametrize(
    ("point", "kept"),
    [("handler.mid", 0), ("handler.mid@2", 0), ("http.before_commit", 0), ("http.before_response", 1)],
)
async def test_an_api_killed_by_a_callback_has_applied_it_once_or_not_at_all(
    payers: Payers, dsn: str, tmp_path: Path, point: str, kept: int, said: str
) -> None:
    """F6, E6.3: the bank calls again with the same event."""
    made = await payers.pay("10.00")
    await payers.run()
    payers.settle(made["id"], "SETTLED" if said == "SETTLED" else "DECLINED")
    event = {"providerEventId": str(uuid4()), "paymentRef": payers.key(made["id"]), "status": said}
    body = json.dumps(event).encode()
    process = Process(dsn, tmp_path / "api")
    with process.run(armed(point)) as api:
        await asyncio.to_thread(process.wait)
        with pytest.raises(httpx2.TransportError):
            await asyncio.to_thread(process.call, body, int(payers.clock.now().timestamp()))
        assert api.wait(10) == -signal.SIGKILL
    over = "COMPLETED" if said == "SETTLED" else "PERMANENTLY_FAILED"
    assert payers.state(made["id"]) == (over if kept else "PROCESSING")
    payers.check()
    again = await payers.call_raw(body)
    assert (again.status_code, again.json()["status"]) == (200, "duplicate" if kept else "applied")
    assert payers.state(made["id"]) == over
    assert await payers.both() == (("90.00", "10.00") if said == "SETTLED" else ("100.00", "0.00"))
    payers.check()


# -- a review, and money that waits to go back ------------------------------------------------------------------------


async def under_review(payers: Payers) -> str:
    await add_rule(payers.db, {"field": "amount", "op": "gt", "value": "50.00"}, "REVIEW")
    made = await payers.pay("60.00")
    assert made["state"] == "PENDING_REVIEW"
    return str(made["id"])


async def returning(payers: Payers) -> str:
    """Declined while the payer's account is closed, which it is not any more; an hour later."""
    payers.order(Behaviour.DECLINE, forgets_keys=True)
    made = await payers.pay("100.00")
    await do(payers.db, lambda tx: ledger.close_account(tx, payers.ann))
    await payers.run()
    assert payers.state(made["id"]) == "RETURNING"
    await do(payers.db, lambda tx: ledger.reopen_account(tx, payers.ann))
    payers.clock.advance(hours=1.1)
    return str(made["id"])


REVIEWS = [("release", "handler.mid"), ("release", "handler.mid@2"), ("reject", "handler.mid")]


@pytest.mark.parametrize("action", ["kill9", "raise"])
@pytest.mark.parametrize(("does", "point"), REVIEWS)
@pytest.mark.usefixtures("disarmed")
async def test_a_decision_that_is_cut_off_was_not_made_and_can_be_made_again(
    payers: Payers, dsn: str, does: str, point: str, action: str
) -> None:
    """F10: the end of the hold, the posting, the new hold, the state, the fact and the job are one commit."""
    payment = await under_review(payers)
    if action == "kill9":
        env = {"DOES": does, "PAYMENT": payment}
        process = python(dsn, REVIEW, failpoints=armed(point), env=env)
        code, output = await asyncio.to_thread(finish, process, 90)
        assert code == -signal.SIGKILL, output
    else:
        failpoints.arm(armed(point, action))
        with pytest.raises(FailpointHit):
            await do(payers.db, lambda tx: getattr(service, does)(tx, UUID(payment), actor="olga"))
        failpoints.arm("")
    assert (payers.state(payment), await payers.available(payers.ann)) == ("PENDING_REVIEW", "40.00")
    payers.check()
    await do(payers.db, lambda tx: getattr(service, does)(tx, UUID(payment), actor="olga"))
    over, left = ("PROCESSING", "40.00") if does == "release" else ("REJECTED", "100.00")
    assert (payers.state(payment), await payers.available(payers.ann)) == (over, left)
    payers.check()


@pytest.mark.parametrize("point", ["handler.mid", "worker.before_commit", "worker.committed"])
async def test_a_review_expires_once_although_its_worker_is_killed(payers: Payers, dsn: str, point: str) -> None:
    payment = await under_review(payers)
    payers.clock.advance(days=7.1)
    await kill_worker(dsn, point)
    assert payers.state(payment) == ("REJECTED" if point == "worker.committed" else "PENDING_REVIEW")
    payers.check()
    await heal(payers)
    assert (payers.state(payment), facts_of(dsn, payment)[-1]) == ("REJECTED", "payment.rejected")
    assert await payers.both() == ("100.00", "0.00")


RETURNS = ["handler.mid", "handler.mid@2", "worker.before_commit", "worker.committed"]


@pytest.mark.parametrize("point", RETURNS)
async def test_money_is_returned_once_although_the_worker_is_killed(payers: Payers, dsn: str, point: str) -> None:
    """F6: the hold was let go, and nothing reversed; reversed, and the state not changed; committed, and not told."""
    payment = await returning(payers)
    await kill_worker(dsn, point)
    assert payers.state(payment) == ("PERMANENTLY_FAILED" if point == "worker.committed" else "RETURNING")
    payers.check()
    await heal(payers)
    assert (payers.state(payment), value(dsn, REVERSALS)) == ("PERMANENTLY_FAILED", 1)
    assert await payers.both() == ("100.00", "0.00")


# -- exceptions -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize("point", ["handler.mid", "handler.mid@2", "handler.mid@3"])
@pytest.mark.parametrize("behaviour", [Behaviour.ACCEPT, Behaviour.DECLINE, Behaviour.BUSY])
async def test_an_exception_while_sending_is_not_a_second_payment(
    payers: Payers, dsn: str, point: str, behaviour: Behaviour
) -> None:
    """F7: before the call, after it, and in the commit that notes the answer: the bank is asked."""
    payers.order(behaviour, forgets_keys=True, count=1)
    made = await payers.pay("10.00")
    await fail_in_worker(payers, point)
    assert sent(payers) == (0 if point == "handler.mid" else 1)
    payers.check()
    payers.order(Behaviour.ACCEPT, forgets_keys=True)
    await heal(payers)
    was_taken = behaviour is not Behaviour.BUSY and point != "handler.mid"
    assert sent(payers) == (1 if was_taken or point == "handler.mid" else 2)
    is_over = was_taken and behaviour is Behaviour.DECLINE
    assert payers.state(made["id"]) == ("PERMANENTLY_FAILED" if is_over else "PROCESSING")
    assert await payers.both() == (("100.00", "0.00") if is_over else ("90.00", "0.00"))


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize("point", ["handler.mid", "handler.mid@2", "handler.mid@3"])
async def test_an_exception_while_asking_costs_a_question(payers: Payers, dsn: str, point: str) -> None:
    payers.order(Behaviour.BREAK, forgets_keys=True)
    made = await payers.pay("10.00")
    await payers.run()
    payers.settle(made["id"])
    payers.clock.advance(minutes=2)
    await fail_in_worker(payers, point)
    assert payers.state(made["id"]) == "UNKNOWN"
    payers.check()
    await heal(payers)
    assert (payers.state(made["id"]), sent(payers)) == ("COMPLETED", 1)


@pytest.mark.usefixtures("disarmed")
async def test_an_exception_while_a_review_expires_or_money_returns(payers: Payers, dsn: str) -> None:
    back = await returning(payers)
    for point in ("handler.mid", "handler.mid@2"):
        await fail_in_worker(payers, point)
        assert (payers.state(back), value(dsn, REVERSALS)) == ("RETURNING", 0)
        payers.check()
        rows(dsn, "UPDATE duly.jobs SET run_at = duly.now() WHERE waits = 'retry'")
    await heal(payers)
    assert (payers.state(back), value(dsn, REVERSALS)) == ("PERMANENTLY_FAILED", 1)
    reviewed = await under_review(payers)
    payers.clock.advance(days=7.1)
    await fail_in_worker(payers, "handler.mid")
    assert payers.state(reviewed) == "PENDING_REVIEW"
    payers.check()
    await heal(payers)
    assert payers.state(reviewed) == "REJECTED"
    payers.check()


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize("point", ["handler.mid", "handler.mid@2"])
async def test_an_exception_in_a_callback_is_an_error_and_the_bank_calls_again(
    payers: Payers, dsn: str, point: str
) -> None:
    made = await payers.pay("10.00")
    await payers.run()
    payers.settle(made["id"], "DECLINED")
    event_id = str(uuid4())
    failpoints.arm(armed(point, "raise"))
    assert (await payers.call(made["id"], "FAILED", event_id=event_id)).status_code == 500
    failpoints.arm("")
    assert (payers.state(made["id"]), value(dsn, REVERSALS)) == ("PROCESSING", 0)
    payers.check()
    assert (await payers.call(made["id"], "FAILED", event_id=event_id)).json() == {"status": "applied"}
    assert (payers.state(made["id"]), value(dsn, REVERSALS)) == ("PERMANENTLY_FAILED", 1)
    payers.check()


# -- COMMIT without an answer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["statement", "reply"])
@pytest.mark.parametrize("has_key", [True, False])
async def test_a_payment_whose_commit_got_no_answer_began_once(
    payers: Payers, dsn: str, tmp_path: Path, cut: Cut, has_key: bool
) -> None:
    """F5, E5.6: the client sees 202, and there is one payment; also without a key."""
    body = {"from": str(payers.ann), "to": str(payers.ben), "amount": "10.00", "currency": "PLN"}
    async with breaking_wire(dsn) as wire:
        db = Database(wire.dsn, settings=Settings(connect_timeout_seconds=2))
        async with serving(db, tmp_path / "cut") as api:
            headers = api.headers("teller", "payments:initiate", "PAYMENTS_INITIATOR")
            assert (await api.client.get("/v1/payments", headers=headers)).status_code == 200
            wire.cut_next = cut
            headers |= {"Idempotency-Key": new_key()} if has_key else {}
            answer = await api.client.post("/v1/payments", json=body, headers=headers)
        await db.close()
    assert (wire.cuts, answer.status_code) == (1, 202), answer.text
    assert rows(dsn, "SELECT id::text FROM payments.payments") == [(answer.json()["id"],)]
    assert await payers.both() == ("90.00", "0.00")
    payers.check()


@pytest.mark.parametrize("cut", ["statement", "reply"])
@pytest.mark.parametrize("said", ["SETTLED", "FAILED"])
async def test_a_callback_whose_commit_got_no_answer_is_applied_once(
    payers: Payers, dsn: str, tmp_path: Path, cut: Cut, said: str
) -> None:
    """F6, E6.3: and when the bank calls again, it is a duplicate."""
    made = await payers.pay("10.00")
    await payers.run()
    payers.settle(made["id"], "SETTLED" if said == "SETTLED" else "DECLINED")
    event = {"providerEventId": str(uuid4()), "paymentRef": payers.key(made["id"]), "status": said}
    body = json.dumps(event).encode()
    signed = sandbox.sign(body, timestamp=int(payers.clock.now().timestamp()))
    path = "/v1/webhooks/payments/bank"
    async with breaking_wire(dsn) as wire:
        db = Database(wire.dsn, settings=Settings(connect_timeout_seconds=2))
        async with serving(db, tmp_path / "cut") as api:
            assert (await api.client.post(path, content=b"{}", headers=signed)).status_code == 401
            wire.cut_next = cut
            answer = await api.client.post(path, content=body, headers=signed)
            assert (wire.cuts, answer.status_code, answer.text) == (1, 200, '{"status":"applied"}')
            again = await api.client.post(path, content=body, headers=signed)
        await db.close()
    assert again.json() == {"status": "duplicate"}
    assert payers.state(made["id"]) == ("COMPLETED" if said == "SETTLED" else "PERMANENTLY_FAILED")
    assert value(dsn, REVERSALS) == (0 if said == "SETTLED" else 1)
    payers.check()
