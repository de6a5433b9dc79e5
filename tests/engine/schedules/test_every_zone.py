"""Crons in every zone there is, against an oracle that shares nothing with them (E3.14).

A sample of everything: each change of any zone's clocks in ten years, with expressions drawn for each zone, and the
oddest changes there ever were. ``python -m tests.engine.schedules.oracle --all`` compares everything, in some minutes.
"""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest

from duly.errors import BadCron
from duly.schedules.cron import Cron
from tests.engine.schedules.oracle import (
    BEGIN,
    END,
    EXPRESSIONS,
    FIRST,
    MARGIN,
    POLICIES,
    Comparison,
    Expression,
    compare_history,
    compare_sample,
    find_spans,
    zones,
)

CHUNKS = 12
ODD = [
    ("Pacific/Apia", 2010, 2013),  # a day is skipped
    ("Pacific/Fakaofo", 2011, 2012),
    ("Pacific/Kiritimati", 1994, 1996),
    ("Pacific/Kwajalein", 1969, 1970),  # 23 hours come twice
    ("Pacific/Kwajalein", 1993, 1994),
    ("Australia/Lord_Howe", 1980, 2026),  # half an hour
    ("Antarctica/Troll", 2004, 2026),  # two hours
    ("Antarctica/Casey", 2008, 2026),  # three hours, time and again
    ("Africa/Casablanca", 2005, 2026),  # Ramadan
    ("Africa/El_Aaiun", 2005, 2026),
    ("Africa/Cairo", 2008, 2016),  # four changes a year
    ("America/Caracas", 2007, 2017),  # half an hour, for good
    ("Asia/Pyongyang", 2015, 2019),
    ("Asia/Kathmandu", 1985, 1987),  # a quarter
    ("Asia/Singapore", 1930, 1983),
    ("Africa/Monrovia", 1971, 1973),  # 44 minutes and 30 seconds
    ("Europe/Amsterdam", 1936, 1946),  # offsets with seconds
    ("Europe/Dublin", 1915, 1973),  # the winter is the exception
    ("Europe/London", 1940, 1948),  # double summer time
    ("America/St_Johns", 1986, 2012),  # at one minute past midnight
    ("America/Goose_Bay", 1986, 2012),
    ("America/Sao_Paulo", 1985, 2020),  # midnight is skipped
    ("Asia/Tehran", 1977, 2023),
    ("Asia/Gaza", 2005, 2026),
    ("Asia/Manila", 1935, 1980),
    ("Antarctica/Macquarie", 2008, 2013),
    ("Europe/Volgograd", 1990, 2021),
    ("America/Nuuk", 2022, 2025),
]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_zone_runs_where_the_written_rule_puts_it(chunk: int) -> None:
    """E3.14: 2020 to 2029."""
    mine = zones()[chunk::CHUNKS]
    differences = []
    occurrences = changes = 0
    for zone in mine:
        tally = compare_sample(zone)
        differences += tally.differences
        occurrences += tally.occurrences
        changes += tally.changes
    assert not differences, "\n".join(differences[:10])
    assert len(mine) > 40
    assert occurrences > 20 * len(mine), "hardly anything was compared"
    assert changes > 100, "hardly a change of clocks was met"


@pytest.mark.parametrize(("zone", "first", "end"), ODD)
def test_the_oddest_changes_there_were(zone: str, first: int, end: int) -> None:
    """E3.14: by all expressions that run often enough to meet them."""
    compared = Comparison(zone)
    compare_history(compared, first, end)
    assert not compared.tally.differences, "\n".join(compared.tally.differences[:10])
    assert compared.tally.changes >= 1, "there was none"


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_every_expression_by_every_policy_where_clocks_change(text: str) -> None:
    """E3.14: where a whole hour is skipped, also at midnight, and where half of one is."""
    for zone in ("Europe/Warsaw", "America/Havana", "Australia/Lord_Howe"):
        compared = Comparison(zone)
        spans = find_spans(zone, BEGIN, round(datetime(2021, 1, 10, tzinfo=UTC).timestamp()))
        for gap, overlap in POLICIES:
            for index in range(1, len(spans)):
                compared.around(text, spans, index, gap=gap, overlap=overlap)
        assert not compared.tally.differences, "\n".join(compared.tally.differences[:10])


# -- the oracle itself -----------------------------------------------------------------------------------------------


def test_the_oracle_finds_the_changes_of_clocks() -> None:
    """By looking; these are known."""
    spans = find_spans("Europe/Warsaw", BEGIN, END)
    assert len(spans) == 21
    assert datetime.fromtimestamp(spans[1].begins, UTC) == datetime(2020, 3, 29, 1, tzinfo=UTC)
    assert [span.offset for span in spans[:3]] == [3600, 7200, 3600]
    apia = find_spans("Pacific/Apia", round(datetime(2011, 12, 1, tzinfo=UTC).timestamp()), round(FIRST.timestamp()))
    assert datetime.fromtimestamp(apia[1].begins, UTC) == datetime(2011, 12, 30, 10, tzinfo=UTC)
    assert apia[1].offset - apia[0].offset == 86_400


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("0 0 L * *", [31]),
        ("0 0 LW 5 *", [29]),  # the 31st is a Sunday
        ("0 0 * * MON#2", [11]),
        ("0 0 * * 7#5", [31]),
        ("0 0 * * 5L", [29]),
        ("0 0 13 * FRI", [1, 8, 13, 15, 22, 29]),
        ("0 0 */10 * MON", [11]),
        ("0 0 1-7 * */7", [3]),
        ("0 0 30/1 * *", [30, 31]),
        ("0 0 1,28-30/2 MAY *", [1, 28, 30]),
        ("0 0 * JUN *", []),
    ],
)
def test_the_oracle_reads_days_as_a_person_does(text: str, days: list[int]) -> None:
    """May 2026 begins on a Friday."""
    found = [day for day in range(1, 32) if Expression(text).is_on(date(2026, 5, day))]
    assert found == days
    cron = Cron(text)
    runs = cron.between(datetime(2026, 4, 30, 23, 59, tzinfo=UTC), datetime(2026, 5, 31, 23, 59, tzinfo=UTC), 99)
    assert [run.day for run in runs] == days


@pytest.mark.parametrize(
    ("right", "wrong"), [(("after", "first"), ("skip", "first")), (("after", "first"), ("after", "both"))]
)
def test_the_oracle_notices_a_cron_by_another_rule(
    right: tuple[str, str], wrong: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison that cannot fail proves nothing."""
    monkeypatch.setattr(
        "tests.engine.schedules.oracle.Cron", lambda text, zone, _gap, _overlap: Cron(text, zone, *wrong)
    )
    compared = Comparison("Europe/Warsaw")
    spans = find_spans("Europe/Warsaw", BEGIN, END)
    compared.window("30 2 * * *", spans, BEGIN + MARGIN, END - MARGIN, gap=right[0], overlap=right[1])
    assert compared.tally.differences


def test_the_oracle_notices_another_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when half an hour is taken for a whole one."""
    monkeypatch.setattr(
        "tests.engine.schedules.oracle.Cron",
        lambda text, _zone, gap, overlap: Cron(text, "Australia/Sydney", gap, overlap),
    )
    compared = Comparison("Australia/Lord_Howe")
    compare_history(compared, 2020, 2022, ["0 * * * *"])
    assert compared.tally.differences


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_every_expression_of_the_oracle_is_one_that_duly_takes(text: str) -> None:
    try:
        Cron(text, "Europe/Warsaw")
    except BadCron as refused:
        pytest.fail(str(refused))
