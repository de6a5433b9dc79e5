"""The ledger under load: F14's budgets over the whole HTTP path, and postings a second beside a bare posting function.

``make bench-ledger``. Ratios count; absolute times are this machine's. The bare function locks, inserts and updates,
and checks nothing: no triggers, no events, no statuses, no holds, no versions.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx2

from apps.finance.ledger import service
from apps.finance.ledger.model import AccountType, Direction, NewEntry, Posting
from apps.wiring import app
from duly.auth.issuer import Issuer
from duly.clock import monotonic
from duly.db import Database
from duly.settings import Settings
from duly.testing import TestServer

PORT = 18241
ACCOUNTS, HOT = 1_000, 2
BUDGETS = {"create account": (80, 200), "balance": (15, 50), "post": (100, 300), "post, 2 hot accounts": (100, 300)}
ROLES = ["LEDGER_WRITER", "LEDGER_POSTER", "LEDGER_REVERSER", "LEDGER_READER"]
BARE = """
CREATE SCHEMA bare;
CREATE TABLE bare.balances (account_id uuid PRIMARY KEY, balance bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50);
CREATE TABLE bare.transactions (id uuid PRIMARY KEY, reference text NOT NULL UNIQUE, posted_at timestamptz NOT NULL);
CREATE TABLE bare.entries (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, transaction_id uuid NOT NULL,
                           account_id uuid NOT NULL, amount bigint NOT NULL);
CREATE INDEX ON bare.entries (account_id, id);
CREATE FUNCTION bare.post(new_id uuid, new_reference text, debit uuid, credit uuid, amount bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM bare.balances b WHERE b.account_id IN (debit, credit) ORDER BY b.account_id FOR NO KEY UPDATE;
    INSERT INTO bare.transactions VALUES (new_id, new_reference, now());
    INSERT INTO bare.entries (transaction_id, account_id, amount)
    VALUES (new_id, debit, amount), (new_id, credit, -amount);
    UPDATE bare.balances b SET balance = b.balance + CASE b.account_id WHEN debit THEN amount ELSE -amount END
    WHERE b.account_id IN (debit, credit);
END $$;
"""
Work = Callable[[int], Awaitable[Any]]


def main() -> None:
    """Run everything and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16, help="connections, without HTTP")
    parser.add_argument("--http-clients", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--requests", type=int, default=1_600)
    parser.add_argument("--postings", type=int, default=4_000)
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
    """First without HTTP, then with."""
    accounts = asyncio.run(measure(dsn, given))
    env = {**os.environ, "DATABASE_URL": dsn, "DULY_DATA": str(home), "DULY_LOG_LEVEL": "warning", "PORT": str(PORT)}
    api = subprocess.Popen([sys.executable, "-m", "duly.cli.main", "api"], env={**env, "DULY_APP": "apps.wiring:app"})
    try:
        asyncio.run(measure_http(home, accounts, given))
    finally:
        api.kill()
        api.wait()


async def measure(dsn: str, given: argparse.Namespace) -> list[UUID]:
    """The function and the service; the accounts that were made for it."""
    db = Database(dsn, settings=Settings(pool_size=given.clients))
    accounts = await make_accounts(db)
    await prepare_bare(dsn, accounts)
    await compare_functions(db, dsn, accounts, given)
    await compare_folding(db, accounts, given)
    await db.close()
    return accounts


async def make_accounts(db: Database) -> list[UUID]:
    """A thousand, that may go negative."""
    async with db.transaction() as tx:
        return [
            (await service.create_account(tx, name=f"a{n}", kind=AccountType.LIABILITY, currency="PLN")).id
            for n in range(ACCOUNTS)
        ]


async def prepare_bare(dsn: str, accounts: list[UUID]) -> None:
    """The function that this is compared with, and its tables."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(BARE)
    await connection.execute("INSERT INTO bare.balances SELECT unnest($1::uuid[])", accounts)
    await connection.close()


# -- without HTTP ----------------------------------------------------------------------------------------------------


async def compare_functions(db: Database, dsn: str, accounts: list[UUID], given: argparse.Namespace) -> None:
    """Postings a second, each its own commit: the bare function, ledger.post, and the service on top of it."""
    pool = await asyncpg.create_pool(dsn, min_size=given.clients, max_size=given.clients)
    print(f"postings a second, each its own commit, {given.clients} connections, median of {given.rounds}")
    print(f"{'':<28} {'1,000 accounts':>16} {'2 hot accounts':>16}")
    rates: dict[str, list[float]] = {}
    for name in ("bare plpgsql", "ledger.post", "service.post"):
        for among in (ACCOUNTS, HOT):
            some = accounts[:among]
            work = {"bare plpgsql": bare_work, "ledger.post": function_work}.get(name)
            do = work(pool, some) if work else service_work(db, some)
            found = [await rate(do, given.postings, given.clients) for _ in range(given.rounds)]
            rates.setdefault(name, []).append(statistics.median(found))
        print(f"{name:<28} {rates[name][0]:>16.0f} {rates[name][1]:>16.0f}")
    for name in ("ledger.post", "service.post"):
        ratios = [ours / bare for ours, bare in zip(rates[name], rates["bare plpgsql"], strict=True)]
        print(f"{name + ' / bare':<28} {ratios[0]:>16.2f} {ratios[1]:>16.2f}")
    await pool.close()


def bare_work(pool: Any, accounts: list[UUID]) -> Work:
    """A posting by the bare function."""

    async def work(_number: int) -> None:
        debit, credit = random.sample(accounts, 2)
        async with pool.acquire() as connection:
            await connection.execute("SELECT bare.post($1, $2, $3, $4, 100)", uuid4(), str(uuid4()), debit, credit)

    return work


def function_work(pool: Any, accounts: list[UUID]) -> Work:
    """A posting by the ledger's function, on the same kind of connection."""
    lines = "ARRAY[1, 1], $3, ARRAY[1, -1], ARRAY[false, false]"
    sql = "SELECT outcome FROM ledger.post($1, $2, " + lines + ", '{}', false, 'clerk')"

    async def work(_number: int) -> None:
        async with pool.acquire() as connection:
            outcome = await connection.fetchval(sql, [uuid4()], [str(uuid4())], random.sample(accounts, 2))
            assert outcome == "posted", outcome

    return work


def service_work(db: Database, accounts: list[UUID]) -> Work:
    """A posting by the service, in a session of its own."""

    async def work(_number: int) -> None:
        async with db.transaction() as tx:
            await service.post(tx, posting(accounts))

    return work


def posting(accounts: list[UUID]) -> Posting:
    """One zloty from somewhere to somewhere else."""
    debit, credit = random.sample(accounts, 2)
    one = Decimal(1)
    return Posting(str(uuid4()), [NewEntry(debit, one, Direction.DEBIT), NewEntry(credit, one, Direction.CREDIT)])


async def compare_folding(db: Database, accounts: list[UUID], given: argparse.Namespace) -> None:
    """What it would bring to put concurrent postings into one commit: batches of the size of the queue."""
    print("\npostings a second when folded into one statement and one commit")
    for among in (ACCOUNTS, HOT):
        for size in (1, 4, 16, 100, 1_000):

            async def work(_number: int, some: list[UUID] = accounts[:among], size: int = size) -> None:
                async with db.transaction() as tx:
                    await service.post_many(tx, [posting(some) for _ in range(size)])

            batches = max(given.clients, given.postings // size)
            found = [size * await rate(work, batches, given.clients) for _ in range(given.rounds)]
            print(f"  {among:>5} accounts, {size:>5} a commit: {statistics.median(found):>8.0f}")


async def rate(work: Work, count: int, clients: int) -> float:
    """How often a second, by so many at once."""

    async def one_client() -> None:
        for number in range(count // clients):
            await work(number)

    await work(-1)
    began = monotonic()
    await asyncio.gather(*(one_client() for _ in range(clients)))
    return count / (monotonic() - began)


# -- with HTTP -------------------------------------------------------------------------------------------------------


async def measure_http(home: Path, accounts: list[UUID], given: argparse.Namespace) -> None:
    """F14: p50 and p99 of each, as a ratio to its budget."""
    url = f"http://127.0.0.1:{PORT}"
    await until_ready(url)
    token = Issuer.open(Settings(data=home), port=PORT).sign(
        "clerk", scopes=["ledger:read", "ledger:write"], roles=ROLES
    )
    headers = {"Authorization": f"Bearer {token}"}
    for clients in given.http_clients:
        limits = httpx2.Limits(max_connections=clients, max_keepalive_connections=clients)
        print(f"\nHTTP, one api process, {clients} clients, with keys; median of {given.rounds} rounds")
        print(f"{'':<22} {'req/s':>7} {'p50 ms':>8} {'p99 ms':>8} {'p50/budget':>11} {'p99/budget':>11}")
        async with httpx2.AsyncClient(base_url=url, timeout=30, limits=limits, headers=headers) as client:
            for name, work in http_works(client, accounts).items():
                found = [await timed(work, given.requests, clients) for _ in range(given.rounds)]
                per_second, p50, p99 = (statistics.median(column) for column in zip(*found, strict=True))
                half, most = BUDGETS[name]
                print(f"{name:<22} {per_second:>7.0f} {p50:>8.1f} {p99:>8.1f} {p50 / half:>11.2f} {p99 / most:>11.2f}")


def http_works(client: httpx2.AsyncClient, accounts: list[UUID]) -> dict[str, Work]:
    """The requests that have a budget; each that changes something has a key of its own."""

    def keyed() -> dict[str, str]:
        return {"Idempotency-Key": str(uuid4())}

    async def create(_number: int) -> httpx2.Response:
        body = {"name": "Cash", "type": "ASSET", "currency": "PLN"}
        return await client.post("/v1/accounts", json=body, headers=keyed())

    async def read(_number: int) -> httpx2.Response:
        return await client.get(f"/v1/accounts/{random.choice(accounts)}/balance")

    def post(some: list[UUID]) -> Work:
        async def work(_number: int) -> httpx2.Response:
            lines = zip(random.sample(some, 2), ("DEBIT", "CREDIT"), strict=True)
            entries = [{"accountId": str(one), "amount": "1.00", "direction": way} for one, way in lines]
            body = {"reference": str(uuid4()), "entries": entries}
            return await client.post("/v1/transactions", json=body, headers=keyed())

        return work

    works: dict[str, Work] = {"create account": create, "balance": read, "post": post(accounts)}
    works["post, 2 hot accounts"] = post(accounts[:HOT])
    return works


async def timed(work: Work, count: int, clients: int) -> tuple[float, float, float]:
    """Requests a second, p50 and p99 in milliseconds."""
    times: list[float] = []

    async def one(number: int) -> None:
        began = monotonic()
        answer = await work(number)
        times.append(monotonic() - began)
        assert answer.status_code in (200, 201), answer.text

    per_second = await rate(one, count, clients)
    cuts = statistics.quantiles(times, n=100)
    return per_second, cuts[49] * 1000, cuts[98] * 1000


async def until_ready(url: str) -> None:
    """Within half a minute."""
    async with httpx2.AsyncClient(timeout=2) as client:
        for _ in range(300):
            try:
                if (await client.get(f"{url}/readyz")).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError("the api did not become ready")


if __name__ == "__main__":
    main()
