"""Screening what was posted (F9): many transactions in one transaction of ours, in a fixed number of statements.

What a rule may ask about the past is measured in the journal, up to the entry that the event names: it is the same
whenever the event is handled, and however often. What would take too long to measure is absent, and the rules see that
it is missing. Where customers' accounts take part, those are measured, and nothing is read of the cash that all money
goes through; and nothing of the past while no rule asks for it.
"""

from __future__ import annotations

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
from apps.finance.ledger.model import AccountType, Flow, FlowQuestion, to_decimal
from apps.finance.payments import service as payments
from apps.shared.money import show
from duly import Event, Tx
from duly.failpoints import failpoint

RULE_SET = "aml-screening"
MOST_ACCOUNTS = 20  # of one transaction, of which what moved before is measured
MOST_ENTRIES = 40_000  # read for one transaction: its customers share them, but two have all that an account has
RECEIVERS = "counterparties7d"
SUFFIXES = {"hour": "1h", "day": "24h", "week": "7d"}
MEASURED = {"outs": "transactions", "out_minor": "moved", "ins": "receipts", "in_minor": "received"}
MEASURED_NAMES = frozenset(name + suffix for name in MEASURED.values() for suffix in SUFFIXES.values())


@dataclass(frozen=True)
class _Leg:
    """An account of a transaction: its last entry, and by how much it was debited."""

    question: FlowQuestion
    debited: Decimal
    type: AccountType

    @property
    def raised(self) -> Decimal:
        """By how much the transaction raised it, on its own side."""
        return self.type.side * self.debited

    @property
    def is_customers(self) -> bool:
        """Whether it is owed to a customer."""
        return self.type is AccountType.LIABILITY


@dataclass(frozen=True)
class _Screened:
    """A transaction; without legs when it has too many accounts."""

    posted: TransactionPosted
    legs: Sequence[_Leg]

    def moved(self, sign: int) -> list[_Leg]:
        """Those that were lowered, or raised: customers first, then by how much."""
        moved = [leg for leg in self.legs if sign * leg.raised > 0]
        return sorted(moved, key=lambda leg: (not leg.is_customers, -abs(leg.debited)))

    def watched(self, sign: int) -> list[_Leg]:
        """Those of them whose past counts: customers' alone, where any take part."""
        has_customers = any(leg.is_customers for leg in self.legs)
        return [leg for leg in self.moved(sign) if leg.is_customers or not has_customers]


@dataclass(frozen=True)
class _Past:
    """What is known of the past; nothing of what no rule asks for."""

    flows: Mapping[FlowQuestion, Flow]
    receivers: Mapping[FlowQuestion, int | None]


async def screen(tx: Tx, events: Sequence[Event]) -> list[Case]:
    """Decide about each; what is not approved gets alert, case and fact, once, in this transaction."""
    screened = await _read(tx, [event.body(TransactionPosted) for event in events])
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
    """The facts of each transaction; of the past, what some rule asks for: three statements at most, or a few more."""
    lowered = list(dict.fromkeys(leg.question for one in screened for leg in one.watched(-1)))
    raised = [leg.question for one in screened for leg in one.watched(1)]
    flows: dict[FlowQuestion, Flow] = {}
    if names & MEASURED_NAMES:
        asked = list(dict.fromkeys([*lowered, *raised]))
        flows = dict(zip(asked, await ledger.read_flows(tx, asked), strict=True))
    receivers: dict[FlowQuestion, int | None] = {}
    if RECEIVERS in names:
        receivers = dict(zip(lowered, await ledger.count_receivers(tx, lowered), strict=True))
    return [_facts(one, _Past(flows, receivers), names) for one in screened]


async def _read(tx: Tx, posted: Sequence[TransactionPosted]) -> list[_Screened]:
    """Each account once, at its last entry in the transaction; of what kind it is comes first, before anything else."""
    totals = [_add_up(one) for one in posted]
    known = [accounts for accounts in totals if len(accounts) <= MOST_ACCOUNTS]
    types = await ledger.find_types(tx, list({account_id for accounts in known for account_id in accounts}))
    made = []
    for one, accounts in zip(posted, totals, strict=True):
        few = accounts if len(accounts) <= MOST_ACCOUNTS else {}
        customers = sum(types[account_id] is AccountType.LIABILITY for account_id in few)
        share = MOST_ENTRIES // max(2, customers or len(few))
        legs = [
            _Leg(FlowQuestion(account_id, version, one.posted_at, share), debited, types[account_id])
            for account_id, (version, debited) in few.items()
        ]
        made.append(_Screened(one, legs))
    return made


def _add_up(posted: TransactionPosted) -> dict[UUID, tuple[int, Decimal]]:
    """The last entry of each account, and by how much it was debited."""
    found: dict[UUID, tuple[int, Decimal]] = {}
    for entry in posted.entries:
        version, debited = found.get(entry.account_id, (0, Decimal(0)))
        moved = Decimal(entry.amount) * (1 if entry.direction == "DEBIT" else -1)
        found[entry.account_id] = (max(entry.version, version), debited + moved)
    return found


def _facts(one: _Screened, past: _Past, names: frozenset[str]) -> dict[str, Any]:
    """As the rules read them; what could not be measured is left out, and so is what nobody asks for."""
    posted = one.posted
    facts: dict[str, Any] = {
        "transactionId": str(posted.transaction_id), "reference": posted.reference, "amount": Decimal(posted.amount),
        "currency": posted.currency, "entryCount": len(posted.entries), "postedAt": posted.posted_at,
        "accounts": [str(account_id) for account_id in posted.account_ids],
    }  # fmt: skip
    if not one.legs:
        return facts
    for name, sign in (("fromAccount", -1), ("toAccount", 1)):
        if found := one.moved(sign):
            facts[name] = str(found[0].question.account_id)
    if names & MEASURED_NAMES:
        for sign, parts in ((-1, ("outs", "out_minor")), (1, ("ins", "in_minor"))):
            facts |= _measure([past.flows[leg.question] for leg in one.watched(sign)], parts, posted.currency)
    if RECEIVERS in names:
        counted = [past.receivers[leg.question] for leg in one.watched(-1)]
        if None not in counted:
            facts[RECEIVERS] = max((number for number in counted if number is not None), default=0)
    return facts


def _measure(flows: Sequence[Flow], parts: Sequence[str], currency: str) -> dict[str, Any]:
    """The largest among these accounts, by window; absent when one of them was too busy to be measured."""
    facts: dict[str, Any] = {}
    for window, suffix in SUFFIXES.items():
        moved = [flow.windows[window] for flow in flows]
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
