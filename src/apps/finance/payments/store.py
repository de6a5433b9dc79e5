"""Every statement on payments, their history and unmatched callbacks.

Locks are taken in one order: the turn of an account that pays (for a new payment), a payment, then whatever the ledger
locks. Every change of a payment writes its line of the history in the same statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import select, text

from apps.finance.ledger.model import to_decimal
from apps.finance.payments.model import Callback, Delivery, HistoryLine, Payment, State
from apps.finance.payments.tables import metadata, payments, unmatched_callbacks
from apps.shared.money import MINOR_UNITS
from duly import Tx
from duly.ids import uuid7

__all__ = ["metadata"]

TAKE_TURN = text("SELECT pg_advisory_xact_lock(hashtextextended('payments from ' || CAST(:account AS text), 0))")
LOCK_LEDGER = text("SELECT payments.lock_ledger(CAST(:posted AS uuid), CAST(:accounts AS uuid[]))")
LOCK_POSTING = text("""
SELECT payments.lock_posting(CAST(:posted AS uuid)) AS reversal_id, EXISTS (
    SELECT 1 FROM payments.unmatched_callbacks c
    WHERE c.payment_id = CAST(:id AS uuid) AND c.matched_at IS NULL AND c.dismissed_at IS NULL
      AND c.problem = 'amount_differs') AS is_disputed
""")
INSERT_PAYMENT = text("""
WITH made AS (
    INSERT INTO payments.payments
        (id, from_account_id, to_account_id, amount, currency, state, reason, initiated_by, provider, bank_key,
         decision_id, review_hold_id, incoming_hold_id, transaction_id, delivery, since, created_at, updated_at)
    VALUES (CAST(:id AS uuid), CAST(:from_account_id AS uuid), CAST(:to_account_id AS uuid), CAST(:amount AS bigint),
            :currency, :state, :reason, :initiated_by, :provider, CAST(:bank_key AS uuid), CAST(:decision_id AS uuid),
            CAST(:review_hold_id AS uuid), CAST(:incoming_hold_id AS uuid), CAST(:transaction_id AS uuid),
            :delivery, duly.now(), duly.now(), duly.now())
    RETURNING *
), told AS (
    INSERT INTO payments.history (payment_id, number, at, to_state, cause, detail)
    SELECT id, 1, created_at, state, 'initiate', reason FROM made
)
SELECT * FROM made
""")
SAVE_PAYMENT = text("""
WITH moved AS (
    UPDATE payments.payments p
    SET state = CAST(:state AS text), reason = CAST(:reason AS text), retryable = CAST(:retryable AS boolean),
        next_retry_at = CAST(:next_retry_at AS timestamptz), delivery = CAST(:delivery AS text),
        provider_ref = CAST(:provider_ref AS text), incoming_hold_id = CAST(:incoming_hold_id AS uuid),
        transaction_id = CAST(:transaction_id AS uuid), reversal_id = CAST(:reversal_id AS uuid),
        contradicted_at = CAST(:contradicted_at AS timestamptz),
        version = p.version + 1, updated_at = greatest(duly.now(), p.updated_at),
        since = CASE WHEN p.state = CAST(:state AS text) THEN p.since ELSE greatest(duly.now(), p.updated_at) END
    WHERE p.id = CAST(:id AS uuid) AND p.version = CAST(:version AS integer)
    RETURNING p.*
), told AS (
    INSERT INTO payments.history (payment_id, number, at, from_state, to_state, cause, detail)
    SELECT id, version, updated_at, CAST(:from_state AS text), state, CAST(:cause AS text), CAST(:detail AS text)
    FROM moved
)
SELECT * FROM moved
""")
# Physical time for the bank, which does not know our business clock: as a lease, it is about what is under way.
BEGIN_SENDING = text("""
WITH moved AS (
    UPDATE payments.payments p
    SET attempts = p.attempts + 1, delivery = 'UNDER_WAY', sent_at = duly.now(), version = p.version + 1,
        updated_at = greatest(duly.now(), p.updated_at)
    WHERE p.id = CAST(:id AS uuid) AND p.version = CAST(:version AS integer)
    RETURNING p.*
), told AS (
    INSERT INTO payments.history (payment_id, number, at, from_state, to_state, cause, detail)
    SELECT id, version, updated_at, state, state, 'send', 'try ' || attempts FROM moved
)
SELECT *, clock_timestamp() + CAST(:validity AS interval) AS valid_until FROM moved
""")
LOCK_PAYMENT = text("""
SELECT p.*, duly.now() AS moment FROM payments.payments p WHERE p.id = CAST(:id AS uuid) FOR NO KEY UPDATE
""")
# A provider knows a payment by its own reference, or by the key we gave it; it cannot name another provider's.
LOCK_REFERRED = text("""
WITH found AS MATERIALIZED (
    SELECT r.id FROM payments.payments r
    WHERE r.provider = CAST(:provider AS text) AND r.provider_ref = CAST(:reference AS text)
    UNION
    SELECT k.id FROM payments.payments k
    WHERE k.provider = CAST(:provider AS text) AND k.bank_key = ANY(CAST(:keys AS uuid[])))
SELECT p.*, duly.now() AS moment, (SELECT count(*) FROM found) AS named FROM payments.payments p
WHERE p.id = (SELECT f.id FROM found f LIMIT 1)
FOR NO KEY UPDATE OF p
""")
FIND_POSTED = text("SELECT * FROM payments.payments WHERE transaction_id = ANY(CAST(:ids AS uuid[]))")
LOCK_HELD = text("""
SELECT * FROM payments.payments WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'PENDING_REVIEW'
ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
""")
FIND_REFERENCE = text("""
SELECT p.id FROM payments.payments p
WHERE p.provider = CAST(:provider AS text) AND p.provider_ref = CAST(:reference AS text)
""")
CLAIM_DUE = text("""
WITH moved AS (
    UPDATE payments.payments p
    SET state = 'PROCESSING', delivery = 'DUE', reason = NULL, retryable = false, next_retry_at = NULL,
        version = p.version + 1,
        updated_at = greatest(duly.now(), p.updated_at), since = greatest(duly.now(), p.updated_at)
    WHERE p.id = ANY(ARRAY(
        SELECT f.id FROM payments.payments f
        WHERE f.retryable AND f.contradicted_at IS NULL AND f.next_retry_at <= duly.now()
        ORDER BY f.next_retry_at, f.id LIMIT CAST(:limit AS integer) FOR NO KEY UPDATE SKIP LOCKED))
    RETURNING p.id, p.version, p.attempts, p.updated_at
), told AS (
    INSERT INTO payments.history (payment_id, number, at, from_state, to_state, cause)
    SELECT id, version, updated_at, 'FAILED', 'PROCESSING', 'retry' FROM moved
)
SELECT id, attempts FROM moved ORDER BY id
""")
COUNT_BY_STATE = text("""
SELECT s.state, (SELECT count(*) FROM (
    SELECT 1 FROM payments.payments p WHERE p.state = s.state LIMIT CAST(:cap AS integer)) AS counted)
FROM unnest(CAST(:states AS text[])) AS s(state)
""")
READ_OPEN = text("""
SELECT p.id, p.state, p.updated_at < duly.now() - CAST(:idle AS interval) AS is_idle FROM payments.payments p
WHERE p.state IN ('PENDING_REVIEW', 'PROCESSING', 'UNKNOWN', 'RETURNING') AND p.contradicted_at IS NULL
  AND p.id > CAST(:after AS uuid)
ORDER BY p.id LIMIT CAST(:limit AS integer)
""")
READ_HISTORY = text("""
SELECT number, at, from_state, to_state, cause, detail FROM payments.history
WHERE payment_id = CAST(:id AS uuid) ORDER BY number DESC LIMIT CAST(:limit AS integer)
""")
KEEP_CALLBACK = text("""
INSERT INTO payments.unmatched_callbacks
    (id, provider, event_id, payment_ref, client_ref, status, amount, currency, problem, payment_id, received_at)
VALUES (CAST(:id AS uuid), :provider, :event_id, :payment_ref, CAST(:client_ref AS text), :status,
        CAST(:amount AS numeric), CAST(:currency AS text), :problem, CAST(:payment_id AS uuid), duly.now())
ON CONFLICT (provider, event_id) DO NOTHING
""")
MATCH_CALLBACKS = text("""
UPDATE payments.unmatched_callbacks SET matched_at = greatest(duly.now(), received_at), payment_id = CAST(:id AS uuid)
WHERE provider = CAST(:provider AS text) AND payment_ref = CAST(:reference AS text) AND matched_at IS NULL
  AND dismissed_at IS NULL AND problem = 'unknown_reference'
RETURNING id
""")
DISMISS_CALLBACK = text("""
UPDATE payments.unmatched_callbacks
SET dismissed_at = greatest(duly.now(), received_at), dismissed_by = CAST(:actor AS text),
    dismiss_reason = CAST(:reason AS text)
WHERE id = CAST(:id AS uuid) AND matched_at IS NULL AND dismissed_at IS NULL
RETURNING *
""")
FORGET_CALLBACKS = text("""
DELETE FROM payments.unmatched_callbacks WHERE id = ANY(ARRAY(
    SELECT c.id FROM payments.unmatched_callbacks c
    WHERE c.received_at < duly.now() - make_interval(days => CAST(:days AS integer))
    ORDER BY c.received_at, c.id LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED))
RETURNING id
""")
# A page of each list, the newest first: ids are ordered by time. The open ones have an index of their own.
LIST_PAYMENTS = text("""
SELECT * FROM payments.payments WHERE id < coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
ORDER BY id DESC LIMIT CAST(:limit AS integer)
""")
# Not "state = :state": of a state that few are in, a plan for any state would read all payments by their ids.
LIST_PAYMENTS_IN_STATE = text("""
SELECT * FROM payments.payments
WHERE state >= CAST(:state AS text)
  AND (state, id) < (CAST(:state AS text), coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
ORDER BY state DESC, id DESC LIMIT CAST(:limit AS integer)
""")
LIST_CALLBACKS = text("""
SELECT * FROM payments.unmatched_callbacks
WHERE id < coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
ORDER BY id DESC LIMIT CAST(:limit AS integer)
""")
LIST_OPEN_CALLBACKS = text("""
SELECT * FROM payments.unmatched_callbacks
WHERE matched_at IS NULL AND dismissed_at IS NULL
  AND id < coalesce(CAST(:before AS uuid), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
ORDER BY id DESC LIMIT CAST(:limit AS integer)
""")
# Of those that an application raised; whoever closes one at the same time waits, and finds it closed.
LOCK_ALERTS = text("""
SELECT a.id FROM duly.alerts a
WHERE a.kind = 'application' AND a.subject = ANY(CAST(:subjects AS text[])) AND a.resolved_at IS NULL
ORDER BY a.id FOR UPDATE
""")
MOST_LINES = 200  # of a history: seven tries and what the bank said, many times over
SAVED = ("state", "reason", "retryable", "next_retry_at", "delivery", "provider_ref", "incoming_hold_id",
         "transaction_id", "reversal_id", "contradicted_at")  # fmt: skip


@dataclass(frozen=True)
class Locked:
    """A payment that nobody else changes until the commit, and what time it is."""

    payment: Payment
    now: datetime


@dataclass(frozen=True)
class Posted:
    """Of a payment's posting: its reversal, if somebody has made one; and whether a callback named another amount."""

    reversal_id: UUID | None
    is_disputed: bool


@dataclass(frozen=True)
class Unmatched:
    """A callback that a person should look at."""

    id: UUID
    provider: str
    event_id: str
    payment_ref: str
    client_ref: str | None
    status: str
    amount: Decimal | None
    currency: str | None
    problem: str
    payment_id: UUID | None
    received_at: datetime
    matched_at: datetime | None
    dismissed_at: datetime | None
    dismissed_by: str | None
    dismiss_reason: str | None


async def take_turn(tx: Tx, account_id: UUID) -> None:
    """Payments from one account begin one after the other: each counts those before it."""
    await tx.execute(TAKE_TURN, {"account": str(account_id)})


async def lock_ledger(tx: Tx, payment: Payment) -> None:
    """Before a hold ends and money moves: the posting and both accounts, in the order in which the ledger locks."""
    accounts = [payment.from_account_id, payment.to_account_id]
    await tx.execute(LOCK_LEDGER, {"posted": payment.transaction_id, "accounts": accounts})


async def lock_posting(tx: Tx, payment: Payment) -> Posted:
    """Nobody reverses its posting until the commit."""
    row = (await tx.execute(LOCK_POSTING, {"posted": payment.transaction_id, "id": payment.id})).one()
    return Posted(row.reversal_id, row.is_disputed)


async def insert_payment(tx: Tx, values: Mapping[str, Any]) -> Payment:
    """Write a new one, with the first line of its history."""
    minor = int(values["amount"].scaleb(MINOR_UNITS[values["currency"]]))
    row = (await tx.execute(INSERT_PAYMENT, {**values, "amount": minor, "state": values["state"].value})).mappings()
    return _payment(row.one())


async def save_payment(tx: Tx, was: Payment, after: Payment, *, cause: str, detail: str | None) -> Payment:
    """Write a change of one that is locked; the version says that it is the one that was read."""
    values = {name: getattr(after, name) for name in SAVED} | {"state": after.state.value}
    values |= {"id": was.id, "version": was.version, "from_state": was.state.value, "cause": cause, "detail": detail}
    return _payment((await tx.execute(SAVE_PAYMENT, values)).mappings().one())


async def begin_sending(tx: Tx, payment: Payment, *, validity: Any) -> tuple[Payment, datetime]:
    """Count one more try; until when the bank may take it."""
    values = {"id": payment.id, "version": payment.version, "validity": validity}
    row = (await tx.execute(BEGIN_SENDING, values)).mappings().one()
    return _payment(row), row["valid_until"]


async def lock_payment(tx: Tx, payment_id: UUID) -> Locked | None:
    """One by its id."""
    row = (await tx.execute(LOCK_PAYMENT, {"id": payment_id})).mappings().one_or_none()
    return Locked(_payment(row), row["moment"]) if row else None


async def lock_referred(tx: Tx, provider: str, *, reference: str, keys: Sequence[UUID]) -> tuple[Locked | None, int]:
    """One by what a provider calls it, and how many it named."""
    values = {"provider": provider, "reference": reference, "keys": list(keys)}
    row = (await tx.execute(LOCK_REFERRED, values)).mappings().one_or_none()
    return (Locked(_payment(row), row["moment"]), row["named"]) if row else (None, 0)


async def find_reference(tx: Tx, provider: str, reference: str) -> UUID | None:
    """Whose reference it is."""
    found: UUID | None = (
        await tx.execute(FIND_REFERENCE, {"provider": provider, "reference": reference})
    ).scalar_one_or_none()
    return found


async def claim_due(tx: Tx, *, limit: int) -> list[tuple[UUID, int]]:
    """Take the oldest that are due for another try and that nobody else holds: ids, and how often they were sent."""
    return [(row[0], row[1]) for row in await tx.execute(CLAIM_DUE, {"limit": limit})]


async def read_open(tx: Tx, *, after: UUID, idle: Any, limit: int) -> list[tuple[UUID, State, bool]]:
    """A page of those that wait for something, and whether nothing has happened to them for so long."""
    found = await tx.execute(READ_OPEN, {"after": after, "idle": idle, "limit": limit})
    return [(row[0], State(row[1]), row[2]) for row in found]


async def find_payment(tx: Tx, payment_id: UUID) -> Payment | None:
    """One by its id."""
    row = (await tx.execute(select(payments).where(payments.c.id == payment_id))).mappings().one_or_none()
    return _payment(row) if row else None


async def find_posted(tx: Tx, transaction_ids: Sequence[UUID]) -> list[Payment]:
    """Those that posted these."""
    return [_payment(row) for row in (await tx.execute(FIND_POSTED, {"ids": list(transaction_ids)})).mappings()]


async def lock_held(tx: Tx, payment_ids: Sequence[UUID]) -> list[Payment]:
    """Those that are under review, and that nobody else has locked."""
    return [_payment(row) for row in (await tx.execute(LOCK_HELD, {"ids": list(payment_ids)})).mappings()]


async def read_history(tx: Tx, payment_id: UUID) -> list[HistoryLine]:
    """What happened to it last, in order; the number of the first line says how much came before."""
    lines = [
        HistoryLine(row.number, row.at, State(row.from_state) if row.from_state else None, State(row.to_state),
                    row.cause, row.detail)
        for row in await tx.execute(READ_HISTORY, {"id": payment_id, "limit": MOST_LINES})
    ]  # fmt: skip
    return lines[::-1]


async def list_payments(tx: Tx, *, state: State | None, before: UUID | None, limit: int) -> list[Payment]:
    """The newest first."""
    if state is None:
        found = await tx.execute(LIST_PAYMENTS, {"before": before, "limit": limit})
    else:
        values = {"state": state.value, "before": before, "limit": limit}
        found = await tx.execute(LIST_PAYMENTS_IN_STATE, values)
    return [_payment(row) for row in found.mappings()]


async def lock_alerts(tx: Tx, subjects: Sequence[str]) -> list[int]:
    """Those of these subjects that are open: nobody else closes them until the commit."""
    return [row[0] for row in await tx.execute(LOCK_ALERTS, {"subjects": list(subjects)})]


async def count_by_state(tx: Tx, states: Sequence[State], *, cap: int) -> dict[State, int]:
    """How many are in each, counted up to a cap."""
    rows = await tx.execute(COUNT_BY_STATE, {"states": [state.value for state in states], "cap": cap})
    return {State(state): number for state, number in rows}


# -- callbacks -------------------------------------------------------------------------------------------------------


async def keep_callback(tx: Tx, callback: Callback, *, problem: str, payment_id: UUID | None) -> None:
    """For a person."""
    values = {"id": uuid7(), "provider": callback.provider, "event_id": callback.event_id, "problem": problem}
    values |= {"payment_ref": callback.payment_ref, "status": callback.status, "payment_id": payment_id}
    values |= {"client_ref": callback.client_ref, "amount": callback.amount, "currency": callback.currency}
    await tx.execute(KEEP_CALLBACK, values)


async def match_callbacks(tx: Tx, payment: Payment, reference: str) -> int:
    """Those that came before we knew this reference; how many."""
    values = {"id": payment.id, "provider": payment.provider, "reference": reference}
    return len((await tx.execute(MATCH_CALLBACKS, values)).all())


async def list_unmatched(tx: Tx, *, is_open: bool, before: UUID | None, limit: int) -> list[Unmatched]:
    """The newest first."""
    statement = LIST_OPEN_CALLBACKS if is_open else LIST_CALLBACKS
    found = await tx.execute(statement, {"before": before, "limit": limit})
    return [Unmatched(**row) for row in found.mappings()]


async def dismiss_callback(tx: Tx, callback_id: UUID, *, actor: str, reason: str) -> Unmatched | None:
    """Somebody has dealt with it; None when it is not open."""
    values = {"id": callback_id, "actor": actor, "reason": reason}
    row = (await tx.execute(DISMISS_CALLBACK, values)).mappings().one_or_none()
    return Unmatched(**row) if row else None


async def has_callback(tx: Tx, callback_id: UUID) -> bool:
    """Whether it is kept."""
    query = select(unmatched_callbacks.c.id).where(unmatched_callbacks.c.id == callback_id)
    return (await tx.execute(query)).scalar_one_or_none() is not None


async def forget_callbacks(tx: Tx, *, days: int, limit: int) -> int:
    """Delete the oldest; how many."""
    return len((await tx.execute(FORGET_CALLBACKS, {"days": days, "limit": limit})).all())


def _payment(row: Mapping[Any, Any]) -> Payment:
    values = {name: row[name] for name in FIELDS}
    values["delivery"] = Delivery(row["delivery"]) if row["delivery"] else None
    return Payment(**{**values, "state": State(row["state"]), "amount": to_decimal(row["amount"], row["currency"])})


FIELDS: Sequence[str] = [column.name for column in payments.columns]
