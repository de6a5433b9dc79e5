"""The tables of the ledger, as its migration makes them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.types import UserDefinedType


class Xid8(UserDefinedType[int]):
    """The id of a database transaction, which never comes again."""

    cache_ok = True

    def get_col_spec(self, **_options: Any) -> str:
        """As PostgreSQL calls it."""
        return "xid8"


metadata = MetaData(schema="ledger")
_Moment = DateTime(timezone=True)

accounts = Table(
    "accounts",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("currency", Text, nullable=False),
    Column("digits", SmallInteger, nullable=False),
    Column("side", SmallInteger, nullable=False),
    Column("may_go_negative", Boolean, nullable=False),
    Column("created_at", _Moment, nullable=False),
    CheckConstraint("length(name) BETWEEN 1 AND 200", name="accounts_name_is_short"),
    CheckConstraint("type IN ('ASSET', 'LIABILITY', 'EQUITY', 'INCOME', 'EXPENSE')", name="accounts_type_is_known"),
    CheckConstraint("currency ~ '^[A-Z]{3}$'", name="accounts_currency_is_a_code"),
    CheckConstraint("digits BETWEEN 0 AND 4", name="accounts_digits_are_few"),
    CheckConstraint(
        "side = CASE WHEN type IN ('ASSET', 'EXPENSE') THEN 1 ELSE -1 END", name="accounts_side_is_the_types"
    ),
    UniqueConstraint("id", "currency", "digits", "side", "may_go_negative", name="accounts_terms_are_kept"),
)

balances = Table(
    "balances",
    metadata,
    Column("account_id", Uuid, primary_key=True),
    Column("currency", Text, nullable=False),
    Column("digits", SmallInteger, nullable=False),
    Column("side", SmallInteger, nullable=False),
    Column("may_go_negative", Boolean, nullable=False),
    Column("status", Text, nullable=False, server_default=text("'ACTIVE'")),
    Column("balance", BigInteger, nullable=False, server_default=text("0")),
    Column("held", BigInteger, nullable=False, server_default=text("0")),
    Column("version", BigInteger, nullable=False, server_default=text("0")),
    Column("posted_at", _Moment),
    Column("closed_at", _Moment),
    ForeignKeyConstraint(
        ["account_id", "currency", "digits", "side", "may_go_negative"],
        [f"ledger.accounts.{name}" for name in ("id", "currency", "digits", "side", "may_go_negative")],
        name="balances_terms_are_the_accounts",
    ),
    CheckConstraint("status IN ('ACTIVE', 'CLOSED')", name="balances_status_is_known"),
    CheckConstraint("(status = 'CLOSED') = (closed_at IS NOT NULL)", name="balances_closing_is_whole"),
    CheckConstraint("status = 'ACTIVE' OR (balance = 0 AND held = 0)", name="balances_closed_is_empty"),
    CheckConstraint("version > 0 OR (version = 0 AND balance = 0)", name="balances_begin_empty"),
    CheckConstraint("(version = 0) = (posted_at IS NULL)", name="balances_version_has_its_time"),
    CheckConstraint("held >= 0", name="balances_held_is_not_negative"),
    CheckConstraint("abs(balance) <= 1000000000000000000", name="balances_are_storable"),
    CheckConstraint("may_go_negative OR side * balance - held >= 0", name="balances_are_covered"),
    postgresql_with={"fillfactor": "50"},
)

transactions = Table(
    "transactions",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("reference", Text, nullable=False),
    Column("currency", Text, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("status", Text, nullable=False, server_default=text("'POSTED'")),
    Column("reverses_id", Uuid),
    Column("hold_id", Uuid),
    Column("reason", Text),
    Column("posted_at", _Moment, nullable=False),
    Column("xid", Xid8, nullable=False, server_default=text("pg_current_xact_id()")),
    Column("posted_by", Text),
    UniqueConstraint("reference", name="transactions_reference_is_unique"),
    ForeignKeyConstraint(["reverses_id"], ["ledger.transactions.id"], name="transactions_reversed_exists"),
    CheckConstraint("length(reference) BETWEEN 1 AND 204", name="transactions_reference_is_short"),
    CheckConstraint("amount > 0", name="transactions_amount_is_positive"),
    CheckConstraint("status IN ('POSTED', 'REVERSED')", name="transactions_status_is_known"),
    CheckConstraint(
        "reverses_id IS NULL OR (status = 'POSTED' AND reason IS NOT NULL)", name="transactions_reversal_stays"
    ),
    CheckConstraint("length(reason) BETWEEN 1 AND 4000", name="transactions_reason_is_short"),
    CheckConstraint("length(posted_by) BETWEEN 1 AND 255", name="transactions_poster_is_named"),
)
Index(
    "transactions_reversed_once",
    transactions.c.reverses_id,
    unique=True,
    postgresql_where=text("reverses_id IS NOT NULL"),
)
Index("transactions_written", transactions.c.xid, transactions.c.id)

entries = Table(
    "entries",
    metadata,
    Column("account_id", Uuid, primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("transaction_id", Uuid, nullable=False),
    Column("line", SmallInteger, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("balance_after", BigInteger, nullable=False),
    Column("posted_at", _Moment, nullable=False),
    UniqueConstraint("transaction_id", "line", name="entries_line_is_one"),
    CheckConstraint("amount <> 0", name="entries_amount_is_not_zero"),
    CheckConstraint("line BETWEEN 1 AND 500", name="entries_lines_are_few"),
)

holds = Table(
    "holds",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("account_id", Uuid, nullable=False),
    Column("reference", Text, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("captured", BigInteger, nullable=False, server_default=text("0")),
    Column("status", Text, nullable=False, server_default=text("'ACTIVE'")),
    Column("created_at", _Moment, nullable=False),
    Column("expires_at", _Moment, nullable=False),
    Column("ended_at", _Moment),
    UniqueConstraint("reference", name="holds_reference_is_unique"),
    ForeignKeyConstraint(["account_id"], ["ledger.accounts.id"], name="holds_account_exists"),
    CheckConstraint("length(reference) BETWEEN 1 AND 200", name="holds_reference_is_short"),
    CheckConstraint("amount > 0", name="holds_amount_is_positive"),
    CheckConstraint("captured BETWEEN 0 AND amount", name="holds_captured_fits"),
    CheckConstraint("status IN ('ACTIVE', 'CAPTURED', 'VOIDED', 'EXPIRED')", name="holds_status_is_known"),
    CheckConstraint("(status = 'ACTIVE') = (ended_at IS NULL)", name="holds_ending_is_whole"),
    CheckConstraint("status <> 'CAPTURED' OR captured > 0", name="holds_captured_has_some"),
    CheckConstraint("captured < amount OR status = 'CAPTURED'", name="holds_used_up_is_captured"),
    CheckConstraint("status <> 'EXPIRED' OR ended_at >= expires_at", name="holds_expire_in_time"),
)
Index(
    "holds_active",
    holds.c.account_id,
    postgresql_include=["amount", "captured"],
    postgresql_where=text("status = 'ACTIVE'"),
)
Index("holds_ended", holds.c.ended_at, holds.c.id, postgresql_where=text("status <> 'ACTIVE'"))

seals = Table(
    "seals",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("first_xid", Xid8, nullable=False),
    Column("next_xid", Xid8, nullable=False),
    Column("transactions", BigInteger, nullable=False),
    Column("entries", BigInteger, nullable=False),
    Column("previous_hash", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("sealed_at", _Moment, nullable=False),
    Column("format", SmallInteger, nullable=False, server_default=text("1")),
    UniqueConstraint("previous_hash", name="seals_chain_is_a_line"),
    UniqueConstraint("hash", name="seals_hash_is_unique"),
    CheckConstraint("number > 0", name="seals_are_counted"),
    CheckConstraint("next_xid > first_xid", name="seals_go_forward"),
    CheckConstraint("octet_length(previous_hash) = 32 AND octet_length(hash) = 32", name="seals_hashes_are_sha256"),
    CheckConstraint("transactions > 0 AND entries >= 2 * transactions", name="seals_cover_something"),
    CheckConstraint("format IN (1, 2)", name="seals_format_is_known"),
)
Index("seals_end", seals.c.next_xid)
