"""CurrencyRateSync: the bank's table of the day, fetched over real HTTP and stored once (C1)."""

from __future__ import annotations

import asyncio
import gzip
import signal
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fastapi.routing import iter_route_contexts

from apps.currencies import gateways, service
from apps.currencies.gateways import LARGEST_BODY_BYTES, Nbp, RatesFailed
from apps.currencies.model import read_table
from apps.currencies.store import ADVISORY_KEY
from apps.wiring import app
from duly.cli.process import build_api
from duly.db import Database
from duly.jobs.worker import Worker
from duly.schedules.tick import Scheduler
from duly.settings import Settings
from duly.testing import BusinessClock, drain
from tests.apps.commerce.acting import count, counting, run_job, runs_of
from tests.apps.conftest import Api
from tests.apps.currencies.bank import JSON, TEXT, Bank, Reply, table_reply
from tests.apps.transfers.acting import until_waiting
from tests.engine.jobs.witness import expire_leases
from tests.support import finish, python, rows, value

SYNC = "CurrencyRateSync"
FRIDAY = date(2026, 11, 13)
AT_NOON = datetime(2026, 11, 13, 11, 15, tzinfo=UTC)  # 12:15 in Warsaw
SATURDAY = AT_NOON + timedelta(days=1)
STORED = "SELECT day, number, superseded_at IS NULL FROM currencies.rate_tables ORDER BY day, number"
MID = "SELECT mid::text FROM currencies.rates WHERE number = %(number)s AND code = %(code)s"


def mids(dsn: str, number: str = "221/A/NBP/2026") -> dict[str, str]:
    found = rows(dsn, "SELECT code, mid::text FROM currencies.rates WHERE number = %(number)s", {"number": number})
    return dict(found)


def number_of(dsn: str) -> str:
    return str(value(dsn, "SELECT number FROM currencies.rate_tables"))


# -- a day ------------------------------------------------------------------------------------------------------------


async def test_the_schedule_fetches_and_stores_the_days_table(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C1: at a quarter past noon in Warsaw, from the row in the database to the rates; nothing called by hand."""
    query = "SELECT cron, timezone, enabled, max_retries, misfire FROM duly.schedules WHERE name = %(name)s"
    assert rows(dsn, query, {"name": SYNC}) == [("15 12 * * *", "Europe/Warsaw", True, 3, "run_all")]
    clock.freeze(AT_NOON - timedelta(minutes=1))
    await Scheduler(db).run_once()
    assert bank.asked == []
    clock.freeze(AT_NOON)
    await Scheduler(db).run_once()
    await drain(db, app.handlers)
    assert bank.asked == ["/api/exchangerates/tables/A/2026-11-13/?format=json"]
    [(day, number, is_valid)] = rows(dsn, STORED)
    assert (day, number[3:], is_valid) == (FRIDAY, "/A/NBP/2026", True)
    assert count(dsn, "currencies.rates") == 32
    assert rows(dsn, "SELECT currency FROM currencies.rates WHERE code = 'USD'") == [("dolar amerykański",)]
    assert runs_of(dsn, SYNC) == [("done", f"2026-11-13: table {number} with 32 rates, stored")]
    assert rows(dsn, "SELECT type, topic, aggregate_id, payload FROM duly.event_log") == [
        (
            "RatesPublished", "currency-events", "2026-11-13",
            {"day": "2026-11-13", "number": number, "count": 32, "corrects": None},
        )
    ]  # fmt: skip


async def test_rates_are_stored_with_the_digits_that_the_bank_wrote(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C1: no float in between, and no zero lost."""
    clock.freeze(AT_NOON)
    rates = '{"currency":"a","code":"AAA","mid":4.5770},{"currency":"b","code":"BBB","mid":0.00021842},'
    rates += '{"currency":"c","code":"CCC","mid":4},{"currency":"d","code":"DDD","mid":2.675}'
    body = f'[{{"table":"A","no":"221/A/NBP/2026","effectiveDate":"2026-11-13","rates":[{rates}]}}]'
    bank.replies.append(Reply(body=body.encode()))
    await run_job(db, dsn, SYNC)
    assert mids(dsn) == {"AAA": "4.5770", "BBB": "0.00021842", "CCC": "4", "DDD": "2.675"}


async def test_a_late_run_fetches_the_day_it_was_due_for(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C1: three days later the bank's newest table is another one."""
    clock.freeze(AT_NOON - timedelta(minutes=1))
    await Scheduler(db).run_once()
    clock.freeze(AT_NOON)
    await Scheduler(db).run_once()
    clock.advance(days=3)
    await drain(db, app.handlers)
    assert bank.asked == ["/api/exchangerates/tables/A/2026-11-13/?format=json"]
    assert value(dsn, "SELECT day FROM currencies.rate_tables") == FRIDAY


async def test_after_downtime_every_missed_day_is_fetched(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C1, E3.12: each day has a table of its own; those of the weekend say that there is none."""
    clock.freeze(AT_NOON - timedelta(minutes=1))
    await Scheduler(db).run_once()
    clock.freeze(AT_NOON + timedelta(days=4, minutes=30))
    await Scheduler(db).run_once()
    await drain(db, app.handlers)
    assert sorted(path.split("/")[5] for path in bank.asked) == [f"2026-11-{day}" for day in range(13, 18)]
    assert [day.day for day, _, _ in rows(dsn, STORED)] == [13, 16, 17]
    assert [outcome for outcome, _ in runs_of(dsn, SYNC)] == ["done"] * 5


@pytest.mark.parametrize(
    ("moment", "day"),
    [("2026-11-12T22:59", "2026-11-12"), ("2026-11-12T23:00", "2026-11-13"), ("2026-07-12T22:00", "2026-07-13")],
)
async def test_the_day_is_warsaws(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock, moment: str, day: str
) -> None:
    """C1: whenever an operator runs it, in winter and in summer."""
    clock.freeze(datetime.fromisoformat(f"{moment}+00:00"))
    await run_job(db, dsn, SYNC)
    assert bank.asked == [f"/api/exchangerates/tables/A/{day}/?format=json"]


# -- a day without a table -------------------------------------------------------------------------------------------


async def test_a_weekend_is_a_success_that_says_so(bank: Bank, db: Database, dsn: str, clock: BusinessClock) -> None:
    """C1."""
    clock.freeze(SATURDAY)
    await run_job(db, dsn, SYNC)
    assert runs_of(dsn, SYNC) == [("done", "2026-11-14: the bank has no table of this day")]
    assert (count(dsn, "currencies.rate_tables"), count(dsn, "duly.jobs"), count(dsn, "duly.outbox")) == (0, 0, 0)


async def test_a_table_that_is_late_is_looked_for_every_hour(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C1: the bank publishes about noon; a working day without a table may have one an hour later."""
    clock.freeze(AT_NOON)
    bank.replies.extend([Reply(404, b"404 NotFound - Not Found - Brak danych", TEXT)] * 2)
    await run_job(db, dsn, SYNC)
    assert runs_of(dsn, SYNC) == [("done", "2026-11-13: the bank has no table of this day yet; we look again at 13:15")]
    for _ in range(2):
        clock.advance(hours=1)
        await drain(db, app.handlers)
    assert len(bank.asked) == 3
    assert [day for day, _, _ in rows(dsn, STORED)] == [FRIDAY]
    assert count(dsn, "duly.jobs") == 0


async def test_a_holiday_is_given_up_in_the_evening(bank: Bank, db: Database, dsn: str, clock: BusinessClock) -> None:
    """C1: 11 November 2026 is a Wednesday; each look is a success, and there are six of them."""
    clock.freeze(datetime(2026, 11, 11, 11, 15, tzinfo=UTC))
    await run_job(db, dsn, SYNC)
    for _ in range(12):
        clock.advance(hours=1)
        await drain(db, app.handlers)
    assert [outcome for outcome, _ in runs_of(dsn, SYNC)] == ["done"] * 6
    assert runs_of(dsn, SYNC)[-1][1] == "2026-11-11: the bank has no table of this day"
    assert set(bank.asked) == {"/api/exchangerates/tables/A/2026-11-11/?format=json"}


async def test_yesterday_is_not_looked_for_again(bank: Bank, db: Database, dsn: str, clock: BusinessClock) -> None:
    """C1: what is not there a day later does not come any more."""
    clock.freeze(datetime(2026, 11, 12, 8, tzinfo=UTC))
    rows(dsn, "SELECT duly.schedule(%(name)s, 'x', duly.now() - interval '21 hours')", {"name": SYNC})
    await drain(db, app.handlers)
    assert runs_of(dsn, SYNC) == [("done", "2026-11-11: the bank has no table of this day")]
    assert count(dsn, "duly.jobs") == 0


# -- twice -----------------------------------------------------------------------------------------------------------


async def test_a_second_run_changes_nothing_and_says_so(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C1: idempotent per day."""
    clock.freeze(AT_NOON)
    await run_job(db, dsn, SYNC)
    before = rows(
        dsn, "SELECT t.*, r.*, t.xmin, r.xmin FROM currencies.rate_tables t, currencies.rates r ORDER BY code"
    )
    clock.advance(hours=2)
    await run_job(db, dsn, SYNC)
    after = rows(dsn, "SELECT t.*, r.*, t.xmin, r.xmin FROM currencies.rate_tables t, currencies.rates r ORDER BY code")
    assert after == before
    assert runs_of(dsn, SYNC)[1] == ("done", f"2026-11-13: table {number_of(dsn)} with 32 rates, stored before")
    assert value(dsn, "SELECT count(*) FROM duly.event_log WHERE type = 'RatesPublished'") == 1


async def test_two_runs_at_once_store_one_table(bank: Bank, db: Database, dsn: str, clock: BusinessClock) -> None:
    """C1: one waits for the other, and finds it stored."""
    clock.freeze(AT_NOON)
    for entity in ("a", "b"):
        rows(dsn, "SELECT duly.schedule(%(name)s, %(entity)s)", {"name": SYNC, "entity": entity})
    with psycopg.connect(dsn) as rival:
        rival.execute("SELECT pg_advisory_xact_lock(%s, %s)", [ADVISORY_KEY, FRIDAY.toordinal()])
        working = asyncio.create_task(Worker(db, app.handlers).run_once())
        await until_waiting(dsn, 2)
        rival.rollback()
    await working
    assert sorted(str(message).rpartition(", ")[2] for _, message in runs_of(dsn, SYNC)) == ["stored", "stored before"]
    assert value(dsn, "SELECT count(*) FROM duly.outbox WHERE type = 'RatesPublished'") == 1


async def test_a_correction_under_another_number_takes_the_place_of_the_first(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C1, decided: the first stays in the database, the second is what is read, and an event says so."""
    clock.freeze(AT_NOON)
    await run_job(db, dsn, SYNC)
    first = number_of(dsn)
    before = mids(dsn, first)
    corrected = table_reply(FRIDAY, (first, "250/A/NBP/2026"), (f'"USD","mid":{before["USD"]}', '"USD","mid":3.9999'))
    bank.replies.append(corrected)
    clock.advance(hours=1)
    await run_job(db, dsn, SYNC)
    assert rows(dsn, STORED) == [(FRIDAY, first, False), (FRIDAY, "250/A/NBP/2026", True)]
    assert mids(dsn, first) == before
    assert mids(dsn, "250/A/NBP/2026") == before | {"USD": "3.9999"}
    assert str(runs_of(dsn, SYNC)[1][1]).endswith("stored as a correction")
    payloads = rows(dsn, "SELECT payload FROM duly.event_log WHERE type = 'RatesPublished' ORDER BY seq")
    assert [payload["corrects"] for (payload,) in payloads] == [None, first]
    await run_job(db, dsn, SYNC)  # somebody still hands out the first one
    assert str(runs_of(dsn, SYNC)[2][1]).endswith("corrected before")
    assert rows(dsn, STORED) == [(FRIDAY, first, False), (FRIDAY, "250/A/NBP/2026", True)]


async def test_a_correction_is_stored_by_a_clock_that_was_set_back(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C1: it comes after the first whatever the clocks say."""
    clock.freeze(AT_NOON)
    await run_job(db, dsn, SYNC)
    first = number_of(dsn)
    bank.replies.append(table_reply(FRIDAY, (first, "250/A/NBP/2026")))
    clock.freeze(AT_NOON - timedelta(minutes=5))
    await run_job(db, dsn, SYNC)
    assert rows(dsn, STORED) == [(FRIDAY, first, False), (FRIDAY, "250/A/NBP/2026", True)]


async def test_other_rates_under_the_same_number_are_for_a_person(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C1, decided: what is stored never changes; a dead letter at once, since trying again is no help."""
    clock.freeze(AT_NOON)
    await run_job(db, dsn, SYNC)
    before = mids(dsn, number_of(dsn))
    bank.replies.append(table_reply(FRIDAY, (f'"USD","mid":{before["USD"]}', '"USD","mid":3.9999')))
    await run_job(db, dsn, SYNC)
    assert runs_of(dsn, SYNC)[1][0] == "buried"
    assert "came again with other rates" in value(dsn, "SELECT error FROM duly.dead_letters")
    assert mids(dsn, number_of(dsn)) == before


# -- what is no table ------------------------------------------------------------------------------------------------


HEAD = table_reply(FRIDAY).body.split(b'"rates"')[0]
BAD_TABLES: list[tuple[str, Reply, str]] = [
    ("empty", Reply(body=b""), "not JSON"),
    ("html", Reply(body=b"<html>fine</html>", kind="text/html"), "not JSON"),
    ("html as json", Reply(body=b"<html>fine</html>"), "not JSON"),
    ("half", Reply(body=table_reply(FRIDAY).body[:500]), "not JSON"),
    ("not utf-8", Reply(body=table_reply(FRIDAY).body.replace("ń".encode(), b"\xf1")), "not JSON"),
    ("nan", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":NaN,"x":')), "not JSON"),
    ("twice the same member", table_reply(FRIDAY, ('"table":"A"', '"table":"A","table":"A"')), "not JSON"),
    ("deep", Reply(body=b"[" * 1000 + b"]" * 1000), "not JSON"),
    ("null", Reply(body=b"null"), "not a list of one table"),
    ("object", Reply(body=table_reply(FRIDAY).body[1:-1]), "not a list of one table"),
    ("no table", Reply(body=b"[]"), "not a list of one table"),
    (
        "two tables",
        Reply(body=table_reply(FRIDAY).body[:-1] + b"," + table_reply(FRIDAY).body[1:]),
        "not a list of one table",
    ),
    ("list in list", Reply(body=b"[[]]"), "the table is no object"),
    ("table B", table_reply(FRIDAY, ('"table":"A"', '"table":"B"')), "not table A"),
    ("another day", table_reply(date(2026, 11, 12)), "not of 2026-11-13"),
    ("no day", table_reply(FRIDAY, ('"effectiveDate"', '"tradingDate"')), "not of 2026-11-13"),
    ("no number", table_reply(FRIDAY, ('"no"', '"nr"')), "no number of 2026"),
    ("number of table C", table_reply(FRIDAY, ("/A/NBP/", "/C/NBP/")), "no number of 2026"),
    ("number of another year", table_reply(FRIDAY, ("/NBP/2026", "/NBP/2025")), "no number of 2026"),
    ("number is a number", table_reply(FRIDAY, ('"no":"', '"no":7,"x":"')), "no number of 2026"),
    ("no rates", Reply(body=HEAD + b'"rates":[]}]'), "1 to 200 rates"),
    ("rates is an object", Reply(body=HEAD + b'"rates":{}}]'), "1 to 200 rates"),
    ("rate is text", table_reply(FRIDAY, ('"rates":[', '"rates":["USD",')), "rates[0] is no object"),
    ("a currency twice", table_reply(FRIDAY, ('"code":"XDR"', '"code":"USD"')), "occurs twice"),
    ("small code", table_reply(FRIDAY, ('"code":"USD"', '"code":"usd"')), "rates[1].code"),
    ("long code", table_reply(FRIDAY, ('"code":"USD"', '"code":"USDT"')), "rates[1].code"),
    ("code is null", table_reply(FRIDAY, ('"code":"USD"', '"code":null')), "rates[1].code"),
    ("no code", table_reply(FRIDAY, ('"code":"USD"', '"kod":"USD"')), "rates[1].code"),
    ("no name", table_reply(FRIDAY, ('"currency":"euro",', "")), "rates[7].currency"),
    ("empty name", table_reply(FRIDAY, ('"currency":"euro"', '"currency":" "')), "rates[7].currency"),
    ("name of two lines", table_reply(FRIDAY, ('"currency":"euro"', '"currency":"eu\\nro"')), "rates[7].currency"),
    ("name with a nul", table_reply(FRIDAY, ('"currency":"euro"', '"currency":"eu\\u0000ro"')), "rates[7].currency"),
    ("zero", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":0,"x":')), "rates[31].mid cannot be a rate"),
    ("negative", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":-')), "rates[31].mid cannot be a rate"),
    ("absurd", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":1000.01,"x":')), "rates[31].mid cannot be a rate"),
    ("tiny", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":1e-7,"x":')), "rates[31].mid cannot be a rate"),
    ("enormous", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":1e300,"x":')), "rates[31].mid cannot be a rate"),
    ("beyond decimals", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":1e' + "9" * 20 + ',"x":')), "not JSON"),
    ("nine digits", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":4.123456789,"x":')), "more than 8 digits"),
    ("long", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":4.' + "1" * 40 + ',"x":')), "more than 8 digits"),
    ("text", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":"4.9","x":')), "rates[31].mid is no number"),
    ("true", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":true,"x":')), "rates[31].mid is no number"),
    ("null mid", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","mid":null,"x":')), "rates[31].mid is no number"),
    ("no mid", table_reply(FRIDAY, ('"XDR","mid":', '"XDR","bid":')), "rates[31].mid is no number"),
    ("too many rates", Reply(body=HEAD + b'"rates":[' + b"0," * 200 + b"0]}]"), "1 to 200 rates"),
    ("endless", Reply(body=b" " * 16_384, endless=True), "more than 262144 bytes"),
    ("packed", Reply(body=gzip.compress(table_reply(FRIDAY).body), headers={"content-encoding": "gzip"}), "packed"),
    ("500", Reply(500), "the bank answered 500"),
    ("503", Reply(503, b"503", TEXT), "the bank answered 503"),
    ("400", Reply(400, b"400 BadRequest", TEXT), "the bank answered 400"),
    ("204", Reply(204), "the bank answered 204"),
    ("redirect", Reply(302, headers={"location": "/api/exchangerates/tables/A/2026-11-12/"}), "the bank answered 302"),
    ("moved for good", Reply(301, headers={"location": "https://evil.example/"}), "the bank answered 301"),
    ("404 page", Reply(404, b"<html>404 NotFound</html>", "text/html"), "the bank answered 404"),
    ("404 page in the bank's words", Reply(404, b"404 NotFound", "text/html"), "the bank answered 404"),
    ("404 of somebody else", Reply(404, b"404 page not found", TEXT), "the bank answered 404"),
    ("404 as json", Reply(404, b'{"detail": "404 NotFound"}', JSON), "the bank answered 404"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "reply", "words"), BAD_TABLES, ids=[kind for kind, _, _ in BAD_TABLES])
async def test_what_is_no_table_is_a_failure_with_a_reason_and_nothing_is_stored(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock, kind: str, reply: Reply, words: str
) -> None:
    """C1: retried, and the next answer is stored."""
    clock.freeze(AT_NOON)
    bank.replies.append(reply)
    await run_job(db, dsn, SYNC)
    [(outcome, message)] = runs_of(dsn, SYNC)
    assert outcome == "retried", message
    assert words in str(message)
    assert len(str(message)) < 200, "an answer is not quoted"
    assert (count(dsn, "currencies.rate_tables"), count(dsn, "currencies.rates"), len(bank.asked)) == (0, 0, 1)
    assert bank.sent_bytes < 8 * LARGEST_BODY_BYTES, "the client hung up"
    rows(dsn, "UPDATE duly.jobs SET run_at = duly.now()")
    await drain(db, app.handlers)
    assert count(dsn, "currencies.rates") == 32


async def test_a_bank_that_stays_bad_is_asked_four_times_an_hour_apart_and_then_buried(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C1, E3.6: a tenth of a day is more than the hour at which waits are capped."""
    clock.freeze(AT_NOON - timedelta(minutes=1))
    await Scheduler(db).run_once()
    clock.freeze(AT_NOON)
    await Scheduler(db).run_once()
    bank.always = lambda day: Reply(503)
    for tries in range(1, 5):
        await drain(db, app.handlers)
        assert len(bank.asked) == tries
        clock.advance(minutes=59)
        await drain(db, app.handlers)
        assert len(bank.asked) == tries
        clock.advance(minutes=1)
    assert [outcome for outcome, _ in runs_of(dsn, SYNC)] == ["retried", "retried", "retried", "buried"]
    assert "the bank answered 503" in value(dsn, "SELECT error FROM duly.dead_letters")


async def test_a_bank_that_stalls_is_left_in_time(bank: Bank) -> None:
    """C1: every call has a timeout, however slowly the answer drips."""
    bank.always = lambda day: Reply(stall=True)
    async with asyncio.timeout(10), Nbp(bank.url, try_seconds=0.2) as patient:
        with pytest.raises(RatesFailed, match=r"cannot be reached \(\w*Timeout"):
            await patient.fetch(FRIDAY)


async def test_a_bank_that_answers_in_drips_is_left_in_time(bank: Bank) -> None:
    """C1: the time is that of the whole call; here each piece of it comes soon enough."""
    bank.always = lambda day: Reply(body=b" ", endless=True)
    async with Nbp(bank.url, try_seconds=0.5) as patient:
        with pytest.raises(RatesFailed, match=r"cannot be reached \(\w*Timeout"):
            await patient.fetch(FRIDAY)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "ftp://127.0.0.1", "http://", "nonsense", "http://[::1", "http://127.0.0.1:99999"]
)
async def test_a_bank_that_cannot_be_reached_is_a_failure_with_a_hint(
    db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """C1: retried; what NBP_URL says is not repeated."""
    monkeypatch.setenv("NBP_URL", url)
    await run_job(db, dsn, SYNC)
    [(outcome, message)] = runs_of(dsn, SYNC)
    assert outcome == "retried"
    assert "is NBP_URL right?" in str(message)
    assert url not in str(message)


# -- crashes and statements ------------------------------------------------------------------------------------------


WORK = """
    import asyncio, os
    from apps.wiring import app
    from duly.db import Database
    from duly.jobs.worker import Worker

    async def main():
        db = Database(os.environ["DATABASE_URL"])
        await Worker(db, app.handlers).run_once()
        await db.close()

    asyncio.run(main())
"""


@pytest.mark.parametrize(("point", "stored"), [("worker.handler_done", 0), ("inbox.noted", 0), ("inbox.committed", 1)])
async def test_wherever_the_worker_is_killed_the_table_is_stored_once(
    bank: Bank, db: Database, dsn: str, clock: BusinessClock, point: str, stored: int
) -> None:
    """C1: kill -9 after the call, before and after the commit."""
    clock.freeze(AT_NOON)
    rows(dsn, "SELECT duly.schedule(%(name)s)", {"name": SYNC})
    process = python(dsn, WORK, failpoints=f"{point}=kill9", env={"NBP_URL": bank.url})
    code, output = await asyncio.to_thread(finish, process, 60)
    assert code == -signal.SIGKILL, output
    assert count(dsn, "currencies.rate_tables") == stored
    expire_leases(dsn)
    await drain(db, app.handlers)
    clock.advance(minutes=10)  # what was taken over waits before it is retried
    await drain(db, app.handlers)
    assert (count(dsn, "currencies.rate_tables"), count(dsn, "currencies.rates")) == (1, 32)
    assert value(dsn, "SELECT count(*) FROM duly.event_log WHERE type = 'RatesPublished'") == 1


async def test_storing_takes_a_known_number_of_statements(db: Database) -> None:
    """A gate: lock, look, supersede, insert, emit; and two when it was stored before."""
    table = read_table(gateways.parse(table_reply(FRIDAY).body), FRIDAY)
    for statements in (5, 2):
        async with db.transaction(confirm=False) as tx, counting(db) as sent:
            await service.keep_table(tx, table)
        assert len(sent) == statements, sent


# -- which bank ------------------------------------------------------------------------------------------------------


async def test_in_development_the_stand_in_is_asked_over_http(
    api: Api, db: Database, dsn: str, tmp_path: Path, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: served beside the API; it can be told to answer badly."""
    monkeypatch.delenv("NBP_URL", raising=False)
    monkeypatch.setenv("DULY_DATA", str(tmp_path))
    clock.freeze(AT_NOON)
    modes: list[dict[str, Any]] = [
        {"mode": "malformed", "count": 1}, {"mode": "html", "count": 1}, {"mode": "fail", "count": 1}
    ]  # fmt: skip
    for mode in modes:
        assert (await api.client.put("/sandbox/nbp/mode", json=mode)).status_code == 200
        rows(dsn, "DELETE FROM duly.jobs")
        await run_job(db, dsn, SYNC)
        assert runs_of(dsn, SYNC)[-1][0] == "retried"
    await api.client.put("/sandbox/nbp/mode", json={"mode": "stall", "seconds": 0.05, "count": 1})
    for moment, words in ((AT_NOON, "32 rates, stored"), (SATURDAY, "no table"), (AT_NOON, "stored before")):
        clock.freeze(moment)
        rows(dsn, "DELETE FROM duly.jobs")
        await run_job(db, dsn, SYNC)
        outcome, message = runs_of(dsn, SYNC)[-1] if moment is not AT_NOON else newest_run(dsn)
        assert (outcome, words in str(message)) == ("done", True), message


def newest_run(dsn: str) -> tuple[str, str]:
    query = "SELECT outcome, message FROM duly.executions ORDER BY lease_token DESC LIMIT 1"
    found: tuple[str, str] = rows(dsn, query)[0]
    return found


async def test_the_stand_in_speaks_like_the_bank(api: Api) -> None:
    """C1: what it says of any day is what the real one would say, but for the figures."""
    path = "/sandbox/nbp/api/exchangerates/tables"
    first, again = [await api.client.get(f"{path}/A/2026-11-13/?format=json") for _ in range(2)]
    assert first.content == again.content, "a day always has the same rates"
    other = await api.client.get(f"{path}/a/2026-11-12/?format=json")
    assert other.json()[0]["rates"] != first.json()[0]["rates"]
    assert int(first.json()[0]["no"][:3]) == int(other.json()[0]["no"][:3]) + 1
    closed = await api.client.get(f"{path}/A/2026-11-14/?format=json")
    assert (closed.status_code, closed.text) == (404, "404 NotFound - Not Found - Brak danych")
    assert closed.headers["content-type"] == "text/plain; charset=utf-8"
    assert (await api.client.get(f"{path}/A/yesterday/?format=json")).status_code == 400
    assert (await api.client.get(f"{path}/B/2026-11-13/?format=json")).status_code == 404
    for mode in ({"mode": "rude"}, {"mode": "stall", "seconds": 61}, {"mode": "html", "count": 0}):
        assert (await api.client.put("/sandbox/nbp/mode", json=mode)).status_code == 422


async def test_in_production_there_is_the_bank_and_no_stand_in(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1."""
    monkeypatch.delenv("NBP_URL", raising=False)
    settings = Settings(env="production", oidc_issuer="https://id.example.com/realms/main")
    async with Nbp.open(settings) as bank:
        assert bank.url == gateways.NBP == "https://api.nbp.pl"
    served = build_api(db, [], settings, app, port=8000)
    paths = {str(getattr(context, "path", "")) for context in iter_route_contexts(served.routes)}
    assert "/v1/currencies/rates" in paths
    assert [path for path in paths if path.startswith("/sandbox")] == []
    await served.state.readiness.close()
