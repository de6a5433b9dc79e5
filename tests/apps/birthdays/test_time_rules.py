"""When a birthday message is due: pure, in every zone, against an oracle of its own (B2)."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from apps.birthdays.model import (
    BirthdayEvent,
    Delivery,
    EventStatus,
    Person,
    birthday_in,
    describe_wait,
    next_target,
    target_in,
)
from duly.zones import zone_names

ZONES = sorted(zone_names())
MINUTE = timedelta(minutes=1)
local_time = datetime.fromisoformat  # naive: what clocks show


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


# -- the oracle: the calendar by counting days, the clock by looking at it minute by minute ---------------------------


def oracle_day(born: date, year: int) -> date:
    """The day of the year with the month and day of birth, counted from 1 January; or the last of February."""
    for number in range(366):
        day = date(year, 1, 1) + timedelta(days=number)
        if (day.month, day.day) == (born.month, born.day):
            return day
    assert (born.month, born.day) == (2, 29)
    return date(year, 3, 1) - timedelta(days=1)


def oracle_instant(day: date, zone: ZoneInfo) -> datetime:
    """The first minute at which the clocks show nine o'clock of that day, or later."""
    wanted = datetime.combine(day, time(9))
    at = wanted.replace(tzinfo=UTC) - timedelta(hours=40)
    while at.astimezone(zone).replace(tzinfo=None) < wanted - timedelta(hours=3):
        at += timedelta(hours=1)
    while at.astimezone(zone).replace(tzinfo=None) < wanted:
        at += MINUTE
    return at


def oracle_next(born: date, zone: ZoneInfo, now: datetime, after_year: int) -> datetime:
    """The earliest of all that are not before now."""
    first = max(born.year, after_year) + 1
    years = range(first, max(now.year, first) + 3)
    return min(at for at in (oracle_instant(oracle_day(born, year), zone) for year in years[-6:]) if at >= now)


born_on = st.one_of(
    st.dates(date(1900, 1, 1), date(2037, 12, 31)),
    st.sampled_from([date(2000, 2, 29), date(1999, 2, 28), date(2000, 12, 31), date(2001, 1, 1), date(2004, 3, 1)]),
)
named = st.sampled_from(ZONES)


@given(born=born_on, year=st.integers(1973, 2037), name=named)
@settings(max_examples=250, deadline=None)
@example(born=date(1980, 12, 30), year=2011, name="Pacific/Apia")
@example(born=date(1980, 3, 29), year=2026, name="Europe/Warsaw")
@example(born=date(1984, 2, 29), year=2100, name="UTC")
@example(born=date(1950, 9, 30), year=1969, name="Pacific/Kwajalein")  # nine came twice, 23 hours apart
def test_the_message_of_a_year_is_at_nine_by_the_clocks_of_the_zone(born: date, year: int, name: str) -> None:
    """B2: also where the clocks skip that time, or show it twice."""
    target = target_in(born, year, name)
    assert target.local == datetime.combine(oracle_day(born, year), time(9))
    assert (target.year, target.timezone) == (year, name)
    assert target.utc == oracle_instant(oracle_day(born, year), ZoneInfo(name))


@given(
    born=born_on,
    name=named,
    now=st.datetimes(local_time("1975-01-01T00:00"), local_time("2037-12-31T00:00"), timezones=st.just(UTC)),
    ahead=st.integers(-3, 2),
)
@settings(max_examples=150, deadline=None)
@example(born=date(1980, 12, 31), name="Pacific/Kiritimati", now=utc("1994-12-31T10:00"), ahead=-3)  # 31st was skipped
@example(born=date(1980, 12, 31), name="Pacific/Kiritimati", now=utc("1994-12-31T10:01"), ahead=-3)
@example(born=date(2026, 5, 1), name="UTC", now=utc("2026-05-01T08:00"), ahead=-3)
def test_the_next_birthday_is_the_first_nine_oclock_that_is_not_before_now(
    born: date, name: str, now: datetime, ahead: int
) -> None:
    """B2: of a year after the last one that had its message, and after the year of birth."""
    after_year = now.year + ahead
    target = next_target(born, name, now=now, after_year=after_year)
    assert target.utc == oracle_next(born, ZoneInfo(name), now, after_year)
    assert target.utc >= now
    assert target.year > max(after_year, born.year)


def test_at_nine_oclock_itself_it_is_today_and_a_moment_later_it_is_next_year() -> None:
    """B2."""
    born, nine = date(1990, 6, 15), utc("2026-06-15T07:00")
    assert next_target(born, "Europe/Warsaw", now=nine).utc == nine
    assert next_target(born, "Europe/Warsaw", now=nine + timedelta(microseconds=1)).utc == utc("2027-06-15T07:00")


@pytest.mark.parametrize(
    ("year", "day"), [(2026, 28), (2027, 28), (2028, 29), (2100, 28), (2000, 29), (2096, 29)], ids=str
)
def test_29_february_is_28_february_in_common_years(year: int, day: int) -> None:
    """B2."""
    assert birthday_in(date(1988, 2, 29), year) == date(year, 2, day)


@pytest.mark.parametrize(
    ("zone", "born", "year", "expected"),
    [
        ("Pacific/Apia", date(1980, 12, 30), 2011, "2011-12-30T10:00"),  # the day was skipped: 31 December, 00:00
        ("Europe/Warsaw", date(1980, 3, 29), 2026, "2026-03-29T07:00"),  # summer time since this night
        ("Europe/Warsaw", date(1980, 3, 28), 2026, "2026-03-28T08:00"),
        ("Asia/Kathmandu", date(1980, 1, 1), 2026, "2026-01-01T03:15"),
        ("Pacific/Kiritimati", date(1980, 1, 1), 2026, "2025-12-31T19:00"),
        ("Etc/GMT+12", date(1980, 12, 31), 2026, "2026-12-31T21:00"),
    ],
)
def test_examples_of_the_page(zone: str, born: date, year: int, expected: str) -> None:
    """B2: those that docs/howto/time-rules.md shows."""
    assert target_in(born, year, zone).utc == utc(expected)


@given(born=born_on, year=st.integers(2000, 2037), old=named, new=named)
@settings(max_examples=100, deadline=None)
def test_a_change_of_zone_keeps_the_local_time_and_comes_back_where_it_was(
    born: date, year: int, old: str, new: str
) -> None:
    """B5: converted anew, whatever became of it in between."""
    target = target_in(born, year, old)
    moved = target.in_zone(new)
    assert (moved.local, moved.timezone) == (target.local, new)
    assert moved.utc == oracle_instant(target.local.date(), ZoneInfo(new))
    assert moved.in_zone(old) == target


# -- what it says -----------------------------------------------------------------------------------------------------


def delivery(late: timedelta) -> Delivery:
    target = utc("2026-06-15T07:00")
    event = BirthdayEvent(
        uuid4(), UUID(int=1), 2026, local_time("2026-06-15T09:00"), "Europe/Warsaw", target, EventStatus.PROCESSING, 2,
        target, None, None, target, target,
    )  # fmt: skip
    return Delivery(event, Person(UUID(int=1), "Ada", "Lovelace", date(1990, 6, 15), "UTC"), target + late)


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (timedelta(minutes=5), ""),
        (timedelta(minutes=5, seconds=1), "5 minutes"),
        (timedelta(minutes=59), "59 minutes"),
        (timedelta(hours=1), "1 hour"),
        (timedelta(hours=47, minutes=59), "1 day"),
        (timedelta(days=3, hours=1), "3 days"),
        (timedelta(days=400), "400 days"),
    ],
)
def test_a_late_message_says_by_how_much(late: timedelta, words: str) -> None:
    """B7."""
    expected = "Happy birthday, Ada Lovelace!" + (f" Sorry to be {words} late." if words else "")
    assert delivery(late).message == expected


def test_nothing_is_late_before_its_time() -> None:
    """A clock that was set back between claim and delivery."""
    assert delivery(timedelta(seconds=-5)).late_by == timedelta(0)
    assert describe_wait(timedelta(seconds=59)) == "a moment"
