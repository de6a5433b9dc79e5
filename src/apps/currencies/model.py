"""What a table of exchange rates is, and what the bank's answer must look like to be one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any
from zoneinfo import ZoneInfo

from duly.errors import DulyError, NotFound

WARSAW = ZoneInfo("Europe/Warsaw")
LAST_LOOK = time(18)
"""Of a working day without a table yet; the bank publishes about noon, and not on holidays."""
LOOK_AGAIN_AFTER = timedelta(hours=1)
MOST_RATES = 200
LEAST_MID, LARGEST_MID = Decimal("0.000001"), Decimal(1000)
"""Zlotys for one unit: an Indonesian rupiah is about 0.0002, a pound about 5."""
MOST_DIGITS = 8
_CODE = re.compile(r"[A-Z]{3}")
_NUMBER = re.compile(r"[0-9]{1,3}/A/NBP/([0-9]{4})")
_LONGEST_NAME = 100


class NoTable(NotFound):
    """There is no table of rates of that day."""


class BadTable(DulyError):
    """What the bank answered is no table of that day's rates."""


class TableChanged(DulyError):
    """A table that we have came again under its number with other rates."""


class Kept(StrEnum):
    """What became of a table that was fetched."""

    STORED = "stored"
    CORRECTED = "stored as a correction"
    UNCHANGED = "stored before"
    OUTDATED = "corrected before"


@dataclass(frozen=True)
class Rate:
    """Zlotys for one unit of a currency."""

    code: str
    currency: str
    mid: Decimal


@dataclass(frozen=True)
class RateTable:
    """The rates of one day, under the bank's number."""

    day: date
    number: str
    rates: tuple[Rate, ...]

    def says_the_same(self, other: RateTable) -> bool:
        """Whether the rates are the same ones, in any order."""
        return self.day == other.day and {(r.code, r.mid) for r in self.rates} == {(r.code, r.mid) for r in other.rates}


def day_of(moment: datetime) -> date:
    """The day it is in Warsaw."""
    return moment.astimezone(WARSAW).date()


def look_again_at(day: date, now: datetime) -> datetime | None:
    """When to look for a table that is not there: in an hour, on a working day, until the evening; or never."""
    again = (now + LOOK_AGAIN_AFTER).replace(second=0, microsecond=0)
    is_working_day = day.isoweekday() <= 5
    return again if is_working_day and again <= datetime.combine(day, LAST_LOOK, WARSAW) else None


def read_table(content: Any, day: date) -> RateTable:
    """The day's table from the bank's JSON, read with decimals and checked all through; BadTable says what is wrong."""
    _check(isinstance(content, list) and len(content) == 1, "it is not a list of one table")
    [table] = content
    _check(isinstance(table, dict), "the table is no object")
    _check(table.get("table") == "A", "it is not table A")
    _check(table.get("effectiveDate") == day.isoformat(), f"it is not of {day.isoformat()}")
    number = table.get("no")
    numbered = _NUMBER.fullmatch(number) if isinstance(number, str) else None
    _check(numbered is not None and int(numbered[1]) == day.year, f"it has no number of {day.year}")
    listed = table.get("rates")
    _check(isinstance(listed, list) and 1 <= len(listed) <= MOST_RATES, f"it has not 1 to {MOST_RATES} rates")
    rates = tuple(_rate(place, given) for place, given in enumerate(listed))
    _check(len({rate.code for rate in rates}) == len(rates), "a currency occurs twice")
    return RateTable(day, str(number), rates)


def _rate(place: int, given: Any) -> Rate:
    where = f"rates[{place}]"
    _check(isinstance(given, Mapping), f"{where} is no object")
    code, name, mid = given.get("code"), given.get("currency"), given.get("mid")
    _check(isinstance(code, str) and _CODE.fullmatch(code) is not None, f"{where}.code is no currency's")
    _check(
        isinstance(name, str) and 1 <= len(name.strip()) <= len(name) <= _LONGEST_NAME and name.isprintable(),
        f"{where}.currency is no name",
    )
    _check(isinstance(mid, Decimal | int) and not isinstance(mid, bool), f"{where}.mid is no number")
    return Rate(code, name, _mid(where, Decimal(mid)))


def _mid(where: str, mid: Decimal) -> Decimal:
    """With the digits that the bank wrote."""
    _check(mid.is_finite() and LEAST_MID <= mid <= LARGEST_MID, f"{where}.mid cannot be a rate")
    exponent = mid.as_tuple().exponent
    _check(isinstance(exponent, int) and -exponent <= MOST_DIGITS, f"{where}.mid has more than {MOST_DIGITS} digits")
    return mid


def _check(holds: bool, reason: str) -> None:
    if not holds:
        raise BadTable(f"the bank's answer cannot be used: {reason}")
