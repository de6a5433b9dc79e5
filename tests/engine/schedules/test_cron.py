"""Cron in a time zone: what is refused, and the written daylight-saving rule (E3.14)."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duly.errors import BadCron, BadZone, Invalid
from duly.schedules.cron import HORIZON_YEARS, MAX_PREVIEW, Cron

MINUTE = timedelta(minutes=1)
MANY = 100_000


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def local_runs(cron: Cron, day: str, *, days: int = 1) -> list[str]:
    """The runs of a local day, as the zone's wall clock shows them."""
    zone = ZoneInfo(cron.timezone)
    start = datetime.fromisoformat(day).replace(tzinfo=zone).astimezone(UTC)
    end = (datetime.fromisoformat(day) + timedelta(days=days)).replace(tzinfo=zone).astimezone(UTC)
    found = cron.between(start - MINUTE, end - MINUTE, MANY)
    return [at.astimezone(zone).strftime("%d %H:%M %z") for at in found]


# -- the rule, spelled out by hand (E3.14) -------------------------------------------------------------------


def test_a_time_that_does_not_exist_runs_once_right_after_the_gap() -> None:
    assert local_runs(Cron("30 2 * * *", "Europe/Warsaw"), "2026-03-28", days=3) == [
        "28 02:30 +0100",
        "29 03:00 +0200",
        "30 02:30 +0200",
    ]
    assert local_runs(Cron("30 2 * * *", "America/New_York"), "2026-03-08") == ["08 03:00 -0400"]


def test_a_time_that_occurs_twice_runs_once_the_first_time() -> None:
    assert local_runs(Cron("30 2 * * *", "Europe/Warsaw"), "2026-10-24", days=3) == [
        "24 02:30 +0200",
        "25 02:30 +0200",
        "26 02:30 +0100",
    ]
    assert local_runs(Cron("30 1 * * *", "America/New_York"), "2026-11-01") == ["01 01:30 -0400"]


def test_wildcard_schedules_run_in_every_real_hour() -> None:
    spring = local_runs(Cron("0 * * * *", "Europe/Warsaw"), "2026-03-29")
    assert len(spring) == 23
    assert spring[:4] == ["29 00:00 +0100", "29 01:00 +0100", "29 03:00 +0200", "29 04:00 +0200"]
    autumn = local_runs(Cron("0 * * * *", "Europe/Warsaw"), "2026-10-25")
    assert len(autumn) == 25
    assert autumn[1:5] == ["25 01:00 +0200", "25 02:00 +0200", "25 02:00 +0100", "25 03:00 +0100"]
    assert local_runs(Cron("*/30 2 * * *", "Europe/Warsaw"), "2026-03-29") == []
    assert len(local_runs(Cron("*/30 2 * * *", "Europe/Warsaw"), "2026-10-25")) == 4


def test_several_times_inside_one_gap_are_one_run() -> None:
    assert local_runs(Cron("0,30 2 * * *", "Europe/Warsaw"), "2026-03-29") == ["29 03:00 +0200"]
    assert local_runs(Cron("0 2,3 * * *", "Europe/Warsaw"), "2026-03-29") == ["29 03:00 +0200"]
    assert local_runs(Cron("30 2,3 * * *", "Europe/Warsaw"), "2026-03-29") == [
        "29 03:00 +0200",
        "29 03:30 +0200",
    ]


def test_a_gap_of_half_an_hour_moves_a_run_by_what_is_left_of_it() -> None:
    assert local_runs(Cron("10 2 * * *", "Australia/Lord_Howe"), "2026-10-04") == ["04 02:30 +1100"]
    assert local_runs(Cron("40 2 * * *", "Australia/Lord_Howe"), "2026-10-04") == ["04 02:40 +1100"]
    assert local_runs(Cron("45 1 * * *", "Australia/Lord_Howe"), "2026-04-05") == ["05 01:45 +1100"]


def test_wildcards_lose_nothing_where_the_clocks_move_by_half_an_hour() -> None:
    """cronsim's own zone handling starts these hours at half past."""
    three = local_runs(Cron("*/15 3 * * *", "Australia/Lord_Howe"), "2026-10-04")
    assert three == ["04 03:00 +1100", "04 03:15 +1100", "04 03:30 +1100", "04 03:45 +1100"]
    two = local_runs(Cron("*/15 2 * * *", "Australia/Lord_Howe"), "2026-04-05")
    assert two == ["05 02:00 +1030", "05 02:15 +1030", "05 02:30 +1030", "05 02:45 +1030"]


def test_a_midnight_that_does_not_exist_runs_at_one() -> None:
    assert local_runs(Cron("0 0 * * *", "America/Sao_Paulo"), "2018-11-04") == ["04 01:00 -0200"]
    assert local_runs(Cron("0 0 4 11 *", "America/Sao_Paulo"), "2018-11-04") == ["04 01:00 -0200"]
    assert local_runs(Cron("0 0 * * *", "Africa/Cairo"), "2026-04-24") == ["24 01:00 +0300"]
    # A wildcard follows real time: that hour did not happen (cronsim alone would invent a run at one).
    assert Cron("*/30 0 4 11 *", "America/Sao_Paulo").next_after(utc("2018-10-10")) == utc("2019-11-04T03:00")


def test_a_midnight_that_comes_twice_runs_once() -> None:
    assert local_runs(Cron("0 0 * * *", "America/Havana"), "2026-11-01") == ["01 00:00 -0400"]
    assert local_runs(Cron("30 23 * * *", "America/Sao_Paulo"), "2018-02-17") == ["17 23:30 -0200"]


def test_ramadan_moves_the_clocks_of_casablanca_twice() -> None:
    assert local_runs(Cron("30 2 * * *", "Africa/Casablanca"), "2026-02-15") == ["15 02:30 +0100"]
    assert local_runs(Cron("30 2 * * *", "Africa/Casablanca"), "2026-03-22") == ["22 03:00 +0100"]
    assert len(local_runs(Cron("0 * * * *", "Africa/Casablanca"), "2026-02-15")) == 25


def test_a_day_that_does_not_exist_runs_when_the_next_begins() -> None:
    assert local_runs(Cron("0 12 * * *", "Pacific/Apia"), "2011-12-29", days=3) == [
        "29 12:00 -1000",
        "31 00:00 +1400",
        "31 12:00 +1400",
    ]


def test_offsets_that_are_no_whole_hours_are_exact() -> None:
    assert Cron("0 6 * * *", "Asia/Kathmandu").next_after(utc("2026-06-01")) == utc("2026-06-01T00:15")
    assert Cron("0 6 * * *", "Asia/Kolkata").next_after(utc("2026-06-01")) == utc("2026-06-01T00:30")
    assert Cron("0 6 * * *", "Pacific/Chatham").next_after(utc("2026-06-01")) == utc("2026-06-01T17:15")


def test_gap_skip_drops_what_would_be_moved_and_overlap_both_runs_twice() -> None:
    skip = Cron("30 2 * * *", "Europe/Warsaw", dst_gap="skip")
    assert local_runs(skip, "2026-03-28", days=3) == ["28 02:30 +0100", "30 02:30 +0200"]
    both = Cron("30 2 * * *", "Europe/Warsaw", dst_overlap="both")
    assert local_runs(both, "2026-10-25") == ["25 02:30 +0200", "25 02:30 +0100"]


def test_asking_inside_the_repeated_hour_never_goes_back() -> None:
    """cronsim alone answers 00:30 UTC here, which is over."""
    second_pass = utc("2026-10-25T01:10")
    assert Cron("30 2 * * *", "Europe/Warsaw").next_after(second_pass) == utc("2026-10-26T01:30")
    assert Cron("0 * * * *", "Europe/Warsaw").next_after(second_pass) == utc("2026-10-25T02:00")
    both = Cron("15,45 2 * * *", "Europe/Warsaw", dst_overlap="both")
    assert both.next_after(utc("2026-10-25T00:50")) == utc("2026-10-25T01:15")
    assert both.next_after(second_pass) == utc("2026-10-25T01:15")


def test_leap_days_run_in_leap_years_only() -> None:
    cron = Cron("0 0 29 2 *")
    assert cron.next_after(utc("2026-01-01")) == utc("2028-02-29")
    assert cron.next_after(utc("2096-03-01")) == utc("2104-02-29")
    assert cron.interval_at(utc("2028-02-29")) == timedelta(days=4 * 365 + 1)


# -- the rule against a minute-by-minute oracle (E3.14) ------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """A few days of a zone, with or without a change of the clocks in the middle."""

    zone: str
    middle: date

    @property
    def start(self) -> datetime:
        return datetime.combine(self.middle, datetime.min.time(), UTC) - timedelta(hours=40)

    @property
    def end(self) -> datetime:
        return self.start + timedelta(hours=96)


WINDOWS = [
    Window("Europe/Warsaw", date(2026, 3, 29)),
    Window("Europe/Warsaw", date(2026, 10, 25)),
    Window("America/New_York", date(2026, 3, 8)),
    Window("America/New_York", date(2026, 11, 1)),
    Window("Australia/Lord_Howe", date(2026, 10, 4)),
    Window("Australia/Lord_Howe", date(2026, 4, 5)),
    Window("Africa/Casablanca", date(2026, 2, 15)),
    Window("Africa/Casablanca", date(2026, 3, 22)),
    Window("America/Sao_Paulo", date(2018, 11, 4)),
    Window("America/Sao_Paulo", date(2018, 2, 18)),
    Window("America/Havana", date(2026, 3, 8)),
    Window("America/Havana", date(2026, 11, 1)),
    Window("Pacific/Chatham", date(2026, 4, 5)),
    Window("Pacific/Chatham", date(2026, 9, 27)),
    Window("Antarctica/Troll", date(2026, 3, 29)),
    Window("Antarctica/Troll", date(2026, 10, 25)),
    Window("Africa/Cairo", date(2026, 4, 24)),
    Window("Africa/Cairo", date(2026, 10, 30)),
    Window("Asia/Pyongyang", date(2018, 5, 5)),
    Window("Pacific/Apia", date(2011, 12, 30)),
    Window("Asia/Kathmandu", date(2026, 5, 5)),
    Window("UTC", date(2026, 5, 5)),
]


@dataclass(frozen=True)
class Field:
    """A cron field that also knows its values, without any parser."""

    text: str
    values: frozenset[int]


def fields(size: int) -> st.SearchStrategy[Field]:
    everything = frozenset(range(size))
    stars = st.just(Field("*", everything))
    steps = st.integers(2, size - 1).map(lambda n: Field(f"*/{n}", frozenset(range(0, size, n))))
    lists = st.frozensets(st.integers(0, size - 1), min_size=1, max_size=4).map(
        lambda chosen: Field(",".join(map(str, sorted(chosen))), chosen)
    )
    return st.one_of(stars, steps, lists, lists)


def weekdays() -> st.SearchStrategy[Field]:
    everything = frozenset(range(7))
    some = st.frozensets(st.integers(0, 6), min_size=3, max_size=6)
    return st.one_of(
        st.just(Field("*", everything)), some.map(lambda chosen: Field(",".join(map(str, chosen)), chosen))
    )


@functools.cache
def wall_clock(window: Window) -> dict[datetime, datetime]:
    """Every minute of the window and what the wall clock shows."""
    zone = ZoneInfo(window.zone)
    count = int((window.end - window.start) / MINUTE)
    instants = (window.start + MINUTE * n for n in range(count))
    return {at: at.astimezone(zone).replace(tzinfo=None, fold=0) for at in instants}


@functools.cache
def instants_by_wall(window: Window) -> dict[datetime, list[datetime]]:
    shown: dict[datetime, list[datetime]] = {}
    for at, wall in wall_clock(window).items():
        shown.setdefault(wall, []).append(at)
    return shown


def expected_runs(
    window: Window, minute: Field, hour: Field, weekday: Field, *, gap: str, overlap: str
) -> list[datetime]:
    """The written rule, minute by minute, with nothing in common with the code under test."""

    def matches(wall: datetime) -> bool:
        return wall.minute in minute.values and wall.hour in hour.values and wall.isoweekday() % 7 in weekday.values

    if minute.text.startswith("*") or hour.text.startswith("*"):
        return [at for at, wall in wall_clock(window).items() if matches(wall)]
    shown = instants_by_wall(window)
    runs: set[datetime] = set()
    wall, last = min(shown), max(shown)
    while wall <= last:
        if matches(wall):
            real = shown.get(wall, [])
            if real:
                runs.update(real if overlap == "both" else real[:1])
            elif gap == "after":
                runs.add(next(at for at, later in wall_clock(window).items() if later > wall))
        wall += MINUTE
    return sorted(runs)


@settings(max_examples=400, deadline=None, database=None)
@given(
    window=st.sampled_from(WINDOWS),
    minute=fields(60),
    hour=fields(24),
    weekday=weekdays(),
    gap=st.sampled_from(["after", "skip"]),
    overlap=st.sampled_from(["first", "both"]),
    seconds=st.integers(0, 96 * 3600),
)
def test_every_run_is_where_the_written_rule_puts_it(
    window: Window, minute: Field, hour: Field, weekday: Field, gap: str, overlap: str, seconds: int
) -> None:
    cron = Cron(f"{minute.text} {hour.text} * * {weekday.text}", window.zone, gap, overlap)
    expected = expected_runs(window, minute, hour, weekday, gap=gap, overlap=overlap)
    assert cron.between(window.start - MINUTE, window.end - MINUTE, MANY) == expected
    after = window.start + timedelta(seconds=seconds, microseconds=1)
    later = [at for at in expected if at > after]
    if later:
        assert cron.next_after(after) == later[0]


@settings(max_examples=200, deadline=None, database=None)
@given(
    window=st.sampled_from(WINDOWS),
    minute=fields(60),
    hour=fields(24),
    overlap=st.sampled_from(["first", "both"]),
    seconds=st.floats(0, 96 * 3600),
)
def test_the_next_run_is_always_later_and_asking_from_anywhere_agrees(
    window: Window, minute: Field, hour: Field, overlap: str, seconds: float
) -> None:
    cron = Cron(f"{minute.text} {hour.text} * * *", window.zone, dst_overlap=overlap)
    after = window.start + timedelta(seconds=seconds)
    walked = after
    for at in cron.between(after, after + timedelta(days=9), 40):
        stepped = cron.next_after(walked)
        assert stepped == at
        assert stepped > walked
        assert cron.next_after(at - timedelta(microseconds=1)) == at
        walked = stepped


@settings(max_examples=150, deadline=None, database=None)
@given(window=st.sampled_from(WINDOWS), minute=fields(60), hour=fields(24), seconds=st.integers(0, 90 * 3600))
def test_the_latest_run_of_a_span_is_the_last_of_them_all(
    window: Window, minute: Field, hour: Field, seconds: int
) -> None:
    cron = Cron(f"{minute.text} {hour.text} * * *", window.zone)
    until = window.start + timedelta(seconds=seconds)
    walked = cron.between(window.start, until, MANY)
    assert cron.latest(window.start, until) == (walked[-1] if walked else None)
    if walked:
        assert cron.latest(window.start, walked[-1]) == walked[-1], "the end of the span belongs to it"


# -- what people read ----------------------------------------------------------------------------------------


def test_a_preview_marks_the_runs_that_the_clocks_change() -> None:
    notes = [run.note for run in Cron("30 2 * * *", "Europe/Warsaw").preview(utc("2026-03-27T12:00"), 3)]
    assert notes[0] is None
    assert notes[1] == "moved: the clocks skip from 02:00 to 03:00, it runs right after"
    assert notes[2] is None
    [first] = Cron("30 2 * * *", "Europe/Warsaw").preview(utc("2026-10-24T12:00"), 1)
    assert first.note == "the first of two times this hour comes that day; it runs only now"
    hourly = Cron("30 * * * *", "Europe/Warsaw").preview(utc("2026-10-25T00:00"), 3)
    assert [run.note for run in hourly] == [
        "the first of two times this hour comes that day; it runs both times",
        "the second time this hour comes that day",
        None,
    ]


def test_a_preview_shows_utc_and_local_time_and_is_bounded() -> None:
    [run] = Cron("0 9 * * *", "Europe/Warsaw").preview(utc("2026-07-01"), 1)
    assert run.at == utc("2026-07-01T07:00")
    assert run.local.isoformat() == "2026-07-01T09:00:00+02:00"
    assert len(Cron("* * * * *").preview(utc("2026-07-01"), 10**9)) == MAX_PREVIEW
    assert Cron("* * * * *").preview(utc("2026-07-01"), -1) == []
    assert len(Cron("0 0 29 2 *").preview(utc("2026-07-01"), 30)) == 30, "beyond the horizon of one step"


def test_a_cron_says_itself_in_words() -> None:
    assert Cron("30 2 * * MON-FRI", "Europe/Warsaw").describe() == (
        "At 02:30 on Monday through Friday, Europe/Warsaw time"
    )


def test_an_interval_is_real_time() -> None:
    """E3.6: a recurring job's original delay is its cron interval."""
    cron = Cron("0 12 * * *", "Europe/Warsaw")
    assert cron.interval_at(utc("2026-03-28T11:00")) == timedelta(hours=23)
    assert cron.interval_at(utc("2026-05-28T10:00")) == timedelta(hours=24)


def test_a_bound_of_between_is_exclusive_before_and_inclusive_after() -> None:
    cron = Cron("0 * * * *")
    assert cron.between(utc("2026-05-01T10:00"), utc("2026-05-01T12:00"), 9) == [
        utc("2026-05-01T11:00"),
        utc("2026-05-01T12:00"),
    ]
    assert len(cron.between(utc("2026-05-01"), utc("2027-05-01"), 5)) == 5


def test_a_naive_datetime_is_refused() -> None:
    with pytest.raises(ValueError, match="aware"):
        Cron("* * * * *").next_after(datetime(2026, 1, 1))  # noqa: DTZ001 - the mistake under test


# -- what is refused, kindly and in bounded time -------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("60 * * * *", ["minute field '60'", "0-59", "'*/15 * * * *'"]),
        ("0 25 * * *", ["hour field '25'", "0-23", "'0 9 * * *'"]),
        ("0 0 32 * *", ["day-of-month field '32'", "1-31"]),
        ("0 0 1 13 *", ["month field '13'", "1-12 or JAN-DEC"]),
        ("0 0 * * FRY", ["day-of-week field 'FRY'", "SUN-SAT"]),
        ("*/0 * * * *", ["minute field '*/0'"]),
        ("5-1 * * * *", ["minute field '5-1'"]),
        ("* * * *", ["has 4 fields", "five"]),
        ("0 * * * * *", ["has 6 fields", "no seconds"]),
        ("@daily", ["has 1 fields", "'*/15 * * * *'"]),
        ("", ["has 0 fields"]),
        ("0 0 30 2 *", ["never runs", "day-of-month field '30'", "month field '2'", "'0 0 28 2 *'"]),
        ("0 0 31 4,6,9,11 *", ["never runs", "day-of-month field '31'"]),
        ("0 0 */31 * MON#5", ["never runs", "day-of-week"]),
        ("0 0 * * ſUN", ["plain text"]),
        (",".join(["1"] * 60) + " * * * *", ["at most 100 characters"]),
    ],
)
def test_a_wrong_expression_is_told_which_field_and_what_to_write(expression: str, words: list[str]) -> None:
    with pytest.raises(BadCron) as refused:
        Cron(expression)
    for word in words:
        assert word in str(refused.value)


def test_an_expression_that_only_meets_the_gap_never_runs() -> None:
    with pytest.raises(BadCron, match="never runs in Europe/Warsaw"):
        Cron("*/10 2 * 3 0L", "Europe/Warsaw")
    with pytest.raises(BadCron, match="never runs"):
        Cron("30 2 * 3 0L", "Europe/Warsaw", dst_gap="skip")
    assert Cron("30 2 * 3 0L", "Europe/Warsaw").next_after(utc("2026-01-01")) == utc("2026-03-29T01:00")


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "../../etc/passwd",
        "/etc/localtime",
        "localtime",
        "posixrules",
        "posix/Europe/Warsaw",
        "Factory",
        "+02:00",
        "UTC+2",
        "GMT-3:30",
        "europe/warsaw",
        "Europe",
        "",
        "Europe/Warsaw\x00",
        "CEST",
        "x" * 10_000,
    ],
)
def test_only_iana_zones_are_taken(name: str) -> None:
    with pytest.raises(BadZone, match="'Europe/Warsaw' or 'UTC'"):
        Cron("* * * * *", name)


def test_a_misspelt_zone_gets_a_suggestion() -> None:
    with pytest.raises(BadZone, match="did you mean 'Europe/Warsaw'"):
        Cron("* * * * *", "Europe/Warsow")


def test_unknown_dst_rules_are_refused() -> None:
    with pytest.raises(Invalid, match="dst_gap='later': choose after or skip"):
        Cron("* * * * *", dst_gap="later")
    with pytest.raises(Invalid, match="dst_overlap='none': choose first or both"):
        Cron("* * * * *", dst_overlap="none")


def test_spaces_are_tidied_so_that_equal_crons_are_equal() -> None:
    assert Cron("  0  9 *\t* * ") == Cron("0 9 * * *")


@pytest.mark.parametrize(
    "expression",
    [
        "* * */31 * MON#5",
        "0-59 0-23 */31 2 MON#5",
        "* * 29 2 */2",
        "0 0 */2 2 MON#5",
        "*/99999999999999999999999999999999999999999999999999999999999999999 * * * *",
        f"{','.join(['*'] * 44)} * * * *",
        "* 2 * 3 0L",
    ],
)
def test_a_crafted_cron_cannot_eat_the_processor(expression: str) -> None:
    started = time.perf_counter()
    with contextlib.suppress(BadCron):
        Cron(expression, "Europe/Warsaw").describe()
    assert time.perf_counter() - started < 2


def made_or_refused(expression: str, zone: str, words: str) -> Cron | None:
    """The cron, or None after a look at the words of its refusal; any other error is a bug."""
    made: list[Cron] = []
    with contextlib.suppress(BadCron):
        made.append(Cron(expression, zone))
    if made:
        return made[0]
    with pytest.raises(BadCron, match=words):
        Cron(expression, zone)
    return None


@settings(max_examples=500, deadline=None, database=None)
@given(st.text(alphabet="0123456789*,-/#LWJANFEBMORTUHSID ", max_size=40), st.sampled_from(["*", "1", "L", "MON"]))
def test_any_text_is_a_cron_that_runs_or_a_kind_refusal(text: str, last: str) -> None:
    cron = made_or_refused(f"{text} {last}", "UTC", "example")
    if cron is None:
        return
    assert cron.describe()
    assert cron.next_after(utc("2026-01-01")) < utc("2026-01-01") + timedelta(days=366 * HORIZON_YEARS)


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.tuples(
        st.sampled_from(["*", "0", "*/7", "5-10", "1,2,3-9/2"]),
        st.sampled_from(["*", "23", "*/5", "0-6/2", "1/4"]),
        st.sampled_from(["*", "L", "LW", "31", "*/2", "L/3", "1-7,L"]),
        st.sampled_from(["*", "2", "FEB", "JAN-MAR", "*/5", "4,6"]),
        st.sampled_from(["*", "MON", "0L", "5#3", "MON#5", "1-5", "SUN,7", "*/2"]),
    )
)
def test_every_form_of_a_field_can_be_described_and_run(parts: Iterable[str]) -> None:
    cron = made_or_refused(" ".join(parts), "America/New_York", "never runs")
    if cron is None:
        return
    assert cron.describe().endswith("America/New_York time")
    assert cron.next_after(utc("2026-01-01")) > utc("2026-01-01")


def test_the_end_of_the_calendar_is_no_crash() -> None:
    with pytest.raises(BadCron, match="never runs"):
        Cron("0 0 * * *", "Europe/Warsaw").next_after(datetime(9999, 12, 31, 23, tzinfo=UTC))
    with pytest.raises(BadCron, match="never runs"):
        Cron("0 0 * * *", "America/New_York").next_after(datetime(1, 1, 1, tzinfo=UTC))
