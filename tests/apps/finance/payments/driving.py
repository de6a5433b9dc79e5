"""What the state machine acts with: transactions, workers as the engine runs them, and a look at the database."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar, NamedTuple
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis.stateful import RuleBasedStateMachine

from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AccountType, Direction, NewEntry, Posting
from duly import Tx, cancel, find_queued, schedule
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.finance.payments.acting import Work, do
from tests.apps.finance.payments.modelling import ZERO, Customer, Known

READ = """
SELECT id, state, reason, retryable, contradicted_at IS NOT NULL, version, delivery, sent_at, provider_ref,
       transaction_id FROM payments.payments WHERE id = ANY(%s)
"""
BALANCES = """
SELECT account_id, (side * balance)::numeric / 100, held::numeric / 100 FROM ledger.balances WHERE account_id = ANY(%s)
"""


class Row(NamedTuple):
    """A payment as the database knows it."""

    state: str
    reason: str | None
    retryable: bool
    is_contradicted: bool
    version: int
    delivery: str | None
    sent_at: datetime | None
    provider_ref: str | None
    transaction_id: UUID | None


class Driver(RuleBasedStateMachine):
    """A machine on a database, with a count of what it has met."""

    dsn: ClassVar[str]
    db: ClassVar[Database]
    loop: ClassVar[asyncio.AbstractEventLoop]
    clock: ClassVar[BusinessClock]
    look: ClassVar[psycopg.Connection[Any]]
    met: ClassVar[Counter[str]] = Counter()

    def begin_driving(self) -> None:
        """Each example has accounts of its own."""
        self.holders: dict[tuple[UUID, str], tuple[object, Any]] = {}
        self.cash = self.open_account(AccountType.ASSET, may_go_negative=True)

    def call(self, work: Work, *refusals: type[Exception]) -> Any:
        """The result; or one of the errors that the model expects, and then it must be one of them."""
        if not refusals:
            return self.loop.run_until_complete(do(self.db, work))
        with pytest.raises(refusals):
            self.loop.run_until_complete(do(self.db, work))
        return None

    def read(self, *these: Known) -> dict[UUID, Row]:
        return {row[0]: Row(*row[1:]) for row in self.look.execute(READ, [[one.id for one in these]])}

    def read_one(self, one: Known) -> Row:
        return self.read(one)[one.id]

    def read_balances(self, customers: list[Customer]) -> dict[UUID, tuple[Decimal, Decimal]]:
        found = self.look.execute(BALANCES, [[customer.id for customer in customers]])
        return {account: (balance, held) for account, balance, held in found}

    def now(self) -> datetime:
        found = self.look.execute("SELECT duly.now()").fetchone()
        assert found is not None
        moment: datetime = found[0]
        return moment

    def open_account(self, kind: AccountType, *, may_go_negative: bool) -> UUID:
        made = self.call(
            lambda tx: ledger.create_account(
                tx, name="Somebody", kind=kind, currency="PLN", may_go_negative=may_go_negative
            )
        )
        account: UUID = made.id
        return account

    def open_customer(self, money: Decimal, *, may_go_negative: bool) -> Customer:
        account = self.open_account(AccountType.LIABILITY, may_go_negative=may_go_negative)
        opened = Customer(account, ZERO, may_go_negative)
        self.deposit(opened, money)
        return opened

    def deposit(self, customer: Customer, money: Decimal) -> None:
        """From the cash; or to it, if it is below zero."""
        if not money:
            return
        ways = (Direction.CREDIT, Direction.DEBIT) if money > 0 else (Direction.DEBIT, Direction.CREDIT)
        lines = [NewEntry(customer.id, abs(money), ways[0]), NewEntry(self.cash, abs(money), ways[1])]
        self.call(lambda tx: ledger.post(tx, Posting(str(uuid4()), lines)))
        customer.balance += money

    def work(self, one: Known, name: str, begin: Any) -> Any:
        """A worker takes the job of this name, if there is one; what it found, and may go on with."""

        async def run(tx: Tx) -> tuple[bool, Any]:
            if not await find_queued(tx, name, [one.id]):
                return False, None
            found = await begin(tx, one.id)
            if found is None or found is True:
                await cancel(tx, name, one.id)
            elif found is False or isinstance(found, timedelta):
                await schedule(tx, name, one.id, self.now() + (found or timedelta(hours=1)))
            return True, found

        has_job, found = self.call(run)
        if has_job:  # whoever held it before holds it no more
            self.holders[one.id, name] = (found, self.find_job(one, name))
        return found

    def finish(self, one: Known, name: str, holder: object, note: Any) -> None:
        """A worker writes what follows; its job ends, or comes again after what that returns, if it is still its own.

        The engine would roll back what a worker writes that has lost its job. Here it is kept: that is worse.
        """
        is_ours = self.holders.get((one.id, name)) == (holder, self.find_job(one, name))

        async def run(tx: Tx) -> None:
            wait = await note(tx)
            if is_ours and wait is None:
                await cancel(tx, name, one.id)
            elif is_ours:
                await schedule(tx, name, one.id, self.now() + wait)

        self.call(run)

    def find_job(self, one: Known, name: str) -> tuple[Any, ...] | None:
        """Which it is: one that was scheduled since is another."""
        query = "SELECT id, run_at FROM duly.jobs WHERE name = %s AND entity_id = %s"
        return self.look.execute(query, [name, str(one.id)]).fetchone()
