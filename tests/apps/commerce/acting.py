"""Customers who order, pay and let it be, over real HTTP; and what must be true of the database whatever they did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID

import httpx2
import psycopg

from apps.wiring import app
from duly.db import Database
from duly.testing import drain
from tests.apps.conftest import Api
from tests.apps.transfers.acting import counting, made, new_key, until_waiting
from tests.support import rows, value

__all__ = ["Customers", "check_consistent", "counting", "made", "new_key", "until_waiting"]

ITEMS = [{"sku": "tea", "quantity": 2, "unitPrice": "12.50"}, {"sku": "cup", "quantity": 1, "unitPrice": "0.10"}]
TIMERS = "name IN ('PaymentTimeout', 'OrderExpiration')"

# Each of these lists what is wrong; all of them are empty in a database that nobody can complain about.
INVARIANTS = {
    "an order and its payment disagree": """
        SELECT o.id, o.status, p.status FROM commerce.orders o LEFT JOIN commerce.payments p ON p.order_id = o.id
        WHERE p.status IS DISTINCT FROM CASE o.status WHEN 'AWAITING_PAYMENT' THEN 'PENDING' ELSE o.status END
           OR p.amount <> o.total OR p.created_at <> o.created_at
           OR (o.status <> 'AWAITING_PAYMENT' AND p.settled_at <> o.updated_at)""",
    "a total is not the sum of its lines": """
        SELECT o.id FROM commerce.orders o WHERE o.total <> (
            SELECT sum(l.quantity * l.unit_price) FROM commerce.order_lines l WHERE l.order_id = o.id)""",
    "an order has other events than its placing and its end": """
        SELECT o.id, o.status, e.types FROM commerce.orders o
        CROSS JOIN LATERAL (SELECT array_agg(l.type ORDER BY l.seq) AS types FROM duly.event_log l
                            WHERE l.aggregate_id = o.id::text AND l.topic = 'order-events') AS e
        WHERE e.types IS DISTINCT FROM CASE o.status
            WHEN 'AWAITING_PAYMENT' THEN ARRAY['OrderPlaced'] WHEN 'PAID' THEN ARRAY['OrderPlaced', 'OrderPaid']
            ELSE ARRAY['OrderPlaced', 'OrderExpired'] END""",
    "a settled order has a timer": f"""
        SELECT o.id, j.name FROM commerce.orders o JOIN duly.jobs j ON j.entity_id = o.id::text AND {TIMERS}
        WHERE o.status <> 'AWAITING_PAYMENT'""",
    "an order that waits has not its two timers": f"""
        SELECT o.id, t.found FROM commerce.orders o
        CROSS JOIN LATERAL (SELECT array_agg(j.name || ' ' || (j.due_at - o.created_at) ORDER BY j.name) AS found
                            FROM duly.jobs j WHERE j.entity_id = o.id::text AND {TIMERS}) AS t
        WHERE o.status = 'AWAITING_PAYMENT'
          AND t.found IS DISTINCT FROM ARRAY['OrderExpiration 2 days', 'PaymentTimeout 00:15:00']""",
    "a cart has other events than its end, or another order than its items": """
        SELECT c.id, c.status FROM commerce.carts c
        WHERE (SELECT count(*) FROM duly.event_log l WHERE l.aggregate_id = c.id::text AND l.type = 'CartAbandoned')
              <> CASE c.status WHEN 'ABANDONED' THEN 1 ELSE 0 END
           OR (c.status = 'CHECKED_OUT' AND EXISTS (
                (SELECT sku, quantity, unit_price FROM commerce.cart_items WHERE cart_id = c.id)
                EXCEPT (SELECT sku, quantity, unit_price FROM commerce.order_lines WHERE order_id = c.order_id)))""",
}


class Customers:
    """Calls of the API in somebody's name."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._headers: dict[str, dict[str, str]] = {}

    def headers(self, customer: str) -> dict[str, str]:
        """Signed once for each customer."""
        if customer not in self._headers:
            self._headers[customer] = self.api.headers(customer, "commerce")
        return self._headers[customer]

    async def get(self, customer: str, path: str) -> httpx2.Response:
        return await self.api.client.get(path, headers=self.headers(customer))

    async def post(self, customer: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        return await self.api.client.post(path, json=body, headers=self.headers(customer) | headers)

    async def put(self, customer: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        return await self.api.client.put(path, json=body, headers=self.headers(customer) | headers)

    async def place(self, customer: str = "ann", currency: str = "PLN", items: Any = None) -> str:
        """An order's id."""
        body = {"currency": currency, "items": items or ITEMS}
        return str(made(await self.post(customer, "/v1/orders", body))["id"])

    async def pay(self, order: str, customer: str = "ann", **headers: str) -> httpx2.Response:
        return await self.post(customer, f"/v1/orders/{order}/pay", **headers)

    async def open_cart(self, customer: str = "ann", currency: str = "PLN") -> str:
        """A cart's id."""
        return str(made(await self.post(customer, "/v1/carts", {"currency": currency}))["id"])

    async def fill_cart(self, cart: str, customer: str = "ann", **quantities: int) -> None:
        """So much of each, at 1.50."""
        for sku, quantity in quantities.items():
            body = {"quantity": quantity, "unitPrice": "1.50"}
            answer = await self.put(customer, f"/v1/carts/{cart}/items/{sku}", body)
            assert answer.status_code == 200, answer.text


def check_consistent(dsn: str) -> None:
    """C2, C3: orders, payments, events, timers and carts agree."""
    wrong = {rule: found for rule, query in INVARIANTS.items() if (found := rows(dsn, query))}
    assert not wrong, wrong


def statuses(dsn: str, order: UUID | str) -> tuple[str, str]:
    """Of the order and of its payment."""
    query = """
        SELECT o.status, p.status FROM commerce.orders o JOIN commerce.payments p ON p.order_id = o.id
        WHERE o.id = %(id)s"""
    found: tuple[str, str] = rows(dsn, query, {"id": order})[0]
    return found


def events_of(dsn: str, entity: UUID | str) -> list[str]:
    """The types of its events, in their order."""
    query = "SELECT type FROM duly.event_log WHERE aggregate_id = %(id)s ORDER BY seq"
    return [kind for (kind,) in rows(dsn, query, {"id": str(entity)})]


def timers_of(dsn: str, order: UUID | str) -> list[tuple[str, datetime]]:
    """The names and times of what waits for it."""
    query = "SELECT name, run_at FROM duly.jobs WHERE entity_id = %(id)s ORDER BY run_at"
    return rows(dsn, query, {"id": str(order)})


def runs_of(dsn: str, name: str) -> list[tuple[str, str | None]]:
    """Outcome and message of each run of a job, in their order."""
    query = "SELECT outcome, message FROM duly.executions WHERE name = %(name)s ORDER BY completed_at, lease_token"
    return rows(dsn, query, {"name": name})


async def run_job(db: Database, dsn: str, name: str) -> None:
    """As the scheduler would at its time, with everything else that is due."""
    rows(dsn, "SELECT duly.schedule(%(name)s)", {"name": name})
    await drain(db, app.handlers)


def fill(dsn: str, count: int, *, minutes: float = 20, timers: bool = False) -> list[UUID]:
    """Orders that were placed so long ago and still wait; without timers, as if those had been lost."""
    made_orders = rows(
        dsn,
        """
        WITH placed AS (
            INSERT INTO commerce.orders (id, customer_id, currency, total, created_at, updated_at)
            SELECT duly.uuid7(), 'ann', 'PLN', 25.10, at, at
            FROM generate_series(1, %(count)s) AS n
            CROSS JOIN LATERAL (SELECT duly.now() - make_interval(secs => %(seconds)s) - n * interval '1 ms') AS t(at)
            RETURNING *
        ), listed AS (
            INSERT INTO commerce.order_lines SELECT id, 1, 'tea', 1, total FROM placed
        ), asked AS (
            INSERT INTO commerce.payments (order_id, amount, created_at, due_at)
            SELECT id, total, created_at, created_at + interval '15 minutes' FROM placed
        ), told AS (
            SELECT duly.emit('OrderPlaced', 'order-events', id::text, jsonb_build_object('order_id', id)) FROM placed
        ), timed AS (
            SELECT duly.schedule('PaymentTimeout', id::text, created_at + interval '15 minutes'),
                   duly.schedule('OrderExpiration', id::text, created_at + interval '48 hours')
            FROM placed WHERE %(timers)s
        )
        SELECT id, created_at FROM placed CROSS JOIN (SELECT count(*) FROM told) AS a
        CROSS JOIN (SELECT count(*) FROM timed) AS b
        """,
        {"count": count, "seconds": minutes * 60, "timers": timers},
    )
    return [order for order, _ in sorted(made_orders, key=lambda row: (row[1], row[0]))]


@contextlib.contextmanager
def holding(dsn: str, *ids: UUID | str, table: str = "orders") -> Iterator[psycopg.Connection[Any]]:
    """Orders or carts that somebody else has locked; the lock ends with the block, or with a rollback."""
    with psycopg.connect(dsn) as rival:
        lock = f"SELECT 1 FROM commerce.{table} WHERE id = ANY(%s::uuid[]) ORDER BY id FOR NO KEY UPDATE"
        rival.execute(lock.encode(), [[str(one) for one in ids]])
        yield rival
        rival.rollback()


def count(dsn: str, table: str) -> int:
    return int(value(dsn, f"SELECT count(*) FROM {table}"))
