"""A Hypothesis state machine: payments, a bank that does whatever banks do, and a simple model of whose money it is.

The bank charges again whenever it is sent the same payment again, whatever its key: who sends twice is found out. It
tells the truth when it is asked, its calls are lost, repeated and out of order, and its answers get lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from apps.finance.ledger import audit
from apps.finance.payments import service
from apps.finance.payments.model import Callback, Heard, NotUnderReview, Question, Report, Source, State
from apps.wiring import app
from duly.db import Database
from duly.testing import BusinessClock, TestServer
from tests.apps.finance.payments.acting import add_rule, check_consistent, open_account
from tests.support import rows

REVIEWED = Decimal(40)
REJECTED = Decimal(60)


@dataclass
class Known:
    """What the model knows of a payment: whose money, and what was heard of its end first."""

    id: UUID
    key: UUID
    payer: int
    payee: int
    amount: Decimal
    was_reviewed: bool = False
    is_dead: bool = False  # rejected or without cover: it never moved
    is_reviewed: bool = False
    heard: str | None = None  # SETTLED or DECLINED


@dataclass
class AtBank:
    """What the bank has of a payment."""

    status: str
    times: int = 1


class Payments(RuleBasedStateMachine):
    """Three customers with 100.00 each."""

    dsn: ClassVar[str]
    db: ClassVar[Database]
    loop: ClassVar[asyncio.AbstractEventLoop]
    clock: ClassVar[BusinessClock]

    def call(self, work: Any) -> Any:
        async def run() -> Any:
            async with self.db.transaction() as tx:
                return await work(tx)

        return self.loop.run_until_complete(run())

    @initialize()
    def begin(self) -> None:
        self.accounts = [self.call(lambda tx: open_account(tx, "100.00")) for _ in range(3)]
        self.spendable = [Decimal(100)] * 3
        self.known: list[Known] = []
        self.bank: dict[UUID, AtBank] = {}

    @rule(ends=st.permutations(range(3)), amount=st.sampled_from([1, 7, 25, 39, 41, 59, 61, 99, 150]))
    def pay(self, ends: list[int], amount: int) -> None:
        payer, payee, units = ends[0], ends[1], Decimal(amount)
        made = self.call(
            lambda tx: service.initiate(
                tx, from_id=self.accounts[payer], to_id=self.accounts[payee], amount=units, currency="PLN", by="t",
                provider="bank",
            )
        )  # fmt: skip
        known = Known(made.payment.id, made.payment.bank_key, payer, payee, units)
        self.known.append(known)
        if units > self.spendable[payer]:
            expected, known.is_dead = State.FAILED, True
        elif units > REJECTED:
            expected, known.is_dead = State.REJECTED, True
        else:
            known.is_reviewed = known.was_reviewed = units > REVIEWED
            expected = State.PENDING_REVIEW if known.is_reviewed else State.PROCESSING
            self.spendable[payer] -= units
        assert made.payment.state is expected
        assert made.has_cover == (expected is not State.FAILED)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), does=st.sampled_from(["release", "reject"]))
    def review(self, data: st.DataObject, does: str) -> None:
        one = data.draw(st.sampled_from(self.known))
        try:
            self.call(lambda tx: getattr(service, does)(tx, one.id, actor="olga"))
        except NotUnderReview:
            assert not one.is_reviewed
            return
        assert one.is_reviewed
        one.is_reviewed = False
        if does == "reject":
            one.is_dead = True
            self.spendable[one.payer] += one.amount

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(), does=st.sampled_from(["take", "settle", "decline", "busy", "lose", "drop", "die", "die after"])
    )
    def send(self, data: st.DataObject, does: str) -> None:
        """A worker sends one; what the bank does, and whether we hear of it."""
        one = data.draw(st.sampled_from(self.known))
        order = self.call(lambda tx: service.begin_sending(tx, one.id))
        if order is None or does == "die":
            return
        report = {"busy": Report.NOT_TAKEN, "drop": Report.UNCLEAR}.get(does)
        if report is None:
            status = {"settle": "SETTLED", "decline": "DECLINED"}.get(does, "PENDING")
            if one.key in self.bank:
                self.bank[one.key].times += 1
            self.bank.setdefault(one.key, AtBank(status))
            report = Report(status) if does != "lose" else Report.UNCLEAR
        if does != "die after":
            self.hear(one, Heard(report, Source.SEND, f"r{one.key}", attempt=order.attempt))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), is_lost=st.booleans())
    def ask(self, data: st.DataObject, is_lost: bool) -> None:
        one = data.draw(st.sampled_from(self.known))
        question = self.call(lambda tx: service.begin_asking(tx, one.id))
        if not isinstance(question, Question):
            return
        at_bank = self.bank.get(one.key)
        report = Report(at_bank.status) if at_bank else Report.NOT_KNOWN
        said = Report.UNCLEAR if is_lost else report
        self.hear(one, Heard(said, Source.ASK, version=question.payment.version, asked_at=question.asked_at))

    @precondition(lambda self: self.bank)
    @rule(data=st.data(), status=st.sampled_from(["SETTLED", "DECLINED"]))
    def end_at_bank(self, data: st.DataObject, status: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.bank)))
        if self.bank[key].status == "PENDING":
            self.bank[key].status = status

    @precondition(lambda self: self.bank)
    @rule(data=st.data(), is_old=st.booleans(), is_retryable=st.booleans())
    def callback(self, data: st.DataObject, is_old: bool, is_retryable: bool) -> None:
        """Of now, or one that was under way for long."""
        key = data.draw(st.sampled_from(sorted(self.bank)))
        status = "PENDING" if is_old else self.bank[key].status
        if is_old and is_retryable:
            status = "FAILED"
        one = next(known for known in self.known if known.key == key)
        called = Callback("bank", str(uuid4()), str(key), status, retryable=is_old and is_retryable)
        self.call(lambda tx: service.receive(tx, called))
        if status in ("SETTLED", "DECLINED") and one.heard is None:
            self.end(one, status)

    def hear(self, one: Known, heard: Heard) -> None:
        self.call(lambda tx: service.note_answer(tx, one.id, heard))
        if heard.report in (Report.SETTLED, Report.DECLINED) and one.heard is None:
            self.end(one, heard.report.value)

    def end(self, one: Known, status: str) -> None:
        one.heard = status
        self.spendable[one.payee if status == "SETTLED" else one.payer] += one.amount

    @rule()
    def sweep(self) -> None:
        self.call(service.retry_due)

    @rule(seconds=st.sampled_from([1, 30, 61, 400, 4_000, 90_000]))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds=seconds)

    @rule()
    def recover(self) -> None:
        self.call(service.recover)

    @invariant()
    def the_money_is_where_the_model_says(self) -> None:
        states = {row[0]: (row[1], row[2]) for row in rows(self.dsn, "SELECT id, state, reason FROM payments.payments")}
        for one in getattr(self, "known", []):
            state, reason = states[one.id]
            if reason == "gave_up" and one.heard is None:  # nobody told the model
                assert one.key not in self.bank, "the bank has it, and the money went back"
                self.end(one, "DECLINED")
            over = {"SETTLED": "COMPLETED", "DECLINED": "PERMANENTLY_FAILED"}.get(one.heard or "")
            assert over is None or state == over
            assert over is not None or state not in ("COMPLETED", "PERMANENTLY_FAILED", "RETURNING")
            assert (state == "PENDING_REVIEW") == one.is_reviewed
        assert {at_bank.times for at_bank in getattr(self, "bank", {}).values()} <= {1}, "charged twice"
        query = "SELECT account_id, (side * balance - held)::numeric / 100 FROM ledger.balances"
        found = dict(rows(self.dsn, query))
        mine = getattr(self, "accounts", [])
        assert [found[account] for account in mine] == getattr(self, "spendable", [])

    def teardown(self) -> None:
        """In the end: every rule in plain SQL, and the ledger's own audit."""
        check_consistent(self.dsn)
        assert self.loop.run_until_complete(self.db.run(audit.verify)).first_violation is None


@pytest.fixture
def machine(server: TestServer) -> Iterator[type[Payments]]:
    with server.database(app) as dsn:
        Payments.dsn = dsn
        Payments.loop = asyncio.new_event_loop()
        Payments.db = Database(dsn)
        Payments.clock = BusinessClock(dsn)
        for limit, outcome in ((REVIEWED, "REVIEW"), (REJECTED, "REJECT")):
            condition = {"field": "amount", "op": "gt", "value": str(limit)}
            Payments.loop.run_until_complete(add_rule(Payments.db, condition, outcome))
        yield Payments
        Payments.loop.run_until_complete(Payments.db.close())
        Payments.loop.close()


@pytest.mark.timeout(600)
def test_payments_do_what_a_simple_model_does(machine: type[Payments]) -> None:
    """F5 to F7: in any order, with any losses; nothing twice, and no money made or lost."""
    machine.TestCase.settings = settings(
        max_examples=20, stateful_step_count=40, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case = machine.TestCase()
    case.runTest()
