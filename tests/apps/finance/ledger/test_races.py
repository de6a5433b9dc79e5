"""Many at once, on real connections: no deadlock, no overdraft, nothing twice (F3, F4, FAULTS).

A rival session that holds an account's lock is the barrier: everybody queues behind it, and runs when it lets go.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import httpx2
import psycopg
import pytest

from apps.finance.ledger import service
from apps.finance.ledger.model import Direction, InsufficientFunds, NewEntry, Posting
from apps.wiring import app
from duly.db import Database
from duly.jobs.worker import Worker
from duly.settings import Settings
from duly.testing import BusinessClock
from tests.apps.finance.ledger.acting import Books, check_consistent, count, events_of, move
from tests.apps.transfers.acting import new_key, until_waiting
from tests.support import value

DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


@contextlib.contextmanager
def holding(dsn: str, *accounts: str) -> Iterator[psycopg.Connection[Any]]:
    """Accounts that somebody else has locked, until the block ends."""
    with psycopg.connect(dsn) as rival:
        lock = "SELECT 1 FROM ledger.balances WHERE account_id = ANY(%s::uuid[]) ORDER BY account_id FOR NO KEY UPDATE"
        rival.execute(lock, [list(accounts)])
        yield rival
        rival.rollback()


@pytest.fixture
async def wide(dsn: str) -> Any:
    """A database with a connection for everybody."""
    db = Database(dsn, settings=Settings(pool_size=24))
    yield db
    await db.close()


async def test_transfers_in_opposite_directions_never_deadlock(books: Books, wide: Database, dsn: str) -> None:
    """F3: accounts are locked in the order of their ids, whatever the order of the entries."""
    accounts = [UUID(await books.open()) for _ in range(4)]
    dice = random.Random(7)

    async def transfer(number: int) -> None:
        mine = dice.sample(accounts, dice.randint(2, 4))
        amount = Decimal(dice.randint(1, 500)) / 100
        entries = [NewEntry(mine[0], amount * (len(mine) - 1), Direction.DEBIT)]
        entries += [NewEntry(one, amount, Direction.CREDIT) for one in mine[1:]]
        dice.shuffle(entries)
        async with wide.transaction() as tx:
            await service.post(tx, Posting(f"t{number}", entries))

    for first in range(0, 240, 24):
        await asyncio.gather(*(transfer(number) for number in range(first, first + 24)))
    assert value(dsn, DEADLOCKS) == 0
    assert count(dsn, "ledger.transactions") == 240
    check_consistent(dsn)


async def test_batches_in_opposite_directions_never_deadlock(books: Books, wide: Database, dsn: str) -> None:
    """F3: also when each of them touches many accounts."""
    accounts = [UUID(await books.open()) for _ in range(10)]

    async def post_batch(number: int) -> None:
        one = Decimal(1)
        order = random.Random(number).sample(accounts, 10)
        postings = [
            Posting(f"{number}-{n}", [NewEntry(a, one, Direction.DEBIT), NewEntry(b, one, Direction.CREDIT)])
            for n, (a, b) in enumerate(pairwise(order))
        ]
        async with wide.transaction() as tx:
            await service.post_many(tx, postings)

    await asyncio.gather(*map(post_batch, range(20)))
    assert (value(dsn, DEADLOCKS), count(dsn, "ledger.transactions")) == (0, 180)
    check_consistent(dsn)


async def test_concurrent_withdrawals_never_overdraw(books: Books, wide: Database, dsn: str) -> None:
    """F5: ten that each want 3.00 of 10.00, all in line before the first begins: three get it."""
    account, shop = await books.open_with("10.00"), await books.open("LIABILITY")

    async def withdraw(number: int) -> str:
        amount = Decimal(3)
        entries = [NewEntry(UUID(account), amount, Direction.DEBIT), NewEntry(UUID(shop), amount, Direction.CREDIT)]
        try:
            async with wide.transaction() as tx:
                await service.post(tx, Posting(f"w{number}", entries))
        except InsufficientFunds:
            return "refused"
        return "paid"

    with holding(dsn, account):
        trying = [asyncio.create_task(withdraw(number)) for number in range(10)]
        await until_waiting(dsn, 10)
    assert Counter(await asyncio.gather(*trying)) == {"paid": 3, "refused": 7}
    assert (await books.balance(account))["balance"] == "1.00"
    check_consistent(dsn)


async def test_holds_and_postings_together_never_overdraw(books: Books, wide: Database, dsn: str) -> None:
    """Half of them set aside, half of them spend."""
    account, shop = await books.open_with("10.00"), await books.open("LIABILITY")

    async def take(number: int) -> str:
        amount = Decimal(3)
        entries = [NewEntry(UUID(account), amount, Direction.DEBIT), NewEntry(UUID(shop), amount, Direction.CREDIT)]
        try:
            async with wide.transaction() as tx:
                if number % 2:
                    await service.post(tx, Posting(f"w{number}", entries))
                else:
                    await service.place_hold(tx, UUID(account), amount=amount, reference=f"h{number}")
        except InsufficientFunds:
            return "refused"
        return "taken"

    with holding(dsn, account):
        trying = [asyncio.create_task(take(number)) for number in range(10)]
        await until_waiting(dsn, 10)
    assert Counter(await asyncio.gather(*trying)) == {"taken": 3, "refused": 7}
    assert (await books.balance(account))["available"] == "1.00"
    check_consistent(dsn)


async def test_of_one_reference_one_is_posted(books: Books, wide: Database, dsn: str) -> None:
    """F3: over HTTP, without keys; the others hear that it is taken."""
    a, b = await books.open(), await books.open()
    with holding(dsn, a):
        trying = [asyncio.create_task(books.try_post(move(a, b, "1.00"), "same")) for _ in range(5)]
        await until_waiting(dsn, 5)
    answers = Counter(answer.status_code for answer in await asyncio.gather(*trying))
    assert answers == {201: 1, 409: 4}
    check_consistent(dsn)


async def test_a_batch_that_meets_its_reference_runs_again_and_is_refused(books: Books, dsn: str) -> None:
    """All or nothing, also when a rival takes a reference between the look and the insert."""
    a, b, c = await books.open(), await books.open(), await books.open()
    with psycopg.connect(dsn) as rival:
        rival.execute(
            """SELECT ledger.post(ARRAY[gen_random_uuid()], ARRAY['r1'], ARRAY[1, 1], ARRAY[%s, %s]::uuid[],
               ARRAY[1, -1]::numeric[], ARRAY[false, false], '{}', false)""",
            [c, c],
        )
        batch = [{"reference": f"r{n}", "entries": move(a, b, "1.00")} for n in range(3)]
        trying = asyncio.create_task(books.send("/v1/transactions/batch", {"transactions": batch}))
        await until_waiting(dsn, 1)
        rival.commit()
    answer = await trying
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (409, "$.transactions[1].reference")
    assert count(dsn, "ledger.transactions") == 1
    check_consistent(dsn)


async def test_a_transaction_is_reversed_once(books: Books, dsn: str) -> None:
    """F4: five at once, and one wins."""
    cash, customer = await books.open(), await books.open("LIABILITY")
    original = await books.post(cash, customer, "5.00")
    with holding(dsn, cash):
        trying = [asyncio.create_task(books.reverse(original["id"])) for _ in range(5)]
        await until_waiting(dsn, 5)
    answers = await asyncio.gather(*trying)
    assert Counter(answer.status_code for answer in answers) == {201: 1, 409: 4}
    late = {answer.json()["type"] for answer in answers if answer.status_code == 409}
    assert late == {"urn:duly:problem:already-reversed"}
    assert (await books.balance(customer))["balance"] == "0.00"
    check_consistent(dsn)


async def test_closing_and_posting_at_once_leaves_no_entry_on_a_closed_account(books: Books, dsn: str) -> None:
    """F3: whoever is first; the other is refused."""
    seen: Counter[tuple[int, int]] = Counter()
    for close_first in (True, False):
        cash, customer = await books.open(), await books.open("LIABILITY")
        with holding(dsn, customer):
            calls = [books.send(f"/v1/accounts/{customer}/close"), books.try_post(move(cash, customer, "1.00"))]
            tasks: dict[int, asyncio.Task[httpx2.Response]] = {}
            for waiting, index in enumerate((0, 1) if close_first else (1, 0), 1):
                tasks[index] = asyncio.create_task(calls[index])
                await until_waiting(dsn, waiting)
        seen[(await tasks[0]).status_code, (await tasks[1]).status_code] += 1
    assert seen == {(200, 409): 1, (409, 201): 1}
    check_consistent(dsn)


@pytest.mark.parametrize("first", ["capture", "void", "expire"])
async def test_a_hold_ends_once(books: Books, wide: Database, dsn: str, clock: BusinessClock, first: str) -> None:
    """Captured, voided and expired at the same moment, in each order: one of them wins, and the money is there once."""
    account, shop = await books.open_with("10.00"), await books.open("LIABILITY")
    clock.freeze(clock.now())
    hold = (await books.hold(account, "7.00"))["id"]
    due = value(dsn, "SELECT expires_at FROM ledger.holds")
    if first == "expire":
        clock.freeze(due)
    calls: dict[str, Any] = {
        "capture": lambda: books.capture(hold, shop),
        "void": lambda: books.void(hold),
        "expire": lambda: Worker(wide, app.handlers).run_once(),
    }
    order = [first, *(one for one in calls if one != first)]
    tasks: dict[str, asyncio.Task[Any]] = {}
    with holding(dsn, account):
        for waiting, name in enumerate(order, 1):
            if name == "expire" and first != "expire":
                continue  # it comes when it is time, and finds that the hold has ended
            tasks[name] = asyncio.create_task(calls[name]())
            await until_waiting(dsn, waiting)
    answers = {name: await task for name, task in tasks.items()}
    if first != "expire":
        clock.freeze(due)
        await calls["expire"]()
    status = value(dsn, "SELECT status FROM ledger.holds")
    winners = {"capture": ("CAPTURED", 201), "void": ("VOIDED", 200), "expire": ("EXPIRED", None)}
    assert status == winners[first][0]
    for name in ("capture", "void"):
        assert answers[name].status_code == (winners[first][1] if name == first else 409)
    assert (await books.balance(account))["balance"] == ("3.00" if first == "capture" else "10.00")
    assert len(events_of(dsn, hold)) == 2
    check_consistent(dsn)


async def test_partial_captures_at_once_end_the_hold_with_its_timer(books: Books, dsn: str) -> None:
    """Both saw all of it held; the one that takes the last of it knows, and withdraws the timer."""
    account, shop = await books.open_with("10.00"), await books.open("LIABILITY")
    hold = (await books.hold(account, "7.00"))["id"]
    with holding(dsn, account):
        trying = [
            asyncio.create_task(books.capture(hold, shop, amount=amount, final=False)) for amount in ("2.00", "5.00")
        ]
        await until_waiting(dsn, 2)
    assert [answer.status_code for answer in await asyncio.gather(*trying)] == [201, 201]
    assert value(dsn, "SELECT status FROM ledger.holds") == "CAPTURED"
    check_consistent(dsn)


async def test_fifty_requests_with_one_key_post_once(books: Books, dsn: str) -> None:
    """E4, F3: one effect, the same body for all."""
    a, b = await books.open(), await books.open()
    key = {"Idempotency-Key": new_key()}
    answers = await asyncio.gather(*(books.try_post(move(a, b, "1.00"), "one", **key) for _ in range(50)))
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, answers[0].content)}
    assert count(dsn, "ledger.transactions") == 1
    check_consistent(dsn)


async def test_a_hot_account_loses_no_update(books: Books, wide: Database, dsn: str) -> None:
    """FAULTS: everybody posts to the same two accounts, over HTTP."""
    a, b = await books.open(), await books.open("LIABILITY")
    answers = await asyncio.gather(*(books.try_post(move(a, b, "0.01"), str(uuid4())) for _ in range(100)))
    assert Counter(answer.status_code for answer in answers) == {201: 100}
    assert (await books.balance(b))["balance"] == "1.00"
    assert (await books.balance(b))["version"] == 100
    check_consistent(dsn)
