"""Every statement on accounts, the journal and holds.

Functions of the schema alone write here. Locks are taken in one order: a transaction that is reversed, then balances by
the id of their accounts, then a hold; who holds an account's balance is alone with the account, its entries and holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import select, text

from apps.finance.ledger.model import (
    Account,
    AccountStatus,
    AccountType,
    Balance,
    Direction,
    Entry,
    Hold,
    HoldStatus,
    Posting,
    Transaction,
    TransactionStatus,
    to_decimal,
)
from apps.finance.ledger.tables import accounts, balances, metadata
from apps.shared.money import MINOR_UNITS
from duly import Tx
from duly.db import must_notify, origin_of
from duly.outbox.emit import origin_headers

__all__ = ["metadata"]

OPEN_ACCOUNT = text("""
SELECT ledger.open_account(:id, :name, :type, :currency, CAST(:digits AS integer), CAST(:may_go_negative AS boolean))
""")
CHANGE_STATUS = text("SELECT ledger.change_status(:id, :becomes)")
FIND_BALANCE = text("""
SELECT account_id, currency, side * balance AS balance, held, version, duly.now() AS as_of
FROM ledger.balances WHERE account_id = :id
""")
FIND_BALANCE_AT = text("""
SELECT b.account_id, b.currency, b.side * f.balance AS balance, NULL AS held, f.version,
       CAST(:moment AS timestamptz) AS as_of
FROM ledger.balances b
CROSS JOIN LATERAL ledger.find_entry_at(b.account_id, CAST(:moment AS timestamptz)) AS f
WHERE b.account_id = :id
""")
LIST_ENTRIES = text("""
SELECT e.account_id, e.version, e.transaction_id, e.amount, e.balance_after, e.posted_at, t.reference, t.currency,
       a.side
FROM ledger.accounts a
CROSS JOIN LATERAL (SELECT f.* FROM ledger.entries f
                    WHERE f.account_id = a.id AND f.version < coalesce(CAST(:before AS bigint), 9223372036854775807)
                    ORDER BY f.version DESC LIMIT CAST(:limit AS integer)) AS e
JOIN ledger.transactions t ON t.id = e.transaction_id
WHERE a.id = :id
ORDER BY e.version DESC
""")
# One round trip: the locks, the checks, the journal, the balances and the events.
POST = text("""
SELECT outcome, place, moment, currencies, amounts, versions, balances, sides
FROM ledger.post(CAST(:ids AS uuid[]), CAST(:references AS text[]), CAST(:of_transaction AS integer[]),
                 CAST(:accounts AS uuid[]), CAST(:amounts AS numeric[]), CAST(:covered AS boolean[]),
                 CAST(CAST(:headers AS text) AS jsonb), CAST(:notify AS boolean), CAST(:posted_by AS text),
                 hold => CAST(:hold AS uuid), is_final => CAST(:is_final AS boolean))
""")
REVERSE = text("""
SELECT outcome, place, moment, currencies, amounts, versions, balances, sides, new_reference, accounts
FROM ledger.reverse(:original, :id, :reason, CAST(CAST(:headers AS text) AS jsonb), CAST(:notify AS boolean),
                    CAST(:posted_by AS text))
""")
FIND_TRANSACTION = text("""
SELECT t.id, t.reference, t.currency, t.amount, t.status, t.posted_at, t.reverses_id, t.hold_id, t.reason,
       (SELECT r.id FROM ledger.transactions r WHERE r.reverses_id = t.id) AS reversed_by_id,
       e.account_id, e.version, e.amount AS line_amount, e.balance_after, a.side
FROM ledger.transactions t
JOIN ledger.entries e ON e.transaction_id = t.id
JOIN ledger.accounts a ON a.id = e.account_id
WHERE t.id = :id
ORDER BY e.line
""")
FIND_TYPES = text("SELECT id, type FROM ledger.accounts WHERE id = ANY(CAST(:ids AS uuid[]))")
LOCK_TRANSACTION = text("SELECT ledger.lock_transaction(CAST(:id AS uuid))")
FIND_POSTERS = text("""
SELECT id, posted_by FROM ledger.transactions WHERE id = ANY(CAST(:ids AS uuid[])) AND posted_by IS NOT NULL
""")
PLACE_HOLD = text("""
SELECT outcome, created_at, expires_at, currency, amount
FROM ledger.place_hold(:id, :account_id, CAST(:amount AS numeric), :reference, CAST(:until AS timestamptz),
                       CAST(:lasting AS interval), CAST(:longest AS interval))
""")
END_HOLD = text("SELECT outcome, remaining FROM ledger.end_hold(:id, :ending)")
FIND_HOLD = text("""
SELECT h.*, a.currency, a.side FROM ledger.holds h JOIN ledger.accounts a ON a.id = h.account_id WHERE h.id = :id
""")
LIST_ACTIVE_HOLDS = text("""
SELECT h.*, a.currency, a.side
FROM (SELECT f.* FROM ledger.holds f WHERE f.account_id = :id AND f.status = 'ACTIVE' LIMIT 1000) AS h
JOIN ledger.accounts a ON a.id = h.account_id
ORDER BY h.expires_at, h.id LIMIT CAST(:limit AS integer)
""")
FORGET_HOLDS = text("SELECT ledger.forget_holds(CAST(:days AS integer), CAST(:limit AS integer))")


@dataclass(frozen=True)
class Answer:
    """What the database said to a posting; when it was refused, why and which line it was, counted from 1."""

    outcome: str
    place: int
    transactions: tuple[Transaction, ...] = ()


@dataclass(frozen=True)
class Placed:
    """What it said to a hold."""

    outcome: str
    hold: Hold | None


# -- accounts --------------------------------------------------------------------------------------------------------


async def open_account(
    tx: Tx, *, account_id: UUID, name: str, kind: AccountType, currency: str, may_go_negative: bool
) -> Account:
    """Write a new one."""
    values = {"id": account_id, "name": name, "type": kind.value, "currency": currency}
    values |= {"digits": MINOR_UNITS[currency], "may_go_negative": may_go_negative}
    created_at: datetime = (await tx.execute(OPEN_ACCOUNT, values)).scalar_one()
    return Account(account_id, name, kind, currency, AccountStatus.ACTIVE, may_go_negative, 0, created_at)


async def find_account(tx: Tx, account_id: UUID) -> Account | None:
    """One by its id."""
    row = (await tx.execute(_ACCOUNTS.where(accounts.c.id == account_id))).mappings().one_or_none()
    return _account(row) if row else None


async def find_types(tx: Tx, account_ids: Sequence[UUID]) -> dict[UUID, AccountType]:
    """Of what kind each is."""
    return {row[0]: AccountType(row[1]) for row in await tx.execute(FIND_TYPES, {"ids": list(account_ids)})}


async def list_accounts(tx: Tx, *, before: UUID | None, limit: int) -> list[Account]:
    """The newest first; ids are ordered by time."""
    query = _ACCOUNTS.order_by(accounts.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(accounts.c.id < before)
    return [_account(row) for row in (await tx.execute(query)).mappings()]


async def list_standings(tx: Tx, *, before: UUID | None, limit: int) -> list[tuple[Account, Balance]]:
    """The newest first, each with how it stands."""
    query = _STANDINGS.order_by(accounts.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(accounts.c.id < before)
    return [(_account(row), _balance(row["id"], row)) for row in (await tx.execute(query)).mappings()]


async def change_status(tx: Tx, account_id: UUID, becomes: AccountStatus) -> str:
    """Close or open it again, if it may be; what the database said."""
    return str((await tx.execute(CHANGE_STATUS, {"id": account_id, "becomes": becomes.value})).scalar_one())


async def find_balance(tx: Tx, account_id: UUID, *, at: datetime | None) -> Balance | None:
    """Of now, or of some moment."""
    values = {"id": account_id} if at is None else {"id": account_id, "moment": at}
    row = (await tx.execute(FIND_BALANCE if at is None else FIND_BALANCE_AT, values)).mappings().one_or_none()
    return None if row is None else _balance(account_id, row)


async def list_entries(tx: Tx, account_id: UUID, *, before: int | None, limit: int) -> list[tuple[Entry, str]]:
    """An account's, the newest first, each with its currency."""
    result = await tx.execute(LIST_ENTRIES, {"id": account_id, "before": before, "limit": limit})
    return [(_entry(row, row["transaction_id"], row["reference"]), row["currency"]) for row in result.mappings()]


# -- the journal -----------------------------------------------------------------------------------------------------


async def post(
    tx: Tx,
    postings: Sequence[Posting],
    ids: Sequence[UUID],
    *,
    posted_by: str | None,
    hold_id: UUID | None = None,
    is_final: bool = False,
) -> Answer:
    """Post all of them or none, in one statement."""
    lines = [(number, entry) for number, posting in enumerate(postings, 1) for entry in posting.entries]
    values: dict[str, Any] = {
        "ids": list(ids),
        "references": [posting.reference for posting in postings],
        "of_transaction": [number for number, _ in lines],
        "accounts": [entry.account_id for _, entry in lines],
        "amounts": [entry.signed for _, entry in lines],
        "covered": [entry.covered for _, entry in lines],
        "hold": hold_id,
        "is_final": is_final,
        "posted_by": posted_by,
    }
    row = (await tx.execute(POST, values | _origin(tx))).mappings().one()
    if row["outcome"] != "posted":
        return Answer(row["outcome"], row["place"])
    made, first = [], 0
    for transaction_id, posting in zip(ids, postings, strict=True):
        mine = slice(first, first := first + len(posting.entries))
        made.append(
            _posted(
                row,
                mine,
                values["accounts"],
                transaction_id=transaction_id,
                reference=posting.reference,
                hold_id=hold_id,
            )
        )
    return Answer("posted", 0, tuple(made))


async def reverse(
    tx: Tx, original_id: UUID, *, transaction_id: UUID, reason: str, posted_by: str | None
) -> Answer:  # fmt: skip
    """Post the mirror image of a transaction, and mark it as reversed."""
    values = {"original": original_id, "id": transaction_id, "reason": reason, "posted_by": posted_by}
    row = (await tx.execute(REVERSE, values | _origin(tx))).mappings().one()
    if row["outcome"] != "posted":
        return Answer(row["outcome"], row["place"])
    made = _posted(
        row, slice(None), row["accounts"], transaction_id=transaction_id, reference=row["new_reference"],
        reverses_id=original_id, reason=reason,
    )  # fmt: skip
    return Answer("posted", 0, (made,))


async def find_transaction(tx: Tx, transaction_id: UUID) -> Transaction | None:
    """One by its id, with its lines."""
    rows = (await tx.execute(FIND_TRANSACTION, {"id": transaction_id})).mappings().all()
    if not rows:
        return None
    head = rows[0]
    return Transaction(
        head["id"], head["reference"], head["currency"], to_decimal(head["amount"], head["currency"]),
        TransactionStatus(head["status"]), head["posted_at"],
        tuple(_entry({**row, "amount": row["line_amount"]}, head["id"], head["reference"]) for row in rows),
        head["reverses_id"], head["reversed_by_id"], head["hold_id"], head["reason"],
    )  # fmt: skip


async def lock_transaction(tx: Tx, transaction_id: UUID) -> TransactionStatus | None:
    """How it stands: nobody reverses it until the commit."""
    found = (await tx.execute(LOCK_TRANSACTION, {"id": transaction_id})).scalar_one()
    return TransactionStatus(found) if found is not None else None


async def find_posters(tx: Tx, transaction_ids: Sequence[UUID]) -> dict[UUID, str]:
    """Who posted each, as far as that is known."""
    return {row[0]: row[1] for row in await tx.execute(FIND_POSTERS, {"ids": list(transaction_ids)})}


# -- holds -----------------------------------------------------------------------------------------------------------


async def place_hold(
    tx: Tx,
    *,
    hold_id: UUID,
    account_id: UUID,
    amount: Any,
    reference: str,
    until: datetime | None,
    lasting: timedelta,
    longest: timedelta,
) -> Placed:
    """Set money aside, if it is there."""
    values = {"id": hold_id, "account_id": account_id, "amount": amount, "reference": reference}
    row = (
        (await tx.execute(PLACE_HOLD, {**values, "until": until, "lasting": lasting, "longest": longest}))
        .mappings()
        .one()
    )
    if row["outcome"] != "placed":
        return Placed(row["outcome"], None)
    currency = row["currency"]
    made = Hold(
        hold_id, account_id, reference, currency, to_decimal(row["amount"], currency), to_decimal(0, currency),
        HoldStatus.ACTIVE, row["created_at"], row["expires_at"],
    )  # fmt: skip
    return Placed("placed", made)


async def end_hold(tx: Tx, hold_id: UUID, ending: HoldStatus) -> tuple[str, timedelta]:
    """Let go of what is still held; what the database said, and how long it has yet."""
    row = (await tx.execute(END_HOLD, {"id": hold_id, "ending": ending.value})).one()
    return row[0], row[1]


async def find_hold(tx: Tx, hold_id: UUID) -> tuple[Hold, int] | None:
    """One by its id, and the side of its account."""
    row = (await tx.execute(FIND_HOLD, {"id": hold_id})).mappings().one_or_none()
    return None if row is None else (_hold(row), row["side"])


async def list_active_holds(tx: Tx, account_id: UUID, *, limit: int) -> list[Hold]:
    """Of an account, the soonest to expire first, among the first thousand."""
    rows = await tx.execute(LIST_ACTIVE_HOLDS, {"id": account_id, "limit": limit})
    return [_hold(row) for row in rows.mappings()]


async def forget_holds(tx: Tx, *, days: int, limit: int) -> int:
    """Delete the oldest of those that ended so long ago; how many."""
    gone: int = (await tx.execute(FORGET_HOLDS, {"days": days, "limit": limit})).scalar_one()
    return gone


_ACCOUNTS = select(accounts, balances.c.status, balances.c.version, balances.c.closed_at).join(
    balances, balances.c.account_id == accounts.c.id
)


_STANDINGS = _ACCOUNTS.add_columns(
    (balances.c.side * balances.c.balance).label("balance"), balances.c.held, text("duly.now() AS as_of")
)


def _balance(account_id: UUID, row: Mapping[Any, Any]) -> Balance:
    currency = row["currency"]
    held = None if row["held"] is None else to_decimal(row["held"], currency)
    return Balance(account_id, currency, to_decimal(row["balance"], currency), held, row["version"], row["as_of"])


def _hold(row: Mapping[Any, Any]) -> Hold:
    currency = row["currency"]
    return Hold(
        row["id"], row["account_id"], row["reference"], currency, to_decimal(row["amount"], currency),
        to_decimal(row["captured"], currency), HoldStatus(row["status"]), row["created_at"], row["expires_at"],
        row["ended_at"],
    )  # fmt: skip


def _origin(tx: Tx) -> dict[str, Any]:
    """What the events that the database writes must carry, and whether it is to wake the relay."""
    return {"headers": json.dumps(origin_headers(origin_of(tx))), "notify": must_notify(tx, "outbox")}


def _account(row: Mapping[Any, Any]) -> Account:
    return Account(
        row["id"], row["name"], AccountType(row["type"]), row["currency"], AccountStatus(row["status"]),
        row["may_go_negative"], row["version"], row["created_at"], row["closed_at"],
    )  # fmt: skip


def _entry(row: Mapping[Any, Any], transaction_id: UUID, reference: str) -> Entry:
    currency = row["currency"]
    return Entry(
        row["account_id"], row["version"], transaction_id, Direction.DEBIT if row["amount"] > 0 else Direction.CREDIT,
        to_decimal(abs(row["amount"]), currency), to_decimal(row["side"] * row["balance_after"], currency),
        row["posted_at"], reference,
    )  # fmt: skip


def _posted(
    row: Mapping[Any, Any],
    mine: slice,
    account_ids: Sequence[UUID],
    *,
    transaction_id: UUID,
    reference: str,
    **rest: Any,
) -> Transaction:
    """A transaction from the database's answer: arrays by line, of which ours are ``mine``."""
    names = ("currency", "amount", "version", "balance_after", "side", "account_id")
    columns = [row[name][mine] for name in ("currencies", "amounts", "versions", "balances", "sides")]
    lines = [dict(zip(names, line, strict=True)) for line in zip(*columns, account_ids[mine], strict=True)]
    made = [_entry({**line, "posted_at": row["moment"]}, transaction_id, reference) for line in lines]
    currency = lines[0]["currency"]
    total = to_decimal(sum(line["amount"] for line in lines if line["amount"] > 0), currency)
    return Transaction(
        transaction_id, reference, currency, total, TransactionStatus.POSTED, row["moment"], tuple(made), **rest
    )
