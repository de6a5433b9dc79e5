"""What the API shows of a case."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from apps.finance.compliance.copilot import Explanation
from apps.finance.compliance.model import (
    Alert,
    Case,
    CaseFile,
    Effect,
    Kind,
    Line,
    LineKind,
    ReasonCode,
    Severity,
    Status,
    Verdict,
)
from apps.finance.ledger.model import Transaction
from apps.finance.payments.model import Payment
from apps.shared.money import show


class _View(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class ProposalView(_View):
    """What one officer would decide; a second one confirms or refuses it."""

    decision: Verdict
    reason_code: ReasonCode
    reason: str
    proposed_by: str
    proposed_at: datetime


class ResolutionView(_View):
    """What was decided; ``effect`` is what became of the money."""

    decision: Verdict
    reason_code: ReasonCode
    reason: str
    effect: Effect
    resolved_by: str
    confirmed_by: str | None


class CaseView(_View):
    """A case; ``amount`` is all that would be released or reversed. ``needsTwo``: a second officer must confirm."""

    id: UUID
    kind: Kind
    status: Status
    severity: Severity
    amount: str
    currency: str
    payment_id: UUID | None
    transaction_id: UUID | None
    assignee: str | None
    needs_two: bool
    due_at: datetime
    overdue_at: datetime | None
    proposal: ProposalView | None
    resolution: ResolutionView | None
    ended_at: datetime | None
    reopens_id: UUID | None
    reopened_by: str | None
    version: int
    created_at: datetime
    updated_at: datetime


class CasePage(_View):
    """The newest first; ``next`` is the ``before`` of the page after this one."""

    items: list[CaseView]
    next: UUID | None


class LineView(_View):
    """One thing that happened to a case."""

    number: int
    at: datetime
    actor: str
    kind: LineKind
    detail: dict[str, Any]


class TimelinePage(_View):
    """In order; ``next`` is the ``before`` of the page of what happened before this one."""

    items: list[LineView]
    next: int | None


class AlertView(_View):
    """Why it was opened: the rules that matched, those that lacked a fact, and what each condition said."""

    id: UUID
    decision_id: UUID | None
    rule_set_id: str
    rule_set_version: int | None
    outcome: str
    severity: Severity
    facts: dict[str, Any]
    matched: list[dict[str, Any]]
    incomplete: list[dict[str, Any]]
    trace: list[dict[str, Any]]
    raised_at: datetime


class EntryView(_View):
    """A line of the journal."""

    account_id: UUID
    direction: str
    amount: str
    balance_after: str
    version: int


class TransactionView(_View):
    """What was posted."""

    id: UUID
    reference: str
    amount: str
    currency: str
    status: str
    posted_at: datetime
    reversed_by_id: UUID | None
    entries: list[EntryView]


class PaymentSummary(_View):
    """The payment that it is about; ``reason`` as it is, and not as its initiator hears it."""

    id: UUID
    from_account_id: UUID
    to_account_id: UUID
    amount: str
    currency: str
    state: str
    reason: str | None
    initiated_by: str
    transaction_id: UUID | None
    reversal_id: UUID | None
    created_at: datetime


class ExplanationView(_View):
    """Why the case is there, in words. ``source`` is who says so, ``problem`` why it is not the copilot."""

    text: str
    source: str
    problem: str | None


class CaseDetail(CaseView):
    """A case with everything that an officer needs; ``hasMoreTimeline``: there are older lines than these."""

    alert: AlertView
    transaction: TransactionView | None
    payment: PaymentSummary | None
    timeline: list[LineView]
    has_more_timeline: bool
    reopened_as: UUID | None
    explanation: ExplanationView


def show_case(case: Case) -> CaseView:
    """In a list."""
    return CaseView.model_validate(_values(case))


def show_detail(
    file: CaseFile, transaction: Transaction | None, payment: Payment | None, explanation: Explanation
) -> CaseDetail:
    """With everything."""
    lines = [show_line(line) for line in file.timeline]
    more = {
        "alert": _alert(file.alert), "transaction": _transaction(transaction) if transaction else None,
        "payment": _payment(payment) if payment else None, "timeline": lines,
        "has_more_timeline": bool(lines) and lines[0].number > 1, "reopened_as": file.reopened_as,
        "explanation": ExplanationView(**vars(explanation)),
    }  # fmt: skip
    return CaseDetail.model_validate(_values(file.case) | more)


def show_line(line: Line) -> LineView:
    """One line."""
    return LineView(number=line.number, at=line.at, actor=line.actor, kind=line.kind, detail=dict(line.detail))


def _values(case: Case) -> dict[str, Any]:
    values = {name: getattr(case, name) for name in CaseView.model_fields if name not in ("proposal", "resolution")}
    proposal, resolution = case.proposal, case.resolution
    values["amount"] = show(case.amount, case.currency)
    values["proposal"] = proposal and ProposalView(
        decision=proposal.decision, reason_code=proposal.reason_code, reason=proposal.reason, proposed_by=proposal.by,
        proposed_at=proposal.at,
    )  # fmt: skip
    values["resolution"] = resolution and ResolutionView(
        decision=resolution.decision, reason_code=resolution.reason_code, reason=resolution.reason,
        effect=resolution.effect, resolved_by=resolution.by, confirmed_by=resolution.confirmed_by,
    )  # fmt: skip
    return values


def _alert(alert: Alert) -> AlertView:
    return AlertView.model_validate(_named(AlertView, vars(alert)))


def _transaction(one: Transaction) -> TransactionView:
    lines = [
        EntryView(
            account_id=line.account_id, direction=line.direction.value, amount=show(line.amount, one.currency),
            balance_after=show(line.balance_after, one.currency), version=line.version,
        )
        for line in one.entries
    ]  # fmt: skip
    shown = {"amount": show(one.amount, one.currency), "status": one.status.value, "entries": lines}
    return TransactionView.model_validate(_named(TransactionView, vars(one) | shown))


def _payment(one: Payment) -> PaymentSummary:
    shown = {"amount": show(one.amount, one.currency), "state": one.state.value}
    return PaymentSummary.model_validate(_named(PaymentSummary, vars(one) | shown))


def _named(view: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in view.model_fields}
