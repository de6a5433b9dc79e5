"""C4, E7.1: the applications' sections in the console: for both roles, paged by key, thin, and without names."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from sqlalchemy import event

from apps import samples
from apps.commerce import service as commerce
from apps.commerce.model import Line
from apps.wiring import app
from duly.db import Database
from duly.schedules.tick import Scheduler
from duly.testing import BusinessClock, drain
from tests.apps.commerce.acting import run_job
from tests.apps.currencies.bank import serving_bank
from tests.console.conftest import Site, serving
from tests.support import rows, value

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}"
STATEMENTS_LIMIT = 15
NOON = datetime(2026, 11, 13, 12, tzinfo=UTC)  # a Friday; 13:00 in Warsaw
LISTS = (
    "/transfers", "/transfers?status=Pending", "/quality", "/quality?status=OPEN", "/quality?severity=HIGH",
    "/quality?supplier=ACME-7", "/birthdays", "/birthdays?status=PROCESSING", "/birthdays?status=COMPLETED",
    "/birthdays?status=FAILED", "/orders", "/orders?status=AWAITING_PAYMENT", "/orders?status=PAID",
    "/orders?customer=ann", "/orders?customer=ann&status=AWAITING_PAYMENT", "/rates", "/rates?date=2026-01-01",
    "/payments", "/payments?state=PENDING_REVIEW", "/accounts", "/rules", "/rules/decisions",
    "/rules/decisions?set=payment-screening&outcome=REVIEW",
)  # fmt: skip


@pytest_asyncio.fixture
async def site(db: Database, tmp_path: Path) -> AsyncIterator[Site]:
    """The applications' console."""
    async with serving(db, tmp_path, app) as served:
        yield served


def singles(dsn: str) -> list[str]:
    """The address of one of each."""
    found = [
        ("transfers", "transfers.transfers", "id"), ("quality", "quality.nonconformities", "id"),
        ("birthdays", "birthdays.people", "user_id"), ("orders", "commerce.orders", "id"),
        ("payments", "payments.payments", "id"), ("accounts", "ledger.accounts", "id"),
        ("rules", "decisions.rules", "id"),
        ("accounts/transactions", "ledger.transactions", "id"), ("rules/decisions", "decisions.log", "id"),
    ]  # fmt: skip
    return [
        f"/{name}/{value(dsn, f'SELECT {column} FROM {table} ORDER BY 1 LIMIT 1')}" for name, table, column in found
    ]


async def walk(browser: httpx2.AsyncClient, path: str, pattern: str) -> list[str]:
    """What the pages of a list link to, from the first to the last."""
    seen: list[str] = []
    for _ in range(10):
        page = await browser.get(path)
        assert page.status_code == 200, page.text[-400:]
        seen += re.findall(pattern, page.text)
        following = re.search(r'<a href="([^"]+)" rel="next">', page.text)
        if following is None:
            return seen
        path = following[1].replace("&amp;", "&")
    raise AssertionError("the pages have no end")


@pytest.mark.parametrize("person", ["ada", "otto"])
async def test_every_section_is_there_for_both_roles(site: Site, db: Database, dsn: str, person: str) -> None:
    await db.run(samples.load)
    browser = await site.signed_in(person)
    for path in (*LISTS, *singles(dsn)):
        page = await browser.get(f"/console{path}")
        assert page.status_code == 200, (path, page.text[-600:])
        assert page.text.count("<h1>") == page.text.count("<main") == 1, path
        assert "<form" not in page.text.split("<main")[1] or 'method="post"' not in page.text.split("<main")[1], path
    stranger = await site.browser()
    for path in (*LISTS, *singles(dsn)):
        assert (await stranger.get(f"/console{path}")).status_code == 302, path


async def test_empty_sections_say_so(site: Site) -> None:
    browser = await site.signed_in("otto")
    for path in LISTS:
        page = await browser.get(f"/console{path}")
        assert page.status_code == 200, path
        assert 'class="empty"' in page.text, path


@pytest.mark.parametrize(
    "path",
    ["/transfers?status=x", "/transfers?id=x", "/transfers?after=x", "/transfers?after=2026-01-01T00:00_x",
     "/transfers?after=2026-01-01T00:00_019c0000-0000-7000-8000-000000000003", "/quality?status=x",
     "/quality?severity=x", "/quality?after=x", "/quality?supplier=%00", "/birthdays?status=x", "/birthdays?user=x",
     "/birthdays?after=x_y", "/orders?status=x", "/orders?after=x", "/orders?status=AWAITING_PAYMENT&after=x",
     "/orders?id=x", "/orders?customer=%00", "/rates?date=x", "/rates?after=x", "/rates?after=x_y",
     "/payments?state=x", "/payments?id=x", "/payments?after=x", "/accounts?id=x", "/accounts?after=x",
     "/accounts/019c0000-0000-7000-8000-000000000003?after=x", "/rules?status=x", "/rules?after=x", "/rules?set=%00",
     "/rules/decisions?outcome=x", "/rules/decisions?after=x"],
)  # fmt: skip
async def test_nonsense_in_an_address_is_a_page_that_says_so(site: Site, path: str) -> None:
    page = await (await site.signed_in("otto")).get(f"/console{path}")
    assert page.status_code == 400, page.text[-400:]


@pytest.mark.parametrize(
    "name",
    ["transfers", "quality", "birthdays", "orders", "payments", "accounts", "rules", "accounts/transactions",
     "rules/decisions"],
)  # fmt: skip
async def test_what_is_not_there_is_a_page_that_says_so(site: Site, name: str) -> None:
    browser = await site.signed_in("otto")
    for id in ("019c0000-0000-7000-8000-000000000003", "nonsense"):
        assert (await browser.get(f"/console/{name}/{id}")).status_code == 404


async def test_birthdays_show_no_name_and_no_date_of_birth(
    site: Site, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """E7.1, FAULTS: personal data stays where it is needed."""
    await db.run(samples.load)
    browser = await site.signed_in("ada")
    users = [row[0] for row in rows(dsn, "SELECT user_id FROM birthdays.people")]
    shown = "".join([(await browser.get(f"/console/birthdays/{id}")).text for id in users])
    shown += "".join([(await browser.get(f"/console{path}")).text for path in LISTS if "birthdays" in path])
    assert "Europe/Stockholm" in shown
    for first, last, born in rows(dsn, "SELECT first_name, last_name, date_of_birth FROM birthdays.people"):
        main = shown.replace("Ada Kowalska", "").replace("Lord_Howe", "")  # who is signed in, and a zone
        assert first not in main, first
        assert last not in main, last
        assert str(born) not in main


async def test_a_birthday_is_shown_by_the_users_clocks_and_says_how_late_it_is(
    site: Site, dsn: str, clock: BusinessClock
) -> None:
    clock.freeze(datetime(2026, 6, 15, 7, 10, tzinfo=UTC))
    rows(dsn, "INSERT INTO birthdays.events (id, user_id, year, target_local, timezone, target_utc, created_at, "
              "updated_at) VALUES (duly.uuid7(), duly.uuid7(), 2026, '2026-06-15 09:00', 'Europe/Warsaw', "
              "'2026-06-15 07:00Z', duly.now(), duly.now())")  # fmt: skip
    page = (await (await site.signed_in("otto")).get("/console/birthdays")).text
    assert "2026-06-15 09:00:00 CEST</time>" in page
    assert "10 min 00 s" in page


async def test_an_orders_page_tells_its_payment_timers_and_events(site: Site, db: Database, dsn: str) -> None:
    await db.run(samples.load)
    browser = await site.signed_in("otto")
    waiting = value(dsn, "SELECT id FROM commerce.orders WHERE status = 'AWAITING_PAYMENT' ORDER BY id LIMIT 1")
    page = (await browser.get(f"/console/orders/{waiting}")).text
    for word in ("25.10 PLN", "AWAITING PAYMENT", "PaymentTimeout", "OrderExpiration", "OrderPlaced", "tea-assam"):
        assert word in page, word
    assert f'href="/console/entity?id={waiting}"' in page
    found = await browser.get("/console/orders", params={"id": waiting})
    assert (found.status_code, found.headers["location"]) == (303, f"/console/orders/{waiting}")


async def test_orders_say_what_is_overdue_and_then_what_its_timer_did(
    site: Site, db: Database, clock: BusinessClock
) -> None:
    """C4: in numbers, beside each order, and in the runs on its page."""
    clock.freeze(NOON)
    old, older = [await place(db) for _ in range(2)]
    clock.advance(minutes=10)
    young = await place(db)
    clock.advance(minutes=6)
    browser = await site.signed_in("otto")
    page = (await browser.get("/console/orders")).text
    assert re.findall(r"(Awaiting payment|Overdue)</a></dt><dd>(\d+)</dd>", page) == [
        ("Awaiting payment", "3"), ("Overdue", "2")
    ]  # fmt: skip
    marked = {
        id: "overdue" in row
        for id, row in re.findall(r'href="/console/orders/([0-9a-f-]+)"(.*?)</tr>', page, re.DOTALL)
    }
    assert marked == {old: True, older: True, young: False}
    assert "have expired" not in (await browser.get(f"/console/orders/{old}")).text
    await drain(db, app.handlers)
    assert "the order and its payment have expired" in (await browser.get(f"/console/orders/{old}")).text
    page = (await browser.get("/console/orders")).text
    assert re.findall(r"(Awaiting payment|Overdue)</a></dt><dd>(\d+)</dd>", page) == [
        ("Awaiting payment", "1"), ("Overdue", "0")
    ]  # fmt: skip
    assert ">overdue<" not in page


async def place(db: Database) -> str:
    """An order's id."""
    async with db.transaction() as tx:
        lines = [Line("tea", 1, Decimal("1.50"))]
        return str((await commerce.place_order(tx, customer="ann", currency="PLN", lines=lines)).id)


async def test_what_is_over_is_listed_by_its_kind_the_newest_first(site: Site, dsn: str) -> None:
    """C4: what was delivered, and what was not."""
    rows(dsn, "INSERT INTO birthdays.events (id, user_id, year, target_local, timezone, target_utc, status, "
              "processing_at, executed_at, failure_reason, created_at, updated_at) SELECT duly.uuid7(), "
              "lpad(d::text, 32, '0')::uuid, 2026, make_timestamp(2026, 6, d, 9, 0, 0), 'UTC', at, s, at, "
              "CASE s WHEN 'COMPLETED' THEN at END, CASE s WHEN 'FAILED' THEN 'no' END, duly.now(), duly.now() "
              "FROM generate_series(11, 16) AS d, LATERAL (SELECT make_timestamptz(2026, 6, d, 9, 0, 0, 'UTC') AS at, "
              "CASE mod(d, 2) WHEN 0 THEN 'FAILED' ELSE 'COMPLETED' END AS s) AS made")  # fmt: skip
    browser = await site.signed_in("otto")
    for status, days in (("COMPLETED", [15, 13, 11]), ("FAILED", [16, 14, 12])):
        page = (await browser.get(f"/console/birthdays?status={status}")).text
        found = re.findall(r'class="row" href="/console/birthdays/[0-9a-f-]+(\d\d)"', page)
        assert [int(day) for day in found] == days


async def test_a_transfer_says_what_ends_it(site: Site, db: Database, dsn: str) -> None:
    await db.run(samples.load)
    browser = await site.signed_in("otto")
    id, product = rows(dsn, "SELECT id, product_id FROM transfers.transfers WHERE status = 'Pending' "
                            "AND created_at < duly.now() - interval '72 h'")[0]  # fmt: skip
    page = (await browser.get(f"/console/transfers/{id}")).text
    for word in ("overdue", "transfers.expire-pending", "Forklift, yellow", f"/console/entity?id={product}"):
        assert word in page, word
    assert (await browser.get("/console/transfers", params={"id": id})).status_code == 303
    of_product = await browser.get("/console/transfers", params={"id": product})
    assert of_product.text.count('class="row"') == 1


async def test_rates_say_which_table_holds_and_how_the_last_sync_went(site: Site, dsn: str) -> None:
    rows(dsn, "INSERT INTO currencies.rate_tables VALUES ('1/A/NBP/2026', '2026-01-05', '2026-01-05 12:00Z', "
              "'2026-01-05 13:00Z'), ('2/A/NBP/2026', '2026-01-05', '2026-01-05 13:00Z', NULL)")  # fmt: skip
    rows(dsn, "INSERT INTO currencies.rates VALUES ('1/A/NBP/2026', 'EUR', 'euro', 4.1), "
              "('2/A/NBP/2026', 'EUR', 'euro', 4.20300000)")  # fmt: skip
    browser = await site.signed_in("otto")
    page = (await browser.get("/console/rates?date=2026-01-06")).text
    for word in ("There is no table of 2026-01-06", "Table 2/A/NBP/2026", "4.20300000", "corrected", "never ran"):
        assert word in page, word
    assert "4.1<" not in page


async def test_rates_show_the_last_syncs_and_when_the_next_one_is(
    site: Site, db: Database, dsn: str, clock: BusinessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4: by Warsaw's clocks; the runs of other jobs are not shown, and a schedule that is disabled says so."""
    clock.freeze(NOON)
    await Scheduler(db).run_once()
    async with serving_bank() as bank:
        monkeypatch.setenv("NBP_URL", bank.url)
        await run_job(db, dsn, "CurrencyRateSync")
    await run_job(db, dsn, "PaymentExpiration")
    browser = await site.signed_in("otto")
    page = (await browser.get("/console/rates")).text
    assert "with 32 rates, stored" in page
    assert "that their timers missed" not in page
    assert re.search(r"runs next at <time[^>]*>2026-11-14 12:15", page)
    rows(dsn, "UPDATE duly.schedules SET enabled = false WHERE name = 'CurrencyRateSync'")
    page = (await browser.get("/console/rates")).text
    assert "is disabled" in page
    assert "runs next" not in page


async def test_an_accounts_page_tells_how_it_stands_and_names_nobody_to_whoever_only_reads(
    site: Site, db: Database, dsn: str
) -> None:
    """F2: balance, what is on hold, and the statement with the balance after each entry."""
    await db.run(samples.load)
    id, name = rows(dsn, "SELECT a.id, a.name FROM ledger.accounts a JOIN ledger.holds h ON h.account_id = a.id "
                         "WHERE h.status = 'ACTIVE' AND h.reference = 'sample hotel'")[0]  # fmt: skip
    balance, held, version = rows(dsn, "SELECT abs(balance), held, version FROM ledger.balances WHERE account_id = "
                                       "%(id)s", {"id": id})[0]  # fmt: skip
    ada, otto = await site.signed_in("ada"), await site.signed_in("otto")
    page = (await ada.get(f"/console/accounts/{id}")).text
    for word in (f"{balance / 100:.2f} PLN", f"{held / 100:.2f}", f"<dd>{version}</dd>", "sample hotel", name):
        assert word in page, word
    for path in ("/console/accounts", f"/console/accounts/{id}"):
        assert name in (await ada.get(path)).text
        assert name not in (await otto.get(path)).text
    reversed_id = value(dsn, "SELECT id FROM ledger.transactions WHERE status = 'REVERSED' LIMIT 1")
    page = (await otto.get(f"/console/accounts/transactions/{reversed_id}")).text
    assert "Reversed by" in page
    assert page.count('class="row"') == value(
        dsn, "SELECT count(*) FROM ledger.entries WHERE transaction_id = %(id)s", {"id": reversed_id}
    )


async def test_a_payments_page_tells_its_history_its_jobs_and_its_decision(site: Site, db: Database, dsn: str) -> None:
    """F5, F7: what happened, why, and what goes on with it."""
    await db.run(samples.load)
    ada, otto = await site.signed_in("ada"), await site.signed_in("otto")
    id, decision = rows(dsn, "SELECT id, decision_id FROM payments.payments WHERE state = 'PENDING_REVIEW'")[0]
    page = (await otto.get(f"/console/payments/{id}")).text
    for word in ("PENDING REVIEW", "payments.expire-review", "payment.pending_review", f"/rules/decisions/{decision}"):
        assert word in page, word
    page = (await otto.get(f"/console/rules/decisions/{decision}")).text
    assert "REVIEW" in page
    assert "Facts are shown to administrators." in page
    assert "&#34;initiatedBy&#34;" not in page
    assert "&#34;initiatedBy&#34;" in (await ada.get(f"/console/rules/decisions/{decision}")).text
    assert (await otto.get("/console/payments", params={"id": id})).headers["location"] == f"/console/payments/{id}"
    rows(dsn, "INSERT INTO payments.unmatched_callbacks (id, provider, event_id, payment_ref, status, problem, "
              "received_at) VALUES (duly.uuid7(), 'bank', 'e1', 'nobody knows it', 'SETTLED', 'unknown_reference', "
              "duly.now())")  # fmt: skip
    assert "nobody knows it" in (await otto.get("/console/payments")).text


FILL = {
    "orders": "INSERT INTO commerce.orders (id, customer_id, currency, total, status, created_at, updated_at) "
    "SELECT duly.uuid7(), %(text)s, 'PLN', 10, 'PAID', duly.now(), duly.now() FROM generate_series(1, 120)",
    "payments": "INSERT INTO commerce.payments (order_id, amount, status, created_at, due_at, settled_at) "
    "SELECT id, 10, 'PAID', created_at, created_at + interval '15 min', created_at FROM commerce.orders",
    "lines": "INSERT INTO commerce.order_lines SELECT id, 1, left(%(text)s, 64), 1, 10 FROM commerce.orders",
    "unpaid": "INSERT INTO commerce.orders (id, customer_id, currency, total, created_at, updated_at) "
    "SELECT duly.uuid7(), 'waits', 'PLN', 10, duly.now(), duly.now() FROM generate_series(1, 120)",
    "unpaid payments": "INSERT INTO commerce.payments (order_id, amount, created_at, due_at) SELECT id, 10, "
    "created_at, created_at + interval '15 min' FROM commerce.orders WHERE status = 'AWAITING_PAYMENT'",
    "products": "INSERT INTO transfers.products SELECT duly.uuid7(), %(text)s, %(text)s, duly.now() "
    "FROM generate_series(1, 120)",
    "transfers": "INSERT INTO transfers.transfers (id, product_id, from_user_id, to_user_id, created_at, updated_at) "
    "SELECT duly.uuid7(), id, %(text)s, 'bob', created_at, created_at FROM transfers.products",
    "quality": "INSERT INTO quality.nonconformities (id, supplier_id, severity, description, created_by, created_at) "
    "SELECT duly.uuid7(), %(text)s, (ARRAY['LOW', 'MEDIUM', 'HIGH', 'CRITICAL'])[1 + n %% 4], %(text)s, %(text)s, "
    "duly.now() FROM generate_series(1, 120) AS n",
    "birthdays": "INSERT INTO birthdays.events (id, user_id, year, target_local, timezone, target_utc, status, "
    "processing_at, failure_reason, created_at, updated_at) SELECT duly.uuid7(), duly.uuid7(), 2020, "
    "'2020-03-01 09:00', 'UTC', '2020-03-01 09:00Z', s.status, CASE s.status WHEN 'PENDING' THEN NULL ELSE "
    "duly.now() END, CASE s.status WHEN 'FAILED' THEN %(text)s END, duly.now(), duly.now() "
    "FROM generate_series(1, 120), unnest(ARRAY['PENDING', 'PROCESSING', 'FAILED']) AS s(status)",
    "accounts": "SELECT ledger.open_account(duly.uuid7(), left(%(text)s, 100), 'ASSET', 'PLN', 2, true) "
    "FROM generate_series(1, 120)",
    "finance": "INSERT INTO payments.payments (id, from_account_id, to_account_id, amount, currency, state, reason, "
    "initiated_by, provider, bank_key, since, created_at, updated_at) SELECT duly.uuid7(), duly.uuid7(), duly.uuid7(), "
    "100, 'PLN', 'REJECTED', left(%(text)s, 100), %(text)s, 'bank', duly.uuid7(), duly.now(), duly.now(), duly.now() "
    "FROM generate_series(1, 120)",
    "rates": "INSERT INTO currencies.rate_tables SELECT n || '/A/NBP/2020', date '2020-01-01' + n / 2, duly.now(), "
    "CASE mod(n, 2) WHEN 0 THEN duly.now() END FROM generate_series(1, 120) AS n",
}


def fill(dsn: str, words: str = "somebody") -> None:
    for statement in FILL.values():
        rows(dsn, statement, {"text": words})


@pytest.mark.parametrize(
    ("path", "pattern"),
    [("/orders?status=PAID", r'class="row" href="/console/orders/([0-9a-f-]+)"'),
     ("/orders?status=AWAITING_PAYMENT", r'class="row" href="/console/orders/([0-9a-f-]+)"'),
     ("/orders?customer=waits", r'class="row" href="/console/orders/([0-9a-f-]+)"'),
     ("/transfers?status=Pending", r'class="row" href="/console/transfers/([0-9a-f-]+)"'),
     ("/transfers", r'class="row" href="/console/transfers/([0-9a-f-]+)"'),
     ("/quality?status=OPEN", r'class="row" href="/console/quality/([0-9a-f-]+)"'),
     ("/quality?supplier=somebody", r'class="row" href="/console/quality/([0-9a-f-]+)"'),
     ("/birthdays?status=PENDING", r'class="row" href="/console/birthdays/([0-9a-f-]+)"'),
     ("/birthdays?status=PROCESSING", r'class="row" href="/console/birthdays/([0-9a-f-]+)"'),
     ("/birthdays?status=FAILED", r'class="row" href="/console/birthdays/([0-9a-f-]+)"'),
     ("/payments?state=REJECTED", r'class="row" href="/console/payments/([0-9a-f-]+)"'),
     ("/accounts", r'class="row" href="/console/accounts/([0-9a-f-]+)"'),
     ("/rates", r"<td>(\d+/A/NBP/2020)</td>")],
)  # fmt: skip
async def test_each_list_pages_by_key_and_keeps_its_filters(site: Site, dsn: str, path: str, pattern: str) -> None:
    fill(dsn)
    seen = await walk(await site.signed_in("otto"), f"/console{path}", pattern)
    assert len(seen) == len(set(seen)) == 120


async def test_whatever_is_stored_is_shown_and_never_runs(site: Site, dsn: str) -> None:
    fill(dsn, HOSTILE)
    browser = await site.signed_in("ada")
    shown = 0
    for path in (*(path for path in LISTS if "?" not in path), "/birthdays?status=FAILED", "/orders?status=PAID",
                 *singles_of_hostile(dsn)):  # fmt: skip
        page = (await browser.get(f"/console{path}")).text
        assert "<script>alert" not in page
        assert "<img src=x" not in page
        shown += page.count("&lt;script&gt;alert(1)")
    assert shown > 200


def singles_of_hostile(dsn: str) -> list[str]:
    """One of each that was filled."""
    found: list[tuple[str, Any]] = [
        ("orders", value(dsn, "SELECT id FROM commerce.orders WHERE status = 'PAID' LIMIT 1")),
        ("transfers", value(dsn, "SELECT id FROM transfers.transfers LIMIT 1")),
        ("quality", value(dsn, "SELECT id FROM quality.nonconformities LIMIT 1")),
        ("payments", value(dsn, "SELECT id FROM payments.payments LIMIT 1")),
        ("accounts", value(dsn, "SELECT id FROM ledger.accounts LIMIT 1")),
    ]
    return [f"/{name}/{id}" for name, id in found]


async def test_no_page_needs_many_statements(site: Site, db: Database, dsn: str) -> None:
    await db.run(samples.load)
    browser = await site.signed_in("otto")
    seen: list[str] = []
    event.listen(db.engine.sync_engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
    for path in (*LISTS, *singles(dsn)):
        seen.clear()
        assert (await browser.get(f"/console{path}")).status_code == 200
        assert len(seen) <= STATEMENTS_LIMIT, (path, len(seen))


async def test_the_samples_subscribe_to_webhooks_once(site: Site, db: Database, dsn: str) -> None:
    for _ in range(2):
        await db.run(samples.load)
    found = rows(dsn, "SELECT url, patterns FROM duly.webhook_subscriptions ORDER BY id")
    assert len(found) == 2
    assert found[0][0].endswith("/sandbox/webhooks")
    assert found[0][1] == ["order-events", "product-events"]
    page = (await (await site.signed_in("ada")).get("/console/webhooks")).text
    assert "127.0.0.1:65000" in page.replace("<wbr>", "")
