"""Screening what was posted (F9): many transactions in one transaction of ours, in a fixed number of statements.

What a rule may ask about the past is measured in the journal, up to the entry that the event names: it is the same
whenever the event is handled, and however often. What would take too long to measure is absent, and the rules see that
it is missing. Where customers' accounts take part, those are measured, and not the cash that all money goes through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

from apps.finance.compliance import opening
from apps.finance.compliance.events import AmlFlagged
from apps.finance.compliance.model import Case, Kind, Rules
from apps.finance.compliance.store import NewCase
from apps.finance.decisions import many as decisions
from apps.finance.decisions.model import Decision, Outcome
from apps.finance.ledger import service as ledger
from apps.finance.ledger.events import TransactionPosted
from apps.finance.ledger.model import Flow, FlowQuestion, to_decimal
from apps.finance.payments import service as payments
from apps.shared.money import show
from duly import Event, Tx
from duly.failpoints import failpoint

RULE_SET = "aml-screening"
MOST_ACCOUNTS = 20  # of one transaction, of which what moved before is measured
RECEIVERS = "counterparties7d"
SUFFIXES = {"hour": "1h", "day": "24h", "week": "7d"}
MEASURED = {"outs": "transactions", "out_minor": "moved", "ins": "receipts", "in_minor": "received"}


@dataclass(frozen=True)
class _Leg:
    """An account of a transaction: its last entry, and by how much it was debited."""

    question: FlowQuestion
    debited: Decimal

    def raised(self, flow: Flow) -> Decimal:
        """By how much the transaction raised it, on its own side."""
        return flow.side * self.debited


@dataclass(frozen=True)
class _Screened:
    posted: TransactionPosted
    legs: Sequence[_Leg]

    @property
    def is_measured(self) -> bool:
        """Whether it has few enough accounts."""
        return len(self.legs) <= MOST_ACCOUNTS


async def screen(tx: Tx, events: Sequence[Event]) -> list[Case]:
    """Decide about each; what is not approved gets alert, case and fact, once, in this transaction."""
    screened = [_read(event.body(TransactionPosted)) for event in events]
    in_force = await decisions.find_in_force(tx, RULE_SET)
    facts = await gather(tx, screened, in_force.names)
    failpoint("handler.mid")
    questions = [
        decisions.Question(given, str(one.posted.transaction_id), one.posted.posted_at)
        for one, given in zip(screened, facts, strict=True)
    ]
    decided = await decisions.evaluate_many(tx, in_force, questions)
    flagged = {
        one.posted.transaction_id: (one.posted, decision)
        for one, decision in zip(screened, decided, strict=True)
        if decision.verdict.decision is not Outcome.APPROVE
    }
    failpoint("handler.mid")
    return await _flag(tx, flagged, in_force) if flagged else []


async def gather(tx: Tx, screened: Sequence[_Screened], names: frozenset[str]) -> list[dict[str, Any]]:
    """The facts of each transaction; of the past, what some rule asks for: one statement, or two."""
    legs = [leg for one in screened if one.is_measured for leg in one.legs]
    flows = iter(await ledger.read_flows(tx, [leg.question for leg in legs]))
    known = [[(leg, next(flows)) for leg in one.legs] if one.is_measured else [] for one in screened]
    receivers: dict[FlowQuestion, int | None] = {}
    if RECEIVERS in names:
        asked = list(dict.fromkeys(leg.question for legs in known for leg, flow in legs if leg.raised(flow) < 0))
        receivers = dict(zip(asked, await ledger.count_receivers(tx, asked), strict=True))
    return [_facts(one, legs, receivers) for one, legs in zip(screened, known, strict=True)]


def _read(posted: TransactionPosted) -> _Screened:
    """Each account once, at its last entry in the transaction."""
    versions: dict[UUID, int] = {}
    debited: dict[UUID, Decimal] = defaultdict(Decimal)
    for entry in posted.entries:
        versions[entry.account_id] = max(entry.version, versions.get(entry.account_id, 0))
        debited[entry.account_id] += Decimal(entry.amount) * (1 if entry.direction == "DEBIT" else -1)
    return _Screened(
        posted,
        [_Leg(FlowQuestion(one, version, posted.posted_at), debited[one]) for one, version in versions.items()],
    )


def _facts(
    one: _Screened, legs: Sequence[tuple[_Leg, Flow]], receivers: Mapping[FlowQuestion, int | None]
) -> dict[str, Any]:
    """As the rules read them; what could not be measured is left out."""
    posted = one.posted
    facts: dict[str, Any] = {
        "transactionId": str(posted.transaction_id), "reference": posted.reference, "amount": Decimal(posted.amount),
        "currency": posted.currency, "entryCount": len(posted.entries), "postedAt": posted.posted_at,
        "accounts": [str(account_id) for account_id in posted.account_ids],
    }  # fmt: skip
    if not one.is_measured:
        return facts
    for name, sign in (("fromAccount", -1), ("toAccount", 1)):
        if found := _moved(legs, sign):
            facts[name] = str(found[0][0].question.account_id)
    watched = [pair for pair in legs if pair[1].is_customers] or legs
    lowered = _moved(watched, -1)
    facts |= _measure(lowered, ("outs", "out_minor"), posted.currency)
    facts |= _measure(_moved(watched, 1), ("ins", "in_minor"), posted.currency)
    counted = [receivers.get(leg.question) for leg, _ in lowered]
    if None not in counted:
        facts[RECEIVERS] = max((number for number in counted if number is not None), default=0)
    return facts


def _moved(legs: Sequence[tuple[_Leg, Flow]], sign: int) -> list[tuple[_Leg, Flow]]:
    """Those that were lowered, or raised: customers first, then by how much."""
    moved = [(leg, flow) for leg, flow in legs if sign * leg.raised(flow) > 0]
    return sorted(moved, key=lambda pair: (not pair[1].is_customers, -abs(pair[0].debited)))


def _measure(legs: Sequence[tuple[_Leg, Flow]], parts: Sequence[str], currency: str) -> dict[str, Any]:
    """The largest among these accounts, by window; absent when one of them was too busy to be measured."""
    facts: dict[str, Any] = {}
    for window, suffix in SUFFIXES.items():
        moved = [flow.windows[window] for _, flow in legs]
        if None in moved:
            continue
        for part in parts:
            most = max((getattr(one, part) for one in moved), default=0)
            facts[MEASURED[part] + suffix] = to_decimal(most, currency) if part.endswith("minor") else most
    return facts


async def _flag(
    tx: Tx, flagged: Mapping[UUID, tuple[TransactionPosted, Decision]], in_force: decisions.InForce
) -> list[Case]:
    """Alerts and cases of those that have none, and what others hear of it."""
    paid = await payments.find_posted(tx, list(flagged))
    posters = await ledger.find_posters(tx, list(flagged))
    rules = opening.rules_in_force()

    def tell(case: Case) -> AmlFlagged:
        assert case.transaction_id is not None
        _, decision = flagged[case.transaction_id]
        return AmlFlagged(
            transaction_id=case.transaction_id, alert_id=case.alert_id, case_id=case.id, decision_id=decision.id,
            outcome=decision.verdict.decision.value, severity=case.severity.value,
            amount=show(case.amount, case.currency), currency=case.currency,
        )  # fmt: skip

    new = [
        _new_case(posted, decision, in_force, rules, paid.get(transaction_id), posters.get(transaction_id))
        for transaction_id, (posted, decision) in flagged.items()
    ]
    return await opening.open_cases(tx, Kind.AML, RULE_SET, new, tell)


def _new_case(
    posted: TransactionPosted,
    decision: Decision,
    in_force: decisions.InForce,
    rules: Rules,
    payment: Any,
    poster: str | None,
) -> NewCase:
    """Whose money it is, for nobody judges his own: who initiated the payment, or posted it without one."""
    found = opening.describe(
        decision, in_force.trace(decision), rules, amount=Decimal(posted.amount), currency=posted.currency
    )
    return NewCase(
        payment_id=payment.id if payment else None, transaction_id=posted.transaction_id,
        initiated_by=payment.initiated_by if payment else poster, **found,
    )  # fmt: skip
