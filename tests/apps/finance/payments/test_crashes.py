"""kill -9 at every step of a payment: initiation, sending, asking, callback, sweep and reversal (F5 to F7, FAULTS).

The bank of these tests ignores keys: whoever sends twice charges twice, and is found out.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from apps.sandbox import bank as sandbox
from apps.sandbox.bank import Behaviour
from duly.auth.issuer import Issuer
from duly.settings import Settings
from tests.apps.finance.payments.acting import Payers, facts_of
from tests.apps.transfers.acting import new_key
from tests.engine.cli.commands import environment, free_port, running, status, wait_until
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


def armed(point: str) -> str:
    """``handler.mid@2`` is the second time that this point is passed."""
    name, _, hit = point.partition("@")
    return f"{name}=kill9@{hit or 1}"


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
    assert value(dsn, "SELECT count(*) FROM ledger.transactions WHERE reverses_id IS NOT NULL") == 1
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
    with process.run():
        await asyncio.to_thread(process.wait)
        again = await asyncio.to_thread(process.call, body, int(payers.clock.now().timestamp()))
    assert (again.status_code, again.json()["status"]) == (200, "duplicate" if kept else "applied")
    assert payers.state(made["id"]) == over
    assert await payers.both() == (("90.00", "10.00") if said == "SETTLED" else ("100.00", "0.00"))
    payers.check()
