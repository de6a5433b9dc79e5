"""Orders and their payments over HTTP (C2)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from apps.commerce.model import LAST_NET, PAYMENT_WINDOW
from duly.db import Database
from duly.testing import BusinessClock
from tests.apps.commerce.acting import (
    ITEMS,
    Customers,
    check_consistent,
    count,
    counting,
    events_of,
    made,
    new_key,
    statuses,
    timers_of,
)
from tests.support import rows, value

NOON = datetime(2033, 5, 4, 12, tzinfo=UTC)


async def test_placing_writes_order_payment_timers_and_event_in_one_commit(
    shop: Customers, dsn: str, clock: BusinessClock
) -> None:
    """C2: all of it, or nothing."""
    clock.freeze(NOON)
    answer = await shop.post("ann", "/v1/orders", {"currency": "PLN", "items": ITEMS})
    order = made(answer)
    assert answer.headers["location"] == f"/v1/orders/{order['id']}"
    assert order == {
        "id": order["id"], "status": "AWAITING_PAYMENT", "currency": "PLN", "total": "25.10",
        "items": [
            {"sku": "tea", "quantity": 2, "unitPrice": "12.50", "amount": "25.00"},
            {"sku": "cup", "quantity": 1, "unitPrice": "0.10", "amount": "0.10"},
        ],
        "payment": {"status": "PENDING", "dueAt": "2033-05-04T12:15:00Z", "settledAt": None},
        "createdAt": "2033-05-04T12:00:00Z", "updatedAt": "2033-05-04T12:00:00Z",
    }  # fmt: skip
    assert timers_of(dsn, order["id"]) == [
        ("PaymentTimeout", NOON + timedelta(minutes=15)), ("OrderExpiration", NOON + timedelta(hours=48))
    ]  # fmt: skip
    assert rows(dsn, "SELECT type, topic, aggregate_id, payload FROM duly.outbox") == [
        (
            "OrderPlaced", "order-events", order["id"],
            {
                "order_id": order["id"], "customer_id": "ann", "currency": "PLN", "total": "25.10",
                "payment_due_at": "2033-05-04T12:15:00+00:00",
            },
        )
    ]  # fmt: skip
    written = """
        SELECT xmin::text FROM commerce.orders UNION SELECT xmin::text FROM commerce.order_lines
        UNION SELECT xmin::text FROM commerce.payments UNION SELECT xmin::text FROM duly.jobs
        UNION SELECT xmin::text FROM duly.outbox"""
    assert len(rows(dsn, written)) == 1
    assert (await shop.get("ann", answer.headers["location"])).json() == order
    check_consistent(dsn)


async def test_paying_settles_order_and_payment_and_withdraws_both_timers(
    shop: Customers, dsn: str, clock: BusinessClock
) -> None:
    """C2: with its event, in one commit."""
    clock.freeze(NOON)
    order = await shop.place()
    other = await shop.place()
    clock.advance(minutes=7)
    answer = await shop.pay(order)
    assert answer.status_code == 200
    paid = answer.json()
    assert (paid["status"], paid["updatedAt"]) == ("PAID", "2033-05-04T12:07:00Z")
    assert paid["payment"] == {
        "status": "PAID", "dueAt": "2033-05-04T12:15:00Z", "settledAt": "2033-05-04T12:07:00Z"
    }  # fmt: skip
    assert (await shop.get("ann", f"/v1/orders/{order}")).json() == paid
    assert timers_of(dsn, order) == []
    assert len(timers_of(dsn, other)) == 2
    assert events_of(dsn, order) == ["OrderPlaced", "OrderPaid"]
    assert value(dsn, "SELECT payload FROM duly.outbox WHERE type = 'OrderPaid'") == {
        "order_id": order, "customer_id": "ann", "currency": "PLN", "total": "25.10",
        "paid_at": "2033-05-04T12:07:00+00:00",
    }  # fmt: skip
    check_consistent(dsn)


async def test_paying_twice_is_a_conflict(shop: Customers, dsn: str) -> None:
    """C2: and changes nothing."""
    order = await shop.place()
    await shop.pay(order)
    before = rows(dsn, "SELECT * FROM commerce.payments")
    answer = await shop.pay(order)
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:duly:problem:already-paid")
    assert rows(dsn, "SELECT * FROM commerce.payments") == before
    check_consistent(dsn)


async def test_an_order_can_be_paid_late_as_long_as_nothing_has_expired_it(
    shop: Customers, dsn: str, clock: BusinessClock
) -> None:
    """C2: half a second after its time, or an hour after it when no worker ran: the customer is welcome."""
    clock.freeze(NOON)
    half_a_second, an_hour = await shop.place(), await shop.place()
    clock.advance(minutes=15, milliseconds=500)
    assert (await shop.pay(half_a_second)).status_code == 200
    clock.advance(hours=1)
    assert (await shop.pay(an_hour)).status_code == 200
    check_consistent(dsn)


async def test_a_stranger_neither_reads_nor_pays(shop: Customers, dsn: str) -> None:
    """C2: as everywhere, 403 for what is somebody else's."""
    order = await shop.place("ann")
    for answer in (await shop.get("bob", f"/v1/orders/{order}"), await shop.pay(order, "bob")):
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:duly:problem:not-yours")
    answer = await shop.post("bob", f"/v1/orders/{order}/links")
    assert answer.status_code == 403
    assert (statuses(dsn, order), count(dsn, "commerce.order_links")) == (("AWAITING_PAYMENT", "PENDING"), 0)
    assert (await shop.get("bob", "/v1/orders")).json() == {"items": [], "next": None}


async def test_whose_it_is_counts_before_what_became_of_it(shop: Customers) -> None:
    """C2: a stranger does not learn that it was paid."""
    order = await shop.place("ann")
    await shop.pay(order)
    assert (await shop.pay(order, "bob")).status_code == 403


async def test_orders_are_listed_the_newest_first_in_pages(shop: Customers, dsn: str) -> None:
    """C2: one's own, by id."""
    orders = [await shop.place() for _ in range(5)]
    await shop.place("bob")
    await shop.pay(orders[1])
    seen: list[str] = []
    following = ""
    for size in (2, 2, 1):
        page = (await shop.get("ann", f"/v1/orders?limit=2{following}")).json()
        assert len(page["items"]) == size
        seen += [item["id"] for item in page["items"]]
        following = f"&before={page['next']}"
    assert page["next"] is None
    assert seen == orders[::-1]
    item = (await shop.get("ann", f"/v1/orders?limit=1&before={orders[2]}")).json()["items"][0]
    assert set(item) == {"id", "status", "currency", "total", "payment", "createdAt", "updatedAt"}
    assert (item["status"], item["payment"]["status"], item["total"]) == ("PAID", "PAID", "25.10")
    for query in ("limit=0", "limit=201", "before=yesterday"):
        assert (await shop.get("ann", f"/v1/orders?{query}")).status_code == 422


# -- money -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("currency", "price", "quantity", "total"),
    [
        ("PLN", "0.1", 3, "0.30"),
        ("PLN", 0.1, 3, "0.30"),
        ("PLN", 1, 10_000, "10000.00"),
        ("PLN", 1e2, 1, "100.00"),
        ("JPY", "1500", 2, "3000"),
        ("JPY", 1500.0, 2, "3000"),
        ("KWD", "0.005", 3, "0.015"),
        ("KWD", 0.005, 3, "0.015"),
        ("PLN", 123456789.01, 7, "864197523.07"),
        ("KWD", "999999999.999", 10_000, "9999999999990.000"),
    ],
)
async def test_amounts_are_exact_whether_text_or_number(
    shop: Customers, dsn: str, currency: str, price: Any, quantity: int, total: str
) -> None:
    """C2: a price of 0.1 is a tenth; answers are text in the currency's digits."""
    items = [{"sku": "x", "quantity": quantity, "unitPrice": price}]
    order = made(await shop.post("ann", "/v1/orders", {"currency": currency, "items": items}))
    assert order["total"] == total
    check_consistent(dsn)


async def test_the_largest_order_there_may_be_is_stored(shop: Customers, dsn: str) -> None:
    """C2: a hundred lines of the most of the dearest do not overflow."""
    items = [{"sku": f"s{n}", "quantity": 10_000, "unitPrice": "999999999.999"} for n in range(100)]
    order = made(await shop.post("ann", "/v1/orders", {"currency": "KWD", "items": items}))
    assert order["total"] == "999999999999000.000"
    assert len(order["items"]) == 100
    check_consistent(dsn)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ('{"currency": "PLN", "items": []}', "$.items"),
        ('{"currency": "PLN"}', "$.items"),
        ('{"currency": "XXX", "items": [ITEM]}', "$.currency"),
        ('{"currency": "pln", "items": [ITEM]}', "$.currency"),
        ('{"currency": "XDR", "items": [ITEM]}', "$.currency"),
        ('{"currency": 7, "items": [ITEM]}', "$.currency"),
        ('{"currency": "PLN", "items": [ITEM], "total": "1.00"}', "$.total"),
        ('{"currency": "PLN", "items": [ITEM], "customerId": "bob"}', "$.customerId"),
        ('{"currency": "PLN", "items": [{"sku": "a", "quantity": 0, "unitPrice": "1"}]}', "$.items[0].quantity"),
        ('{"currency": "PLN", "items": [{"sku": "a", "quantity": -1, "unitPrice": "1"}]}', "$.items[0].quantity"),
        ('{"currency": "PLN", "items": [{"sku": "a", "quantity": 10001, "unitPrice": "1"}]}', "$.items[0].quantity"),
        ('{"currency": "PLN", "items": [{"sku": "a", "quantity": "1", "unitPrice": "1"}]}', "$.items[0].quantity"),
        ('{"currency": "PLN", "items": [{"sku": "a", "quantity": 1.5, "unitPrice": "1"}]}', "$.items[0].quantity"),
        ('{"currency": "PLN", "items": [{"sku": "a", "quantity": true, "unitPrice": "1"}]}', "$.items[0].quantity"),
        ('{"currency": "PLN", "items": [{"sku": "", "quantity": 1, "unitPrice": "1"}]}', "$.items[0].sku"),
        ('{"currency": "PLN", "items": [{"sku": "a b", "quantity": 1, "unitPrice": "1"}]}', "$.items[0].sku"),
        ('{"currency": "PLN", "items": [{"sku": "../x", "quantity": 1, "unitPrice": "1"}]}', "$.items[0].sku"),
        ('{"currency": "PLN", "items": [{"sku": "a\\u0000", "quantity": 1, "unitPrice": "1"}]}', "$.items[0].sku"),
        ('{"currency": "PLN", "items": [PRICE:"0"]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:0]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:-0.0]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:"-1"]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:-1]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:"1.001"]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:1.001]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:0.10000001]}', "$.items[0].unitPrice"),
        ('{"currency": "JPY", "items": [PRICE:"1.5"]}', "$.items[0].unitPrice"),
        ('{"currency": "KWD", "items": [PRICE:"1.0001"]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:"1000000000"]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:1e300]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:1e-300]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:"1e3"]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:"NaN"]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:"1,50"]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:" 1.50"]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:"１.50"]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:true]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:null]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [PRICE:[1]]}', "$.items[0].unitPrice"),
        ('{"currency": "PLN", "items": [ITEM, ITEM, PRICE:"0.001"]}', "$.items[2].unitPrice"),
        ('{"currency": "PLN", "items": [' + ",".join(["ITEM"] * 101) + "]}", "$.items"),
    ],
)
async def test_what_cannot_be_ordered_is_422_and_says_where(shop: Customers, dsn: str, body: str, path: str) -> None:
    """C2, E5.5: nothing is written."""
    item = '{"sku": "a", "quantity": 1, "unitPrice": "1"}'
    body = body.replace("ITEM", item)
    if "PRICE:" in body:
        head, _, price = body.partition("PRICE:")
        body = head + '{"sku": "a", "quantity": 1, "unitPrice": ' + price[: -len("]}")] + "}]}"
    headers = shop.headers("ann") | {"Content-Type": "application/json"}
    answer = await shop.api.client.post("/v1/orders", content=body.encode(), headers=headers)
    assert answer.status_code == 422, answer.text
    assert path in [fault["path"] for fault in answer.json()["errors"]]
    assert (count(dsn, "commerce.orders"), count(dsn, "duly.jobs"), count(dsn, "duly.outbox")) == (0, 0, 0)


@pytest.mark.parametrize("path", ["/v1/orders/{}", "/v1/orders/{}/pay", "/v1/orders/{}/links"])
async def test_what_does_not_exist_is_404(shop: Customers, path: str) -> None:
    where = path.format(uuid4())
    answer = await (shop.get("ann", where) if path.endswith("{}") else shop.post("ann", where))
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:duly:problem:order-not-found")


# -- idempotency and statements --------------------------------------------------------------------------------------


async def test_the_same_key_gets_the_same_answer_and_one_effect(shop: Customers, dsn: str) -> None:
    """E4.2: for each route that changes something."""
    key = new_key()
    body = {"currency": "PLN", "items": ITEMS}
    first, again = [await shop.post("ann", "/v1/orders", body, **{"Idempotency-Key": key}) for _ in range(2)]
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (201, first.content, "true")
    order = first.json()["id"]
    paid, replayed = [await shop.pay(order, **{"Idempotency-Key": f"{key}-pay"}) for _ in range(2)]
    assert (paid.status_code, replayed.status_code, replayed.content) == (200, 200, paid.content)
    assert (count(dsn, "commerce.orders"), events_of(dsn, order)) == (1, ["OrderPlaced", "OrderPaid"])
    other = await shop.post("bob", "/v1/orders", body, **{"Idempotency-Key": key})
    assert other.json()["id"] != order, "another caller's key is another key"


@pytest.mark.parametrize(("step", "statements"), [("place", 4), ("pay", 6), ("read", 1), ("list", 1)])
async def test_each_request_sends_a_known_number_of_statements(
    shop: Customers, db: Database, step: str, statements: int
) -> None:
    """A gate: whoever adds a statement changes a number here. One of them asks for the transaction's id."""
    order = await shop.place()
    async with counting(db) as sent:
        match step:
            case "place":
                await shop.place(items=ITEMS * 20)
            case "pay":
                assert (await shop.pay(order)).status_code == 200
            case "read":
                assert (await shop.get("ann", f"/v1/orders/{order}")).status_code == 200
            case _:
                assert (await shop.get("ann", "/v1/orders")).status_code == 200
    assert len(sent) == statements, sent


# -- the schema ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("payments SET status = 'EXPIRED', settled_at = due_at - interval '1 microsecond'", "payments_expire_in_time"),
        ("payments SET status = 'PAID'", "payments_settling_is_whole"),
        ("payments SET settled_at = due_at", "payments_settling_is_whole"),
        ("payments SET due_at = due_at + interval '1 second'", "payments_window_is_kept"),
        ("payments SET status = 'REFUNDED', settled_at = due_at", "payments_status_is_known"),
        ("payments SET amount = 0", "payments_amount_is_positive"),
        ("payments SET order_id = gen_random_uuid()", "payments_order_exists"),
        ("orders SET status = 'LOST'", "orders_status_is_known"),
        ("orders SET total = -1", "orders_total_is_positive"),
        ("orders SET currency = 'zł'", "orders_currency_is_a_code"),
        ("orders SET customer_id = ''", "orders_customer_is_named"),
        ("orders SET updated_at = updated_at + interval '1 second'", "orders_waiting_is_unchanged"),
        ("order_lines SET quantity = 0", "order_lines_quantity_is_sane"),
        ("order_lines SET unit_price = 0", "order_lines_price_is_positive"),
        ("order_lines SET position = 101 WHERE position = 1", "order_lines_are_few"),
        ("order_lines SET sku = ''", "order_lines_sku_is_short"),
    ],
)
async def test_the_database_refuses_what_is_impossible(shop: Customers, dsn: str, change: str, constraint: str) -> None:
    """C2: also for somebody with psql."""
    await shop.place()
    with pytest.raises(psycopg.errors.IntegrityError) as refused:
        rows(dsn, f"UPDATE commerce.{change}")
    assert refused.value.diag.constraint_name == constraint


async def test_the_windows_are_what_the_model_says(shop: Customers, dsn: str) -> None:
    """C2: SQL writes them down a second time."""
    order = await shop.place()
    query = "SELECT due_at - created_at FROM commerce.payments WHERE order_id = %(id)s"
    assert value(dsn, query, {"id": UUID(order)}) == PAYMENT_WINDOW == timedelta(minutes=15)
    assert timedelta(hours=48) == LAST_NET
