"""The statements of the seals and of the checks: they read the journal, and write nothing but seals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import text

from apps.finance.ledger.model import JournalLine, Seal, Violation
from duly import Tx

NIL = UUID(int=0)

# What all statements of this transaction see is the same moment; and it cannot write.
BEGIN_SNAPSHOT = text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
LOCK_SEALS = text("SELECT pg_advisory_xact_lock(hashtextextended('ledger.seals', 0))")
LAST_SEAL = text("""
SELECT number, CAST(CAST(first_xid AS text) AS bigint) AS first_xid, CAST(CAST(next_xid AS text) AS bigint) AS next_xid,
       transactions, entries, previous_hash, hash, format
FROM ledger.seals ORDER BY number DESC LIMIT 1
""")
LIST_SEALS = text("""
SELECT number, CAST(CAST(first_xid AS text) AS bigint) AS first_xid, CAST(CAST(next_xid AS text) AS bigint) AS next_xid,
       transactions, entries, previous_hash, hash, format
FROM ledger.seals WHERE number > :after ORDER BY number LIMIT CAST(:limit AS integer)
""")
# Every database transaction older than the oldest that is still running has ended: what it wrote is there for all who
# look later, and nothing can come in between. Ids alone would not do: they are given before COMMIT.
FIND_HORIZON = text("SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint)")
FIND_END = text("""
SELECT max(CAST(CAST(t.xid AS text) AS bigint)) + 1, count(*)
FROM (SELECT xid FROM ledger.transactions
      WHERE xid >= CAST(CAST(:first_xid AS text) AS xid8) AND xid < CAST(CAST(:horizon AS text) AS xid8)
      ORDER BY xid, id LIMIT CAST(:limit AS integer)) AS t
""")
READ_LINES = text("""
SELECT CAST(CAST(t.xid AS text) AS bigint) AS xid, t.id AS transaction_id, t.reference, t.currency, t.amount AS total,
       t.reverses_id, t.hold_id, t.reason, t.posted_at, e.line, e.account_id, e.version, e.amount, e.balance_after,
       t.posted_by
FROM (SELECT * FROM ledger.transactions
      WHERE (xid, id) > (CAST(CAST(:xid AS text) AS xid8), CAST(:id AS uuid))
        AND xid < CAST(CAST(:next_xid AS text) AS xid8)
      ORDER BY xid, id LIMIT CAST(:limit AS integer)) AS t
CROSS JOIN LATERAL (SELECT * FROM ledger.entries WHERE transaction_id = t.id ORDER BY line) AS e  -- never a hash of all
ORDER BY t.xid, t.id, e.line
""")
INSERT_SEAL = text("""
INSERT INTO ledger.seals (number, first_xid, next_xid, transactions, entries, previous_hash, hash, format, sealed_at)
VALUES (:number, CAST(CAST(:first_xid AS text) AS xid8), CAST(CAST(:next_xid AS text) AS xid8), :transactions, :entries,
        :previous_hash, :hash, :format, duly.now())
""")

# Each check looks at a page of rows, in the order of their key, and says how many there were, the last of them, and the
# first that breaks a rule. Everything a row is compared with is found by an index.
CHECK_TRANSACTIONS = text("""
WITH page AS MATERIALIZED (
    SELECT t.* FROM ledger.transactions t WHERE t.id > CAST(:after AS uuid) ORDER BY t.id LIMIT CAST(:limit AS integer)
), judged AS (
    SELECT CAST(p.id AS text) AS row, CASE
        WHEN s.lines < 2 THEN 'a transaction has two entries or more'
        WHEN s.total <> 0 THEN 'debits equal credits'
        WHEN s.debits <> p.amount THEN 'the amount of a transaction is the sum of its debits'
        WHEN s.strays > 0 THEN 'entries have the currency and the time of their transaction'
        WHEN (p.status = 'REVERSED') <> EXISTS (SELECT 1 FROM ledger.transactions r WHERE r.reverses_id = p.id)
            THEN 'what is marked as reversed has a reversal'
        WHEN p.reverses_id IS NOT NULL AND NOT (
            SELECT count(*) = s.lines AND count(m.line) = s.lines
            FROM ledger.entries o
            LEFT JOIN ledger.entries m ON m.transaction_id = p.id AND m.line = o.line
                                      AND m.account_id = o.account_id AND m.amount = -o.amount
            WHERE o.transaction_id = p.reverses_id)
            THEN 'a reversal mirrors its original'
        END AS rule
    FROM page p
    CROSS JOIN LATERAL (
        SELECT count(*) AS lines, coalesce(sum(e.amount), 0) AS total,
               coalesce(sum(e.amount) FILTER (WHERE e.amount > 0), 0) AS debits,
               count(*) FILTER (WHERE a.currency IS DISTINCT FROM p.currency OR e.posted_at <> p.posted_at) AS strays
        FROM ledger.entries e LEFT JOIN ledger.accounts a ON a.id = e.account_id
        WHERE e.transaction_id = p.id) AS s
)
SELECT (SELECT count(*) FROM page) AS checked, (SELECT CAST(id AS text) FROM page ORDER BY id DESC LIMIT 1) AS last,
       (SELECT ARRAY[rule, row] FROM judged WHERE rule IS NOT NULL ORDER BY row LIMIT 1) AS wrong
""")
CHECK_ENTRIES = text("""
WITH page AS MATERIALIZED (
    SELECT e.* FROM ledger.entries e
    WHERE (e.account_id, e.version) > (CAST(:after AS uuid), CAST(:after_version AS bigint))
    ORDER BY e.account_id, e.version LIMIT CAST(:limit AS integer)
), judged AS (
    SELECT p.account_id, p.version, CASE
        WHEN t.id IS NULL THEN 'an entry belongs to a transaction'
        WHEN a.id IS NULL THEN 'an entry belongs to an account'
        WHEN (p.version > 1) <> (b.version IS NOT NULL) OR p.version < 1 THEN 'versions have no gaps'
        WHEN p.balance_after <> coalesce(b.balance_after, 0) + p.amount
            THEN 'the balance after an entry is the one before it, and its amount'
        WHEN b.posted_at > p.posted_at THEN 'time does not run backwards along an account'
        END AS rule
    FROM page p
    LEFT JOIN ledger.transactions t ON t.id = p.transaction_id
    LEFT JOIN ledger.accounts a ON a.id = p.account_id
    LEFT JOIN ledger.entries b ON b.account_id = p.account_id AND b.version = p.version - 1
)
SELECT (SELECT count(*) FROM page) AS checked,
       (SELECT account_id || '/' || version FROM page ORDER BY account_id DESC, version DESC LIMIT 1) AS last,
       (SELECT ARRAY[rule, account_id || '/' || version] FROM judged WHERE rule IS NOT NULL
        ORDER BY account_id, version LIMIT 1) AS wrong
""")
CHECK_BALANCES = text("""
WITH page AS MATERIALIZED (
    SELECT a.id FROM ledger.accounts a WHERE a.id > CAST(:after AS uuid) ORDER BY a.id LIMIT CAST(:limit AS integer)
), judged AS (
    SELECT p.id, CASE
        WHEN b.account_id IS NULL THEN 'an account has a balance'
        WHEN (b.version, b.balance) IS DISTINCT FROM (coalesce(e.version, 0), coalesce(e.balance_after, 0))
             OR b.posted_at IS DISTINCT FROM e.posted_at
            THEN 'a balance is the one after the last entry'
        WHEN b.held <> h.held THEN 'what is held is the sum of the active holds'
        WHEN NOT b.may_go_negative AND b.side * b.balance - b.held < 0 THEN 'an account that may not is not overdrawn'
        END AS rule
    FROM page p
    LEFT JOIN ledger.balances b ON b.account_id = p.id
    LEFT JOIN LATERAL (SELECT f.version, f.balance_after, f.posted_at FROM ledger.entries f
                       WHERE f.account_id = p.id ORDER BY f.version DESC LIMIT 1) AS e ON true
    CROSS JOIN LATERAL (SELECT coalesce(sum(g.amount - g.captured), 0) AS held FROM ledger.holds g
                        WHERE g.account_id = p.id AND g.status = 'ACTIVE') AS h
)
SELECT (SELECT count(*) FROM page) AS checked, (SELECT CAST(id AS text) FROM page ORDER BY id DESC LIMIT 1) AS last,
       (SELECT ARRAY[rule, CAST(id AS text)] FROM judged WHERE rule IS NOT NULL ORDER BY id LIMIT 1) AS wrong
""")
CHECK_TOTALS = text("""
WITH totals AS (SELECT currency, sum(balance) AS total, count(*) AS accounts FROM ledger.balances GROUP BY currency)
SELECT (SELECT count(*) FROM totals) AS checked, NULL AS last,
       (SELECT ARRAY['all balances of a currency sum to zero', currency] FROM totals WHERE total <> 0
        ORDER BY currency LIMIT 1) AS wrong
""")
CHECKS = {
    "transactions": CHECK_TRANSACTIONS,
    "entries": CHECK_ENTRIES,
    "balances": CHECK_BALANCES,
    "totals": CHECK_TOTALS,
}
"""By the table that each looks at, in the order in which they are done."""


async def begin_snapshot(tx: Tx) -> None:
    """First of all: from here on everything is seen as of one moment."""
    await tx.execute(BEGIN_SNAPSHOT)


async def check_page(tx: Tx, table: str, *, after: str, limit: int) -> tuple[int, str | None, Violation | None]:
    """How many rows were looked at, the last of them, and the first that breaks a rule."""
    account, _, version = after.partition("/")
    values = {"after": account or NIL, "after_version": int(version or 0), "limit": limit}
    row = (await tx.execute(CHECKS[table], _named(table, values))).mappings().one()
    wrong = row["wrong"]
    return row["checked"], row["last"], Violation(wrong[0], table, wrong[1]) if wrong else None


async def lock_seals(tx: Tx) -> None:
    """One at a time adds to the chain."""
    await tx.execute(LOCK_SEALS)


async def find_last_seal(tx: Tx) -> Seal | None:
    """The head of the chain."""
    row = (await tx.execute(LAST_SEAL)).mappings().one_or_none()
    return _seal(row) if row else None


async def list_seals(tx: Tx, *, after: int, limit: int) -> list[Seal]:
    """The next links of the chain."""
    return [_seal(row) for row in (await tx.execute(LIST_SEALS, {"after": after, "limit": limit})).mappings()]


async def find_horizon(tx: Tx) -> int:
    """Whatever database transactions before this wrote is there, all of it."""
    horizon: int = (await tx.execute(FIND_HORIZON)).scalar_one()
    return horizon


async def find_end(tx: Tx, *, first_xid: int, horizon: int, limit: int) -> tuple[int | None, int]:
    """Where the next seal may end, such that it covers about so many transactions; and how many there are."""
    values = {"first_xid": str(first_xid), "horizon": str(horizon), "limit": limit}
    row = (await tx.execute(FIND_END, values)).one()
    return row[0], row[1]


async def read_lines(tx: Tx, *, xid: int, transaction_id: UUID, next_xid: int, limit: int) -> list[JournalLine]:
    """The lines of the next transactions after this one, in the order of the journal."""
    values = {"xid": str(xid), "id": transaction_id, "next_xid": str(next_xid), "limit": limit}
    return [JournalLine(**row) for row in (await tx.execute(READ_LINES, values)).mappings()]


async def insert_seal(tx: Tx, seal: Seal) -> None:
    """Write the next link."""
    values = {**vars(seal), "first_xid": str(seal.first_xid), "next_xid": str(seal.next_xid)}
    await tx.execute(INSERT_SEAL, values)


def _named(table: str, values: dict[str, Any]) -> dict[str, Any]:
    """Those values that the statement has a name for."""
    wanted = {"totals": (), "entries": ("after", "after_version", "limit")}.get(table, ("after", "limit"))
    return {name: values[name] for name in wanted}


def _seal(row: Mapping[Any, Any]) -> Seal:
    return Seal(**{**row, "previous_hash": bytes(row["previous_hash"]), "hash": bytes(row["hash"])})
