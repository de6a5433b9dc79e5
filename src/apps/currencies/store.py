"""The tables of currencies, and every statement on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Column,
    Date,
    DateTime,
    ForeignKeyConstraint,
    Index,
    MetaData,
    Numeric,
    Table,
    Text,
    text,
)

from apps.currencies.model import Rate, RateTable
from duly import Tx

metadata = MetaData(schema="currencies")
ADVISORY_KEY = 0x63757272

rate_tables = Table(
    "rate_tables",
    metadata,
    Column("number", Text, primary_key=True),
    Column("day", Date, nullable=False),
    Column("fetched_at", DateTime(timezone=True), nullable=False),
    Column("superseded_at", DateTime(timezone=True)),
    CheckConstraint("number ~ '^[0-9]{1,3}/A/NBP/[0-9]{4}$'", name="rate_tables_are_numbered"),
    CheckConstraint(
        "right(number, 4) = lpad(CAST(extract(year FROM day) AS text), 4, '0')",
        name="rate_tables_number_is_of_the_year",
    ),
    CheckConstraint("superseded_at >= fetched_at", name="rate_tables_are_superseded_later"),
)
Index("rate_tables_day", rate_tables.c.day, unique=True, postgresql_where=text("superseded_at IS NULL"))

rates = Table(
    "rates",
    metadata,
    Column("number", Text, primary_key=True),
    Column("code", Text, primary_key=True),
    Column("currency", Text, nullable=False),
    Column("mid", Numeric, nullable=False),
    ForeignKeyConstraint(["number"], ["currencies.rate_tables.number"], name="rates_table_exists", ondelete="CASCADE"),
    CheckConstraint("code ~ '^[A-Z]{3}$'", name="rates_code_is_a_currency"),
    CheckConstraint("length(currency) BETWEEN 1 AND 100", name="rates_currency_is_named"),
    CheckConstraint("mid BETWEEN 0.000001 AND 1000 AND scale(mid) <= 8", name="rates_mid_is_sane"),
)

# One after the other for each day: the second sees what the first wrote.
LOCK_DAY = text("SELECT pg_advisory_xact_lock(:key, :number)")
FIND_TABLE = text("""
SELECT t.day, t.number, t.superseded_at, r.code, r.currency, r.mid
FROM currencies.rate_tables t JOIN currencies.rates r ON r.number = t.number
WHERE t.number = :number
""")
# A clock that was set back meanwhile changes nothing: the correction comes after what it corrects.
SUPERSEDE_TABLE = text("""
UPDATE currencies.rate_tables SET superseded_at = greatest(duly.now(), fetched_at)
WHERE day = :day AND superseded_at IS NULL
RETURNING number
""")
INSERT_TABLE = text("""
WITH stored AS (
    INSERT INTO currencies.rate_tables (number, day, fetched_at) VALUES (:number, :day, duly.now())
    RETURNING number
)
INSERT INTO currencies.rates (number, code, currency, mid)
SELECT stored.number, r.code, r.currency, r.mid
FROM stored CROSS JOIN unnest(CAST(:codes AS text[]), CAST(:currencies AS text[]), CAST(:mids AS numeric[]))
                       AS r(code, currency, mid)
""")
FIND_NEWEST = text("""
SELECT t.day, t.number, r.code, r.currency, r.mid
FROM currencies.rate_tables t JOIN currencies.rates r ON r.number = t.number
WHERE t.superseded_at IS NULL
  AND t.day = (SELECT max(day) FROM currencies.rate_tables
               WHERE superseded_at IS NULL AND day <= coalesce(CAST(:until AS date), 'infinity'))
ORDER BY r.code
""")
LIST_TABLES = text("""
SELECT t.number, t.day, t.fetched_at, t.superseded_at,
       (SELECT count(*) FROM currencies.rates r WHERE r.number = t.number) AS rates
FROM (SELECT * FROM currencies.rate_tables
      WHERE (day, number) < (CAST(:before_day AS date), CAST(:before_number AS text))
      ORDER BY day DESC, number DESC LIMIT :limit) AS t
ORDER BY t.day DESC, t.number DESC
""")
FORGET_TABLES = text("""
WITH gone AS (
    DELETE FROM currencies.rate_tables WHERE number = ANY(ARRAY(
        SELECT number FROM currencies.rate_tables WHERE day < CAST(duly.now() - make_interval(years => :years) AS date)
        ORDER BY day, number LIMIT :limit))
    RETURNING 1
)
SELECT count(*) FROM gone
""")


async def lock_day(tx: Tx, day: date) -> None:
    """Be alone with a day's tables until the transaction ends."""
    await tx.execute(LOCK_DAY, {"key": ADVISORY_KEY, "number": day.toordinal()})


async def find_table(tx: Tx, number: str) -> tuple[RateTable, bool] | None:
    """One by its number, and whether another has replaced it."""
    rows = (await tx.execute(FIND_TABLE, {"number": number})).mappings().all()
    return (_table(rows), rows[0]["superseded_at"] is not None) if rows else None


async def supersede_table(tx: Tx, day: date) -> str | None:
    """The day's table is not valid any more; its number, if there was one."""
    return (await tx.execute(SUPERSEDE_TABLE, {"day": day})).scalar_one_or_none()


async def insert_table(tx: Tx, table: RateTable) -> None:
    """Write a table and its rates."""
    await tx.execute(
        INSERT_TABLE,
        {
            "number": table.number, "day": table.day, "codes": [rate.code for rate in table.rates],
            "currencies": [rate.currency for rate in table.rates], "mids": [rate.mid for rate in table.rates],
        },
    )  # fmt: skip


async def find_newest(tx: Tx, *, until: date | None) -> RateTable | None:
    """The valid table of this day, or of the last day before it that has one; without a day, the newest of all."""
    rows = (await tx.execute(FIND_NEWEST, {"until": until})).mappings().all()
    return _table(rows) if rows else None


async def list_tables(tx: Tx, *, before: tuple[date, str], limit: int) -> list[Any]:
    """The newest days first, corrected ones too; how many rates each has."""
    values = {"before_day": before[0], "before_number": before[1], "limit": limit}
    return list((await tx.execute(LIST_TABLES, values)).mappings())


async def forget_tables(tx: Tx, *, years: int, limit: int) -> int:
    """Delete the oldest of those that are older than this; how many."""
    gone: int = (await tx.execute(FORGET_TABLES, {"years": years, "limit": limit})).scalar_one()
    return gone


def _table(rows: Sequence[Mapping[Any, Any]]) -> RateTable:
    listed = tuple(Rate(row["code"], row["currency"], row["mid"]) for row in rows)
    return RateTable(rows[0]["day"], rows[0]["number"], listed)
