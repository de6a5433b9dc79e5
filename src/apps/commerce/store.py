"""The tables of commerce, and every statement on them.

Locks are taken in one order: a customer, carts, then orders by id, then payments. Whoever holds an order's lock is
alone with its payment, so the later lock never waits for one of us.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import (
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    SmallInteger,
    Table,
    Text,
    Uuid,
    select,
    text,
)

from apps.commerce.model import Cart, CartStatus, Line, Order, OrderStatus, PaymentStatus
from duly import Tx

metadata = MetaData(schema="commerce")

orders = Table(
    "orders",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("customer_id", Text, nullable=False),
    Column("currency", Text, nullable=False),
    Column("total", Numeric(18, 3), nullable=False),
    Column("status", Text, nullable=False, server_default=text("'AWAITING_PAYMENT'")),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    CheckConstraint("length(customer_id) BETWEEN 1 AND 255", name="orders_customer_is_named"),
    CheckConstraint("currency ~ '^[A-Z]{3}$'", name="orders_currency_is_a_code"),
    CheckConstraint("total > 0", name="orders_total_is_positive"),
    CheckConstraint("status IN ('AWAITING_PAYMENT', 'PAID', 'EXPIRED')", name="orders_status_is_known"),
    CheckConstraint("status <> 'AWAITING_PAYMENT' OR updated_at = created_at", name="orders_waiting_is_unchanged"),
)
Index("orders_customer", orders.c.customer_id, orders.c.id)

order_lines = Table(
    "order_lines",
    metadata,
    Column("order_id", Uuid, primary_key=True),
    Column("position", SmallInteger, primary_key=True),
    Column("sku", Text, nullable=False),
    Column("quantity", Integer, nullable=False),
    Column("unit_price", Numeric(12, 3), nullable=False),
    ForeignKeyConstraint(["order_id"], ["commerce.orders.id"], name="order_lines_order_exists"),
    CheckConstraint("position BETWEEN 1 AND 100", name="order_lines_are_few"),
    CheckConstraint("length(sku) BETWEEN 1 AND 64", name="order_lines_sku_is_short"),
    CheckConstraint("quantity BETWEEN 1 AND 10000", name="order_lines_quantity_is_sane"),
    CheckConstraint("unit_price > 0", name="order_lines_price_is_positive"),
)

payments = Table(
    "payments",
    metadata,
    Column("order_id", Uuid, primary_key=True),
    Column("amount", Numeric(18, 3), nullable=False),
    Column("status", Text, nullable=False, server_default=text("'PENDING'")),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("due_at", DateTime(timezone=True), nullable=False),
    Column("settled_at", DateTime(timezone=True)),
    ForeignKeyConstraint(["order_id"], ["commerce.orders.id"], name="payments_order_exists"),
    CheckConstraint("amount > 0", name="payments_amount_is_positive"),
    CheckConstraint("status IN ('PENDING', 'PAID', 'EXPIRED')", name="payments_status_is_known"),
    CheckConstraint("due_at = created_at + interval '15 minutes'", name="payments_window_is_kept"),
    CheckConstraint("(status = 'PENDING') = (settled_at IS NULL)", name="payments_settling_is_whole"),
    CheckConstraint("status <> 'EXPIRED' OR settled_at >= due_at", name="payments_expire_in_time"),
)
Index("payments_due", payments.c.due_at, payments.c.order_id, postgresql_where=text("status = 'PENDING'"))

carts = Table(
    "carts",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("customer_id", Text, nullable=False),
    Column("currency", Text, nullable=False),
    Column("status", Text, nullable=False, server_default=text("'OPEN'")),
    Column("order_id", Uuid),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("touched_at", DateTime(timezone=True), nullable=False),
    Column("closed_at", DateTime(timezone=True)),
    ForeignKeyConstraint(["order_id"], ["commerce.orders.id"], name="carts_order_exists"),
    CheckConstraint("length(customer_id) BETWEEN 1 AND 255", name="carts_customer_is_named"),
    CheckConstraint("currency ~ '^[A-Z]{3}$'", name="carts_currency_is_a_code"),
    CheckConstraint("status IN ('OPEN', 'CHECKED_OUT', 'ABANDONED')", name="carts_status_is_known"),
    CheckConstraint("(status = 'OPEN') = (closed_at IS NULL)", name="carts_closing_is_whole"),
    CheckConstraint("(status = 'CHECKED_OUT') = (order_id IS NOT NULL)", name="carts_order_is_checked_out"),
    CheckConstraint(
        "status <> 'ABANDONED' OR closed_at >= touched_at + interval '24 hours'", name="carts_are_given_a_day"
    ),
)
Index("carts_open", carts.c.customer_id, postgresql_where=text("status = 'OPEN'"))
Index("carts_untouched", carts.c.touched_at, carts.c.id, postgresql_where=text("status = 'OPEN'"))
Index("carts_closed", carts.c.closed_at, carts.c.id, postgresql_where=text("status <> 'OPEN'"))

cart_items = Table(
    "cart_items",
    metadata,
    Column("cart_id", Uuid, primary_key=True),
    Column("sku", Text, primary_key=True),
    Column("quantity", Integer, nullable=False),
    Column("unit_price", Numeric(12, 3), nullable=False),
    ForeignKeyConstraint(["cart_id"], ["commerce.carts.id"], name="cart_items_cart_exists", ondelete="CASCADE"),
    CheckConstraint("length(sku) BETWEEN 1 AND 64", name="cart_items_sku_is_short"),
    CheckConstraint("quantity BETWEEN 1 AND 10000", name="cart_items_quantity_is_sane"),
    CheckConstraint("unit_price > 0", name="cart_items_price_is_positive"),
)

order_links = Table(
    "order_links",
    metadata,
    Column("token_sha256", LargeBinary, primary_key=True),
    Column("order_id", Uuid, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    ForeignKeyConstraint(["order_id"], ["commerce.orders.id"], name="order_links_order_exists"),
    CheckConstraint("octet_length(token_sha256) = 32", name="order_links_token_is_hashed"),
    CheckConstraint("expires_at = created_at + interval '7 days'", name="order_links_live_a_week"),
)
Index("order_links_order", order_links.c.order_id, order_links.c.expires_at)
Index("order_links_expired", order_links.c.expires_at)

# One statement, one moment: the order and its payment begin at the same instant.
INSERT_ORDER = text("""
WITH placed AS (
    INSERT INTO commerce.orders (id, customer_id, currency, total, created_at, updated_at)
    VALUES (:id, :customer_id, :currency, :total, duly.now(), duly.now())
    RETURNING *
), listed AS (
    INSERT INTO commerce.order_lines (order_id, position, sku, quantity, unit_price)
    SELECT placed.id, l.position, l.sku, l.quantity, l.unit_price
    FROM placed CROSS JOIN unnest(CAST(:skus AS text[]), CAST(:quantities AS integer[]),
                                  CAST(:unit_prices AS numeric[])) WITH ORDINALITY
                           AS l(sku, quantity, unit_price, position)
), asked AS (
    INSERT INTO commerce.payments (order_id, amount, created_at, due_at)
    SELECT id, total, created_at, created_at + interval '15 minutes' FROM placed
    RETURNING *
)
SELECT placed.*, asked.status AS payment_status, asked.due_at, asked.settled_at FROM placed CROSS JOIN asked
""")
FIND_ORDER = text("""
SELECT o.id, o.customer_id, o.currency, o.total, o.status, o.created_at, o.updated_at, p.status AS payment_status,
       p.due_at, p.settled_at, l.sku, l.quantity, l.unit_price, duly.now() AS now
FROM commerce.orders o
JOIN commerce.payments p ON p.order_id = o.id
JOIN commerce.order_lines l ON l.order_id = o.id
WHERE o.id = :id
ORDER BY l.position
""")
LOCK_ORDER = text("SELECT id FROM commerce.orders WHERE id = :id FOR NO KEY UPDATE")
# Who is locked is being paid, or expired by its own timer. The grace is for timers that are just about to fire.
LOCK_OVERDUE_ORDERS = text("""
SELECT o.id FROM commerce.orders o
WHERE o.id = ANY(ARRAY(SELECT p.order_id FROM commerce.payments p
                       WHERE p.status = 'PENDING' AND p.due_at < duly.now() - interval '1 minute'
                       ORDER BY p.due_at, p.order_id LIMIT :limit))
ORDER BY o.id FOR NO KEY UPDATE SKIP LOCKED
""")
# A statement of its own: its snapshot is younger than the locks, so what was settled while we waited is not touched.
SETTLE_ORDERS = text("""
WITH ended AS (
    UPDATE commerce.orders SET status = :status, updated_at = duly.now()
    WHERE id = ANY(CAST(:ids AS uuid[])) AND status = 'AWAITING_PAYMENT'
    RETURNING id, customer_id
)
UPDATE commerce.payments AS p SET status = :status, settled_at = duly.now()
FROM ended
WHERE p.order_id = ended.id AND p.order_id = ANY(CAST(:ids AS uuid[])) AND p.status = 'PENDING'
RETURNING p.order_id, ended.customer_id, p.due_at, p.settled_at
""")
# Unpaid ones along payments_due; of the others there is no index by status, so the newest are looked through.
LIST_UNPAID = text("""
SELECT o.*, p.status AS payment_status, p.due_at, p.settled_at
FROM commerce.payments p JOIN commerce.orders o ON o.id = p.order_id
WHERE p.status = 'PENDING' AND (p.due_at, p.order_id) > (CAST(:after_at AS timestamptz), CAST(:after_id AS uuid))
ORDER BY p.due_at, p.order_id LIMIT :limit
""")
LIST_NEWEST = text("""
SELECT o.*, p.status AS payment_status, p.due_at, p.settled_at
FROM commerce.orders o JOIN commerce.payments p ON p.order_id = o.id
WHERE o.id < CAST(:before AS uuid) ORDER BY o.id DESC LIMIT :limit
""")
LIST_OF_CUSTOMER = text("""
SELECT o.*, p.status AS payment_status, p.due_at, p.settled_at
FROM commerce.orders o JOIN commerce.payments p ON p.order_id = o.id
WHERE o.customer_id = :customer_id AND o.id < CAST(:before AS uuid) ORDER BY o.id DESC LIMIT :limit
""")
COUNT_UNPAID = text("""
SELECT count(*), count(*) FILTER (WHERE due_at <= duly.now())
FROM (SELECT due_at FROM commerce.payments WHERE status = 'PENDING' ORDER BY due_at, order_id LIMIT :cap) AS counted
""")
CANCEL_TIMERS = text("""
SELECT sum(duly.cancel(t.name, CAST(o.id AS text)))
FROM unnest(CAST(:ids AS uuid[])) AS o(id) CROSS JOIN unnest(CAST(:names AS text[])) AS t(name)
""")
# One after the other for each customer: the second counts what the first has opened.
LOCK_CUSTOMER = text("SELECT pg_advisory_xact_lock(hashtextextended('commerce.carts ' || :customer_id, 0))")
INSERT_CART = text("""
INSERT INTO commerce.carts (id, customer_id, currency, created_at, touched_at)
SELECT :id, :customer_id, :currency, duly.now(), duly.now()
WHERE (SELECT count(*) FROM commerce.carts WHERE customer_id = :customer_id AND status = 'OPEN') < :most
RETURNING *
""")
LOCK_CART = text("SELECT id FROM commerce.carts WHERE id = :id FOR NO KEY UPDATE")
FIND_CART = text("""
SELECT c.*, i.sku, i.quantity, i.unit_price
FROM commerce.carts c LEFT JOIN commerce.cart_items i ON i.cart_id = c.id
WHERE c.id = :id
ORDER BY i.sku
""")
# On a cart that we have locked, so the count is exact.
PUT_ITEM = text("""
INSERT INTO commerce.cart_items (cart_id, sku, quantity, unit_price)
SELECT :cart_id, :sku, :quantity, :unit_price
WHERE (SELECT count(*) FROM commerce.cart_items WHERE cart_id = :cart_id AND sku <> :sku) < :most
ON CONFLICT (cart_id, sku) DO UPDATE SET quantity = excluded.quantity, unit_price = excluded.unit_price
RETURNING sku
""")
REMOVE_ITEM = text("DELETE FROM commerce.cart_items WHERE cart_id = :cart_id AND sku = :sku")
TOUCH_CART = text("UPDATE commerce.carts SET touched_at = duly.now() WHERE id = :id")
CHECK_OUT_CART = text("""
UPDATE commerce.carts SET status = 'CHECKED_OUT', order_id = :order_id, closed_at = duly.now()
WHERE id = :id AND status = 'OPEN'
RETURNING id
""")
# Who is locked is being touched.
ABANDON_CARTS = text("""
UPDATE commerce.carts SET status = 'ABANDONED', closed_at = duly.now()
WHERE id = ANY(ARRAY(SELECT id FROM commerce.carts
                     WHERE status = 'OPEN' AND touched_at < duly.now() - interval '24 hours'
                     ORDER BY touched_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED))
RETURNING id, customer_id, touched_at
""")
FORGET_CARTS = text("""
WITH gone AS (
    DELETE FROM commerce.carts WHERE id = ANY(ARRAY(
        SELECT id FROM commerce.carts WHERE status <> 'OPEN' AND closed_at < duly.now() - make_interval(days => :days)
        ORDER BY closed_at, id LIMIT :limit))
    RETURNING 1
)
SELECT count(*) FROM gone
""")
# On an order that we have locked, so the count is exact.
INSERT_LINK = text("""
INSERT INTO commerce.order_links (token_sha256, order_id, created_at, expires_at)
SELECT :token_sha256, :order_id, duly.now(), duly.now() + interval '7 days'
WHERE (SELECT count(*) FROM commerce.order_links WHERE order_id = :order_id AND expires_at > duly.now()) < :most
RETURNING expires_at
""")
FIND_LINK = text("""
SELECT order_id FROM commerce.order_links WHERE token_sha256 = :token_sha256 AND expires_at > duly.now()
""")
FORGET_LINKS = text("""
WITH gone AS (
    DELETE FROM commerce.order_links WHERE token_sha256 = ANY(ARRAY(
        SELECT token_sha256 FROM commerce.order_links WHERE expires_at <= duly.now() ORDER BY expires_at LIMIT :limit))
    RETURNING 1
)
SELECT count(*) FROM gone
""")


@dataclass(frozen=True)
class Settled:
    """An order that was just paid, or has just expired."""

    order_id: UUID
    customer_id: str
    due_at: datetime
    settled_at: datetime


@dataclass(frozen=True)
class Abandoned:
    """A cart that was just given up."""

    id: UUID
    customer_id: str
    touched_at: datetime


# -- orders and payments ---------------------------------------------------------------------------------------------


async def insert_order(
    tx: Tx, *, order_id: UUID, customer_id: str, currency: str, total: Decimal, lines: Sequence[Line]
) -> Order:
    """Write a new one with its lines and its pending payment."""
    values = {"id": order_id, "customer_id": customer_id, "currency": currency, "total": total}
    listed = {
        "skus": [line.sku for line in lines],
        "quantities": [line.quantity for line in lines],
        "unit_prices": [line.unit_price for line in lines],
    }
    return _order((await tx.execute(INSERT_ORDER, values | listed)).mappings().one(), lines)


async def find_order(tx: Tx, order_id: UUID) -> tuple[Order, datetime] | None:
    """One by its id, and what time it is."""
    rows = (await tx.execute(FIND_ORDER, {"id": order_id})).mappings().all()
    return (_order(rows[0], _lines(rows)), rows[0]["now"]) if rows else None


async def list_unpaid(tx: Tx, *, after: tuple[datetime, UUID], limit: int) -> list[Order]:
    """What waits for its payment, the soonest due first; without lines."""
    found = await tx.execute(LIST_UNPAID, {"after_at": after[0], "after_id": after[1], "limit": limit})
    return [_order(row, ()) for row in found.mappings()]


async def list_newest(tx: Tx, *, customer_id: str | None, before: UUID, limit: int) -> list[Order]:
    """The newest first, of everybody or of one customer; without lines."""
    if customer_id is None:
        found = await tx.execute(LIST_NEWEST, {"before": before, "limit": limit})
    else:
        found = await tx.execute(LIST_OF_CUSTOMER, {"customer_id": customer_id, "before": before, "limit": limit})
    return [_order(row, ()) for row in found.mappings()]


async def count_unpaid(tx: Tx, *, cap: int) -> tuple[int, int]:
    """How many wait for their payment, and how many of these are overdue; counted no further than this."""
    counted = (await tx.execute(COUNT_UNPAID, {"cap": cap})).one()
    return counted[0], counted[1]


async def lock_order(tx: Tx, order_id: UUID) -> tuple[Order, datetime] | None:
    """Be alone with it until the transaction ends; as it is then, and what time that is."""
    locked = (await tx.execute(LOCK_ORDER, {"id": order_id})).scalar_one_or_none()
    return await find_order(tx, order_id) if locked else None  # read anew: its payment may have ended while we waited


async def list_orders(tx: Tx, *, customer_id: str, before: UUID | None, limit: int) -> list[Order]:
    """A customer's, the newest first, without their lines; ids are ordered by time."""
    paid = payments.c
    query = (
        select(orders, paid.status.label("payment_status"), paid.due_at, paid.settled_at)
        .join(payments, paid.order_id == orders.c.id)
        .where(orders.c.customer_id == customer_id)
        .order_by(orders.c.id.desc())
        .limit(limit)
    )
    if before is not None:
        query = query.where(orders.c.id < before)
    return [_order(row) for row in (await tx.execute(query)).mappings()]


async def lock_overdue_orders(tx: Tx, *, limit: int) -> list[UUID]:
    """Those whose payments are the longest overdue, and which nobody else has in hand."""
    return list((await tx.execute(LOCK_OVERDUE_ORDERS, {"limit": limit})).scalars())


async def settle_orders(tx: Tx, order_ids: Sequence[UUID], status: OrderStatus) -> list[Settled]:
    """End those of them that still wait, and their payments; the longest due first."""
    result = await tx.execute(SETTLE_ORDERS, {"ids": list(order_ids), "status": status.value})
    return sorted((Settled(**row) for row in result.mappings()), key=lambda one: (one.due_at, one.order_id))


async def cancel_timers(tx: Tx, order_ids: Sequence[UUID], names: Sequence[str]) -> None:
    """Withdraw what is pending of these jobs; one that runs already finds its order settled."""
    await tx.execute(CANCEL_TIMERS, {"ids": list(order_ids), "names": list(names)})


# -- carts -----------------------------------------------------------------------------------------------------------


async def insert_cart(tx: Tx, *, cart_id: UUID, customer_id: str, currency: str, most: int) -> Cart | None:
    """Write a new, empty one; None when the customer has as many open ones as one may have."""
    values = {"id": cart_id, "customer_id": customer_id, "currency": currency, "most": most}
    await tx.execute(LOCK_CUSTOMER, {"customer_id": customer_id})
    row = (await tx.execute(INSERT_CART, values)).mappings().one_or_none()
    return _cart(row) if row else None


async def find_cart(tx: Tx, cart_id: UUID) -> Cart | None:
    """One by its id."""
    rows = (await tx.execute(FIND_CART, {"id": cart_id})).mappings().all()
    return _cart(rows[0], _lines(rows)) if rows else None


async def lock_cart(tx: Tx, cart_id: UUID) -> Cart | None:
    """Be alone with it until the transaction ends."""
    locked = (await tx.execute(LOCK_CART, {"id": cart_id})).scalar_one_or_none()
    return await find_cart(tx, cart_id) if locked else None


async def put_item(tx: Tx, cart_id: UUID, line: Line, *, most: int) -> bool:
    """Add or change a line of a cart we have locked; False when there are too many others."""
    values = {"cart_id": cart_id, "sku": line.sku, "quantity": line.quantity, "unit_price": line.unit_price}
    return (await tx.execute(PUT_ITEM, {**values, "most": most})).one_or_none() is not None


async def remove_item(tx: Tx, cart_id: UUID, sku: str) -> None:
    """Take it out, if it is in."""
    await tx.execute(REMOVE_ITEM, {"cart_id": cart_id, "sku": sku})


async def touch_cart(tx: Tx, cart_id: UUID) -> None:
    """The customer was here."""
    await tx.execute(TOUCH_CART, {"id": cart_id})


async def check_out_cart(tx: Tx, cart_id: UUID, *, order_id: UUID) -> None:
    """It has become this order."""
    (await tx.execute(CHECK_OUT_CART, {"id": cart_id, "order_id": order_id})).one()  # open, and locked by us


async def abandon_carts(tx: Tx, *, limit: int) -> list[Abandoned]:
    """Close those that nobody touched for a day; the longest untouched first."""
    result = await tx.execute(ABANDON_CARTS, {"limit": limit})
    return sorted((Abandoned(**row) for row in result.mappings()), key=lambda one: (one.touched_at, one.id))


async def forget_carts(tx: Tx, *, days: int, limit: int) -> int:
    """Delete the oldest of those that were closed so long ago; how many."""
    gone: int = (await tx.execute(FORGET_CARTS, {"days": days, "limit": limit})).scalar_one()
    return gone


# -- links -----------------------------------------------------------------------------------------------------------


async def insert_link(tx: Tx, order_id: UUID, *, token_sha256: bytes, most: int) -> datetime | None:
    """Write the hash of a secret; until when it is valid, or None when the order has as many as it may have."""
    values = {"token_sha256": token_sha256, "order_id": order_id, "most": most}
    return (await tx.execute(INSERT_LINK, values)).scalar_one_or_none()


async def find_link(tx: Tx, token_sha256: bytes) -> UUID | None:
    """The order whose secret this is the hash of, while it is valid."""
    return (await tx.execute(FIND_LINK, {"token_sha256": token_sha256})).scalar_one_or_none()


async def forget_links(tx: Tx, *, limit: int) -> int:
    """Delete expired ones, the oldest first; how many."""
    gone: int = (await tx.execute(FORGET_LINKS, {"limit": limit})).scalar_one()
    return gone


def _lines(rows: Sequence[Mapping[Any, Any]]) -> tuple[Line, ...]:
    return tuple(Line(row["sku"], row["quantity"], row["unit_price"]) for row in rows if row["sku"] is not None)


def _order(row: Mapping[Any, Any], lines: Sequence[Line] = ()) -> Order:
    return Order(
        row["id"], row["customer_id"], row["currency"], row["total"], OrderStatus(row["status"]), row["created_at"],
        row["updated_at"], PaymentStatus(row["payment_status"]), row["due_at"], row["settled_at"], tuple(lines),
    )  # fmt: skip


def _cart(row: Mapping[Any, Any], lines: Sequence[Line] = ()) -> Cart:
    return Cart(
        row["id"], row["customer_id"], row["currency"], CartStatus(row["status"]), row["order_id"], row["created_at"],
        row["touched_at"], row["closed_at"], tuple(lines),
    )  # fmt: skip
