"""What a payment is, what may be heard of it, and what follows: one table, and no other way to change its state.

The bank is believed in different degrees. That it has settled or declined a payment is final, whoever says it: its
answer, or its call. That it does *not* have a payment is believed only from its answer to our question, and only once
a request of ours that is still under way would be refused for being late. So nothing is sent twice because an answer
was lost, and no money goes back that the bank is about to pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from uuid import UUID

from duly.errors import Conflict, Invalid, NotFound

WAITS = tuple(timedelta(minutes=minutes) for minutes in (1, 5, 15, 60, 360, 1_440))
"""Before each retry (F7); the first try is none, so a payment is sent seven times at most."""
VALIDITY = timedelta(seconds=60)
"""How long the bank may take a request after we began to send it; later it must refuse it."""
CLOCKS_DIFFER = timedelta(seconds=30)
"""By how much the bank's clock may be behind ours: so much longer it may take the request."""
SHORTEST_QUESTION_WAIT = timedelta(seconds=30)
LONGEST_QUESTION_WAIT = timedelta(hours=6)
SILENCE = timedelta(hours=1)
"""After which we ask about a payment that the bank has taken and says nothing of."""
UNKNOWN_TOO_LONG = timedelta(days=1)
PENDING_TOO_LONG = timedelta(days=3)
REVIEW_WINDOW = timedelta(days=7)
RETURN_WAIT = timedelta(hours=1)
LONGEST_REFERENCE = 200

INSUFFICIENT_BALANCE = "insufficient_balance"
SCREENING = "screening"
REVIEW_REJECTED = "review_rejected"
REVIEW_EXPIRED = "review_expired"
DECLINED = "declined"
GAVE_UP = "gave_up"
LAST_TRY = "last_try"
LOST = "lost"
REVERSED = "reversed"
RESOLVED = "resolved"
NOT_APPROVED = "not_approved"
"""All that others hear of why a payment was not approved: who screens payments does not say what they look at."""
UNTOLD = frozenset({SCREENING, REVIEW_REJECTED, REVIEW_EXPIRED})
UNTOLD_CAUSES = frozenset({"review", "release", "recall", REVERSED})
TOLD_CAUSES = {"recall": REVERSED}
"""That officers called a payment back reads as if a bookkeeper had reversed its posting."""


class State(StrEnum):
    """Where a payment stands."""

    REJECTED = "REJECTED"
    PENDING_REVIEW = "PENDING_REVIEW"
    PROCESSING = "PROCESSING"
    UNKNOWN = "UNKNOWN"  # nobody here knows whether the bank has it
    FAILED = "FAILED"  # retryable: the bank does not have it, and gets it again; otherwise there was no cover
    RETURNING = "RETURNING"  # it will not arrive, and the ledger refused to give the money back so far
    COMPLETED = "COMPLETED"
    PERMANENTLY_FAILED = "PERMANENTLY_FAILED"


class Report(StrEnum):
    """What is heard of a payment."""

    PENDING = "PENDING"  # the bank has it
    SETTLED = "SETTLED"
    DECLINED = "DECLINED"  # for good
    NOT_TAKEN = "NOT_TAKEN"  # the answer to a request: certainly not this one, not now
    NOT_KNOWN = "NOT_KNOWN"  # the answer to a question: there is no such payment
    UNCLEAR = "UNCLEAR"  # no answer, or none that can be read; or news that only a question can clear up


TOLD = frozenset({Report.PENDING, Report.SETTLED, Report.DECLINED})
"""What the bank says of a payment that it has, or had."""


class Source(StrEnum):
    """Who says so."""

    SEND = "send"
    ASK = "ask"
    CALLBACK = "callback"


class Delivery(StrEnum):
    """Whether a payment that is being processed is to be sent, or being sent; otherwise the bank has it."""

    DUE = "DUE"
    UNDER_WAY = "UNDER_WAY"


class Verdict(StrEnum):
    """What else may follow than a move."""

    STAY = "stay"
    CONTRADICT = "contradict"


class Resolution(StrEnum):
    """How a person ends what the bank and the books disagree on."""

    RETURN = "RETURN"
    COMPLETE = "COMPLETE"


class PaymentNotFound(NotFound):
    """There is no such payment."""


class SelfPayment(Invalid):
    """A payment goes to another account."""


class DifferentSides(Invalid):
    """One account grows with debits, and the other with credits."""


class WrongCurrency(Invalid):
    """The account has another currency."""


class NotUnderReview(Conflict):
    """The payment is not under review, or not any more."""


class AtTheBank(Conflict):
    """The bank may have the payment, or has had it."""


class NothingToResolve(Conflict):
    """The payment is neither contradicted nor being returned, or not any more."""


class NotResolvable(Conflict):
    """The payment cannot end so any more, or not yet."""


class CallbackNotFound(NotFound):
    """No such callback is kept."""


class CallbackDealtWith(Conflict):
    """Somebody has dealt with the callback before."""


_NEVER_SENT: Mapping[Report, State | Verdict] = {
    Report.PENDING: Verdict.CONTRADICT,
    Report.SETTLED: Verdict.CONTRADICT,
    Report.DECLINED: Verdict.STAY,
    Report.NOT_TAKEN: Verdict.STAY,
    Report.NOT_KNOWN: Verdict.STAY,
    Report.UNCLEAR: Verdict.STAY,
}
_GIVEN_BACK: Mapping[Report, State | Verdict] = {**_NEVER_SENT, Report.PENDING: Verdict.STAY}
_OPEN: Mapping[Report, State | Verdict] = {
    Report.PENDING: State.PROCESSING,
    Report.SETTLED: State.COMPLETED,
    Report.DECLINED: State.PERMANENTLY_FAILED,
    Report.NOT_TAKEN: State.FAILED,
    Report.NOT_KNOWN: State.FAILED,
    Report.UNCLEAR: State.UNKNOWN,
}
MOVES: Mapping[State, Mapping[Report, State | Verdict]] = MappingProxyType(
    {
        State.PROCESSING: {**_OPEN, Report.PENDING: Verdict.STAY},
        State.UNKNOWN: {**_OPEN, Report.UNCLEAR: Verdict.STAY},
        State.FAILED: {
            **_OPEN, Report.NOT_TAKEN: Verdict.STAY, Report.NOT_KNOWN: Verdict.STAY, Report.UNCLEAR: Verdict.STAY,
        },
        State.COMPLETED: {
            **dict.fromkeys(Report, Verdict.STAY),
            Report.DECLINED: Verdict.CONTRADICT,
            Report.NOT_KNOWN: Verdict.CONTRADICT,
        },
        State.RETURNING: _GIVEN_BACK,
        State.PERMANENTLY_FAILED: _GIVEN_BACK,
        State.PENDING_REVIEW: _NEVER_SENT,
        State.REJECTED: _NEVER_SENT,
    }
)  # fmt: skip
"""What follows from a report. Late and repeated ones find a state that has nothing to do with them."""

CHANGES = frozenset(
    {
        (None, State.REJECTED), (None, State.PENDING_REVIEW), (None, State.PROCESSING), (None, State.FAILED),
        (State.PENDING_REVIEW, State.PROCESSING), (State.PENDING_REVIEW, State.REJECTED),
        (State.PENDING_REVIEW, State.FAILED),
        (State.PROCESSING, State.UNKNOWN), (State.PROCESSING, State.FAILED), (State.PROCESSING, State.COMPLETED),
        (State.PROCESSING, State.PERMANENTLY_FAILED), (State.PROCESSING, State.RETURNING),
        (State.UNKNOWN, State.PROCESSING), (State.UNKNOWN, State.FAILED), (State.UNKNOWN, State.COMPLETED),
        (State.UNKNOWN, State.PERMANENTLY_FAILED), (State.UNKNOWN, State.RETURNING),
        (State.FAILED, State.PROCESSING), (State.FAILED, State.COMPLETED), (State.FAILED, State.PERMANENTLY_FAILED),
        (State.FAILED, State.RETURNING), (State.FAILED, State.UNKNOWN),
        (State.RETURNING, State.PERMANENTLY_FAILED), (State.RETURNING, State.COMPLETED),
    }
)  # fmt: skip
"""Every change of state there is; the history's constraint is the same list."""


@dataclass(frozen=True)
class Heard:
    """A report; ``attempt`` is which request it answers.

    Of an answer to a question, ``version`` is how the payment was when the bank was asked, and ``asked_at`` the moment.
    A bank may say of which amount it speaks.
    """

    report: Report
    source: Source
    reference: str | None = None
    detail: str | None = None
    attempt: int | None = None
    version: int | None = None
    asked_at: datetime | None = None
    amount: Decimal | None = None
    currency: str | None = None


@dataclass(frozen=True)
class Payment:
    """Money from one account to another, through a bank."""

    id: UUID
    from_account_id: UUID
    to_account_id: UUID
    amount: Decimal
    currency: str
    state: State
    initiated_by: str
    provider: str
    bank_key: UUID
    version: int
    since: datetime
    created_at: datetime
    updated_at: datetime
    reason: str | None = None
    retryable: bool = False
    next_retry_at: datetime | None = None
    attempts: int = 0
    delivery: Delivery | None = None
    sent_at: datetime | None = None
    provider_ref: str | None = None
    decision_id: UUID | None = None
    review_hold_id: UUID | None = None
    incoming_hold_id: UUID | None = None
    transaction_id: UUID | None = None
    reversal_id: UUID | None = None
    contradicted_at: datetime | None = None

    @property
    def is_moving(self) -> bool:
        """Whether its money is posted, and it is not over."""
        return self.retryable or self.state in (State.PROCESSING, State.UNKNOWN, State.RETURNING)

    @property
    def is_open(self) -> bool:
        """Whether the bank may have it, and has not said how it ended."""
        return self.state in (State.PROCESSING, State.UNKNOWN)

    def move(self, state: State, *, reason: str | None = None, next_retry_at: datetime | None = None) -> Payment:
        """In another state, with what belongs to that state and nothing else."""
        return replace(
            self, state=state, reason=reason, retryable=next_retry_at is not None, next_retry_at=next_retry_at,
            delivery=None,
        )  # fmt: skip


@dataclass(frozen=True)
class Question:
    """What the bank is asked about, and since when: its answer may speak of any moment after that."""

    payment: Payment
    asked_at: datetime


@dataclass(frozen=True)
class HistoryLine:
    """One thing that happened to a payment."""

    number: int
    at: datetime
    from_state: State | None
    to_state: State
    cause: str
    detail: str | None


@dataclass(frozen=True)
class Order:
    """What the bank is asked to do; every request for one payment has the same key."""

    payment_id: UUID
    key: UUID
    attempt: int
    provider: str
    from_account_id: UUID
    to_account_id: UUID
    amount: str
    currency: str
    valid_until: datetime


@dataclass(frozen=True)
class Callback:
    """What a provider called to say."""

    provider: str
    event_id: str
    payment_ref: str
    status: str
    retryable: bool = False
    client_ref: str | None = None
    amount: Decimal | None = None
    currency: str | None = None
    reason: str | None = None

    @property
    def report(self) -> Report | None:
        """What it means; None when nobody knows. That it may be tried again must be asked: it may speak of long ago."""
        match self.status.upper():
            case "SETTLED" | "COMPLETED":
                return Report.SETTLED
            case "PENDING" | "PROCESSING" | "ACCEPTED":
                return Report.PENDING
            case "FAILED" | "DECLINED" | "REJECTED":
                return Report.UNCLEAR if self.retryable else Report.DECLINED
        return None


def hear(payment: Payment, heard: Heard, *, now: datetime, is_reversed: bool = False) -> Payment | Verdict:
    """The payment after this was heard of it; or that nothing follows, or that it contradicts how it stands.

    ``is_reversed``: somebody has reversed its posting, so the recipient has no money that could arrive.
    """
    if payment.contradicted_at is not None or _is_outdated(payment, heard):
        return Verdict.STAY  # of what was contradicted, a person decides
    if heard.report in TOLD and speaks_of_another(payment, amount=heard.amount, currency=heard.currency):
        return Verdict.CONTRADICT
    if heard.report is Report.NOT_TAKEN and payment.is_open and payment.delivery is not Delivery.UNDER_WAY:
        heard = replace(heard, report=Report.UNCLEAR)  # somebody has said meanwhile that the bank has it: it is asked
    if is_reversed and heard.report is Report.SETTLED:
        return Verdict.CONTRADICT
    is_over = payment.state is State.FAILED and not payment.retryable  # nothing was ever sent
    follows = (_NEVER_SENT if is_over else MOVES[payment.state])[heard.report]
    if heard.report is Report.PENDING and payment.reason == GAVE_UP:
        return Verdict.CONTRADICT  # it said that it had no such payment
    if follows is State.FAILED:
        return _fail(payment, heard, now)
    if isinstance(follows, State):
        return _with_reference(payment, heard).move(follows, reason=_reason(follows, heard))
    if follows is Verdict.STAY and payment.is_open and heard.report is Report.PENDING:
        noted = replace(_with_reference(payment, heard), delivery=None)
        return noted if noted != payment else Verdict.STAY
    return follows


def speaks_of_another(payment: Payment, *, amount: Decimal | None, currency: str | None) -> bool:
    """Whether the bank names an amount, and it is another one."""
    return (amount is not None and amount != payment.amount) or (currency is not None and currency != payment.currency)


def doubt(payment: Payment, problem: str) -> Payment | None:
    """The bank has said of it what nobody can apply: it may have it, so it is asked before anything is sent."""
    if payment.contradicted_at is not None or (payment.delivery is None and not payment.retryable):
        return None
    return payment.move(State.UNKNOWN, reason=problem)


def resolve(payment: Payment, resolution: Resolution) -> Payment:
    """A person decides; what is over already is only taken note of."""
    if payment.contradicted_at is None and payment.state is not State.RETURNING:
        raise NothingToResolve(f"the payment is {payment.state.value}, and nothing contradicts it")
    if payment.state is State.PENDING_REVIEW:
        raise NotResolvable("the payment is under review: release or reject it first")
    clear = replace(payment, contradicted_at=None)
    is_return = resolution is Resolution.RETURN
    if payment.is_moving and is_return:
        return clear.move(State.PERMANENTLY_FAILED, reason=RESOLVED)
    if payment.is_moving:
        return clear.move(State.COMPLETED)
    if is_return == (payment.state is State.COMPLETED):
        raise NotResolvable(f"the payment is {payment.state.value} for good: correct it with a posting")
    return clear


def is_with_us(payment: Payment) -> bool:
    """Whether it is posted and the bank certainly does not have it, so that its money can simply go back."""
    if payment.contradicted_at is not None:
        return False
    return payment.retryable or payment.delivery is Delivery.DUE


def tell_reason(reason: str | None) -> str | None:
    """A payment's reason, as its initiator and subscribers hear it."""
    return NOT_APPROVED if reason in UNTOLD else reason


def is_reference(name: str) -> bool:
    """Whether a bank may call a payment so: one line that can be printed, in any script."""
    return 1 <= len(name) <= LONGEST_REFERENCE and name.isprintable() and name == name.strip()


def wait_before_asking(payment: Payment, *, now: datetime) -> timedelta:
    """Ask again after as long as it has been so already, within bounds; and not while a request may be under way."""
    age = now - payment.since
    if payment.state is State.PROCESSING:
        return min(max(age, SILENCE), LONGEST_QUESTION_WAIT)
    wait = min(max(age, SHORTEST_QUESTION_WAIT), LONGEST_QUESTION_WAIT)
    return max(wait, may_arrive_until(payment) - now)


def may_arrive_until(payment: Payment) -> datetime:
    """Until when the bank may still take what we sent last."""
    return (payment.sent_at or payment.created_at) + VALIDITY + CLOCKS_DIFFER


def is_worrying(payment: Payment, *, now: datetime) -> bool:
    """Whether it has been open for so long that a person should call the bank."""
    limit = UNKNOWN_TOO_LONG if payment.state is State.UNKNOWN else PENDING_TOO_LONG
    return payment.is_open and now - payment.since >= limit


def _is_outdated(payment: Payment, heard: Heard) -> bool:
    """Whether something has happened since, so that it cannot be relied on; how it ended can always be."""
    if heard.report in (Report.SETTLED, Report.DECLINED):
        return False
    if heard.source is Source.ASK:
        return heard.version != payment.version or heard.report is Report.UNCLEAR
    return (
        heard.source is Source.SEND and heard.attempt != payment.attempts and heard.report is not Report.PENDING
    )  # fmt: skip


def _fail(payment: Payment, heard: Heard, now: datetime) -> Payment | Verdict:
    """The bank does not have it: it is sent again in time, or given up."""
    is_answer = heard.report is Report.NOT_KNOWN
    if is_answer and (heard.asked_at is None or (payment.attempts and heard.asked_at < may_arrive_until(payment))):
        return Verdict.STAY  # our request might still arrive after the bank had looked
    if payment.attempts > len(WAITS):
        if is_answer:
            return payment.move(State.PERMANENTLY_FAILED, reason=GAVE_UP)
        return payment.move(State.UNKNOWN, reason=LAST_TRY)  # before money goes back, the bank is asked
    due = now
    if payment.sent_at is not None and payment.attempts:
        due = max(now, payment.sent_at + WAITS[payment.attempts - 1])
    return payment.move(State.FAILED, reason=heard.detail or heard.report.value.lower(), next_retry_at=due)


def _reason(state: State, heard: Heard) -> str | None:
    if state is State.PERMANENTLY_FAILED:
        return DECLINED
    return heard.detail or LOST if state is State.UNKNOWN else None


def _with_reference(payment: Payment, heard: Heard) -> Payment:
    """The bank's own name for it, which never changes."""
    return payment if payment.provider_ref or not heard.reference else replace(payment, provider_ref=heard.reference)
