"""People who pay, a bank on a real socket, and what must be true of money whatever they did, said in plain SQL."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import httpx2
from fastapi import FastAPI

from apps.finance.decisions import service as decisions
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AccountType, Direction, NewEntry, Posting
from apps.sandbox import bank as sandbox
from apps.sandbox.bank import Bank, Behaviour, Orders
from apps.wiring import app
from duly import Tx
from duly.db import Database
from duly.runtime.supervisor import create_server
from duly.settings import Settings
from duly.testing import BusinessClock, drain
from tests.apps.conftest import Api
from tests.apps.finance.ledger import acting as books
from tests.engine.http.serving import listen
from tests.support import rows, value

HANDLERS = {
    name: one for name, one in app.handlers.items() if name not in ("consumer:aml-screening", "compliance.case-due")
}
"""Whoever is counted to be killed at some step is not to meet those of compliance."""

# Each lists what is wrong; all are empty in a database that nobody can complain about.
INVARIANTS = {
    "an open payment has no job that goes on with it": """
        SELECT p.id, p.state, p.delivery FROM payments.payments p
        WHERE p.contradicted_at IS NULL
          AND p.state IN ('PROCESSING', 'UNKNOWN', 'PENDING_REVIEW', 'RETURNING') AND NOT EXISTS (
            SELECT 1 FROM duly.jobs j WHERE j.entity_id = p.id::text AND j.name = ANY(CASE p.state
                WHEN 'PROCESSING' THEN ARRAY['payments.send', 'payments.ask'] WHEN 'UNKNOWN' THEN ARRAY['payments.ask']
                WHEN 'RETURNING' THEN ARRAY['payments.return'] ELSE ARRAY['payments.expire-review'] END))""",
    "a posting belongs to no payment, or a payment has not its posting": """
        SELECT p.id, t.id FROM payments.payments p
        FULL JOIN (SELECT * FROM ledger.transactions WHERE reference LIKE 'payment %' AND reverses_id IS NULL) AS t
            ON t.id = p.transaction_id AND t.amount = p.amount AND t.reference = 'payment ' || p.id
        WHERE (t.id IS NULL) <> (p.transaction_id IS NULL)""",
    "money went back, or did not, against the payment's state": """
        SELECT p.id, p.state, t.status FROM payments.payments p JOIN ledger.transactions t ON t.id = p.transaction_id
        LEFT JOIN ledger.transactions r ON r.reverses_id = t.id
        WHERE ((p.state = 'PERMANENTLY_FAILED') <> (t.status = 'REVERSED') OR p.reversal_id IS DISTINCT FROM r.id)
          -- what a bookkeeper reversed, and not we, is over when the payment is sent, or the bank or a person says so
          AND NOT (coalesce(r.reason NOT LIKE 'payment ' || p.id || ':%', false)
                   AND (p.retryable OR p.state IN ('PROCESSING', 'UNKNOWN', 'RETURNING')))""",
    "money is held that should not be, or not held that should be": """
        SELECT p.id, p.state, h.status FROM payments.payments p JOIN ledger.holds h ON h.id = p.incoming_hold_id
        WHERE (h.status = 'ACTIVE') <> (p.state IN ('PROCESSING', 'UNKNOWN', 'RETURNING') OR p.retryable)
        UNION ALL
        SELECT p.id, p.state, h.status FROM payments.payments p JOIN ledger.holds h ON h.id = p.review_hold_id
        WHERE (h.status = 'ACTIVE') <> (p.state = 'PENDING_REVIEW')
        UNION ALL
        SELECT NULL, h.reference, h.status FROM ledger.holds h WHERE h.reference LIKE 'payment %' AND NOT EXISTS (
            SELECT 1 FROM payments.payments p WHERE h.id IN (p.review_hold_id, p.incoming_hold_id))""",
    "a history has gaps, or does not end where the payment stands": """
        SELECT p.id, p.state, p.version FROM payments.payments p CROSS JOIN LATERAL (
            SELECT count(*) AS lines, max(number) AS last, (array_agg(to_state ORDER BY number DESC))[1] AS state,
                   bool_and(from_state IS NOT DISTINCT FROM before) AS joins,
                   count(*) FILTER (WHERE cause = 'send' AND detail LIKE 'try %%') AS tries
            FROM (SELECT *, lag(to_state) OVER (ORDER BY number) AS before FROM payments.history
                  WHERE payment_id = p.id) AS l) AS h
        WHERE (h.lines, h.last, h.state, h.joins, h.tries) IS DISTINCT FROM
              (p.version::bigint, p.version, p.state, true, p.attempts::bigint)""",
    "somebody is to look at a payment that is over": """
        SELECT a.subject, p.state FROM payments.payments p JOIN duly.alerts a
            ON a.subject = ANY(ARRAY['payments.open:' || p.id, 'payments.amount:' || p.id, 'payments.return:' || p.id])
        WHERE a.resolved_at IS NULL AND NOT p.retryable AND p.state NOT IN ('PROCESSING', 'UNKNOWN', 'RETURNING')""",
    "a payment's facts do not tell its state": """
        SELECT p.id, p.state, e.types FROM payments.payments p CROSS JOIN LATERAL (
            SELECT coalesce(array_agg(l.type ORDER BY l.seq), '{}') AS types FROM duly.event_log l
            WHERE l.aggregate_id = p.id::text AND l.topic = 'payments.events') AS e
        WHERE (p.transaction_id IS NOT NULL) <> ('payment.created' = ANY(e.types))
           OR (p.state = 'COMPLETED') <> ('payment.completed' = ANY(e.types))
           OR (p.state = 'PERMANENTLY_FAILED') <> ('payment.permanently_failed' = ANY(e.types))
           OR (p.state = 'REJECTED') <> ('payment.rejected' = ANY(e.types))
           OR cardinality(array_positions(e.types, 'payment.created')) > 1
           OR cardinality(array_positions(e.types, 'payment.completed')) > 1
           OR cardinality(array_positions(e.types, 'payment.permanently_failed')) > 1""",
}


def check_consistent(dsn: str, bank: Bank | None = None) -> None:
    """F5 to F7: the ledger's rules, and those of payments; with a bank, that both tell the same of every payment."""
    books.check_consistent(dsn)
    wrong = {rule: found for rule, query in INVARIANTS.items() if (found := rows(dsn, query))}
    assert not wrong, wrong
    if bank is None:
        return
    assert {charge.times for charge in bank.charges.values()} <= {1}, "somebody was charged twice"
    states = {str(key): state for key, state in rows(dsn, "SELECT bank_key, state FROM payments.payments")}
    for key, charge in bank.charges.items():
        allowed = {"PROCESSING", "UNKNOWN", "FAILED"}
        allowed |= {"COMPLETED"} if charge.status == "SETTLED" else set()
        allowed |= {"PERMANENTLY_FAILED", "RETURNING"} if charge.status == "DECLINED" else set()
        assert states[key] in allowed, (states[key], charge)


@contextlib.asynccontextmanager
async def serving_bank(bank: Bank) -> AsyncIterator[str]:
    """The bank on a socket; its address."""
    served = FastAPI()
    served.include_router(sandbox.create_router(bank))
    listener = listen()
    server = create_server(served, Settings(shutdown_grace_seconds=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{sandbox.PATH}"
    finally:
        server.should_exit = True
        await task


@dataclass
class Payers:
    """Two customers with money, somebody who may pay for them, and the bank."""

    api: Api
    db: Database
    dsn: str
    clock: BusinessClock
    bank: Bank
    ann: UUID
    ben: UUID

    @property
    def headers(self) -> dict[str, str]:
        return self.api.headers("teller", "payments:initiate", "PAYMENTS_INITIATOR")

    @property
    def admin(self) -> dict[str, str]:
        return self.api.headers("boss", "payments:admin", "PAYMENTS_ADMIN")

    async def resolve(self, payment: str, outcome: str, reason: str = "asked the bank") -> httpx2.Response:
        """What a person decides."""
        body = {"outcome": outcome, "reason": reason}
        return await self.api.client.post(f"/v1/payments/{payment}/resolve", json=body, headers=self.admin)

    async def send(self, body: Any, **headers: str) -> httpx2.Response:
        return await self.api.client.post("/v1/payments", json=body, headers=self.headers | headers)

    async def try_pay(
        self, amount: str = "10.00", *, payer: UUID | None = None, payee: UUID | None = None, key: str | None = None
    ) -> httpx2.Response:
        body = {"from": str(payer or self.ann), "to": str(payee or self.ben), "amount": amount, "currency": "PLN"}
        return await self.send(body, **({"Idempotency-Key": key} if key else {}))

    async def pay(self, amount: str = "10.00", **more: Any) -> dict[str, Any]:
        """What a 202 says."""
        answer = await self.try_pay(amount, **more)
        assert answer.status_code == 202, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def read(self, payment: str) -> dict[str, Any]:
        answer = await self.api.client.get(f"/v1/payments/{payment}", headers=self.headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def run(self, *, minutes: float = 0, hours: float = 0, days: float = 0) -> None:
        """Let time pass, and do what is due."""
        self.clock.advance(minutes=minutes, hours=hours, days=days)
        await drain(self.db, HANDLERS)

    async def retry(self) -> None:
        """What happens every minute."""
        rows(self.dsn, "SELECT duly.schedule('payments.retry')")
        await drain(self.db, HANDLERS)

    def order(self, behaviour: Behaviour | None, **more: Any) -> None:
        """Tell the bank how to behave; it does not call by itself in these tests."""
        self.bank.order(Orders(behaviour=behaviour, **{"calls": False, "seconds": 0.01, **more}))

    def state(self, payment: str) -> str:
        return str(value(self.dsn, "SELECT state FROM payments.payments WHERE id = %(id)s", {"id": payment}))

    def key(self, payment: str) -> str:
        return str(value(self.dsn, "SELECT bank_key FROM payments.payments WHERE id = %(id)s", {"id": payment}))

    def settle(self, payment: str, status: str = "SETTLED") -> None:
        """At the bank, which tells nobody."""
        self.bank.charges[self.key(payment)].status = status

    async def call(self, payment: str, status: str, *, event_id: str | None = None, **more: Any) -> httpx2.Response:
        """The bank calls, properly signed."""
        said = {"providerEventId": event_id or str(uuid4()), "paymentRef": self.key(payment), "status": status}
        return await self.call_raw(json.dumps(said | more).encode())

    async def call_raw(self, body: bytes, *, provider: str = "bank", **headers: str) -> httpx2.Response:
        signed = sandbox.sign(body, timestamp=int(self.clock.now().timestamp()))
        path = f"/v1/webhooks/payments/{provider}"
        return await self.api.client.post(path, content=body, headers=signed | headers)

    async def available(self, account: UUID) -> str:
        async with self.db.transaction() as tx:
            return str((await ledger.get_balance(tx, account)).available)

    async def both(self) -> tuple[str, str]:
        """What Ann and Ben can spend."""
        return await self.available(self.ann), await self.available(self.ben)

    def check(self) -> None:
        check_consistent(self.dsn, self.bank)


async def open_account(
    tx: Tx, amount: str = "0", *, kind: AccountType = AccountType.LIABILITY, may_go_negative: bool = False,
    currency: str = "PLN",
) -> UUID:  # fmt: skip
    """A customer's account with so much on it, from a cash account of its own."""
    account = await ledger.create_account(
        tx, name="Customer", kind=kind, currency=currency, may_go_negative=may_go_negative
    )
    if Decimal(amount):
        cash = await ledger.create_account(tx, name="Cash", kind=AccountType.ASSET, currency=currency)
        ways = (Direction.DEBIT, Direction.CREDIT) if kind.side == -1 else (Direction.CREDIT, Direction.DEBIT)
        lines = [NewEntry(cash.id, Decimal(amount), ways[0]), NewEntry(account.id, Decimal(amount), ways[1])]
        await ledger.post(tx, Posting(f"deposit {account.id}", lines))
    return account.id


async def add_rule(db: Database, conditions: dict[str, Any], outcome: str) -> None:
    """A rule that screens payments from now on."""
    written = {
        "name": f"{outcome} {uuid4()}", "conditions": conditions, "priority": 0, "terminate": False,
        "action": {"decision": outcome},
    }  # fmt: skip
    async with db.transaction() as tx:
        rule, _ = await decisions.create_rule(tx, "payment-screening", written=written, actor="tests")
        await decisions.activate_rule(tx, rule.id, version=None, acknowledge_warnings=True, actor="tests")


def facts_of(dsn: str, payment: str) -> list[str]:
    """The types of its events, in order."""
    query = "SELECT type FROM duly.event_log WHERE aggregate_id = %(id)s AND topic = 'payments.events' ORDER BY seq"
    return [kind for (kind,) in rows(dsn, query, {"id": payment})]


def history_of(dsn: str, payment: str) -> list[tuple[str, str]]:
    """(to_state, cause) of each line."""
    query = "SELECT to_state, cause FROM payments.history WHERE payment_id = %(id)s ORDER BY number"
    return [(state, cause) for state, cause in rows(dsn, query, {"id": payment})]


def alerts_of(dsn: str) -> list[str]:
    """Their subjects, without what each is about."""
    return [subject.partition(":")[0] for subject in subjects_of(dsn)]


def subjects_of(dsn: str) -> list[str]:
    query = "SELECT subject FROM duly.alerts WHERE kind = 'application' AND resolved_at IS NULL ORDER BY subject"
    return [subject for (subject,) in rows(dsn, query)]


Work = Callable[[Tx], Coroutine[Any, Any, Any]]


async def do(db: Database, work: Work) -> Any:
    async with db.transaction() as tx:
        return await work(tx)
