"""A Hypothesis state machine: payments, a bank that does whatever banks do, bookkeepers and people, and a simple model.

The bank charges again whenever it is sent the same payment again, whatever its key: who sends twice is found out. It
tells the truth when it is asked, but for amounts and names; its calls are lost, repeated and out of order, its answers
are lost or late, and so are requests. What a run has met is counted: it fails when it stops reaching what it is for.

PAYMENTS_MACHINE_EXAMPLES=1000 runs so many examples with random seeds, instead of the few that are always the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from apps.finance.compliance.service import close_expired, open_for_payment
from apps.finance.ledger import audit
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AccountClosed, AlreadyReversed, InsufficientFunds
from apps.finance.payments import service
from apps.finance.payments.effects import ASK, EXPIRE_REVIEW, RETURN, SEND
from apps.finance.payments.model import (
    CLOCKS_DIFFER,
    REVIEW_WINDOW,
    TOLD,
    VALIDITY,
    Callback,
    Heard,
    NothingToResolve,
    NotResolvable,
    NotUnderReview,
    Order,
    Question,
    Report,
    Resolution,
    Source,
    State,
)
from apps.wiring import app
from duly import Tx
from duly.db import Database
from duly.testing import BusinessClock, TestServer
from tests.apps.finance.payments.acting import add_rule, check_consistent
from tests.apps.finance.payments.driving import Driver
from tests.apps.finance.payments.modelling import Charge, Customer, Known, Stands
from tests.support import rows

EXAMPLES_VARIABLE = "PAYMENTS_MACHINE_EXAMPLES"
EXAMPLES, STEPS = 30, 50
REVIEWED, REJECTED = Decimal(40), Decimal(60)
AMOUNTS = st.sampled_from([1, 7, 25, 25, 39, 39, 41, 41, 61, 400])
ANSWERS: dict[str, tuple[str | None, Report | None]] = {
    "take": ("PENDING", Report.PENDING), "settle": ("SETTLED", Report.SETTLED), "lose": ("PENDING", Report.UNCLEAR),
    "decline": ("DECLINED", Report.DECLINED), "busy": (None, Report.NOT_TAKEN), "drop": (None, Report.UNCLEAR),
    "die": (None, None), "die after": ("PENDING", None), "late": (None, Report.UNCLEAR), "die late": (None, None),
}  # fmt: skip
"""Of a request: what the bank has then, and what we hear; those that are late arrive some time."""
CALLS = ("plain", "plain", "old", "again", "amount", "other amount", "other name", "two names", "own name", "strange")
NEEDED = {
    "UNKNOWN", "RETURNING", "gave_up", "reversed", "resolved", "review_expired", "declined", "contradiction", "resolve",
    "COMPLETE", "RETURN", "return", "amount_differs", "arrived late", "heard late", "overdrawn payee",
}  # fmt: skip
"""States, reasons, causes and more, each of which a run must meet."""


Deed = Callable[["Payments", st.DataObject], None]
DEEDS: list[tuple[int, Callable[[Payments], Any], Deed]] = []


def deed(weight: int, is_possible: Callable[[Payments], Any] = lambda _: True) -> Callable[[Deed], Deed]:
    """Something that may happen; how often, and when."""

    def add(does: Deed) -> Deed:
        DEEDS.append((weight, is_possible, does))
        return does

    return add


async def expire_review(tx: Tx, payment_id: UUID) -> timedelta | None:
    """As the wiring has it: the case of the review ends with it."""
    return await service.expire_review(tx, payment_id, tell=close_expired)


class Payments(Driver):
    """Three customers with 200.00 each, and one who may be overdrawn, and is."""

    @initialize(amounts=st.lists(AMOUNTS, min_size=3, max_size=6), data=st.data())
    def begin(self, amounts: list[int], data: st.DataObject) -> None:
        self.begin_driving()
        self.known: list[Known] = []
        self.bank: dict[UUID, Charge] = {}
        self.under_way: list[tuple[Known, datetime]] = []  # requests
        self.unheard: list[tuple[Known, Heard, object]] = []  # answers
        kinds = [(200, False), (200, False), (200, False), (-30, True)]
        self.customers = [self.open_customer(Decimal(money), may_go_negative=loose) for money, loose in kinds]
        for amount in amounts:
            self.pay_one(data, Decimal(amount))

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One rule for all deeds: of many rules, Hypothesis switches some off in each example, and misses a lot."""
        possible = [does for weight, is_possible, does in DEEDS if is_possible(self) for _ in range(weight)]
        does = data.draw(st.sampled_from(possible))
        does(self, data)

    def pick(self, data: st.DataObject, *wanted: Stands) -> Known:
        """One of those that stand so, if there are any; otherwise any."""
        return data.draw(st.sampled_from([one for one in self.known if one.stands in wanted] or self.known))

    # -- beginning, reviewing ----------------------------------------------------------------------------------------

    @deed(2)
    def pay(self, data: st.DataObject) -> None:
        self.pay_one(data, Decimal(data.draw(AMOUNTS)))

    def pay_one(self, data: st.DataObject, units: Decimal) -> None:
        payer, payee, *_ = data.draw(st.permutations(self.customers))

        async def work(tx: Tx) -> service.Initiated:
            return await service.initiate(
                tx,
                from_id=payer.id,
                to_id=payee.id,
                amount=units,
                currency="PLN",
                by="t",
                provider="bank",
                tell=open_for_payment,
            )

        if not (payer.is_open and payee.is_open):
            self.call(work, AccountClosed)
            return
        made = self.call(work)
        one = Known(made.payment.id, made.payment.bank_key, payer, payee, units, self.now())
        self.known.append(one)
        if units > payer.spendable:
            expected = State.FAILED
        elif units > REJECTED:
            expected = State.REJECTED
        elif units > REVIEWED:
            expected = State.PENDING_REVIEW
            one.hold()
        else:
            expected = State.PROCESSING
            self.post(one)
        assert made.payment.state is expected
        assert made.has_cover == (expected is not State.FAILED)

    def post(self, one: Known) -> None:
        one.post()
        self.met["overdrawn payee"] += one.held < one.amount

    @deed(3, lambda self: self.known)
    def review(self, data: st.DataObject) -> None:
        does = data.draw(st.sampled_from(["release", "reject", "expire", "expire"]))
        one = self.pick(data, Stands.REVIEWED)
        is_over = one.stands is Stands.REVIEWED
        if does == "expire":
            self.clock.advance(days=data.draw(st.sampled_from([8, 0, 4, 8])))
            self.work(one, EXPIRE_REVIEW, expire_review)
            is_over = is_over and self.now() - one.began_at >= REVIEW_WINDOW
        else:
            refusals: list[type[Exception]] = [] if is_over else [NotUnderReview]
            if is_over and does == "release" and not one.payee.is_open:
                if one.payer.spendable < 0:
                    return  # closed, or without cover: either may be said
                refusals = [AccountClosed]
            self.call(lambda tx: getattr(service, does)(tx, one.id, actor="olga"), *refusals)
            is_over = not refusals
        if not is_over:
            return
        one.end_review()
        if does == "release" and one.payer.spendable >= one.amount:
            self.post(one)

    # -- the bank ----------------------------------------------------------------------------------------------------

    @deed(5, lambda self: self.known)
    def send(self, data: st.DataObject) -> None:
        """A worker sends one; what the bank does, and whether, when and how we hear of it."""
        does = data.draw(st.sampled_from(sorted(ANSWERS)))
        how = data.draw(st.sampled_from(["", "", "slow", "other amount", "other name"]))
        self.send_one(self.pick(data, Stands.MOVING), does, how)

    def send_one(self, one: Known, does: str, how: str = "") -> None:
        before = self.read_one(one)
        order = self.work(one, SEND, service.begin_sending)
        after = self.read_one(one)
        if before.delivery == "DUE" and one.is_reversed and not one.is_contradicted:
            assert (order, after.state, after.reason) == (None, "PERMANENTLY_FAILED", "reversed")
            one.give_back()
        if not isinstance(order, Order):
            return
        assert (one.stands, one.is_reversed, one.is_contradicted) == (Stands.MOVING, False, False)
        assert (before.delivery, order.key, Decimal(order.amount)) == ("DUE", one.key, one.amount)
        status, report = ANSWERS[does]
        if "late" in does:
            assert after.sent_at is not None
            self.under_way.append((one, after.sent_at))
        if status is not None:
            self.take(one, status)
        if report is None:
            return
        reference = f"{'s' if how == 'other name' else 'r'}{one.key}" if report in TOLD else None
        amount = one.amount + 1 if how == "other amount" and report in TOLD else None
        self.answer(one, Heard(report, Source.SEND, reference, attempt=order.attempt, amount=amount), order, how)

    def take(self, one: Known, status: str) -> None:
        if one.key in self.bank:
            self.bank[one.key].times += 1
        else:
            self.bank[one.key] = Charge(status)

    def answer(self, one: Known, heard: Heard, holder: object, how: str) -> None:
        if how == "slow":
            self.unheard.append((one, heard, holder))
        else:
            self.note(one, heard, holder)

    def note(self, one: Known, heard: Heard, holder: object) -> None:
        is_sent = heard.source is Source.SEND

        async def note(tx: Tx) -> timedelta | None:
            _, wait = await service.note_answer(tx, one.id, heard)
            return None if is_sent else wait

        version = self.read_one(one).version
        self.finish(one, SEND if is_sent else ASK, holder, note)
        is_old = not is_sent and heard.report is Report.PENDING and heard.version != version
        if heard.report in TOLD and not is_old:
            one.tell(heard.report, heard.amount)
        reason = self.read_one(one).reason
        self.met[reason or ""] += 1
        if one.stands is Stands.MOVING and reason == "gave_up":
            one.was_given_up = True
            one.give_back()

    @deed(5, lambda self: self.under_way)
    def arrive(self, data: st.DataObject) -> None:
        """A request that we gave up on; the bank's clock may be behind."""
        one, sent_at = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        if self.now() < sent_at + VALIDITY + CLOCKS_DIFFER:
            self.met["arrived late"] += 1
            self.take(one, "PENDING")

    @deed(3, lambda self: self.unheard)
    def hear_late(self, data: st.DataObject) -> None:
        self.met["heard late"] += 1
        self.note(*self.unheard.pop(data.draw(st.integers(0, len(self.unheard) - 1))))

    @deed(3, lambda self: self.known)
    def ask(self, data: st.DataObject) -> None:
        how = data.draw(st.sampled_from(["", "", "lost", "slow", "other amount", "other name"]))
        self.ask_one(self.pick(data, Stands.MOVING), how)

    def ask_one(self, one: Known, how: str = "") -> None:
        question = self.work(one, ASK, service.begin_asking)
        if not isinstance(question, Question):
            return
        charge = self.bank.get(one.key)
        report = Report(charge.status) if charge else Report.NOT_KNOWN
        report = Report.UNCLEAR if how == "lost" else report
        heard = Heard(
            report, Source.ASK, f"s{one.key}" if how == "other name" and report in TOLD else None,
            version=question.payment.version, asked_at=question.asked_at,
            amount=one.amount + 1 if how == "other amount" and report in TOLD else None,
        )  # fmt: skip
        self.answer(one, heard, question, how)

    @deed(2, lambda self: self.bank)
    def end_at_bank(self, data: st.DataObject) -> None:
        status = data.draw(st.sampled_from(["SETTLED", "DECLINED"]))
        key = data.draw(st.sampled_from(sorted(self.bank)))
        if self.bank[key].status == "PENDING":
            self.bank[key].status = status

    @deed(6, lambda self: self.bank)
    def callback(self, data: st.DataObject) -> None:
        """Of now, or one that was under way for long; with names and amounts that fit, or do not."""
        kind = data.draw(st.sampled_from(CALLS))
        one = data.draw(st.sampled_from([known for known in self.known if known.key in self.bank]))
        rival = data.draw(st.sampled_from(self.known))
        own, other, known_as = f"r{one.key}", f"s{one.key}", self.read_one(one).provider_ref
        status = {"old": "PENDING", "again": "FAILED", "strange": "?"}.get(kind, self.bank[one.key].status)
        amount = {"amount": one.amount, "other amount": one.amount + 1}.get(kind)
        reference = {"other name": other, "own name": own}.get(kind, str(one.key))
        client = {"other name": str(one.key), "two names": str(rival.key)}.get(kind)
        called = Callback("bank", str(uuid4()), reference, status, kind == "again", client, amount)
        became = self.call(lambda tx: service.receive(tx, called))
        is_kept = {
            "two names": rival is not one, "strange": True, "other amount": True, "own name": known_as != own,
            "other name": known_as not in (None, other),
        }.get(kind, False)  # fmt: skip
        assert (became == "kept") == is_kept, (kind, became)
        one.is_disputed = one.is_disputed or kind == "other amount"
        if not is_kept and called.report in TOLD:
            assert called.report is not None
            one.tell(called.report, amount)

    # -- time, bookkeepers, people -----------------------------------------------------------------------------------

    @deed(2)
    def sweep(self, data: st.DataObject) -> None:
        self.call(service.retry_due)

    @deed(1)
    def recover(self, data: st.DataObject) -> None:
        self.call(service.recover)

    @deed(3)
    def wait(self, data: st.DataObject) -> None:
        seconds = data.draw(st.sampled_from([1, 30, 61, 75, 91, 400, 4_000, 90_000, 700_000]))
        self.clock.advance(seconds=seconds)

    @deed(1, lambda self: self.known)
    def suffer(self, data: st.DataObject) -> None:
        """Days on which the bank takes nothing: so giving up comes within reach."""
        days = data.draw(st.integers(2, 9))
        does = data.draw(st.sampled_from(["busy", "busy", "drop", "die"]))
        one = self.pick(data, Stands.MOVING)
        for _ in range(days):
            self.clock.advance(days=1)
            self.call(service.retry_due)
            self.send_one(one, does)
            if does == "die":
                self.send_one(one, does)  # another worker takes its job over
            self.clock.advance(minutes=2)
            self.ask_one(one)

    @deed(1, lambda self: any(one.is_moving for one in self.known))
    def reverse(self, data: st.DataObject) -> None:
        """A bookkeeper does, whatever becomes of the payment; where the ledger allows it."""
        one = self.pick(data, Stands.MOVING, Stands.RETURNING)
        refusals: list[type[Exception]] = [] if one.has_open_ends else [AccountClosed]
        if not one.payee.may_go_negative and one.payee.spendable < one.amount:
            refusals.append(InsufficientFunds)
        refusals = [AlreadyReversed] if one.is_reversed else refusals
        posted = self.read_one(one).transaction_id
        assert posted is not None
        self.call(lambda tx: ledger.reverse(tx, posted, reason="by hand"), *refusals)
        if not refusals:
            one.reverse()

    def find_closable(self) -> list[Customer]:
        return [customer for customer in self.customers if customer.is_open and not customer.held]

    @deed(2, lambda self: self.find_closable())
    def close(self, data: st.DataObject) -> None:
        """Somebody takes out what is left, and closes the account; if possible one from which money is under way."""
        free = self.find_closable()
        paying = [one.payer for one in self.known if one.stands is Stands.MOVING and one.payer in free]
        self.close_one(data.draw(st.sampled_from(paying or free)))

    def close_one(self, customer: Customer) -> None:
        self.deposit(customer, -customer.balance)
        self.call(lambda tx: ledger.close_account(tx, customer.id))
        customer.is_open = False

    def find_strandable(self) -> list[Known]:
        free = self.find_closable()
        return [one for one in self.known if one.stands is Stands.MOVING and one.payer in free]

    @deed(1, lambda self: self.find_strandable())
    def strand(self, data: st.DataObject) -> None:
        """The payer closes the account, and the bank declines, or will say so when it is asked."""
        one = data.draw(st.sampled_from(self.find_strandable()))
        self.close_one(one.payer)
        self.send_one(one, "decline")
        if one.key in self.bank and self.bank[one.key].status == "PENDING":
            self.bank[one.key].status = "DECLINED"

    @deed(2, lambda self: not all(customer.is_open for customer in self.customers))
    def reopen(self, data: st.DataObject) -> None:
        missed = [one.payer for one in self.known if one.stands is Stands.RETURNING and not one.payer.is_open]
        customer = data.draw(st.sampled_from(missed or [one for one in self.customers if not one.is_open]))
        self.call(lambda tx: ledger.reopen_account(tx, customer.id))
        customer.is_open = True
        self.deposit(customer, Decimal(-30 if customer.may_go_negative else 200))

    @deed(4, lambda self: any(one.stands is Stands.RETURNING for one in self.known))
    def try_return(self, data: st.DataObject) -> None:
        one = self.pick(data, Stands.RETURNING)
        done = self.work(one, RETURN, service.return_money)
        if not one.is_contradicted:
            one.give_back()
            assert done == (one.stands is not Stands.RETURNING)

    @deed(4, lambda self: any(one.is_stuck for one in self.known))
    def resolve(self, data: st.DataObject) -> None:
        outcome = data.draw(st.sampled_from(Resolution))
        stuck = [one for one in self.known if one.is_stuck]
        one = data.draw(st.sampled_from([*stuck, *stuck, self.known[0]]))
        is_return = outcome is Resolution.RETURN
        refusals: list[type[Exception]] = [] if one.can_be_resolved(is_return=is_return) else [NotResolvable]
        refusals = refusals if one.is_stuck else [NothingToResolve]
        self.call(
            lambda tx: service.resolve(tx, one.id, resolution=outcome, actor="boss", reason="asked the bank"), *refusals
        )
        if not refusals:
            self.met[outcome.value] += 1
            one.resolve(is_return=is_return)

    @deed(1, lambda self: any(one.is_disputed for one in self.known))
    def dismiss(self, data: st.DataObject) -> None:
        """Somebody has looked at the calls that named another amount."""
        one = data.draw(st.sampled_from([one for one in self.known if one.is_disputed]))
        query = "SELECT id FROM payments.unmatched_callbacks WHERE payment_id = %s AND problem = 'amount_differs'"
        for (kept,) in self.look.execute(query + " AND dismissed_at IS NULL", [one.id]).fetchall():
            self.call(partial(service.dismiss_callback, callback_id=kept, actor="boss", reason="seen"))
        one.is_disputed = False

    # -- what must be true -------------------------------------------------------------------------------------------

    @invariant()
    def the_money_is_where_the_model_says(self) -> None:
        known: Sequence[Known] = getattr(self, "known", [])
        found = self.read(*known)
        for one in known:
            row = found[one.id]
            assert row.state in one.stands.value, (row, one)
            assert row.state != "FAILED" or row.retryable == (one.stands is Stands.MOVING)
            assert row.is_contradicted == one.is_contradicted, (row, one)
            assert not (one.was_given_up and one.key in self.bank), "the bank has it, and the money went back"
            self.met.update({row.state, row.reason or "", "contradiction" if row.is_contradicted else ""})
        assert {charge.times for charge in getattr(self, "bank", {}).values()} <= {1}, "charged twice"
        customers: list[Customer] = getattr(self, "customers", [])
        assert self.read_balances(customers) == {one.id: (one.balance, one.held) for one in customers}

    def teardown(self) -> None:
        """In the end: every rule in plain SQL, and the ledger's own audit."""
        check_consistent(self.dsn)
        assert self.loop.run_until_complete(self.db.run(audit.verify)).first_violation is None


@pytest.fixture
def machine(server: TestServer) -> Iterator[type[Payments]]:
    with server.database(app) as dsn, psycopg.connect(dsn, autocommit=True) as look:
        Payments.dsn, Payments.look = dsn, look
        Payments.loop = asyncio.new_event_loop()
        Payments.db = Database(dsn)
        Payments.clock = BusinessClock(dsn)
        for limit, outcome in ((REVIEWED, "REVIEW"), (REJECTED, "REJECT")):
            condition = {"field": "amount", "op": "gt", "value": str(limit)}
            Payments.loop.run_until_complete(add_rule(Payments.db, condition, outcome))
        yield Payments
        Payments.loop.run_until_complete(Payments.db.close())
        Payments.loop.close()


@pytest.mark.timeout(600 * int(os.environ.get(EXAMPLES_VARIABLE, "1")))
def test_payments_do_what_a_simple_model_does(machine: type[Payments]) -> None:
    """F5 to F7: in any order, with any losses; nothing twice, and no money made or lost."""
    is_long = EXAMPLES_VARIABLE in os.environ
    machine.met.clear()
    machine.TestCase.settings = settings(
        max_examples=int(os.environ.get(EXAMPLES_VARIABLE, str(EXAMPLES))), stateful_step_count=STEPS, deadline=None,
        database=None, derandomize=not is_long, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case = machine.TestCase()
    case.runTest()
    for query in (
        "SELECT cause, count(*)::int FROM payments.history GROUP BY 1",
        "SELECT problem, count(*)::int FROM payments.unmatched_callbacks GROUP BY 1",
    ):
        machine.met.update(dict(rows(machine.dsn, query)))
    missed = {what for what in NEEDED if not machine.met[what]}
    assert not missed, f"not reached any more: {sorted(missed)}; met: {sorted(machine.met.items())}"
