"""Opening cases: alert, case, timeline, timer and facts, all in the transaction in which the reason for it arises."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from apps.finance.compliance import events, store
from apps.finance.compliance.model import (
    DEFAULT_FOUR_EYES,
    DEFAULT_SLA_HOURS,
    Case,
    Kind,
    Rules,
    judge_severity,
    read_rules,
)
from apps.finance.decisions import service as decisions
from apps.finance.decisions.model import Decision, DecisionNotFound, Verdict
from apps.finance.payments import service as payments
from apps.finance.payments.events import PaymentPendingReview
from apps.finance.payments.model import REVIEW_WINDOW, Payment
from duly import EventBody, NewJob, Tx, emit, schedule_many
from duly.failpoints import failpoint

FOUR_EYES_VARIABLE, SLA_VARIABLE = "COMPLIANCE_FOUR_EYES", "COMPLIANCE_SLA_HOURS"
DUE = "compliance.case-due"
BEFORE_EXPIRY = timedelta(days=1)
"""So long before a review ends by itself its case is due, whatever the settings say: somebody hears of it in time."""
MOST_TRACED = 50  # rules of which an alert keeps what each condition said


def rules_in_force() -> Rules:
    """What the operator has set; Refused when nobody can understand it."""
    return _read_rules(
        os.environ.get(FOUR_EYES_VARIABLE, DEFAULT_FOUR_EYES), os.environ.get(SLA_VARIABLE, DEFAULT_SLA_HOURS)
    )


@functools.lru_cache(maxsize=16)
def _read_rules(four_eyes: str, sla_hours: str) -> Rules:
    return read_rules(four_eyes, sla_hours)


async def open_for_payment(tx: Tx, fact: PaymentPendingReview) -> None:
    """The rules want a person to decide about a payment: its case is there when the payment is (F5)."""
    await open_for_held(tx, [await payments.find_payment(tx, fact.payment_id)])


async def open_for_held(tx: Tx, held: Sequence[Payment]) -> list[Case]:
    """A case for each that has none; they are under review, and stay so until the commit."""
    return await open_cases(
        tx, Kind.PAYMENT_REVIEW, payments.RULE_SET, [await _review(tx, payment) for payment in held]
    )


async def open_cases(
    tx: Tx,
    kind: Kind,
    rule_set_id: str,
    new: Sequence[store.NewCase],
    tell: Callable[[Case], EventBody] | None = None,
) -> list[Case]:
    """Write those that have no alert yet, with their timers and facts: three statements, however many there are.

    ``tell`` makes a fact that others hear of each before that of its case.
    """
    if not new:
        return []
    made = await store.open_cases(tx, kind, rule_set_id, new)
    failpoint("handler.mid")
    if made:
        await schedule_many(tx, [NewJob(DUE, case.id, case.due_at) for case in made])
        facts: list[EventBody] = []
        for case in made:
            facts += [tell(case), opened(case)] if tell else [opened(case)]
        await emit(tx, *facts)
    return made


def describe(
    decision: Decision, trace: Sequence[Mapping[str, Any]], rules: Rules, *, amount: Any, currency: str
) -> dict[str, Any]:
    """What an alert keeps of a decision, and how bad it is."""
    verdict, needs_two = decision.verdict, rules.wants_two(amount, currency)
    severity = judge_severity(verdict.decision.value, has_match=bool(verdict.matched), is_large=needs_two)
    return {
        "decision_id": decision.id, "rule_set_version": decision.rule_set_version, "outcome": verdict.decision.value,
        "severity": severity, "facts": decision.facts, "matched": list_matched(verdict),
        "incomplete": [
            {"ruleId": str(one.rule_id), "version": one.version, "name": one.name, "lacking": dict(one.lacking)}
            for one in verdict.incomplete[:MOST_TRACED]
        ],
        "trace": [line for line in trace if line["outcome"] in ("true", "unknown")][:MOST_TRACED],
        "amount": amount, "currency": currency, "needs_two": needs_two, "hours": rules.sla_hours[severity],
    }  # fmt: skip


def list_matched(verdict: Verdict) -> list[dict[str, Any]]:
    """The rules that said yes."""
    return [
        {
            "ruleId": str(one.rule_id), "version": one.version, "name": one.name, "score": one.score,
            "decision": one.decision.value if one.decision else None, "reason": one.reason,
        }
        for one in verdict.matched[:MOST_TRACED]
    ]  # fmt: skip


async def _review(tx: Tx, payment: Payment) -> store.NewCase:
    """What is known of a payment that is on hold; its decision may be older than the log."""
    rules = rules_in_force()
    try:
        if payment.decision_id is None:
            raise DecisionNotFound("it was held without one")
        decision, trace = await decisions.read_decision(tx, payment.decision_id)
        found = describe(decision, trace, rules, amount=payment.amount, currency=payment.currency)
    except DecisionNotFound:
        needs_two = rules.wants_two(payment.amount, payment.currency)
        severity = judge_severity("REVIEW", has_match=True, is_large=needs_two)
        found = {
            "decision_id": payment.decision_id, "rule_set_version": None, "outcome": "REVIEW", "severity": severity,
            "facts": {}, "matched": [], "incomplete": [], "trace": [], "amount": payment.amount,
            "currency": payment.currency, "needs_two": needs_two, "hours": rules.sla_hours[severity],
        }  # fmt: skip
    return store.NewCase(
        payment_id=payment.id, transaction_id=None, initiated_by=payment.initiated_by,
        latest=payment.created_at + REVIEW_WINDOW - BEFORE_EXPIRY, **found,
    )  # fmt: skip


def opened(case: Case) -> events.CaseOpened:
    """The fact that somebody has to decide."""
    return events.CaseOpened(
        case_id=case.id, kind=case.kind.value, severity=case.severity.value, payment_id=case.payment_id,
        transaction_id=case.transaction_id, reopens_id=case.reopens_id, due_at=case.due_at,
    )  # fmt: skip
