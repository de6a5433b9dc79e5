"""A Hypothesis state machine: officers who do whatever they like with cases, a bookkeeper, time, and a simple model.

What a run has met is counted: it fails when it stops reaching what it is for.

CASES_MACHINE_EXAMPLES=1000 runs so many examples with random seeds, instead of the few that are always the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from apps.finance.compliance import aml, resolving, service
from apps.finance.compliance.model import (
    AlreadyReopened,
    CaseEnded,
    CaseNotEnded,
    CaseProposed,
    CaseTaken,
    NotAssigned,
    NothingProposed,
    OwnPayment,
    ReasonCode,
    SecondOfficerNeeded,
    Verdict,
)
from apps.finance.compliance.opening import DUE
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AlreadyReversed, Direction, NewEntry, Posting
from apps.finance.payments import service as payments
from apps.finance.payments.model import REVIEW_WINDOW
from apps.wiring import app
from duly import Tx
from duly.db import Database
from duly.messages import Event
from duly.testing import BusinessClock, TestServer
from tests.apps.finance.compliance.acting import LARGE, add_rule, check_cases
from tests.apps.finance.payments.driving import Driver
from tests.support import value

EXAMPLES_VARIABLE = "CASES_MACHINE_EXAMPLES"
EXAMPLES, STEPS = 20, 40
OFFICERS = ("olga", "otto", "ida", "teller")
TWO_FROM = Decimal(80)
READ = """
SELECT c.id, c.status, c.assignee, c.proposed_by, c.effect, c.needs_two FROM compliance.cases c WHERE c.id = ANY(%s)
"""
EVENT = """
SELECT id, type, topic, aggregate_id, payload, headers, created_at FROM duly.event_log
WHERE type = 'transaction.posted' AND aggregate_id = %s
"""
DEEDS = {
    "hold": 3, "flag": 2, "claim": 2, "unclaim": 1, "assign": 1, "comment": 1, "resolve": 8, "confirm": 4, "refuse": 2,
    "reopen": 5, "reverse": 1, "wait": 2,
}  # fmt: skip
"""What may happen, and how often."""
NEEDED = {
    "RELEASED", "HOLD_VOIDED", "REVERSED", "ALREADY_REVERSED", "MONEY_STAYS", "NOTHING_HELD", "EXPIRED", "PROPOSED",
    "confirmed", "refused", "reopened", "own", "taken", "second officer", "overdue",
}  # fmt: skip
"""Effects, states and refusals, each of which a run must meet."""


@dataclass
class Money:
    """What cases are about: held until somebody decides, or posted, and perhaps back."""

    amount: Decimal
    payment: UUID | None = None
    posted: UUID | None = None
    is_held: bool = False
    is_back: bool = False
    held_since: Any = None


@dataclass
class File:
    """A case as a simple model has it."""

    id: UUID
    money: Money
    status: str = "OPEN"
    assignee: str | None = None
    proposal: tuple[str, str] | None = None
    effect: str | None = None
    needs_two: bool = False
    reopened_by: str | None = None
    has_successor: bool = False

    @property
    def has_ended(self) -> bool:
        return self.status in ("RESOLVED", "EXPIRED")

    def refusal(self, actor: str) -> type[Exception] | None:
        """What everybody hears who may not work on it."""
        if self.money.payment is not None and actor == "teller":
            return OwnPayment
        return CaseEnded if self.has_ended else None


class Cases(Driver):
    """Two customers with plenty, and four officers, one of whom pays for customers."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.begin_driving()
        self.ann, self.ben = [self.open_customer(Decimal(10_000), may_go_negative=True) for _ in range(2)]
        self.files: list[File] = []
        self.hold(data)
        self.flag(data)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One rule for all deeds: of many rules, Hypothesis switches some off in each example, and misses a lot."""
        getattr(self, data.draw(st.sampled_from([name for name, weight in DEEDS.items() for _ in range(weight)])))(data)

    def amount(self, data: st.DataObject) -> Decimal:
        return Decimal(data.draw(st.sampled_from([50, 60, 80, 81, 90])))

    def hold(self, data: st.DataObject) -> None:
        amount = self.amount(data)
        made = self.call(
            lambda tx: payments.initiate(
                tx, from_id=self.ann.id, to_id=self.ben.id, amount=amount, currency="PLN", by="teller",
                provider="bank", tell=service.open_for_payment,
            )
        )  # fmt: skip
        money = Money(amount, payment=made.payment.id, is_held=True, held_since=made.payment.created_at)
        (case,) = self.look.execute("SELECT id FROM compliance.cases WHERE payment_id = %s", [money.payment])
        self.files.append(File(case[0], money, needs_two=amount > TWO_FROM))

    def flag(self, data: st.DataObject) -> None:
        amount = self.amount(data)
        lines = [NewEntry(self.ann.id, amount, Direction.DEBIT), NewEntry(self.ben.id, amount, Direction.CREDIT)]
        posted = self.call(lambda tx: ledger.post(tx, Posting(str(uuid4()), lines))).id
        found = [Event(*row) for row in self.look.execute(EVENT, [str(posted)])]
        for times in range(2):  # the second time it finds that it was there
            cases = self.call(lambda tx: aml.screen(tx, found))
            assert len(cases) == 1 - times
            if not times:
                self.files.append(File(cases[0].id, Money(amount, posted=posted), needs_two=amount > TWO_FROM))

    def pick(self, data: st.DataObject, *wanted: str) -> tuple[File, str]:
        """Some case, rather one that stands so, or is open; and somebody."""
        waiting = [one for one in self.files if one.status in wanted]
        waiting = waiting or [one for one in self.files if not one.has_ended]
        is_any = data.draw(st.sampled_from([False, False, False, False, True]))
        among = self.files if is_any or not waiting else waiting
        return data.draw(st.sampled_from(among)), data.draw(st.sampled_from(OFFICERS))

    def attempt(self, refusal: type[Exception] | None, work: Any) -> bool:
        """Do it, if the model says that it can be done; whether it was."""
        if refusal is None:
            self.call(work)
            return True
        self.met["own"] += refusal is OwnPayment
        self.met["taken"] += refusal is CaseTaken
        self.met["second officer"] += refusal is SecondOfficerNeeded
        self.call(work, refusal)
        return False

    def claim(self, data: st.DataObject) -> None:
        file, actor = self.pick(data)
        taken = CaseTaken if file.assignee not in (None, actor) else None
        if self.attempt(file.refusal(actor) or taken, lambda tx: service.claim(tx, file.id, actor=actor)):
            file.assignee = actor

    def unclaim(self, data: st.DataObject) -> None:
        file, actor = self.pick(data)
        refusal = file.refusal(actor)
        if refusal is None and file.assignee != actor:
            refusal = CaseTaken if file.assignee else NotAssigned
        if self.attempt(refusal, lambda tx: service.unclaim(tx, file.id, actor=actor)):
            file.assignee = None

    def assign(self, data: st.DataObject) -> None:
        file, actor = self.pick(data)
        to = data.draw(st.sampled_from(OFFICERS))
        refusal = file.refusal(actor) or (OwnPayment if to == "teller" and file.money.payment else None)
        if self.attempt(refusal, lambda tx: service.assign(tx, file.id, assignee=to, actor=actor)):
            file.assignee = to

    def comment(self, data: st.DataObject) -> None:
        file, actor = self.pick(data)
        self.attempt(file.refusal(actor), lambda tx: service.comment(tx, file.id, text="x", actor=actor))

    def resolve(self, data: st.DataObject) -> None:
        file, actor = self.pick(data)
        decision = data.draw(st.sampled_from(["APPROVE", "REJECT"]))
        refusal = file.refusal(actor)
        if refusal is None and file.status == "PROPOSED":
            refusal = CaseProposed
        elif refusal is None and file.assignee not in (None, actor):
            refusal = CaseTaken
        if not self.attempt(refusal, _decide(file.id, decision, actor)):
            return
        if file.needs_two:
            file.status, file.proposal = "PROPOSED", (decision, actor)
        else:
            self.end(file, decision)

    def confirm(self, data: st.DataObject) -> None:
        file, actor = self.pick(data, "PROPOSED")
        refusal = file.refusal(actor)
        if refusal is None and file.proposal is None:
            refusal = NothingProposed
        elif refusal is None and file.proposal is not None and actor in (file.proposal[1], file.reopened_by):
            refusal = SecondOfficerNeeded
        proposal = file.proposal
        if self.attempt(refusal, lambda tx: resolving.confirm(tx, file.id, actor=actor)):
            assert proposal is not None
            self.met["confirmed"] += 1
            self.end(file, proposal[0])

    def refuse(self, data: st.DataObject) -> None:
        file, actor = self.pick(data, "PROPOSED")
        refusal = file.refusal(actor) or (NothingProposed if file.proposal is None else None)
        if self.attempt(refusal, lambda tx: resolving.refuse(tx, file.id, reason="x", actor=actor)):
            self.met["refused"] += 1
            file.status, file.proposal = "OPEN", None

    def reopen(self, data: st.DataObject) -> None:
        file = data.draw(st.sampled_from([one for one in self.files if one.has_ended] or self.files))
        actor = data.draw(st.sampled_from(OFFICERS))
        refusal: type[Exception] | None = OwnPayment if file.money.payment and actor == "teller" else None
        if refusal is None and not file.has_ended:
            refusal = CaseNotEnded
        elif refusal is None and file.has_successor:
            refusal = AlreadyReopened
        if self.attempt(refusal, lambda tx: service.reopen(tx, file.id, reason="x", actor=actor)):
            self.met["reopened"] += 1
            file.has_successor = True
            (made,) = self.look.execute("SELECT id FROM compliance.cases WHERE reopens_id = %s", [file.id])
            self.files.append(File(made[0], file.money, needs_two=file.needs_two, reopened_by=actor))

    def reverse(self, data: st.DataObject) -> None:
        """A bookkeeper, who knows nothing of cases."""
        posted = [one.money for one in self.files if one.money.posted and not one.money.payment]
        if posted:
            money = data.draw(st.sampled_from(posted))
            refusal = AlreadyReversed if money.is_back else None
            self.attempt(refusal, lambda tx: ledger.reverse(tx, money.posted, reason="typo"))  # type: ignore[arg-type]  # it is posted
            money.is_back = True

    def wait(self, data: st.DataObject) -> None:
        """Time passes, and timers fire: what is late is told, and reviews that nobody ended end."""
        self.clock.advance(hours=data.draw(st.sampled_from([1, 24, 80, 170])))
        now = self.now()
        for file in self.files:
            money = file.money
            if money.is_held and now - money.held_since >= REVIEW_WINDOW:
                self.call(partial(_expire, payment_id=money.payment))
                money.is_held = False
                if not file.has_ended:
                    self.met["EXPIRED"] += 1
                    file.status, file.proposal = "EXPIRED", None
        for file in self.files:
            who: Any = file
            self.work(who, DUE, service.come_due)

    def end(self, file: File, decision: str) -> None:
        """What the model says comes of it."""
        money = file.money
        file.status, file.proposal = "RESOLVED", None
        if money.is_held:
            money.is_held = False
            file.effect = "RELEASED" if decision == "APPROVE" else "HOLD_VOIDED"
            if decision == "APPROVE":
                query = "SELECT transaction_id FROM payments.payments WHERE id = %s"
                money.posted = self.look.execute(query, [money.payment]).fetchone()[0]  # type: ignore[index]  # there is one
        elif money.posted is None:
            file.effect = "NOTHING_HELD"
        elif decision == "APPROVE":
            file.effect = "ALREADY_REVERSED" if money.is_back else "MONEY_STAYS"
        else:
            file.effect = "ALREADY_REVERSED" if money.is_back else "REVERSED"
            money.is_back = True
        self.met[file.effect] += 1

    @invariant()
    def the_database_says_the_same(self) -> None:
        found = {row[0]: row[1:] for row in self.look.execute(READ, [[one.id for one in self.files]])}
        for one in self.files:
            self.met["PROPOSED"] += one.status == "PROPOSED"
            by = one.proposal[1] if one.proposal else None
            assert found[one.id] == (one.status, one.assignee, by, one.effect, one.needs_two), one

    @invariant()
    def money_is_where_it_should_be(self) -> None:
        moneys = {id(one.money): one.money for one in self.files}.values()
        moved = sum(one.amount for one in moneys if one.posted and not one.is_back)
        held = sum(one.amount for one in moneys if one.is_held)
        incoming = sum(one.amount for one in moneys if one.payment and one.posted and not one.is_back)
        assert self.read_balances([self.ann, self.ben]) == {
            self.ann.id: (Decimal(10_000) - moved, held), self.ben.id: (Decimal(10_000) + moved, incoming),
        }  # fmt: skip

    def teardown(self) -> None:
        """In the end: every rule in plain SQL."""
        check_cases(self.dsn)


def _decide(case_id: UUID, decision: str, actor: str) -> Callable[[Tx], Any]:
    code = ReasonCode.FRAUD if decision == "REJECT" else ReasonCode.KNOWN_CUSTOMER
    return lambda tx: resolving.resolve(
        tx, case_id, decision=Verdict(decision), reason_code=code, reason="x", actor=actor
    )  # fmt: skip


async def _expire(tx: Tx, payment_id: Any) -> timedelta | None:
    return await payments.expire_review(tx, payment_id, tell=service.close_expired)


@pytest.fixture
def machine(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Cases]]:
    monkeypatch.setenv("COMPLIANCE_FOUR_EYES", f"*={TWO_FROM}")
    with server.database(app) as dsn, psycopg.connect(dsn, autocommit=True) as look:
        Cases.dsn, Cases.look = dsn, look
        Cases.loop = asyncio.new_event_loop()
        Cases.db = Database(dsn)
        Cases.clock = BusinessClock(dsn)
        for rule_set in ("payment-screening", "aml-screening"):
            Cases.loop.run_until_complete(add_rule(Cases.db, LARGE, rule_set=rule_set))
        yield Cases
        Cases.loop.run_until_complete(Cases.db.close())
        Cases.loop.close()


@pytest.mark.timeout(600 * int(os.environ.get(EXAMPLES_VARIABLE, "1")))
def test_cases_do_what_a_simple_model_does(machine: type[Cases]) -> None:
    """F10: in any order, by anybody; each decided once, and no money made or lost."""
    is_long = EXAMPLES_VARIABLE in os.environ
    machine.met.clear()
    machine.TestCase.settings = settings(
        max_examples=int(os.environ.get(EXAMPLES_VARIABLE, str(EXAMPLES))), stateful_step_count=STEPS, deadline=None,
        database=None, derandomize=not is_long, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case = machine.TestCase()
    case.runTest()
    machine.met["overdue"] += value(machine.dsn, "SELECT count(*) FROM compliance.cases WHERE overdue_at IS NOT NULL")
    missed = {what for what in NEEDED if not machine.met[what]}
    assert not missed, f"not reached any more: {sorted(missed)}; met: {sorted(machine.met.items())}"
