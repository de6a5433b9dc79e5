"""The facts of the miniature shop."""

from __future__ import annotations

from decimal import Decimal

from duly import EventBody


class OrderPlaced(EventBody, type="order.placed", topic="demo.orders", aggregate="order_id"):
    """Somebody ordered."""

    order_id: str
    amount: Decimal
    currency: str


class OrderExpired(EventBody, type="order.expired", topic="demo.orders", aggregate="order_id"):
    """Nobody paid in time."""

    order_id: str


class OrderPaid(EventBody, type="order.paid", topic="demo.orders", aggregate="order_id"):
    """The payment arrived before its timer."""

    order_id: str
