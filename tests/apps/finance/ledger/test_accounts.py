"""Accounts: opened, read, stated, closed and opened again (F1, F2)."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from apps.finance.ledger.events import AccountCreated
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.finance.ledger.acting import Books, check_consistent, count, events_of, refused
from tests.apps.transfers.acting import made, new_key
from tests.support import rows, value


async def test_a_new_account_is_active_and_empty_and_its_event_tells(books: Books, dsn: str) -> None:
    """F1: 201, ACTIVE, version 0, account.created on ledger.events."""
    answer = await books.send("/v1/accounts", {"name": "Cash", "type": "ASSET", "currency": "PLN"})
    account = made(answer)
    assert (account["status"], account["version"], account["mayGoNegative"]) == ("ACTIVE", 0, True)
    assert answer.headers["location"] == f"/v1/accounts/{account['id']}"
    assert (await books.get(answer.headers["location"])).json() == account
    [(kind, topic, payload)] = rows(
        dsn, "SELECT type, topic, payload FROM duly.outbox WHERE aggregate_id = %(id)s", {"id": account["id"]}
    )
    assert (kind, topic) == ("account.created", "ledger.events")
    assert AccountCreated.model_validate(payload).name == "Cash"
    assert payload["accountId"] == account["id"]
    balance = await books.balance(account["id"])
    assert (balance["balance"], balance["held"], balance["available"]) == ("0.00", "0.00", "0.00")


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"currency": "XXX"}, "$.currency"),
        ({"currency": "pln"}, "$.currency"),
        ({"currency": 985}, "$.currency"),
        ({"type": "MONEY"}, "$.type"),
        ({"name": ""}, "$.name"),
        ({"name": "a\nb"}, "$.name"),
        ({"name": "n" * 201}, "$.name"),
        ({"mayGoNegative": "no"}, "$.mayGoNegative"),
        ({"balance": "5"}, "$.balance"),
    ],
)
async def test_what_is_no_account_is_refused_with_its_path(
    books: Books, dsn: str, changed: dict[str, object], path: str
) -> None:
    """F1."""
    body = {"name": "Cash", "type": "ASSET", "currency": "PLN", **changed}
    assert refused(await books.send("/v1/accounts", body)) == (422, "invalid", [path])
    assert count(dsn, "ledger.accounts") == 0


@pytest.mark.parametrize(
    ("kind", "balance"),
    [("ASSET", "5.00"), ("EXPENSE", "5.00"), ("LIABILITY", "-5.00"), ("EQUITY", "-5.00"), ("INCOME", "-5.00")],
)
async def test_an_account_of_each_type_grows_on_its_own_side(books: Books, kind: str, balance: str) -> None:
    """F1: debits raise assets and expenses, and lower the others."""
    account = await books.open(kind)
    await books.post(account, await books.open(), "5.00")
    assert (await books.balance(account))["balance"] == balance


async def test_accounts_are_listed_page_by_page_the_newest_first(books: Books) -> None:
    opened = [await books.open() for _ in range(5)]
    first = (await books.get("/v1/accounts?limit=3")).json()
    rest = (await books.get(f"/v1/accounts?limit=3&before={first['next']}")).json()
    assert [one["id"] for one in first["items"] + rest["items"]] == opened[::-1]
    assert rest["next"] is None


async def test_a_statement_has_the_balance_after_each_entry_on_the_accounts_side(books: Books) -> None:
    """F2: paged, the newest first; credits raise a liability, debits an asset."""
    cash, customer = await books.open("ASSET"), await books.open("LIABILITY")
    posted = [await books.post(cash, customer, amount) for amount in ("10.00", "2.50", "0.01")]
    posted.append(await books.post(customer, cash, "4.00"))
    for account in (cash, customer):
        page = (await books.get(f"/v1/accounts/{account}/entries?limit=3")).json()
        rest = (await books.get(f"/v1/accounts/{account}/entries?limit=3&before={page['next']}")).json()
        lines = page["items"] + rest["items"]
        assert [line["balanceAfter"] for line in lines] == ["8.51", "12.51", "12.50", "10.00"]
        assert [line["version"] for line in lines] == [4, 3, 2, 1]
        assert [line["transactionId"] for line in lines] == [one["id"] for one in posted[::-1]]
        assert [line["reference"] for line in lines] == [one["reference"] for one in posted[::-1]]
        assert rest["next"] is None
        assert (await books.balance(account))["balance"] == "8.51"
    assert [line["direction"] for line in lines] == ["DEBIT", "CREDIT", "CREDIT", "CREDIT"]
    assert (await books.get(f"/v1/accounts/{await books.open()}/entries")).json() == {"items": [], "next": None}


async def test_a_balance_of_the_past_is_the_one_after_the_last_entry_until_then(
    books: Books, clock: BusinessClock
) -> None:
    """F2: for each of many moments, and before the first."""
    cash, customer = await books.open("ASSET"), await books.open("LIABILITY")
    clock.freeze(clock.now().replace(microsecond=0))
    began, known = clock.now(), {clock.now() - timedelta(seconds=1): "0.00"}
    for number in range(1, 12):
        for _ in range(number % 3 + 1):  # several at the same moment
            await books.post(cash, customer, "1.00")
        known[clock.now()] = (await books.balance(customer))["balance"]
        known[clock.now() + timedelta(seconds=30)] = known[clock.now()]
        clock.advance(minutes=1)
    for moment, balance in known.items():
        found = await books.balance(customer, asOf=moment.isoformat())
        assert (found["balance"], found["held"], found["available"]) == (balance, None, None), moment
    assert (await books.balance(customer, asOf=began.isoformat()))["version"] == 2


async def test_time_does_not_run_backwards_along_an_account(books: Books, dsn: str, clock: BusinessClock) -> None:
    """F2: or a balance of the past could not be found."""
    cash, customer = await books.open("ASSET"), await books.open("LIABILITY")
    await books.post(cash, customer, "1.00")
    clock.advance(minutes=-5)
    await books.post(cash, customer, "1.00")
    times = [at for (at,) in rows(dsn, "SELECT posted_at FROM ledger.entries ORDER BY account_id, version")]
    assert times[0] == times[1]
    check_consistent(dsn)


async def test_only_an_empty_account_is_closed_and_a_closed_one_takes_nothing(books: Books, dsn: str) -> None:
    """F3: 409 for an account that is not active; it can be opened again."""
    cash, customer = await books.open("ASSET"), await books.open("LIABILITY")
    await books.post(cash, customer, "5.00")
    assert refused(await books.send(f"/v1/accounts/{customer}/close"))[:2] == (409, "account-not-empty")
    assert refused(await books.send(f"/v1/accounts/{customer}/reopen"))[:2] == (409, "account-active")
    await books.post(customer, cash, "5.00")
    closed = await books.send(f"/v1/accounts/{customer}/close")
    assert (closed.status_code, closed.json()["status"]) == (200, "CLOSED")
    assert closed.json()["closedAt"] is not None
    assert refused(await books.send(f"/v1/accounts/{customer}/close"))[:2] == (409, "account-closed")
    entries = [
        {"accountId": cash, "amount": "1.00", "direction": "DEBIT"},
        {"accountId": customer, "amount": "1.00", "direction": "CREDIT"},
    ]
    assert refused(await books.try_post(entries)) == (409, "account-closed", ["$.entries[1].accountId"])
    assert refused(await books.try_hold(customer, "1.00"))[:2] == (409, "account-closed")
    assert (await books.send(f"/v1/accounts/{customer}/reopen")).json()["status"] == "ACTIVE"
    assert (await books.try_post(entries)).status_code == 201
    assert [kind for kind in events_of(dsn, customer) if kind.startswith("account.")] == [
        "account.created", "account.closed", "account.reopened",
    ]  # fmt: skip
    check_consistent(dsn)


async def test_an_account_with_a_hold_is_not_closed(books: Books) -> None:
    account = await books.open_with("1.00")
    await books.hold(account, "1.00")
    assert refused(await books.send(f"/v1/accounts/{account}/close"))[:2] == (409, "account-not-empty")


@pytest.mark.parametrize("path", ["", "/balance", "/balance?asOf=2026-01-01T00:00:00Z", "/entries"])
async def test_what_is_not_there_is_404(books: Books, path: str) -> None:
    """F2."""
    assert refused(await books.get(f"/v1/accounts/{uuid4()}{path}"))[:2] == (404, "account-not-found")


@pytest.mark.parametrize("query", ["asOf=yesterday", "asOf=2026-01-01T00:00:00", "asOf=1e400"])
async def test_a_moment_that_is_none_is_refused(books: Books, query: str) -> None:
    """F2: also one without an offset, which every reader understands differently."""
    answer = await books.get(f"/v1/accounts/{await books.open()}/balance?{query}")
    assert refused(answer) == (422, "invalid", ["$.asOf"])


async def test_opening_with_a_key_twice_opens_once(books: Books, db: Database, dsn: str) -> None:
    """F1, E4."""
    key = {"Idempotency-Key": new_key()}
    body = {"name": "Cash", "type": "ASSET", "currency": "PLN"}
    first, second = [await books.send("/v1/accounts", body, **key) for _ in range(2)]
    assert first.content == second.content
    assert value(dsn, "SELECT count(*) FROM ledger.accounts") == 1
