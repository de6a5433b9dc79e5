"""The facts of commerce; the only door for other contexts."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from duly import EventBody

ORDERS = "order-events"
CARTS = "cart-events"


class OrderPlaced(EventBody, type="OrderPlaced", topic=ORDERS, aggregate="order_id"):
    """A customer wants this; ``total`` is a decimal in the digits of its currency."""

    order_id: UUID
    customer_id: str
    currency: str
    total: str
    payment_due_at: datetime


class OrderPaid(EventBody, type="OrderPaid", topic=ORDERS, aggregate="order_id"):
    """The customer has paid."""

    order_id: UUID
    customer_id: str
    currency: str
    total: str
    paid_at: datetime


class OrderExpired(EventBody, type="OrderExpired", topic=ORDERS, aggregate="order_id"):
    """Nobody paid in time; order and payment are closed."""

    order_id: UUID
    customer_id: str
    payment_due_at: datetime
    expired_at: datetime


class CartAbandoned(EventBody, type="CartAbandoned", topic=CARTS, aggregate="cart_id"):
    """Nobody touched the cart for a day."""

    cart_id: UUID
    customer_id: str
    touched_at: datetime
