"""What a change of a payment brings with it, all in one transaction: the ledger's part, history, facts and jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

import structlog

from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import (
    LONGEST_HOLD,
    Account,
    AlreadyReversed,
    Direction,
    HoldEnded,
    HoldNotFound,
    InsufficientFunds,
    NewEntry,
    Posting,
)
from apps.finance.payments import events, store
from apps.finance.payments.model import (
    RETURN_WAIT,
    REVERSED,
    REVIEW_WINDOW,
    Delivery,
    Heard,
    Payment,
    State,
    tell_reason,
)
from apps.shared.money import show
from duly import Tx, emit, schedule
from duly.errors import Conflict, Invalid
from duly.failpoints import failpoint
from duly.messages import EventBody
from duly.operate.alerts import raise_alert, resolve_alert

log = structlog.get_logger("apps.payments")
E = TypeVar("E", bound=EventBody)
MOST_OF_AN_ACTOR = 200  # in the engine's audit
BY_ITSELF = "payments"
SEND, ASK, RETURN, EXPIRE_REVIEW = "payments.send", "payments.ask", "payments.return", "payments.expire-review"
FACTS: dict[State, type[EventBody]] = {
    State.PROCESSING: events.PaymentCreated, State.REJECTED: events.PaymentRejected,
    State.PENDING_REVIEW: events.PaymentPendingReview, State.UNKNOWN: events.PaymentUnknown,
    State.FAILED: events.PaymentFailed, State.COMPLETED: events.PaymentCompleted,
    State.PERMANENTLY_FAILED: events.PaymentPermanentlyFailed,
}  # fmt: skip


@dataclass(frozen=True)
class Closing:
    """Who closes alerts, and why; for the engine's audit."""

    actor: str
    reason: str


async def apply(
    tx: Tx, was: Payment, after: Payment, *, cause: str, detail: str | None = None, closing: Closing | None = None
) -> Payment:
    """Write a change with everything that belongs to it: the ledger's part, the history, the fact, the jobs.

    What a person was told of it and is not so any more is closed: by ``closing``, or else by us.
    """
    if after.state is State.PERMANENTLY_FAILED and after.reversal_id is None:
        after = await give_back(tx, after)
    elif after.state is State.COMPLETED:
        await void(tx, after.incoming_hold_id)
    failpoint("handler.mid")
    saved = await store.save_payment(tx, was, after, cause=cause, detail=detail)
    await _follow(tx, was, saved)
    await _close_alerts(tx, was, saved, closing or Closing(BY_ITSELF, f"the payment is {saved.state.value}"))
    return saved


async def _follow(tx: Tx, was: Payment | None, payment: Payment) -> None:
    """The fact, and the job that goes on with it."""
    if was is not None and was.state is payment.state:
        return
    if (fact := _fact(payment, is_new=was is None or was.state is State.PENDING_REVIEW)) is not None:
        await emit(tx, fact)
    if payment.delivery is Delivery.DUE:
        await schedule(tx, SEND, payment.id)
    elif payment.state is State.PENDING_REVIEW:
        await schedule(tx, EXPIRE_REVIEW, payment.id, payment.created_at + REVIEW_WINDOW)
    elif payment.state is State.RETURNING:
        await schedule(tx, RETURN, payment.id, payment.updated_at + RETURN_WAIT)


async def create(tx: Tx, values: dict[str, Any]) -> Payment:
    """Write a new payment, with its fact and its job."""
    payment = await store.insert_payment(tx, values)
    failpoint("handler.mid")
    await _follow(tx, None, payment)
    return payment


async def post(tx: Tx, values: dict[str, Any], payer: Account, *, now: datetime) -> dict[str, Any]:
    """Move the money, and hold it where it went."""
    lowers, raises = Direction.CREDIT, Direction.DEBIT
    if payer.type.side == -1:
        lowers, raises = raises, lowers
    amount, payee_id = values["amount"], values["to_account_id"]
    lines = [NewEntry(payer.id, amount, lowers, covered=True), NewEntry(payee_id, amount, raises)]
    transaction = await ledger.post(tx, Posting(f"payment {values['id']}", lines))
    incoming = await _hold_incoming(tx, values, until=now + LONGEST_HOLD)
    return {"transaction_id": transaction.id, "incoming_hold_id": incoming, "delivery": Delivery.DUE}


async def _hold_incoming(tx: Tx, values: dict[str, Any], *, until: datetime) -> UUID | None:
    """Hold what arrived; of an account that was overdrawn, and may be, what lifted it above zero."""
    payee_id, amount, reference = values["to_account_id"], values["amount"], f"payment {values['id']} incoming"
    try:
        return (await ledger.place_hold(tx, payee_id, amount=amount, reference=reference, until=until)).id
    except InsufficientFunds:  # the posting has locked the account: what is available stays so until the commit
        available = (await ledger.get_balance(tx, payee_id)).available
    if available is None or available <= 0:
        return None
    return (await ledger.place_hold(tx, payee_id, amount=available, reference=reference, until=until)).id


async def end_reversed(tx: Tx, was: Payment, reversal_id: UUID) -> Payment:
    """Somebody has reversed the posting of a payment that the bank does not have: it is over, and never sent."""
    await void(tx, was.incoming_hold_id)
    after = replace(was.move(State.PERMANENTLY_FAILED, reason=REVERSED), reversal_id=reversal_id)
    return await apply(tx, was, after, cause="reversed", detail=f"by {reversal_id}")


async def give_back(tx: Tx, payment: Payment) -> Payment:
    """Reverse the posting, once; where the ledger refuses, the money stays on hold and a person is told."""
    assert payment.transaction_id is not None
    await store.lock_ledger(tx, payment)
    try:
        async with tx.begin_nested():  # of what is refused half-way nothing stays
            await void(tx, payment.incoming_hold_id)
            failpoint("handler.mid")
            try:
                reversal_id = (await ledger.reverse(tx, payment.transaction_id, reason=returned_reason(payment))).id
            except AlreadyReversed:  # by somebody with that right
                found = (await ledger.read_transaction(tx, payment.transaction_id)).reversed_by_id
                assert found is not None
                reversal_id = found
    except (Conflict, Invalid) as refused:
        log.error("payment_not_given_back", payment_id=str(payment.id), refusal=type(refused).__name__)
        await raise_alert(
            tx,
            subject=f"payments.return:{payment.id}",
            message=f"payment {payment.id} did not arrive, and the ledger does not take the money back: {refused}",
        )
        return payment.move(State.RETURNING, reason=payment.reason)
    return replace(payment, reversal_id=reversal_id)


def returned_reason(payment: Payment) -> str:
    """Of the reversal of its posting, when it is we who reverse it."""
    return f"payment {payment.id}: {payment.reason}"


async def contradict(tx: Tx, payment: Payment, heard: Heard, *, now: datetime) -> Payment:
    """It cannot be true of how the payment stands: nothing moves until a person, who is told, decides."""
    log.error("payment_contradicted", payment_id=str(payment.id), state=payment.state.value, heard=heard.report.value)
    marked = replace(payment, contradicted_at=now)
    noted = await store.save_payment(tx, payment, marked, cause="contradiction", detail=describe(heard))
    await emit(
        tx, events.PaymentContradicted(payment_id=payment.id, state=payment.state.value, heard=heard.report.value)
    )
    await raise_alert(
        tx,
        subject=f"payments.contradiction:{payment.id}",
        message=f"payment {payment.id} is {payment.state.value}, and the bank says {heard.report.value}: ask the bank",
    )
    return noted


async def _close_alerts(tx: Tx, was: Payment, payment: Payment, closing: Closing) -> None:
    """What a person was told and is not so any more; of one that waits to go back, that it does not stays open."""
    is_resolved = was.contradicted_at is not None and payment.contradicted_at is None
    is_over = {
        "contradiction": is_resolved,
        "open": (was.is_open or is_resolved) and not payment.is_open,
        "amount": (was.is_moving or is_resolved) and not payment.is_moving,
        "return": (was.state is State.RETURNING or is_resolved) and not payment.is_moving,
    }
    subjects = [f"payments.{about}:{payment.id}" for about, is_so in is_over.items() if is_so]
    for alert_id in await store.lock_alerts(tx, subjects) if subjects else []:
        await resolve_alert(tx, alert_id, actor=closing.actor[:MOST_OF_AN_ACTOR], reason=closing.reason)


async def void(tx: Tx, hold_id: UUID | None) -> None:
    """Let go of a hold; one that somebody else has ended, or whose time was over, is let go already."""
    if hold_id is None:
        return
    try:
        await ledger.void_hold(tx, hold_id)
    except (HoldEnded, HoldNotFound):
        log.warning("payment_hold_ended_before", hold_id=str(hold_id))


def describe(heard: Heard) -> str:
    """For the history."""
    said = heard.report.value if heard.amount is None else f"{heard.report.value} {heard.amount}"
    said = f"{said} {heard.currency}" if heard.currency else said
    return said if heard.detail is None else f"{said}: {heard.detail}"


def _fact(payment: Payment, *, is_new: bool) -> EventBody | None:
    """What others hear of a payment that is in another state now."""
    kind = FACTS.get(payment.state)
    if kind is None or (kind is events.PaymentCreated and not is_new):
        return None
    return _as(kind, payment)


def held(payment: Payment) -> events.PaymentPendingReview:
    """The fact that a person has to decide about it."""
    return _as(events.PaymentPendingReview, payment)


def rejected(payment: Payment) -> events.PaymentRejected:
    """The fact that it was rejected."""
    return _as(events.PaymentRejected, payment)


def _as(kind: type[E], payment: Payment) -> E:
    known = vars(payment) | {
        "payment_id": payment.id, "amount": show(payment.amount, payment.currency), "hold_id": payment.review_hold_id,
        "reason": tell_reason(payment.reason),
    }  # fmt: skip
    return kind.model_validate({name: known[name] for name in kind.model_fields})
