"""What a compliance officer does with a case in the console: each audited in the transaction that does it.

The audit says who did what to which case. Why, and what was said, is in the case's own timeline: whoever runs the
engine reads the one, and only officers the other.
"""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from pydantic import StringConstraints, TypeAdapter, ValidationError, ValidationInfo, field_validator

from apps.finance.compliance import resolving, service
from apps.finance.compliance.model import (
    LONGEST_REFERENCE,
    BadEvidence,
    Case,
    Effect,
    ReasonCode,
    Verdict,
    WrongReasonCode,
    check_code,
    check_evidence,
)
from apps.finance.compliance.resolving import Decided
from apps.shared.money import show
from apps.shared.text import EXACT, Prose
from duly import Tx
from duly.errors import Fault, Invalid
from duly.operate import Action, Arguments, Result, write_audit

ROLE = "COMPLIANCE_OFFICER"
KEPT = "kept in the timeline of the case with your name"
_PROSE: TypeAdapter[str] = TypeAdapter(Prose)
EFFECTS: dict[Effect, str] = {
    Effect.RELEASED: "the payment is released, and on its way",
    Effect.RELEASE_FAILED: "the payment was to be released, and has no cover any more: it failed",
    Effect.HOLD_VOIDED: "the payment is rejected, and nothing is on hold for it",
    Effect.REVERSED: "what was posted is reversed",
    Effect.ALREADY_REVERSED: "what was posted had gone back before",
    Effect.RETURNING: "the payment is called back",
    Effect.MONEY_STAYS: "what was posted stays posted",
    Effect.NOTHING_HELD: "the payment had ended before, and no money of it had moved",
}


class OfCase(Arguments):
    """A case."""

    id: UUID


class Assignment(OfCase):
    """Who is to work on it."""

    assignee: Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=EXACT)]


class Comment(OfCase):
    """What there is to say."""

    text: Prose


class Evidence(OfCase):
    """Where something is kept that speaks for a decision."""

    reference: Annotated[str, StringConstraints(strip_whitespace=True, max_length=LONGEST_REFERENCE)]

    @field_validator("reference")
    @classmethod
    def check_reference(cls, given: str) -> str:
        """A name of it, and no content."""
        try:
            return check_evidence(given)
        except BadEvidence as error:
            raise ValueError(str(error)) from None


class Resolving(OfCase):
    """What to decide, and why in words that can be counted."""

    decision: Verdict
    reason_code: ReasonCode

    @field_validator("reason_code")
    @classmethod
    def check_reason_code(cls, given: ReasonCode, info: ValidationInfo) -> ReasonCode:
        """One for this decision."""
        if "decision" in info.data:
            try:
                check_code(info.data["decision"], given)
            except WrongReasonCode as error:
                raise ValueError(str(error)) from None
        return given


async def _claim(tx: Tx, given: OfCase, actor: str, reason: str | None) -> Result:
    return await _done(tx, await service.claim(tx, given.id, actor=actor), "claimed", "you work on the case now", actor)


async def _unclaim(tx: Tx, given: OfCase, actor: str, reason: str | None) -> Result:
    case = await service.unclaim(tx, given.id, actor=actor)
    return await _done(tx, case, "unclaimed", "nobody works on the case now", actor)


async def _assign(tx: Tx, given: Assignment, actor: str, reason: str | None) -> Result:
    case = await service.assign(tx, given.id, assignee=given.assignee, actor=actor)
    return await _done(tx, case, "assigned", f"{case.assignee} works on the case now", actor)


async def _comment(tx: Tx, given: Comment, actor: str, reason: str | None) -> Result:
    case = await service.comment(tx, given.id, text=given.text, actor=actor)
    return await _done(tx, case, "commented", "the comment is in the timeline", actor)


async def _add_evidence(tx: Tx, given: Evidence, actor: str, reason: str | None) -> Result:
    case = await service.add_evidence(tx, given.id, reference=given.reference, actor=actor)
    return await _done(tx, case, "evidence_added", "the reference is in the timeline", actor)


async def _resolve(tx: Tx, given: Resolving, actor: str, reason: str | None) -> Result:
    decided = await resolving.resolve(
        tx, given.id, decision=given.decision, reason_code=given.reason_code, reason=_prose(reason), actor=actor
    )
    return await _tell(tx, decided, actor)


async def _confirm(tx: Tx, given: OfCase, actor: str, reason: str | None) -> Result:
    return await _tell(tx, await resolving.confirm(tx, given.id, actor=actor), actor)


async def _refuse(tx: Tx, given: OfCase, actor: str, reason: str | None) -> Result:
    case = await resolving.refuse(tx, given.id, reason=_prose(reason), actor=actor)
    return await _done(tx, case, "proposal_refused", "the case is open again", actor)


async def _reopen(tx: Tx, given: OfCase, actor: str, reason: str | None) -> Result:
    case = await service.reopen(tx, given.id, reason=_prose(reason), actor=actor)
    return await _done(tx, case, "reopened", "this case follows the one that had ended", actor)


def _prose(reason: str | None) -> str:
    """Why, as the API would take it."""
    try:
        return _PROSE.validate_python(reason or "")
    except ValidationError as error:
        refusal = Invalid("the reason cannot be kept")
        refusal.faults = (Fault("body", "$.reason", str(error.errors()[0]["msg"])),)
        raise refusal from None


async def _tell(tx: Tx, decided: Decided, actor: str) -> Result:
    case = decided.case
    if decided.refusal is not None:
        said = f"the books do not allow it, and the case is as it was: {decided.refusal}"
        result = await _done(tx, case, "resolution_refused", said, actor)
        return Result(result.message, page=result.page, is_refused=True)
    if case.resolution is None:
        return await _done(tx, case, "proposed", "it is proposed: a second officer confirms or refuses it", actor)
    amount = f"{show(case.amount, case.currency)} {case.currency}"
    said = f"decided {case.resolution.decision.value} about {amount}: {EFFECTS[case.resolution.effect]}"
    return await _done(tx, case, "resolved", said, actor)


async def _done(tx: Tx, case: Case, what: str, said: str, actor: str) -> Result:
    await write_audit(
        tx, actor=actor, action=f"case.{what}", subject=f"case:{case.id}",
        after={"status": case.status.value, "assignee": case.assignee},
    )  # fmt: skip
    return Result(said, page=f"/cases/{case.id}")


ACTIONS = (
    Action("cases.claim", "Take a case that nobody works on.", OfCase, _claim, verb="Claim"),
    Action("cases.unclaim", "Give a case back to the queue.", OfCase, _unclaim, verb="Give back"),
    Action("cases.assign", "Give a case to somebody, whoever had it.", Assignment, _assign, verb="Assign"),
    Action("cases.comment", "Say something about a case, for the other officers.", Comment, _comment, verb="Comment"),
    Action(
        "cases.evidence", "Say where something is kept that speaks for a decision.",
        Evidence, _add_evidence, verb="Add the reference",
    ),
    Action(
        "cases.resolve", "Decide a case: the money is released, taken back or left where it is, at once. Where two "
        "officers must agree, this proposes it to the second.",
        Resolving, _resolve, True, verb="Decide", needs_reason=True, reason_note=KEPT,
    ),
    Action(
        "cases.confirm", "Agree with what is proposed: it is carried out at once.",
        OfCase, _confirm, True, verb="Confirm", reason_note="",
    ),
    Action(
        "cases.refuse", "Do not agree with what is proposed, or take it back: the case is open again.",
        OfCase, _refuse, True, verb="Refuse", needs_reason=True, reason_note=KEPT,
    ),
    Action(
        "cases.reopen", "Open a new case that follows this one. What was decided stays as it is.",
        OfCase, _reopen, True, verb="Reopen", needs_reason=True, reason_note=KEPT,
    ),
)  # fmt: skip
