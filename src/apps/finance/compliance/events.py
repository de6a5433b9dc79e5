"""The facts of compliance; the only door for other contexts. They say what happened to a case, and never why."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from duly import EventBody

TOPIC = "compliance.events"
READERS = ("COMPLIANCE_OFFICER",)
"""Nobody else learns from events that somebody is being looked at: not whoever runs the engine either."""
CAMEL = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class AmlFlagged(EventBody, type="aml.flagged", topic=TOPIC, aggregate="transaction_id", readers=READERS):
    """The rules found something about a transaction that was posted: a person looks at it."""

    model_config = CAMEL
    transaction_id: UUID
    alert_id: UUID
    case_id: UUID
    decision_id: UUID
    outcome: str
    severity: str
    amount: str
    currency: str


class CaseOpened(EventBody, type="compliance.case.opened", topic=TOPIC, aggregate="case_id", readers=READERS):
    """Somebody has to decide, until then."""

    model_config = CAMEL
    case_id: UUID
    kind: str
    severity: str
    payment_id: UUID | None
    transaction_id: UUID | None
    reopens_id: UUID | None
    due_at: datetime


class CaseAssigned(EventBody, type="compliance.case.assigned", topic=TOPIC, aggregate="case_id", readers=READERS):
    """Somebody works on it; without an assignee, nobody does any more."""

    model_config = CAMEL
    case_id: UUID
    assignee: str | None


class CaseProposed(EventBody, type="compliance.case.proposed", topic=TOPIC, aggregate="case_id", readers=READERS):
    """One officer would decide so; a second one must confirm it."""

    model_config = CAMEL
    case_id: UUID
    decision: str
    proposed_by: str


class CaseProposalRefused(
    EventBody, type="compliance.case.proposal_refused", topic=TOPIC, aggregate="case_id", readers=READERS
):
    """The second officer did not agree, or the first one has thought better of it: it is open again."""

    model_config = CAMEL
    case_id: UUID
    refused_by: str


class CaseOverdue(EventBody, type="compliance.case.overdue", topic=TOPIC, aggregate="case_id", readers=READERS):
    """Nobody has decided in time."""

    model_config = CAMEL
    case_id: UUID
    severity: str
    due_at: datetime


class CaseResolved(EventBody, type="compliance.case.resolved", topic=TOPIC, aggregate="case_id", readers=READERS):
    """It was decided, and this is what came of it."""

    model_config = CAMEL
    case_id: UUID
    decision: str
    effect: str
    payment_id: UUID | None
    transaction_id: UUID | None
    resolved_by: str
    confirmed_by: str | None


class CaseExpired(EventBody, type="compliance.case.expired", topic=TOPIC, aggregate="case_id", readers=READERS):
    """The payment that it is about was rejected, because nobody has decided in time."""

    model_config = CAMEL
    case_id: UUID
    payment_id: UUID


FACTS: tuple[type[EventBody], ...] = (
    AmlFlagged, CaseOpened, CaseAssigned, CaseProposed, CaseProposalRefused, CaseOverdue, CaseResolved, CaseExpired,
)  # fmt: skip
