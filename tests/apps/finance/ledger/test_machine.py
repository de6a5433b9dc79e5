"""The ledger against a simple model, by Hypothesis, on a real database (F1 to F4)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from apps.finance.ledger import audit, service
from apps.finance.ledger.model import (
    AccountActive,
    AccountClosed,
    AccountNotEmpty,
    AccountType,
    AlreadyReversed,
    Direction,
    HoldEnded,
    HoldExceeded,
    InsufficientFunds,
    MixedCurrencies,
    NewEntry,
    NotReversible,
    Posting,
    ReferenceTaken,
)
from apps.wiring import app
from duly.db import Database
from duly.errors import DulyError
from duly.testing import TestServer
from tests.apps.finance.ledger.acting import check_consistent
from tests.support import rows

AMOUNTS = st.integers(1, 2_000)
RESET = """
SET session_replication_role = replica;
DELETE FROM ledger.seals; DELETE FROM ledger.holds; DELETE FROM ledger.entries; DELETE FROM ledger.transactions;
DELETE FROM ledger.balances; DELETE FROM ledger.accounts; DELETE FROM duly.outbox; DELETE FROM duly.jobs
"""


@dataclass
class ModelAccount:
    """What an account should be: minor units on its normal side."""

    id: UUID
    side: int
    currency: str
    may_go_negative: bool
    balance: int = 0
    held: int = 0
    entries: list[int] = field(default_factory=list)
    is_open: bool = True


@dataclass
class ModelHold:
    """What a hold should be."""

    id: UUID
    account: ModelAccount
    remaining: int


class Ledger(RuleBasedStateMachine):
    """Everything anybody can do, in any order; the model says what must come of it."""

    dsn: ClassVar[str] = ""
    loop: ClassVar[asyncio.AbstractEventLoop]
    db: ClassVar[Database]

    @initialize()
    def begin(self) -> None:
        rows(self.dsn, RESET)
        self.accounts: list[ModelAccount] = []
        self.posted: list[tuple[UUID, list[tuple[ModelAccount, int]], str]] = []
        self.reversed: set[UUID] = set()
        self.reversals: list[UUID] = []
        self.holds: list[ModelHold] = []
        self.references = 0
        for kind in (AccountType.ASSET, AccountType.LIABILITY, AccountType.EQUITY):
            self.open_account(kind, "PLN", True)

    def call(self, work: Callable[[Any], Awaitable[Any]], *expected: type[DulyError]) -> Any:
        """The result; or one of the errors that the model expects, and then it must be one of them."""
        if expected:
            with pytest.raises(expected):
                self.loop.run_until_complete(self.db.run(work))
            return None
        return self.loop.run_until_complete(self.db.run(work))

    def pick(self, data: st.DataObject) -> ModelAccount:
        return data.draw(st.sampled_from(self.accounts))

    def refusals(self, moved: list[tuple[ModelAccount, int]], *, released: int = 0) -> list[type[DulyError]]:
        """What may be said against entries that the model knows, by minor units on the debit side."""
        found: list[type[DulyError]] = []
        if any(not account.is_open for account, _ in moved):
            found.append(AccountClosed)
        if len({account.currency for account, _ in moved}) > 1:
            found.append(MixedCurrencies)
        for account in {id(account): account for account, _ in moved}.values():
            after = account.balance + sum(account.side * amount for one, amount in moved if one is account)
            held = account.held - (released if account is moved[0][0] else 0)
            if not account.may_go_negative and after - held < 0:
                found.append(InsufficientFunds)
        return found

    def apply(self, moved: list[tuple[ModelAccount, int]]) -> None:
        for account, amount in moved:
            account.balance += account.side * amount
            account.entries.append(account.balance)

    @precondition(lambda self: len(self.accounts) < 8)
    @rule(kind=st.sampled_from(AccountType), currency=st.sampled_from(["PLN", "PLN", "JPY"]), negative=st.booleans())
    def open_account(self, kind: AccountType, currency: str, negative: bool) -> None:
        made = self.call(
            lambda tx: service.create_account(tx, name="a", kind=kind, currency=currency, may_go_negative=negative)
        )
        self.accounts.append(ModelAccount(made.id, kind.side, currency, negative))

    @rule(data=st.data(), amounts=st.lists(AMOUNTS, min_size=1, max_size=3), many=st.integers(1, 3))
    def post(self, data: st.DataObject, amounts: list[int], many: int) -> None:
        postings, model = [], []
        for _ in range(many):
            source = self.pick(data)
            moved = [(self.pick(data), amount) for amount in amounts]
            moved = [(source, -sum(amounts)), *moved]
            self.references += 1
            entries = [self.entry(account, amount, source.currency) for account, amount in moved]
            postings.append(Posting(f"r{self.references}", entries))
            model.append(moved)
        # The refusals of a batch are those of its first bad transaction, given what went before it.
        before = [(one, one.balance, list(one.entries)) for one in self.accounts]
        refusals: list[type[DulyError]] = []
        for moved in model:
            refusals += self.refusals(moved)
            self.apply(moved)
        if refusals:
            for one, balance, entries_before in before:
                one.balance, one.entries = balance, entries_before
        if many == 1:
            result = self.call(lambda tx: service.post(tx, postings[0]), *refusals)
            transactions = () if refusals else (result,)
        else:
            result = self.call(lambda tx: service.post_many(tx, postings), *refusals)
            transactions = () if refusals else result
        self.posted += [
            (made.id, moved, made.reference) for made, moved in zip(transactions, model, strict=bool(transactions))
        ]

    def entry(self, account: ModelAccount, amount: int, currency: str) -> NewEntry:
        """With the digits of the transaction's currency, so that a foreign account is refused for its currency."""
        digits = 0 if currency == "JPY" else 2
        direction = Direction.DEBIT if amount > 0 else Direction.CREDIT
        return NewEntry(account.id, Decimal(abs(amount)).scaleb(-digits), direction)

    @precondition(lambda self: self.posted)
    @rule(data=st.data())
    def reverse(self, data: st.DataObject) -> None:
        original, moved, _ = data.draw(st.sampled_from(self.posted))
        mirrored = [(account, -amount) for account, amount in moved]
        if original in self.reversed:
            refusals: list[type[DulyError]] = [AlreadyReversed]
        else:
            refusals = self.refusals(mirrored)
        made = self.call(lambda tx: service.reverse(tx, original, reason="model"), *refusals)
        if not refusals:
            self.apply(mirrored)
            self.reversed.add(original)
            self.reversals.append(made.id)

    @precondition(lambda self: self.reversals)
    @rule(data=st.data())
    def reverse_a_reversal(self, data: st.DataObject) -> None:
        reversal = data.draw(st.sampled_from(self.reversals))
        self.call(lambda tx: service.reverse(tx, reversal, reason="model"), NotReversible)

    @precondition(lambda self: self.posted)
    @rule(data=st.data())
    def post_again(self, data: st.DataObject) -> None:
        _, moved, reference = data.draw(st.sampled_from(self.posted))
        entries = [self.entry(account, amount, moved[0][0].currency) for account, amount in moved]
        refusals = self.refusals(moved) or [ReferenceTaken]
        self.call(lambda tx: service.post(tx, Posting(reference, entries)), *refusals)

    @rule(data=st.data(), amount=AMOUNTS)
    def place_hold(self, data: st.DataObject, amount: int) -> None:
        account = self.pick(data)
        refusals: list[type[DulyError]] = [] if account.is_open else [AccountClosed]
        if account.balance - account.held < amount:
            refusals.append(InsufficientFunds)
        decimal = Decimal(amount).scaleb(0 if account.currency == "JPY" else -2)
        made = self.call(
            lambda tx: service.place_hold(tx, account.id, amount=decimal, reference=str(uuid4())), *refusals
        )
        if not refusals:
            account.held += amount
            self.holds.append(ModelHold(made.id, account, amount))

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), amount=AMOUNTS, final=st.booleans())
    def capture(self, data: st.DataObject, amount: int, final: bool) -> None:
        hold, to = data.draw(st.sampled_from(self.holds)), self.pick(data)
        if to is hold.account:
            return
        moved = [(hold.account, -hold.account.side * amount), (to, hold.account.side * amount)]
        released = hold.remaining if final else amount
        if not hold.remaining:
            refusals: list[type[DulyError]] = [HoldEnded]
        elif amount > hold.remaining:
            refusals = [HoldExceeded]
        else:
            refusals = self.refusals(moved, released=released)
        decimal = Decimal(amount).scaleb(0 if hold.account.currency == "JPY" else -2)
        reference = str(uuid4())
        made = self.call(
            lambda tx: service.capture_hold(tx, hold.id, to=to.id, reference=reference, amount=decimal, final=final),
            *refusals,
        )
        if not refusals:
            self.apply(moved)
            hold.account.held -= released
            hold.remaining -= released
            self.posted.append((made.id, moved, reference))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def void(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(self.holds))
        self.call(lambda tx: service.void_hold(tx, hold.id), *([] if hold.remaining else [HoldEnded]))
        hold.account.held -= hold.remaining
        hold.remaining = 0

    @rule(data=st.data())
    def close_or_reopen(self, data: st.DataObject) -> None:
        account = self.pick(data)
        if account.is_open:
            refusals = [AccountNotEmpty] if account.balance or account.held else []
            self.call(lambda tx: service.close_account(tx, account.id), *refusals)
            account.is_open = bool(refusals)
            self.call(lambda tx: service.reopen_account(tx, account.id), *([AccountActive] if account.is_open else []))
            account.is_open = True
        elif data.draw(st.booleans()):
            self.call(lambda tx: service.close_account(tx, account.id), AccountClosed)

    @rule(data=st.data())
    def close_for_good(self, data: st.DataObject) -> None:
        account = self.pick(data)
        if account.is_open and not account.balance and not account.held and account.entries:
            self.call(lambda tx: service.close_account(tx, account.id))
            account.is_open = False

    @rule()
    def seal(self) -> None:
        self.call(audit.seal_journal)

    @invariant()
    def the_ledger_is_as_the_model_says(self) -> None:
        query = "SELECT account_id, side * balance, held, version, status FROM ledger.balances"
        found = {row[0]: row[1:] for row in rows(self.dsn, query)}
        assert found == {
            one.id: (one.balance, one.held, len(one.entries), "ACTIVE" if one.is_open else "CLOSED")
            for one in getattr(self, "accounts", [])
        }

    def teardown(self) -> None:
        """In the end: every statement line, every invariant in plain SQL, and the ledger's own audit."""
        lines = """
            SELECT e.account_id, a.side * e.balance_after
            FROM ledger.entries e JOIN ledger.accounts a ON a.id = e.account_id ORDER BY 1, e.version"""
        found: dict[UUID, list[int]] = {}
        for account_id, balance in rows(self.dsn, lines):
            found.setdefault(account_id, []).append(balance)
        assert found == {one.id: one.entries for one in getattr(self, "accounts", []) if one.entries}
        check_consistent(self.dsn)
        assert self.loop.run_until_complete(self.db.run(audit.verify)).first_violation is None


@pytest.fixture
def machine(server: TestServer) -> Iterator[type[Ledger]]:
    with server.database(app) as dsn:
        Ledger.dsn = dsn
        Ledger.loop = asyncio.new_event_loop()
        Ledger.db = Database(dsn)
        yield Ledger
        Ledger.loop.run_until_complete(Ledger.db.close())
        Ledger.loop.close()


@pytest.mark.timeout(300)
def test_the_ledger_does_what_a_simple_model_does(machine: type[Ledger]) -> None:
    """F1 to F4: accounts, postings, batches, reversals, holds, closing, sealing; in any order."""
    machine.TestCase.settings = settings(
        max_examples=25, stateful_step_count=40, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case = machine.TestCase()
    case.runTest()
