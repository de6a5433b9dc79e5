"""What a dossier is made of, from every context and from the engine; each reader says what it could not find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pydantic.alias_generators import to_camel
from sqlalchemy import text

from apps.finance.compliance import service as compliance
from apps.finance.compliance.model import CaseFile, Kind
from apps.finance.compliance.workers import kept_days as cases_kept_days
from apps.finance.decisions import service as decisions
from apps.finance.decisions.model import Decision, DecisionNotFound, RuleNotFound
from apps.finance.decisions.workers import kept_days
from apps.finance.dossier.model import Missing, Section, Why
from apps.finance.ledger import service as ledger
from apps.finance.ledger.model import HoldNotFound, TransactionNotFound
from apps.finance.ledger.service import HOLDS_KEPT_DAYS
from apps.finance.payments.model import Payment
from apps.finance.payments.service import CALLBACKS_KEPT_DAYS
from apps.shared.canonical import plain
from apps.shared.money import show
from duly import Tx
from duly.db import load_json, settings_of
from duly.operate.events import EventEntry, list_discarded, list_events
from duly.webhooks.deliveries import list_attempts
from duly.webhooks.look import find_all_of_events, host_of

MOST_LINES = 5_000
MOST_EVENTS = 500  # of one aggregate
MOST_DELIVERIES = 500
MOST_ATTEMPTS = 100  # of one delivery
MOST_CALLBACKS = 500
MOST_CASES = 100
MOST_DISCARDED = 20  # of one aggregate
AT_ONCE = timedelta(minutes=1)  # what begins a payment is told in the same commit

READ_NOW = text("SELECT duly.now()")
READ_HISTORY = text("""
SELECT number, at, from_state, to_state, cause, detail FROM payments.history
WHERE payment_id = CAST(:id AS uuid) ORDER BY number DESC LIMIT CAST(:limit AS integer)
""")
# The link of the ledger's chain that covers a transaction: the first that ends behind what wrote it.
FIND_SEAL = text("""
SELECT CAST(CAST(t.xid AS text) AS bigint) AS xid, s.number, CAST(CAST(s.first_xid AS text) AS bigint) AS first_xid,
       CAST(CAST(s.next_xid AS text) AS bigint) AS next_xid, s.transactions, s.entries, s.previous_hash, s.hash,
       s.sealed_at
FROM ledger.transactions t
LEFT JOIN LATERAL (SELECT * FROM ledger.seals c WHERE c.next_xid > t.xid ORDER BY c.next_xid LIMIT 1) AS s ON true
WHERE t.id = CAST(:id AS uuid)
""")
READ_PUBLISHED = text("""
SELECT id, payload::text AS payload, headers::text AS headers FROM duly.events
WHERE id = ANY(CAST(:ids AS uuid[]))
""")
READ_WAITING = text("""
SELECT id, payload::text AS payload, headers::text AS headers FROM duly.outbox
WHERE seq = ANY(CAST(:seqs AS bigint[]))
""")
LIST_CALLBACKS = text("""
SELECT * FROM payments.unmatched_callbacks
WHERE payment_id = CAST(:id AS uuid) ORDER BY id LIMIT CAST(:limit AS integer)
""")


@dataclass(frozen=True)
class Subject:
    """The payment that a dossier is about, and the moment at which everything is looked at."""

    payment: Payment
    now: datetime

    def why_gone(self, days: int) -> Why:
        """Why something of this payment is not there, if such things are kept for so many days."""
        is_old = self.payment.created_at < self.now - timedelta(days=days)
        return Why.RETENTION if is_old else Why.ABSENT

    @property
    def transaction_ids(self) -> list[UUID]:
        """The posting and its reversal, as far as there are any."""
        return [id for id in (self.payment.transaction_id, self.payment.reversal_id) if id is not None]


async def read_payment(subject: Subject) -> Section:
    """As it is."""
    payment = subject.payment
    return Section("payment", [plain(payment) | {"amount": show(payment.amount, payment.currency)}])


async def read_history(tx: Tx, subject: Subject) -> Section:
    """Every line; of a very long one, the newest."""
    found = (await tx.execute(READ_HISTORY, {"id": subject.payment.id, "limit": MOST_LINES})).mappings().all()
    lines = [_camel(row) for row in reversed(found)]
    first = lines[0]["number"] if lines else subject.payment.version + 1
    missing = [] if first == 1 else [Missing(f"lines before {first}", Why.LIMIT if lines else Why.ABSENT)]
    return Section("history", lines, missing)


async def read_decisions(tx: Tx, subject: Subject, more: Iterable[UUID]) -> Section:
    """The screening, and whatever a case was opened for: facts, verdict, trace, rules as they were, and a replay."""
    records: list[dict[str, Any]] = []
    missing: list[Missing] = []
    screened = subject.payment.decision_id
    for decision_id in dict.fromkeys([*([screened] if screened is not None else []), *more]):
        try:
            decision, trace = await decisions.read_decision(tx, decision_id)
            _, _, differs = await decisions.replay(tx, decision_id)
        except DecisionNotFound:
            missing.append(Missing(f"decision {decision_id}", subject.why_gone(kept_days())))
            continue
        rules = [await _read_rule(tx, one.rule_id, one.version) for one in decision.verdict.matched]
        records.append(_show_decision(decision) | {"trace": plain(trace), "rules": rules, "replayDiffersIn": differs})
    return Section("decisions", records, missing)


def _show_decision(decision: Decision) -> dict[str, Any]:
    shown: dict[str, Any] = plain(decision)
    return shown


async def _read_rule(tx: Tx, rule_id: UUID, version: int) -> dict[str, Any]:
    """A rule as it was at a version: they are never deleted."""
    try:
        record = await decisions.read_rule_record(tx, rule_id)
        rule: dict[str, Any] = plain(await decisions.find_version(tx, record, version))
    except RuleNotFound:
        return {"ruleId": str(rule_id), "version": version, "found": False}
    return rule


async def read_postings(tx: Tx, subject: Subject) -> Section:
    """The posting and its reversal, with their entries, and the seal of the journal over each."""
    records: list[dict[str, Any]] = []
    missing: list[Missing] = []
    for transaction_id in subject.transaction_ids:
        try:
            transaction = await ledger.read_transaction(tx, transaction_id)
        except TransactionNotFound:
            missing.append(Missing(f"transaction {transaction_id}", Why.ABSENT))
            continue
        seal = _camel((await tx.execute(FIND_SEAL, {"id": transaction_id})).mappings().one())
        xid = seal.pop("xid")
        is_sealed = seal["number"] is not None
        if not is_sealed:
            missing.append(Missing(f"the seal over {transaction_id}", Why.NOT_YET))
        records.append(plain(transaction) | {"xid": xid, "seal": seal if is_sealed else None})
    return Section("postings", records, missing)


async def read_holds(tx: Tx, subject: Subject) -> Section:
    """The money that was set aside for it."""
    records: list[dict[str, Any]] = []
    missing: list[Missing] = []
    for hold_id in (subject.payment.review_hold_id, subject.payment.incoming_hold_id):
        if hold_id is None:
            continue
        try:
            records.append(plain(await ledger.read_hold(tx, hold_id)))
        except HoldNotFound:
            missing.append(Missing(f"hold {hold_id}", subject.why_gone(HOLDS_KEPT_DAYS)))
    return Section("holds", records, missing)


@dataclass(frozen=True)
class EventRecords:
    """What was told, the ids, and why events that were published are not among them."""

    section: Section
    ids: Sequence[UUID]
    gone: frozenset[Why]


async def read_events(tx: Tx, subject: Subject, cases: CaseRecords) -> EventRecords:
    """What was told of the payment, its transactions, its holds and its cases, in order."""
    payment = subject.payment
    holds = [id for id in (payment.review_hold_id, payment.incoming_hold_id) if id is not None]
    aggregates = dict.fromkeys([payment.id, *subject.transaction_ids, *holds, *cases.ids])
    missing = [Missing("events of cases that are not here", gap.why) for gap in cases.cases.missing]
    entries: list[EventEntry] = []
    for aggregate in aggregates:
        found = await list_events(tx, aggregate_id=str(aggregate), limit=MOST_EVENTS + 1)
        entries += found[:MOST_EVENTS]
        if len(found) > MOST_EVENTS:
            missing.append(Missing(f"older events of {aggregate}", Why.LIMIT))
        elif aggregate == payment.id and not any(one.created_at <= payment.created_at + AT_ONCE for one in found):
            why = subject.why_gone(settings_of(tx).keep_events_days)
            missing.append(Missing("events from the beginning of the payment on", why))
    entries.sort(key=lambda one: one.seq)
    bodies = await _read_bodies(tx, entries)
    records = [plain(one) | bodies.get(one.id, {}) for one in entries]
    discarded = await _find_discarded(tx, subject, [str(one) for one in aggregates])
    gone = frozenset(gap.why for gap in missing)
    return EventRecords(Section("events", records, [*missing, *discarded]), [one.id for one in entries], gone)


async def _find_discarded(tx: Tx, subject: Subject, aggregates: Sequence[str]) -> list[Missing]:
    """Events that an operator gave up: they were to be told, and are nowhere but in the audit, while that is kept."""
    found = await list_discarded(tx, aggregates, limit=MOST_DISCARDED)
    missing = [Missing(f"event {one.id} ({one.type}), which was discarded", Why.ABSENT) for one in found]
    if subject.payment.created_at < subject.now - timedelta(days=settings_of(tx).keep_audit_days):
        missing.append(Missing("events that were discarded so long ago that nobody knows of them", Why.RETENTION))
    return missing


async def _read_bodies(tx: Tx, entries: Sequence[EventEntry]) -> dict[UUID, dict[str, Any]]:
    published = [one.id for one in entries if one.status == "PUBLISHED"]
    waiting = [one.seq for one in entries if one.status != "PUBLISHED"]
    found = [
        *(await tx.execute(READ_PUBLISHED, {"ids": published})).all(),
        *(await tx.execute(READ_WAITING, {"seqs": waiting})).all(),
    ]
    return {
        row.id: {"payload": plain(load_json(row.payload)), "headers": plain(load_json(row.headers))} for row in found
    }


async def read_deliveries(tx: Tx, subject: Subject, events: EventRecords) -> Section:
    """To whom it was sent, and how that went. Of an address only the host: its path may be a secret."""
    records: list[dict[str, Any]] = []
    missing: list[Missing] = []
    found = await find_all_of_events(tx, events.ids, limit=MOST_DELIVERIES)
    for delivery, url in sorted(found.deliveries, key=lambda pair: pair[0].number):
        attempts = await list_attempts(tx, delivery.id, limit=MOST_ATTEMPTS)
        tried = [{name: value for name, value in plain(one).items() if name in ATTEMPT} for one in reversed(attempts)]
        records.append(plain(delivery) | {"host": host_of(url), "log": tried})
        if delivery.attempts > len(tried):
            why = Why.LIMIT if len(tried) == MOST_ATTEMPTS else Why.ABSENT
            missing.append(Missing(f"attempts of delivery {delivery.id} before the last {len(tried)}", why))
    if not found.is_whole:
        missing.append(Missing("deliveries: there are more of them, or too many subscribers to look at", Why.LIMIT))
    gone = set(events.gone)  # a delivery is found by its event
    if subject.payment.created_at < subject.now - timedelta(days=settings_of(tx).keep_webhooks_days):
        gone.add(Why.RETENTION)
    missing += [Missing("deliveries of events that are no longer kept, or not here", why) for why in sorted(gone)]
    return Section("deliveries", records, missing)


ATTEMPT = frozenset({"number", "startedAt", "latencyMs", "outcome", "httpStatus", "error", "requestBytes"})


async def read_callbacks(tx: Tx, subject: Subject) -> Section:
    """Calls of the bank that a person had to look at; those that were applied are lines of the history."""
    values = {"id": subject.payment.id, "limit": MOST_CALLBACKS}
    found = (await tx.execute(LIST_CALLBACKS, values)).mappings().all()
    missing: list[Missing] = []
    if len(found) == MOST_CALLBACKS:
        missing.append(Missing("newer callbacks", Why.LIMIT))
    if subject.payment.created_at < subject.now - timedelta(days=CALLBACKS_KEPT_DAYS):
        missing.append(Missing("callbacks that were kept for as long as they are", Why.RETENTION))
    return Section("callbacks", [_camel(row) for row in found], missing)


@dataclass(frozen=True)
class CaseRecords:
    """What officers did: the sections, the cases' ids, and the decisions that they are about.

    A line of a timeline is a record of its own, and an alert is there once however often its case was reopened: so no
    officer makes a record that is too large for a dossier.
    """

    alerts: Section
    cases: Section
    timelines: Section
    ids: Sequence[UUID]
    decision_ids: Sequence[UUID]


async def read_cases(tx: Tx, subject: Subject) -> CaseRecords:
    """Every case about the payment or its transactions, with its alert and its timeline."""
    payment = subject.payment
    found = await compliance.read_cases_about(
        tx, payment_id=payment.id, transaction_ids=subject.transaction_ids, limit=MOST_CASES + 1
    )
    missing: list[Missing] = []
    if len(found) > MOST_CASES:
        missing.append(Missing(f"cases after the first {MOST_CASES}", Why.LIMIT))
        found = found[:MOST_CASES]
    is_reviewed = any((one.case.kind, one.case.payment_id) == (Kind.PAYMENT_REVIEW, payment.id) for one in found)
    if payment.created_at < subject.now - timedelta(days=cases_kept_days()):
        missing.append(Missing("cases that were kept for as long as they are", Why.RETENTION))
    elif payment.review_hold_id is not None and not is_reviewed:
        missing.append(Missing("the case of its review", Why.ABSENT))
    alerts = {one.alert.id: one.alert for one in found}
    return CaseRecords(
        Section("alerts", [plain(one) for one in alerts.values()], missing),
        Section("cases", [plain(one.case) | {"reopenedAs": plain(one.reopened_as)} for one in found], missing),
        Section("timelines", [record for one in found for record in _lines(one)], [*missing, *_cut_lines(found)]),
        [one.case.id for one in found],
        list(dict.fromkeys(one.decision_id for one in alerts.values() if one.decision_id is not None)),
    )


def _lines(file: CaseFile) -> list[dict[str, Any]]:
    return [{"caseId": str(file.case.id)} | plain(line) for line in file.timeline]


def _cut_lines(found: Sequence[CaseFile]) -> list[Missing]:
    """A case has a line a version."""
    return [
        Missing(f"lines of case {one.case.id} after {len(one.timeline)}", Why.LIMIT)
        for one in found
        if len(one.timeline) < one.case.version
    ]


def _camel(row: Any) -> dict[str, Any]:
    return {to_camel(name): plain(value) for name, value in row.items()}
