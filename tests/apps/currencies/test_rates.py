"""The rates of a day over HTTP, and the schema they are kept in (C1)."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.currencies import service
from apps.currencies.gateways import parse
from apps.currencies.model import BadTable, look_again_at, read_table
from apps.sandbox.nbp import write_table
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.commerce.acting import Customers, count, counting, run_job
from tests.apps.conftest import Api
from tests.support import rows

RATES = "/v1/currencies/rates"


@pytest.fixture
def shop(api: Api) -> Customers:
    """Anybody, by name."""
    return Customers(api)


async def store_days(db: Database, *days: date) -> None:
    async with db.transaction() as tx:
        for day in days:
            await service.keep_table(tx, read_table(parse(write_table(day).encode()), day))


async def test_the_table_of_a_day_and_the_newest_are_read_as_the_bank_wrote_them(shop: Customers, db: Database) -> None:
    """C1: exact decimals as text, in the order of their codes."""
    days = [date(2026, 11, 12), date(2026, 11, 13), date(2026, 11, 10)]
    await store_days(db, *days)
    answer = await shop.get("ann", f"{RATES}?date=2026-11-12")
    assert answer.status_code == 200
    table = answer.json()
    assert set(table) == {"date", "table", "rates"}
    assert (table["date"], table["table"][3:], len(table["rates"])) == ("2026-11-12", "/A/NBP/2026", 32)
    assert [rate["code"] for rate in table["rates"]] == sorted(rate["code"] for rate in table["rates"])
    written = write_table(days[0])
    for rate in table["rates"]:
        assert set(rate) == {"code", "currency", "mid"}
        assert f'"currency":"{rate["currency"]}","code":"{rate["code"]}","mid":{rate["mid"]}}}' in written
    newest = (await shop.get("ann", RATES)).json()
    assert newest["date"] == "2026-11-13"
    assert newest == (await shop.get("bob", f"{RATES}?date=2026-11-13")).json()


@pytest.mark.parametrize(
    ("day", "words"),
    [
        ("2026-11-15", "there is no table of 2026-11-15: the last one before it is of 2026-11-13"),
        ("2026-11-14", "the last one before it is of 2026-11-13"),
        ("2026-11-11", "the last one before it is of 2026-11-10"),
        ("9999-12-31", "the last one before it is of 2026-11-13"),
        ("2026-11-09", "there is no table of 2026-11-09, nor one before it"),
        ("0001-01-01", "nor one before it"),
    ],
)
async def test_a_day_without_a_table_is_404_and_names_the_last_one_before_it(
    shop: Customers, db: Database, day: str, words: str
) -> None:
    """C1."""
    await store_days(db, date(2026, 11, 10), date(2026, 11, 13))
    answer = await shop.get("ann", f"{RATES}?date={day}")
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:duly:problem:no-table")
    assert words in answer.json()["detail"]


async def test_before_the_first_sync_there_is_nothing(shop: Customers) -> None:
    """C1."""
    answer = await shop.get("ann", RATES)
    assert (answer.status_code, answer.json()["detail"]) == (404, "there is no table yet")


@pytest.mark.parametrize(
    "day",
    ["", "yesterday", "2026-02-30", "2026-13-01", "0000-01-01", "13.11.2026", "2026-11-13T00:00:00", "1763000000",
     "20261113", "2026-W46-5", "２０２６-11-13", "2026-11-13%00", "null"],
)  # fmt: skip
async def test_what_is_no_day_is_422_and_says_where(shop: Customers, day: str) -> None:
    """C1, E5.5."""
    answer = await shop.get("ann", f"{RATES}?date={day}")
    assert answer.status_code == 422
    assert [(fault["in"], fault["path"]) for fault in answer.json()["errors"]] == [("query", "$.date")]


@pytest.mark.parametrize("query", ["", "?date=2026-11-13", "?date=2026-11-15"])
async def test_a_read_is_one_statement(shop: Customers, db: Database, query: str) -> None:
    """A gate."""
    await store_days(db, date(2026, 11, 13))
    async with counting(db) as sent:
        await shop.get("ann", RATES + query)
    assert len(sent) == 1, sent


async def test_only_the_valid_table_of_a_day_is_read(shop: Customers, db: Database) -> None:
    """C1: a corrected one is history."""
    day = date(2026, 11, 13)
    await store_days(db, day)
    content: Any = parse(write_table(day).encode())
    content[0]["no"] = "250/A/NBP/2026"
    async with db.transaction() as tx:
        await service.keep_table(tx, read_table(content, day))
    for query in ("", "?date=2026-11-13"):
        assert (await shop.get("ann", RATES + query)).json()["table"] == "250/A/NBP/2026"


async def test_tables_are_forgotten_after_ten_years_with_their_rates(
    db: Database, dsn: str, clock: BusinessClock
) -> None:
    """A retention for every table, longer than anybody's books must be kept."""
    await store_days(db, date(2026, 11, 12), date(2026, 11, 13))
    clock.freeze(datetime(2036, 11, 13, 12, tzinfo=UTC))
    await run_job(db, dsn, "currencies.forget-tables")
    assert rows(dsn, "SELECT day FROM currencies.rate_tables") == [(date(2026, 11, 13),)]
    assert count(dsn, "currencies.rates") == 32
    query = "SELECT cron, misfire FROM duly.schedules WHERE name = 'currencies.forget-tables'"
    assert rows(dsn, query) == [("53 3 1 * *", "run_once")]


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("rates SET mid = 0 WHERE code = 'USD'", "rates_mid_is_sane"),
        ("rates SET mid = 1000.1 WHERE code = 'USD'", "rates_mid_is_sane"),
        ("rates SET mid = 0.123456789 WHERE code = 'USD'", "rates_mid_is_sane"),
        ("rates SET code = 'usd' WHERE code = 'USD'", "rates_code_is_a_currency"),
        ("rates SET currency = ''", "rates_currency_is_named"),
        ("rates SET number = '1/A/NBP/2026'", "rates_table_exists"),
        ("rate_tables SET day = '2025-11-13'", "rate_tables_number_is_of_the_year"),
        ("rate_tables SET superseded_at = fetched_at - interval '1 second'", "rate_tables_are_superseded_later"),
    ],
)
async def test_the_database_refuses_what_is_impossible(db: Database, dsn: str, change: str, constraint: str) -> None:
    """C1: also for somebody with psql."""
    await store_days(db, date(2026, 11, 13))
    with pytest.raises(psycopg.errors.IntegrityError) as refused:
        rows(dsn, f"UPDATE currencies.{change}")
    assert refused.value.diag.constraint_name == constraint


async def test_a_day_has_one_valid_table(db: Database, dsn: str) -> None:
    """C1: the index decides."""
    await store_days(db, date(2026, 11, 13))
    with pytest.raises(psycopg.errors.UniqueViolation):
        rows(
            dsn,
            "INSERT INTO currencies.rate_tables (number, day, fetched_at) VALUES ('9/A/NBP/2026', '2026-11-13', now())",
        )


# -- pure ------------------------------------------------------------------------------------------------------------


anything: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.decimals()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["A", "USD"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["table", "no", "effectiveDate", "rates", "code", "currency", "mid"]), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(anything)
def test_whatever_the_bank_says_is_a_table_or_a_reason(content: Any) -> None:
    """FAULTS: nothing else is raised."""
    with pytest.raises(BadTable, match="the bank's answer cannot be used"):
        read_table(content, date(2026, 11, 13))


@given(anything, st.sampled_from(["table", "no", "effectiveDate", "rates"]))
def test_one_wrong_member_is_enough(content: Any, member: str) -> None:
    """C1: each is looked at."""
    table: Any = parse(write_table(date(2026, 11, 13)).encode())
    table[0][member] = content
    if content == "A" and member == "table":
        assert read_table(table, date(2026, 11, 13))
        return
    with pytest.raises(BadTable):
        read_table(table, date(2026, 11, 13))


@given(anything, st.sampled_from(["code", "currency", "mid"]), st.integers(0, 31))
def test_one_wrong_rate_is_enough_or_is_a_rate(content: Any, member: str, place: int) -> None:
    """C1: and what is taken is what was given."""
    day = date(2026, 11, 13)
    table: Any = parse(write_table(day).encode())
    table[0]["rates"][place][member] = content
    try:
        rate = read_table(table, day).rates[place]
    except BadTable:
        return
    assert getattr(rate, member) == content
    assert not isinstance(content, float), "a float is not exact"


@given(st.dates(date(2002, 1, 2), date(2100, 1, 1)))
def test_the_stand_ins_table_of_any_day_is_one(day: date) -> None:
    """C1: so that a sandbox always works."""
    table = read_table(parse(write_table(day).encode()), day)
    assert (table.day, len(table.rates)) == (day, 32)


@pytest.mark.parametrize(
    ("day", "now", "again"),
    [
        (date(2026, 11, 13), "2026-11-13T12:15+01:00", "2026-11-13T13:15+01:00"),
        (date(2026, 11, 13), "2026-11-13T17:00+01:00", "2026-11-13T18:00+01:00"),
        (date(2026, 11, 13), "2026-11-13T17:01+01:00", None),
        (date(2026, 11, 13), "2026-11-14T09:00+01:00", None),
        (date(2026, 11, 14), "2026-11-14T12:15+01:00", None),
        (date(2026, 11, 15), "2026-11-15T12:15+01:00", None),
        (date(2026, 7, 13), "2026-07-13T17:00+02:00", "2026-07-13T18:00+02:00"),
        (date(2026, 7, 13), "2026-07-13T15:00+00:00", "2026-07-13T18:00+02:00"),
    ],
)
def test_another_look_is_taken_on_working_days_until_six(day: date, now: str, again: str | None) -> None:
    """C1: by Warsaw's clocks."""
    expected = datetime.fromisoformat(again) if again else None
    assert look_again_at(day, datetime.fromisoformat(now)) == expected
    assert again is None or expected == datetime.fromisoformat(now) + timedelta(hours=1)
