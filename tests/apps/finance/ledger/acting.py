"""Bookkeepers over real HTTP; and what must be true of the ledger whatever they did, said in plain SQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import httpx2

from tests.apps.conftest import Api
from tests.apps.transfers.acting import made
from tests.support import rows, value

ROLES = ("LEDGER_WRITER", "LEDGER_POSTER", "LEDGER_REVERSER", "LEDGER_READER")

# Independent of the code's own checks: each lists what is wrong, and is empty in a ledger nobody can complain about.
INVARIANTS = {
    "a transaction does not sum to zero in each currency": """
        SELECT e.transaction_id FROM ledger.entries e JOIN ledger.accounts a ON a.id = e.account_id
        GROUP BY e.transaction_id, a.currency HAVING sum(e.amount) <> 0""",
    "a transaction has fewer than two entries": """
        SELECT t.id FROM ledger.transactions t
        WHERE (SELECT count(*) FROM ledger.entries e WHERE e.transaction_id = t.id) < 2""",
    "a balance is not the fold of its entries": """
        SELECT b.account_id, b.balance, b.version, f.* FROM ledger.balances b
        CROSS JOIN LATERAL (SELECT coalesce(sum(e.amount), 0) AS fold, count(*) AS entries FROM ledger.entries e
                            WHERE e.account_id = b.account_id) AS f
        WHERE (b.balance, b.version) <> (f.fold, f.entries)""",
    "a running balance is wrong, or a version is missing": """
        SELECT * FROM (SELECT account_id, version, balance_after, row_number() OVER w AS nth, sum(amount) OVER w AS fold
                       FROM ledger.entries WINDOW w AS (PARTITION BY account_id ORDER BY version)) AS e
        WHERE version <> nth OR balance_after <> fold""",
    "what is held is not the sum of the active holds": """
        SELECT b.account_id, b.held FROM ledger.balances b WHERE b.held <> (
            SELECT coalesce(sum(h.amount - h.captured), 0) FROM ledger.holds h
            WHERE h.account_id = b.account_id AND h.status = 'ACTIVE')""",
    "an account that may not is overdrawn": """
        SELECT account_id FROM ledger.balances WHERE NOT may_go_negative AND side * balance - held < 0""",
    "money was made or lost": "SELECT currency FROM ledger.balances GROUP BY 1 HAVING sum(balance) <> 0",
    "a transaction has not exactly one event of its posting": """
        SELECT t.id FROM ledger.transactions t WHERE 1 <> (
            SELECT count(*) FROM duly.event_log l
            WHERE l.topic = 'ledger.events' AND l.aggregate_id = coalesce(t.reverses_id, t.id)::text
              AND l.type = 'transaction.' || CASE WHEN t.reverses_id IS NULL THEN 'posted' ELSE 'reversed' END)""",
    "an event tells of a transaction that is not there": """
        SELECT l.id FROM duly.event_log l WHERE l.type = 'transaction.posted'
          AND NOT EXISTS (SELECT 1 FROM ledger.transactions t WHERE t.id::text = l.aggregate_id)""",
    "an active hold has not its timer, or an ended one has": """
        SELECT h.id, h.status FROM ledger.holds h WHERE (h.status = 'ACTIVE') <> EXISTS (
            SELECT 1 FROM duly.jobs j WHERE j.name = 'ledger.expire-hold' AND j.entity_id = h.id::text)""",
    "captures do not add up": """
        SELECT h.id FROM ledger.holds h WHERE h.captured <> (
            SELECT coalesce(sum(t.amount), 0) FROM ledger.transactions t WHERE t.hold_id = h.id)""",
}


def check_consistent(dsn: str) -> None:
    """F3: sums are zero, balances are folds, money is conserved, events tell the same."""
    wrong = {rule: found for rule, query in INVARIANTS.items() if (found := rows(dsn, query))}
    assert not wrong, wrong


def line(account: str | UUID, amount: str, direction: str) -> dict[str, str]:
    """An entry of a request."""
    return {"accountId": str(account), "amount": amount, "direction": direction}


def move(debit: str | UUID, credit: str | UUID, amount: str) -> list[dict[str, str]]:
    """Two entries."""
    return [line(debit, amount, "DEBIT"), line(credit, amount, "CREDIT")]


class Books:
    """Calls of the API by somebody who has every right in the ledger."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._headers = api.headers("clerk", "ledger:read ledger:write", *ROLES)

    async def get(self, path: str) -> httpx2.Response:
        return await self.api.client.get(path, headers=self._headers)

    async def send(self, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        return await self.api.client.post(path, json=body, headers=self._headers | headers)

    async def open(self, kind: str = "ASSET", currency: str = "PLN", **more: Any) -> str:
        """An account's id."""
        body = {"name": f"{kind} of {currency}", "type": kind, "currency": currency, **more}
        return str(made(await self.send("/v1/accounts", body))["id"])

    async def open_with(self, amount: str, **more: Any) -> str:
        """A customer's account that is never overdrawn, with so much on it."""
        account, cash = await self.open("LIABILITY", mayGoNegative=False, **more), await self.open("ASSET", **more)
        await self.post(cash, account, amount)
        return account

    async def post(self, debit: str, credit: str, amount: str, reference: str | None = None) -> dict[str, Any]:
        """A transaction of two entries."""
        return made(await self.try_post(move(debit, credit, amount), reference))

    async def try_post(
        self, entries: Sequence[dict[str, Any]], reference: str | None = None, **headers: str
    ) -> httpx2.Response:
        body = {"reference": reference or str(uuid4()), "entries": list(entries)}
        return await self.send("/v1/transactions", body, **headers)

    async def reverse(self, transaction: str, reason: str = "typo", **headers: str) -> httpx2.Response:
        return await self.send(f"/v1/transactions/{transaction}/reverse", {"reason": reason}, **headers)

    async def balance(self, account: str, **query: str) -> dict[str, Any]:
        answer = await self.api.client.get(f"/v1/accounts/{account}/balance", headers=self._headers, params=query)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def hold(self, account: str, amount: str, **more: Any) -> dict[str, Any]:
        """A hold that was placed."""
        return made(await self.try_hold(account, amount, **more))

    async def try_hold(self, account: str, amount: str, **more: Any) -> httpx2.Response:
        body = {"amount": amount, "reference": str(uuid4()), **more}
        return await self.send(f"/v1/accounts/{account}/holds", body)

    async def capture(self, hold: str, to: str, **more: Any) -> httpx2.Response:
        body = {"toAccountId": to, "reference": str(uuid4()), **more}
        return await self.send(f"/v1/holds/{hold}/capture", body)

    async def void(self, hold: str) -> httpx2.Response:
        return await self.send(f"/v1/holds/{hold}/void")


def refused(answer: httpx2.Response) -> tuple[int, str, list[str]]:
    """Status, kind of problem, and the paths that it names."""
    body = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    kind = body["type"].removeprefix("urn:duly:problem:")
    return answer.status_code, kind, [error["path"] for error in body.get("errors", [])]


def count(dsn: str, table: str) -> int:
    return int(value(dsn, f"SELECT count(*) FROM {table}"))


def events_of(dsn: str, aggregate: str) -> list[str]:
    """The types of its events, in order."""
    query = "SELECT type FROM duly.event_log WHERE aggregate_id = %(id)s ORDER BY seq"
    return [kind for (kind,) in rows(dsn, query, {"id": aggregate})]
