"""Which instant a local time is, in every zone, against a search that knows only the way from UTC (E3.14)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from duly.errors import BadZone
from duly.zones import find_gap_end, find_instant, find_zone, first_instant, zone_names

ZONES = sorted(zone_names())
local_time = datetime.fromisoformat  # naive: what clocks show
WIDEST = timedelta(hours=40)  # no zone is further from UTC than 16 hours, and no gap longer than 24


def searched(local: datetime, zone: ZoneInfo) -> datetime:
    """The first second at which the clocks show the time or have passed it: in a gap that is its end, in an overlap the
    first of two. Clocks that go back later may show an earlier time again; they have passed it all the same."""
    low = high = local.replace(tzinfo=UTC) - WIDEST
    while shown(high, zone) < local:
        low, high = high, high + timedelta(minutes=15)
    while high - low > timedelta(seconds=1):
        middle = low + timedelta(seconds=(high - low) // timedelta(seconds=2))
        low, high = (middle, high) if shown(middle, zone) < local else (low, middle)
    return high


def shown(at: datetime, zone: ZoneInfo) -> datetime:
    """What the clocks show."""
    return at.astimezone(zone).replace(tzinfo=None)


# Hours of the year 1900 to 2037, with those that matter more often: around midnight, and at nine.
moments = st.builds(
    lambda day, minute: local_time("1900-01-01T00:00") + timedelta(days=day, minutes=minute),
    st.integers(0, 50_400),
    st.one_of(st.integers(0, 1439), st.sampled_from([0, 59, 60, 119, 120, 150, 179, 540])),
)


@given(local=moments, name=st.sampled_from(ZONES))
@settings(max_examples=400, deadline=None)
@example(local=local_time("2011-12-30T09:00"), name="Pacific/Apia")  # a day that was not
@example(local=local_time("1994-12-31T09:00"), name="Pacific/Kiritimati")
@example(local=local_time("1993-08-21T09:00"), name="Pacific/Kwajalein")
@example(local=local_time("2026-03-29T02:30"), name="Europe/Warsaw")
@example(local=local_time("2026-10-25T02:30"), name="Europe/Warsaw")
@example(local=local_time("2026-10-04T02:15"), name="Australia/Lord_Howe")  # half an hour
@example(local=local_time("2018-05-04T23:45"), name="Asia/Pyongyang")
@example(local=local_time("1969-09-30T09:00"), name="Pacific/Kwajalein")  # a day that came twice
def test_a_local_time_is_the_instant_that_a_search_finds(local: datetime, name: str) -> None:
    zone = ZoneInfo(name)
    assert first_instant(local, zone) == searched(local, zone)


def transitions(zone: ZoneInfo, first: int, last: int) -> list[tuple[datetime, timedelta]]:
    """The instants at which the clocks change, and by how much."""
    found = []
    at, end = datetime(first, 1, 1, tzinfo=UTC), datetime(last + 1, 1, 1, tzinfo=UTC)
    while at < end:
        following = at + timedelta(days=1)
        if at.astimezone(zone).utcoffset() != following.astimezone(zone).utcoffset():
            low, high = at, following
            before = low.astimezone(zone).utcoffset()
            while high - low > timedelta(seconds=1):
                middle = low + timedelta(seconds=(high - low) // timedelta(seconds=2))
                low, high = (middle, high) if middle.astimezone(zone).utcoffset() == before else (low, middle)
            after = high.astimezone(zone).utcoffset()
            assert before is not None
            assert after is not None
            found.append((high, after - before))
        at = following
    return found


@pytest.mark.parametrize("name", ["Europe/Warsaw", "Pacific/Apia", "Australia/Lord_Howe", "America/Caracas"])
def test_inside_every_change_of_ten_years_the_rule_holds(name: str) -> None:
    """The first minute of a gap, its middle and its last; the same of an overlap."""
    zone = ZoneInfo(name)
    changes = transitions(zone, 2007, 2016)
    assert changes
    for at, by in changes:
        edge = shown(at - timedelta(seconds=1), zone) + timedelta(seconds=1)  # what the clocks would have shown
        for part in (timedelta(minutes=1), by / 2, by - timedelta(minutes=1)) if by > timedelta(0) else ():
            assert find_instant(edge + part, zone) is None
            assert first_instant(edge + part, zone) == find_gap_end(edge + part, zone) == at
        for part in (by, by / 2, -timedelta(minutes=1)) if by < timedelta(0) else ():
            first, second = find_instant(edge + part, zone), find_instant(edge + part, zone, fold=1)
            assert first_instant(edge + part, zone) == first
            assert first is not None
            assert second is not None
            assert second - first == -by


def test_a_zone_is_an_iana_name_and_nothing_else() -> None:
    assert find_zone("Europe/Warsaw").key == "Europe/Warsaw"
    for name in ("", "CEST", "+01:00", "UTC+1", "Europe/Warsaw ", "europe/warsaw", "../etc/passwd", "localtime", "é"):
        with pytest.raises(BadZone):
            find_zone(name)
    with pytest.raises(BadZone, match="did you mean 'Europe/Warsaw'"):
        find_zone("Europe/Warsow")
    with pytest.raises(BadZone) as refused:
        find_zone("x" * 10_000)
    assert len(str(refused.value)) < 200
