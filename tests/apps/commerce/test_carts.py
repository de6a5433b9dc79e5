"""Carts that become orders or are abandoned, and secret links to orders (C3)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from apps.commerce import service
from apps.commerce.model import ABANDONED_AFTER, MOST_LINES
from apps.commerce.service import MOST_LINKS, MOST_OPEN_CARTS, SWEEP_LIMIT, Sweep
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.commerce.acting import (
    Customers,
    check_consistent,
    count,
    counting,
    events_of,
    holding,
    made,
    new_key,
    run_job,
    runs_of,
    statuses,
    until_waiting,
)
from tests.support import rows, value

NOON = datetime(2033, 5, 4, 12, tzinfo=UTC)
CART_STATUS = "SELECT status FROM commerce.carts WHERE id = %(id)s"
MAKE_CARTS = """
INSERT INTO commerce.carts (id, customer_id, currency, created_at, touched_at)
SELECT duly.uuid7(), 'c' || n, 'PLN', at, at FROM generate_series(1, %(count)s) AS n
CROSS JOIN LATERAL (SELECT duly.now() - make_interval(hours => %(hours)s) - n * interval '1 ms') AS t(at)
RETURNING id, touched_at
"""


def fill_carts(dsn: str, number: int, *, hours: int = 25) -> list[Any]:
    """Carts that nobody touched for so long, the longest untouched first."""
    return [cart for cart, _ in sorted(rows(dsn, MAKE_CARTS, {"count": number, "hours": hours}), key=lambda r: r[1])]


# -- filling and checking out ----------------------------------------------------------------------------------------


async def test_a_cart_is_filled_changed_and_emptied(shop: Customers, clock: BusinessClock) -> None:
    """C3: a PUT says what is in it from now on."""
    clock.freeze(NOON)
    answer = await shop.post("ann", "/v1/carts", {"currency": "PLN"})
    cart = made(answer)
    assert answer.headers["location"] == f"/v1/carts/{cart['id']}"
    assert cart == {
        "id": cart["id"], "status": "OPEN", "currency": "PLN", "total": "0.00", "items": [], "orderId": None,
        "createdAt": "2033-05-04T12:00:00Z", "touchedAt": "2033-05-04T12:00:00Z",
    }  # fmt: skip
    clock.advance(minutes=1)
    path = f"/v1/carts/{cart['id']}"
    await shop.put("ann", f"{path}/items/tea", {"quantity": 2, "unitPrice": 12.5})
    await shop.put("ann", f"{path}/items/tea", {"quantity": 3, "unitPrice": "12.40"})
    answer = await shop.put("ann", f"{path}/items/cup", {"quantity": 1, "unitPrice": "0.1"})
    assert answer.status_code == 200
    assert answer.json()["items"] == [
        {"sku": "cup", "quantity": 1, "unitPrice": "0.10", "amount": "0.10"},
        {"sku": "tea", "quantity": 3, "unitPrice": "12.40", "amount": "37.20"},
    ]
    assert (answer.json()["total"], answer.json()["touchedAt"]) == ("37.30", "2033-05-04T12:01:00Z")
    assert (await shop.get("ann", path)).json() == answer.json()
    clock.advance(minutes=1)
    for body in ({"quantity": 0}, {"quantity": 0, "unitPrice": "5"}):
        answer = await shop.put("ann", f"{path}/items/tea", body)
        assert (answer.status_code, [item["sku"] for item in answer.json()["items"]]) == (200, ["cup"])
    assert answer.json()["touchedAt"] == "2033-05-04T12:02:00Z", "who takes something out was here, too"


async def test_checking_out_makes_the_order_and_closes_the_cart_in_one_commit(shop: Customers, dsn: str) -> None:
    """C3: as if it had been ordered at once."""
    cart = await shop.open_cart()
    await shop.fill_cart(cart, tea=2, cup=1)
    answer = await shop.post("ann", f"/v1/carts/{cart}/checkout")
    order = made(answer)
    assert answer.headers["location"] == f"/v1/orders/{order['id']}"
    assert (order["status"], order["total"], order["payment"]["status"]) == ("AWAITING_PAYMENT", "4.50", "PENDING")
    shown = (await shop.get("ann", f"/v1/carts/{cart}")).json()
    assert (shown["status"], shown["orderId"]) == ("CHECKED_OUT", order["id"])
    same = "SELECT xmin::text FROM commerce.orders UNION SELECT xmin::text FROM commerce.carts"
    assert len(rows(dsn, same)) == 1
    check_consistent(dsn)


@pytest.mark.parametrize("close", ["checkout", "abandon"])
async def test_a_closed_cart_is_not_changed_any_more(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock, close: str
) -> None:
    """C3: a cart is checked out once."""
    cart = await shop.open_cart()
    await shop.fill_cart(cart, tea=1)
    if close == "checkout":
        await shop.post("ann", f"/v1/carts/{cart}/checkout")
    else:
        clock.advance(hours=25)
        await run_job(db, dsn, "CartAbandonment")
    orders = count(dsn, "commerce.orders")
    put = await shop.put("ann", f"/v1/carts/{cart}/items/tea", {"quantity": 2, "unitPrice": "1"})
    removed = await shop.put("ann", f"/v1/carts/{cart}/items/tea", {"quantity": 0})
    again = await shop.post("ann", f"/v1/carts/{cart}/checkout")
    for answer in (put, removed, again):
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:duly:problem:cart-closed")
    assert count(dsn, "commerce.orders") == orders
    check_consistent(dsn)


async def test_an_empty_cart_cannot_be_checked_out(shop: Customers, dsn: str) -> None:
    """C3."""
    cart = await shop.open_cart()
    answer = await shop.post("ann", f"/v1/carts/{cart}/checkout")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:duly:problem:cart-empty")
    assert (count(dsn, "commerce.orders"), value(dsn, CART_STATUS, {"id": cart})) == (0, "OPEN")


async def test_somebody_elses_cart_is_403_and_none_is_404(shop: Customers, dsn: str) -> None:
    """C3."""
    cart = await shop.open_cart("ann")
    item = {"quantity": 1, "unitPrice": "1"}
    for status, number in ((403, cart), (404, str(uuid4()))):
        path = f"/v1/carts/{number}"
        answers = [
            await shop.get("bob", path), await shop.put("bob", f"{path}/items/tea", item),
            await shop.put("bob", f"{path}/items/tea", {"quantity": 0}), await shop.post("bob", f"{path}/checkout"),
        ]  # fmt: skip
        assert [answer.status_code for answer in answers] == [status] * 4
    assert count(dsn, "commerce.cart_items") == 0


@pytest.mark.parametrize(
    ("sku", "body", "path"),
    [
        ("tea", {}, "$.quantity"),
        ("tea", {"quantity": 1}, "$"),
        ("tea", {"quantity": -1, "unitPrice": "1"}, "$.quantity"),
        ("tea", {"quantity": 10_001, "unitPrice": "1"}, "$.quantity"),
        ("tea", {"quantity": 1, "unitPrice": "0"}, "$.unitPrice"),
        ("tea", {"quantity": 1, "unitPrice": "1.005"}, "$.unitPrice"),
        ("tea", {"quantity": 1, "unitPrice": "1", "currency": "EUR"}, "$.currency"),
        ("a%20b", {"quantity": 1, "unitPrice": "1"}, "$.sku"),
        ("a%00", {"quantity": 1, "unitPrice": "1"}, "$.sku"),
        ("x" * 65, {"quantity": 1, "unitPrice": "1"}, "$.sku"),
    ],
)
async def test_what_cannot_be_put_is_422_and_says_where(
    shop: Customers, dsn: str, sku: str, body: Any, path: str
) -> None:
    """E5.5."""
    cart = await shop.open_cart()
    answer = await shop.put("ann", f"/v1/carts/{cart}/items/{sku}", body)
    assert answer.status_code == 422, answer.text
    assert path in [fault["path"] for fault in answer.json()["errors"]]
    assert count(dsn, "commerce.cart_items") == 0


async def test_a_cart_has_a_hundred_lines_at_most(shop: Customers, dsn: str) -> None:
    """A limit on everything; what is in it already can still be changed."""
    cart = await shop.open_cart()
    rows(
        dsn,
        "INSERT INTO commerce.cart_items SELECT %(id)s, 's' || n, 1, 1 FROM generate_series(1, %(count)s) AS n",
        {"id": cart, "count": MOST_LINES},
    )
    answer = await shop.put("ann", f"/v1/carts/{cart}/items/more", {"quantity": 1, "unitPrice": "1"})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:duly:problem:cart-full")
    answer = await shop.put("ann", f"/v1/carts/{cart}/items/s7", {"quantity": 5, "unitPrice": "1"})
    assert answer.status_code == 200
    assert (await shop.post("ann", f"/v1/carts/{cart}/checkout")).status_code == 201


async def test_a_customer_has_twenty_open_carts_at_most(shop: Customers) -> None:
    """A limit on everything; one that is closed makes room."""
    carts = [await shop.open_cart() for _ in range(MOST_OPEN_CARTS)]
    refused = await shop.post("ann", "/v1/carts", {"currency": "PLN"})
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:duly:problem:too-many-carts")
    await shop.open_cart("bob")
    await shop.fill_cart(carts[0], tea=1)
    await shop.post("ann", f"/v1/carts/{carts[0]}/checkout")
    await shop.open_cart()


async def test_keys_are_honoured_by_every_route_of_carts(shop: Customers, dsn: str) -> None:
    """E4.2."""
    key = {"Idempotency-Key": new_key()}
    first, again = [await shop.post("ann", "/v1/carts", {"currency": "PLN"}, **key) for _ in range(2)]
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
    cart = first.json()["id"]
    key = {"Idempotency-Key": new_key()}
    body = {"quantity": 2, "unitPrice": "1"}
    one, two = [await shop.put("ann", f"/v1/carts/{cart}/items/tea", body, **key) for _ in range(2)]
    assert (two.content, two.headers["idempotent-replayed"]) == (one.content, "true")
    key = {"Idempotency-Key": new_key()}
    order, replayed = [await shop.post("ann", f"/v1/carts/{cart}/checkout", **key) for _ in range(2)]
    assert (order.status_code, replayed.status_code, replayed.content) == (201, 201, order.content)
    assert count(dsn, "commerce.orders") == 1


async def test_checkouts_at_once_make_one_order(shop: Customers, dsn: str) -> None:
    """C3: everybody waits for the cart, and the others find it closed."""
    cart = await shop.open_cart()
    await shop.fill_cart(cart, tea=1)
    with holding(dsn, cart, table="carts"):
        racing = [asyncio.create_task(shop.post("ann", f"/v1/carts/{cart}/checkout")) for _ in range(6)]
        await until_waiting(dsn, len(racing))
    assert sorted(answer.status_code for answer in await asyncio.gather(*racing)) == [201] + [409] * 5
    assert count(dsn, "commerce.orders") == 1
    check_consistent(dsn)


async def test_a_line_that_is_being_put_is_in_the_order_or_refused(shop: Customers, db: Database, dsn: str) -> None:
    """C3: what a checkout orders is what the cart had when it was closed."""
    cart = await shop.open_cart()
    await shop.fill_cart(cart, tea=1)
    with holding(dsn, cart, table="carts"):
        putting = asyncio.create_task(shop.put("ann", f"/v1/carts/{cart}/items/cup", {"quantity": 1, "unitPrice": "9"}))
        await until_waiting(dsn, 1)
        ordering = asyncio.create_task(shop.post("ann", f"/v1/carts/{cart}/checkout"))
        await until_waiting(dsn, 2)
    put, order = await putting, await ordering
    assert (put.status_code, order.status_code) == (200, 201)
    assert order.json()["total"] == "10.50", "it waited first, so it is in"
    check_consistent(dsn)


# -- abandonment -----------------------------------------------------------------------------------------------------


async def test_carts_untouched_for_a_day_are_abandoned_and_told(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C3: to the moment; a touch starts the day anew."""
    clock.freeze(NOON)
    untouched, touched, ordered = [await shop.open_cart() for _ in range(3)]
    await shop.fill_cart(ordered, tea=1)
    await shop.post("ann", f"/v1/carts/{ordered}/checkout")
    clock.advance(hours=24)
    await shop.fill_cart(touched, tea=1)
    await run_job(db, dsn, "CartAbandonment")
    assert value(dsn, CART_STATUS, {"id": untouched}) == "OPEN", "a day is over when it is over"
    clock.advance(microseconds=1)
    await run_job(db, dsn, "CartAbandonment")
    found = [value(dsn, CART_STATUS, {"id": cart}) for cart in (untouched, touched, ordered)]
    assert found == ["ABANDONED", "OPEN", "CHECKED_OUT"]
    assert events_of(dsn, untouched) == ["CartAbandoned"]
    assert value(dsn, "SELECT payload FROM duly.event_log WHERE type = 'CartAbandoned'") == {
        "cart_id": untouched, "customer_id": "ann", "touched_at": "2033-05-04T12:00:00+00:00"
    }  # fmt: skip
    assert runs_of(dsn, "CartAbandonment")[-1] == ("done", "1 carts are abandoned")
    assert timedelta(hours=24) == ABANDONED_AFTER
    check_consistent(dsn)


@pytest.mark.parametrize(("due", "statements"), [(0, 1), (1, 2), (300, 2)])
async def test_abandoning_takes_two_statements_however_many_there_are(
    db: Database, dsn: str, due: int, statements: int
) -> None:
    """C3."""
    fill_carts(dsn, due)
    async with db.transaction(confirm=False) as tx, counting(db) as sent:
        assert await service.abandon_carts(tx) == Sweep(due, has_more=False)
    assert len(sent) == statements, sent
    check_consistent(dsn)


async def test_abandoning_is_bounded_oldest_first_and_goes_on_by_itself(db: Database, dsn: str) -> None:
    """C3."""
    carts = fill_carts(dsn, SWEEP_LIMIT + 5)
    async with db.transaction() as tx:
        assert await service.abandon_carts(tx, limit=3) == Sweep(3, has_more=True)
    told = rows(dsn, "SELECT aggregate_id::uuid FROM duly.outbox ORDER BY seq")
    assert [cart for (cart,) in told] == carts[:3]
    await run_job(db, dsn, "CartAbandonment")
    assert rows(dsn, "SELECT DISTINCT status FROM commerce.carts") == [("ABANDONED",)]
    assert len(runs_of(dsn, "CartAbandonment")) == 2
    check_consistent(dsn)


async def test_a_cart_that_is_being_touched_is_not_abandoned(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C3: neither while somebody has it in hand, nor after; and who comes too late is told."""
    cart, other = await shop.open_cart(), await shop.open_cart()
    clock.advance(hours=25)
    with holding(dsn, cart, table="carts"):
        touching = asyncio.create_task(
            shop.put("ann", f"/v1/carts/{cart}/items/tea", {"quantity": 1, "unitPrice": "1"})
        )
        await until_waiting(dsn, 1)
        async with asyncio.timeout(10), db.transaction() as tx:
            assert (await service.abandon_carts(tx)).count == 1
    assert (await touching).status_code == 200
    async with db.transaction() as tx:
        assert (await service.abandon_carts(tx)).count == 0
    assert value(dsn, CART_STATUS, {"id": other}) == "ABANDONED"
    check_consistent(dsn)


async def test_a_touch_that_waited_for_the_abandonment_is_refused(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C3: it decides after it has the lock."""
    cart = await shop.open_cart()
    clock.advance(hours=25)
    async with db.transaction() as tx:
        assert (await service.abandon_carts(tx)).count == 1
        touching = asyncio.create_task(
            shop.put("ann", f"/v1/carts/{cart}/items/tea", {"quantity": 1, "unitPrice": "1"})
        )
        await until_waiting(dsn, 1)
    assert (await touching).status_code == 409
    check_consistent(dsn)


async def test_closed_carts_are_forgotten_after_ninety_days_and_orders_are_kept(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """A retention for every table; the order of a cart is a record of its own."""
    ordered, abandoned = await shop.open_cart(), await shop.open_cart()
    await shop.fill_cart(ordered, tea=1, cup=2)
    await shop.post("ann", f"/v1/carts/{ordered}/checkout")
    clock.advance(hours=25)
    await run_job(db, dsn, "CartAbandonment")
    clock.advance(days=89)
    await run_job(db, dsn, "commerce.forget-carts")
    assert value(dsn, "SELECT array_agg(id::text) FROM commerce.carts") == [abandoned], "closed a day later"
    clock.advance(days=1, minutes=1)
    await run_job(db, dsn, "commerce.forget-carts")
    assert [count(dsn, f"commerce.{table}") for table in ("carts", "cart_items", "orders", "order_lines")] == [
        0,
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("carts SET status = 'ABANDONED', closed_at = touched_at + interval '23:59:59'", "carts_are_given_a_day"),
        ("carts SET status = 'CHECKED_OUT', closed_at = touched_at", "carts_order_is_checked_out"),
        ("carts SET closed_at = touched_at", "carts_closing_is_whole"),
        ("carts SET status = 'LOST', closed_at = touched_at", "carts_status_is_known"),
        ("cart_items SET quantity = 0", "cart_items_quantity_is_sane"),
        ("cart_items SET unit_price = -1", "cart_items_price_is_positive"),
    ],
)
async def test_the_database_refuses_what_is_impossible(shop: Customers, dsn: str, change: str, constraint: str) -> None:
    """C3: also for somebody with psql."""
    await shop.fill_cart(await shop.open_cart(), tea=1)
    with pytest.raises(psycopg.errors.IntegrityError) as refused:
        rows(dsn, f"UPDATE commerce.{change}")
    assert refused.value.diag.constraint_name == constraint


# -- links -----------------------------------------------------------------------------------------------------------


async def test_whoever_has_the_link_reads_the_order_for_a_week(shop: Customers, dsn: str, clock: BusinessClock) -> None:
    """C3: and nothing else; when it is over, it is as if it had never been."""
    clock.freeze(NOON)
    order = await shop.place("ann")
    answer = await shop.post("ann", f"/v1/orders/{order}/links")
    link = made(answer)
    assert (set(link), link["expiresAt"]) == ({"token", "expiresAt"}, "2033-05-11T12:00:00Z")
    assert answer.headers["cache-control"] == "no-store"
    clock.advance(days=7, microseconds=-1)
    read = await shop.get("bob", f"/v1/order-links/{link['token']}")
    assert (read.status_code, read.headers["cache-control"]) == (200, "no-store")
    assert read.json() == (await shop.get("ann", f"/v1/orders/{order}")).json()
    assert "ann" not in read.text
    assert (await shop.pay(order, "bob")).status_code == 403
    clock.advance(microseconds=1)
    expired = await shop.get("bob", f"/v1/order-links/{link['token']}")
    unknown = await shop.get("bob", f"/v1/order-links/{'x' * 43}")
    told = [{**answer.json(), "instance": ""} for answer in (expired, unknown)]
    assert told[0] == told[1]
    assert (expired.status_code, told[0]["type"]) == (404, "urn:duly:problem:link-not-found")
    assert statuses(dsn, order) == ("AWAITING_PAYMENT", "PENDING")


@pytest.mark.parametrize("token", ["x" * 200, "x" * 201, "%00", "%C3%A4", "..%2F", "'%20OR%201=1"])
async def test_any_token_is_404_or_422_and_never_an_accident(shop: Customers, token: str) -> None:
    """FAULTS."""
    answer = await shop.get("bob", f"/v1/order-links/{token}")
    assert answer.status_code in (404, 422)


async def test_the_secret_is_kept_nowhere_and_told_nowhere(
    shop: Customers, dsn: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """C3: neither in a table (its hash alone), nor in a log, nor in a problem; a key that is sent along is not used."""
    caplog.set_level(logging.DEBUG)
    order = await shop.place("ann")
    key = new_key()
    links = [made(await shop.post("ann", f"/v1/orders/{order}/links", **{"Idempotency-Key": key})) for _ in range(2)]
    tokens = [link["token"] for link in links]
    assert tokens[0] != tokens[1]
    assert min(map(len, tokens)) >= 43
    for token in (tokens[0], "y" * 43):
        answer = await shop.get("bob", f"/v1/order-links/{token}")
        assert answer.status_code in (200, 404)
        assert token not in answer.text
    hashes = {bytes(kept) for (kept,) in rows(dsn, "SELECT token_sha256 FROM commerce.order_links")}
    assert hashes == {hashlib.sha256(token.encode()).digest() for token in tokens}
    captured = capfd.readouterr()
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]  # not the client's
    everything = captured.out + captured.err + str(ours)
    assert "/v1/order-links/{token}" in everything, "the log was looked at"
    for table in rows(dsn, "SELECT schemaname, tablename FROM pg_tables WHERE schemaname IN ('commerce', 'duly')"):
        everything += str(rows(dsn, f"SELECT t::text FROM {table[0]}.{table[1]} AS t"))
    for token in tokens:
        assert token not in everything
        assert token.encode().hex() not in everything


async def test_an_order_has_twenty_links_at_most(shop: Customers, clock: BusinessClock) -> None:
    """A limit on everything; expired ones do not count."""
    order = await shop.place()
    for _ in range(MOST_LINKS):
        made(await shop.post("ann", f"/v1/orders/{order}/links"))
    refused = await shop.post("ann", f"/v1/orders/{order}/links")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:duly:problem:too-many-links")
    clock.advance(days=8)
    made(await shop.post("ann", f"/v1/orders/{order}/links"))


async def test_expired_tokens_are_deleted_within_bounds(
    shop: Customers, db: Database, dsn: str, clock: BusinessClock
) -> None:
    """C3: those that are valid stay."""
    order = await shop.place()
    for _ in range(5):
        made(await shop.post("ann", f"/v1/orders/{order}/links"))
    clock.advance(days=6)
    valid = made(await shop.post("ann", f"/v1/orders/{order}/links"))["token"]
    clock.advance(days=2)
    async with db.transaction() as tx:
        assert await service.forget_links(tx, limit=3) == Sweep(3, has_more=True)
    await run_job(db, dsn, "TokenCleanup")
    assert runs_of(dsn, "TokenCleanup") == [("done", "deleted 2 expired tokens")]
    assert (await shop.get("bob", f"/v1/order-links/{valid}")).status_code == 200
    assert count(dsn, "commerce.order_links") == 1


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("token_sha256 = 'secret'", "order_links_token_is_hashed"),
        ("expires_at = expires_at + interval '1 day'", "order_links_live_a_week"),
    ],
)
async def test_the_database_refuses_a_bare_secret_and_a_link_for_ever(
    shop: Customers, dsn: str, change: str, constraint: str
) -> None:
    """C3."""
    made(await shop.post("ann", f"/v1/orders/{await shop.place()}/links"))
    with pytest.raises(psycopg.errors.IntegrityError) as refused:
        rows(dsn, f"UPDATE commerce.order_links SET {change}")
    assert refused.value.diag.constraint_name == constraint


@pytest.mark.parametrize(
    ("step", "statements"),
    [("open", 3), ("put", 6), ("remove", 6), ("cart", 1), ("checkout", 7), ("link", 4), ("follow", 2)],
)
async def test_each_request_sends_a_known_number_of_statements(
    shop: Customers, db: Database, step: str, statements: int
) -> None:
    """A gate: whoever adds a statement changes a number here. One of them asks for the transaction's id."""
    cart, order = await shop.open_cart(), await shop.place()
    await shop.fill_cart(cart, tea=1, cup=1)
    token = made(await shop.post("ann", f"/v1/orders/{order}/links"))["token"]
    async with counting(db) as sent:
        match step:
            case "open":
                await shop.open_cart()
            case "put":
                await shop.fill_cart(cart, tea=5)
            case "remove":
                await shop.put("ann", f"/v1/carts/{cart}/items/tea", {"quantity": 0})
            case "cart":
                await shop.get("ann", f"/v1/carts/{cart}")
            case "checkout":
                made(await shop.post("ann", f"/v1/carts/{cart}/checkout"))
            case "link":
                made(await shop.post("ann", f"/v1/orders/{order}/links"))
            case _:
                assert (await shop.get("bob", f"/v1/order-links/{token}")).status_code == 200
    assert len(sent) == statements, sent
