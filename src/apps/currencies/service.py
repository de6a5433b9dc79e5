"""The use cases of currencies: each gets a transaction and never ends it."""

from __future__ import annotations

from datetime import date, datetime

from apps.currencies import store
from apps.currencies.events import RatesPublished
from apps.currencies.model import Kept, NoTable, RateTable, TableChanged, look_again_at
from duly import Tx, emit, schedule

SYNC = "CurrencyRateSync"
YEARS_KEPT = 10
TABLES_FORGOTTEN = 1_000  # a month


async def keep_table(tx: Tx, table: RateTable) -> Kept:
    """Store a day's table, once (C1).

    What is stored never changes: a correction of the bank's comes under another number, takes the place of the first
    and leaves it where it was. A number that comes again changes nothing; with other rates it is refused.
    """
    await store.lock_day(tx, table.day)
    known = await store.find_table(tx, table.number)
    if known is not None:
        stored, is_superseded = known
        if not stored.says_the_same(table):
            raise TableChanged(f"table {table.number} came again with other rates: neither is right without a look")
        return Kept.OUTDATED if is_superseded else Kept.UNCHANGED
    corrects = await store.supersede_table(tx, table.day)
    await store.insert_table(tx, table)
    await emit(tx, RatesPublished(day=table.day, number=table.number, count=len(table.rates), corrects=corrects))
    return Kept.CORRECTED if corrects else Kept.STORED


async def plan_another_look(tx: Tx, day: date, *, now: datetime) -> datetime | None:
    """The bank has no table of this day; on a working day it may still come. When we look again, if we do."""
    again = look_again_at(day, now)
    if again is not None:
        await schedule(tx, SYNC, day.isoformat(), again)
    return again


async def read_rates(tx: Tx, *, day: date | None) -> RateTable:
    """The table of a day, or the newest."""
    found = await store.find_newest(tx, until=day)
    if found is None:
        raise NoTable("there is no table yet" if day is None else f"there is no table of {day}, nor one before it")
    if day is not None and found.day != day:
        raise NoTable(f"there is no table of {day}: the last one before it is of {found.day}")
    return found


async def forget_tables(tx: Tx, *, years: int = YEARS_KEPT, limit: int = TABLES_FORGOTTEN) -> int:
    """Drop what nobody's books need any more; how many."""
    return await store.forget_tables(tx, years=years, limit=limit)
