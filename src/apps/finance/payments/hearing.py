"""What follows from what is heard of a payment: its answers, its calls, or that nothing was heard."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import structlog

from apps.finance.payments import effects, store
from apps.finance.payments.effects import ASK
from apps.finance.payments.model import (
    SILENCE,
    Heard,
    Payment,
    Report,
    Source,
    State,
    Verdict,
    hear,
    wait_before_asking,
)
from duly import Tx, cancel, schedule
from duly.operate.alerts import raise_alert

log = structlog.get_logger("apps.payments")
TOLD = (Report.PENDING, Report.SETTLED, Report.DECLINED)
"""What the bank says of a payment that it has, or had."""


async def listen(tx: Tx, found: store.Locked, heard: Heard) -> Payment:
    """What follows from a report, all of it in this transaction."""
    was = found.payment
    heard = await _check_reference(tx, was, heard)
    is_reversed = was.is_moving and heard.report in TOLD and await store.lock_posting(tx, was) is not None
    after = hear(was, heard, now=found.now, is_reversed=is_reversed)
    if after is Verdict.STAY:
        return was
    if after is Verdict.CONTRADICT:
        return await effects.contradict(tx, was, heard)
    assert isinstance(after, Payment)
    moved = await effects.apply(tx, was, after, cause=heard.source.value, detail=effects.describe(heard))
    if heard.source is not Source.ASK:  # a question that runs says itself when it comes again
        await _plan_question(tx, was, moved, now=found.now)
    return moved


async def _check_reference(tx: Tx, payment: Payment, heard: Heard) -> Heard:
    """A reference that another payment has is not believed; callbacks that came before it are matched now."""
    reference = heard.reference
    if reference is None or payment.provider_ref is not None:
        return heard
    owner = await store.find_reference(tx, payment.provider, reference)
    if owner is not None and owner != payment.id:
        log.error("provider_reference_twice", payment_id=str(payment.id), other_id=str(owner))
        await raise_alert(
            tx,
            subject="payments.reference",
            message=f"payments {payment.id} and {owner} have one reference at the bank",
        )
        return replace(heard, reference=None)
    if heard.source is not Source.CALLBACK and await store.match_callbacks(tx, payment, reference):
        return replace(heard, report=Report.UNCLEAR) if heard.report is Report.PENDING else heard
    return heard


async def _plan_question(tx: Tx, was: Payment, payment: Payment, *, now: datetime) -> None:
    """Whoever is open is asked about some day; whoever is not, is not."""
    if payment.state is State.UNKNOWN:
        await schedule(tx, ASK, payment.id, now + wait_before_asking(payment, now=now))
    elif payment.state is State.PROCESSING:
        await schedule(tx, ASK, payment.id, now + SILENCE)
    elif was.is_open or was.retryable:
        await cancel(tx, ASK, payment.id)
