"""What follows from what is heard of a payment: its answers, its calls, or that nothing was heard."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import structlog

from apps.finance.payments import effects, model, store
from apps.finance.payments.effects import ASK
from apps.finance.payments.model import (
    SILENCE,
    TOLD,
    Heard,
    Payment,
    Report,
    Source,
    State,
    Verdict,
    hear,
    speaks_of_another,
    wait_before_asking,
)
from duly import Tx, cancel, schedule
from duly.operate.alerts import raise_alert

log = structlog.get_logger("apps.payments")


async def listen(tx: Tx, found: store.Locked, heard: Heard) -> Payment:
    """What follows from a report, all of it in this transaction."""
    was = found.payment
    heard = await _check_reference(tx, was, heard)
    is_told = was.is_moving and was.contradicted_at is None and heard.report in TOLD
    posted = await store.lock_posting(tx, was) if is_told else None
    if posted is not None and posted.is_disputed and heard.report is Report.SETTLED and heard.amount is None:
        return await _dispute(tx, was)
    after = hear(was, heard, now=found.now, is_reversed=posted is not None and posted.reversal_id is not None)
    if after is Verdict.STAY:
        return was
    if after is Verdict.CONTRADICT:
        return await effects.contradict(tx, was, heard, now=found.now)
    assert isinstance(after, Payment)
    moved = await effects.apply(tx, was, after, cause=heard.source.value, detail=effects.describe(heard))
    if heard.source is not Source.ASK:  # a question that runs says itself when it comes again
        await plan_question(tx, was, moved, now=found.now)
    return moved


async def doubt(tx: Tx, found: store.Locked, problem: str) -> None:
    """The bank has called, and what it said is for a person: what is about to be sent is asked about instead."""
    after = model.doubt(found.payment, problem)
    if after is not None:
        moved = await effects.apply(tx, found.payment, after, cause=Source.CALLBACK.value, detail=problem)
        await plan_question(tx, found.payment, moved, now=found.now)


async def tell_reference(tx: Tx, payment: Payment, other: str) -> None:
    """For a person: a name at the bank that cannot be this payment's."""
    log.error("provider_reference_differs", payment_id=str(payment.id))
    await raise_alert(tx, subject=f"payments.reference:{payment.id}", message=f"payment {payment.id}: {other}")


async def _dispute(tx: Tx, payment: Payment) -> Payment:
    """A call named another amount, and nobody has looked at it: that it is settled is not enough."""
    log.warning("payment_amount_disputed", payment_id=str(payment.id))
    await raise_alert(
        tx,
        subject=f"payments.amount:{payment.id}",
        message=f"payment {payment.id} is settled at the bank, which called with another amount before: ask the bank",
    )
    return payment


async def _check_reference(tx: Tx, payment: Payment, heard: Heard) -> Heard:
    """A reference that another payment has, or a second one, is told; callbacks that came before it are matched now."""
    reference = heard.reference
    if reference is None or payment.provider_ref == reference:
        return heard
    if payment.provider_ref is not None:
        await tell_reference(tx, payment, "the bank gave it a second reference")
        return replace(heard, reference=None)
    owner = await store.find_reference(tx, payment.provider, reference)
    if owner is not None and owner != payment.id:
        await tell_reference(tx, payment, f"at the bank payment {owner} has the same reference")
        return replace(heard, reference=None)
    if heard.source is not Source.CALLBACK and await store.match_callbacks(tx, payment, reference):
        is_clear = heard.report is not Report.PENDING or speaks_of_another(
            payment, amount=heard.amount, currency=heard.currency
        )
        return heard if is_clear else replace(heard, report=Report.UNCLEAR)
    return heard


async def plan_question(tx: Tx, was: Payment, payment: Payment, *, now: datetime) -> None:
    """Whoever is open is asked about some day; whoever is not, is not."""
    if payment.state is State.UNKNOWN:
        await schedule(tx, ASK, payment.id, now + wait_before_asking(payment, now=now))
    elif payment.state is State.PROCESSING:
        await schedule(tx, ASK, payment.id, now + SILENCE)
    elif was.is_open or was.retryable:
        await cancel(tx, ASK, payment.id)
