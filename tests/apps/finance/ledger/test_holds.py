"""Holds: money set aside, paid in part or whole, let go, or expired; never spent twice."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from apps.finance.ledger import service
from apps.wiring import app
from duly.db import Database
from duly.testing import BusinessClock, drain
from tests.apps.finance.ledger.acting import Books, check_consistent, count, events_of, refused
from tests.apps.transfers.acting import made
from tests.support import rows, value

TIMERS = "SELECT count(*) FROM duly.jobs WHERE name = 'ledger.expire-hold'"


async def standing(books: Books, account: str) -> tuple[str, str, str]:
    """Balance, held, available."""
    found = await books.balance(account)
    return found["balance"], found["held"], found["available"]


async def test_what_is_held_is_not_available_and_not_gone(books: Books, dsn: str) -> None:
    """It is in the balance; nobody can post it, or hold it again."""
    account, shop = await books.open_with("10.00"), await books.open("LIABILITY")
    hold = await books.hold(account, "7.00")
    assert (hold["status"], hold["remaining"], hold["captured"]) == ("ACTIVE", "7.00", "0.00")
    assert await standing(books, account) == ("10.00", "7.00", "3.00")
    assert refused(await books.try_hold(account, "3.01")) == (409, "insufficient-funds", ["$.amount"])
    answer = await books.try_post(
        [{"accountId": account, "amount": "3.01", "direction": "DEBIT"},
         {"accountId": shop, "amount": "3.01", "direction": "CREDIT"}]
    )  # fmt: skip
    assert refused(answer)[:2] == (409, "insufficient-funds")
    await books.post(account, shop, "3.00")
    assert await standing(books, account) == ("7.00", "7.00", "0.00")
    assert value(dsn, TIMERS) == 1
    check_consistent(dsn)


async def test_a_hold_is_captured_whole_by_default(books: Books, dsn: str) -> None:
    account, shop = await books.open_with("10.00"), await books.open("LIABILITY")
    hold = await books.hold(account, "7.00")
    paid = made(await books.capture(hold["id"], shop))
    assert (paid["amount"], paid["holdId"]) == ("7.00", hold["id"])
    assert [one["direction"] for one in paid["entries"]] == ["DEBIT", "CREDIT"]
    assert await standing(books, account) == ("3.00", "0.00", "3.00")
    after = (await books.get(f"/v1/holds/{hold['id']}")).json()
    assert (after["status"], after["captured"], after["remaining"]) == ("CAPTURED", "7.00", "0.00")
    assert (events_of(dsn, hold["id"]), value(dsn, TIMERS)) == (["hold.placed", "hold.captured"], 0)
    check_consistent(dsn)


async def test_what_is_not_captured_is_let_go_or_kept_as_the_caller_says(books: Books, dsn: str) -> None:
    account, shop = await books.open_with("10.00"), await books.open("LIABILITY")
    hold = await books.hold(account, "7.00")
    made(await books.capture(hold["id"], shop, amount="2.00", final=False))
    assert await standing(books, account) == ("8.00", "5.00", "3.00")
    assert refused(await books.capture(hold["id"], shop, amount="5.01")) == (409, "hold-exceeded", ["$.amount"])
    made(await books.capture(hold["id"], shop, amount="1.00"))
    assert await standing(books, account) == ("7.00", "0.00", "7.00")
    assert refused(await books.capture(hold["id"], shop, amount="1.00"))[:2] == (409, "hold-ended")
    used_up = await books.hold(account, "7.00")
    made(await books.capture(used_up["id"], shop, amount="7.00", final=False))
    assert (await books.get(f"/v1/holds/{used_up['id']}")).json()["status"] == "CAPTURED"
    assert value(dsn, TIMERS) == 0
    check_consistent(dsn)


async def test_an_asset_is_captured_on_its_own_side(books: Books, dsn: str) -> None:
    """Credits lower an asset."""
    cash, bank, owner = await books.open("ASSET"), await books.open("ASSET"), await books.open("EQUITY")
    await books.post(cash, owner, "10.00")
    hold = await books.hold(cash, "4.00")
    paid = made(await books.capture(hold["id"], bank))
    assert [one["direction"] for one in paid["entries"]] == ["CREDIT", "DEBIT"]
    assert (await standing(books, cash), (await standing(books, bank))[0]) == (("6.00", "0.00", "6.00"), "4.00")
    check_consistent(dsn)


async def test_a_voided_hold_is_available_again(books: Books, dsn: str) -> None:
    account, shop = await books.open_with("10.00"), await books.open("LIABILITY")
    hold = await books.hold(account, "7.00")
    assert (await books.void(hold["id"])).json()["status"] == "VOIDED"
    assert await standing(books, account) == ("10.00", "0.00", "10.00")
    assert refused(await books.void(hold["id"]))[:2] == (409, "hold-ended")
    assert refused(await books.capture(hold["id"], shop))[:2] == (409, "hold-ended")
    assert (events_of(dsn, hold["id"]), value(dsn, TIMERS)) == (["hold.placed", "hold.voided"], 0)
    check_consistent(dsn)


async def test_a_hold_expires_by_its_timer_once(books: Books, db: Database, dsn: str, clock: BusinessClock) -> None:
    """After seven days, if nothing else was said; not a moment before."""
    account, shop = await books.open_with("10.00"), await books.open("LIABILITY")
    hold = await books.hold(account, "7.00")
    rows(dsn, "UPDATE duly.jobs SET run_at = duly.now() WHERE name = 'ledger.expire-hold'")  # a timer that is early
    await drain(db, app.handlers)
    assert (await books.get(f"/v1/holds/{hold['id']}")).json()["status"] == "ACTIVE"
    clock.advance(days=7, seconds=1)
    assert refused(await books.capture(hold["id"], shop))[:2] == (409, "hold-ended")  # its time is over, timer or not
    await drain(db, app.handlers)
    after = (await books.get(f"/v1/holds/{hold['id']}")).json()
    assert (after["status"], after["remaining"]) == ("EXPIRED", "0.00")
    assert await standing(books, account) == ("10.00", "0.00", "10.00")
    rows(dsn, "SELECT duly.schedule('ledger.expire-hold', %(id)s)", {"id": hold["id"]})
    await drain(db, app.handlers)
    assert events_of(dsn, hold["id"]) == ["hold.placed", "hold.expired"]
    assert value(dsn, "SELECT count(*) FROM duly.dead_letters") == 0
    check_consistent(dsn)


async def test_what_is_left_of_a_partly_captured_hold_expires(
    books: Books, db: Database, dsn: str, clock: BusinessClock
) -> None:
    account, shop = await books.open_with("10.00"), await books.open("LIABILITY")
    until = (clock.now() + timedelta(hours=1)).isoformat()
    hold = await books.hold(account, "7.00", expiresAt=until)
    made(await books.capture(hold["id"], shop, amount="2.00", final=False))
    clock.advance(hours=1, seconds=1)
    await drain(db, app.handlers)
    assert await standing(books, account) == ("8.00", "0.00", "8.00")
    [(payload,)] = rows(dsn, "SELECT payload FROM duly.event_log WHERE type = 'hold.expired'")
    assert payload["amount"] == "5.00"
    check_consistent(dsn)


async def test_a_hold_needs_money_that_is_there_even_where_the_account_may_go_negative(books: Books) -> None:
    """To set aside what is not there means nothing."""
    account = await books.open("LIABILITY")
    assert refused(await books.try_hold(account, "0.01"))[:2] == (409, "insufficient-funds")


async def test_what_is_no_hold_is_refused_with_its_path(books: Books, dsn: str, clock: BusinessClock) -> None:
    account = await books.open_with("10.00")
    await books.hold(account, "1.00", reference="used")
    late = (clock.now() + timedelta(days=91)).isoformat()
    cases: list[tuple[dict[str, Any], tuple[int, str, list[str]]]] = [
        ({"amount": 1}, (422, "invalid", ["$.amount"])),
        ({"amount": "0"}, (422, "invalid", ["$.amount"])),
        ({"amount": "1.001"}, (422, "bad-amount", ["$.amount"])),
        ({"reference": ""}, (422, "invalid", ["$.reference"])),
        ({"reference": "used"}, (409, "reference-taken", ["$.reference"])),
        ({"expiresAt": "2020-01-01T00:00:00Z"}, (422, "bad-hold", ["$.expiresAt"])),
        ({"expiresAt": "2030-01-01T00:00:00"}, (422, "invalid", ["$.expiresAt"])),
        ({"expiresAt": late}, (422, "bad-hold", ["$.expiresAt"])),
    ]
    for changed, expected in cases:
        body = {"amount": "1.00", "reference": str(uuid4()), **changed}
        assert refused(await books.send(f"/v1/accounts/{account}/holds", body)) == expected
    assert refused(await books.try_hold(str(uuid4()), "1.00"))[:2] == (404, "account-not-found")
    assert count(dsn, "ledger.holds") == 1
    check_consistent(dsn)


async def test_a_capture_that_cannot_be_is_refused_with_its_path(books: Books, dsn: str) -> None:
    account, euros = await books.open_with("10.00"), await books.open("LIABILITY", "EUR")
    closed = await books.open("LIABILITY")
    await books.send(f"/v1/accounts/{closed}/close")
    hold = (await books.hold(account, "5.00"))["id"]
    taken = (await books.post(await books.open(), account, "1.00", "taken"))["reference"]
    cases: list[tuple[dict[str, Any], tuple[int, str, list[str]]]] = [
        ({"toAccountId": str(uuid4())}, (422, "unknown-account", ["$.toAccountId"])),
        ({"toAccountId": euros}, (422, "mixed-currencies", ["$.toAccountId"])),
        ({"toAccountId": closed}, (409, "account-closed", ["$.toAccountId"])),
        ({"toAccountId": account}, (422, "bad-hold", ["$.toAccountId"])),
        ({"amount": "1.005"}, (422, "bad-amount", ["$.amount"])),
        ({"amount": 1.5}, (422, "invalid", ["$.amount"])),
        ({"reference": taken}, (409, "reference-taken", ["$.reference"])),
        ({"final": "no"}, (422, "invalid", ["$.final"])),
    ]
    shop = await books.open("LIABILITY")
    for changed, expected in cases:
        body = {"toAccountId": shop, "reference": str(uuid4()), **changed}
        assert refused(await books.send(f"/v1/holds/{hold}/capture", body)) == expected, changed
    for call in (books.capture(str(uuid4()), shop), books.void(str(uuid4())), books.get(f"/v1/holds/{uuid4()}")):
        assert refused(await call)[:2] == (404, "hold-not-found")
    assert (await books.balance(account))["held"] == "5.00"
    check_consistent(dsn)


async def test_ended_holds_are_forgotten_after_400_days(
    books: Books, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """What is still active stays, and so does what was posted."""
    account, shop = await books.open_with("10.00"), await books.open("LIABILITY")
    captured, voided = await books.hold(account, "1.00"), await books.hold(account, "1.00")
    made(await books.capture(captured["id"], shop))
    await books.void(voided["id"])
    clock.advance(days=399)
    until = (clock.now() + timedelta(days=30)).isoformat()
    active = await books.hold(account, "1.00", expiresAt=until)
    async with db.transaction() as tx:
        assert await service.forget_holds(tx) == 0
    clock.advance(days=2)
    async with db.transaction() as tx:
        assert await service.forget_holds(tx) == 2
    assert [one for (one,) in rows(dsn, "SELECT id FROM ledger.holds")] == [UUID(active["id"])]
    assert count(dsn, "ledger.transactions") == 2


@pytest.mark.parametrize("entity", ["x", "00000000-0000-7000-8000-000000000000"])
async def test_a_timer_about_nothing_does_nothing(db: Database, dsn: str, entity: str) -> None:
    rows(dsn, "SELECT duly.schedule('ledger.expire-hold', %(id)s, max_retries => 0::smallint)", {"id": entity})
    await drain(db, app.handlers)
    assert value(dsn, TIMERS) == 0
