"""How a case is decided: by one officer, or by two, and what that does to the money, all in one transaction.

Locks: the payment, the case, then whatever the ledger locks. The end of a review locks the payment first and tells its
case afterwards, so a decision takes the same order: one of them is first, and the other finds that it is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import structlog

from apps.finance.compliance import events, model, opening, service, store
from apps.finance.compliance.model import (
    MOST_LINES,
    Case,
    Effect,
    Kind,
    LineKind,
    Proposal,
    ReasonCode,
    Resolution,
    Verdict,
    check_code,
    check_confirm,
    check_decide,
)
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import AlreadyReversed, TransactionStatus
from apps.finance.payments import service as payments
from apps.finance.payments.model import Payment, State
from duly import Tx, emit
from duly.errors import Conflict, DulyError, Invalid
from duly.failpoints import failpoint

log = structlog.get_logger("apps.compliance")
OPERATIONS = "operations"
"""Under this name payments and the ledger hear of a decision: what others may read says nothing of compliance."""


@dataclass(frozen=True)
class Decided:
    """The case after it was decided or proposed; or as it was, and why the books did not allow it."""

    case: Case
    refusal: DulyError | None = None


@dataclass(frozen=True)
class _Both:
    locked: store.Locked
    payment: Payment | None


async def resolve(
    tx: Tx, case_id: UUID, *, decision: Verdict, reason_code: ReasonCode, reason: str, actor: str
) -> Decided:
    """Decide a case (F10), once; where two must agree, propose how."""
    check_code(decision, reason_code)
    both = await _lock(tx, case_id)
    case, now = both.locked.case, both.locked.now
    check_decide(case, actor=actor)
    if case.needs_two or opening.rules_in_force().wants_two(case.amount, case.currency):
        proposal = Proposal(decision, reason_code, reason, actor, now)
        saved = await store.save_case(
            tx, case, model.propose(case, proposal), actor=actor, kind=LineKind.PROPOSED, detail=_said(proposal)
        )
        await emit(tx, events.CaseProposed(case_id=case.id, decision=decision.value, proposed_by=actor))
        return Decided(saved)
    return await _decide(tx, both, Proposal(decision, reason_code, reason, actor, now), confirmed_by=None)


async def confirm(tx: Tx, case_id: UUID, *, actor: str) -> Decided:
    """The second officer agrees: it is decided so, once."""
    both = await _lock(tx, case_id)
    proposal = check_confirm(both.locked.case, actor=actor)
    return await _decide(tx, both, proposal, confirmed_by=actor)


async def refuse(tx: Tx, case_id: UUID, *, reason: str, actor: str) -> Case:
    """The second officer does not agree, or the first takes it back: the case is open again."""
    was = (await service.lock(tx, case_id)).case
    after = model.refuse(was, actor=actor)
    is_own = was.proposal is not None and was.proposal.by == actor
    kind = LineKind.PROPOSAL_WITHDRAWN if is_own else LineKind.PROPOSAL_REFUSED
    saved = await store.save_case(tx, was, after, actor=actor, kind=kind, detail={"reason": reason})
    await emit(tx, events.CaseProposalRefused(case_id=was.id, refused_by=actor))
    return saved


async def _lock(tx: Tx, case_id: UUID) -> _Both:
    """The payment first; what a case is about never changes, so it can be read before."""
    about = await service.find_case(tx, case_id)
    payment = (await payments.lock(tx, about.payment_id)).payment if about.payment_id is not None else None
    return _Both(await service.lock(tx, case_id), payment)


async def _decide(tx: Tx, both: _Both, proposal: Proposal, *, confirmed_by: str | None) -> Decided:
    """Move the money, or not, and end the case; what the books refuse leaves all as it was, but for a line."""
    was, actor = both.locked.case, confirmed_by or proposal.by
    try:
        async with tx.begin_nested():  # of what is refused half-way nothing stays
            effect = await _carry_out(tx, was, both.payment, proposal.decision)
    except (Conflict, Invalid) as refused:
        log.warning("case_not_resolved", case_id=str(was.id), refusal=type(refused).__name__)
        if was.version >= MOST_LINES:
            raise
        tried = {"decision": proposal.decision.value, "problem": type(refused).__name__, "text": str(refused)[:1_000]}
        kept = await store.save_case(tx, was, was, actor=actor, kind=LineKind.RESOLUTION_REFUSED, detail=tried)
        return Decided(kept, refused)
    failpoint("handler.mid")
    resolution = Resolution(
        proposal.decision, proposal.reason_code, proposal.reason, proposal.by, confirmed_by, effect
    )  # fmt: skip
    told = _said(proposal) | {"effect": effect.value} | ({"proposedBy": proposal.by} if confirmed_by else {})
    saved = await store.save_case(
        tx, was, model.resolve(was, resolution, now=both.locked.now), actor=actor, kind=LineKind.RESOLVED, detail=told
    )
    failpoint("handler.mid")
    await service.finish(tx, saved, _fact(saved, resolution), actor=actor)
    return Decided(saved)


async def _carry_out(tx: Tx, case: Case, payment: Payment | None, decision: Verdict) -> Effect:
    """What the decision does to the money."""
    if case.kind is Kind.PAYMENT_REVIEW and payment is not None and payment.state is State.PENDING_REVIEW:
        if decision is Verdict.REJECT:
            await payments.reject(tx, payment.id, actor=OPERATIONS)
            return Effect.HOLD_VOIDED
        after = await payments.release(tx, payment.id, actor=OPERATIONS)
        return Effect.RELEASED if after.state is State.PROCESSING else Effect.RELEASE_FAILED
    posted = case.transaction_id or (payment.transaction_id if payment else None)
    if posted is None:
        return Effect.NOTHING_HELD
    if decision is Verdict.APPROVE:
        return await _leave(tx, payment, posted)
    if payment is not None and payment.is_moving:
        return await _call_back(tx, payment)
    try:
        await ledger.reverse(tx, posted, reason=OPERATIONS)
    except AlreadyReversed:
        return Effect.ALREADY_REVERSED
    return Effect.REVERSED


async def _leave(tx: Tx, payment: Payment | None, posted: UUID) -> Effect:
    """Nothing is done about what was posted; where the money is, was decided by others before."""
    if await ledger.lock_transaction(tx, posted) is TransactionStatus.REVERSED:
        return Effect.ALREADY_REVERSED
    return Effect.RETURNING if payment is not None and payment.state is State.RETURNING else Effect.MONEY_STAYS


async def _call_back(tx: Tx, payment: Payment) -> Effect:
    """Of a payment that is not over: what the bank certainly does not have goes back, anything else is refused."""
    if payment.state is State.RETURNING:
        return Effect.RETURNING
    after = await payments.recall(tx, payment.id, actor=OPERATIONS)
    if after.reversal_id is None:
        return Effect.RETURNING
    reversal = await ledger.read_transaction(tx, after.reversal_id)
    return Effect.REVERSED if reversal.reason == payments.returned_reason(after) else Effect.ALREADY_REVERSED


def _said(proposal: Proposal) -> dict[str, Any]:
    return {
        "decision": proposal.decision.value, "reasonCode": proposal.reason_code.value, "reason": proposal.reason
    }  # fmt: skip


def _fact(case: Case, resolution: Resolution) -> events.CaseResolved:
    return events.CaseResolved(
        case_id=case.id, decision=resolution.decision.value, effect=resolution.effect.value,
        payment_id=case.payment_id, transaction_id=case.transaction_id, resolved_by=resolution.by,
        confirmed_by=resolution.confirmed_by,
    )  # fmt: skip
