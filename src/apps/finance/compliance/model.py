"""What a case is, who may do what with it, and what a resolution means: pure, and no other way to change a case."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID

from duly.errors import Conflict, Forbidden, Invalid, NotFound, Refused

SYSTEM = "system"
MOST_LINES = 1_000
"""Of a timeline, before comments, evidence and reassignments are refused; how a case ends can always be written."""
MOST_PROPOSAL_LINES = 1_200
"""Before a proposal can no longer be refused: one that is made then stands until somebody else confirms it."""
LONGEST_REFERENCE = 200
ANY_CURRENCY = "*"
DEFAULT_FOUR_EYES = "*=15000"
DEFAULT_SLA_HOURS = "CRITICAL=4,HIGH=24,MEDIUM=72,LOW=120"
_EVIDENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@#-]{0,199}")


class Kind(StrEnum):
    """What a case is about: money that is on hold, or money that was posted."""

    PAYMENT_REVIEW = "PAYMENT_REVIEW"
    AML = "AML"


class Status(StrEnum):
    """Where a case stands; the last two are final."""

    OPEN = "OPEN"
    PROPOSED = "PROPOSED"
    RESOLVED = "RESOLVED"
    EXPIRED = "EXPIRED"


class Severity(StrEnum):
    """How soon somebody must decide; the later the worse."""

    LOW = "LOW"
    MEDIUM = "MEDIUM"
    HIGH = "HIGH"
    CRITICAL = "CRITICAL"


class Verdict(StrEnum):
    """What an officer decides."""

    APPROVE = "APPROVE"
    REJECT = "REJECT"


class ReasonCode(StrEnum):
    """Why, in words that can be counted."""

    FALSE_POSITIVE = "FALSE_POSITIVE"
    KNOWN_CUSTOMER = "KNOWN_CUSTOMER"
    WITHIN_PROFILE = "WITHIN_PROFILE"
    DOCUMENTS_PROVIDED = "DOCUMENTS_PROVIDED"
    SUSPECTED_LAUNDERING = "SUSPECTED_LAUNDERING"
    STRUCTURING = "STRUCTURING"
    SANCTIONS_MATCH = "SANCTIONS_MATCH"
    FRAUD = "FRAUD"
    IDENTITY_UNVERIFIED = "IDENTITY_UNVERIFIED"
    SOURCE_OF_FUNDS_UNKNOWN = "SOURCE_OF_FUNDS_UNKNOWN"
    OTHER = "OTHER"


REASON_CODES: Mapping[Verdict, tuple[ReasonCode, ...]] = MappingProxyType(
    {
        Verdict.APPROVE: (
            ReasonCode.FALSE_POSITIVE, ReasonCode.KNOWN_CUSTOMER, ReasonCode.WITHIN_PROFILE,
            ReasonCode.DOCUMENTS_PROVIDED, ReasonCode.OTHER,
        ),
        Verdict.REJECT: (
            ReasonCode.SUSPECTED_LAUNDERING, ReasonCode.STRUCTURING, ReasonCode.SANCTIONS_MATCH, ReasonCode.FRAUD,
            ReasonCode.IDENTITY_UNVERIFIED, ReasonCode.SOURCE_OF_FUNDS_UNKNOWN, ReasonCode.OTHER,
        ),
    }
)  # fmt: skip


class Effect(StrEnum):
    """What became of the money when a case was resolved."""

    RELEASED = "RELEASED"  # a held payment was posted, and is on its way
    RELEASE_FAILED = "RELEASE_FAILED"  # it was to be released, and had no cover any more: it failed
    HOLD_VOIDED = "HOLD_VOIDED"  # a held payment was rejected
    REVERSED = "REVERSED"  # what was posted was reversed, now
    ALREADY_REVERSED = "ALREADY_REVERSED"  # somebody had reversed it before
    RETURNING = "RETURNING"  # the payment is called back, or has failed; the ledger takes the money back later
    MONEY_STAYS = "MONEY_STAYS"  # what was posted is posted, and nobody takes it back
    NOTHING_HELD = "NOTHING_HELD"  # the payment had ended before, and no money of it had moved


class LineKind(StrEnum):
    """What a line of a timeline tells."""

    OPENED = "OPENED"
    ASSIGNED = "ASSIGNED"
    CLAIMED = "CLAIMED"
    UNCLAIMED = "UNCLAIMED"
    COMMENTED = "COMMENTED"
    EVIDENCE_ADDED = "EVIDENCE_ADDED"
    OVERDUE = "OVERDUE"
    PROPOSED = "PROPOSED"
    PROPOSAL_REFUSED = "PROPOSAL_REFUSED"
    PROPOSAL_WITHDRAWN = "PROPOSAL_WITHDRAWN"
    RESOLUTION_REFUSED = "RESOLUTION_REFUSED"  # the books did not allow it, and the case is as it was
    RESOLVED = "RESOLVED"
    EXPIRED = "EXPIRED"


class CaseNotFound(NotFound):
    """There is no such case."""


class CaseEnded(Conflict):
    """The case is decided, or has expired: reopen it."""


class CaseNotEnded(Conflict):
    """The case is open, and needs no second one."""


class AlreadyReopened(Conflict):
    """Somebody has reopened it before."""


class CaseTaken(Conflict):
    """Somebody else works on the case."""


class NotAssigned(Conflict):
    """Nobody works on the case."""


class CaseProposed(Conflict):
    """A decision is proposed: a second officer confirms or refuses it."""


class NothingProposed(Conflict):
    """No decision is proposed, or not any more."""


class TimelineFull(Conflict):
    """The case has as many lines as one may have: decide it."""


class OwnPayment(Forbidden):
    """Nobody decides about a payment of his own."""


class SecondOfficerNeeded(Forbidden):
    """Who proposed a decision, or reopened the case, does not confirm it."""


class WrongReasonCode(Invalid):
    """This reason is one for the other decision."""


class BadEvidence(Invalid):
    """Evidence is kept elsewhere: here is its name only."""


@dataclass(frozen=True)
class Proposal:
    """What one officer would decide."""

    decision: Verdict
    reason_code: ReasonCode
    reason: str
    by: str
    at: datetime


@dataclass(frozen=True)
class Resolution:
    """What was decided, by whom, and what came of it."""

    decision: Verdict
    reason_code: ReasonCode
    reason: str
    by: str
    confirmed_by: str | None
    effect: Effect


@dataclass(frozen=True)
class Case:
    """Something that a person decides about; ``amount`` is all that would be released or reversed."""

    id: UUID
    kind: Kind
    status: Status
    severity: Severity
    alert_id: UUID
    payment_id: UUID | None
    transaction_id: UUID | None
    amount: Decimal
    currency: str
    initiated_by: str | None
    needs_two: bool
    due_at: datetime
    version: int
    created_at: datetime
    updated_at: datetime
    assignee: str | None = None
    overdue_at: datetime | None = None
    proposal: Proposal | None = None
    resolution: Resolution | None = None
    ended_at: datetime | None = None
    reopens_id: UUID | None = None
    reopened_by: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it never changes again."""
        return self.status in (Status.RESOLVED, Status.EXPIRED)


@dataclass(frozen=True)
class Line:
    """One thing that happened to a case."""

    number: int
    at: datetime
    actor: str
    kind: LineKind
    detail: Mapping[str, Any]


@dataclass(frozen=True)
class Alert:
    """Why a case was opened: what the rules said, with the facts as they were then."""

    id: UUID
    source: Kind
    payment_id: UUID | None
    transaction_id: UUID | None
    decision_id: UUID | None
    rule_set_id: str
    rule_set_version: int | None
    outcome: str
    severity: Severity
    facts: Mapping[str, Any]
    matched: list[dict[str, Any]]
    incomplete: list[dict[str, Any]]
    trace: list[dict[str, Any]]
    raised_at: datetime


@dataclass(frozen=True)
class CaseFile:
    """A case with its alert and everything that happened to it."""

    case: Case
    alert: Alert
    timeline: list[Line]
    reopened_as: UUID | None = None


@dataclass(frozen=True)
class Rules:
    """What an operator has set: above which amounts two officers decide, and how soon somebody must."""

    four_eyes: Mapping[str, Decimal] = field(default_factory=dict)
    sla_hours: Mapping[Severity, int] = field(default_factory=dict)

    def wants_two(self, amount: Decimal, currency: str) -> bool:
        """Whether one officer alone may not decide about so much."""
        limit = self.four_eyes.get(currency, self.four_eyes.get(ANY_CURRENCY))
        return limit is not None and amount > limit


def read_rules(four_eyes: str, sla_hours: str) -> Rules:
    """From settings such as ``PLN=50000,*=15000`` and ``CRITICAL=4,HIGH=24``; Refused when they cannot be meant."""
    limits: dict[str, Decimal] = {}
    for name, given in _pairs(four_eyes, "COMPLIANCE_FOUR_EYES"):
        if not re.fullmatch(r"[A-Z]{3}|\*", name) or not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,3})?", given):
            raise Refused("COMPLIANCE_FOUR_EYES: write currencies and amounts, as in PLN=50000,EUR=10000.00,*=15000")
        limits[name] = Decimal(given)
    hours = {Severity(name): int(given) for name, given in _pairs(DEFAULT_SLA_HOURS, "")}
    for name, given in _pairs(sla_hours, "COMPLIANCE_SLA_HOURS"):
        if name not in set(Severity) or not re.fullmatch(r"[0-9]{1,4}", given) or int(given) < 1:
            raise Refused("COMPLIANCE_SLA_HOURS: write severities and hours, as in CRITICAL=4,HIGH=24")
        hours[Severity(name)] = int(given)
    return Rules(limits, hours)


def _pairs(text: str, name: str) -> list[tuple[str, str]]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if any(not sign for _, sign, _ in pairs) or len(pairs) > 300:
        raise Refused(f"{name}: write name=value, several with commas")
    return [(left.strip(), right.strip()) for left, _, right in pairs]


def judge_severity(outcome: str, *, has_match: bool, is_large: bool) -> Severity:
    """What the rules would reject is worse than what they want looked at; a large amount is one step worse."""
    steps = list(Severity)
    step = steps.index(Severity.HIGH if outcome == "REJECT" else Severity.MEDIUM if has_match else Severity.LOW)
    return steps[min(step + is_large, len(steps) - 1)]


# -- what may happen --------------------------------------------------------------------------------------------------


def check_stranger(case: Case, actor: str) -> None:
    """OwnPayment when it is about a payment that this person has initiated."""
    if case.initiated_by == actor:
        raise OwnPayment("the payment is your own: somebody else decides about it")


def check_open(case: Case, actor: str) -> None:
    """That this person may work on it."""
    check_stranger(case, actor)
    if case.has_ended:
        raise CaseEnded(f"the case is {case.status.value}: reopen it if there is something new")


def check_room(case: Case) -> None:
    """That its timeline has room for what is not a decision."""
    if case.version >= MOST_LINES:
        raise TimelineFull(f"the case has {MOST_LINES} lines: decide it, and reopen it if there is more to say")


def assign(case: Case, assignee: str, *, actor: str) -> Case:
    """Somebody is to work on it, whoever did before."""
    check_open(case, actor)
    check_room(case)
    if case.initiated_by == assignee:
        raise OwnPayment("the payment is theirs: somebody else decides about it")
    return replace(case, assignee=assignee)


def claim(case: Case, *, actor: str) -> Case:
    """Take it, if nobody has."""
    check_open(case, actor)
    if case.assignee == actor:
        return case
    if case.assignee is not None:
        raise CaseTaken("somebody else works on the case: let it be assigned to you")
    check_room(case)
    return replace(case, assignee=actor)


def unclaim(case: Case, *, actor: str) -> Case:
    """Give it back."""
    check_open(case, actor)
    if case.assignee is None:
        raise NotAssigned("nobody works on the case")
    if case.assignee != actor:
        raise CaseTaken("somebody else works on the case: only they give it back; or assign it to another")
    check_room(case)
    return replace(case, assignee=None)


def check_evidence(reference: str) -> str:
    """The name under which somebody else keeps it; BadEvidence for what may be content."""
    if not _EVIDENCE.fullmatch(reference):
        raise BadEvidence(f"a reference has 1 to {LONGEST_REFERENCE} letters, digits and ._:/+=@#-, and no spaces")
    return reference


def check_code(decision: Verdict, code: ReasonCode) -> None:
    """That the reason is one for this decision."""
    if code not in REASON_CODES[decision]:
        allowed = ", ".join(one.value for one in REASON_CODES[decision])
        raise WrongReasonCode(f"{code.value} is no reason to {decision.value}: write one of {allowed}")


def check_decide(case: Case, *, actor: str) -> None:
    """That this person may decide it, or propose how."""
    check_open(case, actor)
    if case.status is Status.PROPOSED:
        raise CaseProposed("a decision is proposed: confirm or refuse it")
    if case.assignee is not None and case.assignee != actor:
        raise CaseTaken("somebody else works on the case: let it be assigned to you")


def propose(case: Case, proposal: Proposal) -> Case:
    """One officer has decided; a second one is needed. There is always room for it: one that stands is the last."""
    return replace(case, status=Status.PROPOSED, proposal=proposal, needs_two=True)


def check_confirm(case: Case, *, actor: str) -> Proposal:
    """What is proposed, if this person may confirm it."""
    check_open(case, actor)
    if case.proposal is None:
        raise NothingProposed("no decision is proposed")
    if actor == case.proposal.by:
        raise SecondOfficerNeeded("you have proposed it: a second officer confirms it")
    if actor == case.reopened_by:
        raise SecondOfficerNeeded("you have reopened the case: another officer confirms what is decided")
    return case.proposal


def refuse(case: Case, *, actor: str) -> Case:
    """The second officer does not agree, or the first one takes it back: it is open again."""
    check_open(case, actor)
    if case.proposal is None:
        raise NothingProposed("no decision is proposed")
    if case.version >= MOST_PROPOSAL_LINES:
        raise TimelineFull(f"the case has {case.version} lines, and so the last proposal stands: confirm it")
    return replace(case, status=Status.OPEN, proposal=None)


def resolve(case: Case, resolution: Resolution, *, now: datetime) -> Case:
    """Decided, for good."""
    return replace(
        case, status=Status.RESOLVED, proposal=None, resolution=resolution, ended_at=max(now, case.created_at)
    )  # fmt: skip


def expire(case: Case, *, now: datetime) -> Case:
    """What it was about has ended by itself; what was proposed comes too late."""
    return replace(case, status=Status.EXPIRED, proposal=None, ended_at=max(now, case.created_at))


def find_due(case: Case, *, now: datetime) -> timedelta | None:
    """How long it has yet, zero when it is late; None when nobody needs to hear of it (any more)."""
    if case.has_ended or case.overdue_at is not None:
        return None
    return max(case.due_at - now, timedelta(0))
