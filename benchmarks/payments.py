"""Payments under load: F14's budgets of a payment and of a webhook's ingest, over the whole HTTP path with concurrency.

``make bench-payments``. Ratios count; absolute times are this machine's. One api process, no worker: what follows from
a payment is not part of its budget.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import httpx2

from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AccountType, Direction, NewEntry, Posting
from apps.sandbox.bank import sign
from apps.wiring import app
from benchmarks.ledger import Work, timed, until_ready
from duly.auth.issuer import Issuer
from duly.clock import unix_milliseconds
from duly.db import Database
from duly.settings import Settings
from duly.testing import TestServer

PORT = 18243
ACCOUNTS, HOT = 200, 2
BUDGETS = {
    "payment": (150, 500), "payment, 2 hot accounts": (150, 500), "payment without cover": (150, 500),
    "webhook: settled": (100, 500), "webhook: failed": (100, 500), "webhook: duplicate": (100, 500),
}  # fmt: skip


def main() -> None:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=800)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = TestServer(Path(directory) / "pg", durable=True)
        server.start()
        try:
            with server.database(app) as dsn:
                run(dsn, Path(directory), given)
        finally:
            server.stop()


def run(dsn: str, home: Path, given: argparse.Namespace) -> None:
    """The api in a process of its own."""
    accounts = asyncio.run(make_accounts(dsn))
    env = {**os.environ, "DATABASE_URL": dsn, "DULY_DATA": str(home), "DULY_LOG_LEVEL": "warning", "PORT": str(PORT)}
    api = subprocess.Popen([sys.executable, "-m", "duly.cli.main", "api"], env={**env, "DULY_APP": "apps.wiring:app"})
    try:
        asyncio.run(measure(dsn, home, accounts, given))
    finally:
        api.kill()
        api.wait()


async def make_accounts(dsn: str) -> list[UUID]:
    """Customers with much money, and one with none, the last."""
    db = Database(dsn)
    made = []
    amount = Decimal("1000000.00")
    async with db.transaction() as tx:
        cash = await ledger.create_account(tx, name="Cash", kind=AccountType.ASSET, currency="PLN")
        for number in range(ACCOUNTS):
            one = await ledger.create_account(
                tx, name=f"a{number}", kind=AccountType.LIABILITY, currency="PLN", may_go_negative=False
            )
            lines = [NewEntry(cash.id, amount, Direction.DEBIT), NewEntry(one.id, amount, Direction.CREDIT)]
            await ledger.post(tx, Posting(f"deposit {number}", lines))
            made.append(one.id)
        poor = await ledger.create_account(tx, name="poor", kind=AccountType.LIABILITY, currency="PLN")
    await db.close()
    return [*made, poor.id]


async def measure(dsn: str, home: Path, accounts: list[UUID], given: argparse.Namespace) -> None:
    """F14: p50 and p99 of each, as a ratio to its budget."""
    url = f"http://127.0.0.1:{PORT}"
    await until_ready(url)
    token = Issuer.open(Settings(data=home), port=PORT).sign(
        "teller", scopes=["payments:initiate"], roles=["PAYMENTS_INITIATOR"]
    )
    limits = httpx2.Limits(max_connections=given.clients, max_keepalive_connections=given.clients)
    headers = {"Authorization": f"Bearer {token}"}
    rich, poor = accounts[:-1], accounts[-1]
    async with httpx2.AsyncClient(base_url=url, timeout=30, limits=limits, headers=headers) as client:

        def pay(some: list[UUID], *, payer: UUID | None = None, expected: int = 202) -> Work:
            async def work(_number: int) -> httpx2.Response:
                ends = random.sample(some, 2)
                body = {"from": str(payer or ends[0]), "to": str(ends[1]), "amount": "1.00", "currency": "PLN"}
                answer = await client.post("/v1/payments", json=body, headers={"Idempotency-Key": str(uuid4())})
                assert answer.status_code == expected, answer.text
                return httpx2.Response(200)

            return work

        works: dict[str, Work] = {
            "payment": pay(rich), "payment, 2 hot accounts": pay(rich[:HOT]),
            "payment without cover": pay(rich, payer=poor, expected=422),
        }  # fmt: skip
        print(f"HTTP, one api process, {given.clients} clients, with keys; median of {given.rounds} rounds")
        print(f"{'':<26} {'req/s':>7} {'p50 ms':>8} {'p99 ms':>8} {'p50/budget':>11} {'p99/budget':>11}")
        for name, work in works.items():
            await show(name, work, given)
        keys = await read_keys(dsn)
        random.shuffle(keys)
        last: list[bytes] = []

        def call(status: str) -> Work:
            async def work(_number: int) -> httpx2.Response:
                if status == "again":
                    body = last[0]
                else:
                    said = {"providerEventId": str(uuid4()), "paymentRef": str(keys.pop()), "status": status}
                    body = json.dumps(said).encode()
                    last[:] = [body]
                signed = sign(body, timestamp=unix_milliseconds() // 1000)
                return await client.post("/v1/webhooks/payments/bank", content=body, headers=signed)

            return work

        requests = min(given.requests, (len(keys) // 2 - 4) // given.rounds)
        few = argparse.Namespace(**{**vars(given), "requests": requests - requests % given.clients})
        for name, status in (("settled", "SETTLED"), ("failed", "FAILED"), ("duplicate", "again")):
            await show(f"webhook: {name}", call(status), few)


async def show(name: str, work: Work, given: argparse.Namespace) -> None:
    """One line of the table."""
    found = [await timed(work, given.requests, given.clients) for _ in range(given.rounds)]
    per_second, p50, p99 = (statistics.median(column) for column in zip(*found, strict=True))
    half, most = BUDGETS[name]
    print(f"{name:<26} {per_second:>7.0f} {p50:>8.1f} {p99:>8.1f} {p50 / half:>11.2f} {p99 / most:>11.2f}")


async def read_keys(dsn: str) -> list[UUID]:
    """Of payments that a bank may call about."""
    connection = await asyncpg.connect(dsn)
    found = await connection.fetch("SELECT bank_key FROM payments.payments WHERE state = 'PROCESSING'")
    await connection.close()
    return [row[0] for row in found]


if __name__ == "__main__":
    main()
