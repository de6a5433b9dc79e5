"""How a review of a payment ends, and how money that the bank does not have is called back.

Whoever decides is not named here: what initiators read says nothing of people, or of their reasons.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import InsufficientFunds
from apps.finance.payments import effects, store
from apps.finance.payments.effects import ASK, EXPIRE_REVIEW, SEND
from apps.finance.payments.events import PaymentRejected
from apps.finance.payments.model import (
    INSUFFICIENT_BALANCE,
    REVERSED,
    REVIEW_EXPIRED,
    REVIEW_REJECTED,
    REVIEW_WINDOW,
    AtTheBank,
    NotUnderReview,
    Payment,
    PaymentNotFound,
    State,
    is_with_us,
)
from duly import Tx, cancel

TellExpired = Callable[[Tx, PaymentRejected], Awaitable[None]]


async def release(tx: Tx, payment_id: UUID, *, actor: str, reason: str | None = None) -> Payment:
    """A review ended well: what was on hold is posted, and sent (F10). Without cover by now, it fails."""
    found = await _lock_reviewed(tx, payment_id)
    was = found.payment
    payer = await ledger.read_account(tx, was.from_account_id)
    values = {name: getattr(was, name) for name in ("id", "from_account_id", "to_account_id", "amount", "currency")}
    await cancel(tx, EXPIRE_REVIEW, was.id)
    await store.lock_ledger(tx, was)
    try:
        async with tx.begin_nested():  # of what is refused half-way nothing stays: the money is still on hold then
            await effects.void(tx, was.review_hold_id)
            posted = await effects.post(tx, values, payer, now=found.now)
    except InsufficientFunds:
        await effects.void(tx, was.review_hold_id)
        failed = was.move(State.FAILED, reason=INSUFFICIENT_BALANCE)
        return await effects.apply(tx, was, failed, cause="release", detail=said(actor, reason))
    after = replace(was.move(State.PROCESSING), **posted)
    return await effects.apply(tx, was, after, cause="release", detail=said(actor, reason))


async def reject(tx: Tx, payment_id: UUID, *, actor: str, reason: str | None = None) -> Payment:
    """A review ended badly: the hold is let go (F10)."""
    found = await _lock_reviewed(tx, payment_id)
    await cancel(tx, EXPIRE_REVIEW, payment_id)
    return await _reject(tx, found.payment, REVIEW_REJECTED, detail=said(actor, reason))


async def expire_review(tx: Tx, payment_id: UUID, *, tell: TellExpired) -> timedelta | None:
    """Nobody has decided in time: as if it had been rejected. How long it has yet; None when there is nothing to do.

    ``tell`` hears of it in the same transaction.
    """
    found = await lock(tx, payment_id)
    if found.payment.state is not State.PENDING_REVIEW:
        return None
    if (wait := found.payment.created_at + REVIEW_WINDOW - found.now) > timedelta(0):
        return wait
    expired = await _reject(tx, found.payment, REVIEW_EXPIRED)
    await tell(tx, effects.rejected(expired))
    return None


async def recall(tx: Tx, payment_id: UUID, *, actor: str) -> Payment:
    """Give back what was posted and never reached the bank; AtTheBank when it may have it, or has had it.

    Its reason is that of any posting that was reversed: what others read must not tell of officers.
    """
    found = await lock(tx, payment_id)
    was = found.payment
    if not is_with_us(was):
        raise AtTheBank(f"the payment is {was.state.value}, and the bank may have it")
    after = await effects.apply(
        tx, was, was.move(State.PERMANENTLY_FAILED, reason=REVERSED), cause="recall", detail=said(actor, None)
    )
    for name in (SEND, ASK):
        await cancel(tx, name, payment_id)
    return after


async def lock_held(tx: Tx, payment_ids: Sequence[UUID]) -> list[Payment]:
    """Those of these that are under review and that nobody works on; they stay so until the commit."""
    return await store.lock_held(tx, payment_ids)


async def lock(tx: Tx, payment_id: UUID) -> store.Locked:
    """One by its id, alone with it until the commit."""
    found = await store.lock_payment(tx, payment_id)
    if found is None:
        raise PaymentNotFound(f"no payment has the id {payment_id}")
    return found


def said(actor: str, reason: str | None) -> str:
    """For the history."""
    return f"by {actor}" if not reason else f"by {actor}: {reason}"[:500]


async def _reject(tx: Tx, was: Payment, reason: str, *, detail: str | None = None) -> Payment:
    await effects.void(tx, was.review_hold_id)
    return await effects.apply(tx, was, was.move(State.REJECTED, reason=reason), cause="review", detail=detail)


async def _lock_reviewed(tx: Tx, payment_id: UUID) -> store.Locked:
    found = await lock(tx, payment_id)
    if found.payment.state is not State.PENDING_REVIEW:
        raise NotUnderReview(f"the payment is {found.payment.state.value}")
    return found
