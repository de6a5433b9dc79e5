"""Officers over real HTTP, customers whose payments are held, and what must be true of cases, said in plain SQL."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import httpx2

from apps.finance.decisions import service as decisions
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AccountType, Direction, NewEntry, Posting
from apps.wiring import app
from duly import Tx
from duly.db import Database
from duly.testing import BusinessClock, drain
from tests.apps.conftest import Api
from tests.apps.finance.ledger import acting as books
from tests.apps.finance.payments.acting import Payers
from tests.support import rows, value

AML = "consumer:aml-screening"
SCOPE, ROLE = "compliance:resolve", "COMPLIANCE_OFFICER"
REJECT = {"decision": "REJECT", "reasonCode": "FRAUD", "reason": "the payee is a shell"}
APPROVE = {"decision": "APPROVE", "reasonCode": "KNOWN_CUSTOMER", "reason": "rent, as every month"}
LARGE = {"field": "amount", "op": "gte", "value": "50.00"}

# Each lists what is wrong; all are empty in a database that nobody can complain about.
INVARIANTS = {
    "a held payment has no case that is open": """
        SELECT p.id FROM payments.payments p WHERE p.state = 'PENDING_REVIEW' AND NOT EXISTS (
            SELECT 1 FROM compliance.cases c
            WHERE c.payment_id = p.id AND c.kind = 'PAYMENT_REVIEW' AND c.status IN ('OPEN', 'PROPOSED'))""",
    "a case waits for a payment that has ended": """
        SELECT c.id, p.state FROM compliance.cases c JOIN payments.payments p ON p.id = c.payment_id
        WHERE c.kind = 'PAYMENT_REVIEW' AND c.status IN ('OPEN', 'PROPOSED') AND c.reopens_id IS NULL
          AND p.state <> 'PENDING_REVIEW'""",
    "a timeline has gaps, or does not end where the case stands": """
        SELECT c.id, c.status, c.version FROM compliance.cases c CROSS JOIN LATERAL (
            SELECT count(*) AS lines, max(number) AS last, (array_agg(kind ORDER BY number DESC))[1] AS kind,
                   count(*) FILTER (WHERE kind IN ('RESOLVED', 'EXPIRED')) AS ends
            FROM compliance.case_events WHERE case_id = c.id) AS t
        WHERE t.lines <> c.version OR t.last <> c.version OR (c.ended_at IS NOT NULL) <> (t.ends = 1)
           OR (c.ended_at IS NOT NULL AND t.kind <> c.status)""",
    "an open case has no timer and nobody heard that it is late, or an ended one has a timer": """
        SELECT c.id, c.status FROM compliance.cases c
        WHERE (c.ended_at IS NULL AND c.overdue_at IS NULL) <> EXISTS (
            SELECT 1 FROM duly.jobs j WHERE j.name = 'compliance.case-due' AND j.entity_id = c.id::text)""",
    "an ended case has an alert that is open": """
        SELECT c.id FROM compliance.cases c JOIN duly.alerts a ON a.subject = 'compliance.overdue:' || c.id
        WHERE c.ended_at IS NOT NULL AND a.resolved_at IS NULL""",
    "the facts of a case do not tell its state": """
        SELECT c.id, c.status, e.types FROM compliance.cases c CROSS JOIN LATERAL (
            SELECT coalesce(array_agg(l.type ORDER BY l.seq), '{}') AS types FROM duly.event_log l
            WHERE l.aggregate_id = c.id::text AND l.topic = 'compliance.events') AS e
        WHERE cardinality(array_positions(e.types, 'compliance.case.opened')) <> 1
           OR cardinality(array_positions(e.types, 'compliance.case.resolved')) <> (c.status = 'RESOLVED')::int
           OR cardinality(array_positions(e.types, 'compliance.case.expired')) <> (c.status = 'EXPIRED')::int
           OR cardinality(array_positions(e.types, 'compliance.case.overdue')) <> (c.overdue_at IS NOT NULL)::int""",
    "what was decided about money was not done": """
        SELECT c.id, c.effect, p.state, t.status FROM compliance.cases c
        LEFT JOIN payments.payments p ON p.id = c.payment_id
        LEFT JOIN ledger.transactions t ON t.id = coalesce(c.transaction_id, p.transaction_id)
        WHERE (c.effect = 'HOLD_VOIDED' AND p.state <> 'REJECTED') OR (c.effect = 'RELEASED' AND t.id IS NULL)
           OR (c.effect = 'RELEASE_FAILED' AND p.state <> 'FAILED')
           OR (c.effect IN ('REVERSED', 'ALREADY_REVERSED') AND t.status <> 'REVERSED')
           OR (c.effect IN ('REVERSED', 'HOLD_VOIDED') AND c.decision <> 'REJECT')
           OR (c.effect IN ('RELEASED', 'RELEASE_FAILED', 'MONEY_STAYS') AND c.decision <> 'APPROVE')""",
    "a case says that money stays which had gone back before": """
        SELECT c.id FROM compliance.cases c LEFT JOIN payments.payments p ON p.id = c.payment_id
        JOIN duly.event_log e ON e.type = 'compliance.case.resolved' AND e.aggregate_id = c.id::text
        JOIN duly.event_log r ON r.type = 'transaction.reversed'
                             AND r.aggregate_id = coalesce(c.transaction_id, p.transaction_id)::text
        WHERE c.effect = 'MONEY_STAYS' AND r.seq < e.seq""",
    "a transaction was screened twice, or half": """
        SELECT e.id FROM duly.processed_events p JOIN duly.events e ON e.id = p.event_id
        LEFT JOIN LATERAL (SELECT count(*) AS number, min(l.decision) AS decision FROM decisions.log l
                           WHERE l.rule_set_id = 'aml-screening' AND l.subject = e.aggregate_id) AS d ON true
        LEFT JOIN LATERAL (SELECT count(*) AS number FROM compliance.alerts a
                           WHERE a.source = 'AML' AND a.transaction_id::text = e.aggregate_id) AS a ON true
        LEFT JOIN LATERAL (SELECT count(*) AS number FROM duly.event_log f
                           WHERE f.type = 'aml.flagged' AND f.aggregate_id = e.aggregate_id) AS f ON true
        WHERE p.consumer = 'aml-screening' AND (d.number <> 1 OR a.number <> (d.decision <> 'APPROVE')::int
              OR f.number <> a.number)""",
    "an alert has no case": """
        SELECT a.id FROM compliance.alerts a WHERE NOT EXISTS (
            SELECT 1 FROM compliance.cases c WHERE c.alert_id = a.id)""",
}


def check_cases(dsn: str) -> None:
    """F9, F10: the ledger's rules, and those of cases."""
    books.check_consistent(dsn)
    wrong = {rule: found for rule, query in INVARIANTS.items() if (found := rows(dsn, query))}
    assert not wrong, wrong


@dataclass
class Office:
    """Officers of one server, and the customers whose money they look at."""

    api: Api
    db: Database
    dsn: str
    clock: BusinessClock
    payers: Payers

    def headers(self, who: str) -> dict[str, str]:
        return self.api.headers(who, SCOPE, ROLE)

    async def ask(
        self, method: str, path: str, body: Any = None, *, who: str = "olga", **headers: str
    ) -> httpx2.Response:
        """One request of an officer's."""
        path = f"/v1/compliance/cases{path}"
        return await self.api.client.request(method, path, json=body, headers=self.headers(who) | headers)

    async def do(
        self, case: str, what: str, body: Any = None, *, who: str = "olga", expect: int = 200
    ) -> dict[str, Any]:
        """One thing with a case, which must be answered so."""
        answer = await self.ask("POST", f"/{case}/{what}", body, who=who)
        assert answer.status_code == expect, answer.text
        said: dict[str, Any] = answer.json()
        return said

    async def read(self, case: str, *, who: str = "olga") -> dict[str, Any]:
        answer = await self.ask("GET", f"/{case}", who=who)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def queue(self, query: str = "", *, who: str = "olga") -> list[dict[str, Any]]:
        answer = await self.ask("GET", f"?{query}", who=who)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["items"]
        return found

    async def hold(self, amount: str = "60.00", **more: Any) -> tuple[str, str]:
        """A payment that is under review: its id, and that of its case."""
        made = await self.payers.pay(amount, **more)
        assert made["state"] == "PENDING_REVIEW", made
        return made["id"], self.case_of(made["id"])

    async def flag(self, amount: str = "60.00") -> tuple[str, str]:
        """A transaction that the rules have found: its id, and that of its case."""
        posted = await self.post(amount)
        await self.screen()
        return posted, self.case_of_transaction(posted)

    async def post(self, amount: str = "60.00", *, debit: UUID | None = None, credit: UUID | None = None) -> str:
        """Money from Ann to Ben, by a bookkeeper."""
        async with self.db.transaction() as tx:
            return str(await post(tx, debit or self.payers.ann, credit or self.payers.ben, amount))

    async def screen(self) -> None:
        """Relay, screen, and do whatever else is due."""
        await drain(self.db, app.handlers)

    async def run(self, **time: float) -> None:
        """Let time pass, and do what is due."""
        self.clock.advance(**time)
        await drain(self.db, app.handlers)

    def case_of(self, payment: str) -> str:
        query = "SELECT id FROM compliance.cases WHERE payment_id = %(id)s AND kind = 'PAYMENT_REVIEW' ORDER BY id DESC"
        return str(value(self.dsn, query, {"id": payment}))

    def case_of_transaction(self, transaction: str) -> str:
        query = "SELECT id FROM compliance.cases WHERE transaction_id = %(id)s ORDER BY id DESC"
        return str(value(self.dsn, query, {"id": transaction}))

    def status(self, case: str) -> str:
        return str(value(self.dsn, "SELECT status FROM compliance.cases WHERE id = %(id)s", {"id": case}))

    def effect(self, case: str) -> str | None:
        found: str | None = value(self.dsn, "SELECT effect FROM compliance.cases WHERE id = %(id)s", {"id": case})
        return found

    def lines(self, case: str) -> list[str]:
        query = "SELECT kind FROM compliance.case_events WHERE case_id = %(id)s ORDER BY number"
        return [kind for (kind,) in rows(self.dsn, query, {"id": case})]

    def facts(self, aggregate: str) -> list[str]:
        """The types of its events, in order."""
        query = """SELECT type FROM duly.event_log
                   WHERE aggregate_id = %(id)s AND topic = 'compliance.events' ORDER BY seq"""
        return [kind for (kind,) in rows(self.dsn, query, {"id": aggregate})]

    def count(self, table: str) -> int:
        return int(value(self.dsn, f"SELECT count(*) FROM {table}"))

    def check(self) -> None:
        check_cases(self.dsn)


async def post(tx: Tx, debit: UUID, credit: UUID, amount: str, *, reference: str | None = None) -> UUID:
    """Money from one customer's account to another's."""
    lines = [NewEntry(debit, Decimal(amount), Direction.DEBIT), NewEntry(credit, Decimal(amount), Direction.CREDIT)]
    return (await ledger.post(tx, Posting(reference or str(uuid4()), lines))).id


async def open_customer(tx: Tx, *, may_go_negative: bool = True, kind: AccountType = AccountType.LIABILITY) -> UUID:
    """An account of somebody's."""
    made = await ledger.create_account(tx, name="Somebody", kind=kind, currency="PLN", may_go_negative=may_go_negative)
    return made.id


async def add_rule(
    db: Database,
    conditions: dict[str, Any],
    outcome: str = "REVIEW",
    *,
    rule_set: str = "aml-screening",
    name: str = "",
) -> str:
    """A rule that decides from now on; its id."""
    written = {
        "name": name or f"{outcome} {uuid4()}", "conditions": conditions, "priority": 0, "terminate": False,
        "action": {"decision": outcome},
    }  # fmt: skip
    async with db.transaction() as tx:
        rule, _ = await decisions.create_rule(tx, rule_set, written=written, actor="tests")
        await decisions.activate_rule(tx, rule.id, version=None, acknowledge_warnings=True, actor="tests")
    return str(rule.id)
