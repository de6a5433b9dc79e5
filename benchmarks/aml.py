"""Screening beside posting: transactions screened a second, and transactions posted a second, in the same run.

``make bench-aml``. Ratios count; absolute rates are this machine's. Rules ask for every fact that is measured but the
receivers, and a few transactions match. As in a bank, every other transaction goes through one account of the house:
its cash. First the screening alone works off what was posted; then both at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Awaitable
from decimal import Decimal
from pathlib import Path
from uuid import UUID, uuid4

from sqlalchemy import text

from apps.finance.compliance import workers
from apps.finance.decisions import service as decisions
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AccountType, Direction, NewEntry, Posting
from apps.wiring import app
from duly.clock import monotonic
from duly.db import Database
from duly.duty import Duty
from duly.jobs.worker import Worker
from duly.outbox.relay import Relay
from duly.settings import Settings
from duly.testing import TestServer

CONSUMER = "consumer:aml-screening"
ACCOUNTS, HOT = 1_000, 2
MOST_SECONDS = 600.0
POLL_SECONDS = 0.05
COUNT = text("SELECT count(*) FROM decisions.log WHERE rule_set_id = 'aml-screening'")
COUNT_CASES = text("SELECT count(*) FROM compliance.cases")
FACTS = ("transactions1h", "transactions24h", "receipts24h", "transactions7d")
SUMS = ("moved1h", "moved24h", "moved7d", "received24h")


def main() -> None:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8, help="connections that post")
    parser.add_argument("--postings", type=int, default=4_000)
    given = parser.parse_args()
    given.postings = max(1, given.postings // given.clients) * given.clients  # each client posts as many
    with tempfile.TemporaryDirectory() as directory:
        server = TestServer(Path(directory) / "pg", durable=True)
        server.start()
        try:
            with server.database(app) as dsn:
                asyncio.run(measure(dsn, given))
        finally:
            server.stop()


async def measure(dsn: str, given: argparse.Namespace) -> None:
    """Both loads, a few times each."""
    db = Database(dsn, settings=Settings(pool_size=given.clients + 4, poll_seconds=POLL_SECONDS))
    await app.prepare(db)
    cash, accounts = await make_accounts(db)
    await write_rules(db)
    print(f"transactions a second, median of {given.rounds}; {given.clients} connections post, one worker screens")
    print(
        f"{'':<18} {'posted':>9} {'screened':>9} {'ratio':>7} {'posted':>9} {'screened':>9}   (the last two: at once)"
    )
    for name, among in ((f"{ACCOUNTS:,} accounts", ACCOUNTS), (f"{HOT} hot accounts", HOT)):
        found = [await one_round(db, cash, accounts[:among], given) for _ in range(given.rounds)]
        alone, screened, both, meanwhile = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name:<18} {alone:>9.0f} {screened:>9.0f} {screened / alone:>7.2f} {both:>9.0f} {meanwhile:>9.0f}")
    async with db.transaction() as tx:
        print(f"cases opened: {(await tx.execute(COUNT_CASES)).scalar_one()}; batches of {workers.BATCH} at most")
    await db.close()


async def one_round(
    db: Database, cash: UUID, accounts: list[UUID], given: argparse.Namespace
) -> tuple[float, float, float, float]:  # fmt: skip
    """Posted, then screened; then both at once: four rates."""
    wanted = await count(db) + given.postings
    began = monotonic()
    await post_all(db, cash, accounts, given)
    alone = given.postings / (monotonic() - began)
    await relay_all(db)
    async with running(Worker(db, {CONSUMER: app.handlers[CONSUMER]})):
        screened = given.postings / await until_screened(db, wanted)
    wanted += given.postings
    async with running(Relay(db), Worker(db, {CONSUMER: app.handlers[CONSUMER]})):
        posting = asyncio.create_task(time(post_all(db, cash, accounts, given)))
        meanwhile = given.postings / await until_screened(db, wanted)
        both = given.postings / await posting
    return alone, screened, both, meanwhile


async def make_accounts(db: Database) -> tuple[UUID, list[UUID]]:
    """The cash, and a thousand customers, who may go negative."""
    async with db.transaction() as tx:
        cash = await ledger.create_account(tx, name="cash", kind=AccountType.ASSET, currency="PLN")
        return cash.id, [
            (await ledger.create_account(tx, name=f"a{n}", kind=AccountType.LIABILITY, currency="PLN")).id
            for n in range(ACCOUNTS)
        ]


async def write_rules(db: Database) -> None:
    """One that matches a few, and one for each fact that never does."""
    conditions = [{"field": "amount", "op": "gt", "value": "995"}]
    conditions += [{"field": name, "op": "gt", "value": 10_000_000, "otherwise": False} for name in FACTS]
    conditions += [{"field": name, "op": "gt", "value": "900000000", "otherwise": False} for name in SUMS]
    async with db.transaction() as tx:
        for number, one in enumerate(conditions):
            written = {
                "name": f"r{number}", "conditions": one, "priority": 0, "terminate": False,
                "action": {"decision": "REVIEW"},
            }  # fmt: skip
            rule, _ = await decisions.create_rule(tx, "aml-screening", written=written, actor="bench")
            await decisions.activate_rule(tx, rule.id, version=None, acknowledge_warnings=True, actor="bench")


async def post_all(db: Database, cash: UUID, accounts: list[UUID], given: argparse.Namespace) -> None:
    """Each its own commit; half of them are deposits and withdrawals."""

    async def one_client() -> None:
        for number in range(given.postings // given.clients):
            debit, credit = random.sample([cash, random.choice(accounts)] if number % 2 else accounts, 2)
            amount = Decimal(random.randint(1, 1_000))
            lines = [NewEntry(debit, amount, Direction.DEBIT), NewEntry(credit, amount, Direction.CREDIT)]
            async with db.transaction() as tx:
                await ledger.post(tx, Posting(str(uuid4()), lines))

    await asyncio.gather(*(one_client() for _ in range(given.clients)))


async def relay_all(db: Database) -> None:
    """Until every event has its job."""
    began = monotonic()
    while monotonic() - began < MOST_SECONDS and (await Relay(db).run_once()).done:
        pass


@contextlib.asynccontextmanager
async def running(*duties: Duty) -> AsyncIterator[None]:
    """They work, as in a process of theirs, until the block is over."""
    stop = asyncio.Event()
    tasks = [asyncio.create_task(duty.run(stop)) for duty in duties]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def until_screened(db: Database, wanted: int) -> float:
    """The seconds until so many were screened."""
    began = monotonic()
    while (found := await count(db)) < wanted:
        if monotonic() - began > MOST_SECONDS:
            raise TimeoutError(f"{found} of {wanted} were screened")
        await asyncio.sleep(POLL_SECONDS)
    return monotonic() - began


async def time(work: Awaitable[None]) -> float:
    """The seconds that it takes."""
    began = monotonic()
    await work
    return monotonic() - began


async def count(db: Database) -> int:
    """How many were screened."""
    async with db.transaction() as tx:
        found: int = (await tx.execute(COUNT)).scalar_one()
        return found


if __name__ == "__main__":
    main()
