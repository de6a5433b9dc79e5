"""The use cases of commerce: each gets a transaction and never ends it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from uuid import UUID

from apps.commerce import store
from apps.commerce.events import CartAbandoned, OrderExpired, OrderPaid, OrderPlaced
from apps.commerce.model import (
    MOST_LINES,
    Cart,
    CartEmpty,
    CartFull,
    CartNotFound,
    Line,
    Link,
    LinkNotFound,
    Order,
    OrderNotFound,
    OrderStatus,
    PaymentStatus,
    TooManyCarts,
    TooManyLinks,
    check_lines,
)
from apps.shared import money
from duly import NewJob, Tx, emit, schedule_many
from duly.ids import uuid7

PAYMENT_TIMEOUT = "PaymentTimeout"
ORDER_EXPIRATION = "OrderExpiration"
TIMERS = (PAYMENT_TIMEOUT, ORDER_EXPIRATION)
SWEEP_LIMIT = 1_000  # in one commit
FORGET_LIMIT = 10_000  # in one commit
CARTS_KEPT_DAYS = 90
MOST_OPEN_CARTS = 20  # of one customer
MOST_LINKS = 20  # of one order
TOKEN_BYTES = 32
NOTHING_LEFT = timedelta(0)


@dataclass(frozen=True)
class Timeout:
    """What a timer found: the order, whether it expired just now, or how long it has to wait yet."""

    order: Order
    has_expired: bool = False
    wait: timedelta = NOTHING_LEFT


@dataclass(frozen=True)
class Sweep:
    """How many one commit dealt with, and whether there may be more."""

    count: int
    has_more: bool


# -- orders ----------------------------------------------------------------------------------------------------------


async def place_order(tx: Tx, *, customer: str, currency: str, lines: Sequence[Line]) -> Order:
    """An order that waits for its payment, and the two timers that end the wait (C2)."""
    total = check_lines(lines, currency)
    order = await store.insert_order(
        tx, order_id=uuid7(), customer_id=customer, currency=currency, total=total, lines=lines
    )
    await schedule_many(
        tx,
        [NewJob(PAYMENT_TIMEOUT, order.id, order.due_at), NewJob(ORDER_EXPIRATION, order.id, order.closes_at)],
    )
    await emit(
        tx,
        OrderPlaced(
            order_id=order.id, customer_id=customer, currency=currency, total=money.show(total, currency),
            payment_due_at=order.due_at,
        ),
    )  # fmt: skip
    return order


async def pay_order(tx: Tx, order_id: UUID, *, by: str) -> Order:
    """The customer pays; whoever locks the order first wins, the timer or we (C2)."""
    order, _ = await _lock(tx, order_id)
    order.check_customer(by)
    order.check_payable()
    [paid] = await store.settle_orders(tx, [order_id], OrderStatus.PAID)  # it waits, and nobody else can end it
    await store.cancel_timers(tx, [order_id], TIMERS)
    await emit(
        tx,
        OrderPaid(
            order_id=order_id, customer_id=by, currency=order.currency, total=money.show(order.total, order.currency),
            paid_at=paid.settled_at,
        ),
    )  # fmt: skip
    return replace(
        order, status=OrderStatus.PAID, payment_status=PaymentStatus.PAID, updated_at=paid.settled_at,
        settled_at=paid.settled_at,
    )  # fmt: skip


async def time_out_order(tx: Tx, order_id: UUID) -> Timeout:
    """A timer of this order has fired: expire what still waits for its payment, once (C2, C3)."""
    order, now = await _lock(tx, order_id)
    if order.is_settled:
        return Timeout(order)
    if now < order.due_at:
        return Timeout(order, wait=order.due_at - now)
    await _expire(tx, [order_id])
    return Timeout(order, has_expired=True)


async def expire_overdue(tx: Tx, *, limit: int = SWEEP_LIMIT) -> Sweep:
    """Expire what its timer should have expired; four statements however many there are (C3)."""
    locked = await store.lock_overdue_orders(tx, limit=limit)
    return Sweep(await _expire(tx, locked) if locked else 0, has_more=len(locked) == limit)


async def read_order(tx: Tx, order_id: UUID, *, by: str) -> Order:
    """For its customer."""
    order = await _read(tx, order_id)
    order.check_customer(by)
    return order


async def list_orders(
    tx: Tx, *, customer: str, before: UUID | None = None, limit: int = 50
) -> tuple[list[Order], UUID | None]:
    """A page of a customer's own, and where the next one begins."""
    found = await store.list_orders(tx, customer_id=customer, before=before, limit=limit + 1)
    page = found[:limit]
    return page, page[-1].id if len(found) > limit else None


# -- carts -----------------------------------------------------------------------------------------------------------


async def open_cart(tx: Tx, *, customer: str, currency: str) -> Cart:
    """An empty one."""
    cart = await store.insert_cart(tx, cart_id=uuid7(), customer_id=customer, currency=currency, most=MOST_OPEN_CARTS)
    if cart is None:
        raise TooManyCarts(f"{MOST_OPEN_CARTS} carts of yours are open: use one of them")
    return cart


async def put_item(tx: Tx, cart_id: UUID, line: Line, *, by: str) -> Cart:
    """So much of one thing at this price, whatever was in the cart of it before."""
    cart = await _lock_cart(tx, cart_id, by=by)
    fitted = replace(line, unit_price=money.fit(line.unit_price, cart.currency, path="$.unitPrice"))
    if not await store.put_item(tx, cart_id, fitted, most=MOST_LINES):
        raise CartFull(f"a cart has at most {MOST_LINES} different things")
    return await _touch(tx, cart_id)


async def remove_item(tx: Tx, cart_id: UUID, sku: str, *, by: str) -> Cart:
    """None of it, whatever was in the cart of it before."""
    await _lock_cart(tx, cart_id, by=by)
    await store.remove_item(tx, cart_id, sku)
    return await _touch(tx, cart_id)


async def check_out(tx: Tx, cart_id: UUID, *, by: str) -> Order:
    """The cart becomes an order, once."""
    cart = await _lock_cart(tx, cart_id, by=by)
    if not cart.lines:
        raise CartEmpty("put something into the cart first")
    order = await place_order(tx, customer=by, currency=cart.currency, lines=cart.lines)
    await store.check_out_cart(tx, cart_id, order_id=order.id)
    return order


async def read_cart(tx: Tx, cart_id: UUID, *, by: str) -> Cart:
    """For its customer."""
    return _check_cart(await store.find_cart(tx, cart_id), cart_id, by)


async def abandon_carts(tx: Tx, *, limit: int = SWEEP_LIMIT) -> Sweep:
    """Close what nobody touched for a day; two statements however many there are (C3)."""
    abandoned = await store.abandon_carts(tx, limit=limit)
    if abandoned:
        facts = [CartAbandoned(cart_id=c.id, customer_id=c.customer_id, touched_at=c.touched_at) for c in abandoned]
        await emit(tx, *facts)
    return Sweep(len(abandoned), has_more=len(abandoned) == limit)


async def forget_carts(tx: Tx, *, days: int = CARTS_KEPT_DAYS, limit: int = FORGET_LIMIT) -> Sweep:
    """Drop what was checked out or abandoned long ago."""
    gone = await store.forget_carts(tx, days=days, limit=limit)
    return Sweep(gone, has_more=gone == limit)


# -- links -----------------------------------------------------------------------------------------------------------


async def make_link(tx: Tx, order_id: UUID, *, by: str) -> Link:
    """A secret by which others may read the order for a week; it is shown here, and nowhere kept (C3)."""
    order, _ = await _lock(tx, order_id)  # whoever makes another one waits, and counts this one
    order.check_customer(by)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    expires_at = await store.insert_link(tx, order_id, token_sha256=_hash(token), most=MOST_LINKS)
    if expires_at is None:
        raise TooManyLinks(f"the order has {MOST_LINKS} links: wait until one expires")
    return Link(token, expires_at)


async def follow_link(tx: Tx, token: str) -> Order:
    """The order whose secret this is; what is expired, and what never was, are told alike."""
    order_id = await store.find_link(tx, _hash(token))
    if order_id is None:
        raise LinkNotFound("no link has this token, or it has expired")
    return await _read(tx, order_id)


async def forget_links(tx: Tx, *, limit: int = FORGET_LIMIT) -> Sweep:
    """Drop expired ones (C3)."""
    gone = await store.forget_links(tx, limit=limit)
    return Sweep(gone, has_more=gone == limit)


async def _read(tx: Tx, order_id: UUID) -> Order:
    found = await store.find_order(tx, order_id)
    if found is None:
        raise OrderNotFound(f"no order has the id {order_id}")
    return found[0]


async def _lock(tx: Tx, order_id: UUID) -> tuple[Order, datetime]:
    """Be alone with it until the transaction ends; and what time it is."""
    found = await store.lock_order(tx, order_id)
    if found is None:
        raise OrderNotFound(f"no order has the id {order_id}")
    return found


async def _expire(tx: Tx, order_ids: Sequence[UUID]) -> int:
    """Of orders that we have locked; three statements."""
    expired = await store.settle_orders(tx, order_ids, OrderStatus.EXPIRED)
    if expired:
        await store.cancel_timers(tx, [one.order_id for one in expired], TIMERS)
        facts = [
            OrderExpired(
                order_id=one.order_id, customer_id=one.customer_id, payment_due_at=one.due_at,
                expired_at=one.settled_at,
            )
            for one in expired
        ]  # fmt: skip
        await emit(tx, *facts)
    return len(expired)


async def _lock_cart(tx: Tx, cart_id: UUID, *, by: str) -> Cart:
    cart = _check_cart(await store.lock_cart(tx, cart_id), cart_id, by)
    cart.check_open()
    return cart


async def _touch(tx: Tx, cart_id: UUID) -> Cart:
    await store.touch_cart(tx, cart_id)
    cart = await store.find_cart(tx, cart_id)
    assert cart is not None, "it is locked"
    return cart


def _check_cart(cart: Cart | None, cart_id: UUID, by: str) -> Cart:
    if cart is None:
        raise CartNotFound(f"no cart has the id {cart_id}")
    cart.check_customer(by)
    return cart


def _hash(token: str) -> bytes:
    """Of a secret with 256 random bits: nothing slower is needed."""
    return hashlib.sha256(token.encode()).digest()
